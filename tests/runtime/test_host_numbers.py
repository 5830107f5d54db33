"""Ends of caches that the program keeps in tensors and reads with ``.item()``."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
import functools

import pytest
import torch
from torch import nn

import rtc
from tests.runtime import test_settled
from tests.runtime.test_settled import DIM, HEADS, REPLAY, WIDTH, N, attend, rope, table

pytestmark = pytest.mark.usefixtures("fresh")
PLAIN = rtc.Options(lowering="eager", warn=False)


def long(n, shape=(1,)):
    return torch.full(shape, n, dtype=torch.long)


class Layer(nn.Module):
    """As published models keep a rolling cache: two tensors with the ends, sizes from a tensor."""

    def __init__(self, window=4, sink=1):
        super().__init__()
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM).double(), nn.Linear(DIM, DIM).double()
        self.window, self.sink = window * N, sink * N

    def forward(self, x, grid, freqs, kv, start):
        n = x.shape[1]
        q, k, v = self.qkv(x).view(1, n, 3, HEADS, WIDTH).unbind(2)
        ((f, h, w),) = grid.tolist()
        frame = start // (grid[0][1:].prod()).item()
        turn = freqs[frame : frame + f].repeat_interleave(h * w, 0)
        q, k = rope(q, turn), rope(k, turn)
        end, size = start + n, kv["k"].shape[1]
        if end > kv["seen"].item() and n + kv["last"].item() > size:
            gone = n + kv["last"].item() - size
            kept = kv["last"].item() - gone - self.sink
            for c in (kv["k"], kv["v"]):
                c[:, self.sink : self.sink + kept] = c[
                    :, self.sink + gone : self.sink + gone + kept
                ].clone()
            last = kv["last"].item() + end - kv["seen"].item() - gone
        else:
            last = kv["last"].item() + end - kv["seen"].item()
        kv["k"][:, last - n : last] = k
        kv["v"][:, last - n : last] = v
        first = max(0, last - self.window)
        y = attend(q, kv["k"][:, first:last], kv["v"][:, first:last])
        kv["seen"].fill_(end)
        kv["last"].fill_(last)
        return x + self.o(y)


class Rolling(test_settled.Rolling):
    def __init__(self, layers=2):
        super().__init__(0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, xs, caches, start):
        grid = torch.stack([torch.tensor([1, 1, x.shape[0]], dtype=torch.long) for x in xs])
        x = torch.stack(xs)
        for layer, kv in zip(self.layers, caches, strict=True):
            x = layer(x, grid, self.freqs, kv, start)
        return x

    def session(self, slots=4 * N):
        return [{**kv, "seen": long(0), "last": long(0)} for kv in super().session(slots)]


def alike(a, b):
    for one, other in zip(a, b, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [PLAIN, REPLAY], ids=["plain", "replay"])
def test_published_rolling_cache_becomes_a_ring(options):
    model = Rolling()
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=options)
    mine, its = model.session(), model.session()
    tensors = [kv["last"] for kv in mine]
    for frame in range(14):
        for _ in range(3):  # denoising, at one place
            x = [torch.randn(N, DIM).double()]
            torch.testing.assert_close(
                compiled(x, mine, frame * N), eager(x, its, frame * N), rtol=1e-9, atol=1e-9
            )
            assert all(kv["last"] is t for kv, t in zip(mine, tensors, strict=True))
            assert [int(kv["last"]) for kv in mine] == [int(kv["last"]) for kv in its]
    report = compiled.report().to_dict()
    passes = {p["name"]: p for p in report["graphs"][-1]["passes"]}
    assert passes["ring_cache"]["applied"] == 4
    assert report["runtime"]["plain_calls"] == 0
    assert any("L['caches'][0]['last']" in note for note in report["runtime"]["notes"])
    compiled.materialize()
    alike(mine, its)


def test_numbers_written_between_calls_are_read_again():
    model = Rolling(1)
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=REPLAY)
    mine, its = model.session(), model.session()

    def step(frame):
        x = [torch.randn(N, DIM).double()]
        torch.testing.assert_close(
            compiled(x, mine, frame * N), eager(x, its, frame * N), rtol=1e-9, atol=1e-9
        )

    for frame in range(10):
        step(frame)
    for kv in (*mine, *its):  # a cut: the session begins anew, as published pipelines do it
        kv["seen"].zero_()
        kv["last"] = long(0)
    for frame in range(10):
        step(frame)
    for kv in (*mine, *its):  # unseen, and said
        kv["seen"].data.fill_(0)
        kv["last"].data.fill_(0)
    compiled.invalidate()
    for frame in range(10):
        step(frame)
    mine, its = model.session(), model.session()  # another session
    for frame in range(3):
        step(frame)
    alike(mine, its)


def test_frames_that_change_in_number_are_numbers_still():
    """The first chunk is one frame, the others are three: sizes that a tensor is made from."""

    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("freqs", table(200))
            self.register_buffer("k", torch.zeros(1, 6 * N, HEADS, WIDTH).double())

        def forward(self, xs, start):
            grid = torch.stack([torch.tensor(x.shape[:2], dtype=torch.long) for x in xs])
            x = torch.stack(xs).flatten(1, 2)
            ((f, n),) = grid.tolist()
            turn = self.freqs[start // N : start // N + f].repeat_interleave(n, 0)
            k = rope(x.view(1, f * n, HEADS, WIDTH), turn)
            self.k.copy_(torch.cat((self.k[:, f * n :], k), 1))
            return attend(k, self.k, self.k)

    model = Frames()
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=REPLAY)
    start = 0
    for frames in (1, 3, 3, 3, 3, 3, 1, 3, 3, 2, 3, 3):
        x = [torch.randn(frames, N, DIM).double()]
        torch.testing.assert_close(compiled(x, start), eager(x, start), rtol=1e-9, atol=1e-9)
        start += frames * N
    compiled.materialize()
    torch.testing.assert_close(model.k, eager.k, rtol=1e-9, atol=1e-9)
    passes = {p["name"]: p for p in compiled.report().to_dict()["graphs"][-1]["passes"]}
    assert passes["ring_cache"]["applied"] == 1


class Counter(nn.Module):
    """A buffer that counts, in the way that ``count`` says."""

    def __init__(self, count):
        super().__init__()
        self.count = count
        self.register_buffer("at", long(0, ()))
        self.register_buffer("k", torch.zeros(1, 8, 4).double())

    def forward(self, x):
        at = self.at.item()
        k = torch.cat((self.k[:, 2:], x * (at + 1)), 1)
        self.k.copy_(k)
        return self.count(self, x, at) + k.sum(1)


def filled(self, x, at):
    self.at.fill_(at + 2)
    return x.sum()


def added(self, x, at):
    self.at.add_(2)
    self.at.sub_(1)
    return x.sum() * self.at.item()


def listed(self, x, at):
    self.at.zero_()
    self.at.fill_(at + self.at.tolist() + 3)
    return x.sum()


@pytest.mark.parametrize("count", [filled, added, listed])
@pytest.mark.parametrize("inference", [False, True])
def test_a_buffer_that_counts(count, inference):
    with torch.inference_mode(inference):
        model = Counter(count)
        eager, compiled = copy.deepcopy(model), rtc.compile(model, options=REPLAY)
        for i in range(8):
            x = torch.randn(1, 2, 4).double()
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-9, atol=1e-9)
            assert int(model.at) == int(eager.at)
            if i == 5:
                model.at += 7
                eager.at += 7
    assert isinstance(model.at, torch.Tensor)


def whole(self, x, at):
    return x.sum() * int(self.at)


def test_a_buffer_made_an_int():
    model = Counter(whole)
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=REPLAY)
    x = torch.randn(1, 2, 4).double()
    if torch.__version__ < "2.13":  # its Dynamo does not follow int()
        with pytest.raises(rtc.HostSyncError):
            compiled(x)
        return
    for _ in range(4):
        torch.testing.assert_close(compiled(x), eager(x), rtol=1e-9, atol=1e-9)
        model.at += 1
        eager.at += 1


SEEN = {"end": 0, "frames": 2}


class Shared(nn.Module):
    """Ends of the cache in a dict of the module's file, as wrappers around a model leave them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 8, 4).double())
        self.register_buffer("place", torch.randn(100, 4).double())

    def forward(self, x):
        n = SEEN["frames"]
        self.k.copy_(torch.cat((self.k[:, n:], x), 1))
        keys = self.k + self.place[SEEN["end"] : SEEN["end"] + 8]
        return torch.softmax(x @ keys.transpose(1, 2), -1) @ self.k


