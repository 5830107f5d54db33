"""What an op does besides giving its result: such ops stay, whether anybody reads them or not."""

from __future__ import annotations

import functools

import torch
from torch import fx

from rtc.passes.analysis.collectives import is_collective


def has_effect(node: fx.Node) -> bool:
    """Writes and collectives; a random draw, too: those that come after it would be others."""
    if node.op in ("placeholder", "output") or is_collective(node):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and _changes(node.target)


def is_random(target: torch._ops.OpOverload) -> bool:
    """Whether it draws from a generator."""
    return torch.Tag.nondeterministic_seeded in target.tags


@functools.cache
def _changes(target: torch._ops.OpOverload) -> bool:
    return target._schema.is_mutable or is_random(target)


def dead_code(graph: fx.Graph) -> None:
    """Remove nodes without users, but for those with an effect. fx's own checks the whole graph
    first, which costs more than to walk it."""
    for n in reversed(graph.nodes):
        if not n.users and not has_effect(n):
            graph.erase_node(n)


__all__ = ["dead_code", "has_effect", "is_random"]
