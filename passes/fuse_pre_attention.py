"""One kernel from the QKV projection to attention: norm, RoPE, FP8, and the writes of all caches.

Before:
    q2 = rope(norm(q));  q8 = to_f8(clamp(q2 / q_s))              # q, k, v: views of a product
    k1 = norm(k);        k8 = to_f8(clamp(rope(k1) / k_s));  v8 = to_f8(clamp(v / v_s))
    w0 = index_put(k_cache, [.., idx], k1);  w1 = index_put(v_cache, [.., idx], v)
    w2 = index_put(k_view, [.., idx], k8);   w3 = index_put(v_view, [.., idx], v8)
    o = attention_fp8(q8, w2, w3, ...)
After:
    q8, w2, w3, n, w0, w1 = pre_attention_new(q, k, v, ..., idx, k_view, v_view, ..., n)
    o = attention_fp8(q8, w2, w3, ...)

RoPE and norm are not recognised by their spelling but by what they do (analysis/pieces.py): pairs
(i, i + D/2) or (2i, 2i + 1) turn by tables, all heads alike; RMSNorm over a head's channels. The
tables that the kernel reads are made by the model's own code, run on unit vectors, once a step. A
norm of another kind stays where it is. Turning the query into a view's frame is one more rotation.

Refuses: queries or keys that the product gives in another shape; scales measured in every call;
several writes of one cache in a call; caches that are not written from the very rows.
Numerics: exact (the roundings to the model's dtype between RoPE and FP8 are left out).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from rtc.kernels import pre_attention_graph as _kernel  # registers the op
from rtc.passes.analysis.fp8 import CASTS, FP8, SAME
from rtc.passes.analysis.pieces import Piece, Trunk, data_nodes, random_leaves
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.nodes import Emitter, val
from rtc.passes.plan import Refusal

aten = torch.ops.aten

_TOP = 448.0
_NORM_OPS = "pow square mul mean sum add rsqrt sqrt reciprocal div rms_norm _fused_rms_norm".split()
_CLOSE = 1e-4  # of float32 pieces, relative to the largest value


class _No(Exception):
    """It does not fit: why, and where."""

    def __init__(self, why: str, node: fx.Node) -> None:
        super().__init__(why)
        self.node = node


@dataclass
class _Rows:
    """One of q, k, v: rows of a product on their way to FP8."""

    source: fx.Node  # [B, T, H, D]
    weight: fx.Node | None
    plus_one: bool  # the norm's weight is stored less one
    eps: float  # < 0: no norm
    raw: fx.Node  # normed, before RoPE
    rope: str
    piece: Piece | None  # raw -> turned
    scales: list[tuple[fx.Node, bool]]  # factors a head; True: divided by


@dataclass
class _Write:
    """``index_put(held, [.., slots], rows)``, and the copy_ that stores it."""

    node: fx.Node
    held: fx.Node
    axis: int
    slots: fx.Node
    rows: fx.Node


def _quantized(x8: fx.Node, data: set[fx.Node]) -> tuple[fx.Node, list[tuple[fx.Node, bool]]]:
    """What is quantized by factors that are known before, and the factors."""
    at, factors, clamped = x8, [], False
    if at.target not in CASTS or val(at).dtype != FP8:
        raise _No("not a cast to FP8", at)
    at = at.args[0]  # type: ignore[assignment]
    while True:
        if at.target is aten.clamp.default and at.args[1:3] == (-_TOP, _TOP):
            clamped, at = True, at.args[0]  # type: ignore[assignment]
        elif at.target in (*CASTS, *SAME):
            if val(at).dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise _No(f"a cast to {val(at).dtype}", at)
            at = at.args[0]  # type: ignore[assignment]
        elif at.target in (aten.div.Tensor, aten.mul.Tensor) and _factor(at, data) is not None:
            if not clamped:
                raise _No("no clamp between the scale and the cast to FP8", at)
            x, factor = _factor(at, data)  # type: ignore[misc]
            factors.append((factor, at.target is aten.div.Tensor))
            at = x
        else:
            break
    if not factors:
        raise _No("it is scaled by a maximum of its own, not by a calibrated one", x8)
    return at, factors


def _factor(n: fx.Node, data: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    a, b = n.args
    if n.target is aten.mul.Tensor and isinstance(a, fx.Node) and a not in data:
        a, b = b, a
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or b in data or a not in data:
        return None
    v = b.meta["val"]
    return (a, b) if isinstance(v, torch.Tensor) and _heads_only(v, val(n)) else None


def _heads_only(scale: torch.Tensor, x: torch.Tensor) -> bool:
    """[.., H, 1] beside [B, T, H, D] or [.., H, 1, 1] beside [B, H, T, D]: one factor a head."""
    wide = [d for d, s in enumerate(scale.shape) if s != 1]
    lead = x.dim() - scale.dim()
    return len(wide) <= 1 and all(d + lead in (1, 2) for d in wide)


def _write(node: fx.Node) -> _Write:
    """The single write of fresh rows behind what attention reads (or a cache stores)."""
    at = node
    while at.target in (aten.permute.default, aten.transpose.int, aten.view.dtype):
        at = at.args[0]  # type: ignore[assignment]
    if at.target is not aten.index_put.default or len(at.args) != 3:
        raise _No("it is not written by one index_put", at)
    held, where, rows = at.args
    slots = where[-1]  # type: ignore[index]
    if any(w is not None for w in where[:-1]) or held.op != "placeholder":  # type: ignore[index,union-attr]
        raise _No("it is written more than once in a call", at)
    return _Write(at, held, len(where) - 1, slots, rows)  # type: ignore[arg-type]


class _Prober:
    """Remembers what pieces were found to be: blocks repeat."""

    def __init__(self, known: Mapping[fx.Node, torch.Tensor]) -> None:
        self.known = known
        self.ropes: dict[str, str | None] = {}
        self.norms: dict[str, tuple[float, bool] | None] = {}
        self.generator = torch.Generator().manual_seed(0)

    def _memo_key(self, piece: Piece) -> str:
        known = [self.known[n].tolist() for n in piece.leaves if n in self.known]
        return f"{piece.key}\n{known}"

    def rope(self, piece: Piece) -> str | None:
        """ "half", "interleaved", "none", or None where it is no rotation of the like."""
        key = self._memo_key(piece)
        if key not in self.ropes:
            with _disable_current_modes():
                self.ropes[key] = self._rope(piece)
        return self.ropes[key]

    def _rope(self, piece: Piece) -> str | None:
        shape = tuple(val(piece.start).shape)
        leaves = random_leaves(piece, self.known, self.generator)
        if leaves is None or not piece.is_linear:
            return None
        x = torch.randn(shape, generator=self.generator)
        try:
            y = _as(piece.run(x, leaves), shape)
            if y is None:
                return None
            if not piece.leaves:
                return "none" if torch.equal(y, x) else None
            for rope in ("half", "interleaved"):
                mask = _mask(rope, shape[-1]).expand(shape)
                a, b = (_as(piece.run(m.contiguous(), leaves), shape) for m in (mask, 1 - mask))
                if a is None or b is None:
                    return None
                cos = torch.where(mask > 0, a, b)[:, :, :1]  # of the first head: all are alike
                sin = torch.where(mask > 0, -b, a)[:, :, :1]
                want = x * cos + _turned(x, rope) * sin
                if (y - want).abs().max() <= _CLOSE * y.abs().max():
                    return rope
        except (RuntimeError, TypeError, IndexError):
            return None
        return None

    def norm(self, piece: Piece) -> tuple[float, bool] | None:
        """(eps, weight less one) where it is RMSNorm over the last axis."""
        if piece.key not in self.norms:
            with _disable_current_modes():
                self.norms[piece.key] = self._norm(piece)
        return self.norms[piece.key]

    def _norm(self, piece: Piece) -> tuple[float, bool] | None:
        shape = tuple(val(piece.start).shape)
        dim = shape[-1]
        if (
            not piece.only(_NORM_OPS)
            or len(piece.leaves) > 1
            or any(_numel(n) != dim for n in piece.leaves)
        ):
            return None
        leaves = random_leaves(piece, self.known, self.generator)
        if leaves is None:
            return None
        weight = leaves[0].reshape(dim) if leaves else torch.ones(dim)
        try:
            tiny = torch.full(shape, 1e-15)
            ratio = piece.run(tiny, leaves).flatten()[:dim].double() / 1e-15
            x = torch.randn(shape, generator=self.generator)
            ys = {size: piece.run(x * size, leaves) for size in (1.0, 1e3)}
        except (RuntimeError, TypeError, IndexError):
            return None
        if ys[1.0].shape != shape:
            return None
        for plus_one in (False, True):
            w = weight + 1 if plus_one else weight
            eps = float(((w.double() / ratio) ** 2).median())
            if not 0 < eps < 1:
                continue
            near = eps**0.5  # where the place of eps in the formula shows
            ys[near] = piece.run(x * near, leaves)
            if all(self._normed(x * size, w, eps, y) for size, y in ys.items()):
                return float(f"{eps:.4g}"), plus_one
        return None

    @staticmethod
    def _normed(x: torch.Tensor, w: torch.Tensor, eps: float, y: torch.Tensor) -> bool:
        want = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w
        return bool((y - want).abs().max() <= _CLOSE * want.abs().max())


def _numel(n: fx.Node) -> int:
    v = n.meta.get("val")
    return v.numel() if isinstance(v, torch.Tensor) else -1


def _mask(rope: str, dim: int) -> torch.Tensor:
    at = torch.arange(dim)
    return ((at < dim // 2) if rope == "half" else (at % 2 == 0)).float()


def _turned(x: torch.Tensor, rope: str) -> torch.Tensor:
    if rope == "half":
        low, high = x.chunk(2, -1)
        return torch.cat([-high, low], -1)
    return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)


def _as(y: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """[B, T, H, D] of what may be [B, H, T, D]; sizes must tell."""
    if tuple(y.shape) == shape:
        return y
    swapped = (shape[0], shape[2], shape[1], shape[3])
    return y.transpose(1, 2) if tuple(y.shape) == swapped else None


class _Matcher:
    def __init__(self, ctx: Context) -> None:
        self.graph = ctx.gm.graph
        self.index = {n: i for i, n in enumerate(self.graph.nodes)}
        self.data = data_nodes(self.graph)
        self.inputs = {n.name: n for n in self.graph.nodes if n.op == "placeholder"}
        self.extras = ctx.extras
        known = {}
        with _disable_current_modes():
            for n, e in ctx.extras.items():
                if e.kind == "perm":
                    cohort = ctx.plan.cohorts[e.cohort]
                    known[n] = torch.from_numpy(cohort.rotations[cohort.views[e.view].klass].perm)
            self.prober = _Prober(known)
        self.saturated = {e.cohort: n for n, e in ctx.extras.items() if e.kind == "saturated"}
        self.cohort_of = {n: e.cohort for n, e in ctx.extras.items() if e.kind == "view"}
        self.counted = dict(self.saturated)  # the newest count of each cohort
        self.tables: dict[Any, tuple[fx.Node, fx.Node]] = {}
        self.counts: dict[str, list[fx.Node]] = {}
        for n in self.graph.nodes:
            if "counts" in n.meta:
                self.counts.setdefault(n.meta["counts"], []).append(n)

    def rows(self, x8: fx.Node, raw: fx.Node | None) -> _Rows:
        """``raw``: the rows as the cache stores them, if they are known."""
        end, scales = _quantized(x8, self.data)
        trunk = Trunk(end, self.data, self.index)
        shapes = [n for n in trunk.nodes if _is_rows(n)]
        found: tuple[fx.Node, str, Piece] | None = None
        for n in reversed(shapes):
            if raw is not None and n is not raw:
                continue
            piece = trunk.piece(n, end)
            if raw is None and self._weighted(piece):
                continue  # a norm's weight turns nothing: tables would differ from layer to layer
            rope = self.prober.rope(piece)
            if rope is not None:
                found = n, rope, piece
                break
        if found is None:
            raise _No("what is done between the rows and FP8 is no rotation of pairs", x8)
        start, rope, piece = found
        below = Trunk(start, self.data, self.index)
        source, weight, eps, plus_one = start, None, -1.0, False
        for n in reversed([n for n in below.nodes if _is_rows(n)]):
            norm = self.prober.norm(below.piece(n, start)) if n is not start else None
            if norm is not None:
                leaves = below.piece(n, start).leaves
                source, (eps, plus_one), weight = n, norm, leaves[0] if leaves else None
                break
        return _Rows(source, weight, plus_one, eps, start, rope, piece, scales)

    def _weighted(self, piece: Piece) -> bool:
        dim = val(piece.start).shape[-1]
        return any(_numel(n) == dim and n not in self.extras for n in piece.leaves)

    def match(self, node: fx.Node) -> tuple[_Rows, _Rows, _Rows, dict[str, _Write]]:
        q8, k, v = node.args[:3]
        writes = {"k8": _write(k), "v8": _write(v)}  # type: ignore[arg-type]
        k8, v8 = writes["k8"], writes["v8"]
        if k8.slots is not v8.slots or k8.axis != v8.axis or k8.axis not in (1, 2):
            raise _No("keys and values are not written alike", node)
        fresh = []
        for w in (k8, v8):
            if w.rows.target is not aten.view.dtype:
                raise _No("fresh rows are not FP8", w.node)
            fresh.append(w.rows.args[0])
        raws: list[fx.Node | None] = [None, None]
        ends = [_quantized(f, self.data)[0] for f in fresh]  # type: ignore[arg-type]
        for i, name in enumerate(("k_raw", "v_raw")):
            raw = self._raw_write(Trunk(ends[i], self.data, self.index), k8.slots)
            if raw is not None:
                writes[name], raws[i] = raw, raw.rows
        if (raws[0] is None) != (raws[1] is None):
            raise _No("only one of the raw caches is written from the rows", node)
        rows = [self.rows(q8, None), *(self.rows(f, r) for f, r in zip(fresh, raws, strict=True))]  # type: ignore[arg-type]
        self._check(node, rows, writes)
        return rows[0], rows[1], rows[2], writes

    def _raw_write(self, trunk: Trunk, slots: fx.Node) -> _Write | None:
        for n in trunk.nodes:
            for u in n.users:
                if u.target is aten.index_put.default and u.args[2] is n and u.args[0] is not n:
                    found = _write(u)
                    if found.slots is slots:
                        return found
        return None

    def _check(self, node: fx.Node, rows: list[_Rows], writes: dict[str, _Write]) -> None:
        q, k, v = rows
        if v.rope != "none" or v.eps >= 0:
            raise _No("values are turned or normed", node)
        if k.rope != q.rope:
            raise _No(f"queries turn by {q.rope} pairs, keys by {k.rope}", node)
        if k.eps != q.eps or k.plus_one != q.plus_one or (k.weight is None) != (q.weight is None):
            # one norm for both in the kernel: else it stays where it is
            for r in (q, k):
                r.source, r.weight, r.eps, r.plus_one = r.raw, None, -1.0, False
        dtypes = {val(r.source).dtype for r in rows}
        if len(dtypes) > 1 or dtypes & {torch.float64}:
            raise _No(f"rows of {sorted(map(str, dtypes))}", node)
        shapes = [tuple(val(r.source).shape) for r in rows]
        if shapes[1] != shapes[2] or shapes[0][:2] != shapes[1][:2] or shapes[0][0] != 1:
            raise _No(f"queries, keys and values of shapes {shapes}, batch 1 only", node)
        if any(val(r.source).stride(-1) != 1 for r in rows):
            raise _No("channels of a head that do not lie side by side", node)
        tokens = shapes[1][1]
        heads, dim = (shapes[0][2], shapes[1][2]), shapes[0][3]
        if tokens in heads or dim in (tokens, *heads):
            raise _No("tokens, heads or channels are equal in number: axes cannot be told", node)
        for w in writes.values():
            if val(w.rows).shape[w.axis] != tokens or val(w.held).dim() != 4:
                raise _No("a cache of another shape than its rows", w.node)
            if sum(u.target is not aten.copy_.default for u in w.held.users) != 1:
                raise _No("the older content of a cache is read too", w.node)
        if any(w.axis not in (1, 2) for w in writes.values()):
            raise _No("slots neither before nor behind the heads", node)
        if "k_raw" in writes and writes["k_raw"].axis != writes["v_raw"].axis:
            raise _No("raw keys and values lie differently", node)
        if "k_raw" in writes and val(writes["k_raw"].held).dtype not in dtypes:
            raise _No("a raw cache of another dtype than the rows", node)
        if self.cohort_of.get(writes["k8"].held) not in self.saturated:
            raise _No("no count of saturated values belongs to it", node)

    # -- the rewrite ----------------------------------------------------------------------------

    def replace(
        self, node: fx.Node, q: _Rows, k: _Rows, v: _Rows, writes: dict[str, _Write]
    ) -> None:
        graph, cohort = self.graph, self.cohort_of[writes["k8"].held]
        first = min((w.node for w in writes.values()), key=self.index.__getitem__)
        at = max((first, *(self._ready(r) for r in (q, k, v))), key=self.index.__getitem__)
        views = [x for w in writes.values() for x in self._views(w.node, at)]
        self._uncount(node, writes)
        with graph.inserting_after(at):
            emit = Emitter(graph, node)
            marker = emit(aten.alias.default, q.source)  # everything new goes before it
        with graph.inserting_before(marker):
            tables = [*self._tables(emit, q), *self._tables(emit, k)]
            scales = [self._inverse(emit, r) for r in (q, k, v)]
            weights = [self._weight(emit, r) for r in (q, k)]
            raw = writes.get("k_raw"), writes.get("v_raw")
            out = emit(
                torch.ops.rtc.pre_attention_new.default,
                q.source, k.source, v.source, *weights, *tables, *scales, writes["k8"].slots,
                writes["k8"].held, writes["v8"].held, *(w.held if w else None for w in raw),
                self.counted[cohort], writes["k8"].axis, raw[0].axis if raw[0] else 1, k.rope,
                k.eps,
            )  # fmt: skip
            new = [emit(operator.getitem, out, i) for i in range(6 if raw[0] else 4)]
            q8 = emit(aten.transpose.int, new[0], 1, 2)
            for x in views:  # of caches as written: behind the kernel, in their order
                marker.prepend(x)
        graph.erase_node(marker)
        for i, name in ((1, "k8"), (2, "v8"), (4, "k_raw"), (5, "v_raw")):
            if name in writes:
                writes[name].node.replace_all_uses_with(new[i])
        self.counted[cohort] = new[3]
        node.update_arg(0, q8)

    def _views(self, written: fx.Node, at: fx.Node) -> list[fx.Node]:
        """Views of a written cache that stand before ``at``; nothing else may read it there."""
        out, stack = [], [written]
        while stack:
            for u in stack.pop().users:
                if self.index[u] > self.index[at]:
                    continue
                if u.target not in (aten.permute.default, aten.transpose.int, aten.view.dtype):
                    raise _No("a cache is read before the query is there", u)
                out.append(u)
                stack.append(u)
        return sorted(out, key=self.index.__getitem__)

    def _ready(self, r: _Rows) -> fx.Node:
        """The last node that the kernel's inputs for these rows wait for."""
        given = [r.source, *(f for f, _ in r.scales), *([r.weight] if r.weight else [])]
        given += r.piece.leaves if r.piece else ()
        return max(given, key=lambda n: self.index.get(n, 0))

    def _tables(self, emit: Emitter, r: _Rows) -> tuple[fx.Node, fx.Node]:
        """cos and sin [T, D] f32, made by the model's own code on unit vectors."""
        assert r.piece is not None
        _, tokens, _, dim = val(r.raw).shape
        device = val(r.raw).device
        key = (r.piece.key, r.piece.leaves)
        if key not in self.tables:
            if r.rope == "none":
                t = emit(aten.full.default, [tokens, dim], 0.0, dtype=torch.float32, device=device)
                self.tables[key] = t, t
                return t, t
            at = emit(aten.arange.default, dim, device=device)
            low = (
                emit(aten.lt.Scalar, at, dim // 2)
                if r.rope == "half"
                else emit(aten.eq.Scalar, emit(aten.remainder.Scalar, at, 2), 0)
            )
            mask = emit(aten._to_copy.default, low, dtype=torch.float32)
            shape = list(val(r.raw).shape)
            made = []
            for m in (mask, emit(aten.rsub.Scalar, mask, 1)):
                y = r.piece.emit(emit, emit(aten.expand.default, m, shape))
                if tuple(val(y).shape) != tuple(shape):
                    y = emit(aten.transpose.int, y, 1, 2)
                y = emit(aten.select.int, emit(aten.select.int, y, 2, 0), 0, 0)
                made.append(emit(aten._to_copy.default, y, dtype=torch.float32))
            a, b = made
            cos = emit(aten.where.self, low, a, b)
            sin = emit(aten.where.self, low, emit(aten.neg.default, b), a)
            self.tables[key] = tuple(  # type: ignore[assignment]
                emit(aten.clone.default, x, memory_format=torch.contiguous_format)
                for x in (cos, sin)
            )
        return self.tables[key]

    def _inverse(self, emit: Emitter, r: _Rows) -> fx.Node:
        heads = val(r.source).shape[2]
        total: Any = None
        for factor, divided in r.scales:
            x = emit(aten._to_copy.default, factor, dtype=torch.float32)
            x = emit(aten.reshape.default, x, [-1])
            x = emit(aten.reciprocal.default, x) if divided else x
            total = x if total is None else emit(aten.mul.Tensor, total, x)
        if val(total).numel() != heads:
            total = emit(aten.expand.default, total, [heads])
            total = emit(aten.clone.default, total, memory_format=torch.contiguous_format)
        return total

    def _weight(self, emit: Emitter, r: _Rows) -> fx.Node | None:
        if r.weight is None:
            return None
        x = emit(aten.reshape.default, r.weight, [-1])
        return emit(aten.add.Scalar, x, 1) if r.plus_one else x

    def _uncount(self, node: fx.Node, writes: dict[str, _Write]) -> None:
        """The kernel counts saturated values itself: take the ops that did out of the chain."""
        for name in (node.name, *(w.held.name for w in writes.values())):
            for n in self.counts.pop(name, ()):
                n.replace_all_uses_with(n.args[0])
                self.graph.erase_node(n)


def _is_rows(n: Any) -> bool:
    v = n.meta.get("val") if isinstance(n, fx.Node) else None
    return isinstance(v, torch.Tensor) and v.dim() == 4 and v.dtype.is_floating_point


def run(ctx: Context) -> Outcome:
    out = Outcome()
    matcher: _Matcher | None = None
    for node in list(ctx.gm.graph.nodes):
        if node.target is not torch.ops.rtc.attention_fp8.default:
            continue
        out.matched += 1
        matcher = matcher or _Matcher(ctx)
        try:
            matcher.replace(node, *matcher.match(node))
        except _No as no:
            out.refused.append(Refusal.at(str(no), no.node))
            continue
        out.applied += 1
    if matcher is not None:
        _store_counts(ctx.gm.graph, matcher)
    return out


def _store_counts(graph: fx.Graph, matcher: _Matcher) -> None:
    output = next(n for n in graph.nodes if n.op == "output")
    for cohort, node in matcher.counted.items():
        start = matcher.saturated[cohort]
        if node is start:
            continue
        stored = next((n for n in start.users if n.target is aten.copy_.default), None)
        if stored is not None and stored.args[1] is start:
            stored.update_arg(1, node)
        elif stored is not None:  # what is still counted by ops comes on top
            with graph.inserting_before(stored):
                emit = Emitter(graph)
                both = emit(aten.add.Tensor, stored.args[1], emit(aten.sub.Tensor, node, start))
            stored.update_arg(1, both)
        else:
            with graph.inserting_before(output):
                Emitter(graph)(aten.copy_.default, start, node)


PASS = Pass(
    "fuse_pre_attention", "exact", run, "norm, RoPE, FP8 and cache writes in one kernel",
    stage="graph", own_kernels=True,
)  # fmt: skip

del _kernel
