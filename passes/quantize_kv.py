"""Give a model without one an FP8 cache: quantize what attention reads, as naive code would.

Before:
    o = attention(q, k, v)                                # k: bf16[B, G, S, D], out of a cache
After:
    a: f32[B, G, 1, 1] = amax(abs(k), [2, 3]);  s = clamp(a / 448, 1e-12)
    k1 = to_bf16(to_f32(to_f8(clamp(k / s))) * s)         # the same for v
    o = attention(q, k1, v1)

The whole-cache work that this adds is the very kind that ``hoist_quantize`` moves to write time,
with scales calibrated once a session; ``fp8_attention`` then reads the FP8 values themselves.

Refuses: keys and values that are not read out of a cache; masked or causal attention, and all else
that attention in FP8 cannot do (what is kept would be as wide as before); heads repeated between
the cache and the attention (let SDPA do that: ``enable_gqa=True``); what is in FP8 already.
Numerics: changes (keys and values are rounded to FP8, about 2.6e-2 of each one's size).
"""

from __future__ import annotations

import torch
from torch import fx

from rtc.passes.analysis import order
from rtc.passes.analysis.fn import Fn, walk
from rtc.passes.analysis.fp8 import FP8, reads_fp8, unfit
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.nodes import Emitter, val
from rtc.passes.plan import Refusal

aten = torch.ops.aten

_TOP = 448.0


def run(ctx: Context) -> Outcome:
    out = Outcome()
    uses: dict[fx.Node, dict[int, Fn]] = {}
    for cohort in ctx.plan.cohorts:
        for view in cohort.views:
            for node, user, v in view.uses:
                if user.target is order.attention:
                    for i in (1, 2):
                        if user.args[i] is node:
                            uses.setdefault(user, {})[i] = v.fn
    for user, found in uses.items():
        out.matched += 1
        reason = _refused(user, found)
        if reason is not None:
            out.refused.append(reason)
            continue
        for i in (1, 2):
            _quantize(ctx.gm.graph, user, i)
        out.applied += 1
    return out


def _refused(user: fx.Node, found: dict[int, Fn]) -> Refusal | None:
    if len(found) < 2:
        return Refusal.at("keys and values do not both come out of a cache", user)
    if any(len(val(a).shape) != 4 for a in user.args[1:3]):  # type: ignore[arg-type]
        return Refusal.at("keys and values of four axes only", user)
    if all(reads_fp8(fn) is not None for fn in found.values()):
        return Refusal.at("it reads FP8 already", user)
    reason = unfit(user)
    if reason is not None:
        return Refusal.at(f"nothing would read FP8: {reason}", user)
    for fn in found.values():
        if any(f.target is aten.expand.default for f in walk(fn)):
            return Refusal.at(
                "heads are repeated before the attention: pass enable_gqa=True to SDPA instead",
                user,
            )
    return None


def _quantize(graph: fx.Graph, user: fx.Node, i: int) -> None:
    x = user.args[i]
    assert isinstance(x, fx.Node)
    narrow = val(x).dtype
    dtype = narrow if narrow == torch.float64 else torch.float32
    with graph.inserting_before(user):
        emit = Emitter(graph, user)
        wide = x if narrow == dtype else emit(aten._to_copy.default, x, dtype=dtype)
        size = emit(aten.amax.default, emit(aten.abs.default, wide), [2, 3], True)
        scale = emit(aten.clamp.default, emit(aten.div.Tensor, size, _TOP), 1e-12)
        q = emit(aten.clamp.default, emit(aten.div.Tensor, wide, scale), -_TOP, _TOP)
        q = emit(aten._to_copy.default, q, dtype=FP8)
        y = emit(aten.mul.Tensor, emit(aten._to_copy.default, q, dtype=dtype), scale)
        y = y if narrow == dtype else emit(aten._to_copy.default, y, dtype=narrow)
    user.update_arg(i, y)


PASS = Pass("quantize_kv", "numerics", run, "an FP8 cache for a model that has none", stage="trace")
