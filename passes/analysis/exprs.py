"""Slot expressions: which slot, old or new, does each position of a value hold?

A slot expression is the movement part of a cache program with everything but the slot axes taken
away. It is found once from the graph and evaluated on the host, on slot *ids* instead of data, in
every call (a few dozen numpy calls, shared by all caches that move alike).

Ids: ``0..n-1`` are the slots of the cache as the call found it; row ``r`` of the fresh source ``k``
is ``row_id(k, r)``, negative.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

_STRIDE = 1 << 32


def row_id(source: int, row: int | np.ndarray) -> Any:
    return -(source * _STRIDE + row + 1)


def split_row_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(source, row) of negative ids."""
    flat = -ids - 1
    return flat // _STRIDE, flat % _STRIDE


@dataclass(frozen=True, eq=False)
class SlotExpr:
    """``op`` over child expressions. ``shape`` is the shape of the slot axes alone.

    ``args`` are literals or host nodes (Python ints that differ from call to call, index tensors).
    ``key`` is structural: equal keys hold equal slots in every call.
    """

    op: str
    children: tuple[SlotExpr, ...]
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    key: Any

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def sources(self) -> set[int]:
        """Fresh sources that may appear."""
        if self.op == "rows":
            return {self.args[0]}
        return set().union(*(c.sources() for c in self.children)) if self.children else set()

    def contains(self, other: SlotExpr) -> bool:
        return self.key == other.key or any(c.contains(other) for c in self.children)

    def host_nodes(self) -> set[fx.Node]:
        out = {a for a in self.args if isinstance(a, fx.Node)}
        for c in self.children:
            out |= c.host_nodes()
        return out


class Exprs:
    """Builds interned slot expressions; ``host_key`` gives the structural key of a host node."""

    def __init__(self, host_key: Any) -> None:
        self._host_key = host_key
        self._intern: dict[Any, SlotExpr] = {}
        self._ids: dict[int, np.ndarray] = {}  # slot ids of expressions that never change

    def make(
        self, op: str, children: Sequence[SlotExpr], args: Sequence[Any], shape: Sequence[int]
    ) -> SlotExpr:
        shape = tuple(int(s) for s in shape)
        key: Any = (
            op,
            tuple(c.key for c in children),
            tuple(self._host_key(a) for a in args),
            shape,
        )
        if key in self._intern:
            return self._intern[key]
        expr = SlotExpr(op, tuple(children), tuple(args), shape, None)
        known = self._intern[key] = self._normal(expr)
        return known

    def _normal(self, expr: SlotExpr) -> SlotExpr:
        """One expression for all spellings of a movement that is the same in every call.

        Movements by Python ints that change are compared as they are written.
        """
        static = all(id(c) in self._ids for c in expr.children)
        if static and not any(isinstance(a, fx.Node) for a in expr.args):
            ids = _eval(expr, [self._ids[id(c)] for c in expr.children], list(expr.args))
            digest = ("ids", expr.shape, ids.tobytes())
            if digest not in self._intern:
                # a number stands for the key: expressions nest deeply in unrolled models
                made = dataclasses.replace(expr, key=("e", len(self._intern)))
                self._intern[digest] = made
                self._ids[id(made)] = ids
            return self._intern[digest]
        return dataclasses.replace(expr, key=("e", len(self._intern)))

    def base(self, shape: Sequence[int]) -> SlotExpr:
        return self.make("base", (), (), shape)

    def rows(self, source: int, shape: Sequence[int]) -> SlotExpr:
        return self.make("rows", (), (source,), shape)

    def reshape(self, x: SlotExpr, shape: Sequence[int]) -> SlotExpr:
        shape = tuple(int(s) for s in shape)
        if shape == x.shape:
            return x
        if x.op == "reshape":
            return self.reshape(x.children[0], shape)
        return self.make("reshape", (x,), (), shape)


def evaluate(
    expr: SlotExpr, env: Mapping[fx.Node, Any], memo: dict[Any, np.ndarray] | None = None
) -> np.ndarray:
    """Slot ids of every position, shape ``expr.shape``; ``env`` maps host nodes to values."""
    memo = {} if memo is None else memo

    def arg(a: Any) -> Any:
        if isinstance(a, fx.Node):
            a = env[a]
        if isinstance(a, torch.Tensor):
            with _disable_current_modes():  # compile time has fake tensors in force
                a = a.numpy()
        return a

    def go(e: SlotExpr) -> np.ndarray:
        if e.key not in memo:
            memo[e.key] = _eval(e, [go(c) for c in e.children], [arg(a) for a in e.args])
        return memo[e.key]

    return go(expr)


def _span(n: int, start: Any, end: Any, step: int) -> slice:
    # torch's slice clamps like Python's; None means the edge
    return slice(*slice(start, end, step).indices(n))


def _eval(e: SlotExpr, xs: list[np.ndarray], args: list[Any]) -> np.ndarray:
    if e.op == "base":
        return np.arange(e.count, dtype=np.int64).reshape(e.shape)
    if e.op == "rows":
        return row_id(args[0], np.arange(e.count, dtype=np.int64)).reshape(e.shape)
    x = xs[0]
    if e.op == "reshape":
        return x.reshape(e.shape)
    if e.op == "permute":
        return x.transpose(args)
    if e.op == "cat":
        return np.concatenate(xs, axis=args[0])
    if e.op == "slice":
        axis, start, end, step = args
        idx = [slice(None)] * x.ndim
        idx[axis] = _span(x.shape[axis], start, end, step)
        return x[tuple(idx)]
    if e.op == "slice_scatter":
        axis, start, end, step = args
        out = x.copy()
        idx = [slice(None)] * x.ndim
        idx[axis] = _span(x.shape[axis], start, end, step)
        out[tuple(idx)] = xs[1]
        return out
    if e.op == "select":
        return np.take(x, args[1], axis=args[0])
    if e.op == "select_scatter":
        out = x.copy()
        sel: list[Any] = [slice(None)] * x.ndim
        sel[args[0]] = args[1]
        out[tuple(sel)] = xs[1]
        return out
    if e.op == "roll":
        n = len(args) // 2
        return np.roll(x, tuple(args[:n]), tuple(args[n:]))
    if e.op == "flip":
        return np.flip(x, tuple(args))
    # index_select and index_copy do not count from the end
    if e.op.endswith("_strict") and ((args[1] < 0) | (args[1] >= x.shape[args[0]])).any():
        raise IndexError(f"slot index out of range: {args[1].tolist()} of {x.shape[args[0]]}")
    if e.op in ("index", "index_strict"):
        return np.take(x, args[1], axis=args[0], mode="raise")
    if e.op in ("index_put", "index_put_strict"):
        out = x.copy()
        put: list[Any] = [slice(None)] * x.ndim
        put[args[0]] = args[1]
        out[tuple(put)] = xs[1]
        return out
    raise AssertionError(f"unknown slot op {e.op}")
