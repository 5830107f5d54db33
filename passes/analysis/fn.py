"""Slot functions: what slot-local work does to one slot, as a tree to be emitted for any rows.

The read region of a cache is a function ``f(raw slot, table rows, constants)``. It is kept as a
tree over the region's own ATen ops, so that applying it to new rows runs exactly the arithmetic
that eager runs (same rounding), only on fewer slots.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor that enters slot-local work from outside.

    ``role``: "const" (a constant of the session, used as it is) or "table" (a host value: varies
    along the slots, or from call to call). ``axes``: the slot axes in the operand's own shape, or
    None where it is the same for all slots. ``entries``: the host nodes and, for each, the slot
    expression at the point of entry: more than one where branches with equal work were
    concatenated (the sink roped apart from the window).
    """

    role: str
    entries: tuple[tuple[fx.Node, Any], ...]
    axes: tuple[int, ...] | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: Any

    @property
    def node(self) -> fx.Node:
        return self.entries[0][0]

    def rows_shape(self, n: int) -> tuple[int, ...]:
        """Shape for ``n`` rows: the slot axes become (1, ..., n)."""
        if self.axes is None:
            return self.shape
        return with_slots(self.shape, self.axes, n)


@dataclass(frozen=True, eq=False)
class Fn:
    """``raw`` (the slot itself), ``op`` (an ATen call) or ``item`` (an output of such a call).

    ``shape`` and ``dims``: shape of the region's own value and the slot axes in it.
    """

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype
    key: Any
    node: fx.Node | None = None
    size: int = 1  # of the whole, written out as a tree, as keys are

    @property
    def children(self) -> list[Fn]:
        return [a for a in _flat(self.args) if isinstance(a, Fn)]

    def operands(self) -> list[Operand]:
        """Operands in order of first use, each once."""
        out: dict[int, Operand] = {}

        def go(f: Fn) -> None:
            for a in _flat(f.args):
                if isinstance(a, Fn):
                    go(a)
                elif isinstance(a, Operand):
                    out.setdefault(id(a), a)

        go(self)
        return list(out.values())

    def operands_here(self) -> list[Operand]:
        """Operands of this op alone."""
        return [a for a in _flat(self.args) if isinstance(a, Operand)]

    def contains(self, sub: Fn) -> bool:
        return self.key == sub.key or any(c.contains(sub) for c in self.children)

    def raw_outside(self, sub: Fn) -> bool:
        """Whether ``raw`` is reached on a path that avoids ``sub``."""
        if self.key == sub.key:
            return False
        return self.kind == "raw" or any(c.raw_outside(sub) for c in self.children)

    @property
    def is_layout(self) -> bool:
        """Only moves elements about (or is raw): no arithmetic, no cast."""
        if self.kind == "raw":
            return True
        return self.kind == "op" and self.target in LAYOUT and self.children[0].is_layout

    def arithmetic(self) -> int:
        """Number of ops that are more than layout."""
        free = LAYOUT | PICKS
        return sum(1 for f in walk(self) if f.kind == "op" and f.target not in free)


LAYOUT = {
    *_RESHAPES,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.expand.default,
    aten.alias.default,
    aten.detach.default,
}


# Parts of a slot's features: views at read time, like layout, but they drop elements.
PICKS = {
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.unbind.int,
    aten.tensor_split.sections,
}


def walk(fn: Fn) -> list[Fn]:
    seen: dict[Any, Fn] = {}
    stack = [fn]
    while stack:
        f = stack.pop()
        if f.key not in seen:
            seen[f.key] = f
            stack.extend(f.children)
    return list(seen.values())


def _flat(args: Any) -> list[Any]:
    if isinstance(args, (list, tuple)):
        return [x for a in args for x in _flat(a)]
    return [args]


_PERMUTES = (aten.permute.default, aten.transpose.int, aten.t.default)


