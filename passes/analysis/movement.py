"""Slot movement: the ops that copy whole slots from one place to another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from rtc.passes.analysis import shapes
from rtc.passes.analysis.exprs import SlotExpr
from rtc.passes.analysis.fn import Fn, invert_layout, merge, op_fn, permutation, with_slots
from rtc.passes.analysis.shapes import NotLocal

if TYPE_CHECKING:
    from rtc.passes.analysis.slots import LocalAnalysis, SlotVal

aten = torch.ops.aten
_END = 9223372036854775807

SPLITS = {
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.chunk.default: 2,
    aten.unbind.int: 1,
    aten.tensor_split.sections: 2,
}


def _shape(node: Any) -> tuple[int, ...]:
    return shapes.ints(node.meta["val"].shape)


def _dtype(node: Any) -> torch.dtype:
    return node.meta["val"].dtype


def _arg(node: fx.Node, pos: int, name: str, default: Any) -> Any:
    return node.args[pos] if len(node.args) > pos else node.kwargs.get(name, default)


def rule(an: LocalAnalysis, node: fx.Node) -> Any:
    """The slot value of a movement op along the slot axes, or None if the op is not one."""
    handler = _RULES.get(node.target)
    return handler(an, node) if handler is not None else None


def _axis(v: SlotVal, axis: int, rank: int) -> int | None:
    axis = int(axis) % rank
    return v.dims.index(axis) if axis in v.dims else None


def _host_args(an: LocalAnalysis, *args: Any) -> None:
    for a in args:
        if isinstance(a, fx.Node) and not an.host.on_host(a):
            raise NotLocal(f"slots are moved to a place that depends on {an.host.why_data(a)}")


def _unify(an: LocalAnalysis, node: fx.Node, parts: list[tuple[Any, tuple[int, ...]]]) -> Any:
    """Common function of several (node, broadcast shape) parts, and a slot expression for each."""
    vals = [an.val(p) for p, _ in parts]
    known = [v for v in vals if v is not None]
    first = known[0]
    fn = first.fn
    for v in known[1:]:
        if v.dims != first.dims:
            raise NotLocal("slot axes differ between the parts")
        both = merge(fn, v.fn)
        if both is None:
            raise NotLocal("different work on different slots")
        fn = both
    like = type(first)(first.dims, first.expr, fn)
    exprs = []
    for (p, shape), v in zip(parts, vals, strict=True):
        if v is not None:
            exprs.append(v.expr)
        else:
            exprs.append(an.rows(p, like, shape, first.dims, fn.dtype))
    return fn, first.dims, exprs


def _slice(an: LocalAnalysis, node: fx.Node) -> Any:
    v = an.val(node.args[0])
    if v is None:
        return None
    x = _shape(node.args[0])
    k = _axis(v, _arg(node, 1, "dim", 0), len(x))
    if k is None:
        return None
    start, end, step = (
        _arg(node, i, n, d) for i, n, d in ((2, "start", None), (3, "end", None), (4, "step", 1))
    )
    _host_args(an, start, end)
    shape = _shape(node)
    new = [shape[d] for d in v.dims]
    if tuple(new) == v.expr.shape and start in (None, 0) and step == 1:
        return type(v)(v.dims, v.expr, v.fn)
    expr = an.exprs.make("slice", (v.expr,), (k, start, end, step), new)
    return type(v)(v.dims, expr, v.fn)


def _select(an: LocalAnalysis, node: fx.Node) -> Any:
    v = an.val(node.args[0])
    if v is None:
        return None
    x = _shape(node.args[0])
    k = _axis(v, node.args[1], len(x))  # type: ignore[arg-type]
    if k is None:
        return None
    return _frame(an, node, v, k, node.args[2], _shape(node))


def _frame(
    an: LocalAnalysis, node: fx.Node, v: SlotVal, k: int, index: Any, out: tuple[int, ...]
) -> SlotVal:
    """One frame of a cache with several slot axes; the frame axis goes."""
    if len(v.dims) == 1:
        raise NotLocal("one slot is taken out by itself")
    _host_args(an, index)
    shape = [s for i, s in enumerate(v.expr.shape) if i != k]
    expr = an.exprs.make("select", (v.expr,), (k, index), shape)
    dims = tuple(v.dims[:-1])
    # as a function of slots this is a reshape that drops an axis of one frame
    fn = op_fn("op", aten.reshape.default, (v.fn, ()), {}, out, dims, v.fn.dtype, node)
    return type(v)(dims, expr, fn)


def _scatter(an: LocalAnalysis, node: fx.Node) -> Any:
    base, src = node.args[0], node.args[1]
    v = an.val(base) or an.val(src)
    if v is None:
        return None
    dst_shape = _shape(node)
    select = node.target is aten.select_scatter.default
    axis = int(_arg(node, 2, "dim", 0)) % len(dst_shape)
    bv, sv = an.val(base), an.val(src)
    dims = bv.dims if bv is not None else sv.dims  # type: ignore[union-attr]
    if axis not in dims:
        return _feature_scatter(an, node)
    k = dims.index(axis)
    if select:
        if bv is None or sv is not None:
            raise NotLocal("a frame is stored from an unusual place")
        part = list(dst_shape)
        part[axis] = 1
        index = node.args[3]
        _host_args(an, index)
        rows = an.rows(src, bv, part, dims, bv.fn.dtype)  # type: ignore[arg-type]
        rows = an.exprs.reshape(rows, [s for i, s in enumerate(rows.shape) if i != k])
        expr = an.exprs.make("select_scatter", (bv.expr, rows), (k, index), bv.expr.shape)
        return type(bv)(dims, expr, bv.fn)
    start, end, step = (
        _arg(node, i, n, d) for i, n, d in ((3, "start", None), (4, "end", None), (5, "step", 1))
    )
    _host_args(an, start, end)
    fn, dims, (be, se) = _unify(an, node, [(base, dst_shape), (src, _shape(src))])
    if _covers(start, end, step, be.shape[k]):
        return type(v)(dims, se, fn)
    expr = an.exprs.make("slice_scatter", (be, se), (k, start, end, step), be.shape)
    return type(v)(dims, expr, fn)


def _covers(start: Any, end: Any, step: Any, n: int) -> bool:
    whole_end = end is None or (isinstance(end, int) and end >= n)
    return start in (None, 0) and whole_end and step == 1


def _feature_scatter(an: LocalAnalysis, node: fx.Node) -> Any:
    """Part of every slot's features is overwritten, by a function of the same slot."""
    bv, sv = an.val(node.args[0]), an.val(node.args[1])
    if bv is None or sv is None:
        raise NotLocal("part of a slot's features is overwritten")
    if bv.expr.key != sv.expr.key:
        raise NotLocal("different slots meet in one position")
    if any(isinstance(a, fx.Node) for a in node.args[2:]):
        raise NotLocal("a feature axis is cut at a changing place")
    return an.op(node, bv.dims, bv.expr)


