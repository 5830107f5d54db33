"""Norm, modulate, quantize rows to FP8, with the gated residual of the block before in front.

    x_new = x + gate * (delta * delta_scale)                    (rtc::residual_modulate_quantize)
    y     = norm(x_new) [* weight + bias] * scale + shift       norm: "layer" or "rms"
    s     = max(max_c |y|, floor) / 448
    q     = fp8(clamp(y / s, +-448))                            real = q * s

Shapes: x, delta, x_new, q [M, C]; gate, weight, bias, scale, shift [C] (or [1, C]); s [M, 1];
delta_scale [M, 1] f32 or None (1): with it and a gate that holds the weight's scales, delta is an
FP8 product without scales (rtc::linear_fp8_raw). The scale vector is used as it is: pass
`1 + scale` where a model means that. Dtypes: x, delta and the vectors bf16, f16 or f32, each its
own; x_new as x; q float8_e4m3fn; s f32. Arithmetic is f32; x_new is rounded to x's dtype once, and
the norm is of the rounded row, as eager PyTorch's is.

Bytes moved: x [+ delta + x_new] + q, each once, and the vectors. Rows may be strided, columns have
unit stride; 16-byte aligned rows load as 16-byte words. A row is kept in registers, one program a
row at a time; up to C = 16384 is sensible. A program that takes several rows (Config.per_sm) reads
the vectors once. NaN in a row stays NaN in q.

Source: written for rtc.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the plain reference runs instead
    triton = tl = None

__all__ = ["Config", "launch", "modulate_quantize", "reference", "residual_modulate_quantize"]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
NORMS = ("layer", "rms")
INTERPRET = triton is not None and triton.knobs.runtime.interpret

_jit = triton.jit if triton is not None else lambda f: f


def reference(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    norm: str,
    eps: float,
    floor: float,
    delta_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plain torch: (x_new, q, s); x_new is x itself without a delta."""
    if delta is not None:
        step = delta.float() if delta_scale is None else delta.float() * delta_scale
        step = step if gate is None else step * gate.float()
        x = (x.float() + step).to(x.dtype)
    y = x.float()
    if norm == "layer":
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    y = y * scale.float() + shift.float()
    s = y.abs().amax(-1, keepdim=True).clamp(min=floor) / FP8_MAX
    return x, (y / s).clamp(-FP8_MAX, FP8_MAX).to(FP8), s


@_jit
def _load(ptr, c, C: tl.constexpr):
    """Of a missing vector, zeros that nothing reads."""
    if ptr is not None:
        v = tl.load(ptr + c, mask=c < C, other=0.0)
    else:
        v = tl.zeros(c.shape, tl.float32)
    return v


@_jit
def _vector(v, c, C: tl.constexpr, LOADED: tl.constexpr):
    if LOADED:
        out = v.to(tl.float32)
    else:
        out = tl.load(v + c, mask=c < C, other=0.0).to(tl.float32)
    return out


