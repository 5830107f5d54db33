"""Everything between the QKV projection and attention, in one pass: norm, RoPE, FP8, cache write.

    q, k  = rms_norm(q) * q_weight, rms_norm(k) * k_weight      over D; rounded to their dtype
    k_raw[:, slots], v_raw[:, slots] = k, v                     if given
    q8              = fp8(clamp(rope(q, q_cos, q_sin) * q_inv_scale[h]))
    k8[:, slots]    = fp8(clamp(rope(k, k_cos, k_sin) * k_inv_scale[g]))
    v8[:, slots]    = fp8(clamp(v * v_inv_scale[g]))            clamp: to +-448
    saturated      += values of q, k and v that lay beyond +-448 before the clamp
    turned: k_raw holds rope(k), rounded to k's dtype, and k8 is made of that
    rope(x, cos, sin) = x * cos + rot(x) * sin
        "half":        pairs (i, i + D/2), rot = cat(-high, low)
        "interleaved": pairs (2i, 2i + 1), rot = (-odd, even)
        "none":        rope(x) = x, tables are not read

Shapes: q, q8 [B, T, H, D]; k, v [B, T, G, D]; k8, v8, k_raw, v_raw [B, S, G, D]; weights [D];
tables [T, D]; q_inv_scale [H], k_inv_scale, v_inv_scale [G] (numel is what counts), or all three a
batch too, [B, H] and [B, G]; slots [T]; saturated [1]. D even. eps < 0: no norm (and no weights).
Dtypes: q, k, v bf16, f16 or f32; k_raw as k, v_raw as v; tables and inverse scales f32; q8, k8, v8
float8_e4m3fn; slots, saturated int64.
Arithmetic is f32. slots must lie in [0, S), each once; they stay on the device (the position of a
ring cache), so that one CUDA graph serves every step.

Bytes moved: q, k, v once; q8, k8, v8 [, k_raw, v_raw] once; tables and scales. q, k, v may be views
of one wide linear output: unit stride along D, others free; 16-byte aligned heads load as 16-byte
words. Caches have unit stride along D too; v8 may have another one (D-major storage), where its
bytes are written singly.

Source: written for rtc.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the plain reference runs instead
    triton = tl = None

__all__ = ["Config", "launch", "pre_attention", "reference"]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
ROPES = ("none", "half", "interleaved")
INTERPRET = triton is not None and triton.knobs.runtime.interpret

_jit = triton.jit if triton is not None else lambda f: f


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope: str) -> torch.Tensor:
    if rope == "none":
        return x
    if rope == "half":
        low, high = x.chunk(2, -1)
        rot = torch.cat([-high, low], -1)
    else:
        rot = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
    return x * cos[:, None] + rot * sin[:, None]


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if eps < 0:
        return x
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    q_weight: torch.Tensor | None, k_weight: torch.Tensor | None,
    q_cos: torch.Tensor, q_sin: torch.Tensor, k_cos: torch.Tensor, k_sin: torch.Tensor,
    q_inv_scale: torch.Tensor, k_inv_scale: torch.Tensor, v_inv_scale: torch.Tensor,
    slots: torch.Tensor, k8: torch.Tensor, v8: torch.Tensor,
    k_raw: torch.Tensor | None, v_raw: torch.Tensor | None, saturated: torch.Tensor,
    rope: str, eps: float, turned: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Plain torch: writes the caches and returns q8."""
    q, k = _norm(q, q_weight, eps), _norm(k, k_weight, eps)
    scales = [
        x.view(len(q) if x.numel() != heads else 1, 1, heads, 1)  # a batch, or for all
        for x, heads in (
            (q_inv_scale, q.shape[2]),
            *((x, k.shape[2]) for x in (k_inv_scale, v_inv_scale)),
        )
    ]
    if turned:
        k = _rope(k.float(), k_cos, k_sin, rope).to(k.dtype)
    if k_raw is not None:
        k_raw[:, slots] = k
    if v_raw is not None:
        v_raw[:, slots] = v
    q_rot = _rope(q.float(), q_cos, q_sin, rope) * scales[0]
    k_rot = _rope(k.float(), k_cos, k_sin, "none" if turned else rope) * scales[1]
    v_new = v.float() * scales[2]
    saturated += (q_rot.abs() > FP8_MAX).sum()
    for cache, new in ((k8, k_rot), (v8, v_new)):
        saturated += (new.abs() > FP8_MAX).sum()
        # Bytes: indexed writes of FP8 are not implemented everywhere.
        cache.view(torch.uint8)[:, slots] = new.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
    return q_rot.clamp(-FP8_MAX, FP8_MAX).to(FP8).contiguous()


