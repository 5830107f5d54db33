"""Staging and replay without a GPU: a replay runs the callable again on the same static inputs."""

import copy
import dataclasses
import gc
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import rtc
from rtc.graphs.step import WARM_UP, Staging, StepGraph
from rtc.model import PRESETS, build, example_inputs
from rtc.passes.analysis.host import InputInfo
from rtc.runtime.step import Step
from tests.forms.registry import run
from tests.forms.test_forms import BY_NAME, compile_with

CPU = torch.device("cpu")


def test_staged_values_keep_their_addresses():
    staging = Staging([((3,), torch.int64), ((), torch.float32), ((2, 2), torch.complex64)], CPU)
    where = [t.data_ptr() for t in staging.device]
    for i in range(6):
        values = [torch.arange(3) + i, torch.tensor(0.5 * i), torch.full((2, 2), complex(i, -i))]
        staging.put(values)
        for have, want in zip(staging.device, values, strict=True):
            assert torch.equal(have, want.to(have.dtype))
    assert where == [t.data_ptr() for t in staging.device]
    assert all(w % 16 == 0 for w in where)


def test_values_that_were_foreseen_are_sent_and_others_in_their_place():
    staging = Staging([((3,), torch.int64), ((2,), torch.float32)], CPU)
    for i in range(8):
        foreseen = [torch.arange(3) + i, torch.tensor([0.5 * i, -1.0])]
        before = [t.clone() for t in staging.device]
        staging.fill(foreseen)
        assert all(map(torch.equal, staging.device, before))  # a step may still be reading
        came = foreseen if i % 2 else [foreseen[0], torch.tensor([7.0, i])]
        staging.put(came)
        assert all(map(torch.equal, staging.device, came))
        staging.put([t + 1 for t in came])  # nothing is left over of what was foreseen
        assert all(torch.equal(a, b + 1) for a, b in zip(staging.device, came, strict=True))


def test_a_replay_reads_this_call_s_tensors_and_keeps_its_outputs_apart():
    weight = torch.randn(4, 4)
    step = StepGraph(lambda args: [args[0] @ args[1]])
    kept = []
    for i in range(5):
        x = torch.full((2, 4), float(i))
        (y,) = step([weight], [x], lambda static: [*static, weight])
        kept.append((x, y))
        assert step.captured == (i >= WARM_UP)
    for x, y in kept:
        torch.testing.assert_close(y, x @ weight)


def test_moved_and_reshaped_inputs_are_noticed():
    weight, x = torch.randn(4, 4), torch.randn(2, 4)
    step = StepGraph(lambda args: [args[0] @ args[1]])
    assert not step.moved([weight])
    step([weight], [x], lambda static: [*static, weight])
    assert not step.moved([weight])
    assert step.fits([torch.randn(2, 4)])
    assert step.moved([weight.clone()])
    assert not step.fits([torch.randn(3, 4)])


