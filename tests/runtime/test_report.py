"""explain() and report(): data about a model, and no change to it."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import json

import numpy as np
import pytest
import torch

import rtc

from .models import EAGER, Given, Window, chain, pair, same_caches, x, zeros


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


class Counting(Window):
    calls = 0

    def forward(self, x, step):
        self.calls += 1
        return self.attend(x, self.k, self.v, step)


def test_explain_changes_nothing():
    torch.manual_seed(0)
    model = Counting()
    before = {
        n: (id(t), t._version, t.clone()) for n, t in model.state_dict(keep_vars=True).items()
    }
    rng, numpy_rng = torch.get_rng_state(), np.random.get_state()[1].copy()
    report = rtc.explain(model, x(0), 0, options=EAGER)
    assert report.counts()["ring_cache"] == 2
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), rng)
    assert (np.random.get_state()[1] == numpy_rng).all()
    for n, t in model.state_dict(keep_vars=True).items():
        ident, version, values = before[n]
        assert (id(t), t._version) == (ident, version), n
        assert torch.equal(t, values)
        assert type(t) in (torch.Tensor, torch.nn.Parameter)


def test_explain_on_caches_of_the_caller():
    model, k, v = Given(), zeros() + 1.0, zeros() + 2.0
    report = rtc.explain(model, x(0), k, v, step=3, options=EAGER)
    assert report.counts() == {"hoist_rope": 1, "hoist_quantize": 0, "ring_cache": 2} or (
        report.counts()["ring_cache"] == 2
    )
    assert k.eq(1.0).all()
    assert v.eq(2.0).all()


def test_explain_in_the_middle_of_a_session():
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    before = compiled.report().to_dict()["runtime"]
    rtc.explain(model, x(7), 7, options=EAGER)
    assert compiled.report().to_dict()["runtime"]["calls"] == before["calls"]
    chain(eager, compiled, range(7, 14))
    same_caches(eager, model)


def test_explain_and_compile_decide_alike():
    eager, model, compiled = pair()
    told = rtc.explain(model, x(0), 0, options=EAGER).to_dict()
    chain(eager, compiled, range(3))
    done = compiled.report().to_dict()
    for a, b in zip(told["graphs"], done["graphs"], strict=True):
        assert a["passes"] == b["passes"]
        assert a["caches"] == b["caches"]


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_the_report_is_json(calls):
    eager, _, compiled = pair()
    chain(eager, compiled, range(calls))
    data = json.loads(json.dumps(compiled.report().to_dict()))
    assert data["runtime"]["calls"] == calls
    assert len(data["graphs"]) == min(calls, 1)
    assert str(compiled.report())


def test_asking_for_reports_changes_nothing():
    eager, model, compiled = pair()
    for step in range(12):
        chain(eager, compiled, [step])
        compiled.report().to_dict(), str(compiled.report()), repr(compiled)
    assert compiled.report().to_dict()["runtime"]["materializations"] == 0
    same_caches(eager, model)


def test_the_report_names_the_caches_and_the_lines():
    eager, _, compiled = pair(
        options=rtc.Options(lowering="eager", hoist_rope=False, ring_cache=False)
    )
    chain(eager, compiled, range(3))
    data = compiled.report().to_dict()
    assert {p["applied"] for p in data["graphs"][0]["passes"]} == {0}
    eager, _, compiled = pair()
    chain(eager, compiled, range(3))
    caches = compiled.report().to_dict()["graphs"][0]["caches"]
    assert sorted(c["name"] for c in caches) == ["k", "v"]
    assert {c["slots"] for c in caches} == {14}
    assert {c["new_rows"] for c in caches} == {3}


def test_runtime_counters_tell_what_happened():
    eager, model, compiled = pair()
    chain(eager, compiled, range(5))
    first = compiled.report().to_dict()["runtime"]
    model.k.sum()
    second = compiled.report().to_dict()["runtime"]
    assert second["materializations"] == first["materializations"] + 1
    for m in (eager, model):
        m.k.zero_()
    chain(eager, compiled, [5])
    assert compiled.report().to_dict()["runtime"]["imports"] == second["imports"] + 1
    assert len(second["step_seconds"]) == 5
    assert all(s > 0 for s in second["step_seconds"])
