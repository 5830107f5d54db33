"""The passes, in order. The order stands here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from rtc.passes import (
    fp8_attention,
    fp8_linear,
    fuse_all_reduce_norm,
    fuse_linear_all_reduce,
    fuse_modulate_quantize,
    fuse_pre_attention,
    fuse_swiglu_quantize,
    hoist_quantize,
    hoist_rope,
    normalize,
    quantize_kv,
    ring_cache,
    unify_attention,
)
from rtc.passes.analysis.collectives import issued, met
from rtc.passes.analysis.effects import dead_code
from rtc.passes.analysis.host import InputInfo
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.plan import CachePlan
from rtc.passes.rewrite import Rewriter, Rewritten, copied

PIPELINE: tuple[Pass, ...] = (
    unify_attention.PASS,
    quantize_kv.PASS,
    hoist_quantize.PASS,
    hoist_rope.PASS,
    ring_cache.PASS,
    fp8_attention.PASS,
    fuse_pre_attention.PASS,
    fuse_swiglu_quantize.PASS,
    fuse_modulate_quantize.PASS,
    fp8_linear.PASS,
    fuse_linear_all_reduce.PASS,
    fuse_all_reduce_norm.PASS,
)


def names() -> list[str]:
    """Names of the passes, in the order in which they run."""
    return [p.name for p in PIPELINE]


@dataclass
class Result:
    plan: CachePlan
    inputs: list[InputInfo]  # the graph's own, then parts of stacked caches
    rewritten: Rewritten
    outcomes: dict[str, tuple[Pass, bool, Outcome]]
    traced: fx.GraphModule | None = None  # the graph with what "trace" passes added, if they did


def run(
    gm: fx.GraphModule,
    inputs: Sequence[InputInfo],
    sample: Mapping[fx.Node, int],
    switches: Mapping[str, bool],
    *,
    calibrate: bool = False,
    write_back: bool = False,
    kernels: bool = False,
    lift: bool = False,
    rings: Collection[str] = (),
    on_pass: Callable[[str], None] = lambda name: None,
) -> Result:
    """Run the pipeline on ``gm`` in place.

    ``sample``: first call's int inputs; ``switches``: pass name -> enabled; ``on_pass`` is told the
    name of each pass before it runs; ``lift``: see ``Rewriter.run``; ``rings``: see ``Context``.
    """
    on_pass("analysis")
    meets = met(gm.graph)
    dead_code(gm.graph)  # checks on ints, which are guards
    inputs = normalize.run(gm, inputs)
    assert met(gm.graph) == meets
    outcomes: dict[str, tuple[Pass, bool, Outcome]] = {}
    ctx = Context(gm, inputs, sample, switches, calibrate, write_back, kernels, rings=rings)
    _run_stage("trace", ctx, outcomes, on_pass)
    traced = None
    if any(done.applied for _, _, done in outcomes.values()):
        traced = copied(gm)
        ctx = Context(gm, inputs, sample, switches, calibrate, write_back, kernels, rings=rings)
    _run_stage("plan", ctx, outcomes, on_pass)
    for cohort in ctx.plan.cohorts:
        if cohort.order == "plain" and cohort.hoist:
            cohort.order = "logical"
        if write_back or cohort.order == "logical":
            cohort.split()
    on_pass("rewrite")
    rewritten = Rewriter(gm, ctx.plan).run(lift=lift)
    assert rewritten.gm is not None
    assert issued(rewritten.gm.graph) == issued(gm.graph)
    ctx.gm = rewritten.gm
    ctx.extras = dict(zip(rewritten.nodes, rewritten.extras, strict=True))
    _run_stage("graph", ctx, outcomes, on_pass)
    ctx.gm.recompile()
    return Result(ctx.plan, list(inputs), rewritten, outcomes, traced)


def _run_stage(
    stage: str,
    ctx: Context,
    outcomes: dict[str, tuple[Pass, bool, Outcome]],
    on_pass: Callable[[str], None],
) -> None:
    meets = met(ctx.gm.graph)
    for p in PIPELINE:
        if p.stage == stage:
            on_pass(p.name)
            enabled = ctx.on(p.name) and (ctx.kernels or not p.own_kernels)
            outcome = p.run(ctx) if enabled else Outcome()
            outcomes[p.name] = (p, enabled, outcome)
            if outcome.applied and stage != "plan":  # 1 s for 57b, each
                ctx.gm.graph.lint()
            # one too many or too few, and the other ranks wait for ever; two that change places,
            # and a rank that takes the plain path adds up what does not belong
            assert met(ctx.gm.graph) == meets, f"{p.name} changed the collectives"
