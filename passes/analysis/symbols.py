"""Symbolic ints, written out over the int inputs of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


def spelled(graph: fx.Graph, before: fx.Node, value: torch.SymInt, key: str) -> fx.Node | None:
    """A node that computes ``value`` from the graph's int inputs; None where one is missing.

    New nodes stand right before ``before``. ``key``: where nodes have their values in ``meta``.
    """
    expr = value.node.expr
    places: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        val = node.meta.get(key)
        if isinstance(val, torch.SymInt):
            places.setdefault(val.node.expr, node)
    if not expr.free_symbols or not expr.free_symbols <= places.keys():
        return None
    tracer = fx.proxy.GraphAppendingTracer(graph)
    known = {s: fx.Proxy(places[s], tracer) for s in expr.free_symbols}
    after = before.prev
    with graph.inserting_before(before):
        made = sympy_interp(PythonReferenceAnalysis, known, expr)
    node = after.next
    while node is not before:
        args = fx.node.map_arg(node.args, lambda n: n.meta[key])
        node.meta[key] = node.target(*args)  # type: ignore[operator, misc]
        node = node.next
    return made.node if isinstance(made, fx.Proxy) else None


__all__ = ["spelled"]
