"""FP8 values under slot-local work: what attention can read as it is stored."""

from __future__ import annotations

import torch
from torch import fx

from rtc.passes.analysis.fn import LAYOUT, Fn, Operand, off_slots, permutation

aten = torch.ops.aten

FP8 = torch.float8_e4m3fn
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SAME = (aten.alias.default, aten.detach.default, aten.clone.default)


def reads_fp8(fn: Fn) -> Fn | None:
    """The FP8 values in slot-local work that only widens and scales them per head, or None.

    The plan keeps these instead of the widened copy: what is left of ``fn`` goes into the op.
    """
    f = fn
    while f.dtype != FP8:
        if f.kind != "op" or not f.children or f.dtype not in WIDE:
            return None
        others = [a for a in f.args if isinstance(a, Operand)]
        if f.target in (aten.mul.Tensor, aten.div.Tensor):
            if len(f.children) != 1 or len(others) > 1:
                return None
            if f.target is aten.div.Tensor and not isinstance(f.args[0], Fn):
                return None
            if any(o.role != "const" or (o.shape and o.shape[-1] != 1) for o in others):
                return None
        elif others or not (
            f.target in (*CASTS, *SAME)
            or permutation(f.target, f.args, len(f.shape)) is not None
            or (f.target in LAYOUT and _features(f) == _features(f.children[0]))
        ):
            return None
        f = f.children[0]
    return f


def _features(f: Fn) -> list[int]:
    """Sizes of what is no slot: the same where a reshape makes frames and tokens one axis."""
    return [n for n in off_slots(f.shape, f.dims) if n not in (-1, 1)]


def unfit(attention: fx.Node) -> str | None:
    """Why attention in FP8 cannot stand in for a node, whatever its keys and values are."""
    q, k, v, mask, causal, scale = attention.args[:6]
    if not all(isinstance(x, fx.Node) for x in (q, k, v)):
        return "operands that are no tensors"
    shapes = [tuple(x.meta["val"].shape) for x in (q, k, v)]  # type: ignore[union-attr]
    if mask is not None or causal:
        return "masked or causal attention"
    if any(len(s) != 4 for s in shapes):
        return "queries, keys and values of four axes only"
    (b, h, _, d), (kb, g, s, kd), (vb, vg, vs, _) = shapes
    if (b, d, s) != (kb, kd, vs) or b != vb or g != vg or h % g:
        return f"queries, keys and values of shapes {shapes} do not fit without broadcasting"
    dtype = q.meta["val"].dtype  # type: ignore[union-attr]
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"queries of {dtype}"
    if scale is not None and not (isinstance(scale, (int, float)) and scale > 0):
        return f"a softmax scale of {scale}"
    return None
