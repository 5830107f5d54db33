"""Calls of every kind: ints, floats, flags, other shapes and dtypes, grad modes."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc

from .models import (
    EAGER,
    Attention,
    Given,
    Window,
    chain,
    close,
    graphs,
    pair,
    rope,
    runtime,
    same_caches,
    x,
    zeros,
)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


# -- ints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps",
    [
        range(30),
        [0, 1, 5, 5, 5, 4, 3, 900, 901, 2, 2, 0, 7, 1 << 30],
        [3] * 10,
        [1, 0, 1, 2, -1, -4, 0],
    ],
    ids=["up", "jumps", "same", "negative"],
)
def test_an_int_never_recompiles(steps):
    """tt-xla#5835: an int counter that recompiled in every step."""
    eager, model, compiled = pair()
    chain(eager, compiled, steps)
    same_caches(eager, model)
    assert graphs(compiled) == 1


def test_ints_by_keyword_and_a_default():
    class Model(Window):
        def forward(self, x, *, step=0, shift: int = 0):
            return self.attend(x, self.k, self.v, step + shift)

    eager, model, compiled = pair(Model)
    for kwargs in [
        {},
        {"step": 1},
        {"shift": 3, "step": 2},
        {"step": 4},
        {"step": 9, "shift": 1},
        {},
    ]:
        close(eager(x(0), **kwargs), compiled(x(0), **kwargs))
    for step in range(10):
        close(eager(x(step), step=step), compiled(x(step), step=step))
    same_caches(eager, model)
    assert graphs(compiled) <= 3  # one for each set of keywords


def test_ints_in_star_arguments():
    class Model(Window):
        def forward(self, x, *steps, **more):
            return self.attend(x, self.k, self.v, steps[0] + more["at"])

    eager, model, compiled = pair(Model)
    for step in range(12):
        close(eager(x(step), step, at=2 * step), compiled(x(step), step, at=2 * step))
    same_caches(eager, model)
    assert graphs(compiled) == 1


def test_an_int_kept_by_the_module():
    class Model(Window):
        step = 0

        def forward(self, x):
            self.step += 1
            return self.attend(x, self.k, self.v, self.step)

    eager, model, compiled = pair(Model)
    for call in range(15):
        close(eager(x(call)), compiled(x(call)))
        if call == 8:
            eager.step = model.step = 0
    same_caches(eager, model)
    assert eager.step == model.step
    assert graphs(compiled) <= 3  # a constant, a symbol, and the constant it was set back to


def test_an_int_that_sizes_a_slice():
    """It is taken as a constant; when it changes after all, that is right too."""

    class Model(Window):
        def forward(self, x, step, sink):
            q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
            for cache, new in ((self.k, k), (self.v, v)):
                cache[:, :, sink:-3] = cache[:, :, sink + 3 :].clone()
                cache[:, :, -3:] = new
            pos = torch.cat([torch.arange(sink), torch.arange(sink, 14) + 3 * step]).double()
            keys = rope(self.k, pos, self.freq)
            y = F.scaled_dot_product_attention(q, keys, self.v)
            return self.o(y.transpose(1, 2).flatten(2))

    eager, model, compiled = pair(Model)
    for step in range(24):
        sink = 2 if step < 12 else 5 if step < 18 else 1
        close(eager(x(step), step, sink), compiled(x(step), step, sink))
    same_caches(eager, model)


def test_a_float_that_changes():
    """A noise level, say. Dynamo hands it to the graph as a tensor and reads it back."""

    class Model(Window):
        def forward(self, x, step, sigma):
            return self.attend(x * sigma, self.k, self.v, step) / (1 + sigma)

    eager, model, compiled = pair(Model)
    for step in range(12):
        sigma = 1.0 / (1 + step % 4)
        close(eager(x(step), step, sigma), compiled(x(step), step, sigma))
    same_caches(eager, model)


def test_a_float_that_enters_the_read():
    class Model(Window):
        def forward(self, x, step, scale):
            q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
            self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
            self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
            y = F.scaled_dot_product_attention(q, self.k * scale * (1.0 + 0.01 * step), self.v)
            return self.o(y.transpose(1, 2).flatten(2))

    eager, model, compiled = pair(Model)
    for step in range(14):
        scale = [0.5, 0.5, 0.7, 0.5, 2.0][step % 5]
        close(eager(x(step), step, scale), compiled(x(step), step, scale))
    same_caches(eager, model)


