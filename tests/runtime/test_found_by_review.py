"""Wrong once, or nearly: what reading the code found, in its smallest form."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
import gc
import threading
import time

import pytest
import torch
import torch.nn.functional as F

import rtc
from rtc.runtime import guard
from rtc.runtime.graph import GraphRuntime
from rtc.runtime.prepare import CohortRuntime
from rtc.runtime.refresh import Refresher

from .models import EAGER, Attention, pair, rope, x
from .test_found_by_audit import Pipeline

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


class PingPong(Attention):
    """Two windows that go on at different rates: two cohorts that are laid out alike."""

    def one(self, x, k, v, n):
        q, a, b = self.qkv(x).view(1, x.shape[1], 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((k, a), (v, b)):
            cache.copy_(torch.cat([cache[:, :, n:], new[:, :, :n]], 2))
        keys = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return self.o(F.scaled_dot_product_attention(q, keys, v).transpose(1, 2).flatten(2))

    def forward(self, x, a, b, step):
        return self.one(x, *a, 3) + self.one(x, *b, 2) * 0.5


@pytest.mark.parametrize("options", [EAGER, REPLAY], ids=["call", "replay"])
def test_caches_of_two_cohorts_may_change_places(options):
    eager, _, compiled = pair(PingPong, options)
    sides = [[torch.randn(1, 2, 14, 8).double() for _ in range(4)]]
    sides.append([c.clone() for c in sides[0]])
    with torch.no_grad():
        for step in range(60):
            (a, b), (c, d) = (
                [s[:2], s[2:]] if step % 7 < 4 else [s[2:], s[:2]] for s in sides
            )  # fmt: skip
            have, want = compiled(x(step), c, d, step), eager(x(step), a, b, step)
            torch.testing.assert_close(have, want, rtol=0, atol=1e-11)
    compiled.materialize()
    for have, want in zip(*sides, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-11)


class Jumping(Base):
    """A sink of two; positions of the others begin where the caller says."""

    def forward(self, x, step, start):
        q, k, v = self.new(x)
        self.write(k, v, sink=2)
        pos = torch.cat([torch.arange(2), torch.arange(2, 14) + 3 * (step - start)]).double()
        q = rope(q, pos[-x.shape[1] :], self.freq)
        return self.out(F.scaled_dot_product_attention(q, rope(self.k, pos, self.freq), self.v))


@pytest.mark.parametrize("options", [EAGER, REPLAY], ids=["call", "replay"])
def test_a_refresh_that_dies_leaves_no_view_half_made(options, monkeypatch):
    """Ctrl-C (or no memory) at a position reset, and the caller goes on without the reset."""
    eager, _, compiled = pair(Jumping, options)
    run = Refresher.run

    def die(self, *args):
        run(self, *args)
        raise KeyboardInterrupt

    with torch.no_grad():
        for step in range(14):
            args = x(step), step, step // 10 * 10
            torch.testing.assert_close(compiled(*args), eager(*args))
        with monkeypatch.context() as m:
            m.setattr(Refresher, "run", die)
            with pytest.raises(KeyboardInterrupt):
                compiled(x(14), 14, 14)
        for step in range(14, 30):
            args = x(step), step, 10
            torch.testing.assert_close(compiled(*args), eager(*args), rtol=0, atol=1e-11)


class Divides(Sink):
    def forward(self, x, step, left):
        return super().forward(x, step + 60 // left)


@pytest.mark.parametrize("options", [EAGER, REPLAY], ids=["call", "replay"])
def test_a_look_ahead_to_ints_that_never_come_raises_nothing(options):
    """Every int goes on by one in the rehearsal: this one to zero, by which nothing divides."""
    eager, _, compiled = pair(Divides, options)
    with torch.no_grad():
        for step in range(20):
            args = x(step), step, -2 if step < 10 else 2
            torch.testing.assert_close(compiled(*args), eager(*args))


def test_each_of_two_compiled_models_puts_shared_caches_in_order():
    torch.manual_seed(0)
    eager = Sink()
    model = copy.deepcopy(eager)
    first, second = (rtc.compile(model, options=EAGER) for _ in range(2))
    with torch.no_grad():
        for step in range(8):
            compiled = first if step < 4 else second
            torch.testing.assert_close(compiled(x(step), step), eager(x(step), step))
        second.materialize()
        # asks nobody: what lies in memory is seen
        lies = torch.from_dlpack(torch.utils.dlpack.to_dlpack(model.k))
        torch.testing.assert_close(lies, eager.k)
        for k in (lies, eager.k):
            k.mul_(0.5)
        second.invalidate()
        del lies
        for step in range(8, 30):
            compiled = first if step % 3 == 0 else second
            torch.testing.assert_close(compiled(x(step), step), eager(x(step), step))


@pytest.mark.parametrize(
    "where",
    [(CohortRuntime, "finish"), (guard, "possible"), (guard, "lift"), (guard, "put")],
    ids=lambda where: where[1],
)
@pytest.mark.parametrize("options", [EAGER, REPLAY], ids=["call", "replay"])
def test_ctrl_c_after_the_step_leaves_no_cache_unwatched(options, where, monkeypatch):
    """The caches lie in ring order then: whoever looks next must get them in order."""
    eager, model, compiled = pair(Sink, options)
    done = getattr(*where)

    def die(*args):
        monkeypatch.setattr(*where, done)
        if where[1] == "lift":
            done(*args)
        if where[1] == "put":  # some are guarded by then
            done(args[0])
        raise KeyboardInterrupt

    with torch.no_grad():
        for step in range(30):
            given = x(step), step
            if step == 14:
                monkeypatch.setattr(*where, die)
                with pytest.raises(KeyboardInterrupt):
                    compiled(*given)
                if where[1] == "lift":  # before the step
                    torch.testing.assert_close(model.k + 0, eager.k)
                    compiled(*given)
                eager(*given)
                torch.testing.assert_close(model.k + 0, eager.k)
                torch.testing.assert_close(model.v + 0, eager.v)
            else:
                torch.testing.assert_close(compiled(*given), eager(*given))


def test_two_models_in_two_threads(monkeypatch):
    """A call lifts and guards the caches of all models: not in the middle of another's call."""
    pairs, wrong, run = [pair(Sink) for _ in range(2)], [], GraphRuntime._run

    def slow(self, *args):
        time.sleep(1e-3)  # lets the other thread in
        return run(self, *args)

    def work(eager, compiled):
        try:
            with torch.no_grad():
                for step in range(3, 40):
                    torch.testing.assert_close(compiled(x(step), step), eager(x(step), step))
        except BaseException as e:
            wrong.append(e)

    with torch.no_grad():
        for eager, _, compiled in pairs:
            for step in range(3):
                torch.testing.assert_close(compiled(x(step), step), eager(x(step), step))
    monkeypatch.setattr(GraphRuntime, "_run", slow)
    threads = [threading.Thread(target=work, args=(e, c)) for e, _, c in pairs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


class BiasBySlot(torch.nn.Module):
    """Keys projected with a bias that goes by place: ``addmm`` took it for the same in all slots."""

    def __init__(self, rows):
        super().__init__()
        torch.manual_seed(0)
        self.new = torch.nn.Linear(8, 16).double()
        self.register_buffer("place", torch.randn(rows, 8).double())
        self.register_buffer("w", torch.randn(8, 8).double())
        for name in "kv":
            self.register_buffer(name, torch.randn(12, 8).double())

    def forward(self, x, step):
        for cache, new in zip((self.k, self.v), self.new(x).chunk(2, -1), strict=True):
            cache.copy_(torch.cat([cache[3:], new]))
        keys = torch.addmm(self.place, self.k, self.w)
        return torch.softmax(x @ keys.t(), -1) @ self.v


@pytest.mark.parametrize("rows", [1, 12])
def test_a_bias_that_varies_along_the_slots(rows):
    model = BiasBySlot(rows)
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=REPLAY)
    with torch.no_grad():
        for step in range(10):
            y = torch.randn(3, 8).double()
            torch.testing.assert_close(compiled(y, step), eager(y, step))


