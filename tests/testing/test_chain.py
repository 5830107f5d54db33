"""check_chain: passes what is equal, and sees every kind of deliberately broken `compiled`."""

# mypy: no-check-untyped-defs
# A divergence may be None and a buffer is `Tensor | Module`: asserting either would say nothing.

import copy
import json

import pytest
import torch
from torch import nn

from rtc.testing import ChainError, check_chain, check_compile

H, D, T, S = 2, 8, 3, 12  # heads, head size, new slots, cache slots


class Attention(nn.Module):
    """Naive attention over a shifted window. [B=1, T, 6] -> [1, T, 6]."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.qkv = nn.Linear(6, 3 * H * D, dtype=dtype)
        self.out = nn.Linear(H * D, 6, dtype=dtype)
        self.register_buffer("k", torch.zeros(1, H, S, D, dtype=dtype))
        self.register_buffer("v", torch.zeros(1, H, S, D, dtype=dtype))

    def write(self, cache, new, step):
        cache.copy_(torch.cat([cache[:, :, T:], new], 2))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, T, 3, H, D).permute(2, 0, 3, 1, 4)
        self.write(self.k, k, step)
        self.write(self.v, v, step)
        y = nn.functional.scaled_dot_product_attention(q, self.k, self.v)
        return self.out(y.transpose(1, 2).reshape(1, T, H * D))


def inputs(step):
    return (torch.randn(1, T, 6, dtype=torch.float64),), {"step": step}


def pair(broken=None, dtype=torch.float64):
    """A model and its twin, whose methods in `broken` are replaced."""
    torch.manual_seed(0)
    model = Attention(dtype)
    twin = copy.deepcopy(model)
    for name, method in (broken or {}).items():
        setattr(twin, name, method.__get__(twin))
    return model, twin


def diverged(broken, **arguments):
    model, twin = pair(broken)
    with pytest.raises(ChainError) as caught:
        check_chain(model, twin, inputs, **{"steps": 20, **arguments})
    return caught.value.result


def test_equal_models_pass():
    result = check_chain(*pair(), inputs, steps=30, every=7)
    assert result
    assert result.worst == 0
    assert (len(result.errors), result.outputs, result.caches) == (30, 1, 2)
    looked = [e.step for e in result.errors if e.cache_abs is not None]
    assert looked == [6, 13, 20, 27, 29]
    assert (
        str(result)
        == "Attention (exact): 30 steps agree, largest error 0.000e+00 (1 outputs, 2 caches)"
    )
    assert json.loads(json.dumps(result.to_dict()))["passed"] is True


def test_a_wrong_output_names_step_index_and_values():
    def forward(self, x, step):
        out = Attention.forward(self, x, step)
        out[0, 1, 4] += 0.5 if step == 5 else 0
        return out

    found = diverged({"forward": forward}).divergence
    assert (found.step, found.where, found.path, found.index) == (5, "output", "output", (0, 1, 4))
    assert found.max_abs == pytest.approx(0.5)
    assert found.got == pytest.approx(found.expected + 0.5)
    assert found.agreed_until == 4


def test_a_wrong_slot_that_no_output_shows_is_found_in_the_cache():
    def forward(self, x, step):
        out = Attention.forward(self, x, step)
        if step == 9:
            self.k[:, :, 7] += 1e-3
        return out

    result = diverged({"forward": forward}, every=1)
    found = result.divergence
    assert (found.step, found.where, found.path) == (9, "cache", "cache['k']")
    assert (found.dim, found.slots, found.agreed_until) == (2, (7,), 8)
    text = str(result)
    assert "along dim 2: slot 7 is worst; 1 of 12 are wrong: 7" in text
    assert "caches last agreed at step 8" in text


def test_only_the_last_look_sees_an_unread_write():
    def forward(self, x, step):
        out = Attention.forward(self, x, step)
        if step == 19:
            self.v[:, :, :2] = 0
        return out

    found = diverged({"forward": forward}, every=0).divergence
    assert (found.step, found.path, found.slots) == (19, "cache['v']", (0, 1))
    assert found.agreed_until == -1
    assert "agreed before the first step" in str(found)


def test_output_and_caches_are_both_named_when_both_are_wrong():
    def write(self, cache, new, step):
        cache.copy_(torch.cat([cache[:, :, T:], new * (2 if step == 3 else 1)], 2))

    result = diverged({"write": write})
    assert (result.divergence.step, result.divergence.where) == (3, "output")
    assert result.cache_divergence.path in ("cache['k']", "cache['v']")
    assert result.cache_divergence.also
    assert "and the caches at step 3" in str(result)
    assert json.dumps(result.to_dict())


def test_a_compiled_that_gives_the_previous_result_is_seen():
    """The kind of the shared workspace that the next call overwrites."""

    def forward(self, x, step):
        out = Attention.forward(self, x, step)
        last, self.last = getattr(self, "last", out), out
        return last

    assert diverged({"forward": forward}).divergence.step == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda y: y.float(), "dtype of eager is torch.float64, of compiled torch.float32"),
        (lambda y: y[0], r"shape of eager is torch.Size\(\[1, 3, 6\]\)"),
        (lambda y: (y, y), r"structure differs: compiled lacks \['output'\]"),
        (lambda y: y * float("nan"), "values differ"),
        (lambda y: None, "eager gave a Tensor, compiled a NoneType"),
    ],
)
def test_what_cannot_be_compared_is_a_divergence(change, reason):
    result = diverged({"forward": lambda self, x, step: change(Attention.forward(self, x, step))})
    assert result.divergence.step == 0
    with pytest.raises(ChainError, match=reason):
        raise ChainError(result)


def test_integer_outputs_are_compared_exactly():
    found = check_chain(
        lambda step: torch.arange(4),
        lambda step: torch.arange(4) + (torch.arange(4) == 2) * (step == 3),
        lambda step: ((step,), {}),
        steps=5,
        check=False,
    ).divergence
    assert (found.step, found.index, found.expected, found.got) == (3, (2,), 2, 3)


def test_nan_in_eager_is_not_agreement():
    nan = pair({"forward": lambda self, x, step: x * float("nan")})[1]
    result = check_chain(nan, copy.deepcopy(nan), inputs, steps=2, check=False)
    assert "eager itself gave values that are not finite" in str(result)


def test_structured_outputs_are_named_by_path():
    model, twin = pair()
    found = check_chain(
        lambda x, step: {"a": [model(x, step)], "n": 1},
        lambda x, step: {"a": [twin(x, step) + 1], "n": 1},
        inputs,
        steps=2,
        check=False,
    ).divergence
    assert found.path == "output['a'][0]"


def with_state(x, kv, step):
    """A function whose cache is rebound in the caller's dict."""
    kv["k"] = torch.cat([kv["k"][:, T:], x], 1)
    kv["sum"].add_(x)
    return kv["k"].cumsum(1)


