"""Add ops to a graph with their fake values, so that later passes see shapes and dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def fake_mode(graph: fx.Graph) -> Any:
    """The mode that the graph's fake values belong to."""
    for n in graph.nodes:
        val = n.meta.get("val")
        if isinstance(val, torch._subclasses.FakeTensor):
            return val.fake_mode
    raise AssertionError("graph without fake values")


class Emitter:
    """``emit(target, *args)`` at the graph's insertion point; ``like`` lends its source line."""

    def __init__(self, graph: fx.Graph, like: fx.Node | None = None) -> None:
        self.graph, self.mode = graph, fake_mode(graph)
        self.meta = {k: like.meta[k] for k in ("stack_trace",) if like and k in like.meta}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        vals = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            node.meta = {**self.meta, "val": target(*vals[0], **vals[1])}
        return node


def val(node: fx.Node) -> torch.Tensor:
    return node.meta["val"]


def arg_by_name(node: fx.Node, name: str) -> Any:
    """An argument of an op by its schema's name, its default where it was left out."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    for i, a in enumerate(schema):
        if a.name == name:
            if i < len(node.args) and not a.kwarg_only:
                return node.args[i]
            return node.kwargs.get(name, a.default_value if a.has_default_value() else None)
    raise KeyError(f"{node.target} has no argument {name}")
