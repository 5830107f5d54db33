"""FP8 matrix products by rtc's op, which knows the fastest backend for a shape.

Before:
    y: bf16[M, N] = _scaled_mm(x8, t(w8), x_s, w_s, bias, None, bf16, True)   # x_s [M, 1] or one
After:
    y: bf16[M, N] = linear_fp8(x8, w8, x_s, w_s, bias, bf16)

and where y's only user is the residual of a fused norm, and the table says that it pays:

Before:
    h, q, s = residual_modulate_quantize(r, y, gate, ..., floor, None)
After:
    raw: bf16[M, N] = linear_fp8_raw(x8, w8, bf16)
    h, q, s = residual_modulate_quantize(r, raw, gate * w_s, ..., floor, x_s)

Refuses: operands other than float8_e4m3fn; block-wise scales; scales of the result; FP8 results;
accumulation without use_fast_accum; GPUs before Hopper. Only for a bfloat16 or float32 result of
row-wise scales without a bias are the scales left to the reader.
Numerics: exact, but for y's rounding, which is that of the unscaled product where there is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from rtc.kernels import linear_fp8 as _kernel  # registers the ops
from rtc.kernels import modulate_quantize as _consumer
from rtc.passes.analysis.effects import dead_code
from rtc.passes.analysis.fp8 import FP8
from rtc.passes.analysis.normed import base
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.nodes import Emitter, arg_by_name, val
from rtc.passes.plan import Refusal

aten = torch.ops.aten

_RESIDUAL = torch.ops.rtc.residual_modulate_quantize.default
_OPS = {aten._scaled_mm.default}
_V2 = getattr(getattr(aten, "_scaled_mm_v2", None), "default", None)
_TENSOR, _ROW = 0, 1  # torch's ScalingType
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@dataclass
class _Product:
    """x @ w, w [K, N] as torch takes it; one scale each, or one a row and one a column."""

    node: fx.Node
    x: fx.Node
    w: fx.Node
    x_scale: fx.Node
    w_scale: fx.Node
    bias: fx.Node | None
    by_row: bool


def _arch(node: fx.Node) -> tuple[int, int] | None:
    """Compute capability of the node's GPU; None on other devices, or where there is none."""
    device = val(node).device
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def _read(node: fx.Node) -> _Product | Refusal:
    v2 = node.target is _V2
    x, w, scales, bias = (arg_by_name(node, a) for a in ("self", "mat2", "scale_a", "bias"))
    other = arg_by_name(node, "scale_b")
    if any(not isinstance(i, int) for i in (*val(node).shape, *val(x).shape)):
        return Refusal.at("sizes that change", node)
    if val(x).dtype != FP8 or val(w).dtype != FP8:
        return Refusal.at(f"operands of {val(x).dtype} and {val(w).dtype}", node)
    if v2:
        recipes = [list(arg_by_name(node, f"recipe_{i}")) for i in "ab"]
        swizzled = any(any(arg_by_name(node, f"swizzle_{i}")) for i in "ab")
        if recipes not in ([[_TENSOR], [_TENSOR]], [[_ROW], [_ROW]]) or swizzled:
            return Refusal.at("scales other than one, or one a row", node)
        if list(arg_by_name(node, "contraction_dim") or []):
            return Refusal.at("a contraction over other axes", node)
        scales, other = scales[0], other[0]
    elif arg_by_name(node, "scale_result") is not None:
        return Refusal.at("its result has a scale", node)
    (m, n) = val(node).shape
    counts = val(scales).numel(), val(other).numel()
    shapes = [tuple(val(s).shape) for s in (scales, other)]
    by_row = shapes == [(m, 1), (1, n)] and counts != (1, 1)
    if not (by_row or counts == (1, 1)) or {val(s).dtype for s in (scales, other)} != {
        torch.float32
    }:
        return Refusal.at("block-wise scales", node)
    if val(node).dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return Refusal.at(f"a result of {val(node).dtype}", node)
    if not arg_by_name(node, "use_fast_accum"):
        return Refusal.at("it asks for accumulation in full precision", node)
    arch = _arch(node)
    if val(node).device.type == "cuda" and arch is not None and arch[0] < 9:
        return Refusal.at("rtc's kernels are for Hopper and later", node)
    return _Product(node, x, w, scales, other, bias, by_row)


