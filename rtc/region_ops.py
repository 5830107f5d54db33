"""What an op is to the cutting of a graph: a view, a heavy op, a write, a reduction."""

from __future__ import annotations

import functools
import operator

import torch
from torch import fx

from rtc.kernels.pre_attention_graph import IN_PLACE
from rtc.passes.analysis.collectives import is_collective, is_wait
from rtc.passes.analysis.effects import is_foreign, is_random

aten = torch.ops.aten

RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)

COPIES = "clone _to_copy copy contiguous".split()

WRITES = "index_put slice_scatter select_scatter index_copy".split()


def aten_name(n: fx.Node) -> str:
    t = n.target
    if n.op != "call_function" or not isinstance(t, torch._ops.OpOverload):
        return ""
    return t._opname if t.namespace == "aten" else ""


def is_view(n: fx.Node) -> bool:
    if n.target is operator.getitem:
        return isinstance(n.args[0], fx.Node) and is_view(n.args[0])
    t = n.target
    return isinstance(t, torch._ops.OpOverload) and not is_collective(n) and _views(t)


@functools.cache
def _views(t: torch._ops.OpOverload) -> bool:
    if t is aten._unsafe_view.default:
        return True
    # by schema: an op that was missing from a list would be read after a write in place
    shared = [r.alias_info for r in t._schema.returns]
    return bool(shared) and all(a is not None and not a.is_write for a in shared)


def waits(n: fx.Node) -> list[fx.Node]:
    """Where a collective's result, or a view of it, is waited for."""
    found, stack = [], list(n.users)
    while stack:
        u = stack.pop()
        if is_wait(u):
            found.append(u)
        elif u.target is operator.getitem or is_view(u):
            stack += u.users
    return found


def held_by(n: fx.Node) -> fx.Node | None:
    """What a write is a new version of; None for other nodes."""
    own = owner(n)
    held = None
    if own is not n:
        held = own.args[IN_PLACE[own.target][1][n.args[1]]]  # type: ignore[index]
    elif aten_name(n) in WRITES:
        held = n.args[0]
    return held if isinstance(held, fx.Node) else None


def owner(n: fx.Node) -> fx.Node:
    """The op behind a write that is one of several outputs; else the node itself."""
    if n.target is operator.getitem:
        op = n.args[0]
        if (
            isinstance(op, fx.Node)
            and op.target in IN_PLACE
            and n.args[1] in IN_PLACE[op.target][1]
        ):
            return op
    return n


def shrinks(n: fx.Node) -> bool:
    """A reduction: the sooner it is done, the less has to be kept."""
    val = n.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return False
    sizes = [a.meta["val"].numel() for a in n.all_input_nodes if _is_tensor(a)]
    return max(sizes, default=0) >= 8 * max(val.numel(), 1)


def _is_tensor(n: fx.Node) -> bool:
    return isinstance(n.meta.get("val"), torch.Tensor)


def obstacle(gm: fx.GraphModule) -> str | None:
    """Why a graph cannot be cut up, or None."""
    for n in gm.graph.nodes:
        if n.op == "call_function" and n.target is not operator.getitem:
            if not isinstance(n.target, torch._ops.OpOverload):
                return f"{n.name} is no plain operator"
            if n.target._schema.is_mutable and n.target is not aten.copy_.default:
                return f"{n.name} writes in place"
            if is_random(n.target):
                return f"{n.name} draws random numbers, in the order of the program"
            if is_foreign(n.target) and not any(map(_is_tensor, n.all_input_nodes)):
                return f"{n.name} makes a tensor from nothing, in the order of the program"
        if n.op not in ("placeholder", "get_attr", "call_function", "output"):
            return f"{n.name}: {n.op}"
        if n.op == "placeholder" and not n.users:
            continue
        vals = n.meta.get("val")
        for val in vals if isinstance(vals, (tuple, list)) else (vals,):
            if isinstance(val, torch.Tensor):
                sizes = (*val.shape, *val.stride())
                if not all(isinstance(s, int) for s in sizes):
                    return f"{n.name} has a size that changes from call to call"
            elif val is not None and n.op != "get_attr":
                return f"{n.name} is a number that changes from call to call"
    return None
