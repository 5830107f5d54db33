"""What a pass is: a name, a tier, and a function from a context to an outcome."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from rtc.passes.analysis.fp8 import reads_fp8
from rtc.passes.analysis.host import HostInfo, InputInfo
from rtc.passes.plan import CachePlan, Refusal, build


class IllegalCombination(ValueError):
    """Two switches that together would give wrong results."""


@dataclass
class Outcome:
    """What a pass did: places matched, places applied, and the rest with reasons."""

    matched: int = 0
    applied: int = 0
    refused: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Context:
    """The graph under compilation and what the passes share.

    ``gm``: functional ATen graph of the whole call; every mutated input is a ``copy_`` at the end.
    ``sample``: the int inputs as the first call gave them. ``switches``: pass name -> enabled.
    ``plan``: the cache plan, which the cache passes decide on and the pipeline carries out last.
    """

    gm: fx.GraphModule
    inputs: Sequence[InputInfo]
    sample: Mapping[fx.Node, int]
    switches: Mapping[str, bool]
    calibrate: bool = False
    write_back: bool = False  # caches must be current after every call
    kernels: bool = False  # whether passes that put in rtc's own kernels run
    rings: Collection[str] = ()  # sources of caches that another graph of the model keeps in a ring
    extras: Mapping[fx.Node, Any] = field(default_factory=dict)  # new inputs of the rewritten graph
    host: HostInfo = field(init=False)
    plan: CachePlan = field(init=False)

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Analyse the graph and make the plan, again after a "trace" pass changed the graph."""
        by_node = {i.node: i for i in self.inputs}
        self.host = HostInfo(self.gm.graph, by_node, lambda name: getattr(self.gm, name))
        self.plan = build(
            self.host,
            self.inputs,
            self.sample,
            calibrate=self.calibrate and self.on("hoist_quantize"),
            raw_only=not self.on("hoist_rope"),
            reads_fp8=reads_fp8 if self.switches.get("fp8_attention") else None,
        )

    def on(self, name: str) -> bool:
        return self.switches.get(name, True)


@dataclass(frozen=True)
class Pass:
    """One pass of the pipeline.

    ``tier``: "exact" reassociates only; "numerics" changes rounding and needs consent. ``stage``:
    "plan" passes decide on ``ctx.plan``, which is carried out after the last of them; "graph"
    passes rewrite ``ctx.gm``, the graph that results. "trace" passes come before: they add work to
    the traced graph, as if the user had written it, and the plan is made anew.
    """

    name: str
    tier: str
    run: Callable[[Context], Outcome]
    summary: str
    stage: str = "plan"
    own_kernels: bool = False  # it puts in kernels of rtc's own: Options(kernels=...) decides

    def __post_init__(self) -> None:
        assert self.tier in ("exact", "numerics"), self.tier
        assert self.stage in ("trace", "plan", "graph"), self.stage
