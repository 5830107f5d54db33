"""Run attention over FP8 keys and values as they are stored, without making them wide first.

Before:
    k: bf16[B, G, S, D] = transpose(to_bf16(to_f32(k8) * k_s))     # k8: f8[B, S, G, D], one scale
    v: bf16[B, G, S, E] = transpose(to_bf16(to_f32(v8) * v_s))     # a head; whole-cache work
    o: bf16[B, H, T, E] = attention(q, k, v)
After:
    q_s: f32[B, H] = amax(abs(q), [2, 3]) / 448;  q8 = to_f8(q / q_s)   # or calibrated as k_s is
    o: bf16[B, H, T, E] = attention_fp8(q8, k8', v8', q_s, k_s', v_s')   # primes: layout only

Refuses: masks, causal attention and negative softmax scales; scales that differ within a head;
reshapes that mix axes; keys or values that are not float8_e4m3fn (one of them alone does not do).
Numerics: changes (queries and probabilities are rounded to FP8 too).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rtc.kernels import attention_fp8 as _kernel  # registers the op
from rtc.passes.analysis.fn import permutation
from rtc.passes.analysis.fp8 import CASTS, FP8, SAME, WIDE, unfit
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.nodes import Emitter, val
from rtc.passes.plan import Refusal

aten = torch.ops.aten

_TOP = 448.0
_SMALLEST = 1e-12  # a head of zeros must not divide by zero

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


# the calibrated maximum, how many queries lay beyond it, the attention's name
_Count = tuple[fx.Node, fx.Node, str]


@dataclass
class _Stored:
    """An FP8 tensor behind an operand; axis i of the operand is its axis ``axes[i]``."""

    node: fx.Node
    axes: list[int]
    # factors, and the mapping of axes where each of them enters; True: divided by
    factors: list[tuple[Any, list[int], bool]] = field(default_factory=list)


def _stored(operand: fx.Node) -> _Stored | Refusal:
    """Follow casts, scales and transpositions down to FP8."""
    rank = len(val(operand).shape)
    if rank != 4:
        return Refusal.at("keys and values of four axes only", operand)
    at, axes = operand, list(range(rank))
    factors: list[tuple[Any, list[int], bool]] = []
    while val(at).dtype != FP8:
        if at.op != "call_function" or val(at).dtype not in WIDE:
            return Refusal.at(f"it reads {val(at).dtype}, not float8_e4m3fn", operand)
        perm = permutation(at.target, at.args, rank)
        below = at.args[0]
        if at.target in (aten.mul.Tensor, aten.div.Tensor):
            a, b = at.args
            if at.target is aten.mul.Tensor and not _full(a, at):
                a, b = b, a
            if not _full(a, at):
                return Refusal.at("a product of two broadcast values", at)
            if isinstance(b, fx.Node) and not _per_head(b, axes):
                return Refusal.at("a scale that differs within a head", at)
            factors.append((b, list(axes), at.target is aten.div.Tensor))
            below = a
        elif perm is not None:
            axes = [perm[i] for i in axes]
        elif at.target in _RESHAPES or at.target is aten.expand.default:
            if val(below).shape != val(at).shape:  # type: ignore[arg-type]
                return Refusal.at("a reshape between the stored values and the attention", at)
        elif at.target not in (*CASTS, *SAME):
            return Refusal.at(f"it reads {val(at).dtype}, not float8_e4m3fn", operand)
        assert isinstance(below, fx.Node)
        at = below
    return _Stored(at, axes, factors)


def _full(x: Any, out: fx.Node) -> bool:
    return isinstance(x, fx.Node) and val(x).shape == val(out).shape


def _per_head(scale: fx.Node, axes: list[int]) -> bool:
    v = scale.meta["val"]
    if not isinstance(v, torch.Tensor):
        return False
    lead = 4 - v.dim()
    return all(s == 1 or axes.index(d + lead) in (0, 1) for d, s in enumerate(v.shape))


def _scale(emit: Emitter, found: _Stored, batch: int, heads: int, like: fx.Node) -> fx.Node:
    """The product of all factors as f32 [batch, heads]."""
    device = val(like).device
    total: Any = emit(aten.full.default, [batch, heads], 1.0, dtype=torch.float32, device=device)
    for factor, axes, divides in found.factors:
        x = factor
        if isinstance(x, fx.Node):
            v = val(x)
            if v.dtype != torch.float32:
                x = emit(aten._to_copy.default, x, dtype=torch.float32)
            x = emit(aten.reshape.default, x, [1] * (4 - v.dim()) + list(v.shape))
            x = emit(aten.permute.default, x, list(axes))
            x = emit(aten.reshape.default, x, list(val(x).shape[:2]))
        total = emit(aten.div.Tensor if divides else aten.mul.Tensor, total, x)
    return total


def _laid_out(emit: Emitter, found: _Stored) -> fx.Node:
    if found.axes == [0, 1, 2, 3]:
        return found.node
    return emit(aten.permute.default, found.node, found.axes)


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
    graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or _writes(n))
    return out


def _writes(n: fx.Node) -> bool:
    t = n.target
    return isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable


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
