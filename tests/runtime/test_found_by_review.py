"""Wrong once, or nearly: what reading the code found, in its smallest form."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import gc

import pytest
import torch
import torch.nn.functional as F

import rtc

from .models import EAGER, Attention, pair, rope, x

REPLAY = rtc.Options(lowering="eager", step_graph="simulate", warn=False)


class Base(Attention):
    """A window of fourteen slots; ``keys`` is what a subclass makes of them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k", torch.randn(1, 2, 14, 8).double())
        self.register_buffer("v", torch.randn(1, 2, 14, 8).double())

    def new(self, x):
        return self.qkv(x).view(1, x.shape[1], 3, 2, 8).permute(2, 0, 3, 1, 4)

    def write(self, k, v, sink=0):
        n = k.shape[2]
        for cache, new in ((self.k, k), (self.v, v)):
            kept = [cache[:, :, :sink], cache[:, :, sink + n :]]
            cache.copy_(torch.cat([*kept, new], 2))

    def out(self, y):
        return self.o(y.transpose(1, 2).flatten(2))

    def keys(self, step):
        return rope(self.k, (torch.arange(14) + 3 * step).double(), self.freq)

    def forward(self, x, step):
        q, k, v = self.new(x)
        self.write(k, v)
        return self.out(F.scaled_dot_product_attention(q, self.keys(step), self.v))


class EverySlotAnew(Base):
    """The second pass of a call holds nothing of the first: the frame must not start anew there."""

    def forward(self, x, step):
        pos = (torch.arange(14) + 3 * (step % 10)).double()
        outs = []
        for i, xx in enumerate((x, torch.cat([x, x, x, x, x], 1)[:, :14])):
            q, k, v = self.new(xx)
            n = k.shape[2]
            idx = (torch.arange(n) + (3 * step if i == 0 else 0)) % 14
            for cache, new in ((self.k, k), (self.v, v)):
                cache.index_copy_(2, idx, new)
            y = F.scaled_dot_product_attention(
                rope(q, pos[-n:], self.freq), rope(self.k, pos, self.freq), self.v
            )
            outs.append(self.out(y)[:, :3])
        return outs[0] + outs[1]


class CoarseTables(Base):
    """Each tenth call turns all slots by less than the tables' rounding: a fold would not see it."""

    dtype = torch.bfloat16

    def keys(self, step):
        pos = (torch.arange(14) + 3 * step - step // 10).double()
        ang = pos[:, None] * (self.freq * 0.045)
        cos, sin = ang.cos().to(self.dtype), ang.sin().to(self.dtype)
        a, b = self.k.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class HalfTables(CoarseTables):
    dtype = torch.float16


class HugeNeighbours(Base):
    """A masked slot's scale of 1e20 does not make other changes of that column small."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        self.write(k, v)
        pos = torch.arange(14) + 3 * step
        masked = (pos // 3 + step // 5) % 5 == 0
        scale = torch.where(masked, 1e20, 1 + (pos - 3 * (step // 5)).double() * 0.01)
        bias = torch.where(masked, -float("inf"), 0.0).double()
        keys = self.k * scale[:, None]
        return self.out(F.scaled_dot_product_attention(q, keys, self.v, attn_mask=bias[None]))


class FloatScale(Base):
    """A Python float made from the step is double precision."""

    def keys(self, step):
        return self.k * (1 + (step // 10) / 7)


class ScaledBase(Base):
    """One part of a table is narrow, another, of the same work, is not."""

    def keys(self, step):
        base = (torch.arange(14) + 3 * step).double()[:, None] * self.freq[:2]
        ang = torch.cat([base * (1 + step // 10), base], -1)
        a, b = self.k.chunk(2, -1)
        return torch.cat([a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()], -1)


class FloatOut(Base):
    def forward(self, x, step):
        return super().forward(x, step) + step / 7


MODELS = [
    EverySlotAnew, CoarseTables, HalfTables, HugeNeighbours, FloatScale, ScaledBase, FloatOut,
]  # fmt: skip


@pytest.mark.parametrize("options", [EAGER, REPLAY], ids=["call", "replay"])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_matches_eager(model, options):
    eager, _, compiled = pair(model, options)
    with torch.no_grad():
        for step in range(1, 32):
            want, have = eager(x(step), step), compiled(x(step), step)
            assert have.dtype == want.dtype
            torch.testing.assert_close(have, want, rtol=0, atol=1e-11)


class IntsTimesFloat(Base):
    def forward(self, x, ids, step):
        return super().forward(x, step), ids * (step / 7), ids + step


def test_a_lifted_number_leaves_dtypes_alone():
    eager, _, compiled = pair(IntsTimesFloat, REPLAY)
    with torch.no_grad():
        for step in range(1, 12):
            args = (x(step), torch.arange(5) + step % 3, step)
            for have, want in zip(compiled(*args), eager(*args), strict=True):
                assert have.dtype == want.dtype
                torch.testing.assert_close(have, want)


def test_an_expanded_input_is_replayed():
    eager, _, compiled = pair(Base, REPLAY)
    with torch.no_grad():
        for step in range(12):
            given = x(step, 1).expand(1, 3, 6)
            torch.testing.assert_close(compiled(given, step), eager(given, step))
    assert compiled.report().to_dict()["runtime"]["replays"] == 10


class Sink(Base):
    def forward(self, x, step):
        q, k, v = self.new(x)
        self.write(k, v, sink=2)
        pos = torch.cat([torch.arange(2), torch.arange(2, 14) + 3 * (step % 10)]).double()
        return self.out(F.scaled_dot_product_attention(q, rope(self.k, pos, self.freq), self.v))


def test_a_refresh_keeps_no_view_of_the_cache():
    """Else the cache would look shared, and its views would be made anew in every call."""
    eager, _, compiled = pair(Sink)
    gc.disable()
    try:
        with torch.no_grad():
            for step in range(30):
                torch.testing.assert_close(compiled(x(step), step), eager(x(step), step))
    finally:
        gc.enable()
    report = compiled.report().to_dict()["runtime"]
    assert not report["notes"]
    assert report["refreshed_slots"] < 30
