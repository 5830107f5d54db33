"""Results are the caller's own, as in eager: rtc keeps none of them, those that share memory share it
in replays, and attention under autocast has autocast's dtype."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc
from tests.runtime.models import SHAPE, Window, close, graphs, pair, rope, runtime, same_caches, x

leaves = torch.utils._pytree.tree_leaves


def options(**more):
    return rtc.Options(**{"lowering": "eager", "warn": False, **more})


REPLAY = options(step_graph="simulate")

# -- what follows from parameters alone ------------------------------------------------------------


def product(m):
    return m.embed.weight * m.embed.bias[:, None]


def with_view(m):
    a = product(m) * 2
    return a, a[1:].T


def two(m):
    a = product(m)
    return a, {"b": [a.exp()]}, a


# what is returned besides the frames; its first entry is also read by the model
FIXED = {
    "itself": lambda m: (product(m),),
    "a view": lambda m: (product(m)[:, :3].T.flatten(1).T,),
    "with a view": with_view,
    "several": two,
    "another dtype": lambda m: (m.embed.weight.float(),),
    "a weight": lambda m: (m.embed.weight,),
    "in pieces": lambda m: product(m).unbind(1),
    "from a buffer": lambda m: ((m.base + m.embed.weight).tanh(),),
}


class Embeds(Window):
    def __init__(self, fixed):
        super().__init__()
        self.fixed = fixed
        self.embed = nn.Linear(4, 6).double()
        self.register_buffer("base", torch.randn(6, 4).double())

    def forward(self, x, step):
        given = self.fixed(self)
        return super().forward(x + leaves(given)[0].reshape(6, -1)[:, 0].double(), step), given


@pytest.mark.parametrize(
    "how",
    [options(regions="on"), options(regions="on", step_graph="simulate")],
    ids=["regions", "replay"],
)
@pytest.mark.parametrize("fixed", FIXED)
def test_results_that_follow_from_parameters_alone(fixed, how):
    """The caller writes to some of them, and then the weights change: each is what eager's is."""
    with torch.no_grad():
        eager, twin, compiled = pair(lambda: Embeds(FIXED[fixed]), how)
        held = []
        for step in range(10):
            mine, its = leaves(eager(x(step), step)), leaves(compiled(x(step), step))
            held += zip(mine, its, strict=True)
            if step % 3 == 1:
                for a, b in zip(mine[1:], its[1:], strict=True):
                    a.mul_(1.5)
                    b.mul_(1.5)
            if step % 4 == 2:
                for m in (eager, twin):
                    m.embed.weight.mul_(1.1)
            for a, b in held:
                close(a, b)
        same_caches(eager, twin)
    assert graphs(compiled) == 1


# -- results that share memory ---------------------------------------------------------------------


def halves(y):
    z = y * 2
    return y, z, y[:, :1], z[:, 1:]


SHARED = {
    "a view": lambda y: (y, y[:, -1:]),
    "the view first": lambda y: (y[:, :2], y, y.transpose(1, 2)),
    "views alone": lambda y: (y[:, :2], y[:, 1:]),
    "every other": lambda y: (y[..., ::2], y[..., 1::2]),
    "in pieces": lambda y: y.unbind(1),
    "twice": lambda y: (y, y),
    "nested": lambda y: {"a": [y, (y[0],)], "b": y.flatten()},
    "two memories": halves,
    "expanded": lambda y: (y, y[:, :1].expand(-1, 4, -1)),
    "nothing of it": lambda y: (y, y[:, :0], y[:, 3:]),
    "integers": lambda y: (y, y.view(torch.int64)),
    "bytes": lambda y: (y[:, 1:], y.view(torch.uint8), y.view(torch.float32)[0]),
    "apart": lambda y: (y, y + 1, y.clone(), y * 1.0),
    "some apart": lambda y: (y, y[:, -1:], y + 1, y[0] + 2),
}


class Splits(Window):
    """Whole numbers above zero, so that they are the same to the bit, whatever they are seen as."""

    def __init__(self, results):
        super().__init__()
        self.results = results

    def forward(self, x, step):
        return self.results((super().forward(x, step) * 64).round() + 1000)


def memories(ts):
    """For each, the first one that has the same memory."""
    at = [t.untyped_storage().data_ptr() for t in ts]
    return [at.index(p) for p in at]


@pytest.mark.parametrize("results", SHARED)
def test_results_share_memory_in_replays_as_in_eager(results):
    with torch.no_grad():
        eager, twin, compiled = pair(lambda: Splits(SHARED[results]), REPLAY)
        held = []
        for step in range(7):
            mine, its = leaves(eager(x(step), step)), leaves(compiled(x(step), step))
            held += zip(mine, its, strict=True)
            if mine[1].numel():  # an empty one has no memory to share
                assert memories(mine) == memories(its)
            for i in range(len(mine)):
                assert its[i].dtype == mine[i].dtype
                if 0 not in mine[i].stride():
                    mine[i].add_(i + 1)
                    its[i].add_(i + 1)
                # nothing of an earlier call has changed either
                assert all(torch.equal(a, b) for a, b in held)
        same_caches(eager, twin)
    assert runtime(compiled)["replays"] >= 4


# -- attention under autocast ----------------------------------------------------------------------

BF16, FP16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def autocast(dtype=BF16, **more):
    return torch.autocast("cpu", dtype=dtype, **more)