# fmt: off
@_jit
def _row(
    r, x_ptr, delta_ptr, delta_scale_ptr, new_ptr, q_ptr, s_ptr, x_stride, delta_stride,
    gate, weight, bias, scale, shift, eps, floor,
    C: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr,
    GATE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, LOADED: tl.constexpr,
):
    # LOADED: the vectors are values. As pointers they are read where they are used: 66 registers
    # of a thread instead of 98 at C = 7680, so a third program on an SM.
    row = r.to(tl.int64)
    c = tl.arange(0, BLOCK)
    keep = c < C
    x = tl.load(x_ptr + row * x_stride + c, mask=keep, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * delta_stride + c, mask=keep, other=0.0).to(tl.float32)
        if delta_scale_ptr is not None:
            delta *= tl.load(delta_scale_ptr + row)
        if GATE:
            delta *= _vector(gate, c, C, LOADED)
        x = (x.to(tl.float32) + delta).to(x_ptr.dtype.element_ty)
        tl.store(new_ptr + row * C + c, x, mask=keep)
    y = x.to(tl.float32)
    if LAYER:
        y = tl.where(keep, y - tl.sum(y, 0) / C, 0.0)
    y *= tl.rsqrt(tl.sum(y * y, 0) / C + eps)
    if WEIGHT:
        y *= _vector(weight, c, C, LOADED)
    if BIAS:
        y += _vector(bias, c, C, LOADED)
    y = y * _vector(scale, c, C, LOADED) + _vector(shift, c, C, LOADED)

    s = tl.maximum(tl.max(tl.abs(y), 0), floor) / 448.0
    tl.store(s_ptr + row, s)
    y = tl.clamp(y * (1.0 / s), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(q_ptr + row * C + c, y.to(q_ptr.dtype.element_ty), mask=keep)


@_jit
def _kernel(
    x_ptr, delta_ptr, gate_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, delta_scale_ptr,
    new_ptr, q_ptr, s_ptr, x_stride, delta_stride, M, eps, floor,
    C: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr,
    STAGES: tl.constexpr, LOOP: tl.constexpr,
):
    GATE: tl.constexpr = gate_ptr is not None
    WEIGHT: tl.constexpr = weight_ptr is not None
    BIAS: tl.constexpr = bias_ptr is not None
    if LOOP:
        c = tl.arange(0, BLOCK)
        gate = _load(gate_ptr, c, C)
        weight = _load(weight_ptr, c, C)
        bias = _load(bias_ptr, c, C)
        scale = _load(scale_ptr, c, C)
        shift = _load(shift_ptr, c, C)
        for r in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
            _row(r, x_ptr, delta_ptr, delta_scale_ptr, new_ptr, q_ptr, s_ptr,
                 x_stride, delta_stride, gate, weight, bias, scale, shift, eps, floor,
                 C, BLOCK, LAYER, GATE, WEIGHT, BIAS, True)
    else:
        _row(tl.program_id(0), x_ptr, delta_ptr, delta_scale_ptr, new_ptr, q_ptr, s_ptr,
             x_stride, delta_stride, gate_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
             eps, floor, C, BLOCK, LAYER, GATE, WEIGHT, BIAS, False)
# fmt: on


@dataclass(frozen=True)
class Config:
    """Warps of a program; 2 stages load a row ahead; programs an SM, 0 for one program a row."""

    warps: int
    stages: int = 1
    per_sm: int = 0

    def __post_init__(self) -> None:
        if self.warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"warps must be a power of two up to 32, not {self.warps}")
        if self.stages not in (1, 2, 3) or self.per_sm < 0:
            raise ValueError(f"stages must be 1 to 3 and per_sm not negative: {self}")

    @property
    def registers(self) -> int | None:
        """What a thread may use for `per_sm` programs to run at a time; None for no limit."""
        limit = 65536 // (32 * self.warps * self.per_sm) if self.per_sm else 255
        return limit // 8 * 8 if limit < 255 else None


# (compute capability, M, C, with a residual) -> Config; swept by bench/bench_pointwise.py --sweep.
TUNED: dict[tuple[tuple[int, int], int, int, bool], Config] = {}


def default_config(C: int) -> Config:
    """32 values a thread: 8 warps at C = 7680."""
    warps = triton.next_power_of_2(max(C, 1)) // (32 * 32)
    return Config(min(max(warps, 1), 16))


def launch(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    norm: str,
    eps: float,
    floor: float,
    out: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor],
    config: Config | None = None,
    delta_scale: torch.Tensor | None = None,
) -> None:
    """Run the kernel into out = (x_new or None, q, s), contiguous."""
    M, C = x.shape
    x_new, q, s = out
    if x.numel() == 0:
        return
    if config is None:
        arch = torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
        config = TUNED.get((arch, M, C, delta is not None)) or default_config(C)
    # Triton's interpreter truncates in casts to FP8; there the kernel writes f32 and torch rounds.
    q_out = torch.empty_like(q, dtype=torch.float32) if INTERPRET else q
    programs = M
    if config.per_sm and not INTERPRET:  # no tl.range there
        sms = torch.cuda.get_device_properties(x.device).multi_processor_count
        programs = min(M, config.per_sm * sms)
    with torch.cuda.device_of(x):
        _kernel[(programs,)](
            x,
            delta,
            gate,
            weight,
            bias,
            scale,
            shift,
            delta_scale,
            x_new,
            q_out,
            s,
            x.stride(0),
            0 if delta is None else delta.stride(0),
            M,
            eps,
            floor,
            C=C,
            BLOCK=triton.next_power_of_2(C),
            LAYER=norm == "layer",
            STAGES=config.stages,
            LOOP=programs < M,
            num_warps=config.warps,
            maxnreg=config.registers,
        )
    if INTERPRET:
        q.copy_(q_out)