def test_state_held_by_the_caller():
    def state():
        zeros = torch.zeros(1, S, 6, dtype=torch.float64)
        return [{"k": zeros, "sum": torch.zeros(1, T, 6, dtype=torch.float64)}]

    def inputs(step, state):
        return (torch.randn(1, T, 6, dtype=torch.float64), state[0], step), {}

    def forgets(x, kv, step):
        out = with_state(x, kv, step)
        if step == 4:
            kv["sum"].sub_(x)
        return out

    assert check_chain(with_state, with_state, inputs, state=state, steps=20)
    result = check_chain(with_state, forgets, inputs, state=state, steps=20, every=1, check=False)
    assert result.divergence.path == "cache[0]['sum']"
    assert result.divergence.step == 4
    one = state()
    with pytest.raises(ValueError, match="compiled and eager share the memory of"):
        check_chain(with_state, with_state, inputs, state=lambda: one, steps=2)


def test_comparisons_that_would_mean_nothing_are_refused():
    model, twin = pair()
    with pytest.raises(ValueError, match="share the memory of"):
        check_chain(model, model, inputs, steps=2)
    with pytest.raises(ValueError, match="steps must be >= 1"):
        check_chain(model, twin, inputs, steps=0)
    with pytest.raises(ValueError, match="mode must be"):
        check_chain(model, twin, inputs, steps=1, mode="close")
    twin.k += 1
    with pytest.raises(ValueError, match="start from different caches"):
        check_chain(model, twin, inputs, steps=2)
    counter = iter(range(100))

    def irreproducible(step):
        return (torch.full((1, T, 6), next(counter), dtype=torch.float64),), {"step": step}

    with pytest.raises(ValueError, match=r"inputs\(0\) gave the two sides different values"):
        check_chain(*pair(), irreproducible, steps=1)