def off_slots(shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """``shape`` with -1 at the slot axes: what is left when the number of slots does not matter."""
    return tuple(-1 if i in dims else int(s) for i, s in enumerate(shape))


def with_slots(shape: Sequence[int], dims: Sequence[int], n: int) -> tuple[int, ...]:
    """``shape`` with the slot axes replaced by (1, ..., 1, n)."""
    out = list(shape)
    for d in dims:
        out[d] = 1
    out[dims[-1]] = n
    return tuple(out)


def raw_fn(shape: Sequence[int], dims: Sequence[int], dtype: torch.dtype) -> Fn:
    return Fn(
        "raw",
        None,
        (),
        (),
        tuple(shape),
        tuple(dims),
        dtype,
        ("raw", off_slots(shape, dims), tuple(dims), str(dtype)),
    )


def op_fn(
    kind: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shape: Sequence[int],
    dims: Sequence[int],
    dtype: torch.dtype,
    node: fx.Node | None,
) -> Fn:
    """Build an op node; pure layout chains are simplified so that equal layouts have equal keys."""
    child = args[0] if args and isinstance(args[0], Fn) else None
    if kind == "op" and child is not None and target in LAYOUT:
        off = off_slots(shape, dims)
        same = off == off_slots(child.shape, child.dims) and tuple(dims) == child.dims
        if same and target not in _PERMUTES:
            return child
        perm = permutation(target, args, len(child.shape))
        if perm is not None:
            if child.kind == "op" and child.target is aten.permute.default and child.children:
                inner = child.args[1]
                perm = [inner[p] for p in perm]
                child = child.children[0]
            if list(perm) == list(range(len(perm))):
                return child
            target, args, kwargs = aten.permute.default, (child, tuple(perm)), {}
        elif target is not aten.expand.default:
            if child.kind == "op" and child.target is aten.reshape.default and child.children:
                child = child.children[0]
                if off == off_slots(child.shape, child.dims) and tuple(dims) == child.dims:
                    return child
            target, args, kwargs = aten.reshape.default, (child, off), {}
        else:
            args = (child, off)
    kw = tuple(sorted(kwargs.items()))
    key = (kind, str(target), _key(args), _key(kw), off_slots(shape, dims), tuple(dims))
    size = 1 + sum(a.size for a in _flat(args) if isinstance(a, Fn))
    return Fn(kind, target, tuple(args), kw, tuple(shape), tuple(dims), dtype, key, node, size)


def _key(a: Any) -> Any:
    if isinstance(a, (Fn, Operand)):
        return a.key
    if isinstance(a, (list, tuple)):
        return tuple(_key(x) for x in a)
    return (type(a).__name__, str(a))


def permutation(target: Any, args: Sequence[Any], rank: int) -> list[int] | None:
    """The permutation that ``permute``/``transpose``/``t`` applies, or None for other ops."""
    if target is aten.permute.default:
        return [int(d) % rank for d in args[1]]
    perm = list(range(rank))
    if target is aten.transpose.int:
        i, j = int(args[1]) % rank, int(args[2]) % rank
    elif target is aten.t.default:
        if rank < 2:
            return perm
        i, j = 0, 1
    else:
        return None
    perm[i], perm[j] = perm[j], perm[i]
    return perm


def merge(a: Fn, b: Fn) -> Fn | None:
    """One function for two branches with equal work, tables side by side; None if they differ.

    Equal work means the same ops on the same literals and constants; tables may differ in value, as
    long as each table of one branch stands for exactly one of the other.
    """
    pairs: dict[Any, Any] = {}
    memo: dict[tuple[Any, Any], Any] = {}

    def go(x: Any, y: Any) -> Any:
        if isinstance(x, Operand) and isinstance(y, Operand):
            if x.role != "table":
                return x if x.key == y.key else None
            if (x.axes, x.dtype) != (y.axes, y.dtype):
                return None
            if not _same_rows(x, y) or pairs.setdefault(x.key, y.key) != y.key:
                return None
            if x.key == y.key and x.entries == y.entries:
                return x
            entries = x.entries + tuple(e for e in y.entries if e not in x.entries)
            return Operand("table", entries, x.axes, x.shape, x.dtype, ("+", x.key, y.key))
        if isinstance(x, Fn) and isinstance(y, Fn):
            if x.target is aten.empty_like.default or y.target is aten.empty_like.default:
                # what was never written may as well be a function of the same slot
                return y if x.target is aten.empty_like.default else x
            if (x.key, y.key) in memo:
                return memo[x.key, y.key]
            if (x.kind, x.target, len(x.args), x.kwargs, x.dims, len(x.shape), x.dtype) != (
                y.kind, y.target, len(y.args), y.kwargs, y.dims, len(y.shape), y.dtype
            ):  # fmt: skip
                return None
            if off_slots(x.shape, x.dims) != off_slots(y.shape, y.dims):
                return None
            out: Any = x
            if x.kind != "raw":
                args = tuple(go(p, q) for p, q in zip(x.args, y.args, strict=True))
                if any(p is None for p, q in zip(args, x.args, strict=True) if q is not None):
                    return None
                kw = dict(x.kwargs)
                out = op_fn(x.kind, x.target, args, kw, x.shape, x.dims, x.dtype, x.node)
            memo[x.key, y.key] = out
            return out
        if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
            if len(x) != len(y):
                return None
            parts = [go(p, q) for p, q in zip(x, y, strict=True)]
            if any(p is None for p, q in zip(parts, x, strict=True) if q is not None):
                return None
            return tuple(parts)
        if type(x) is not type(y) or isinstance(x, (Fn, Operand)):
            return None
        return x if x == y else None

    out = go(a, b)
    if len(set(map(str, pairs.values()))) != len(pairs):
        return None
    return out


def _same_rows(x: Operand, y: Operand) -> bool:
    off = x.axes or ()
    return off_slots(x.shape, off) == off_slots(y.shape, off)


def structural_key(fn: Fn, *, consts: bool = True) -> str:
    """A key that names tables by number, so that two graphs with equal work agree on it.

    ``consts``: whether the same work with other constants (another layer's norm weight) differs.
    """
    numbers: dict[Any, int] = {}
    memo: dict[Any, str] = {}

    def go(x: Any) -> str:
        if isinstance(x, Operand):
            if x.role == "const" and consts:
                return f"const{x.key}"
            i = numbers.setdefault(x.key, len(numbers))
            return f"{x.role}{i}:{x.axes}:{off_slots(x.shape, x.axes or ())}:{x.dtype}"
        if isinstance(x, Fn):
            if x.key not in memo:
                body = "raw" if x.kind == "raw" else f"{x.target}({go(x.args)},{x.kwargs})"
                memo[x.key] = f"@{len(memo)}={body}:{off_slots(x.shape, x.dims)}:{x.dims}:{x.dtype}"
                return memo[x.key]
            return memo[x.key].split("=", 1)[0]
        if isinstance(x, (list, tuple)):
            return "[" + ",".join(go(i) for i in x) + "]"
        return repr(x)

    return go(fn)


Call = Callable[..., Any]


def emit(
    fn: Fn,
    n: int,
    call: Call,
    leaf: Callable[[Fn], Any],
    operand: Callable[[Operand], Any],
) -> Any:
    """Apply ``fn`` to ``n`` rows.

    ``call(target, args, kwargs)`` performs or records an op; ``leaf(f)`` gives the rows that stand
    for subtree ``f`` or None (asked at every node, so a caller may substitute any subtree);
    ``operand(o)`` gives the operand, tables already cut to the rows.
    """
    memo: dict[Any, Any] = {}

    def go(f: Any) -> Any:
        if isinstance(f, Operand):
            return operand(f)
        if isinstance(f, (list, tuple)):
            return [go(x) for x in f]
        if not isinstance(f, Fn):
            return f
        if f.key in memo:
            return memo[f.key]
        out = leaf(f)
        if out is None:
            assert f.kind != "raw", "no rows given for the raw slot"
            out = _emit_op(f, n, call, go)
        memo[f.key] = out
        return out

    return go(fn)


def _emit_op(f: Fn, n: int, call: Call, go: Callable[[Any], Any]) -> Any:
    args = [go(a) for a in f.args]
    kwargs = {k: go(v) for k, v in f.kwargs}
    if f.kind == "item":
        return call(operator.getitem, (args[0], f.args[1]), {})
    target = f.target
    if target in _RESHAPES or target is aten.expand.default:
        shape = list(with_slots(f.shape, f.dims, n))
        if target is not aten.expand.default:
            target = aten.reshape.default
        return call(target, (args[0], shape), {})
    if target is aten.view_as_complex.default:
        # the program's own .contiguous() is not kept: clones are no work on a slot
        args[0] = call(aten.clone.default, (args[0],), {"memory_format": torch.contiguous_format})
    return call(target, tuple(args), kwargs)


def substituting(old: Fn, rows: Any) -> Callable[[Fn], Any]:
    """A ``leaf`` for :func:`emit` that puts ``rows`` in place of subtree ``old``."""
    return lambda f: rows if f.key == old.key else None


def invert_layout(fn: Fn, n: int, call: Call, value: Any, stop: Fn | None = None) -> Any | None:
    """From ``fn``'s layout back to that of ``stop`` (raw), where only layout lies between.

    None where there is no way back.
    """
    chain: list[Fn] = []
    f = fn
    while f.kind != "raw" if stop is None else f.key != stop.key:
        if f.kind != "op" or f.target not in LAYOUT or f.target is aten.expand.default:
            return None
        chain.append(f)
        f = f.children[0]
    for f in chain:
        child = f.children[0]
        if f.target is aten.permute.default:
            perm = list(f.args[1])
            inverse = [perm.index(i) for i in range(len(perm))]
            value = call(aten.permute.default, (value, inverse), {})
        else:
            value = call(
                aten.reshape.default, (value, list(with_slots(child.shape, child.dims, n))), {}
            )
    return value