def _copy(an: LocalAnalysis, node: fx.Node) -> Any:
    """``copy(self, src)``: the value of src in the shape and dtype of self."""
    dst, src = node.args[0], node.args[1]
    dv, sv = an.val(dst), an.val(src)
    if sv is not None:
        if _shape(src) != _shape(node):
            raise NotLocal("a cache value is broadcast into another")
        if _dtype(src) == _dtype(node):
            return sv
        fn = op_fn("op", aten._to_copy.default, (sv.fn,), {"dtype": _dtype(node)}, _shape(node),
                   sv.dims, _dtype(node), node)  # fmt: skip
        return type(sv)(sv.dims, sv.expr, fn)
    assert dv is not None
    expr = an.rows(src, dv, _shape(node), dv.dims, _dtype(node))  # type: ignore[arg-type]
    return type(dv)(dv.dims, expr, dv.fn)


def _cat(an: LocalAnalysis, node: fx.Node) -> Any:
    parts: Any = node.args[0]
    parts = [p for p in parts if 0 not in _shape(p)]
    v = next((an.val(p) for p in parts if an.val(p) is not None), None)
    if v is None:
        raise NotLocal("an empty part of the cache is joined")
    shape = _shape(node)
    k = _axis(v, _arg(node, 1, "dim", 0), len(shape))
    if k is None:
        return None
    if any(_dtype(p) != _dtype(node) for p in parts):
        raise NotLocal("cat of different dtypes")
    fn, dims, exprs = _unify(an, node, [(p, _shape(p)) for p in parts])
    if len(exprs) == 1:
        return type(v)(dims, exprs[0], fn)
    expr = an.exprs.make("cat", exprs, (k,), [shape[d] for d in dims])
    return type(v)(dims, expr, fn)


