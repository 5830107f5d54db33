"""Replays of one graph's steps: which inputs stay where they are, which are copied or sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import fx

from rtc.graphs.step import Staging, StepGraph
from rtc.passes.analysis.effects import is_foreign
from rtc.passes.analysis.host import InputInfo, cut
from rtc.passes.pipeline import Result
from rtc.runtime.constants import WithConstants
from rtc.runtime.state import Counters

KEPT = ("view", "scale", "saturated")  # extras that live on the device, at fixed addresses


class Step:
    """``blockers``: why steps cannot be captured (a changing number that the device code uses)."""

    def __init__(
        self, run: Callable[[list[Any]], Any], result: Result, inputs: Sequence[InputInfo]
    ) -> None:
        self.run = run
        extras = result.rewritten.extras
        self.sent = [i for i, e in enumerate(extras) if e.kind not in KEPT]
        self.kept = [i for i, e in enumerate(extras) if e.kind in KEPT]
        gm = result.rewritten.gm
        assert gm is not None
        places = [n for n in gm.graph.nodes if n.op == "placeholder"]
        caches = {c.info.index for cohort in result.plan.cohorts for c in cohort.caches}
        used = [i for i in inputs if not i.is_int and places[i.index].users]
        # what a call brings along may lie anywhere; caches and attributes stay
        self.copied = [
            i.index for i in used
            if not (i.attribute or i.parameter or i.mutated or i.part or i.index in caches)
        ]  # fmt: skip
        self.fixed = [i.index for i in used if i.index not in set(self.copied)]
        self.parts = [
            (i.index, i.parent.index, i.part) for i in inputs if i.parent is not None and i.part
        ]
        users = [(i, u) for i in inputs if i.is_int for u in places[i.index].users]
        self.blockers = [
            f"no CUDA graph: {u.name} uses {i.source}, which changes from call to call"
            for i, u in users[:1]
        ]
        for i in used:
            if _baked(i.node.meta["val"], result):
                self.blockers.append(
                    f"no CUDA graph: {i.source} lies on the CPU, so a graph would keep the value "
                    "that it was captured with. Hold it on the GPU (a float argument: as a tensor)"
                )
        self.blockers += [
            f"no CUDA graph: {n.target} makes a tensor from nothing, so a graph would keep "
            "what it gave when it was captured. Pass that tensor to the model"
            for n in gm.graph.nodes
            if is_foreign(n.target) and not any(map(_is_tensor, n.all_input_nodes))
        ][:1]
        self.specs = [(extras[i].shape, extras[i].dtype) for i in self.sent]

    def foresee(self, owner: MutableMapping[Any, Any], sent: Mapping[int, torch.Tensor]) -> None:
        """``sent``: what the next call will send, by the extra's number, if it is as foreseen."""
        have = owner.get(self)
        if have is not None:
            have[0].fill([sent[i] for i in self.sent])

    def __call__(
        self, owner: MutableMapping[Any, Any], args: list[Any], extras: list[torch.Tensor],
        marks: list[object], counters: Counters,
    ) -> Any:  # fmt: skip
        """Run one call. ``owner``: the captured steps of the state that the call runs on.

        ``marks``: the same objects while all extras of the kinds KEPT are where and what they were.
        """
        fixed = [args[i] for i in self.fixed]
        copied = [args[i] for i in self.copied]
        have = owner.get(self)
        if have is None or have[2] != marks or have[1].moved(fixed) or not have[1].fits(copied):
            device = extras[self.kept[0]].device if self.kept else fixed[0].device
            with torch.inference_mode(False):  # kept for calls in any mode
                staging = Staging(self.specs, device)
            have = owner[self] = staging, StepGraph(_joined(self.run, self.parts)), marks
        staging, graph, _ = have
        staging.put([extras[i] for i in self.sent])
        if isinstance(self.run, WithConstants):
            self.run.refresh(args, extras, marks)

        def arrange(static: Sequence[torch.Tensor]) -> list[Any]:
            out, new = list(args), list(extras)
            for i, s in zip(self.copied, static, strict=True):
                out[i] = s
            for part, *_ in self.parts:
                out[part] = None  # a step that is kept holds no view of the user's memory
            for i, s in zip(self.sent, staging.device, strict=True):
                new[i] = s
            return [*out, *new]

        out = graph(fixed, copied, arrange)
        counters.replays += graph.captured
        return out


def _joined(
    run: Callable[[list[Any]], Any], parts: Sequence[tuple[int, int, Any]]
) -> Callable[[list[Any]], Any]:
    """``run``, given the parts of stacked tensors, cut anew. Not a method: a step is kept by its
    graph, and must not keep it."""

    def joined(args: list[Any]) -> Any:
        for index, parent, part in parts:
            args[index] = cut(args[parent], part)
        return run(args)

    return joined if parts else run


def _is_tensor(n: fx.Node) -> bool:
    return isinstance(n.meta.get("val"), torch.Tensor)


def _baked(val: Any, result: Result) -> bool:
    """Whether device code takes this input from the CPU, as it may a tensor without axes."""
    caches = [c.info.node.meta["val"] for cohort in result.plan.cohorts for c in cohort.caches]
    here = isinstance(val, torch.Tensor) and val.device.type == "cpu"
    return here and any(c.device.type == "cuda" for c in caches)
