"""The passes, in order. The order stands here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from rtc.passes import hoist_quantize, hoist_rope, normalize, ring_cache
from rtc.passes.analysis.host import InputInfo
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.plan import CachePlan
from rtc.passes.rewrite import Rewriter, Rewritten

PIPELINE: tuple[Pass, ...] = (
    hoist_quantize.PASS,
    hoist_rope.PASS,
    ring_cache.PASS,
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


def run(
    gm: fx.GraphModule,
    inputs: Sequence[InputInfo],
    sample: Mapping[fx.Node, int],
    switches: Mapping[str, bool],
    *,
    calibrate: bool = False,
    write_back: bool = False,
    lift: bool = False,
    on_pass: Callable[[str], None] = lambda name: None,
) -> Result:
    """Run the pipeline on ``gm`` in place.

    ``sample``: first call's int inputs; ``switches``: pass name -> enabled; ``on_pass`` is told the
    name of each pass before it runs; ``lift``: see ``Rewriter.run``.
    """
    on_pass("analysis")
    inputs = normalize.run(gm, inputs)
    ctx = Context(gm, inputs, sample, switches, calibrate, write_back)
    outcomes: dict[str, tuple[Pass, bool, Outcome]] = {}
    _run_stage("plan", ctx, outcomes, on_pass)
    for cohort in ctx.plan.cohorts:
        if cohort.order == "plain" and cohort.hoist:
            cohort.order = "logical"
        if write_back or cohort.order == "logical":
            cohort.split()
    on_pass("rewrite")
    rewritten = Rewriter(gm, ctx.plan).run(lift=lift)
    assert rewritten.gm is not None
    ctx.gm = rewritten.gm
    _run_stage("graph", ctx, outcomes, on_pass)
    ctx.gm.recompile()
    return Result(ctx.plan, list(inputs), rewritten, outcomes)


def _run_stage(
    stage: str,
    ctx: Context,
    outcomes: dict[str, tuple[Pass, bool, Outcome]],
    on_pass: Callable[[str], None],
) -> None:
    for p in PIPELINE:
        if p.stage == stage:
            on_pass(p.name)
            enabled = ctx.on(p.name)
            outcomes[p.name] = (p, enabled, p.run(ctx) if enabled else Outcome())
            ctx.gm.graph.lint()