def _stack(an: LocalAnalysis, node: fx.Node) -> Any:
    """Frames stacked on a new axis right before their slot axes: that axis enumerates slots too."""
    parts: Any = node.args[0]
    v = next((an.val(p) for p in parts if an.val(p) is not None), None)
    if v is None:
        return None
    shape = _shape(node)
    axis = int(_arg(node, 1, "dim", 0)) % len(shape)
    if axis != v.dims[0] or len({an.val(p).expr.key for p in parts if an.val(p)}) <= 1 < len(parts):  # type: ignore[union-attr]
        return None  # features of one slot, or K and V side by side
    one = list(shape)
    one[axis] = 1
    dims = (axis, *(d + 1 for d in v.dims))
    fn, exprs = None, []
    for p in parts:
        pv = an.val(p)
        if pv is None:
            continue
        up = op_fn("op", aten.reshape.default, (pv.fn, ()), {}, one, dims, pv.fn.dtype, node)
        fn = up if fn is None else merge(fn, up)
        if fn is None or pv.dims != v.dims:
            raise NotLocal("different work on different slots")
    assert fn is not None
    like = type(v)(dims, v.expr, fn)
    for p in parts:
        pv = an.val(p)
        if pv is None:
            exprs.append(an.rows(p, like, one, dims, fn.dtype))
        else:
            exprs.append(an.exprs.reshape(pv.expr, [1, *pv.expr.shape]))
    expr = an.exprs.make("cat", exprs, (0,), [shape[d] for d in dims])
    return type(v)(dims, expr, fn)


