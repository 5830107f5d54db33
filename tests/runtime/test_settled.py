"""Windows kept by numbers: their sizes are symbolic for ever, and from some call on the same."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc
from rtc import backend, settle
from rtc.settle import Sizes

N, HEADS, WIDTH = 3, 2, 4
DIM = HEADS * WIDTH
REPLAY = rtc.Options(lowering="eager", step_graph="simulate", warn=False)


pytestmark = pytest.mark.usefixtures("fresh")


def table(frames):
    angles = torch.outer(
        torch.arange(frames, dtype=torch.float64),
        1 / torch.pow(100.0, torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH),
    )
    return torch.polar(torch.ones_like(angles), angles)


def rope(x, freqs):
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs[None, :, None]).flatten(3)


def attend(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """A rolling cache with a sink, kept by two numbers in the caller's dict: new rows go behind the
    last until the cache is full; then the window moves up. A step may come again (denoising)."""

    def __init__(self, window=4, sink=1):
        super().__init__()
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM).double(), nn.Linear(DIM, DIM).double()
        self.window, self.sink = window * N, sink * N

    def forward(self, x, freqs, kv, start):
        n = x.shape[1]
        q, k, v = self.qkv(x).view(1, n, 3, HEADS, WIDTH).unbind(2)
        frame = start // N
        turn = freqs[frame : frame + 1].repeat(n, 1)
        q, k = rope(q, turn), rope(k, turn)
        end, size = start + n, kv["k"].shape[1]
        if end > kv["seen"] and n + kv["last"] > size:
            gone = n + kv["last"] - size
            kept = kv["last"] - gone - self.sink
            for c in (kv["k"], kv["v"]):
                c[:, self.sink : self.sink + kept] = c[
                    :, self.sink + gone : self.sink + gone + kept
                ].clone()
            last = kv["last"] + end - kv["seen"] - gone
        else:
            last = kv["last"] + end - kv["seen"]
        kv["k"][:, last - n : last] = k
        kv["v"][:, last - n : last] = v
        first = max(0, last - self.window)
        y = attend(q, kv["k"][:, first:last], kv["v"][:, first:last])
        kv["seen"], kv["last"] = end, last
        return x + self.o(y)


class Rolling(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.register_buffer("freqs", table(200))

    def forward(self, x, caches, start):
        for layer, kv in zip(self.layers, caches, strict=True):
            x = layer(x, self.freqs, kv, start)
        return x

    def session(self, slots=4 * N):
        shape = (1, slots, HEADS, WIDTH)
        return [
            {"k": torch.zeros(shape).double(), "v": torch.zeros(shape).double(), "seen": 0,
             "last": 0}
            for _ in self.layers
        ]  # fmt: skip


class Sliding(nn.Module):
    """A long cache, read through a window of numbers, roped when read: window positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM).double(), nn.Linear(DIM, DIM).double()
        self.register_buffer("freqs", table(400))
        self.register_buffer("k", torch.zeros(1, 60 * N, HEADS, WIDTH).double())
        self.register_buffer("v", torch.zeros(1, 60 * N, HEADS, WIDTH).double())
        self.window = 4 * N

    def forward(self, x, start):
        n = x.shape[1]
        q, k, v = self.qkv(x).view(1, n, 3, HEADS, WIDTH).unbind(2)
        end = start + n
        self.k[:, start:end] = k
        self.v[:, start:end] = v
        first = max(0, end - self.window)
        q = rope(q, self.freqs[start:end])
        k = rope(self.k[:, first:end], self.freqs[first:end])
        return x + self.o(attend(q, k, self.v[:, first:end]))


