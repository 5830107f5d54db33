"""The sharded reference model compiled on every rank: what eager gives, with all passes applied."""

# mypy: no-check-untyped-defs, allow-untyped-defs

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import rtc
from rtc.model import PRESETS, Shard, build, example_inputs, example_prompt

from .conftest import run_ranks

# Heads and hidden width that 2 and 3 divide; positions go back after 4 steps, the window wraps
# after 3.
SIX = replace(PRESETS["tiny"], dim=96, heads=6, hidden=96, passes=1, reset_period=4)
SMALL = replace(SIX, layers=1)
FP8 = replace(SIX, quantize_kv=True)
STEPS = 14


def inputs(cfg, step):
    return example_inputs(cfg, step, dtype=torch.float64)


def pair(cfg):
    """Two equal sharded models."""
    return [build(cfg, dtype=torch.float64, shard=Shard.of()) for _ in range(2)]


def apart(some, others):
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def chain(cfg, variants, steps=STEPS, spoil=None):
    """For each of the options: (outputs' and caches' distance from eager, counts, plain calls,
    counts of the unsharded model)."""
    found = []
    for options in variants:
        torch._dynamo.reset()
        options = rtc.Options(**{"lowering": "eager", **options})
        eager, model = pair(cfg)
        if spoil is not None:
            spoil(eager), spoil(model)
        compiled = rtc.compile(model, options=options)
        outputs, caches = 0.0, 0.0
        with torch.no_grad():
            for step in range(steps):
                if step in (0, 9):  # a session begins, and another in the middle
                    prompt = example_prompt(cfg, 3 + step % 2, dtype=torch.float64)
                    eager.first_pass(prompt), model.first_pass(prompt)
                got, want = compiled(*inputs(cfg, step)), eager(*inputs(cfg, step))
                assert type(got) is torch.Tensor
                outputs = max(outputs, apart([got], [want]))
                if step == 6:  # in the middle of a session, all ranks or not
                    if dist.get_rank() == 0:
                        compiled.materialize()
                    caches = max(caches, apart(model.buffers(), eager.buffers()))
            compiled.materialize()
            caches = max(caches, apart(model.buffers(), eager.buffers()))
        report = compiled.report().to_dict()
        compiled.close()
        whole = build(cfg, dtype=torch.float64)
        plan = rtc.explain(whole, *inputs(cfg, 0), options=options).to_dict()
        found.append((outputs, caches, counts(report), report["runtime"], counts(plan)))
    return found


def counts(report):
    """pass -> (matched, applied) of the only graph"""
    (graph,) = report["graphs"]
    return {p["name"]: (p["matched"], p["applied"]) for p in graph["passes"]}


@pytest.mark.parametrize(
    ("world", "variants"),
    [(2, [{"regions": "on", "step_graph": "simulate"}]), (3, [{}])],
)
def test_sharded_model(world, variants):
    for rank in run_ranks(chain, world, SIX, variants):
        for outputs, caches, have, runtime, whole in rank:
            assert outputs <= 1e-10
            assert caches <= 1e-10
            assert have == whole
            calls = SIX.layers * SIX.passes
            assert have["hoist_rope"] == (calls, calls)
            assert have["ring_cache"] == (2 * calls, 2 * calls)
            assert runtime["plain_calls"] == 0
            assert runtime["folds"] > 0  # positions went back


def test_one_shard_explained_alone():
    """No process group is needed to ask, and every pass finds in a shard what it finds in the
    whole: a sum over ranks between two layers is in no pattern's way."""
    cfg = replace(PRESETS["tiny-fp8"], dim=96, heads=6, hidden=96, passes=1)
    options = rtc.Options(
        lowering="eager", kernels="on", quantize="calibrated", fp8_attention=True,
        passes={"fuse_linear_all_reduce": False},
    )  # fmt: skip
    found, dtype = [], torch.bfloat16
    for world in (1, 2, 6):
        torch._dynamo.reset()
        model = build(cfg, shard=Shard(world - 1, world, "0"), dtype=dtype)
        args = example_inputs(cfg, 0, dtype=dtype)
        found.append(counts(rtc.explain(model, *args, options=options).to_dict()))
    assert found[0] == found[1] == found[2]
    for name in ("fp8_attention", "fuse_pre_attention", "fuse_swiglu_quantize"):
        assert found[0][name] == (2, 2), name
    assert found[0]["fuse_modulate_quantize"][1] > 0


@pytest.mark.cpp
def test_sharded_model_through_inductor():
    variants = [{"lowering": "inductor", "regions": "on"}]
    for rank in run_ranks(chain, 2, SMALL, variants, 8, timeout=200):
        ((outputs, caches, have, runtime, whole),) = rank
        assert outputs <= 1e-10
        assert caches <= 1e-10
        assert have == whole
        assert have["ring_cache"] == (2, 2)
        assert runtime["plain_calls"] == 0


def silenced(model):
    """One head of rank 1's values is zero: its scale cannot be calibrated, in no call."""
    if dist.get_rank() == 1:
        for block in model.blocks:
            start = 2 * block.dim
            block.linear1.weight[start : start + model.cfg.head_dim].zero_()


def calibrating(cfg):
    ((outputs, caches, have, runtime, _),) = chain(cfg, [{"quantize": "calibrated"}], 6, silenced)
    return outputs, caches, have, runtime


def test_calibration_may_go_another_way_on_each_rank():
    """Rank 0 has its scales after the first call; rank 1 measures in every call, on the graph as
    traced. Both issue the same collectives, so they meet."""
    one, two = run_ranks(calibrating, 2, FP8)
    assert one[3]["notes"] == two[3]["notes"]
    for outputs, _, have, runtime in (one, two):
        assert outputs < 0.1  # scales of one call in place of each call's own: e4m3 rounding
        assert have["hoist_quantize"] == (4, 4)
        assert runtime["plain_calls"] == 0
    assert one[3]["refreshed_slots"] > 0
    assert two[3]["refreshed_slots"] == 0
