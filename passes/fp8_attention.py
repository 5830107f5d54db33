"""Run attention over FP8 keys and values as they are stored, without making them wide first.

Before:
    k: bf16[B, G, S, D] = transpose(to_bf16(to_f32(k8) * k_s))     # k8: f8[B, S, G, D], one scale
    v: bf16[B, G, S, E] = transpose(to_bf16(to_f32(v8) * v_s))     # a head; whole-cache work
    o: bf16[B, H, T, E] = attention(q, k, v)
After:
    q_s: f32[B, H] = amax(abs(q), [2, 3]) / 448;  q8 = to_f8(q / q_s)   # or calibrated as k_s is
    o: bf16[B, H, T, E] = attention_fp8(q8, k8', v8', q_s, k_s', v_s')   # primes: layout only

Refuses: masks, causal attention and negative softmax scales; scales that differ within a head;
reshapes that break up batches or heads; heads repeated after FP8; keys or values that are not
float8_e4m3fn (one of them alone does not do).
Numerics: changes (queries and probabilities are rounded to FP8 too).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rtc.kernels import attention_fp8 as _kernel  # registers the op
from rtc.passes.analysis.effects import dead_code
from rtc.passes.analysis.fn import permutation
from rtc.passes.analysis.fp8 import CASTS, FP8, SAME, WIDE, unfit
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.nodes import Emitter, val
from rtc.passes.plan import Refusal

aten = torch.ops.aten

_TOP = 448.0
_SMALLEST = 1e-12  # a head of zeros must not divide by zero

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_UNITS = (
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip


# the calibrated maximum, how many queries lay beyond it, the attention's name
_Count = tuple[fx.Node, fx.Node, str]


@dataclass
class _Factor:
    """A scale where it enters; ``axes``: of batches and of heads there (None: there is but one)."""

    value: Any
    axes: tuple[int | None, int | None]
    rank: int
    divides: bool


@dataclass
class _Stored:
    """An FP8 tensor behind an operand; ``layout``: the way back up, permutations and shapes."""

    node: fx.Node
    layout: list[tuple[str, list[int]]]
    factors: list[_Factor]


def _stored(operand: fx.Node) -> _Stored | Refusal:
    """Follow casts, scales and layout down to FP8."""
    if len(val(operand).shape) != 4:
        return Refusal.at("keys and values of four axes only", operand)
    at = operand
    axes: tuple[int | None, ...] = tuple(i if val(operand).shape[i] > 1 else None for i in (0, 1))
    layout: list[tuple[str, list[int]]] = []
    factors: list[_Factor] = []
    while val(at).dtype != FP8:
        if at.op != "call_function" or val(at).dtype not in WIDE:
            return Refusal.at(f"it reads {val(at).dtype}, not float8_e4m3fn", operand)
        shape = list(val(at).shape)
        perm = permutation(at.target, at.args, len(shape))
        below = at.args[0]
        if at.target in (aten.mul.Tensor, aten.div.Tensor):
            a, b = at.args
            if at.target is aten.mul.Tensor and not _full(a, at):
                a, b = b, a
            if not _full(a, at):
                return Refusal.at("a product of two broadcast values", at)
            if isinstance(b, fx.Node) and not _per_head(b, axes, len(shape)):
                return Refusal.at("a scale that differs within a head", at)
            factors.append(_Factor(b, (axes[0], axes[1]), len(shape), at.target is aten.div.Tensor))
            below = a
        elif perm is not None:
            axes = tuple(None if i is None else perm[i] for i in axes)
            layout.append(("permute", perm))
        elif at.target in _RESHAPES or at.target in (aten.expand.default, *_UNITS):
            source = list(val(below).shape)  # type: ignore[arg-type]
            if math.prod(source) != math.prod(shape):
                return Refusal.at("heads are repeated between FP8 and the attention", at)
            found = [None if i is None else _same_axis(shape, i, source) for i in axes]
            if any(i is not None and k is None for i, k in zip(axes, found, strict=True)):
                return Refusal.at("a reshape that breaks up batches or heads", at)
            axes = tuple(found)
            if source != shape:
                layout.append(("reshape", shape))
        elif at.target not in (*CASTS, *SAME):
            return Refusal.at(f"it reads {val(at).dtype}, not float8_e4m3fn", operand)
        assert isinstance(below, fx.Node)
        at = below
    return _Stored(at, layout[::-1], factors)


def _same_axis(shape: list[int], axis: int, source: list[int]) -> int | None:
    """The axis of ``source`` that a reshape to ``shape`` leaves as ``axis``, whole."""
    before = math.prod(shape[:axis])
    for i, n in enumerate(source):
        if n == shape[axis] and math.prod(source[:i]) == before:
            return i
    return None


def _full(x: Any, out: fx.Node) -> bool:
    return isinstance(x, fx.Node) and val(x).shape == val(out).shape


def _per_head(scale: fx.Node, axes: tuple[int | None, ...], rank: int) -> bool:
    v = scale.meta["val"]
    if not isinstance(v, torch.Tensor):
        return False
    return all(s == 1 or d + rank - v.dim() in axes for d, s in enumerate(v.shape))


def _scale(emit: Emitter, found: _Stored, batch: int, heads: int, like: fx.Node) -> fx.Node:
    """The product of all factors as f32 [batch, heads]."""
    device = val(like).device
    total: Any = emit(aten.full.default, [batch, heads], 1.0, dtype=torch.float32, device=device)
    for f in found.factors:
        x = f.value
        if isinstance(x, fx.Node):
            v = val(x)
            if v.dtype != torch.float32:
                x = emit(aten._to_copy.default, x, dtype=torch.float32)
            shape = [1] * (f.rank - v.dim()) + list(v.shape)
            b, h = (1 if i is None else shape[i] for i in f.axes)
            if b > 1 and h > 1 and f.axes[0] > f.axes[1]:  # type: ignore[operator]
                x = emit(aten.t.default, emit(aten.reshape.default, x, [h, b]))
            else:
                x = emit(aten.reshape.default, x, [b, h])
        total = emit(aten.div.Tensor if f.divides else aten.mul.Tensor, total, x)
    return total


def _laid_out(emit: Emitter, found: _Stored) -> fx.Node:
    x, pending = found.node, list(range(val(found.node).dim()))
    for kind, arg in [*found.layout, ("end", [])]:
        if kind == "permute":
            pending = [pending[i] for i in arg]
            continue
        if pending != sorted(pending):
            x = emit(aten.permute.default, x, pending)
        if kind == "reshape":
            x, pending = emit(aten.reshape.default, x, arg), list(range(len(arg)))
    return x


def _refused(node: fx.Node) -> Refusal | None:
    reason = unfit(node)
    return Refusal.at(reason, node) if reason else None


def run(ctx: Context) -> Outcome:
    out = Outcome()
    graph = ctx.gm.graph
    known = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    counts: list[_Count] = []
    for node in list(graph.nodes):
        if node.target is not torch.ops.rtc.attention.default:
            continue
        out.matched += 1
        reason = _refused(node)
        found = [] if reason else [_stored(a) for a in node.args[1:3]]
        reason = reason or next((f for f in found if isinstance(f, Refusal)), None)
        if reason is not None:
            out.refused.append(reason)
            continue
        counts += _replace(graph, node, known, *found)  # type: ignore[arg-type]
        out.applied += 1
    _store_counts(ctx, counts)
    dead_code(graph)
    return out


def _replace(
    graph: fx.Graph, node: fx.Node, known: Mapping[Any, fx.Node], k: _Stored, v: _Stored
) -> list[_Count]:
    q, softmax_scale = node.args[0], node.args[5]
    batch, heads, _, dim = val(q).shape  # type: ignore[arg-type]
    groups = val(node.args[1]).shape[1]  # type: ignore[arg-type]
    with graph.inserting_before(node):
        emit = Emitter(graph, node)
        scales = [_scale(emit, s, batch, groups, node) for s in (k, v)]
        # kernels take the largest score by the largest product: no negative factor may come after
        sign = emit(aten.reshape.default, emit(aten.sign.default, scales[0]), [batch, groups, 1])
        sign = emit(aten.expand.default, sign, [batch, groups, heads // groups])
        sign = emit(aten.reshape.default, sign, [batch, heads, 1, 1])
        scales[0] = emit(aten.abs.default, scales[0])
        wide = emit(aten._to_copy.default, q, dtype=torch.float32)
        size = known.get(node.meta.get("query_amax"))
        if size is None:
            size = emit(aten.amax.default, emit(aten.abs.default, wide), [2, 3], True)
        step = emit(aten.div.Tensor, emit(aten.clamp.default, size, _SMALLEST), _TOP)
        q8 = emit(aten.div.Tensor, emit(aten.mul.Tensor, wide, sign), step)
        q8 = emit(aten.clamp.default, q8, -_TOP, _TOP)
        q8 = emit(aten._to_copy.default, q8, dtype=FP8)
        q_s = emit(aten.reshape.default, step, [batch, heads])
        new = emit(
            torch.ops.rtc.attention_fp8.default,
            q8, _laid_out(emit, k), _laid_out(emit, v), q_s, *scales,
            softmax_scale if softmax_scale is not None else dim**-0.5, val(node).dtype,
        )  # fmt: skip
        over = emit(aten.gt.Tensor, emit(aten.abs.default, wide), size)
        beyond = emit(aten.sum.default, over)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    amax = known.get(node.meta.get("query_amax"))
    return [] if amax is None else [(amax, beyond, new.name)]


def _store_counts(ctx: Context, counts: list[_Count]) -> None:
    """Add what was clamped of the queries to the cohorts' counts of saturated values."""
    saturated = {e.cohort: n for n, e in ctx.extras.items() if e.kind == "saturated"}
    output = next(n for n in ctx.gm.graph.nodes if n.op == "output")
    for amax, beyond, name in counts:
        start = saturated[ctx.extras[amax].cohort]
        stored = next((n for n in start.users if n.target is aten.copy_.default), None)
        with ctx.gm.graph.inserting_before(stored or output):
            emit = Emitter(ctx.gm.graph)
            total = emit(aten.add.Tensor, stored.args[1] if stored else start, beyond)
            total.meta["counts"] = name
            if stored is None:
                emit(aten.copy_.default, start, total)
            else:
                stored.update_arg(1, total)


PASS = Pass(
    "fp8_attention", "numerics", run, "attention over FP8 keys and values as stored", stage="graph"
)

del _kernel