def _pad(an: LocalAnalysis, node: fx.Node) -> Any:
    """constant_pad_nd along the slots: rows of a constant. Along features it is slot-local work."""
    v = an.val(node.args[0])
    if v is None:
        return None
    pad: Any = node.args[1]
    rank = len(_shape(node))
    hit = [(rank - 1 - i // 2, i % 2, p) for i, p in enumerate(pad) if p != 0]
    if any(not isinstance(p, int) or p < 0 for _, _, p in hit):
        raise NotLocal("a cropping or changing pad")
    if not any(axis in v.dims for axis, _, _ in hit):
        if an.raw_only:
            raise NotLocal("hoisting is switched off")
        return an.op(node, v.dims, v.expr)
    if any(axis not in v.dims for axis, _, _ in hit) or len(v.dims) != 1:
        raise NotLocal("several axes are padded at once")
    value = _arg(node, 2, "value", 0)
    before = sum(p for _, end, p in hit if end == 0)
    after = sum(p for _, end, p in hit if end == 1)
    expr = v.expr
    for count, first in ((before, True), (after, False)):
        if count:
            shape = list(_shape(node))
            shape[v.dims[0]] = count
            rows = an.constant_rows(node, v, shape, value, first)
            pair = (rows, expr) if first else (expr, rows)
            expr = an.exprs.make("cat", pair, (0,), [expr.shape[0] + count])
    return type(v)(v.dims, expr, v.fn)


def _roll(an: LocalAnalysis, node: fx.Node) -> Any:
    v = an.val(node.args[0])
    if v is None:
        return None
    rank = len(_shape(node))
    shifts, axes = node.args[1], _arg(node, 2, "dims", [])
    shifts = [shifts] if not isinstance(shifts, (list, tuple)) else list(shifts)
    axes = [axes] if isinstance(axes, int) else list(axes)
    if not axes:
        raise NotLocal("roll over the flattened cache")
    axes = [int(a) % rank for a in axes]
    if not any(a in v.dims for a in axes):
        return None
    if any(a not in v.dims for a in axes):
        raise NotLocal("slots and features are rolled at once")
    _host_args(an, *shifts)
    expr = an.exprs.make(
        "roll", (v.expr,), (*shifts, *(v.dims.index(a) for a in axes)), v.expr.shape
    )
    return type(v)(v.dims, expr, v.fn)


def _flip(an: LocalAnalysis, node: fx.Node) -> Any:
    v = an.val(node.args[0])
    if v is None:
        return None
    axes = shapes.normal_dims(node.args[1], len(_shape(node)))
    if not any(a in v.dims for a in axes):
        return None
    if any(a not in v.dims for a in axes):
        raise NotLocal("slots and features are flipped at once")
    expr = an.exprs.make("flip", (v.expr,), [v.dims.index(a) for a in axes], v.expr.shape)
    return type(v)(v.dims, expr, v.fn)


def _index_1d(an: LocalAnalysis, idx: Any) -> None:
    if an.val(idx) is not None or not an.host.on_host(idx):
        raise NotLocal(f"slots are indexed by {an.host.why_data(idx)}, known on the device only")
    if len(_shape(idx)) != 1 or _dtype(idx) == torch.bool:
        raise NotLocal("slots are indexed by a mask or a matrix")


def _only_index(node: fx.Node, v: SlotVal, rank: int) -> tuple[int, Any]:
    """(slot axis number, index) of ``x[None, ..., idx, ...]``."""
    hits = [(i, a) for i, a in enumerate(node.args[1]) if a is not None]  # type: ignore[arg-type]
    if len(hits) != 1:
        raise NotLocal("several axes are indexed at once")
    axis, idx = hits[0]
    k = _axis(v, axis, rank)
    if k is None:
        raise NotLocal("a feature axis is indexed by a tensor")
    return k, idx


def _index(an: LocalAnalysis, node: fx.Node) -> Any:
    v = an.val(node.args[0])
    if v is None:
        raise NotLocal("the cache is used as an index")
    rank = len(_shape(node.args[0]))
    if node.target is aten.index_select.default:
        k, idx = _axis(v, node.args[1], rank), node.args[2]  # type: ignore[arg-type]
        if k is None:
            raise NotLocal("a feature axis is indexed by a tensor")
    else:
        k, idx = _only_index(node, v, rank)
    _index_1d(an, idx)
    shape = _shape(node)
    op = "index_strict" if node.target is aten.index_select.default else "index"
    expr = an.exprs.make(op, (v.expr,), (k, idx), [shape[d] for d in v.dims])
    return type(v)(v.dims, expr, v.fn)


def _index_put(an: LocalAnalysis, node: fx.Node) -> Any:
    v = an.val(node.args[0])
    if v is None:
        raise NotLocal("cache slots are scattered into another tensor")
    shape = list(_shape(node))
    if node.target is aten.index_copy.default:
        k, idx, src = _axis(v, node.args[1], len(shape)), node.args[2], node.args[3]  # type: ignore[arg-type]
        if k is None:
            raise NotLocal("a feature axis is indexed by a tensor")
    else:
        if _arg(node, 3, "accumulate", False):
            raise NotLocal("index_put accumulates")
        k, idx = _only_index(node, v, len(shape))
        src = node.args[2]
    _index_1d(an, idx)
    count = _shape(idx)[0]
    shape[v.dims[k]] = count
    sv = an.val(src)
    if sv is None:
        rows = an.rows(src, v, shape, v.dims, v.fn.dtype)  # type: ignore[arg-type]
        fn = v.fn
    else:
        if sv.dims != v.dims or merge(v.fn, sv.fn) is None or _shape(src) != tuple(shape):
            raise NotLocal("different work on different slots")
        rows, fn = sv.expr, merge(v.fn, sv.fn)  # type: ignore[assignment]
    op = "index_put_strict" if node.target is aten.index_copy.default else "index_put"
    expr = an.exprs.make(op, (v.expr, rows), (k, idx), v.expr.shape)
    return type(v)(v.dims, expr, fn)


def _split(an: LocalAnalysis, node: fx.Node) -> Any:
    v = an.val(node.args[0])
    if v is None:
        return None
    rank = len(_shape(node.args[0]))
    k = _axis(v, _arg(node, SPLITS[node.target], "dim", 0), rank)
    if k is None:
        return None
    outs, start, res = node.meta["val"], 0, []
    if node.target is aten.unbind.int:
        return [_frame(an, node, v, k, i, shapes.ints(o.shape)) for i, o in enumerate(outs)]
    for o in outs:
        shape = shapes.ints(o.shape)
        n = shape[v.dims[k]]
        expr: SlotExpr = an.exprs.make(
            "slice", (v.expr,), (k, start, start + n, 1), [shape[d] for d in v.dims]
        )
        res.append(type(v)(v.dims, expr, v.fn))
        start += n
    return res


_RULES = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.slice_scatter.default: _scatter,
    aten.select_scatter.default: _scatter,
    aten.copy.default: _copy,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.constant_pad_nd.default: _pad,
    aten.roll.default: _roll,
    aten.flip.default: _flip,
    aten.index.Tensor: _index,
    aten.index_select.default: _index,
    aten.index_put.default: _index_put,
    aten.index_copy.default: _index_put,
    **dict.fromkeys(SPLITS, _split),
}


def row_identity(
    node: fx.Node, shape: tuple[int, ...], dims: tuple[int, ...], dtype: torch.dtype, fn: Fn
) -> Any:
    """What makes two entries the same rows: the node below all layout ops, its slot axes, and where
    each of its features lands in a raw slot.

    Keys written into the cache and keys concatenated for this call's attention are often the same
    tensor in two layouts; they must count as one source, in the same order of rows and features.
    ``fn``: the layout in which the rows enter.
    """
    entered = node
    if _shape(node) != shape:
        # broadcast into place: right-aligned, as copy and index_put do
        off = len(shape) - len(_shape(node))
        if any(d - off < 0 or _shape(node)[d - off] != shape[d] for d in dims):
            return (node, shape, dims, dtype)
        dims = tuple(d - off for d in dims)
    cast = dtype if dtype != _dtype(node) else None
    chain: list[tuple[str, Any]] = []  # from the entry down to the root
    while node.op == "call_function":
        t = node.target
        if not node.args or not isinstance(node.args[0], fx.Node):
            break
        child = node.args[0]
        if t in (aten.clone.default, aten.alias.default, aten.detach.default):
            node = child
            continue
        perm = permutation(t, node.args, len(_shape(node)))
        if perm is not None:
            new = tuple(perm[d] for d in dims)
            if list(new) != sorted(new):
                break
            chain.append(("permute", perm))
            node, dims = child, new
            continue
        if t in (aten.view.default, aten.reshape.default, aten._unsafe_view.default,
                 aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims):  # fmt: skip
            try:
                below = shapes.reshape_dims(_shape(node), _shape(child), dims)
            except NotLocal:
                break
            chain.append(("reshape", with_slots(_shape(node), dims, 1)))
            node, dims = child, below
            continue
        break
    slots = tuple(_shape(node)[d] for d in dims)
    features = _features(with_slots(_shape(node), dims, 1), chain, shape, fn)
    if features is None:
        return (entered, shape, fn.key, cast)
    return (node, slots, dims, cast, features)


def _features(
    root: tuple[int, ...], chain: list[tuple[str, Any]], entry: tuple[int, ...], fn: Fn
) -> bytes | None:
    """Which feature of the root row each raw feature is; None where rows are broadcast."""
    x = np.arange(math.prod(root)).reshape(root)
    for op, arg in reversed(chain):
        x = x.transpose(arg) if op == "permute" else x.reshape(arg)
    if x.size != math.prod(s for i, s in enumerate(fn.shape) if i not in fn.dims):
        return None
    x = x.reshape(with_slots(fn.shape, fn.dims, 1))

    def call(target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.permute.default:
            return args[0].transpose(args[1])
        return args[0].reshape(args[1])

    raw = invert_layout(fn, 1, call, x)
    if raw is None:
        return repr(fn.key).encode() + x.tobytes()
    return raw.tobytes()