def _consumer_of(found: _Product) -> fx.Node | None:
    """The fused residual that alone reads a product, where scales are better left to it."""
    node = found.node
    if not found.by_row or found.bias is not None or val(node).dtype == torch.float16:
        return None
    at = node
    while len(at.users) == 1 and next(iter(at.users)).target in _VIEWS:
        at = next(iter(at.users))
    if len(at.users) != 1:
        return None
    user = next(iter(at.users))
    if user.target is not _RESIDUAL or arg_by_name(user, "delta_scale") is not None:
        return None
    given = [n for n in user.args if n is at]
    if arg_by_name(user, "delta") is not at or len(given) != 1:
        return None
    (m, n), k = val(node).shape, val(found.x).shape[1]
    if val(at).shape != val(node).shape or base(at) is not node:
        return None
    arch = _arch(node)
    return user if arch is not None and _kernel.pays_raw(m, n, k, arch) else None


def run(ctx: Context) -> Outcome:
    return rewrite(ctx.gm.graph)


def rewrite(graph: fx.Graph) -> Outcome:
    out = Outcome()
    raw = 0
    for node in list(graph.nodes):
        if node.target not in _OPS and (_V2 is None or node.target is not _V2):
            continue
        out.matched += 1
        found = _read(node)
        if isinstance(found, Refusal):
            out.refused.append(found)
            continue
        user = _consumer_of(found)
        if user is not None:
            _leave_scales_to(graph, found, user)
            raw += 1
        else:
            _replace(graph, found)
        out.applied += 1
    if out.applied:
        out.notes.append(f"{out.applied - raw} with scales inside, {raw} without")
    dead_code(graph)
    return out


def _weight(emit: Emitter, w: fx.Node) -> fx.Node:
    """[N, K] of the [K, N] that torch takes."""
    if w.target is aten.t.default or (
        w.target is aten.transpose.int and {int(d) % 2 for d in w.args[1:3]} == {0, 1}  # type: ignore[arg-type]
    ):
        return w.args[0]  # type: ignore[return-value]
    return emit(aten.t.default, w)


def _replace(graph: fx.Graph, found: _Product) -> None:
    node = found.node
    with graph.inserting_before(node):
        emit = Emitter(graph, node)
        new = emit(
            torch.ops.rtc.linear_fp8.default,
            found.x, _weight(emit, found.w), found.x_scale, found.w_scale, found.bias,
            val(node).dtype,
        )  # fmt: skip
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _leave_scales_to(graph: fx.Graph, found: _Product, user: fx.Node) -> None:
    """``user`` is a residual_modulate_quantize whose delta is the product."""
    rows, columns = val(found.node).shape
    with graph.inserting_before(user):
        emit = Emitter(graph, found.node)
        made = emit(
            torch.ops.rtc.linear_fp8_raw.default,
            found.x, _weight(emit, found.w), val(found.node).dtype,
        )  # fmt: skip
        emit = Emitter(graph, user)
        scale = emit(aten.reshape.default, found.w_scale, [columns])
        gate = arg_by_name(user, "gate")
        if gate is not None:
            if val(gate).dtype != torch.float32:
                gate = emit(aten._to_copy.default, gate, dtype=torch.float32)
            if val(gate).dim() != 1:
                gate = emit(aten.reshape.default, gate, [columns])
            scale = emit(aten.mul.Tensor, gate, scale)
        elif not val(scale).is_contiguous():
            scale = emit(aten.clone.default, scale, memory_format=torch.contiguous_format)
        x_scale = found.x_scale
        if not val(x_scale).is_contiguous():
            x_scale = emit(aten.clone.default, x_scale, memory_format=torch.contiguous_format)
        assert math.prod(val(x_scale).shape) == rows
        names = [a.name for a in _RESIDUAL._schema.arguments]
        args = {name: arg_by_name(user, name) for name in names}
        args.update(delta=made, gate=scale, delta_scale=x_scale)
        new = emit(_RESIDUAL, *args.values())
    user.replace_all_uses_with(new)
    graph.erase_node(user)


PASS = Pass(
    "fp8_linear",
    "exact",
    run,
    "FP8 matrix products by the fastest backend for their shape",
    stage="graph",
    own_kernels=True,
)

del _consumer
