"""Models that torch's own `parallelize_module` spread over ranks."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rtc
from rtc.backend import pipeline

from .conftest import run_ranks
from .models import HEAD, LAYERS, NEW, Spread, Video, noise, parallelized

STEPS = 14


def collectives(gm):
    return [str(n.target) for n in gm.graph.nodes if "c10d" in str(n.target)]


def compiled_and_eager(options, inference):
    """(largest differences from eager, from one rank alone, of the caches; what rtc saw)"""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone, eager, model = Video(), parallelized(mesh), parallelized(mesh)
    graphs, run = [], pipeline.run

    def remember(gm, inputs, *args, **kwargs):
        graphs.append(collectives(gm))
        graphs.append([(i.source, i.parameter) for i in inputs])
        out = run(gm, inputs, *args, **kwargs)
        graphs.append(collectives(out.rewritten.gm))
        return out

    pipeline.run = remember
    compiled = rtc.compile(model, options=rtc.Options(**options))
    apart = [0.0, 0.0]
    with torch.inference_mode() if inference else torch.no_grad():
        for step in range(STEPS):
            got = compiled(noise(step), step)
            assert type(got) is torch.Tensor
            for i, other in enumerate((eager, alone)):
                apart[i] = max(apart[i], float((got - other(noise(step), step)).abs().max()))
    compiled.materialize()
    pairs = zip(model.buffers(), eager.buffers(), strict=True)
    apart.append(max(float((a - b).abs().max()) for a, b in pairs))
    report, pipeline.run = compiled.report().to_dict(), run
    with torch.no_grad():
        whole = rtc.explain(Video(), noise(0), 0, options=rtc.Options(**options)).to_dict()
    return apart, graphs, report, whole


def counts(report):
    """pass -> (matched, applied) of the only graph"""
    (graph,) = report["graphs"]
    return {p["name"]: (p["matched"], p["applied"]) for p in graph["passes"]}


@pytest.mark.parametrize(
    ("world", "options", "inference"),
    [
        (3, {}, False),
        (2, {"regions": "on", "step_graph": "simulate"}, True),
    ],
)
def test_parallelize_module(world, options, inference):
    options = {"lowering": "eager", **options}
    results = run_ranks(compiled_and_eager, world, options, inference)
    for apart, (traced, inputs, rewritten), report, whole in results:
        assert max(apart) <= 1e-10
        # attention and MLP of each layer: one sum over ranks, and at once the wait for it
        functional = ["_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"]
        assert traced == rewritten == functional * 2 * LAYERS
        # all inputs by name: a DTensor comes in as its local part (and the mesh, on some versions)
        assert all(source.startswith("L['") for source, _ in inputs)
        weights = [s for s, parameter in inputs if parameter and s.endswith("._local_tensor")]
        assert len(weights) == 7 * LAYERS
        # the norm on the cached keys is hoisted: its weight is known as a constant
        assert counts(report) == counts(whole)
        assert counts(report)["hoist_rope"] == (LAYERS, LAYERS)
        assert counts(report)["ring_cache"] == (2 * LAYERS, 2 * LAYERS)
        assert report["runtime"]["plain_calls"] == 0


def caches_of_dtensors():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    eager, model = Spread(mesh), Spread(mesh)
    compiled = rtc.compile(model, options=rtc.Options(lowering="eager", regions="on"))
    torch.manual_seed(dist.get_rank())
    outputs = caches = 0.0
    with torch.no_grad():
        for step in range(10):
            x = torch.randn(1, 2, NEW, HEAD, dtype=torch.float64)
            outputs = max(outputs, float((compiled(x, step) - eager(x, step)).abs().max()))
            if step == 4:  # looked at between calls, as a whole and in parts
                caches = float((model.keys.to_local() - eager.keys.to_local()).abs().max())
            if step == 5:
                caches = max(caches, float((model.values - eager.values).to_local().abs().max()))
            if step == 7:  # and written, by an op on the DTensor
                model.keys.mul_(0.5), eager.keys.mul_(0.5)
    pairs = zip(model.buffers(), eager.buffers(), strict=True)
    caches = max(
        caches, *(float((a.full_tensor() - b.full_tensor()).abs().max()) for a, b in pairs)
    )
    return outputs, caches, compiled.report().counts()


def test_caches_may_be_dtensors():
    """Attention on DTensors keeps its shape through AOT, and the caches' local parts are kept."""
    for outputs, caches, counts in run_ranks(caches_of_dtensors, 2):
        assert outputs <= 1e-10
        assert caches <= 1e-10
        assert counts["hoist_rope"] == 1
        assert counts["ring_cache"] == 2