def _has_kernel(x: torch.Tensor) -> bool:
    if triton is None or not x.is_cuda:
        return INTERPRET
    # FP8 conversions need compute capability 8.9.
    return INTERPRET or torch.cuda.get_device_capability(x.device) >= (8, 9)


def _check(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    vectors: dict[str, torch.Tensor | None],
    norm: str,
    floor: float,
    delta_scale: torch.Tensor | None = None,
) -> None:
    if x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError(f"x must be [M, C] with unit column stride, not {_show(x)}")
    if delta is not None and (delta.shape != x.shape or delta.stride() != x.stride()):
        columns = x.shape[1] <= 1 or (delta.dim() == 2 and delta.stride(1) == 1)
        if delta.shape != x.shape or not columns:
            raise ValueError(f"delta must be as x {_show(x)}, with unit column stride")
    if delta_scale is not None:
        one_each = delta_scale.numel() == x.shape[0] and delta_scale.is_contiguous()
        if delta_scale.dtype != torch.float32 or not one_each:
            raise ValueError(
                f"delta_scale must be contiguous f32 [{x.shape[0]}, 1], not {delta_scale.dtype} "
                f"{_show(delta_scale)}"
            )
    for name, v in vectors.items():
        if v is not None and (v.numel() != x.shape[1] or not v.is_contiguous()):
            raise ValueError(f"{name} must be contiguous [{x.shape[1]}], not {_show(v)}")
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {NORMS}, not {norm!r}")
    if not floor > 0:
        raise ValueError(f"floor must be above 0 (a row of zeros has no scale), not {floor}")


def _show(t: torch.Tensor) -> str:
    return f"{tuple(t.shape)} with strides {t.stride()}"


@torch.library.custom_op("rtc::modulate_quantize", mutates_args=())
def modulate_quantize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    norm: str,
    eps: float,
    floor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, s) of y = norm(x) [* weight + bias] * scale + shift."""
    vectors = {"weight": weight, "bias": bias, "scale": scale, "shift": shift}
    _check(x, None, vectors, norm, floor)
    if not _has_kernel(x):
        _, q, s = reference(x, None, None, weight, bias, scale, shift, norm, eps, floor)
        return q.contiguous(), s
    q, s = _empty(x)
    launch(x, None, None, weight, bias, scale, shift, norm, eps, floor, (None, q, s))
    return q, s


@torch.library.custom_op("rtc::residual_modulate_quantize", mutates_args=())
def residual_modulate_quantize(
    x: torch.Tensor,
    delta: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    norm: str,
    eps: float,
    floor: float,
    delta_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x_new = x + gate * (delta * delta_scale), and (q, s) as `modulate_quantize` of x_new."""
    vectors = {"gate": gate, "weight": weight, "bias": bias, "scale": scale, "shift": shift}
    _check(x, delta, vectors, norm, floor, delta_scale)
    given = (x, delta, gate, weight, bias, scale, shift, norm, eps, floor)
    if not _has_kernel(x):
        x_new, q, s = reference(*given, delta_scale)
        return x_new.contiguous(), q.contiguous(), s
    x_new = x.new_empty(x.shape)
    q, s = _empty(x)
    launch(*given, (x_new, q, s), delta_scale=delta_scale)
    return x_new, q, s


def _empty(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty((x.shape[0], 1), dtype=torch.float32)


@modulate_quantize.register_fake
def _(x, weight, bias, scale, shift, norm, eps, floor):
    vectors = {"weight": weight, "bias": bias, "scale": scale, "shift": shift}
    _check(x, None, vectors, norm, floor)
    return _empty(x)


@residual_modulate_quantize.register_fake
def _(x, delta, gate, weight, bias, scale, shift, norm, eps, floor, delta_scale=None):
    vectors = {"gate": gate, "weight": weight, "bias": bias, "scale": scale, "shift": shift}
    _check(x, delta, vectors, norm, floor, delta_scale)
    return x.new_empty(x.shape), *_empty(x)