class Growing(nn.Module):
    """All that came before, in every call more."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 60 * N, DIM).double())

    def forward(self, x, end):
        self.k[:, end - N : end] = x
        k = self.k[:, None, :end]
        return F.scaled_dot_product_attention(x[:, None], k, k)[:, 0]


def frame():
    return torch.randn(1, N, DIM).double()


def last(compiled):
    return compiled.report().to_dict()["graphs"][-1]


def placed(graph):
    """How many caches lie in a ring, of how many."""
    p = next(p for p in graph["passes"] if p["name"] == "ring_cache")
    return p["applied"], p["matched"]


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_rolling_cache_kept_by_numbers_becomes_a_ring_once_it_is_full(lowering):
    model = Rolling()
    options = rtc.Options(lowering=lowering, step_graph="simulate", regions="on", warn=False)
    compiled = rtc.compile(copy.deepcopy(model), options=options)
    with torch.no_grad():
        for session in range(2):
            mine, its = model.session(), model.session()
            for t in range(12):
                for _ in range(2):
                    x = frame()
                    same(compiled(x, its, t * N), model(x, mine, t * N))
            for a, b in zip(mine, its, strict=True):
                assert (a["seen"], a["last"]) == (b["seen"], b["last"])
                same(b["k"], a["k"])
                same(b["v"], a["v"])
            if not session:
                assert placed(last(compiled)) == (4, 4)
    runtime = compiled.report().to_dict()["runtime"]
    assert runtime["replays"] > 10
    assert runtime["plain_calls"] == 0


def test_two_sessions_of_different_lengths_each_have_their_sizes():
    model = Rolling(layers=1)
    compiled = rtc.compile(copy.deepcopy(model), options=REPLAY)
    pairs = [(model.session(n * N), model.session(n * N)) for n in (4, 3)]
    with torch.no_grad():
        for t in range(14):
            for mine, its in pairs:
                x = frame()
                same(compiled(x, its, t * N), model(x, mine, t * N))
    for mine, its in pairs:
        same(its[0]["k"], mine[0]["k"])


def test_a_window_slides_over_a_long_cache():
    model = Sliding()
    compiled = rtc.compile(copy.deepcopy(model), options=REPLAY)
    with torch.no_grad():
        for t in [*range(20), *range(12)]:
            x = frame()
            same(compiled(x, t * N), model(x, t * N))
            if t == 19:
                assert placed(last(compiled)) == (2, 2)
    same(compiled.k, model.k)


def test_a_window_that_is_made_smaller_is_read_with_its_new_size():
    model = Sliding()
    compiled = rtc.compile(copy.deepcopy(model), options=REPLAY)
    with torch.no_grad():
        for t in range(40):
            if t in (16, 30):
                model.window = compiled._model.window = (3 if t == 16 else 4) * N
            x = frame()
            same(compiled(x, t * N), model(x, t * N))
    assert placed(last(compiled))[0] == 2


def test_sizes_that_change_in_every_call_are_left_symbolic():
    """Nothing settles: some lengths have a graph each, the rest one for all."""
    model = Growing()
    compiled = rtc.compile(copy.deepcopy(model), options=REPLAY)
    with torch.no_grad():
        for t in range(1, 30):
            x = frame()
            same(compiled(x, t * N), model(x, t * N))
    assert compiled._compiler.settled == []
    assert len(compiled.report().to_dict()["graphs"]) < 20


def test_many_windows_and_modes_do_not_use_up_the_compiler():
    """Each set of sizes that settles has the modes traced again."""

    class Modes(Sliding):
        def forward(self, x, start, mode="a"):
            return super().forward(x * len(mode), start)

    model = Modes()
    compiled = rtc.compile(copy.deepcopy(model), options=REPLAY)
    with torch.no_grad():
        for t in range(56):
            model.window = compiled._model.window = (2 + t // 8) * N
            mode = "a" * (1 + t % 2)
            x = frame()
            same(compiled(x, t * N, mode), model(x, t * N, mode))
    assert len(compiled._compiler.settled) <= 4
    assert len(compiled.report().to_dict()["graphs"]) < 32


def test_ints_that_a_step_returns_go_on_when_it_is_replayed():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.o = nn.Linear(DIM, DIM).double()
            self.register_buffer("k", torch.zeros(1, 4 * N, DIM).double())

        def forward(self, x, step):
            self.k.copy_(torch.cat([self.k[:, N:], self.o(x)], 1))
            return (x @ self.k.mT).softmax(-1) @ self.k, 3 * step + 1

    model = Counting()
    compiled = rtc.compile(copy.deepcopy(model), options=REPLAY)
    with torch.no_grad():
        for step in (0, 1, 2, 3, 4, 5, 9, 10):
            x = frame()
            (y, n), (want, m) = compiled(x, step), model(x, step)
            same(y, want)
            assert n == m
    assert compiled.report().to_dict()["runtime"]["replays"] > 3


def test_graphs_that_take_turns_are_traced_again_together():
    """A block is a call that moves the window and others in its place: one graph each before the
    sizes have settled, one each after, and the one that moves comes first."""
    model = Rolling()
    compiled = rtc.compile(copy.deepcopy(model), options=REPLAY)
    mine, its = model.session(), model.session()
    traced = []
    with torch.no_grad():
        for t in range(12):
            for _ in range(3):
                x = frame()
                same(compiled(x, its, t * N), model(x, mine, t * N))
                traced.append(len(compiled.report().to_dict()["graphs"]))
    # the first call, filling and in its place, moving; then the settled two
    assert traced[-1] == 5
    assert traced.index(5) - traced.index(4) == 1
    assert traced.index(4) % 3 == 0
    assert placed(last(compiled)) == (4, 4)
    assert compiled.report().to_dict()["runtime"]["imports"] == 1


def test_graphs_run_op_by_op_while_their_sizes_may_settle(monkeypatch):
    """And are compiled all the same if they are called on and on."""
    monkeypatch.setattr(settle, "_WAIT", 30)
    monkeypatch.setattr(backend, "_STATIC_GRAPHS", 3)
    lowered, lower = [], backend.Compiler._lower
    monkeypatch.setattr(backend.Compiler, "_lower", lambda *a: lowered.append(a) or lower(*a))
    model = Growing()
    compiled = rtc.compile(copy.deepcopy(model))
    with torch.no_grad():
        for t in range(1, 45):
            x = frame()
            same(compiled(x, t * N), model(x, t * N))
            if t == 20:
                assert any("op by op" in note for note in last(compiled)["notes"])
                before = len(lowered)
    same(compiled.k, model.k)
    assert len(lowered) == before + 1
    assert last(compiled)["notes"] == []


class Prompted(Sliding):
    """A text of any length beside the window."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ring", torch.zeros(1, 4 * N, DIM).double())

    def forward(self, x, text):
        self.ring.copy_(torch.cat([self.ring[:, N:], self.o(x)], 1))
        y = (x @ self.ring.mT).softmax(-1) @ self.ring
        return y + (x @ text.mT).softmax(-1) @ text


