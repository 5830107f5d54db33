"""Where the rows of one attention come from: what fuse_pre_attention reads off a graph.

q, k and v are followed from FP8 back to the rows of a product: factors a head, a turn, a norm; and
the writes of caches on the way. What a piece does is found by running it (analysis/turns.py); where
rows have their tokens is known at the end of each walk (from the slots of a write, from attention's
operand) and followed from there, so that equal sizes mislead nobody.

Legend: B batch, T new tokens, H heads (of keys: G), D head size. Rows: [B, T, H, D] where ``axis``
is 1, [B, H, T, D] where it is 2.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from rtc.kernels.pre_attention_graph import IN_PLACE
from rtc.passes.analysis.fp8 import CASTS, FP8, SAME
from rtc.passes.analysis.pieces import Piece, Trunk, data_nodes
from rtc.passes.analysis.turns import Prober
from rtc.passes.base import Context
from rtc.passes.nodes import val

aten = torch.ops.aten

_TOP = 448.0
# between a written cache and who reads it
VIEWS = (
    aten.permute.default, aten.transpose.int, aten.reshape.default, aten.view.default,
    aten.view.dtype,
)  # fmt: skip


class No(Exception):
    """It does not fit: why, and where."""

    def __init__(self, why: str, node: fx.Node) -> None:
        super().__init__(why)
        self.node = node


@dataclass
class Rows:
    """One of q, k, v: rows of a product on their way to FP8."""

    source: fx.Node
    axis: int  # of the source's tokens
    weight: fx.Node | None
    plus_one: bool  # the norm's weight is stored less one
    eps: float  # < 0: no norm
    raw: fx.Node  # normed; and turned, if the cache stores turned rows
    raw_axis: int
    normed: fx.Node  # normed, not turned
    normed_axis: int
    rope: str
    piece: Piece  # normed -> turned
    swapped: bool  # the piece's end has tokens and heads in each other's places
    turned: bool  # raw is turned
    scales: list[tuple[fx.Node, bool]]  # factors a head; True: divided by
    scale_axis: int  # where heads are in the factors, seen as four axes


@dataclass
class Write:
    """``index_put(held, [.., slots], rows)``, and the copy_ that stores it."""

    node: fx.Node
    held: fx.Node
    axis: int
    slots: fx.Node
    rows: fx.Node


def _quantized(
    x8: fx.Node, data: set[fx.Node], axis: int
) -> tuple[fx.Node, list[tuple[fx.Node, bool]]]:
    """What is quantized by factors that are known before, and the factors. Tokens on ``axis``."""
    at, factors, clamped = x8, [], False
    if at.target not in CASTS or val(at).dtype != FP8:
        raise No("not a cast to FP8", at)
    at = at.args[0]  # type: ignore[assignment]
    end: fx.Node = at
    while True:
        if at.target is aten.clamp.default and at.args[1:3] == (-_TOP, _TOP):
            clamped, at = True, at.args[0]  # type: ignore[assignment]
        elif at.target in (*CASTS, *SAME):
            if val(at).dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise No(f"a cast to {val(at).dtype}", at)
            at = at.args[0]  # type: ignore[assignment]
        elif at.target in (aten.div.Tensor, aten.mul.Tensor) and _factor(at, data, axis):
            if not clamped:
                raise No("no clamp between the scale and the cast to FP8", at)
            x, factor = _factor(at, data, axis)  # type: ignore[misc]
            factors.append((factor, at.target is aten.div.Tensor))
            end = at = x  # casts behind it may be what a cache stores
        else:
            break
    if not factors:
        raise No("it is scaled by a maximum of its own, not by a calibrated one", x8)
    return end, factors


def _factor(n: fx.Node, data: set[fx.Node], axis: int) -> tuple[fx.Node, fx.Node] | None:
    a, b = n.args
    if n.target is aten.mul.Tensor and isinstance(a, fx.Node) and a not in data:
        a, b = b, a
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or b in data or a not in data:
        return None
    v = b.meta["val"]
    if not isinstance(v, torch.Tensor) or val(a).shape != val(n).shape or val(n).dim() != 4:
        return None
    return (a, b) if _heads_only(v, axis) else None


def _heads_only(scale: torch.Tensor, axis: int) -> bool:
    """One factor for each head, or for each head of each batch."""
    lead = 4 - scale.dim()
    return all(s == 1 or d + lead in (0, 3 - axis) for d, s in enumerate(scale.shape))


def _write(node: fx.Node, again: bool = False) -> Write:
    """The single write of fresh rows behind what attention reads (or a cache stores). ``again``:
    what it writes to may be written already, by several denoising passes in a call."""
    at = node
    while at.target in VIEWS:
        at = at.args[0]  # type: ignore[assignment]
    if at.target is not aten.index_put.default or len(at.args) != 3:
        raise No("it is not written by one index_put", at)
    held, where, rows = at.args
    slots = where[-1]  # type: ignore[index]
    if any(w is not None for w in where[:-1]):  # type: ignore[union-attr]
        raise No("it is written along two axes at once", at)
    if held.op != "placeholder" and not (again and _is_written(held)):  # type: ignore[union-attr,arg-type]
        raise No("it is written more than once in a call", at)
    return Write(at, held, len(where) - 1, slots, rows)  # type: ignore[arg-type]


def _is_written(held: fx.Node) -> bool:
    """Whether it is an input as an earlier write left it."""
    while held.op != "placeholder":
        if held.target is aten.index_put.default:
            held = held.args[0]  # type: ignore[assignment]
        elif held.target is operator.getitem and held.args[0].target in IN_PLACE:  # type: ignore[union-attr]
            op, i = held.args
            at = IN_PLACE[op.target][1].get(i)  # type: ignore[union-attr,arg-type]
            if at is None:
                return False
            held = op.args[at]  # type: ignore[union-attr]
        else:
            return False
    return True


class Matcher:
    """``match`` reads the rows and writes of one attention, or raises `No`."""

    def __init__(self, ctx: Context) -> None:
        self.graph = ctx.gm.graph
        self.index = {n: i for i, n in enumerate(self.graph.nodes)}
        self.data = data_nodes(self.graph)
        self.extras = ctx.extras
        known = {}
        with _disable_current_modes():
            for n, e in ctx.extras.items():
                if e.kind == "perm":
                    cohort = ctx.plan.cohorts[e.cohort]
                    known[n] = torch.from_numpy(cohort.rotations[cohort.views[e.view].klass].perm)
            self.prober = Prober(known)
        self.saturated = {e.cohort: n for n, e in ctx.extras.items() if e.kind == "saturated"}
        self.cohort_of = {n: e.cohort for n, e in ctx.extras.items() if e.kind == "view"}

    def match(self, node: fx.Node) -> tuple[Rows, Rows, Rows, dict[str, Write]]:
        q8, k, v = node.args[:3]
        writes = {"k8": _write(k), "v8": _write(v)}  # type: ignore[arg-type]
        k8, v8 = writes["k8"], writes["v8"]
        if k8.slots is not v8.slots or k8.axis != v8.axis or k8.axis not in (1, 2):
            raise No("keys and values are not written alike", node)
        fresh: list[fx.Node] = []
        for w in (k8, v8):
            if val(w.held).dim() != 4:
                raise No(f"a cache of {val(w.held).dim()} axes", w.node)
            if w.rows.target is not aten.view.dtype:
                raise No("fresh rows are not FP8", w.node)
            fresh.append(w.rows.args[0])  # type: ignore[arg-type]
        q = self._rows(q8, 2, None)  # type: ignore[arg-type]
        raws = self._raw_writes(fresh, k8)
        if raws is not None:
            rows = [
                self._rows(f, k8.axis, w.rows, q.rope) for f, w in zip(fresh, raws, strict=True)
            ]
            writes.update(k_raw=raws[0], v_raw=raws[1])
        else:
            rows = [self._rows(f, k8.axis, None) for f in fresh]
        if rows[0].rope == "none" != q.rope:  # keys are turned before: so are queries then
            q = self._rows(q8, 2, None, plain=True)  # type: ignore[arg-type]
        self._check(node, [q, *rows], writes)
        return q, rows[0], rows[1], writes

    def _raw_writes(self, fresh: list[fx.Node], k8: Write) -> list[Write] | None:
        """Writes of what the caches themselves store of these rows. None where there are none, or
        where they lie in a way that is none of the kernel's: they are left alone then."""
        found = []
        for f in fresh:
            end = _quantized(f, self.data, k8.axis)[0]
            write = self._raw_write(Trunk(end, self.data, self.index), k8.slots)
            if write is None or _bthd(val(write.rows), write.axis) != _bthd(val(f), k8.axis):
                return None
            found.append(write)
        same = {(w.axis, val(w.held).dtype) for w in found}
        return found if len(same) == 1 else None

    def _raw_write(self, trunk: Trunk, slots: fx.Node) -> Write | None:
        for n in trunk.nodes:
            for u in n.users:
                if u.target is aten.index_put.default and u.args[2] is n and u.args[0] is not n:
                    try:
                        found = _write(u, again=True)
                    except No:
                        continue
                    shape = val(found.held).shape
                    if found.slots is slots and len(shape) == 4 and found.axis in (1, 2):
                        return found
        return None

    def _rows(
        self, x8: fx.Node, axis: int, raw: fx.Node | None, wanted: str = "none", plain: bool = False
    ) -> Rows:
        """``axis``: of x8's tokens. ``raw``: the rows as the cache stores them, if they are known.
        ``wanted``: the turn to look for before they are stored, if there is none behind. ``plain``:
        turns are none of the kernel's."""
        end, scales = _quantized(x8, self.data, axis)
        found = self._turned(end, axis, raw, plain)
        if found is None:
            raise No("what is done between the rows and FP8 is no rotation of pairs", x8)
        start, rope, at, piece, swapped = found
        stored, stored_axis, turned = start, at, False
        if rope == "none" and wanted != "none" and raw is not None:
            before = self._turned(start, at, None)
            if before is not None and before[1] == wanted:
                (start, rope, at, piece, swapped), turned = before, True
        below = Trunk(start, self.data, self.index)
        source, source_axis, weight, eps, plus_one = start, at, None, -1.0, False
        for n in reversed([n for n in below.nodes if _is_rows(n)]):
            norm = self.prober.norm(below.piece(n, start)) if n is not start else None
            if norm is not None:
                leaves = below.piece(n, start).leaves
                source, source_axis = n, 3 - at if norm.swapped else at
                weight = leaves[0] if leaves else None
                eps, plus_one = norm.eps, norm.plus_one
                break
        return Rows(
            source, source_axis, weight, plus_one, eps, stored, stored_axis, start, at, rope,
            piece, swapped, turned, scales, 3 - axis,
        )  # fmt: skip

    def _turned(
        self, end: fx.Node, axis: int, raw: fx.Node | None, plain: bool = False
    ) -> tuple[fx.Node, str, int, Piece, bool] | None:
        """The farthest rows (or ``raw``) of which ``end`` is a turn: they, it, their token axis."""
        trunk = Trunk(end, self.data, self.index)
        nodes = [n for n in trunk.nodes if _is_rows(n)]
        narrow = min((val(n).itemsize for n in nodes), default=0)
        for n in reversed(nodes):
            if raw is not None and n is not raw:
                continue
            piece = trunk.piece(n, end)
            if (plain and piece.leaves) or (raw is None and self._weighted(piece)):
                continue  # a norm's weight turns nothing: tables would differ from layer to layer
            turn = self.prober.turn(piece, axis)
            plainly = turn is not None and turn.rope == "none" and raw is None
            if plainly and val(n).itemsize > narrow:
                continue  # rows as they are rounded later: as wide as the others
            if turn is not None:
                return n, turn.rope, turn.axis, piece, turn.swapped
        return None

    def _weighted(self, piece: Piece) -> bool:
        dim = val(piece.start).shape[-1]
        return any(
            _numel(n) == dim == val(n).shape[-1] and n not in self.extras for n in piece.leaves
        )

    def _check(self, node: fx.Node, rows: list[Rows], writes: dict[str, Write]) -> None:
        q, k, v = rows
        if v.rope != "none" or v.eps >= 0:
            raise No("values are turned or normed", node)
        if k.rope != q.rope:
            raise No(f"queries turn by {q.rope} pairs, keys by {k.rope}", node)
        if k.eps != q.eps or k.plus_one != q.plus_one or (k.weight is None) != (q.weight is None):
            # one norm for both in the kernel: else it stays where it is
            for r in (q, k):
                r.source, r.axis, r.weight, r.eps, r.plus_one = (
                    r.normed, r.normed_axis, None, -1.0, False,
                )  # fmt: skip
        dtypes = {val(r.source).dtype for r in rows}
        if len(dtypes) > 1 or dtypes & {torch.float64}:
            raise No(f"rows of {sorted(map(str, dtypes))}", node)
        shapes = [_bthd(val(r.source), r.axis) for r in rows]
        if shapes[1] != shapes[2] or shapes[0][:2] != shapes[1][:2] or shapes[0][3] != shapes[1][3]:
            raise No(f"queries, keys and values of shapes {shapes}", node)
        if any(val(r.source).stride(-1) != 1 for r in rows):
            raise No("channels of a head that do not lie side by side", node)
        tokens, dim = shapes[1][1], shapes[0][3]
        if dim % 2:
            raise No(f"heads of {dim} channels", node)
        for w in writes.values():
            if val(w.held).dim() != 4 or val(w.rows).dim() != 4:
                raise No(f"a cache of {val(w.held).dim()} axes", w.node)
            if w.axis not in (1, 2):
                raise No("slots neither before nor behind the heads", w.node)
            if _bthd(val(w.rows), w.axis) != shapes[1] or val(w.slots).numel() != tokens:
                raise No("a cache of another shape than its rows", w.node)
            if sum(u.target is not aten.copy_.default for u in w.held.users) != 1:
                raise No("the older content of a cache is read too", w.node)
        if "k_raw" in writes:
            if any(r.raw_axis != writes[n].axis for r, n in ((k, "k_raw"), (v, "v_raw"))):
                raise No("a cache of another shape than its rows", node)
            if writes["k_raw"].axis != writes["v_raw"].axis:
                raise No("raw keys and values lie differently", node)
            if {val(writes[n].held).dtype for n in ("k_raw", "v_raw")} != dtypes:
                raise No("a raw cache of another dtype than the rows", node)
        if self.cohort_of.get(writes["k8"].held) not in self.saturated:
            raise No("no count of saturated values belongs to it", node)


def _bthd(x: torch.Tensor, axis: int) -> tuple[int, ...]:
    """Sizes as [B, T, H, D] of rows whose tokens are on ``axis``."""
    return tuple(int(x.shape[i]) for i in (0, axis, 3 - axis, 3)) if x.dim() == 4 else ()


def _is_rows(n: Any) -> bool:
    v = n.meta.get("val") if isinstance(n, fx.Node) else None
    return isinstance(v, torch.Tensor) and v.dim() == 4 and v.dtype.is_floating_point


def _numel(n: fx.Node) -> int:
    v = n.meta.get("val")
    return v.numel() if isinstance(v, torch.Tensor) else -1
