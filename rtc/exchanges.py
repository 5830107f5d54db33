"""Fused exchanges between ranks: what every graph of a compile must agree on, and their memory.

Ranks may take different paths through one call (one was written to from outside and takes the
plain path, the others replay): so the plain graph exchanges what the rewritten one does, by the
same ops in the same order. Workspaces are allocated once, by all ranks, before code is generated
or captured.

Inductor keeps torch's own collectives in the program's order, but moves other ops about as it
likes, the fused one too. So a graph that it compiles as a whole has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from rtc.errors import RtcError, UnsupportedError
from rtc.kernels import linear_all_reduce as _kernel
from rtc.passes import (
    fp8_linear,
    fuse_all_reduce_norm,
    fuse_linear_all_reduce,
    fuse_modulate_quantize,
)
from rtc.passes.analysis.collectives import issued, issues
from rtc.passes.base import Outcome, Pass
from rtc.passes.nodes import Emitter, arg_by_name
from rtc.passes.plan import Refusal

_FUSED = torch.ops.rtc.linear_all_reduce.default
_C10D = torch.ops._c10d_functional


class ExchangeError(RtcError):
    """A rank waited in vain for another's part of a fused sum, or ranks differ in what they must
    have alike; results since then are NaN."""


def fused(gm: fx.GraphModule) -> bool:
    return bool(fuse_linear_all_reduce.shapes(gm.graph))


Outcomes = Mapping[str, tuple[Pass, bool, Outcome]]  # by the pass's name


def alike(
    others: Sequence[fx.GraphModule | None], rewritten: fx.GraphModule, outcomes: Outcomes
) -> None:
    """Fuse in the other graphs of a compile what was fused in ``rewritten``.

    Raises UnsupportedError where that is not possible.
    """
    if not fused(rewritten):
        return
    graphs = [gm for gm in others if gm is not None]
    for gm in graphs:
        if _normed(rewritten):  # before fp8_linear, as in the pipeline
            fuse_modulate_quantize.fuse(gm.graph)
        fp8_linear.rewrite(gm.graph)
        fuse_linear_all_reduce.fuse(gm.graph, steady=True)
        if _normed(rewritten):
            fuse_all_reduce_norm.fuse(gm.graph)
    if any(issued(gm.graph) != issued(rewritten.graph) for gm in graphs):
        _apart([rewritten, *graphs], outcomes, "the plain path has no such norms")
    for gm in graphs:
        gm.graph.lint()
        gm.recompile()
        if issued(gm.graph) != issued(rewritten.graph):
            raise UnsupportedError(
                "the plain path of this model would exchange other data between ranks than the "
                "compiled one: compile with Options(passes={'fuse_linear_all_reduce': False})"
            )
    if outcomes["fuse_all_reduce_norm"][1]:  # switched on, on all ranks
        _compared(rewritten)


def _compared(gm: fx.GraphModule) -> None:
    """Raise UnsupportedError where ranks of a group would exchange different things by now."""
    mine = "\n".join(issued(gm.graph))
    for group in dict.fromkeys(s.group for s in fuse_linear_all_reduce.shapes(gm.graph)):
        with _disable_current_modes():
            said = _said(group, mine)
        if any(s != mine for s in said):
            raise UnsupportedError(
                "ranks found different norms behind their sums: compile without "
                "Options(fuse_all_reduce_norm=True)"
            )


def _apart(graphs: Sequence[fx.GraphModule], outcomes: Outcomes, why: str) -> None:
    """Sums for all rows and norms behind them, in all graphs of a compile, as if refused."""
    done = outcomes["fuse_all_reduce_norm"][2]
    for n in [n for n in graphs[0].graph.nodes if n.target is fuse_all_reduce_norm.BOTH]:
        done.applied -= 1
        done.refused.append(Refusal.at(why, n))
    done.notes.clear()
    for gm in graphs:
        fuse_all_reduce_norm.split(gm.graph)
        gm.recompile()


def _normed(gm: fx.GraphModule) -> bool:
    return any(n.target is fuse_all_reduce_norm.BOTH for n in gm.graph.nodes)


def undo(gm: fx.GraphModule, outcomes: Outcomes, why: str) -> None:
    """The sums of a graph by torch's own collective again, and outcomes as if refused."""
    graph = gm.graph
    outcome = outcomes["fuse_linear_all_reduce"][2]
    _apart([gm], outcomes, why)
    for n in [n for n in graph.nodes if n.target is _FUSED]:
        named = ("x", "w", "x_scale", "w_scale", "dtype", "group")
        x, w, xs, ws, dtype, group = (arg_by_name(n, a) for a in named)
        with graph.inserting_before(n):
            emit = Emitter(graph, n)
            part = emit(torch.ops.rtc.linear_fp8.default, x, w, xs, ws, None, dtype)
            total = emit(_C10D.all_reduce.default, part, "sum", group)
            total = emit(_C10D.wait_tensor.default, total)
        outcome.applied -= 1
        outcome.refused.append(Refusal.at(why, n))
        n.replace_all_uses_with(total)
        graph.erase_node(n)
    outcome.notes.clear()
    gm.recompile()


