"""Evaluate a pointwise subgraph on sample numbers, to know what it computes and not how.

A pattern's parts are leaves with one number an element ("x", [.., C]) or one a row ("row", [.., 1]
or [..]); sample i stands for one element and its row, so that a subgraph over leaves is evaluated
on vectors of samples, whatever its shapes. What that needs is checked on the way: ops are pointwise
or reshapes that keep the last axis whole, rows stay in order, a row's number meets its own row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from rtc.passes.analysis.fn import LAYOUT, permutation
from rtc.passes.analysis.fp8 import CASTS, SAME, WIDE
from rtc.passes.analysis.slots import is_pointwise

aten = torch.ops.aten

LIMIT = 400  # nodes: no walk through a pattern goes farther
_LAYOUT = {*LAYOUT, *SAME, aten.lift_fresh_copy.default}
_FILLS = (aten.full.default, aten.scalar_tensor.default)
_PLACES = ("device", "layout", "pin_memory", "memory_format", "non_blocking")


@contextmanager
def probing() -> Iterator[None]:
    """Real tensors on the CPU, whatever modes the caller is in."""
    with _disable_current_modes(), torch.no_grad():
        yield


class Foreign(Exception):
    """The subgraph reads something else than its leaves, or mixes rows."""


@dataclass
class Probe:
    """Evaluates pointwise nodes on samples: sample i stands for one element and its row.

    ``kinds``: a value has one number an element ("x"), a row ("row") or in all ("one").
    ``exact``: in float64, casts among floats left out: a comparison needs no room for roundings, in
    which a factor could hide (bfloat16's are 1 %).
    """

    rows: int
    columns: int
    values: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    kinds: dict[fx.Node, str] = field(default_factory=dict)
    exact: bool = False

    def give(self, node: fx.Node, kind: str, value: torch.Tensor) -> None:
        """A leaf: samples of it, in its own dtype."""
        self.values[node] = value.double() if self.exact else value.to(node.meta["val"].dtype)
        self.kinds[node] = kind

    def __call__(self, node: fx.Node) -> torch.Tensor:
        if node not in self.values:
            if len(self.values) > LIMIT:
                raise Foreign("too much work between the parts of a pattern")
            self.kinds[node] = self._kind(node)
            self.values[node] = self._value(node)
        return self.values[node]

    def _kind(self, node: fx.Node) -> str:
        val = node.meta.get("val")
        if is_number(node) and isinstance(val, torch.Tensor) and val.numel() == 1:
            return "one"
        if node.op != "call_function" or not isinstance(val, torch.Tensor):
            raise Foreign(f"it depends on {node.name} too")
        inputs = node.all_input_nodes
        for a in inputs:
            self(a)
        shape = tuple(val.shape)
        if node.target in _LAYOUT:
            return self._layout(node, self.kinds[inputs[0]], shape)
        if not is_pointwise(node.target) or not inputs:
            raise Foreign(f"{node.target} between the parts of a pattern")
        kinds = {self.kinds[a] for a in inputs}
        kind = next(k for k in ("x", "row", "one") if k in kinds)
        if kind != "one" and val.numel() != self.rows * (self.columns if kind == "x" else 1):
            raise Foreign(f"{node.target} mixes rows")
        for a in inputs:
            # A row's numbers must lie where its elements do: not [M] against [M, M].
            own = tuple(a.meta["val"].shape)
            want = shape
            if kind == "x" and self.kinds[a] == "row" and math.prod(own) == self.rows:
                want = (*shape[:-1], 1)
            if self.kinds[a] != "one" and _bare(own) != _bare(want):
                raise Foreign(f"{node.target} mixes rows")
        return kind

    def _layout(self, node: fx.Node, kind: str, shape: tuple[int, ...]) -> str:
        source = tuple(node.args[0].meta["val"].shape)
        perm = permutation(node.target, node.args, len(source))
        if perm is not None and [i for i in perm if source[i] != 1] != [
            i for i in range(len(source)) if source[i] != 1
        ]:
            raise Foreign("a transposition between the parts of a pattern")
        count, all_ = math.prod(shape), self.rows * self.columns
        expanded = node.target is aten.expand.default and count != math.prod(source)
        if kind == "one":
            if expanded or count != 1:
                raise Foreign("an expansion between the parts of a pattern")
            return kind
        if expanded and (kind != "row" or _bare(source) != _bare((*shape[:-1], 1))):
            raise Foreign("an expansion between the parts of a pattern")
        wide = kind == "x" or expanded or math.prod(source) != self.rows
        if wide and (count != all_ or not shape or shape[-1] != self.columns):
            raise Foreign("a reshape that breaks up the last axis")
        return kind

    def _value(self, node: fx.Node) -> torch.Tensor:
        if not self.exact or node.meta["val"].dtype not in WIDE:
            return self._run(node)
        return (self.values[node.args[0]] if node.target in CASTS else self._run(node)).double()

    def _run(self, node: fx.Node) -> torch.Tensor:
        if node.op == "get_attr":
            value = getattr(node.graph.owning_module, str(node.target), None)
            if type(value) is not torch.Tensor:
                raise Foreign(f"it depends on {node.name} too")
            return value.detach().cpu().reshape(())
        if is_number(node):
            value = node.args[1 if node.target is aten.full.default else 0]
            return torch.full((), value, dtype=node.meta["val"].dtype)
        if node.target in _LAYOUT:
            return self.values[node.args[0]]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        kwargs = {k: v for k, v in kwargs.items() if k not in _PLACES}
        return node.target(*args, **kwargs)


def is_number(node: fx.Node) -> bool:
    """A constant of the graph's: a filled tensor, or an attribute."""
    return node.op == "get_attr" or node.target in _FILLS


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading ones."""
    i = next((i for i, n in enumerate(shape[:-1]) if n != 1), len(shape) - 1)
    return shape[max(i, 0) :]


__all__ = ["LIMIT", "Foreign", "Probe", "is_number", "probing"]