def test_a_flag_chooses_between_two_graphs_on_one_state():
    """FastVideo#1660: evict and overwrite as separate graphs."""

    class Model(Window):
        def forward(self, x, step, first):
            q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
            for cache, new in ((self.k, k), (self.v, v)):
                if first:
                    cache[:, :, 2:-3] = cache[:, :, 5:].clone()
                cache[:, :, -3:] = new
            pos = torch.cat([torch.arange(2), torch.arange(2, 14) + 3 * step]).double()
            y = F.scaled_dot_product_attention(q, rope(self.k, pos, self.freq), self.v)
            return self.o(y.transpose(1, 2).flatten(2))

    eager, model, compiled = pair(Model)
    for call in range(24):
        close(eager(x(call), call // 4, call % 4 == 0), compiled(x(call), call // 4, call % 4 == 0))
    assert graphs(compiled) == 2
    assert runtime(compiled)["materializations"] == 0
    same_caches(eager, model)


# -- shapes and dtypes -----------------------------------------------------------------------------


def test_other_shapes_in_between():
    """The state serves them in the program's order, and takes over again."""
    eager, model, compiled = pair()
    for step, n in enumerate([3, 3, 3, 3, 1, 3, 3, 5, 3, 3, 1, 1, 3, 3, 3, 3]):
        close(eager(x(step, n), step), compiled(x(step, n), step))
        if step % 5 == 4:
            same_caches(eager, model)
    same_caches(eager, model)


def test_the_usual_shape_is_not_slowed_down_by_the_others():
    eager, _, compiled = pair()
    for step, n in enumerate([3, 1, 2, 4, 3, 3]):
        close(eager(x(step, n), step), compiled(x(step, n), step))
    before = runtime(compiled)["plain_calls"]
    imports = runtime(compiled)["imports"]
    chain(eager, compiled, range(10, 30))
    seen = runtime(compiled)
    assert seen["plain_calls"] == before
    assert seen["imports"] <= imports + 2  # back from the others; then once its sizes have settled
    assert seen["state_bytes"] > 0


def test_more_shapes_than_dynamo_compiles():
    """TensorRT-LLM#6142: after eight recompiles a model ran eagerly, and nobody was told."""
    eager, model, compiled = pair()
    try:
        for step, n in enumerate([3, 1, 2, 4, 5, 6, 7, 8, 9, 10, 3]):
            close(eager(x(step, n), step), compiled(x(step, n), step))
    except Exception as e:
        assert "recompile" in str(e).lower()  # loud is fine
        return
    same_caches(eager, model)


@pytest.mark.parametrize("slots", [11, 20])
def test_a_window_of_another_size(slots):
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    for m in (eager, model):
        m.k, m.v = (torch.zeros(1, 2, slots, 8, dtype=torch.float64) for _ in range(2))
    chain(eager, compiled, range(7, 14))
    same_caches(eager, model)


def test_another_dtype_in_the_middle_of_a_session():
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    for m in (eager, model):
        m.float()
    for step in range(7, 14):
        given = x(step, dtype=torch.float32)
        close(eager(given, step), compiled(given, step), 1e-5)
    close(eager.k, model.k, 1e-5)


def test_a_cache_of_another_dtype_is_an_error_or_right():
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    for m in (eager, model):
        m.k = m.k.float()
    try:
        expected = eager(x(7), 7)
    except Exception:
        with pytest.raises(Exception, match=r"(?i)dtype|type"):
            compiled(x(7), 7)
        return
    close(expected, compiled(x(7), 7), 1e-5)


# -- grad modes ------------------------------------------------------------------------------------

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


@pytest.mark.parametrize("mode", MODES)
def test_in_every_grad_mode(mode):
    eager, model, compiled = pair()
    assert model.o.weight.requires_grad
    for step in range(14):
        expected = eager(x(step), step)
        with MODES[mode]():
            got = compiled(x(step), step)
        assert not got.requires_grad
        close(expected, got.clone())
    same_caches(eager, model)
    assert not model.k.requires_grad


def test_modes_take_turns():
    eager, model, compiled = pair()
    for step in range(18):
        expected = eager(x(step), step)
        with list(MODES.values())[step % 3]():
            close(expected, compiled(x(step), step).clone())
        if step % 4 == 3:
            same_caches(eager, model)
    same_caches(eager, model)


def test_an_input_that_requires_grad():
    eager, _, compiled = pair()
    with torch.enable_grad():
        given = x(0).requires_grad_()
        close(eager(x(0), 0), compiled(given, 0))


@pytest.mark.parametrize("options", [EAGER, rtc.Options(lowering="eager", ring_cache=False)])
def test_inference_tensors_as_caches(options):
    with torch.inference_mode():
        eager, _, compiled = pair(Given, options)
        (k, v), (k2, v2) = (zeros(), zeros()), (zeros(), zeros())
        for step in range(20):
            close(eager(x(step), k, v, step), compiled(x(step), k2, v2, step))
            if step in (8, 9):
                for t in (k, k2):
                    t.zero_()
            if step == 13:
                for t in (v, v2):
                    t[:, :, 3:7] += 1.0
            if step % 6 == 5:
                close(k, k2)
        close(v, v2)


def test_a_weight_that_changes_between_calls():
    eager, model, compiled = pair()
    for step in range(15):
        chain(eager, compiled, [step])
        if step % 4 == 1:
            for m in (eager, model):
                m.qkv.weight.mul_(0.9)
                m.freq.mul_(1.05)
    same_caches(eager, model)


def test_outputs_belong_to_the_caller():
    """The published 96 % bug: call N's result changed when call N + 1 wrote a shared workspace."""
    eager, _, compiled = pair()
    kept = [(eager(x(s), s), compiled(x(s), s)) for s in range(12)]
    for expected, got in kept:
        close(expected, got)


def test_a_function_with_captured_caches():
    model = Attention()
    ours, theirs = [zeros(), zeros()], [zeros(), zeros()]

    def step_of(caches):
        return lambda x, step: model.attend(x, caches[0], caches[1], step)

    compiled = rtc.compile(step_of(theirs), options=EAGER)
    for step in range(10):
        close(step_of(ours)(x(step), step), compiled(x(step), step))
    close(ours[0], theirs[0])


def test_hooks_that_come_and_go_on_a_layer():
    eager, model, compiled = pair()
    hooks = []
    for step in range(12):
        for m in (eager, model):
            if step == 4:
                hooks.append(m.qkv.register_forward_hook(lambda m, a, out: out * 1.5))
            if step == 8:
                m.o.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
        if step == 8:
            for hook in hooks:
                hook.remove()
        close(eager(x(step), step), compiled(x(step), step))
    same_caches(eager, model)


def test_a_model_that_is_an_argument_has_attributes_like_any_other():
    class Plain(Window):
        def __init__(self):
            super().__init__()
            freq = self.freq
            del self.freq
            self.freq = freq.clone()  # neither a buffer nor a parameter

    eager, model, _ = pair(Plain)
    compiled = rtc.compile(lambda m, x, step: m(x, step), options=EAGER)
    for step in range(12):
        close(eager(x(step), step), compiled(model, x(step), step))
    graph = compiled.report().to_dict()["graphs"][-1]
    passes = {p["name"]: p for p in graph["passes"]}
    assert passes["hoist_rope"]["applied"] == passes["hoist_rope"]["matched"] > 0


def test_what_a_model_says_is_left_out(capsys, caplog):
    """A replayed step would not say it again either."""
    log = logging.getLogger("model")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("k", torch.zeros(1, 8, 4).double())

        def forward(self, x, step):
            print("step", step, f"of {x.shape}", x.shape, self.k)
            log.warning("step %d", step)
            logging.error("step %d", step)
            warnings.warn("step", stacklevel=2)
            self.k.copy_(torch.cat((self.k[:, 2:], x), 1))
            return self.k * step

    model = Model()
    eager, compiled = (
        copy.deepcopy(model),
        rtc.compile(model, options=rtc.Options(lowering="eager")),
    )
    for step in range(4):
        x = torch.randn(1, 2, 4).double()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = compiled(x, step)
        assert not capsys.readouterr().out
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
        with pytest.warns(UserWarning, match="step"):
            torch.testing.assert_close(got, eager(x, step), rtol=1e-9, atol=1e-9)
        caplog.clear()
        capsys.readouterr()


def test_a_model_that_torch_compile_gave_up():
    """A graph break in a loop makes torch.compile skip the function for good, in every compiler."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(2))
            self.register_buffer("k", torch.zeros(1, 8, 4).double())

        def forward(self, x, kv):
            more = [torch.tensor(3.0).double() for _ in range(2)]
            for layer in self.layers:
                x = layer(x) + (1 if kv["n"].item() > 3 else 0)
            self.k.copy_(torch.cat((self.k[:, 2:], x), 1))
            kv["n"].add_(1)
            return self.k * more[0]

    model = Model()
    eager, stock = copy.deepcopy(model), torch.compile(copy.deepcopy(model), backend="eager")
    compiled = rtc.compile(model, options=rtc.Options(lowering="eager"))
    caches = [{"n": torch.tensor(0)} for _ in range(3)]
    for _ in range(8):
        given = torch.randn(1, 2, 4).double()
        with torch.no_grad():
            want = eager(given, caches[0])
            torch.testing.assert_close(stock(given, caches[1]), want, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(compiled(given, caches[2]), want, rtol=1e-9, atol=1e-9)
    assert graphs(compiled) <= 2
