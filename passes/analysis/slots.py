"""Slot-local analysis of one cache: which values are functions of one slot each?

Forward from a cache input with given slot axes, every value is either *slot-indexed* (``SlotVal``:
which slot each position holds, and what function of that slot it is) or ends the region. Rules are
per kind of op: layout, pointwise, reductions and products over other axes, and slot movement.
Anything unknown ends the region, never guesses.
"""

from __future__ import annotations

import functools
import heapq
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rtc.passes.analysis import movement, scales, shapes
from rtc.passes.analysis.effects import is_random
from rtc.passes.analysis.exprs import Exprs, SlotExpr
from rtc.passes.analysis.fn import (
    LAYOUT,
    Fn,
    Operand,
    op_fn,
    permutation,
    raw_fn,
)
from rtc.passes.analysis.host import Deps, HostInfo, InputInfo
from rtc.passes.analysis.shapes import NotLocal

aten = torch.ops.aten


@dataclass(frozen=True)
class SlotVal:
    """A slot-indexed value: axes ``dims`` of the node enumerate the slots of ``expr``."""

    dims: tuple[int, ...]
    expr: SlotExpr
    fn: Fn


@dataclass
class RowEntry:
    """A node through which fresh rows enter, in the layout of ``fn``; slot axes at ``dims``.

    ``fill`` is set for rows of one constant (padding): ``node`` only says where they come from.
    """

    node: fx.Node
    fn: Fn
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None = None


@dataclass
class RowSource:
    """Rows that did not come from the cache: one source however many layouts it enters in."""

    index: int
    count: int
    entries: list[RowEntry] = field(default_factory=list)


# Reductions: (op, position of the dim argument, position of keepdim).
REDUCE = {
    aten.sum.dim_IntList: (1, 2),
    aten.mean.dim: (1, 2),
    aten.amax.default: (1, 2),
    aten.amin.default: (1, 2),
    aten.max.dim: (1, 2),
    aten.min.dim: (1, 2),
    aten.any.dim: (1, 2),
    aten.all.dim: (1, 2),
    aten.prod.dim_int: (1, 2),
    # these reduce everything: they have no axis argument
    aten.max.default: (9, 9),
    aten.min.default: (9, 9),
    aten.sum.default: (9, 9),
    aten.mean.default: (9, 9),
    aten.logsumexp.default: (1, 2),
    aten.linalg_vector_norm.default: (2, 3),
    aten.norm.ScalarOpt_dim: (2, 3),
    aten.var.correction: (1, None),
    aten.var_mean.correction: (1, None),
    aten.std.correction: (1, None),
}
AMAX = (aten.amax.default, aten.max.default)
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Ops along one axis that keep the shape and are local to the other axes.
ALONG = {
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten.cumsum.default: 1,
    aten.cumprod.default: 1,
    aten.flip.default: 1,
    aten.roll.default: 2,
    aten.sort.default: 1,
}
NORMS = (aten.native_layer_norm.default, aten._fused_rms_norm.default, aten.rms_norm.default)
# Results that follow the shape of their argument and not its values.
LIKE = (
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
)
COPIES = (aten.clone.default, aten.contiguous.default, aten.lift_fresh_copy.default)
POINTWISE_EXTRA = {
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    aten.view_as_real.default,
    aten.view_as_complex.default,
    aten.complex.default,
    aten.polar.default,
    aten._conj.default,
    aten.conj_physical.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
}


# Of a slot's function, written out as a tree: residual blocks double it, one after the other.
_LARGEST = 20_000