class Shown(Base):
    """Returns the keys that it attends to, as they are kept or with their rotation."""

    def __init__(self, turned):
        super().__init__()
        self.turned = turned

    def forward(self, x, step):
        q, k, v = self.new(x)
        self.write(k, v)
        at = (torch.arange(14) + 2 * step).double()
        keys = rope(self.k, at, self.freq)
        q = rope(q, at[-x.shape[1] :], self.freq)
        y = F.scaled_dot_product_attention(q, keys, self.v)
        return y, keys if self.turned else self.k.clone()


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("more", [{"step_graph": "simulate"}, {"regions": "on"}])
def test_keys_that_are_returned(turned, more):
    model = Shown(turned)
    options = rtc.Options(lowering="eager", warn=False, **more)
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=options)
    with torch.no_grad():
        for step in range(12):
            for got, want in zip(compiled(x(step), step), eager(x(step), step), strict=True):
                torch.testing.assert_close(got, want)


class Stacked(Base):
    def forward(self, x, step):
        q, k, v = self.new(x)
        self.write(k, v)
        y = F.scaled_dot_product_attention(q, self.k, self.v) * 2
        return y, torch.stack([y]), torch.stack([x]), torch.cat([y])


def test_a_stack_of_one_is_a_copy():
    model = Stacked()
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=REPLAY)
    with torch.no_grad():
        for step in range(4):
            given = [x(step), x(step)]
            outs = compiled(given[0], step), eager(given[1], step)
            for y, z in zip(outs, given, strict=True):
                z.zero_()
                y[0].mul_(3)
            for got, want in zip(*outs, strict=True):
                torch.testing.assert_close(got, want)


@pytest.mark.parametrize("drop", [F.dropout, torch.dropout, F.alpha_dropout, F.dropout1d])
def test_a_dropout_that_is_off_is_its_input(drop):
    """A later write to the input is seen through it; torch.compile takes it for a copy."""

    def model(x, cache):
        y = drop(cache, 0.1, False)
        cache.add_(x)
        return y * 2

    compiled = rtc.compile(model, options=EAGER)
    mine, its = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    with torch.no_grad():
        for _ in range(3):
            given = torch.randn(2, 3, 4)
            assert torch.equal(compiled(given, mine), model(given, its))
            assert torch.equal(mine, its)


@pytest.mark.parametrize("stock", ["aot_eager", "eager"])
def test_torch_compile_around_a_compiled_child(stock):
    """The graph breaks there, and the child runs as rtc compiled it."""
    eager, twin = Pipeline(), Pipeline()
    twin.generator = rtc.compile(twin.generator, options=EAGER)
    around = torch.compile(twin, backend=stock)
    with torch.no_grad():
        for step in range(8):
            torch.testing.assert_close(
                around(x(step), step), eager(x(step), step), rtol=1e-12, atol=1e-12
            )
    report = twin.generator.report().to_dict()
    assert len(report["graphs"]) == 1
    assert report["runtime"]["calls"] == 8
    assert isinstance(twin.generator.k, guard.RingCache)
