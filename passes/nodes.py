"""Add ops to a graph with their fake values, so that later passes see shapes and dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

_PLAIN = (
    bool,
    int,
    float,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


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
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        node.meta = {**self.meta, "val": fake(self.mode, target, args, kwargs)}
        return node


class _Untold(Exception):
    """Not all that decides about a result can be told."""


def fake(mode: Any, target: Any, args: Any, kwargs: Any) -> Any:
    """The fake value of ``target(*args, **kwargs)``, made once for all calls alike in a compile.

    A model asks for the same few hundred values over and over, and torch's own cache takes some
    100 us to find one. So nodes may share a value: nothing goes by which object it is. Views never
    do: whose memory they look at decides what compilers take for aliases.
    """
    known = mode.__dict__.setdefault("_rtc_known", {})  # as long as the mode, which values hold
    key = None
    if isinstance(target, torch._ops.OpOverload) and not _aliases(target):
        try:
            key = (target, _told(args), _told(list(kwargs.items())))
            if key in known:
                return known[key]
        except _Untold:
            key = None
    with mode, torch.no_grad():
        value = target(*args, **kwargs)
    if key is not None and not (_memory(value) & _memory((args, list(kwargs.values())))):
        try:
            _told(value)
            known[key] = value
        except _Untold:
            pass
    return value


def _aliases(target: torch._ops.OpOverload) -> bool:
    """Whether it writes to an argument, or may return a view of one."""
    schema = target._schema
    return any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))


def _memory(a: Any) -> set[int]:
    """Storages of all tensors in ``a``: not every view says in its schema that it is one."""
    if isinstance(a, (list, tuple)):
        return set().union(*map(_memory, a))
    return {a.untyped_storage()._cdata} if isinstance(a, torch.Tensor) else set()


def _told(a: Any) -> Any:
    """All of an argument that decides about a result. Raises _Untold: sizes that change, and what
    torch itself treats in ways of its own."""
    if isinstance(a, (list, tuple)):
        return tuple(map(_told, a))
    if type(a) is FakeTensor:
        sizes = (*a.shape, *a.stride(), a.storage_offset())
        odd = a.dtype.is_complex or a.is_neg() or a.requires_grad or a.constant is not None
        if odd or a.layout is not torch.strided or any(type(n) is not int for n in sizes):
            raise _Untold
        return sizes, a.dtype, a.device, a.is_inference()
    if type(a) in _PLAIN:
        return type(a), a  # True is not 1, and 1.0 is neither
    raise _Untold


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