def test_exact_mode_takes_lower_precision_only_where_it_is_equal():
    def inputs(step):
        return (torch.randn(1, T, 6),), {"step": step}

    off = {"forward": lambda self, x, step: Attention.forward(self, x, step) * (1 + 1e-6)}
    assert check_chain(*pair(dtype=torch.float32), inputs, steps=2)
    with pytest.raises(ValueError, match=r"float64, but output is torch.float32 and differs"):
        check_chain(*pair(off, torch.float32), inputs, steps=1)


def test_global_random_state_is_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check_chain(*pair(), inputs, steps=3)  # pair() seeds, the chain must not
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), before)


class TestTolerance:
    """bfloat16 against eager's own error."""

    @staticmethod
    def inputs(step):
        return (torch.randn(1, T, 6).bfloat16(),), {"step": step}

    def run(self, broken=None, **arguments):
        model, twin = pair(broken, torch.bfloat16)
        arguments = {"steps": 40, "mode": "tolerance", "check": False, **arguments}
        return check_chain(model, twin, self.inputs, **arguments)

    def test_another_rounding_passes(self):
        def forward(self, x, step):
            """Attention in float32, rounded once at the end."""
            q, k, v = self.qkv(x).view(1, T, 3, H, D).permute(2, 0, 3, 1, 4)
            self.write(self.k, k, step)
            self.write(self.v, v, step)
            scores = q.float() @ self.k.float().transpose(-1, -2) * D**-0.5
            y = (scores.softmax(-1) @ self.v.float()).bfloat16()
            return self.out(y.transpose(1, 2).reshape(1, T, H * D))

        result = self.run({"forward": forward})
        assert result, str(result)
        assert all(e.eager_output_abs > 0 for e in result.errors)

    def test_a_small_real_error_fails(self):
        def forward(self, x, step):
            """The oldest slot is lost: less than 10 % of the output."""
            y = Attention.forward(self, x, step)
            if step == 30:
                self.k[:, :, 0] = 0
                self.v[:, :, 0] = 0
            return y

        assert self.run({"forward": forward}, every=0)  # shifted out of the window by then
        assert self.run({"forward": forward}, every=1).divergence.step == 30

    def test_eager_off_by_more_than_half_proves_nothing(self):
        model, twin = pair(dtype=torch.bfloat16)
        reference = copy.deepcopy(model).double()
        with torch.no_grad():
            reference.out.bias += 100
        with pytest.raises(ValueError, match="would mean nothing"):
            check_chain(model, twin, self.inputs, steps=2, mode="tolerance", reference=reference)

    def test_a_callable_needs_a_reference(self):
        with pytest.raises(ValueError, match="needs `reference`"):
            check_chain(lambda x: x, lambda x: x, self.inputs, steps=1, mode="tolerance")


class Owner:
    """A stand-in for a compiler that owns the caches and can be asked to write them back."""

    def __init__(self, model, writes_back=True):
        self.model, self.writes_back, self.closed = model, writes_back, False
        self.k = model.k.clone()

    def __call__(self, x, step):
        with torch.no_grad():
            self.model.k.copy_(self.k)
            out = self.model(x, step)
            self.k = self.model.k.clone()
            self.model.k.zero_()
        return out

    def materialize(self):
        if self.writes_back:
            self.model.k.copy_(self.k)

    def close(self):
        self.closed = True

    def __getattr__(self, name):
        return getattr(self.model, name)


def test_owned_state_is_asked_for_before_looking():
    assert check_compile(Attention, inputs, steps=10, compile=Owner)
    stale = check_compile(
        Attention, inputs, steps=10, compile=lambda m: Owner(m, writes_back=False), check=False
    )
    assert stale.divergence.path == "cache['k']"
    assert not check_compile(
        Attention, inputs, steps=10, compile=Owner, materialize=False, check=False
    )


def test_check_compile_closes_and_wants_a_reproducible_build():
    made = []

    def compile(model):
        made.append(Owner(model))
        return made[-1]

    def broken_inputs(step):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        check_compile(Attention, broken_inputs, steps=1, compile=compile)
    assert made[0].closed
    counter = iter(range(9))

    def irreproducible():
        model = Attention()
        with torch.no_grad():
            model.out.bias += next(counter)
        return model

    with pytest.raises(ValueError, match=r"build\(\) made two different models.*out.bias"):
        check_compile(irreproducible, inputs, steps=1, compile=compile)
    with pytest.raises(ValueError, match="give either"):
        check_compile(Attention, inputs, steps=1, compile=compile, options=object())


def test_under_torch_compile():
    def compile(model):
        return torch.compile(model, backend="aot_eager", fullgraph=True)

    assert check_compile(Attention, inputs, steps=5, compile=compile)
