"""A position table as a function of something narrow: its rows from one number or two a slot.

RoPE tables are wide (a row of cosines and sines for each slot) but made from positions, one number
a slot and axis. Found backwards from the table: ops that work on each row by itself (pointwise,
layout, joins along other axes, look-ups by a narrow index) down to *leaves*: values with one number
a row, or rows of a constant, for which their index stands. Then

* whether a kept slot's row changed is a comparison of leaves: exact, and narrow;
* rows are evaluated for the slots that need them, not for all.

Where no rule applies the wide value is a leaf itself, which is right and only slower.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from rtc.passes.analysis import shapes
from rtc.passes.analysis.fn import (
    LAYOUT,
    Fn,
    Operand,
    emit,
    off_slots,
    op_fn,
    permutation,
    structural_key,
    walk,
    with_slots,
)
from rtc.passes.analysis.host import Deps, HostInfo
from rtc.passes.analysis.shapes import NotLocal
from rtc.passes.analysis.slots import COPIES, is_pointwise, shape_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Projection:
    """How a flat row number becomes one of a grid with fewer axes."""

    grid: tuple[int, ...]
    kept: tuple[int, ...]

    def __call__(self, rows: np.ndarray, env: Mapping[fx.Node, Any]) -> np.ndarray:
        at = np.unravel_index(rows, self.grid)
        sub = tuple(self.grid[i] for i in self.kept)
        return np.ravel_multi_index(tuple(at[i] for i in self.kept), sub)

    @property
    def nodes(self) -> set[fx.Node]:
        return set()


@dataclass(frozen=True)
class Shift:
    """How a row number of a slice becomes one of the ``n`` rows that it was cut from."""

    start: Any  # an int, or a host node
    step: int
    n: int

    def __call__(self, rows: np.ndarray, env: Mapping[fx.Node, Any]) -> np.ndarray:
        start = int(env[self.start]) if isinstance(self.start, fx.Node) else self.start
        return min(start if start >= 0 else max(start + self.n, 0), self.n) + rows * self.step

    @property
    def nodes(self) -> set[fx.Node]:
        return {self.start} if isinstance(self.start, fx.Node) else set()


Path = tuple[Projection | Shift, ...]


@dataclass(frozen=True)
class Leaf:
    """``node``'s values along ``axes``, at the rows that ``path`` leads to.

    kind: "value" (the values are the key), "row" (a constant: the row number is the key) or "const"
    (a constant, the same for all rows: no key).
    """

    kind: str
    node: fx.Node
    axes: tuple[int, ...]
    path: Path = ()

    @property
    def nodes(self) -> set[fx.Node]:
        return {self.node}.union(*(p.nodes for p in self.path))

    def keys(self, env: Mapping[fx.Node, Any], rows: np.ndarray) -> torch.Tensor:
        """[n, width]: equal keys mean equal rows."""
        if self.kind == "const":
            return torch.empty((len(rows), 0))
        for part in self.path:
            rows = part(rows, env)
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        if self.kind == "value":
            return _flat(env[self.node], self.axes)[torch.from_numpy(rows)]
        return torch.from_numpy(rows)[:, None]

    def values(self, env: Mapping[fx.Node, Any], keys: torch.Tensor) -> Any:
        """The rows that ``keys`` stand for, shaped for :func:`emit`: slot axes (1, .., n)."""
        if self.kind == "const":
            return env[self.node]
        val = env[self.node]
        rows = keys if self.kind == "value" else _flat(val, self.axes)[keys[:, 0]]
        n = len(rows)
        shape = with_slots(val.shape, self.axes, n)
        rest = [d for d in range(len(shape)) if d not in self.axes]
        x = rows.reshape(*(shape[a] for a in self.axes), *(shape[d] for d in rest))
        perm = [*self.axes, *rest]
        return x.permute([perm.index(i) for i in range(len(perm))])


def as_bytes(k: torch.Tensor) -> np.ndarray:
    """uint8 [n, width * itemsize] of keys [n, width]"""
    k = k.contiguous()
    if not k.numel():
        return np.zeros((len(k), 0), dtype=np.uint8)
    return k.view(torch.uint8).reshape(len(k), -1).numpy()


def _flat(val: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """[rows, rest]"""
    rest = [d for d in range(val.dim()) if d not in axes]
    n = math.prod(val.shape[a] for a in axes)
    return val.permute(*axes, *rest).reshape(n, -1)


@dataclass(frozen=True)
class RowTable:
    """``fn`` over ``leaves``: the table's rows. ``axes``: slot axes of the table itself."""

    fn: Any  # Fn, or the operand of the only leaf
    leaves: tuple[Leaf, ...]
    axes: tuple[int, ...]
    signature: Any

    @property
    def nodes(self) -> set[fx.Node]:
        """Host values that it needs."""
        return set().union(*(leaf.nodes for leaf in self.leaves))

    def keys(self, env: Mapping[fx.Node, Any], rows: np.ndarray) -> list[torch.Tensor]:
        return [leaf.keys(env, rows) for leaf in self.leaves]

    def rows(
        self, env: Mapping[fx.Node, Any], keys: Sequence[torch.Tensor],
        memo: dict[Any, Any] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """[n, rest]: table rows, the axes other than the slots' flattened in order.

        ``memo``: of one call. New queries and new keys mostly ask for the same rows.
        """
        content = tuple((len(k), k.dtype, as_bytes(k).tobytes()) for k in keys)
        if memo is None:
            return self._rows(env, keys, content)
        asked = ("rows", self.signature, self.axes, content)
        if asked not in memo:
            memo[asked] = self._rows(env, keys, content)
        return memo[asked]

    def _rows(
        self, env: Mapping[fx.Node, Any], keys: Sequence[torch.Tensor], content: Sequence[Any]
    ) -> torch.Tensor:
        n = len(keys[0])
        given = {leaf: leaf.values(env, k) for leaf, k in zip(self.leaves, keys, strict=True)}
        of = dict(zip(self.leaves, content, strict=True))

        def operand(o: Operand) -> Any:
            return given[o.key[1]]

        def remembered(f: Fn) -> Any:
            """Of frame, row and column of a patch, two are the same in every call."""
            leaves = self._pieces.get(f.key)
            if leaves is None:
                return None
            keys = [of[leaf] for leaf in leaves]
            tables = [env[leaf.node] for leaf in leaves if leaf.kind != "value"]
            have = self._kept.get(f.key)
            if have is None or have[0] != keys or any(map(operator.is_not, have[1], tables)):
                value = emit(f, n, _call, lambda g: None if g is f else remembered(g), operand)
                have = self._kept[f.key] = keys, tables, value
            return have[2]

        with _disable_current_modes(), torch.no_grad():
            if isinstance(self.fn, Fn):
                out = emit(self.fn, n, _call, remembered, operand)
            else:
                out = operand(self.fn)
            return _flat(out, self.axes)

    @functools.cached_property
    def _kept(self) -> dict[Any, tuple[list[Any], list[Any], Any]]:
        """Of each piece: the keys and tables that it was last worked out from, and its rows."""
        return {}

    @functools.cached_property
    def _pieces(self) -> dict[Any, list[Leaf]]:
        """What is joined side by side, by its key: the leaves that it is made from."""
        found: dict[Any, list[Leaf]] = {}
        for f in walk(self.fn) if isinstance(self.fn, Fn) else []:
            if f.target is aten.cat.default:
                for piece in f.children:
                    found[piece.key] = [o.key[1] for o in piece.operands()]
        return found


def _call(target: Any, args: Any, kwargs: Any) -> Any:
    kwargs = {
        k: torch.device("cpu") if isinstance(v, torch.device) else v for k, v in kwargs.items()
    }
    kwargs.pop("pin_memory", None)
    return target(*args, **kwargs)


def trivial(node: fx.Node, axes: tuple[int, ...], grid: tuple[int, ...]) -> RowTable:
    """The table as its own leaf."""
    shape = shape_of(node)
    sizes = tuple(shape[a] for a in axes)
    path: Path = () if sizes == grid else (Projection(grid, _kept(sizes, grid)),)
    leaf = Leaf("value", node, axes, path)
    return RowTable(_operand(leaf), (leaf,), axes, ("table", off_slots(shape, axes)))


def decompose(
    host: HostInfo, node: fx.Node, axes: tuple[int, ...], grid: tuple[int, ...]
) -> RowTable:
    """The table ``node``, whose row axes ``axes`` (of size 1 or as in ``grid``) are adjacent."""
    try:
        found = _Finder(host)
        fn = found.go(node, axes, grid, ())
        names = structural_key(fn) if isinstance(fn, Fn) else "leaf"
        return RowTable(fn, tuple(found.leaves), axes, (names, *map(found.meaning, found.leaves)))
    except NotLocal:
        return trivial(node, axes, grid)


def _operand(leaf: Leaf) -> Operand:
    axes = None if leaf.kind == "const" else leaf.axes
    dtype = leaf.node.meta["val"].dtype
    return Operand("table", ((leaf.node, None),), axes, shape_of(leaf.node), dtype, ("leaf", leaf))


def _kept(sizes: Sequence[int], grid: Sequence[int]) -> tuple[int, ...]:
    """Grid axes along which a value of these sizes has rows of its own."""
    return tuple(i for i, (s, g) in enumerate(zip(sizes, grid, strict=True)) if s == g)


class _Finder:
    """Walks back from a table. ``axes`` of a node are its row axes, of the sizes of ``grid`` or 1
    where it is the same along them; ``path`` leads from the table's row numbers to the grid's."""

    def __init__(self, host: HostInfo) -> None:
        self.host = host
        self.leaves: list[Leaf] = []
        self.memo: dict[Any, Any] = {}

    def meaning(self, leaf: Leaf) -> Any:
        """Leaves of equal meaning have equal keys for equal rows."""
        if leaf.kind != "value":
            return leaf.kind, self.host.key(leaf.node), leaf.axes
        shape = shape_of(leaf.node)
        return leaf.kind, off_slots(shape, leaf.axes), leaf.axes, leaf.node.meta["val"].dtype

    def go(self, node: fx.Node, axes: tuple[int, ...], grid: tuple[int, ...], path: Path) -> Any:
        key = (node, axes, grid, path)
        if key not in self.memo:
            self.memo[key] = self._find(node, axes, grid, path)
        return self.memo[key]

    def _find(self, node: fx.Node, axes: Any, grid: Any, path: Any) -> Any:
        shape = shape_of(node)
        sizes = tuple(shape[a] for a in axes)
        if any(s not in (g, 1) for s, g in zip(sizes, grid, strict=True)):
            raise NotLocal("rows do not line up")
        if all(s == 1 for s in sizes):
            return self._const(node)
        changing = Deps.INT in self.host.deps[node]
        own = path if sizes == grid else (*path, Projection(grid, _kept(sizes, grid)))
        if math.prod(shape) == math.prod(sizes):
            return self._leaf(Leaf("value", node, axes, own))
        mark, known = len(self.leaves), len(self.memo)
        try:
            return self._op(node, axes, grid, path)
        except NotLocal:
            del self.leaves[mark:]
            for key in list(self.memo)[known:]:
                del self.memo[key]  # it may stand on a leaf that is gone
            return self._leaf(Leaf("value" if changing else "row", node, axes, own))

    def _const(self, node: fx.Node) -> Operand:
        """A value without rows; one that changes from call to call has no place among rows that
        were made in different calls."""
        if self.host.deps[node] & Deps.INT or not isinstance(node.meta["val"], torch.Tensor):
            raise NotLocal("it changes from call to call")
        return self._leaf(Leaf("const", node, ()))

    def _leaf(self, leaf: Leaf) -> Operand:
        if leaf not in self.leaves:
            self.leaves.append(leaf)
        return _operand(leaf)

    def _op(self, node: fx.Node, axes: Any, grid: Any, path: Any) -> Any:
        t = node.target
        if node.op != "call_function":
            raise NotLocal("an input")
        x = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if t in COPIES and x is not None:
            return self.go(x, axes, grid, path)
        if t in LAYOUT and x is not None:
            return self._layout(node, x, axes, grid, path)
        if t is aten.view_as_real.default or t is aten.view_as_complex.default:
            assert x is not None
            if axes[-1] >= len(shape_of(x)) - (t is aten.view_as_complex.default):
                raise NotLocal("the rows are the complex pair")
            return self._made(node, axes, (self.go(x, axes, grid, path),))
        if is_pointwise(t):
            return self._pointwise(node, axes, grid, path)
        if t in (aten.cat.default, aten.stack.default):
            return self._join(node, axes, grid, path)
        if t is aten.slice.Tensor or t is aten.select.int:
            return self._part(node, axes, grid, path)
        if t in (aten.index.Tensor, aten.embedding.default, aten.index_select.default):
            return self._lookup(node, axes, grid, path)
        raise NotLocal(f"{t}")

    def _made(self, node: fx.Node, axes: Any, args: Any, kwargs: Any = None) -> Fn:
        kwargs = dict(node.kwargs) if kwargs is None else kwargs
        return op_fn(
            "op", node.target, args, kwargs, shape_of(node), axes, node.meta["val"].dtype, node
        )

    def _layout(self, node: fx.Node, x: fx.Node, axes: Any, grid: Any, path: Any) -> Any:
        src, dst = shape_of(x), shape_of(node)
        perm = permutation(node.target, node.args, len(src))
        if perm is not None:
            new = tuple(perm[a] for a in axes)
            if new != tuple(range(new[0], new[0] + len(new))):
                raise NotLocal("row axes are permuted")
            return self._shaped(node, axes, self.go(x, new, grid, path))
        if node.target is aten.expand.default:
            off = len(dst) - len(src)
            new = tuple(a - off for a in axes)
            if any(a < 0 for a in new):
                raise NotLocal("rows are made by expanding")
            return self._shaped(node, axes, self.go(x, new, grid, path))
        sizes = tuple(dst[a] for a in axes)
        if sizes != grid:
            path = (*path, Projection(grid, _kept(sizes, grid)))
        new = shapes.reshape_dims(dst, src, axes)
        sub = tuple(src[a] for a in new)
        if math.prod(sub) != math.prod(sizes):
            raise NotLocal("rows are regrouped")
        return self._shaped(node, axes, self.go(x, new, sub, path))

    def _shaped(self, node: fx.Node, axes: Any, child: Any) -> Any:
        """Layout on top of a child; a leaf is wrapped, so that the op has something to work on."""
        if isinstance(child, Operand) and child.axes is None:
            raise NotLocal("the same for all rows")
        if node.target is aten.expand.default or permutation(
            node.target, node.args, len(shape_of(node.args[0]))  # type: ignore[arg-type]
        ):  # fmt: skip
            if node.target is aten.expand.default:
                args: Any = (child, off_slots(shape_of(node), axes))
                return self._direct(node, aten.expand.default, args, axes)
            perm = permutation(node.target, node.args, len(shape_of(node)))
            assert perm is not None
            return self._direct(node, aten.permute.default, (child, tuple(perm)), axes)
        return self._direct(
            node, aten.reshape.default, (child, off_slots(shape_of(node), axes)), axes
        )

    def _direct(self, node: fx.Node, target: Any, args: Any, axes: Any) -> Fn:
        return op_fn("op", target, args, {}, shape_of(node), axes, node.meta["val"].dtype, node)

    def _pointwise(self, node: fx.Node, axes: Any, grid: Any, path: Any) -> Fn:
        rank = len(shape_of(node))

        def conv(a: Any) -> Any:
            if isinstance(a, (list, tuple)):
                return tuple(conv(x) for x in a)
            if not isinstance(a, fx.Node):
                return a
            if not isinstance(a.meta["val"], torch.Tensor):
                return self._const(a)
            off = rank - len(shape_of(a))
            have = [i for i, d in enumerate(axes) if d >= off]
            sizes = [shape_of(a)[axes[i] - off] for i in have]
            if all(s == 1 for s in sizes):
                return self._const(a)
            sub, sub_path = grid, path
            if len(have) < len(axes):
                sub = tuple(grid[i] for i in have)
                sub_path = (*path, Projection(grid, tuple(have)))
            return self.go(a, tuple(axes[i] - off for i in have), sub, sub_path)

        args = conv(node.args)
        kwargs = {k: conv(v) for k, v in node.kwargs.items()}
        return _apart(self._made(node, axes, args, kwargs))

    def _join(self, node: fx.Node, axes: Any, grid: Any, path: Any) -> Fn:
        rank = len(shape_of(node))
        axis = (int(node.args[1]) if len(node.args) > 1 else 0) % rank  # type: ignore[arg-type]
        if axis in axes:
            raise NotLocal("tables are joined along their rows")
        inner = tuple(a - (node.target is aten.stack.default and axis < a) for a in axes)
        parts = []
        for p in node.args[0]:  # type: ignore[union-attr]
            parts.append(self.go(p, inner, grid, path))  # type: ignore[arg-type]
        return self._made(node, axes, (tuple(parts), *node.args[1:]))

    def _part(self, node: fx.Node, axes: Any, grid: Any, path: Any) -> Any:
        x: fx.Node = node.args[0]  # type: ignore[assignment]
        rank = len(shape_of(x))
        axis = (int(node.args[1]) if len(node.args) > 1 else 0) % rank  # type: ignore[arg-type]
        if node.target is aten.select.int:
            new = tuple(a + (axis <= a) for a in axes)
            if axis in range(new[0], new[-1] + 1):
                raise NotLocal("an axis between the row axes is picked")
            if isinstance(node.args[2], fx.Node):
                raise NotLocal("picked by a changing number")
            return self._made(node, axes, (self.go(x, new, grid, path), *node.args[1:]))
        bounds = [*node.args[2:], None, None, 1][:3] if len(node.args) > 2 else [None, None, 1]
        start, _, step = bounds if len(node.args) > 4 else (*bounds[:2], 1)
        if axis not in axes:
            if any(isinstance(a, fx.Node) for a in node.args[1:]):
                raise NotLocal("cut at a changing place")
            return self._made(node, axes, (self.go(x, axes, grid, path), *node.args[1:]))
        n = shape_of(x)[axis]
        if len(axes) != 1 or shape_of(node)[axis] != grid[0] or not isinstance(step, int):
            raise NotLocal("cut along several row axes")
        if not isinstance(start, (fx.Node, int, type(None))):
            raise NotLocal("cut at an unknown place")
        # the rows are the very rows of x: nothing is left of the cut but where they lie
        return self.go(x, axes, (n,), (*path, Shift(start or 0, step, n)))

    def _lookup(self, node: fx.Node, axes: Any, grid: Any, path: Any) -> Fn:
        table: Any = node.args[0]
        if Deps.INT in self.host.deps[table]:
            raise NotLocal("a changing table")
        if node.target is aten.index_select.default:
            if int(node.args[1]) % len(shape_of(table)) != 0 or axes != (0,):  # type: ignore[arg-type]
                raise NotLocal("looked up along another axis")
            idx: Any = node.args[2]
        elif node.target is aten.embedding.default:
            idx = node.args[1]
        else:
            if len(node.args[1]) != 1:  # type: ignore[arg-type]
                raise NotLocal("several indices")
            idx = node.args[1][0]  # type: ignore[index]
        if axes[-1] >= len(shape_of(idx)):
            raise NotLocal("rows of the table itself")
        rows = self.go(idx, axes, grid, path)
        whole = self._const(table)
        if node.target is aten.index_select.default:
            return self._made(node, axes, (whole, 0, rows))
        if node.target is aten.embedding.default:
            return self._direct(node, aten.embedding.default, (whole, rows), axes)
        return self._made(node, axes, (whole, (rows,)))


def _apart(f: Fn) -> Fn:
    """A function of values joined side by side as one of each: equal ones are worked out once."""
    x = f.args[0] if f.args else None
    rest = [a for a in (*f.args[1:], *(v for _, v in f.kwargs)) if isinstance(a, (Fn, Operand))]
    if not isinstance(x, Fn) or x.target is not aten.cat.default or rest or len(f.children) > 1:
        return f
    parts = x.args[0]
    # joined, parts of several dtypes become one
    if not all(isinstance(p, Fn) and p.dtype == x.dtype for p in parts) or f.shape != x.shape:
        return f
    made = tuple(
        _apart(
            op_fn(
                "op", f.target, (p, *f.args[1:]), dict(f.kwargs), p.shape, p.dims, f.dtype, f.node
            )
        )
        for p in parts
    )
    return op_fn("op", x.target, (made, *x.args[1:]), {}, x.shape, x.dims, f.dtype, x.node)


__all__ = ["RowTable", "decompose", "trivial"]
