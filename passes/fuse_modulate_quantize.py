"""Norm, modulation and row quantization in one kernel, with the residual in front if there is one.

Before:
    h: bf16[B, T, C] = r + gate * d                 # gate: [C] or none; d comes from a matmul
    y: bf16[B, T, C] = norm(h) * (1 + scale) + shift           # any affine function a channel
    s: f32[M, 1] = clamp(amax(abs(y), -1) / 448);  q: f8[M, C] = to_f8(y / s)
After:
    h, q, s = residual_modulate_quantize(r, d, gate, None, None, 1 + scale, shift, "layer", ...)
    q, s = modulate_quantize(h, None, None, 1 + scale, shift, "layer", eps, floor)  # without r, d

Refuses: factors or terms that differ from row to row; norms over more than the last axis; float64;
a residual whose vectors depend on it (the second form is taken then).
Numerics: exact, but for roundings between: y, norm(h) and gate * d stay in float32 where eager
rounds them to a half type, h is rounded once, and the norm is of the rounded h. Factors that do not
fit the op's four vectors are multiplied out in float32.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rtc.kernels import modulate_quantize as _kernel  # registers the ops
from rtc.passes.analysis import quantizer
from rtc.passes.analysis.collectives import is_collective, issues
from rtc.passes.analysis.effects import dead_code
from rtc.passes.analysis.fp8 import CASTS
from rtc.passes.analysis.normed import (
    FLOATS,
    NotNormed,
    Refused,
    Row,
    Rows,
    Vec,
    base,
    emit_vector,
    leaves,
    times,
)
from rtc.passes.analysis.quantizer import RowQuantizer
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.nodes import Emitter, arg_by_name, val
from rtc.passes.plan import Refusal

aten = torch.ops.aten

_PRODUCTS = {
    "aten::mm", "aten::addmm", "aten::linear", "aten::bmm", "aten::baddbmm", "aten::matmul",
    "aten::_scaled_mm", "aten::_scaled_mm_v2", "rtc::linear_fp8", "rtc::linear_fp8_raw",
    "aten::_int_mm", "aten::_weight_int8pack_mm",
}  # fmt: skip


@dataclass
class _Residual:
    """sum = r + gate * delta; ``top`` is ``sum`` or a cast of it, and x_new takes its place."""

    top: fx.Node
    r: fx.Node
    delta: fx.Node
    gate: Vec | None


def _residual(rows: Rows, h: fx.Node) -> _Residual | None:
    tops = [h]
    if h.target in CASTS and isinstance(h.args[0], fx.Node):
        tops.append(base(h.args[0]))
    total = tops[-1]
    if total.op != "call_function" or not rows.full(total):
        return None
    best: tuple[int, _Residual] | None = None
    for r, delta, factor in _splits(rows, total):
        gate, delta = _gated(rows, delta, factor)
        r, delta = base(r), base(delta)
        if not (rows.full(r) and rows.full(delta) and val(delta).dtype in FLOATS):
            continue
        top = next((t for t in tops if val(t).dtype == val(r).dtype), total)
        widest = torch.promote_types(val(r).dtype, val(top).dtype)
        if val(top).dtype not in FLOATS or widest != val(top).dtype or not _product(rows, delta):
            continue
        rank = 1 + (gate is not None)
        if best is None or rank >= best[0]:
            best = rank, _Residual(top, r, delta, gate)
    return best[1] if best else None


def _splits(rows: Rows, total: fx.Node) -> list[tuple[fx.Node, fx.Node, Vec]]:
    """(r, delta, factor) with total = r + delta * factor."""
    args: Any = total.args
    if total.target is aten.add.Tensor:
        a, b = args[:2]
        alpha = arg_by_name(total, "alpha")
        if not (rows.full(a) and rows.full(b)):
            return []
        return [(a, b, alpha), (b, a, 1)] if alpha == 1 else [(a, b, alpha)]
    if total.target is aten.addcmul.default:
        r, a, b = args[:3]
        value = arg_by_name(total, "value")
        for d, g in ((a, b), (b, a)):
            if rows.full(r) and rows.full(d) and rows.vector(g):
                return [(r, d, times(value, g))]
    return []


def _gated(rows: Rows, delta: fx.Node, factor: Vec) -> tuple[Vec | None, fx.Node]:
    """delta * factor with the factors a channel of delta taken out of it."""
    gate = factor
    while True:
        delta = base(delta)
        if delta.target in CASTS and rows.full(delta.args[0]) and _float(delta.args[0]):
            at: Any = base(delta.args[0])  # type: ignore[arg-type]
        else:
            at = delta
        if at.target not in (aten.mul.Tensor, aten.mul.Scalar):
            break
        a, b = at.args[:2]
        pair = next(((x, g) for x, g in ((a, b), (b, a)) if rows.full(x) and rows.vector(g)), None)
        if pair is None:
            break
        delta, gate = pair[0], times(pair[1], gate)
    return None if not isinstance(gate, (fx.Node, tuple)) and gate == 1 else gate, delta


def _float(node: Any) -> bool:
    return val(node).dtype in FLOATS


def _product(rows: Rows, node: Any) -> bool:
    """Whether it is a matrix product, up to casts, reshapes, a bias, scales of rows or columns."""
    for _ in range(16):
        if not rows.full(node) or node.op != "call_function":
            return False
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.name in _PRODUCTS:
            return True
        if is_collective(node):  # parts of one, summed over ranks
            node = node.args[0] if node.args else None
            continue
        below = base(node)
        if below is not node:
            node = below
        elif target in CASTS:
            node = node.args[0]
        elif target in (aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.mul.Scalar):
            a, b = node.args[:2]
            if not rows.full(a):
                a, b = b, a
            per_row = isinstance(b, fx.Node) and val(b).numel() * rows.columns == rows.count
            if not (rows.vector(b) or (per_row and val(b).shape[-1:] == (1,))):
                return False
            node = a
        else:
            return False
    return False


def run(ctx: Context) -> Outcome:
    return fuse(ctx.gm.graph)


def fuse(graph: fx.Graph) -> Outcome:
    out = Outcome()
    groups: dict[tuple[fx.Node, float], list[RowQuantizer]] = {}
    for found in quantizer.find(graph):
        groups.setdefault((found.x, found.floor), []).append(found)
    fused = 0
    for (x, floor), members in groups.items():
        v = val(x)
        rows = Rows(int(v.shape[-1]), v.numel(), v.device)
        try:
            row = rows(x)
        except NotNormed:
            continue
        except Refused as e:
            out.matched += len(members)
            out.refused.append(e.refusal)
            continue
        out.matched += len(members)
        reason = _refused(row)
        if reason is not None:
            out.refused.append(reason)
            continue
        fused += _replace(graph, rows, row, members, floor)
        out.applied += len(members)
    if out.applied:
        out.notes.append(f"{fused} of {out.applied} with the residual in front")
    dead_code(graph)
    return out


def _refused(row: Row) -> Refusal | None:
    if not _float(row.h):
        return Refusal.at(f"a norm of {val(row.h).dtype}", row.h)
    if not row.eps >= 0:
        return Refusal.at(f"an eps of {row.eps}", row.h)
    gpu = val(row.h).device if val(row.h).is_cuda and torch.cuda.is_available() else None
    if gpu is not None and torch.cuda.get_device_capability(gpu) < (8, 9):
        return Refusal.at("this GPU has no FP8 conversions", row.h)
    return None


def _replace(
    graph: fx.Graph, rows: Rows, row: Row, members: list[RowQuantizer], floor: float
) -> bool:
    """Emit the op for ``members``, which quantize one row alike; whether with the residual."""
    vectors = row.slots()
    needed = set().union(*(leaves(v) for v in vectors if v is not None))
    residual = _residual(rows, row.h)
    late = _movable(residual.top, needed) if residual is not None else None
    if residual is None or late is None:
        first = min(map(quantizer.place, members))
        with graph.inserting_before(first):
            emit = Emitter(graph, members[0].q)
            x = _matrix(emit, row.h, rows.columns)
            made = [_vector(emit, v, rows, row.h) for v in vectors]
            op = torch.ops.rtc.modulate_quantize.default
            both = emit(op, x, *made, row.norm, row.eps, floor)
            q, s = (emit(operator.getitem, both, i) for i in (0, 1))
    else:
        top = residual.top
        at = top.next
        while at in late:
            at = at.next
        for node in late:
            at.prepend(node)
        with graph.inserting_before(at):
            emit = Emitter(graph, members[0].q)
            r = residual.r
            if val(r).dtype != val(top).dtype:
                r = emit(aten._to_copy.default, r, dtype=val(top).dtype)
            given = [_matrix(emit, n, rows.columns) for n in (r, residual.delta)]
            made = [_vector(emit, v, rows, row.h) for v in (residual.gate, *vectors)]
            op = torch.ops.rtc.residual_modulate_quantize.default
            three = emit(op, *given, *made, row.norm, row.eps, floor)
            new, q, s = (emit(operator.getitem, three, i) for i in (0, 1, 2))
            if val(new).shape != val(top).shape:
                new = emit(aten.reshape.default, new, list(val(top).shape))
        top.replace_all_uses_with(new)
    for member in members:
        quantizer.replace(member, q, s)
    return residual is not None and late is not None


def _vector(emit: Emitter, v: Vec | None, rows: Rows, like: fx.Node) -> fx.Node | None:
    return None if v is None else emit_vector(emit, v, rows.columns, like)


def _matrix(emit: Emitter, node: fx.Node, columns: int) -> fx.Node:
    """Rows as [M, C] with columns side by side."""
    if val(node).dim() != 2:
        node = emit(aten.reshape.default, node, [-1, columns])
    if val(node).stride()[-1] != 1:
        node = emit(aten.clone.default, node, memory_format=torch.contiguous_format)
    return node


def _movable(top: fx.Node, needed: set[fx.Node]) -> list[fx.Node] | None:
    """What ``needed`` is made of behind ``top``, in order; None if ``top`` is part of it, or a
    collective, which might come before another one then."""
    late: set[fx.Node] = set()
    queue = list(needed)
    while queue:
        n = queue.pop()
        if n is top or (top < n and issues(n)):
            return None
        if top < n and n not in late:
            late.add(n)
            queue += n.all_input_nodes
    return sorted(late)


PASS = Pass(
    "fuse_modulate_quantize",
    "exact",
    run,
    "norm, modulation and FP8 row quantization in one kernel",
    stage="graph",
    own_kernels=True,
)

del _kernel
