"""Which ops talk to other ranks, and what follows for everybody who moves ops about.

A collective completes when every rank of its group has issued it, each group's in the same order.
So a rank may leave none out, add none and swap none, whatever else was rewritten on it: then ranks
may take different paths through a call (compiled, plain, calibrating) and still meet. And a
collective is never run but in the program's own place: not to try out what a piece of a graph
computes, nor to evaluate a constant, as the others would not be there.

Between a collective and the ``wait_tensor`` on its result, other ranks' data may still be on its
way: the result is not read, and memory that the collective reads is not written.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from rtc.passes.nodes import arg_by_name

_NAMESPACES = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
    "c10d",
    "_dtensor",
)
_NAMESPACES_OF_ALL = ("aten", "prims", "prim")
_GROUPS = ("group", "group_name", "process_group")


def is_wait(node: fx.Node) -> bool:
    """Whether it waits for a collective and hands on its result."""
    t = node.target
    return isinstance(t, torch._ops.OpOverload) and t._opname == "wait_tensor" and _of_c10d(t)


def is_collective(node: fx.Node) -> bool:
    """Whether it issues a collective, or waits for one: torch's own, and ops of any library that
    are told a process group (an argument ``group`` or ``group_name`` that is no number)."""
    t = node.target
    return node.op == "call_function" and isinstance(t, torch._ops.OpOverload) and _meets_others(t)


@functools.cache  # a deep model's graph is asked a million times
def _meets_others(t: torch._ops.OpOverload) -> bool:
    if _of_c10d(t):
        return True
    if t.namespace in _NAMESPACES_OF_ALL:
        return False
    return any(a.name in _GROUPS and str(a.type) not in ("int", "SymInt") for a in _arguments(t))


def issues(node: fx.Node) -> bool:
    """Whether it issues a collective: other ranks wait for that."""
    return is_collective(node) and not is_wait(node)


def issued(graph: fx.Graph) -> list[str]:
    """What a graph issues, in its order: one line each, with all that other ranks must agree on."""
    return [
        f"{n.target}({', '.join(map(str, _numbers(n)))}) -> {_sizes(n.meta.get('val'))}"
        for n in graph.nodes
        if issues(n)
    ]


def met(graph: fx.Graph) -> list[str]:
    """The same, whoever carries it out: an op that computes what it sums counts as an all-reduce of
    as many elements. No pass changes this."""
    out = []
    for n in graph.nodes:
        if issues(n):
            name = n.target._opname
            said = [x for x in _numbers(n) if isinstance(x, str)]
            val = n.meta.get("val")
            if n.target.namespace == "rtc":  # linear_all_reduce, and what goes on with the sum
                name, said = "all_reduce", ["sum", str(arg_by_name(n, "group"))]
                val = val[0] if isinstance(val, (tuple, list)) else val
            vals = val if isinstance(val, (tuple, list)) else [val]
            count = [f"{v.dtype}[{v.numel()}]" for v in vals if isinstance(v, torch.Tensor)]
            out.append(f"{name} {' '.join(said)} {' '.join(count)}")
    return out


def _numbers(n: fx.Node) -> list[object]:
    """Arguments that are no tensors, nor computed."""
    return [
        a for a in (*n.args, *n.kwargs.values())
        if isinstance(a, (str, int, float, torch.dtype)) or a is None
    ]  # fmt: skip


def _sizes(val: object) -> str:
    if isinstance(val, (tuple, list)):
        return f"[{', '.join(map(_sizes, val))}]"
    return f"{val.dtype}{list(val.shape)}" if isinstance(val, torch.Tensor) else str(val)


def _of_c10d(t: torch._ops.OpOverload) -> bool:
    return t.namespace in _NAMESPACES


def _arguments(t: torch._ops.OpOverload) -> list[torch._C.Argument]:
    return t._schema.arguments


__all__ = ["is_collective", "is_wait", "issued", "issues", "met"]
