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

RoPE and norm are not recognised by their spelling but by what they do (analysis/turns.py): pairs
(i, i + D/2) or (2i, 2i + 1) turn by tables, all heads alike; RMSNorm over a head's channels. The
tables that the kernel reads are made by the model's own code, run on unit vectors, once a step. A
norm of another kind (a mean taken off, all heads as one) stays where it is. Caches may have their
slots before or behind the heads, and may hold keys that are turned already. Turning the query into
a view's frame is one more rotation.

Refuses: other pairings of channels; turns that differ between heads; scales measured in every call;
several writes of one cache in a call; caches that are not written from the very rows.
Numerics: exact (the roundings to the model's dtype between RoPE and FP8 are left out; turned keys
are rounded once on their way to a cache, however often the model rounds them).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rtc.kernels import pre_attention_graph as _kernel  # registers the op
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.nodes import Emitter, val
from rtc.passes.plan import Refusal
from rtc.passes.pre_attention_match import VIEWS, Matcher, No, Rows, Write

aten = torch.ops.aten


class _Rewriter:
    """Puts kernels in place of what a `Matcher` read."""

    def __init__(self, matcher: Matcher) -> None:
        self.graph, self.index = matcher.graph, matcher.index
        self.saturated, self.cohort_of = matcher.saturated, matcher.cohort_of
        self.counted = dict(matcher.saturated)  # the newest count of each cohort
        self.tables: dict[Any, tuple[fx.Node, fx.Node]] = {}
        self.counts: dict[str, list[fx.Node]] = {}
        for n in self.graph.nodes:
            if "counts" in n.meta:
                self.counts.setdefault(n.meta["counts"], []).append(n)

    def replace(self, node: fx.Node, q: Rows, k: Rows, v: Rows, writes: dict[str, Write]) -> None:
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
            each = any(
                val(f).dim() == 4 and len(val(f)) > 1 for r in (q, k, v) for f, _ in r.scales
            )
            scales = [self._inverse(emit, r, each) for r in (q, k, v)]
            weights = [self._weight(emit, r) for r in (q, k)]
            given = [_tokens_first(emit, r.source, r.axis) for r in (q, k, v)]
            raw = writes.get("k_raw"), writes.get("v_raw")
            out = emit(
                torch.ops.rtc.pre_attention_new.default,
                *given, *weights, *tables, *scales, writes["k8"].slots,
                writes["k8"].held, writes["v8"].held, *(w.held if w else None for w in raw),
                self.counted[cohort], writes["k8"].axis, raw[0].axis if raw[0] else 1, k.rope,
                k.eps, k.turned,
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
                if u.target not in VIEWS:
                    raise No("a cache is read before the query is there", u)
                out.append(u)
                stack.append(u)
        return sorted(out, key=self.index.__getitem__)

    def _ready(self, r: Rows) -> fx.Node:
        """The last node that the kernel's inputs for these rows wait for."""
        given = [r.source, *(f for f, _ in r.scales), *([r.weight] if r.weight else [])]
        given += r.piece.leaves
        return max(given, key=lambda n: self.index.get(n, 0))

    def store_counts(self) -> None:
        """Counts of saturated values, as the last kernel of each cohort left them."""
        output = next(n for n in self.graph.nodes if n.op == "output")
        for cohort, node in self.counted.items():
            start = self.saturated[cohort]
            if node is start:
                continue
            stored = next((n for n in start.users if n.target is aten.copy_.default), None)
            if stored is not None and stored.args[1] is start:
                stored.update_arg(1, node)
            elif stored is not None:  # what is still counted by ops comes on top
                with self.graph.inserting_before(stored):
                    emit = Emitter(self.graph)
                    more = emit(aten.sub.Tensor, node, start)
                    both = emit(aten.add.Tensor, stored.args[1], more)
                stored.update_arg(1, both)
            else:
                with self.graph.inserting_before(output):
                    Emitter(self.graph)(aten.copy_.default, start, node)

    def _tables(self, emit: Emitter, r: Rows) -> tuple[fx.Node, fx.Node]:
        """cos and sin [T, D] f32, made by the model's own code on unit vectors."""
        shape = [int(n) for n in val(r.normed).shape]
        tokens, dim = shape[r.normed_axis], shape[3]
        device = val(r.normed).device
        key = (r.piece.key, r.piece.leaves, r.normed_axis)
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
            made = []
            for m in (mask, emit(aten.rsub.Scalar, mask, 1)):
                y = r.piece.emit(emit, emit(aten.expand.default, m, shape))
                y = _tokens_first(emit, y, 3 - r.normed_axis if r.swapped else r.normed_axis)
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

    def _inverse(self, emit: Emitter, r: Rows, each: bool) -> fx.Node:
        """What rows are multiplied by, [H]; each: [B, H]."""
        shape = val(r.source).shape
        want = [int(shape[0]) if each else 1, int(shape[3 - r.axis])]
        total: Any = None
        for factor, divided in r.scales:
            v = val(factor)
            wide = [1] * (4 - v.dim()) + list(v.shape)
            x = emit(aten._to_copy.default, factor, dtype=torch.float32)
            x = emit(aten.reshape.default, x, [wide[0], wide[r.scale_axis]])
            x = emit(aten.reciprocal.default, x) if divided else x
            total = x if total is None else emit(aten.mul.Tensor, total, x)
        if list(val(total).shape) != want:
            total = emit(aten.expand.default, total, want)
            total = emit(aten.clone.default, total, memory_format=torch.contiguous_format)
        return total if each else emit(aten.reshape.default, total, want[1:])

    def _weight(self, emit: Emitter, r: Rows) -> fx.Node | None:
        if r.weight is None:
            return None
        x = emit(aten.reshape.default, r.weight, [-1])
        return emit(aten.add.Scalar, x, 1) if r.plus_one else x

    def _uncount(self, node: fx.Node, writes: dict[str, Write]) -> None:
        """The kernel counts saturated values itself: take the ops that did out of the chain."""
        for name in (node.name, *(w.held.name for w in writes.values())):
            for n in self.counts.pop(name, ()):
                n.replace_all_uses_with(n.args[0])
                self.graph.erase_node(n)


def _tokens_first(emit: Emitter, x: fx.Node, axis: int) -> fx.Node:
    """[B, T, H, D] of rows whose tokens are on ``axis``."""
    return x if axis == 1 else emit(aten.transpose.int, x, 1, 2)


def run(ctx: Context) -> Outcome:
    out = Outcome()
    rewriter: _Rewriter | None = None
    matcher: Matcher | None = None
    for node in list(ctx.gm.graph.nodes):
        if node.target is not torch.ops.rtc.attention_fp8.default:
            continue
        out.matched += 1
        if matcher is None or rewriter is None:
            matcher = Matcher(ctx)
            rewriter = _Rewriter(matcher)
        try:
            rewriter.replace(node, *matcher.match(node))
        except No as no:
            out.refused.append(Refusal.at(str(no), no.node))
            continue
        out.applied += 1
    if rewriter is not None:
        rewriter.store_counts()
    return out


PASS = Pass(
    "fuse_pre_attention", "exact", run, "norm, RoPE, FP8 and cache writes in one kernel",
    stage="graph", own_kernels=True,
)  # fmt: skip

del _kernel
