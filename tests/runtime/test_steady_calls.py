"""What a call takes over from the call before: nothing that has changed since."""

import contextlib
import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import fx

import rtc
from rtc.model import PRESETS, build, example_inputs
from rtc.passes.analysis.layout import twice
from rtc.passes.analysis.rowwise import RowTable
from rtc.runtime import owners
from rtc.runtime.constants import ConstEval
from rtc.runtime.graph import GraphRuntime
from rtc.runtime.state import Stamps
from tests.runtime.models import EAGER, Attention, Given, chain, close, pair, rope, x, zeros

REPLAY = rtc.Options(lowering="eager", step_graph="simulate", warn=False)


pytestmark = pytest.mark.usefixtures("fresh")


def test_scales_measured_anew_reach_captured_steps_and_constants(graph_runtimes):
    """Constants follow from parameters and scales; they are made once, and where either changes."""
    cfg = dataclasses.replace(PRESETS["tiny-fp8"], layers=1, passes=1)
    model = build(cfg, dtype=torch.float64, seed=0)
    common = {"lowering": "eager", "quantize": "calibrated", "kernels": "on", "warn": False}
    two = rtc.compile(copy.deepcopy(model), options=rtc.Options(**common))
    one = rtc.compile(model, options=rtc.Options(**common, regions="on", step_graph="simulate"))
    made = []
    for s in range(16):
        if s in (6, 11):
            for m in (one, two):
                for cache in m.caches.buffers():
                    cache.mul_(4)
        args = example_inputs(cfg, s, seed=1, dtype=torch.float64)
        close(one(*args), two(*args), 1e-10)
        made.append(graph_runtimes[0].rewritten.made)
    assert made == [0] + 6 * [1] + 5 * [2] + 4 * [3]
    for compiled, runtime in zip((one, two), graph_runtimes, strict=True):
        (state,) = compiled._session.states
        taken = {id(scale) for scale in runtime.const.scales.values()}
        assert taken
        assert taken <= {id(scale) for scale in state.scales}


def test_interrupted_while_scales_are_looked_up():
    """The next call looks them up again, instead of going on with the old ones."""

    class Once(dict):
        def items(self):
            if not stopped:
                stopped.append(True)
                raise KeyboardInterrupt
            return super().items()

    stopped, key = [True], fx.Graph().placeholder("a")
    runtime = GraphRuntime.__new__(GraphRuntime)
    runtime.scales, runtime.const = {}, ConstEval({}, None)
    runtime.scale_nodes = Once({key: SimpleNamespace(operand=0, cohort=0)})
    cohort = SimpleNamespace(index=0)
    for value in (1.0, 2.0):
        states = [(cohort, SimpleNamespace(scales=[torch.tensor(value)]), None)]
        with contextlib.suppress(KeyboardInterrupt):
            runtime._know_scales(states)
        runtime._know_scales(states)
        assert runtime.const.scales == {key: torch.tensor(value)}
        stopped.clear()


@pytest.mark.parametrize("options", [EAGER, REPLAY], ids=["call", "replay"])
def test_other_caches_than_in_the_call_before(options):
    """Two sessions take turns, a tensor is another one, keys and values change places."""
    torch.manual_seed(0)
    eager = Given()
    compiled = rtc.compile(copy.deepcopy(eager), options=options)
    sessions = [[zeros(), zeros()] for _ in range(2)]
    twins = copy.deepcopy(sessions)
    turns = [0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 0]
    with torch.no_grad():
        for step, at in enumerate(turns):
            for both in (sessions, twins):
                if step == 10:
                    both[0][1] = both[0][1] * 0.5
                if step == 14:
                    both[1].reverse()
            close(eager(x(step), *sessions[at], step), compiled(x(step), *twins[at], step))
    for a, b in zip(sessions, twins, strict=True):
        close(torch.stack(a), torch.stack(b))


class Apart(Attention):
    """Queries stand elsewhere than the new keys: their table rows are others."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k", zeros())
        self.register_buffer("v", zeros())

    def forward(self, x, step):
        n, slots = x.shape[1], self.k.shape[2]
        q, k, v = self.qkv(x).view(1, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((self.k, k), (self.v, v)):
            cache.copy_(torch.cat([cache[:, :, n:], new], 2))
        pos = (torch.arange(slots) + 3 * step).to(x.dtype)
        keys = rope(self.k, pos, self.freq)
        far = rope(q, pos[:n] + 1000, self.freq) + rope(q, pos[-n:], self.freq)
        return self.o((far @ keys.mT).softmax(-1).matmul(self.v).transpose(1, 2).flatten(2))


def _count(monkeypatch, name, calls):
    made = getattr(RowTable, name)

    def counted(self, *args):
        calls.append(name)
        return made(self, *args)

    monkeypatch.setattr(RowTable, name, counted)


def test_rows_are_shared_where_they_are_the_same(monkeypatch):
    """New keys and some of the queries ask for the same rows: those are worked out once a call."""
    calls = []
    for name in ("rows", "_rows"):
        _count(monkeypatch, name, calls)
    eager, _, compiled = pair(Apart, REPLAY)
    chain(eager, compiled, range(8))
    calls.clear()
    chain(eager, compiled, range(8, 12))
    assert calls.count("rows") > calls.count("_rows") > 0
    assert compiled.report().to_dict()["runtime"]["prepared_ahead"] >= 9


def _moved(ts):
    ts[1].data = ts[1].clone()
    return ts


CHANGES = {
    "nothing": lambda ts: ts,
    "in place": lambda ts: [ts[0].mul_(1), ts[1]],
    "another tensor": lambda ts: [ts[0], ts[1].clone()],
    "another on the same memory": lambda ts: [ts[0], ts[1].detach()],
    "the other way round": lambda ts: ts[::-1],
    "fewer": lambda ts: ts[:1],
    "other memory": _moved,
}


@pytest.mark.parametrize("change", CHANGES)
def test_stamps_of_many(change):
    ts = [torch.ones(2), torch.ones(2)]
    stamps = Stamps(ts, 0)
    assert stamps.are_of(CHANGES[change](ts), 0) == (change == "nothing")
    assert not stamps.are_of(ts, 1)


def test_inference_tensors_are_never_the_same():
    with torch.inference_mode():
        ts = [torch.ones(2)]
    assert not Stamps(ts, 0).are_of(ts, 0)


def test_each_state_is_found_once():
    _, a, one = pair()
    _, b, two = pair()
    for compiled in (one, two):
        for step in range(3):
            compiled(x(step), step)
    states = owners.keepers([torch.ones(1), 3, a.k, a.v, b.k, a.k])
    assert states == [one._session.states[0], two._session.states[0]]
    one.materialize()
    assert not any(st.untrusted for st in states)
    one.close()
    assert owners.keepers([a.k, a.v, b.v]) == two._session.states
    assert [st in owners.states() for st in states] == [False, True]


def test_twice():
    assert not twice(np.array([], dtype=np.int64))
    assert not twice(np.array([7, 3, 5]))
    assert twice(np.array([7, 3, 5, 7]))