def test_ints_of_a_global_dict_that_go_on():
    model = Shared()
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=REPLAY)
    for end in range(80):
        SEEN["end"] = end
        x = torch.randn(1, 2, 4).double()
        torch.testing.assert_close(compiled(x), eager(x), rtol=1e-9, atol=1e-9)
    assert len(compiled.report().to_dict()["graphs"]) <= 3


def test_a_number_as_an_argument_and_in_the_result():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("k", torch.zeros(1, 8, 4).double())

        def forward(self, x, at, *, more):
            self.k.copy_(torch.cat((self.k[:, 2:], x * at.item()), 1))
            more["n"].add_(at.item())
            return self.k.sum(), {"n": more["n"], "all": more}

    model = Model()
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=REPLAY)
    mine, its = {"n": long(0)}, {"n": long(0)}
    for i in range(6):
        x = torch.randn(1, 2, 4).double()
        a, b = compiled(x, long(i), more=mine), eager(x, long(i), more=its)
        torch.testing.assert_close(a[0], b[0], rtol=1e-9, atol=1e-9)
        assert a[1]["n"] is mine["n"]
        assert a[1]["all"] is mine
        assert int(mine["n"]) == int(its["n"])


def test_one_tensor_in_two_places_is_one_number():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("k", torch.zeros(1, 8, 4).double())

        def forward(self, x, a, b):
            a["n"].add_(1)
            self.k.copy_(torch.cat((self.k[:, 2:], x * b["n"].item()), 1))
            b["n"].add_(a["n"].item())
            return self.k.sum()

    model = Model()
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=REPLAY)
    n, m = long(0), long(0)
    for _ in range(5):
        x = torch.randn(1, 2, 4).double()
        torch.testing.assert_close(
            compiled(x, {"n": n}, {"n": n}), eager(x, {"n": m}, {"n": m}), rtol=1e-9, atol=1e-9
        )
        assert int(n) == int(m)
    for _ in range(5):  # and two tensors are two
        x = torch.randn(1, 2, 4).double()
        a, b = long(3), long(4)
        c, d = long(3), long(4)
        torch.testing.assert_close(
            compiled(x, {"n": a}, {"n": b}), eager(x, {"n": c}, {"n": d}), rtol=1e-9, atol=1e-9
        )
        assert (int(a), int(b)) == (int(c), int(d))


