"""What a piece of a graph computes, found by running it: spellings differ, results do not.

Running shows what a piece does to the numbers it is run on. That this holds for all others must
follow from its ops: ``is_linear`` and ``only`` look at those.

A piece leads from one node to another; all else that enters it (tables, weights, scales) are its
leaves. Pieces are run on the CPU in float32, casts between floats left out, on random leaves: what
holds for those holds for the piece, whatever its spelling.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from rtc.passes.analysis.fn import LAYOUT
from rtc.passes.analysis.fp8 import CASTS, SAME
from rtc.passes.nodes import Emitter

aten = torch.ops.aten

# casts to these are left out
ROUNDED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_LINEAR = """neg cat stack slice select index_select index split split_with_sizes chunk unbind
    roll flip view_as_complex view_as_real add sub rsub clone alias detach view reshape
    _unsafe_view permute transpose t unsqueeze squeeze expand""".split()


_VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True, eq=False)
class Piece:
    """``nodes`` lead from ``start`` (not among them) to the last of them."""

    start: fx.Node
    nodes: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]
    key: str  # equal keys: the same ops on the same shapes, leaves by number

    @property
    def end(self) -> fx.Node:
        return self.nodes[-1] if self.nodes else self.start

    @property
    def is_linear(self) -> bool:
        """Whether every op is linear in what leads back to the start."""
        return all(self._linear(n) for n in self.nodes)

    def _linear(self, n: fx.Node) -> bool:
        inside = {self.start, *self.nodes}
        if n.target is operator.getitem:
            return True
        if n.target in CASTS:
            return n.meta["val"].dtype in ROUNDED
        name = _name(n)
        if name == "mul":
            return sum(a in inside for a in n.args) == 1
        if name == "div":
            return n.args[1] not in inside
        return name in _LINEAR and not (name == "index" and self._indexed_by_data(n, inside))

    @staticmethod
    def _indexed_by_data(n: fx.Node, inside: set[fx.Node]) -> bool:
        return any(a in inside for a in n.all_input_nodes if a is not n.args[0])

    def only(self, names: Sequence[str]) -> bool:
        """Whether it consists of these ops, and of layout and casts."""
        for n in self.nodes:
            cast = n.target in CASTS and n.meta["val"].dtype in ROUNDED
            layout = n.target is operator.getitem or n.target in LAYOUT or n.target in SAME
            if not (cast or layout or _name(n) in names):
                return False
        return True

    def replay(self, call: Any, start: Any, leaves: Sequence[Any]) -> Any:
        """Run or emit it on other values; ``call(target, *args, **kwargs)`` does one op."""
        env: dict[fx.Node, Any] = {self.start: start, **dict(zip(self.leaves, leaves, strict=True))}
        for n in self.nodes:
            args, kwargs = fx.map_arg((n.args, n.kwargs), lambda a: _Value(env[a]))  # type: ignore[return-value]
            args, kwargs = _values(args), _values(kwargs)
            if n.target in CASTS and n.meta["val"].dtype in ROUNDED:
                env[n] = args[0]
            else:
                # what comes in may lie otherwise in memory than in the model
                target = aten.reshape.default if n.target in _VIEWS else n.target
                env[n] = call(target, *args, **kwargs)
        return env[self.end]

    def run(self, start: torch.Tensor, leaves: Sequence[Any]) -> torch.Tensor:
        with _disable_current_modes(), torch.no_grad():
            return self.replay(lambda t, *a, **k: t(*a, **k), start, leaves)

    def emit(self, emit: Emitter, start: fx.Node) -> fx.Node:
        return self.replay(emit, start, self.leaves)


def _name(n: fx.Node) -> str:
    t = n.target
    return t._opname if isinstance(t, torch._ops.OpOverload) and t.namespace == "aten" else ""


class _Value:
    """Keeps fx.map_arg from looking into what stands for a node."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _values(x: Any) -> Any:
    if isinstance(x, _Value):
        return x.value
    if isinstance(x, (list, tuple)):
        return [_values(y) for y in x]
    if isinstance(x, dict):
        return {k: _values(v) for k, v in x.items()}
    return x


class Trunk:
    """The nodes through which everything data-dependent behind ``end`` comes, nearest first.

    ``data``: nodes that depend on activations. ``nodes[0]`` is ``end``.
    """

    def __init__(self, end: fx.Node, data: set[fx.Node], index: Mapping[fx.Node, int]) -> None:
        self.data, self.index = data, index
        self.end = end
        self.nodes: list[fx.Node] = []
        frontier = [(-index[end], end)]
        seen = {end}
        while frontier:
            _, n = heapq.heappop(frontier)
            if not frontier:
                self.nodes.append(n)
            if n.op != "call_function" or _heavy(n) or len(seen) > 400:
                if frontier:
                    break
                continue
            for a in n.all_input_nodes:
                if a in data and a not in seen:
                    seen.add(a)
                    heapq.heappush(frontier, (-index[a], a))

    def piece(self, start: fx.Node, end: fx.Node) -> Piece:
        """From one node of the trunk to a nearer one."""
        nodes: set[fx.Node] = set()
        stack = [] if start is end else [end]
        while stack:
            n = stack.pop()
            if n not in nodes:
                nodes.add(n)
                stack += [a for a in n.all_input_nodes if a in self.data and a is not start]
        order = sorted(nodes, key=self.index.__getitem__)
        leaves: dict[fx.Node, int] = {}
        number = {start: "start"}
        lines = [f"start {_facts(start)}"]
        for n in order:
            for a in n.all_input_nodes:
                if a not in self.data and a not in leaves:
                    number[a] = f"leaf{len(leaves)}"
                    leaves[a] = len(leaves)
                    lines.append(f"{number[a]} {_facts(a)}")
            number[n] = f"n{len(number)}"
            told = fx.map_arg((n.args, n.kwargs), lambda a: number[a])
            lines.append(f"{number[n]} {n.target} {told}")
        return Piece(start, tuple(order), tuple(leaves), "\n".join(lines))


def _facts(n: fx.Node) -> str:
    v = n.meta.get("val")
    return f"{tuple(v.shape)} {v.dtype}" if isinstance(v, torch.Tensor) else str(type(v))


def _heavy(n: fx.Node) -> bool:
    t = n.target
    if not isinstance(t, torch._ops.OpOverload):
        return False
    return t.namespace not in ("aten", "prims") or t._opname in (
        "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "linear", "matmul",
    )  # fmt: skip


def data_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on a product or on another heavy op: activations, not tables."""
    data: set[fx.Node] = set()
    for n in graph.nodes:
        if n.op == "call_function" and (_heavy(n) or any(a in data for a in n.all_input_nodes)):
            data.add(n)
    return data


def random_leaves(
    piece: Piece, known: Mapping[fx.Node, torch.Tensor], generator: torch.Generator
) -> list[torch.Tensor] | None:
    """Values for the leaves, ``known`` ones as they are; None where one cannot be made up."""
    out = []
    for n in piece.leaves:
        v = n.meta.get("val")
        if n in known:
            out.append(known[n])
        elif isinstance(v, torch.Tensor) and (v.dtype.is_floating_point or v.is_complex()):
            wide = torch.complex64 if v.is_complex() else torch.float32
            out.append(torch.randn(tuple(v.shape), dtype=wide, generator=generator))
        else:
            return None
    return out