def unordered(gm: fx.GraphModule) -> list[str]:
    """Collectives that Inductor may run in another order than the program's: not torch's own."""
    return [
        str(n.target) for n in gm.graph.nodes
        if issues(n) and n.target.namespace != "_c10d_functional"
    ]  # fmt: skip


def prepare(gm: fx.GraphModule) -> list[str]:
    """Allocate what a graph's fused ops need on a GPU; notes for the report. A collective."""
    notes = []
    for s in fuse_linear_all_reduce.shapes(gm.graph):
        if not _on_gpu(gm):
            notes.append("fuse_linear_all_reduce: on a CPU parts are gathered and added")
            continue
        held = _kernel.reserved()
        with _disable_current_modes():  # tracing is going on around us
            why = _without(s)
        if why is not None:
            notes.append(f"[{s.m}, {s.n}] keeps the group's all-reduce: {why}")
            continue
        size = _kernel.reserved()
        notes.append(
            f"[{s.m}, {s.n}]: a workspace of {(size - held) / 1e6:.0f} MB that the ranks of its "
            f"group write to, {size / 1e6:.0f} MB in all"
        )
    return notes


def settle(
    others: Sequence[fx.GraphModule | None], rewritten: fx.GraphModule, outcomes: Outcomes
) -> None:
    """Without the workspace that sums and norms in one op want, they are two, in all graphs."""
    if not _on_gpu(rewritten) or not _normed(rewritten):
        return
    wanted = [s for s in fuse_linear_all_reduce.shapes(rewritten.graph) if s.normed]
    if all(_kernel.by_rows(s.group, s.m, s.n, s.dtype) for s in wanted):
        return
    graphs = [gm for gm in (rewritten, *others) if gm is not None]
    _apart(graphs, outcomes, "the shape has no workspace of its kind")


def _on_gpu(gm: fx.GraphModule) -> bool:
    ops = (_FUSED, fuse_all_reduce_norm.BOTH)
    return any(arg_by_name(n, "x").meta["val"].is_cuda for n in gm.graph.nodes if n.target in ops)


def _without(s: fuse_linear_all_reduce.Shape) -> str | None:
    """Why a shape gets no workspace, on no rank of its group; None where all ranks have it."""
    most = fuse_linear_all_reduce.MOST
    if not _kernel.prepared(s.group, s.m, s.n, s.dtype) and _kernel.held(s.group) >= most:
        return f"{most} shapes have a workspace, and memory must not grow with every other one"
    why = None
    try:
        _kernel.prepare(s.group, s.m, s.n, s.dtype, normed=s.normed)
    except (ValueError, RuntimeError) as e:
        why = str(e).strip().splitlines()[0]
    # one that fell back alone would wait in an all-reduce for ranks that push tiles
    first = next((w for w in _said(s.group, why) if w is not None), None)
    if first is not None:
        _kernel.drop(s.group, s.m, s.n, s.dtype)
    return first


def _said(group: str, what: str | None) -> list[str | None]:
    """What every rank of a group says."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    pg = c10d._resolve_process_group(group)  # type: ignore[arg-type,attr-defined]
    out: list[str | None] = [None] * pg.size()
    dist.all_gather_object(out, what, group=pg)
    return out


def meet(gm: fx.GraphModule) -> None:
    """Wait until all ranks have compiled: a fused sum waits for its peers for a minute only."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    groups = dict.fromkeys(s.group for s in fuse_linear_all_reduce.shapes(gm.graph))
    with _disable_current_modes():
        for group in groups:
            dist.barrier(c10d._resolve_process_group(group))  # type: ignore[arg-type,attr-defined]


class Alarm:
    """Tells, some calls later, that an exchange went wrong: no call waits for the device for it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.shapes = fuse_linear_all_reduce.shapes(gm.graph)
        self._seen: list[torch.Tensor] = []

    def look(self) -> None:
        """Raise ExchangeError if an earlier look's copy has arrived and says so; look again."""
        words = _kernel.error_words([(s.group, s.m, s.n, s.dtype) for s in self.shapes])
        if not words:
            return
        if not self._seen:
            self._seen = [torch.zeros(1, dtype=torch.int32, pin_memory=True) for _ in words]
        said = max(int(s[0]) for s in self._seen)
        if said == _kernel.OTHERS:
            raise ExchangeError(
                "ranks have different residuals, or different vectors of a norm, where one of them "
                "norms rows for all, and the results since then are NaN. Give every rank the same "
                "inputs and the same weights of norms and modulation, or compile without "
                "Options(fuse_all_reduce_norm=True)."
            )
        if said:
            raise ExchangeError(
                "a rank waited in vain for another's part of a sum, and the results since then are "
                "NaN. Did every rank make the same calls in the same order, and are all alive? "
                "Start the session again on all ranks."
            )
        for seen, word in zip(self._seen, words, strict=True):
            seen.copy_(word, non_blocking=True)
