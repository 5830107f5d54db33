"""The call that compiles: where its time goes, and that it grows with the model and no faster."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import collections
import dataclasses
import gc
import sys
from unittest import mock

import pytest
import torch
from torch import fx

import rtc
from rtc.backend import Compiler
from rtc.model import PRESETS, build, example_inputs
from rtc.passes import entries
from rtc.passes.rewrite import copied
from rtc.report import GraphReport

from .models import EAGER, Given, Window, chain, pair, same_caches, x, zeros


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def first_call(model=Window, on_phase=None):
    return rtc.compile(model(), options=EAGER, on_phase=on_phase)


# ---- phases --------------------------------------------------------------------------------------


def test_phases_are_the_whole_of_a_first_call():
    compiled = first_call(model=Given)
    k, v = zeros(), zeros()
    compiled(x(0), k, v, 0)
    compiled(x(1), k, v, 1)
    shorter = zeros()[:, :, :11], zeros()[:, :, :11]
    compiled(x(2), *shorter, 2)  # another graph, compiled in a later call
    report = compiled.report().to_dict()
    first, _, third = report["runtime"]["step_seconds"]
    want = ["dynamo", "tracing", "passes", "eager", "runtime", "guards", "first run"]
    assert len(report["graphs"]) == 2
    for graph, took in zip(report["graphs"], (first, third), strict=True):
        assert list(graph["seconds"]) == want
        phases = sum(graph["seconds"].values())
        assert took - 0.02 - 0.1 * took < phases <= took
        assert min(graph["seconds"].values()) > 0


def test_a_phase_in_parts_counts_whole():
    report = GraphReport("graph")
    report.starts(1.0)
    with mock.patch("rtc.report.time.perf_counter", side_effect=[3.0, 7.0, 15.0]):
        for phase in ("passes", "ranks", "passes"):
            report.ends(phase)
    assert report.seconds == {"passes": 10.0, "ranks": 4.0}


def test_explain_tells_phases_too():
    graph = rtc.explain(Window(), x(0), 0, options=EAGER).to_dict()["graphs"][0]
    assert {"tracing", "passes"} <= graph["seconds"].keys()
    assert "first run" not in graph["seconds"]


def test_what_is_compiled_after_many_plain_calls_has_no_time_of_other_calls():
    compiled = first_call()
    compiled(x(0), 0)
    compiled._demote("too many plain calls")
    compiled(x(1), 1)
    graphs, runtime = (compiled.report().to_dict()[k] for k in ("graphs", "runtime"))
    assert sum(graphs[1]["seconds"].values()) <= runtime["step_seconds"][1]


# ---- garbage -------------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("fails_at", [None, "analysis", "code generation"])
def test_garbage_is_left_alone_until_code_is_generated(on, fails_at):
    seen = {}

    def phases(name):
        seen[name] = gc.isenabled()
        if name == fails_at:
            raise Stop

    compiled = first_call(on_phase=phases)
    (gc.enable if on else gc.disable)()
    try:
        if fails_at is None:
            compiled(x(0), 0)
            assert seen["code generation"] is on
        else:
            with pytest.raises(Exception) as e:  # noqa: PT011 - Dynamo wraps it, or not
                compiled(x(0), 0)
            assert isinstance(getattr(e.value, "inner_exception", e.value), Stop)
        assert seen["analysis"] is False
        assert gc.isenabled() is on
    finally:
        gc.enable()


# ---- work ----------------------------------------------------------------------------------------


def work(layers):
    """Walks through the whole graph that each piece of code makes, and times that the tables of a
    class of views are looked for."""
    changed = {"layers": layers, "passes": 1, "quantize_kv": True, "fp8_linears": True}
    cfg = dataclasses.replace(PRESETS["tiny"], **changed)
    kw = {"dtype": torch.bfloat16, "seed": 0}
    options = rtc.Options(
        quantize="calibrated", fp8_attention=True, lowering="eager", kernels="on", regions="on",
        step_graph="simulate", warn=False,
    )  # fmt: skip
    seen, size, on = collections.Counter(), [0], [False]
    steps, compile_ = fx.graph._node_list.__iter__, Compiler._compile

    def counted(self):
        code = sys._getframe(1).f_code
        for n in steps(self):
            seen[code.co_filename, code.co_firstlineno, code.co_name] += on[0]
            yield n

    def watched(self, gm, *args):
        size[0], on[0] = len(gm.graph.nodes), True
        try:
            return compile_(self, gm, *args)
        finally:
            on[0] = False

    with (
        mock.patch.object(fx.graph._node_list, "__iter__", counted),
        mock.patch.object(Compiler, "_compile", watched),
        mock.patch.object(entries, "_passed", wraps=entries._passed) as passed,
    ):
        compiled = rtc.compile(build(cfg, **kw), options=options)
        compiled(*example_inputs(cfg, 0, **kw))
    counts = compiled.report().counts()
    assert counts["fuse_swiglu_quantize"] == counts["fuse_modulate_quantize"] == layers
    torch._dynamo.reset()
    return {code: n / size[0] for code, n in seen.items()}, passed.call_count


def test_compiling_grows_with_the_layers_and_no_faster():
    """Three times the layers: no walk through the whole graph for each cache or quantizer."""
    (walks, passed), (walks3, passed3) = work(1), work(3)
    assert sum(walks.values()) > 20
    more = {code: (walks.get(code), n) for code, n in walks3.items() if n > walks.get(code, 0) + 1}
    assert not more
    assert passed3 <= 3 * passed


def test_copies_have_no_code_until_they_run():
    graph = fx.Graph()
    a = graph.placeholder("a")
    b = graph.call_function(torch.neg, (a,))
    graph.output(b)
    module = fx.GraphModule(torch.nn.Module(), graph)
    with mock.patch.object(fx.Graph, "python_code", autospec=True, side_effect=AssertionError):
        gm = copied(module)
        gm.recompile()
    one = torch.ones(())
    assert gm(one) == -1
    negated = next(n for n in gm.graph.nodes if n.op == "call_function")
    negated.target = torch.exp
    gm.recompile()
    assert gm(one) == one.exp()
    assert "exp" in gm.code


class Residual(Window):
    """Blocks that add to what they were given: written out, they double each time."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6).double() for _ in range(40))

    def forward(self, x, step):
        for block in self.blocks:
            x = x + block(x).tanh() * 0.1
        return self.attend(x, self.k, self.v, step)


def test_many_residual_blocks_before_a_cache():
    """Twenty took 80 s, and each one more twice that."""
    eager, twin, compiled = pair(Residual)
    chain(eager, compiled, range(12))
    same_caches(eager, twin)
    found = compiled.report().to_dict()["graphs"][-1]["caches"]
    assert [c["order"] for c in found] == ["ring", "ring"]