@pytest.mark.parametrize("rings", [True, False])
def test_sizes_that_follow_from_no_int_are_not_waited_for(monkeypatch, rings):
    """A prompt of another length: its graph is compiled at once, and stays."""
    monkeypatch.setattr(settle, "_WAIT", 12)
    lowered, lower = [], backend.Compiler._lower
    monkeypatch.setattr(backend.Compiler, "_lower", lambda *a: lowered.append(a) or lower(*a))
    model = Prompted()
    options = rtc.Options(ring_cache=rings, lowering="inductor", warn=False)
    compiled = rtc.compile(copy.deepcopy(model), options=options)
    with torch.no_grad():
        for t in range(30):
            x, text = frame(), torch.randn(1, 5 + t // 2, DIM).double()
            same(compiled(x, text), model(x, text))
    same(compiled.ring, model.ring)
    assert len(lowered) == len(compiled.report().to_dict()["graphs"]) <= 3


def test_a_demoted_model_does_not_wait(monkeypatch):
    """It is not traced again, so its graphs would run op by op for good."""
    model = Sliding()
    compiled = rtc.compile(copy.deepcopy(model), options=rtc.Options(warn=False))
    compiled._demote("a test")
    lowered, lower = [], backend.Compiler._lower
    monkeypatch.setattr(backend.Compiler, "_lower", lambda *a: lowered.append(a) or lower(*a))
    with torch.no_grad():
        for t in range(4):
            x = frame()
            same(compiled(x, t * N), model(x, t * N))
    assert lowered


def test_a_graph_of_settled_sizes_has_guards_on_them(monkeypatch):
    """Without them it would serve calls of other sizes: this holds the other tests to account."""
    fix = Sizes.fix

    def unguarded(sizes):
        sizes.symbolic, kept = [], sizes.symbolic
        fix(sizes)
        sizes.symbolic = kept

    monkeypatch.setattr(Sizes, "fix", unguarded)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        test_a_window_that_is_made_smaller_is_read_with_its_new_size()


def test_guards_are_no_asserts():
    """``python -O`` leaves those out."""
    name = test_a_window_that_is_made_smaller_is_read_with_its_new_size.__name__
    code = f"from tests.runtime import test_settled as t; t.{name}()"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-O", "-c", code], check=True, cwd=root, timeout=300)
