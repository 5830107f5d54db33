"""What an op does besides giving its result, and what may decide about that besides its arguments.

Ops with an effect stay, whether anybody reads them or not. Ops of other libraries may read a clock,
a queue, a generator of their own: they run once in every call, in their place, and what they give
is neither worked out on the host nor kept.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.effects import _get_effect
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from rtc.passes.analysis.collectives import is_collective

# libraries whose ops are functions of their arguments; rtc's own, and quantized weights
_FUNCTIONS = ("aten", "prims", "prim", "rtc", "quantized_decomposed", "torchao")


def has_effect(node: fx.Node) -> bool:
    """Writes, collectives and assertions; a random draw, too: those after it would be others."""
    if node.op in ("placeholder", "output") or is_collective(node):
        return True
    if node.target is torch.ops.aten._assert_scalar.default:
        return not _guarded(node.args[0])
    return isinstance(node.target, torch._ops.OpOverload) and _changes(node.target)


def _guarded(condition: Any) -> bool:
    """Whether it follows from ints of the call: Dynamo has put a guard on it."""
    val = condition.meta.get("val") if isinstance(condition, fx.Node) else condition
    if isinstance(val, torch.SymBool):
        return not free_unbacked_symbols(val)
    return isinstance(val, bool)


def is_foreign(target: Any) -> bool:
    """Whether it may depend on more than its arguments."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in _FUNCTIONS


def is_random(target: torch._ops.OpOverload) -> bool:
    """Whether it draws from a generator."""
    return torch.Tag.nondeterministic_seeded in target.tags


@functools.cache
def _changes(target: torch._ops.OpOverload) -> bool:
    told = target in fx.node._side_effectful_functions or _get_effect(target) is not None
    return told or target._schema.is_mutable or is_random(target)


def dead_code(graph: fx.Graph) -> None:
    """Remove nodes without users, but for those with an effect. fx's own checks the whole graph
    first, which costs more than to walk it."""
    for n in reversed(graph.nodes):
        if not n.users and not has_effect(n):
            graph.erase_node(n)


__all__ = ["dead_code", "has_effect", "is_foreign", "is_random"]