FORMS = [
    "rope_half", "rope_complex64", "layout_2bhsd", "position_reset_sink", "home_list_of_dicts",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms_by_replay(name):
    options = rtc.Options(lowering="eager", step_graph="simulate")
    result = run(BY_NAME[name], compile_with(options))
    assert result.report["runtime"]["replays"] > 50


def test_a_captured_step_goes_with_its_graph():
    """The caches outlive a compiled model: another one must not replay what that one captured."""
    torch.manual_seed(0)
    model = BY_NAME["rope_half"].build()
    compiled = rtc.compile(model, options=rtc.Options(lowering="eager", step_graph="simulate"))
    with torch.no_grad():
        for step in range(4):
            args, kwargs = BY_NAME["rope_half"].inputs(step)
            compiled(*args, **kwargs)
    (state,) = compiled._session.states
    assert len(state.steps) == 1
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert len(state.steps) == 0


def _sides(**options):
    model, same = (build("tiny", dtype=torch.float64) for _ in range(2))
    for a, b in zip(model.caches.buffers(), same.caches.buffers(), strict=True):
        a.normal_()
        b.copy_(a)
    options = rtc.Options(lowering="eager", step_graph="simulate", **options)
    return model, same, rtc.compile(model, options=options)


def test_a_reset_is_replayed_and_what_the_host_works_out_is_ready():
    """Over three position resets: the refresh of the sink is one replay, from captured inputs."""
    model, same, compiled = _sides()
    period = model.cfg.reset_period
    start = period - 5
    with torch.no_grad():
        for s in range(start, start + 2 * period + 10):
            args = example_inputs(model.cfg, s, dtype=torch.float64)
            torch.testing.assert_close(compiled(*args), same(*args), atol=1e-10, rtol=1e-10)
    compiled.materialize()
    for a, b in zip(model.caches.buffers(), same.caches.buffers(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
    runtime = compiled.report().to_dict()["runtime"]
    assert runtime["refresh_replays"] == 3
    assert runtime["prepared_ahead"] > 2 * period


def test_a_step_that_was_not_foreseen_is_worked_out_anew():
    """Steps that jump, caches written from outside, a look at the caches: between any two calls."""
    model, same, compiled = _sides()
    jumps = [0, 1, 2, 3, 9, 10, 11, 12, 12, 12, 13, 40, 41, 42, 43, 44, 3, 4, 5, 6]
    with torch.no_grad():
        for i, s in enumerate(jumps):
            args = example_inputs(model.cfg, s, dtype=torch.float64)
            if i == 7:
                for m in (model, same):
                    next(iter(m.caches.buffers())).mul_(0.5)
            if i == 15:
                for a, b in zip(model.caches.buffers(), same.caches.buffers(), strict=True):
                    torch.testing.assert_close(a + 0, b, atol=1e-10, rtol=1e-10)
            torch.testing.assert_close(compiled(*args), same(*args), atol=1e-10, rtol=1e-10)
    assert 0 < compiled.report().to_dict()["runtime"]["prepared_ahead"] < len(jumps) - 6


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_numbers_on_the_cpu_are_not_captured(device):
    """A float argument comes as a tensor on the CPU, which a CUDA graph would read only once."""
    graph, inputs = torch.fx.Graph(), []
    with FakeTensorMode():
        vals = {"cache": torch.empty(2, 3, device=device), "sigma": torch.empty(())}
    for i, (name, val) in enumerate(vals.items()):
        node = graph.placeholder(name)
        node.meta["val"] = val
        inputs.append(InputInfo(i, node, name))
    graph.output(graph.call_function(torch.mul, tuple(i.node for i in inputs)))
    cohort = SimpleNamespace(caches=[SimpleNamespace(info=inputs[0])])
    result = SimpleNamespace(
        rewritten=SimpleNamespace(extras=[], gm=torch.fx.GraphModule({}, graph)),
        plan=SimpleNamespace(cohorts=[cohort]),
    )
    blockers = Step(lambda args: None, result, inputs).blockers
    assert len(blockers) == (device == "cuda")
    assert all("sigma lies on the CPU" in b for b in blockers)


def test_a_refresh_is_captured_again_where_scales_are_new():
    """A session that begins anew is calibrated anew: its resets are replayed as well."""
    cfg = dataclasses.replace(PRESETS["tiny"], quantize_kv=True)
    model = build(cfg, dtype=torch.float64)
    options = {"lowering": "eager", "quantize": "calibrated"}
    one, two = (
        rtc.compile(m, options=rtc.Options(**options, step_graph=graph))
        for m, graph in ((model, "simulate"), (copy.deepcopy(model), "off"))
    )
    period, seen = cfg.reset_period, []
    with torch.no_grad():
        for session in range(2):
            for m in (one, two):
                m.reset_session()
                for i, cache in enumerate(m.caches.buffers()):
                    cache.normal_(generator=torch.Generator().manual_seed(i + 7 * session))
            for s in range(2 * period + 3):
                args = example_inputs(cfg, s, dtype=torch.float64)
                torch.testing.assert_close(one(*args), two(*args), atol=1e-10, rtol=1e-10)
            seen.append(one.report().to_dict()["runtime"]["refresh_replays"])
    assert seen[0] > 0
    assert seen[1] > seen[0]