class Cast(nn.Module):
    """Queries and keys are rotated in float32; then q, k, v get the dtypes of a case."""

    def __init__(self, dtypes, mask, where, **more):
        super().__init__()
        self.dtypes, self.mask, self.where, self.more = dtypes, mask, where, more
        self.qkv = nn.Linear(6, 48)
        self.register_buffer("freq", torch.tensor([1.0, 0.31, 0.1, 0.017]))
        self.register_buffer("k", torch.zeros(SHAPE))
        self.register_buffer("v", torch.zeros(SHAPE))
        if F64 in dtypes:
            self.double()

    def attend(self, q, k, v, step):
        q, k, v = (t.to(d) for t, d in zip((q, k, v), self.dtypes, strict=True))
        mask = None
        if self.mask is not None:
            mask = (0.1 * (torch.arange(14.0) - step)).expand(3, -1).to(self.mask)
        return F.scaled_dot_product_attention(q, k, v, mask, **self.more)

    def step(self, x, step):
        n = x.shape[1]
        q, k, v = self.qkv(x).view(1, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((self.k, k), (self.v, v)):
            cache.copy_(torch.cat([cache[:, :, n:], new], 2))
        pos = torch.arange(14).to(self.freq.dtype) + step
        q = rope(q.to(self.freq.dtype), pos[-n:], self.freq)
        k = rope(self.k, pos, self.freq)
        if self.where == "off within":
            with autocast(enabled=False):
                return self.attend(q, k, self.v, step)
        if self.where == "off and on within":
            with autocast(enabled=False), autocast():
                return self.attend(q, k, self.v, step)
        return self.attend(q, k, self.v, step)

    def forward(self, x, step):
        with autocast() if self.where == "inside" else contextlib.nullcontext():
            y = self.step(x, step)
        return y


# where autocast is, dtypes of q, k, v, and of a mask, more arguments, dtype of the result
CASES = {
    "around": ("around", (F32, F32, F32), None, {}, BF16),
    "around, all half": ("around", (BF16, BF16, BF16), None, {}, BF16),
    "around, mixed v": ("around", (F32, F32, BF16), None, {}, BF16),
    "around, mixed q": ("around", (BF16, F32, F32), None, {}, BF16),
    "around, three": ("around", (F32, BF16, FP16), None, {}, BF16),
    "around, a mask": ("around", (F32, F32, F32), F32, {}, BF16),
    "around, a bool mask": ("around", (F32, BF16, F32), torch.bool, {}, BF16),
    "around, float64": ("around", (F64, F64, F64), None, {}, F64),
    "around, causal": ("around", (F32, F32, F32), None, {"is_causal": True}, BF16),
    "around, scaled": ("around", (F32, F32, BF16), None, {"scale": 0.3, "enable_gqa": True}, BF16),
    "fp16": ("fp16", (F32, F32, BF16), None, {}, FP16),
    "inside": ("inside", (F32, F32, F32), None, {}, BF16),
    "inside, mixed, a mask": ("inside", (F32, BF16, F32), F32, {}, BF16),
    "inside, float64": ("inside", (F64, F64, F64), F64, {}, F64),
    "off within": ("off within", (F32, F32, F32), F32, {}, F32),
    "off and on within": ("off and on within", (F32, F32, BF16), F32, {}, BF16),
    "none": ("none", (F32, F32, F32), F32, {}, F32),
    "none, half": ("none", (BF16, BF16, BF16), None, {}, BF16),
}
CONTEXTS = {
    "fp16": lambda: autocast(FP16), "inside": contextlib.nullcontext, "none": contextlib.nullcontext,
}  # fmt: skip
# What sums a ring's rows in another order, or composes rotations, differs by roundings.
OFF = {"hoist_rope": False, "ring_cache": False, "hoist_quantize": False}
ROUNDING = {BF16: 2**-7, FP16: 2**-10, F32: 1e-6, F64: 1e-12}


def same_attention(case, compile, exact=True):
    where, dtypes, mask, more, dtype = CASES[case]
    torch.manual_seed(0)
    eager = Cast(dtypes, mask, where, **more)
    twin = copy.deepcopy(eager)
    compiled = compile(twin)
    with torch.no_grad(), CONTEXTS.get(where, autocast)():
        for step in range(8):
            given = x(step, dtype=F64 if F64 in dtypes else F32)
            want, got = eager(given, step), compiled(given, step)
            assert want.dtype == dtype
            close(want, got, 0 if exact else ROUNDING[dtype])
    close(eager.k, twin.k, 0)
    close(eager.v, twin.v, 0)


@pytest.mark.parametrize("case", CASES)
def test_attention_under_autocast_to_the_bit(case):
    same_attention(case, lambda model: rtc.compile(model, options=options(**OFF)))


@pytest.mark.parametrize(
    "case",
    ["around, mixed v", "around, float64", "inside, mixed, a mask", "off and on within", "none"],
)
def test_attention_under_autocast_by_the_backend(case):
    by = {"backend": "rtc", "options": {"lowering": "eager", **OFF}}
    same_attention(case, lambda model: torch.compile(model, **by))


@pytest.mark.parametrize("case", ["around", "around, mixed v", "inside", "around, float64"])
def test_attention_under_autocast_with_views_of_the_keys(case):
    same_attention(case, lambda model: rtc.compile(model, options=REPLAY), exact=False)


def test_one_model_with_and_without_autocast():
    """In turns: each way has a graph of its own."""
    torch.manual_seed(0)
    eager = Cast((F32, F32, F32), F32, "around")
    twin = copy.deepcopy(eager)
    compiled = rtc.compile(twin, options=options())
    with torch.no_grad():
        for step in range(12):
            with autocast(enabled=step % 3 == 0):
                want, got = eager(x(step, dtype=F32), step), compiled(x(step, dtype=F32), step)
            assert want.dtype == (F32 if step % 3 else BF16)
            close(want, got, ROUNDING[want.dtype])
    assert graphs(compiled) == 2