@_jit
def _load(ptr, h, stride_h, HEADS, D: tl.constexpr, PAIRS: tl.constexpr, MIX: tl.constexpr):
    """The two halves of every head's RoPE pairs, [heads, PAIRS] each; MIX: they are neighbours."""
    ptr += h[:, None] * stride_h
    if MIX:
        d = tl.arange(0, 2 * PAIRS)
        x = tl.load(ptr + d[None, :], mask=(h < HEADS)[:, None] & (d < D)[None, :], other=0.0)
        lo, hi = tl.split(tl.reshape(x, (h.shape[0], PAIRS, 2)))
    else:
        d = tl.arange(0, PAIRS)
        keep = (h < HEADS)[:, None] & (d < D // 2)[None, :]
        lo = tl.load(ptr + d[None, :], mask=keep, other=0.0)
        hi = tl.load(ptr + D // 2 + d[None, :], mask=keep, other=0.0)
    return lo, hi


@_jit
def _store(
    ptr, lo, hi, h, stride_h, stride_d, HEADS, D: tl.constexpr, PAIRS: tl.constexpr,
    MIX: tl.constexpr,
):  # fmt: skip
    ptr += h[:, None] * stride_h
    if MIX:
        d = tl.arange(0, 2 * PAIRS)
        x = tl.reshape(tl.join(lo, hi), (h.shape[0], 2 * PAIRS)).to(ptr.dtype.element_ty)
        tl.store(ptr + d[None, :] * stride_d, x, mask=(h < HEADS)[:, None] & (d < D)[None, :])
    else:
        d = tl.arange(0, PAIRS)
        keep = (h < HEADS)[:, None] & (d < D // 2)[None, :]
        tl.store(ptr + d[None, :] * stride_d, lo.to(ptr.dtype.element_ty), mask=keep)
        ptr += D // 2 * stride_d
        tl.store(ptr + d[None, :] * stride_d, hi.to(ptr.dtype.element_ty), mask=keep)


@_jit
def _pair(ptr, h, D: tl.constexpr, PAIRS: tl.constexpr, MIX: tl.constexpr):
    """A [D] vector as the halves of its pairs, in f32, [1, PAIRS] or [heads, PAIRS] each."""
    if MIX:
        # Loaded once a head, in the layout of x: splitting a single row goes through shared memory.
        d = tl.arange(0, 2 * PAIRS)[None, :] + h[:, None] * 0
        x = tl.load(ptr + d, mask=d < D, other=0.0)
        lo, hi = tl.split(tl.reshape(x, (h.shape[0], PAIRS, 2)))
    else:
        d = tl.arange(0, PAIRS)[None, :]
        lo = tl.load(ptr + d, mask=d < D // 2, other=0.0)
        hi = tl.load(ptr + D // 2 + d, mask=d < D // 2, other=0.0)
    return lo.to(tl.float32), hi.to(tl.float32)


@_jit
def _normed(lo, hi, weight_ptr, h, eps, D: tl.constexpr, PAIRS: tl.constexpr, MIX: tl.constexpr):
    dtype = lo.dtype
    lo, hi = lo.to(tl.float32), hi.to(tl.float32)
    r = tl.rsqrt((tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)) / D + eps)[:, None]
    lo, hi = lo * r, hi * r
    if weight_ptr is not None:
        w_lo, w_hi = _pair(weight_ptr, h, D, PAIRS, MIX)
        lo, hi = lo * w_lo, hi * w_hi
    return lo.to(dtype), hi.to(dtype)


@_jit
def _turned(lo, hi, cos_ptr, sin_ptr, h, D: tl.constexpr, PAIRS: tl.constexpr, MIX: tl.constexpr):
    c_lo, c_hi = _pair(cos_ptr, h, D, PAIRS, MIX)
    s_lo, s_hi = _pair(sin_ptr, h, D, PAIRS, MIX)
    return lo * c_lo - hi * s_lo, hi * c_hi + lo * s_hi


@_jit
def _scaled(
    lo, hi, cos_ptr, sin_ptr, scale_ptr, h, HEADS, D: tl.constexpr, PAIRS: tl.constexpr,
    ROPE: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """Rotated, scaled, clamped; and how many values the clamp changed."""
    lo, hi = lo.to(tl.float32), hi.to(tl.float32)
    if ROPE:
        lo, hi = _turned(lo, hi, cos_ptr, sin_ptr, h, D, PAIRS, MIX)
    scale = tl.load(scale_ptr + h, mask=h < HEADS, other=0.0)[:, None]
    lo, hi = lo * scale, hi * scale
    over = (tl.abs(lo) > 448.0).to(tl.int32) + (tl.abs(hi) > 448.0).to(tl.int32)
    lo = tl.clamp(lo, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    hi = tl.clamp(hi, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return lo, hi, tl.sum(tl.sum(over, 1), 0)


# fmt: off
@_jit
def _kernel(
    q_ptr, k_ptr, v_ptr, q_weight, k_weight, q_cos, q_sin, k_cos, k_sin,
    q_scale, k_scale, v_scale, slots_ptr, q8_ptr, k8_ptr, v8_ptr, k_raw_ptr, v_raw_ptr, saturated,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    k8_b, k8_s, k8_h, v8_b, v8_s, v8_h, v8_d, kr_b, kr_s, kr_h, vr_b, vr_s, vr_h,
    T, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, MIX: tl.constexpr, TURNED: tl.constexpr,
    K_ROPE: tl.constexpr, BATCH: tl.constexpr,
):
    # Programs of one token are neighbours: a few heads of q, then of k, then of v.
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (G + HEADS - 1) // HEADS
    block = tl.program_id(0) % (Q_BLOCKS + 2 * K_BLOCKS)
    token = tl.program_id(0) // (Q_BLOCKS + 2 * K_BLOCKS)
    b = (token // T).to(tl.int64)
    t = (token % T).to(tl.int64)
    if BATCH:  # scales a batch
        q_scale += b * H
        k_scale += b * G
        v_scale += b * G
    if block < Q_BLOCKS:
        h = block * HEADS + tl.arange(0, HEADS)
        lo, hi = _load(q_ptr + b * q_b + t * q_t, h, q_h, H, D, PAIRS, MIX)
        if NORM:
            lo, hi = _normed(lo, hi, q_weight, h, eps, D, PAIRS, MIX)
        lo, hi, over = _scaled(lo, hi, q_cos + t * D, q_sin + t * D, q_scale, h, H, D, PAIRS,
                               ROPE, MIX)
        _store(q8_ptr + (b * T + t) * H * D, lo, hi, h, D, 1, H, D, PAIRS, MIX)
        tl.atomic_add(saturated, over.to(tl.int64), mask=over > 0, sem="relaxed")
    elif block < Q_BLOCKS + K_BLOCKS:
        s = tl.load(slots_ptr + t)
        h = (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
        lo, hi = _load(k_ptr + b * k_b + t * k_t, h, k_h, G, D, PAIRS, MIX)
        if NORM:
            lo, hi = _normed(lo, hi, k_weight, h, eps, D, PAIRS, MIX)
        if TURNED:
            x, y = _turned(lo.to(tl.float32), hi.to(tl.float32), k_cos + t * D, k_sin + t * D, h, D,
                           PAIRS, MIX)
            lo, hi = x.to(lo.dtype), y.to(lo.dtype)
        if k_raw_ptr is not None:
            _store(k_raw_ptr + b * kr_b + s * kr_s, lo, hi, h, kr_h, 1, G, D, PAIRS, MIX)
        lo, hi, over = _scaled(lo, hi, k_cos + t * D, k_sin + t * D, k_scale, h, G, D, PAIRS,
                               K_ROPE, MIX)
        _store(k8_ptr + b * k8_b + s * k8_s, lo, hi, h, k8_h, 1, G, D, PAIRS, MIX)
        tl.atomic_add(saturated, over.to(tl.int64), mask=over > 0, sem="relaxed")
    else:
        s = tl.load(slots_ptr + t)
        h = (block - Q_BLOCKS - K_BLOCKS) * HEADS + tl.arange(0, HEADS)
        lo, hi = _load(v_ptr + b * v_b + t * v_t, h, v_h, G, D, PAIRS, False)
        if v_raw_ptr is not None:
            _store(v_raw_ptr + b * vr_b + s * vr_s, lo, hi, h, vr_h, 1, G, D, PAIRS, False)
        lo, hi, over = _scaled(lo, hi, k_cos, k_sin, v_scale, h, G, D, PAIRS, False, False)
        _store(v8_ptr + b * v8_b + s * v8_s, lo, hi, h, v8_h, v8_d, G, D, PAIRS, False)
        tl.atomic_add(saturated, over.to(tl.int64), mask=over > 0, sem="relaxed")
# fmt: on


@dataclass(frozen=True)
class Config:
    """Heads of one token that a program takes, and its warps."""

    heads: int
    warps: int

    def __post_init__(self) -> None:
        for name, value, top in (("heads", self.heads, 128), ("warps", self.warps, 32)):
            if not 1 <= value <= top or value & (value - 1):
                raise ValueError(f"{name} must be a power of two up to {top}, not {value}")


# (compute capability, B * T, H, G, D) -> Config; swept by bench/bench_pointwise.py.
TUNED: dict[tuple[tuple[int, int], int, int, int, int], Config] = {
    ((9, 0), 757, 60, 60, 128): Config(16, 4),  # 23.9 us with raw caches; 64 heads: 27.4
}


def default_config(H: int, G: int, D: int) -> Config:
    """A token's heads, at most 64, 32 values a thread: tables and weights are read once for all."""
    heads = min(triton.next_power_of_2(max(H, G)), 64)
    warps = heads * triton.next_power_of_2(D) // (32 * 32)
    return Config(heads, min(max(warps, 1), 8))


def launch(
    args: tuple[Any, ...], q8: torch.Tensor, config: Config | None = None, turned: bool = False
) -> None:
    """Run the kernel into q8 [B, T, H, D], contiguous, and the caches; args as pre_attention's."""
    q, k, v, *tables, slots, k8, v8, k_raw, v_raw, saturated, rope, eps = args
    B, T, H, D = q.shape
    G = k.shape[2]
    if q.numel() + k.numel() == 0:
        return
    if config is None:
        arch = torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)
        config = TUNED.get((arch, B * T, H, G, D)) or default_config(H, G, D)
    # Triton's interpreter truncates in casts to FP8; there the kernel writes f32 and torch rounds.
    out = [x.float() if INTERPRET else x for x in (q8, k8, v8)]
    heads = min(config.heads, triton.next_power_of_2(max(H, G)))
    strides = [x.stride()[:3] for x in (q, k, v, out[1])]
    strides += [
        out[2].stride(),
        *((0, 0, 0) if x is None else x.stride()[:3] for x in (k_raw, v_raw)),
    ]
    with torch.cuda.device_of(q):
        _kernel[(B * T * (triton.cdiv(H, heads) + 2 * triton.cdiv(G, heads)),)](
            *(q, k, v, *tables, slots),
            *out,
            *(k_raw, v_raw, saturated),
            *(n for stride in strides for n in stride),
            T,
            eps,
            H=H,
            G=G,
            D=D,
            PAIRS=triton.next_power_of_2(D // 2),
            HEADS=heads,
            NORM=eps >= 0,
            ROPE=rope != "none",
            MIX=rope == "interleaved",
            TURNED=turned and rope != "none",
            K_ROPE=rope != "none" and not turned,
            BATCH=tables[6].numel() != H,
            num_warps=config.warps,
        )
    if INTERPRET:
        for x, y in zip((q8, k8, v8), out, strict=True):
            x.copy_(y)


def _has_kernel(x: torch.Tensor) -> bool:
    if triton is None or not x.is_cuda:
        return INTERPRET
    # FP8 conversions need compute capability 8.9.
    return INTERPRET or torch.cuda.get_device_capability(x.device) >= (8, 9)


def _check(q, k, v, *args):
    weights, tables, scales = args[:2], args[2:6], args[6:9]
    slots, k8, v8, k_raw, v_raw, saturated, rope, eps = args[9:17]
    if q.dim() != 4 or k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ValueError(f"q {_show(q)} and k {_show(k)} must be [B, T, H, D] and [B, T, G, D]")
    B, T, H, D = q.shape
    G = k.shape[2]
    if rope not in ROPES:
        raise ValueError(f"rope must be one of {ROPES}, not {rope!r}")
    if D % 2:
        raise ValueError(f"D must be even, not {D}")
    if eps < 0 and any(w is not None for w in weights):
        raise ValueError(f"eps = {eps} means no norm: there can be no weights")
    caches = {"k8": k8, "v8": v8, "k_raw": k_raw, "v_raw": v_raw}
    for name, x in {"q": q, "k": k, "v": v, **caches}.items():
        if x is not None and name != "v8" and x.stride(3) != 1:
            raise ValueError(f"{name} must have unit stride along D, not {_show(x)}")
    for name, x in caches.items():
        want = {"k8": FP8, "v8": FP8, "k_raw": k.dtype, "v_raw": v.dtype}[name]
        if x is None:
            continue
        if x.dtype != want or (x.shape[0], *x.shape[2:]) != (B, G, D) or x.dim() != 4:
            raise ValueError(f"{name} must be {want} [{B}, S, {G}, {D}], not {x.dtype} {_show(x)}")
    if v.shape != k.shape:
        raise ValueError(f"v {_show(v)} must be as k {_show(k)}")
    vectors: list[tuple[Any, int, Any]] = [(w, D, None) for w in weights if w is not None]
    each = B if scales[0].numel() != H else 1  # scales a batch
    vectors += [(x, each * n, torch.float32) for x, n in zip(scales, (H, G, G), strict=True)]
    vectors += [(x, T * D, torch.float32) for x in tables if rope != "none"]
    vectors += [(slots, T, torch.int64), (saturated, 1, torch.int64)]
    for x, n, dtype in vectors:
        if x.numel() != n or not x.is_contiguous() or (dtype is not None and x.dtype != dtype):
            raise ValueError(f"expected {dtype or 'a weight'}, {n} values, contiguous: {_show(x)}")


def _show(t: torch.Tensor) -> str:
    return f"{tuple(t.shape)} with strides {t.stride()}"


@torch.library.custom_op(
    "rtc::pre_attention", mutates_args=("k8", "v8", "k_raw", "v_raw", "saturated")
)
def pre_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    q_weight: torch.Tensor | None, k_weight: torch.Tensor | None,
    q_cos: torch.Tensor, q_sin: torch.Tensor, k_cos: torch.Tensor, k_sin: torch.Tensor,
    q_inv_scale: torch.Tensor, k_inv_scale: torch.Tensor, v_inv_scale: torch.Tensor,
    slots: torch.Tensor, k8: torch.Tensor, v8: torch.Tensor,
    k_raw: torch.Tensor | None, v_raw: torch.Tensor | None, saturated: torch.Tensor,
    rope: str, eps: float, turned: bool = False,
) -> torch.Tensor:  # fmt: skip
    """q8, and the caches and the count written in place; see the head of this file."""
    args = (q, k, v, q_weight, k_weight, q_cos, q_sin, k_cos, k_sin, q_inv_scale, k_inv_scale,
            v_inv_scale, slots, k8, v8, k_raw, v_raw, saturated, rope, eps)  # fmt: skip
    _check(*args)
    if not _has_kernel(q):
        return reference(*args, turned)
    q8 = q.new_empty(q.shape, dtype=FP8)
    launch(args, q8, turned=turned)
    return q8


@pre_attention.register_fake
def _(q, *args):
    _check(q, *args)
    return q.new_empty(q.shape, dtype=FP8)