def test_a_failing_call_leaves_the_tensors():
    model = Rolling(1)
    compiled = rtc.compile(model, options=PLAIN)
    mine = model.session()
    compiled([torch.randn(N, DIM).double()], mine, 0)
    with pytest.raises(RuntimeError, match=r"shape|size|mat"):
        compiled([torch.randn(N, DIM + 1).double()], mine, N)
    assert int(mine[0]["last"]) == N
    assert isinstance(mine[0]["last"], torch.Tensor)
    compiled([torch.randn(N, DIM).double()], mine, N)
    assert int(mine[0]["last"]) == 2 * N


def test_explain_counts_numbers_too():
    model = Rolling(1)
    mine = model.session()
    report = rtc.explain(model, [torch.randn(N, DIM).double()], mine, 0, options=PLAIN)
    assert len(report.to_dict()["graphs"]) == 1
    assert isinstance(mine[0]["last"], torch.Tensor)


def test_graphs_that_take_turns_keep_one_ring():
    """The first call of a frame moves the window up, the others write over its rows: two graphs,
    and the second would not have the cache in a ring for its own sake."""
    model = Rolling()
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=REPLAY)
    mine, its = model.session(), model.session()

    def frames(some):
        for frame in some:
            for _ in range(3):
                x = [torch.randn(N, DIM).double()]
                torch.testing.assert_close(
                    compiled(x, mine, frame * N), eager(x, its, frame * N), rtol=1e-9, atol=1e-9
                )

    frames(range(14))
    before = compiled.report().to_dict()["runtime"]
    frames(range(14, 20))
    after = compiled.report().to_dict()["runtime"]
    assert after["imports"] == before["imports"]
    assert after["materializations"] == before["materializations"]
    assert after["replays"] == before["replays"] + 18


def test_graphs_that_undo_each_other_are_compiled_without_rings():
    class Model(nn.Module):
        """Every other call looks at the slots by their places."""

        def __init__(self):
            super().__init__()
            self.register_buffer("k", torch.zeros(1, 4 * N, HEADS, WIDTH).double())
            self.register_buffer("by", torch.randn(4 * N).double())

        def forward(self, x, look):
            if look:
                return torch.cumsum(self.k.sum((0, 2, 3)) * self.by, 0)
            self.k.copy_(torch.cat((self.k[:, N:], x), 1))
            return attend(x, self.k, self.k)

    model = Model()
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=REPLAY)
    for step in range(80):
        x = torch.randn(1, N, HEADS, WIDTH).double()
        look = step % 2 == 1
        torch.testing.assert_close(compiled(x, look), eager(x, look), rtol=1e-9, atol=1e-9)
    assert any("take turns" in note for note in compiled.report().to_dict()["runtime"]["notes"])
    torch.testing.assert_close(model.k + 0, eager.k)


def test_a_wrapper_sees_the_arguments_as_they_came():
    def shown(f):
        @functools.wraps(f)
        def wrapper(self, *args, **kwargs):
            out = f(self, *args, **kwargs)
            return out + 100 if kwargs.get("flag") else out

        return wrapper

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("end", long(1))

        @shown
        def forward(self, x, flag=False):
            return x + self.end.item()

    compiled = rtc.compile(Model(), options=PLAIN)
    for _ in range(3):
        torch.testing.assert_close(compiled(torch.ones(2), flag=True), torch.full((2,), 102.0))
        torch.testing.assert_close(compiled(torch.ones(2), True), torch.full((2,), 2.0))


def test_a_method_of_any_object():
    class Thing:
        def __init__(self):
            self.end = long(1)

        def step(self, x):
            self.end.add_(2)
            return x * self.end.item()

    thing = Thing()
    compiled = rtc.compile(thing.step, options=PLAIN)
    for i in range(4):
        torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 3.0 + 2 * i))
    assert int(thing.end) == 9