@functools.cache
def is_pointwise(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if is_random(target) or target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in target.tags or target in POINTWISE_EXTRA


def meta(node: fx.Node) -> Any:
    return node.meta["val"]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return shapes.ints(meta(node).shape)


def keepdim(node: fx.Node, pos: int | None) -> bool:
    if pos is None:
        return bool(node.kwargs.get("keepdim", False))
    return bool(node.args[pos]) if len(node.args) > pos else bool(node.kwargs.get("keepdim", False))


def reduced_dims(node: fx.Node, rank: int) -> tuple[int, ...]:
    pos, _ = REDUCE[node.target]
    arg = node.args[pos] if len(node.args) > pos else node.kwargs.get("dim")
    return shapes.normal_dims(arg, rank)


class LocalAnalysis:
    """Slot-local values reachable from one cache input.

    ``vals`` maps nodes to their SlotVal (or a list, for ops with several outputs); ``ends`` lists
    the uses where the region ends, each with the reason. ``calibrate`` allows whole-cache
    reductions to be replaced by a calibrated constant of the session (numerics-changing).
    """

    def __init__(
        self,
        host: HostInfo,
        exprs: Exprs,
        base: InputInfo,
        dims: tuple[int, ...],
        *,
        calibrate: bool = False,
        raw_only: bool = False,
    ) -> None:
        self.host, self.exprs, self.base, self.dims = host, exprs, base, dims
        self.calibrate, self.raw_only = calibrate, raw_only
        self.calibrated: dict[fx.Node, Fn] = {}  # whole-cache maximum -> the work it measures
        shape = shape_of(base.node)
        slots = tuple(shape[d] for d in dims)
        dtype = meta(base.node).dtype
        raw = raw_fn(shape, dims, dtype)
        self.vals: dict[fx.Node, Any] = {base.node: SlotVal(dims, exprs.base(slots), raw)}
        self.ends: list[tuple[fx.Node, fx.Node, str]] = []
        self.sources: dict[Any, RowSource] = {}
        self.final: fx.Node | None = None  # the value that the epilogue stores
        self._run()

    # -- walking -------------------------------------------------------------------------------

    def _run(self) -> None:
        # only the cone below the cache is walked, in graph order: graphs have tens of thousands of
        # nodes
        index = self.host.index
        queue = [index[u] for u in self.base.node.users]
        heapq.heapify(queue)
        done = -1
        while queue:
            i = heapq.heappop(queue)
            if i == done:
                continue
            done = i
            node = self.host.nodes[i]
            tracked = [a for a in node.all_input_nodes if a in self.vals]
            if node.op == "call_function" and node.target is aten.copy_.default:
                if node.args[0] is self.base.node and node.args[1] in self.vals:
                    self.final = node.args[1]
                else:
                    self._end(node, tracked, "it is stored into another tensor")
                continue
            if node.op == "output":
                self._end(node, tracked, "it is returned to the caller, in slot order")
                continue
            try:
                self.vals[node] = self._rule(node)
            except NotLocal as e:
                if node not in self.calibrated:
                    self._end(node, tracked, str(e))
                continue
            for u in node.users:
                heapq.heappush(queue, index[u])
        self._release()

    def _release(self) -> None:
        """Maxima that scale none of the values followed are not held: nothing would be gained."""
        if not self.calibrated:
            return
        fns = [v.fn for v in self.vals.values() if isinstance(v, SlotVal)]
        todo = [o.node for f in fns for o in f.operands_here() if not self.host.on_host(o.node)]
        used: set[fx.Node] = set()
        while todo:
            node = todo.pop()
            if node not in used:
                used.add(node)
                todo += [] if node in self.calibrated else node.all_input_nodes
        for node in [n for n in self.calibrated if n not in used]:
            del self.calibrated[node]
            reason = "reduces over the slots, and nothing that it scales can move to write time"
            self._end(node, node.all_input_nodes, f"{node.target} {reason}")

    def _end(self, node: fx.Node, tracked: Sequence[fx.Node], reason: str) -> None:
        self.ends.extend((a, node, reason) for a in tracked)

    def val(self, node: Any) -> SlotVal | None:
        v = self.vals.get(node) if isinstance(node, fx.Node) else None
        return v if isinstance(v, SlotVal) else None

    # -- rules ---------------------------------------------------------------------------------

    def _rule(self, node: fx.Node) -> Any:
        t = node.target
        if t is operator.getitem:
            return self._getitem(node)
        if t in COPIES:
            return self.val(node.args[0])
        if t in LAYOUT:
            return self._layout(node)
        moved = movement.rule(self, node)
        if moved is not None:
            return moved
        if self.raw_only:
            raise NotLocal("hoisting is switched off")
        if is_pointwise(t) or t in LIKE:
            return self._pointwise(node)
        if t in REDUCE:
            return self._reduce(node)
        if t in ALONG:
            return self._along(node)
        if t in NORMS:
            return self._norm(node)
        if t in (aten.cat.default, aten.stack.default):
            return self._join(node)
        if t in (aten.mm.default, aten.bmm.default, aten.addmm.default):
            return self._product(node)
        if t in movement.SPLITS or t is aten.select.int or t is aten.slice.Tensor:
            return self._pick(node)
        if t in (aten.as_strided.default, aten.as_strided_scatter.default):
            raise NotLocal("it is viewed by strides, as when several tensors share one memory")
        raise NotLocal(f"{t} is not known to be slot-local")

    def _getitem(self, node: fx.Node) -> Any:
        vals = self.vals[node.args[0]]
        if not isinstance(vals, list):
            raise NotLocal("item of an unknown value")
        v = vals[node.args[1]]
        if v is None:
            raise NotLocal("this output mixes slots")
        return v

    def op(
        self, node: fx.Node, dims: Sequence[int], expr: SlotExpr, *, shape: Any = None,
        dtype: Any = None, aligned: bool = True,
    ) -> SlotVal:  # fmt: skip
        """A slot-local op over the node's own arguments, tracked ones replaced by their functions.

        ``aligned``: whether outside tensors line up with the output's axes from the right.
        """
        out = meta(node)
        shape = shape_of(node) if shape is None else shape
        dtype = out.dtype if dtype is None else dtype

        def conv(a: Any) -> Any:
            if isinstance(a, (list, tuple)):
                return tuple(conv(x) for x in a)
            if not isinstance(a, fx.Node):
                return a
            v = self.val(a)
            if v is not None:
                return v.fn
            return self.operand(a, len(shape), dims if aligned else (), expr)

        args = conv(node.args)
        kwargs = {k: conv(v) for k, v in node.kwargs.items()}
        fn = op_fn("op", node.target, args, kwargs, shape, dims, dtype, node)
        if fn.size > _LARGEST:
            raise NotLocal("too much is computed from one slot to be followed")
        return SlotVal(tuple(dims), expr, fn)

    def items(self, node: fx.Node, dims: Sequence[int], expr: SlotExpr) -> list[SlotVal]:
        outs = meta(node)
        whole = self.op(node, dims, expr, shape=shapes.ints(outs[0].shape), dtype=outs[0].dtype)
        res = []
        for i, o in enumerate(outs):
            fn = op_fn(
                "item",
                operator.getitem,
                (whole.fn, i),
                {},
                shapes.ints(o.shape),
                dims,
                o.dtype,
                node,
            )
            res.append(SlotVal(tuple(dims), expr, fn))
        return res

    def operand(self, node: fx.Node, rank: int, dims: Sequence[int], expr: SlotExpr) -> Operand:
        """Classify an outside tensor or symbolic number that enters slot-local work."""
        val = meta(node)
        deps = self.host.deps[node]
        scale = not self.host.on_host(node) and scales.made_of(
            node, self.calibrated, self.host, is_pointwise
        )
        if scale:
            deps = Deps.CONST
        elif Deps.DATA in deps:
            raise NotLocal(f"it depends on {self.host.why_data(node)}, known on the device only")
        if not isinstance(val, torch.Tensor):
            if Deps.INT not in deps:
                raise NotLocal("symbolic constant")
            kind = torch.float64 if isinstance(val, (float, torch.SymFloat)) else torch.int64
            shape, dtype, axes = (), kind, None
            return Operand(
                "table", ((node, expr),), axes, shape, dtype, ("int", self.host.key(node))
            )
        shape = shape_of(node)
        axes = tuple(d - (rank - len(shape)) for d in dims)
        varies = any(a >= 0 and shape[a] != 1 for a in axes)
        if varies and any(a < 0 for a in axes):
            raise NotLocal("it is broadcast along some slot axes only")
        if varies and any(shape[a] not in (1, n) for a, n in zip(axes, expr.shape, strict=True)):
            raise NotLocal("it does not line up with the slots")
        role = "table" if varies or Deps.INT in deps else "const"
        if scale:
            if varies:
                raise NotLocal("a calibrated scale does not vary along the slots")
            made = scales.key(node, self.calibrated, self.host)
            key: Any = ("calibrated", self.base.source, self.base.part, made)
        else:
            key = (role, self.host.key(node))
        entry = ((node, expr),)
        return Operand(role, entry, axes if varies else None, shape, val.dtype, key)

    def _layout(self, node: fx.Node) -> SlotVal:
        v = self.val(node.args[0])
        if v is None:
            raise NotLocal("layout of an unknown value")
        x: fx.Node = node.args[0]  # type: ignore[assignment]
        src, dst = shape_of(x), shape_of(node)
        t = node.target
        perm = permutation(t, node.args, len(src))
        if perm is not None:
            dims = tuple(perm.index(d) for d in v.dims)
            order = sorted(range(len(dims)), key=lambda i: dims[i])
            expr = v.expr
            if order != list(range(len(dims))):
                expr = self.exprs.make("permute", (expr,), order, [expr.shape[i] for i in order])
            dims = tuple(sorted(dims))
            if dims != tuple(range(dims[0], dims[-1] + 1)):
                raise NotLocal("slot axes are not adjacent")
            return self.op(node, dims, expr)
        if t is aten.expand.default:
            off = len(dst) - len(src)
            dims = tuple(d + off for d in v.dims)
            if any(dst[d] != src[d - off] for d in dims):
                raise NotLocal("the slot axis is broadcast")
            return self.op(node, dims, v.expr)
        dims = shapes.reshape_dims(src, dst, v.dims)
        expr = self.exprs.reshape(v.expr, [dst[d] for d in dims])
        return self.op(node, dims, expr)

    def _pointwise(self, node: fx.Node) -> SlotVal:
        t = node.target
        if t is aten.view_as_real.default or t is aten.view_as_complex.default:
            v = self.val(node.args[0])
            assert v is not None
            if t is aten.view_as_complex.default and v.dims[-1] == len(shape_of(node)):
                raise NotLocal("the slot axis is the complex pair")
            return self.op(node, v.dims, v.expr)
        out = shape_of(node)
        found: SlotVal | None = None
        dims: tuple[int, ...] = ()
        for a in node.all_input_nodes:
            v = self.val(a)
            if v is None:
                if a in self.vals:
                    raise NotLocal("several outputs at once")
                continue
            d = tuple(x + len(out) - len(shape_of(a)) for x in v.dims)
            if tuple(out[x] for x in d) != v.expr.shape:
                raise NotLocal("the slot axis is broadcast")
            if found is not None and (found.expr.key != v.expr.key or dims != d):
                raise NotLocal("different slots meet in one position")
            found, dims = v, d
        assert found is not None
        out_val = self.op(node, dims, found.expr)
        return self._saturated(node, out_val) if self.calibrated else out_val

    def _saturated(self, node: fx.Node, v: SlotVal) -> SlotVal:
        """Clamp before a cast to FP8: beyond a calibrated scale the cast would give NaN."""
        if node.target not in CASTS or v.fn.dtype not in FP8:
            return v
        child = v.fn.children[0]
        top = torch.finfo(v.fn.dtype).max
        safe = op_fn(
            "op",
            aten.clamp.default,
            (child, -top, top),
            {},
            child.shape,
            child.dims,
            child.dtype,
            node,
        )
        args = (safe, *v.fn.args[1:])
        fn = op_fn("op", v.fn.target, args, dict(v.fn.kwargs), v.fn.shape, v.dims, v.fn.dtype, node)
        return SlotVal(v.dims, v.expr, fn)

    def _reduce(self, node: fx.Node) -> Any:
        v = self.val(node.args[0])
        if v is None:
            raise NotLocal("reduction of an unknown value")
        rank = len(shape_of(node.args[0]))  # type: ignore[arg-type]
        red = reduced_dims(node, rank)
        if any(d in red for d in v.dims):
            if self.calibrate and node.target in AMAX and set(v.dims) <= set(red):
                other = scales.other_use(node, red, is_pointwise)
                if other is None:
                    self.calibrated[node] = v.fn
                else:
                    raise NotLocal(
                        f"{node.target} reduces over the slots, and is more than the scale of FP8 "
                        f"casts: {other}"
                    )
            raise NotLocal(f"{node.target} reduces over the slots (a whole-cache statistic)")
        if keepdim(node, REDUCE[node.target][1]):
            dims = v.dims
        else:
            dims = tuple(d - sum(1 for r in red if r < d) for d in v.dims)
        if isinstance(meta(node), (tuple, list)):
            return self.items(node, dims, v.expr)
        return self.op(node, dims, v.expr)

    def _along(self, node: fx.Node) -> Any:
        v = self.val(node.args[0])
        if v is None:
            raise NotLocal("unknown value")
        rank = len(shape_of(node.args[0]))  # type: ignore[arg-type]
        pos = ALONG[node.target]
        arg = node.args[pos] if len(node.args) > pos else -1
        if any(d in shapes.normal_dims(arg, rank) for d in v.dims):
            raise NotLocal(f"{node.target} runs along the slots")
        if isinstance(meta(node), (tuple, list)):
            return self.items(node, v.dims, v.expr)
        return self.op(node, v.dims, v.expr)

    def _norm(self, node: fx.Node) -> Any:
        v = self.val(node.args[0])
        if v is None:
            raise NotLocal("norm with a cache as its weight")
        rank = len(shape_of(node.args[0]))  # type: ignore[arg-type]
        if v.dims[-1] >= rank - len(node.args[1]):  # type: ignore[arg-type]
            raise NotLocal("the norm runs over the slots")
        if isinstance(meta(node), (tuple, list)):
            return self.items(node, v.dims, v.expr)
        return self.op(node, v.dims, v.expr)

    def _join(self, node: fx.Node) -> SlotVal:
        """cat or stack along an axis that is not the slots'."""
        parts: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
        vals = [self.val(p) for p in parts]
        found = next(v for v in vals if v is not None)
        if any(
            v is not None and (v.expr.key, v.dims) != (found.expr.key, found.dims) for v in vals
        ):
            raise NotLocal("different slots are joined")
        axis = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        axis %= len(shape_of(node))
        dims = found.dims
        if node.target is aten.stack.default:
            dims = tuple(d + (axis <= d) for d in dims)
            if dims[-1] - dims[0] != len(dims) - 1:
                raise NotLocal("stack between slot axes")
        if any(v is None for v in vals):
            raise NotLocal("cache slots are joined with other data along a feature axis")
        return self.op(node, dims, found.expr)

    def _product(self, node: fx.Node) -> SlotVal:
        mats = node.args[1:] if node.target is aten.addmm.default else node.args
        a, b = (self.val(m) for m in mats[:2])
        if a is not None and b is not None:
            raise NotLocal("product of two cached values")
        v = a if a is not None else b
        if v is None:
            raise NotLocal("the cache is a bias")
        other = mats[1] if a is not None else mats[0]
        free = len(shape_of(node)) - (2 if a is not None else 1)
        if v.dims != (free,):
            raise NotLocal("the slots are contracted or batched")
        if node.target is aten.addmm.default:
            axis = free - 2 + len(shape_of(node.args[0]))  # type: ignore[arg-type]
            if axis >= 0 and shape_of(node.args[0])[axis] != 1:  # type: ignore[arg-type]
                raise NotLocal("the bias varies along the slots")
        if not self.host.on_host(other):  # type: ignore[arg-type]
            raise NotLocal(f"it depends on {self.host.why_data(other)}")  # type: ignore[arg-type]
        return self.op(node, v.dims, v.expr, aligned=False)

    def _pick(self, node: fx.Node) -> Any:
        """slice, select or split along an axis that is not the slots'."""
        v = self.val(node.args[0])
        if v is None:
            raise NotLocal("part of an unknown value")
        rank = len(shape_of(node.args[0]))  # type: ignore[arg-type]
        pos = movement.SPLITS.get(node.target, 1)
        axis = int(node.args[pos]) if len(node.args) > pos else 0  # type: ignore[arg-type]
        axis %= rank
        assert axis not in v.dims
        if any(isinstance(a, fx.Node) for a in node.args[1:]):
            raise NotLocal("a feature axis is cut at a changing place")
        if node.target is aten.select.int or node.target is aten.unbind.int:
            dims = tuple(d - (axis < d) for d in v.dims)
        else:
            dims = v.dims
        if isinstance(meta(node), (tuple, list)):
            return self.items(node, dims, v.expr)
        return self.op(node, dims, v.expr)

    # -- fresh rows ----------------------------------------------------------------------------

    def rows(
        self, node: fx.Node, like: SlotVal, shape: Sequence[int], dims: Sequence[int],
        dtype: torch.dtype,
    ) -> SlotExpr:  # fmt: skip
        """Register ``node`` (broadcast to ``shape``) as fresh rows in the layout of ``like.fn``."""
        shape = tuple(shape)
        slot_shape = tuple(shape[d] for d in dims)
        key = movement.row_identity(node, shape, tuple(dims), dtype, like.fn)
        src = self._source(key, slot_shape)
        src.entries.append(RowEntry(node, like.fn, shape, tuple(dims), dtype))
        return self.exprs.rows(src.index, slot_shape)

    def constant_rows(
        self, node: fx.Node, like: SlotVal, shape: Sequence[int], fill: float, first: bool
    ) -> SlotExpr:
        """Register padding: rows of the constant ``fill``."""
        slot_shape = tuple(shape[d] for d in like.dims)
        src = self._source((node, first), slot_shape)
        entry = RowEntry(node, like.fn, tuple(shape), like.dims, like.fn.dtype, float(fill))
        src.entries.append(entry)
        return self.exprs.rows(src.index, slot_shape)

    def _source(self, key: Any, slot_shape: tuple[int, ...]) -> RowSource:
        if key not in self.sources:
            self.sources[key] = RowSource(len(self.sources), math.prod(slot_shape))
        return self.sources[key]
