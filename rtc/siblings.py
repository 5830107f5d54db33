"""Ints that every layer keeps for itself and that are the same in all of them.

``caches[0]["end"]``, ``caches[1]["end"]``, ..: as separate inputs, each layer's cache has places of
its own to work out in every call. Where they are equal in the call that is traced they become one
input, under guards; where they once were not, they stay apart for good.
"""

from __future__ import annotations

import re
from collections import defaultdict

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from rtc.inputs import named

_NUMBER = re.compile(r"\d+")


def unite(gm: fx.GraphModule, apart: set[str]) -> None:
    """Changes Dynamo's graph in place, and adds guards. ``apart``: names, with ``#`` for the
    numbers in them, that were seen with different values; added to."""
    groups: dict[str, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.find_nodes(op="placeholder"):
        name, value, _ = named(node)
        symbol = value.node.expr if isinstance(value, torch.SymInt) else None
        if isinstance(symbol, sympy.Symbol) and value.node.hint is not None:
            groups[_NUMBER.sub("#", name)].append(node)
    for name, nodes in groups.items():
        values = [n.meta["example_value"] for n in nodes]
        if len({v.node.hint for v in values}) > 1:
            apart.add(name)
        if name in apart:
            continue
        for node, value in zip(nodes[1:], values[1:], strict=True):
            if bool(value == values[0]):  # asking is what guards
                node.replace_all_uses_with(nodes[0])
    gm.recompile()


__all__ = ["unite"]
