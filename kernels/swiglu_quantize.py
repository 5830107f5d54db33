"""Concatenate, SwiGLU, quantize rows to FP8: the input of a parallel block's second linear layer.

    row = cat([*parts, silu(act) * up], -1)                            (rtc::swiglu_quantize)
    row = cat(parts, -1)                                               (rtc::quantize_rows)
    s   = max(max_c |row|, floor) / 448
    q   = fp8(clamp(row / s, +-448))                                   real = q * s

Shapes: parts[i] [M, E_i], at most two; act, up [M, F]; q [M, sum(E_i) + F], s [M, 1]. `amax` [M, 1]
f32 is the largest magnitude of a row's last columns, silu(act) * up or the last part, where an
earlier kernel (a GEMM's epilogue) knows it. Dtypes: bf16, f16 or f32, each its own; q float8_e4m3fn
and s f32, both contiguous. Arithmetic is f32: the product is not rounded before it is quantized.

Bytes moved: every input and q, each once. Rows may be strided (column slices of one wide linear
output), columns have unit stride; rows that start at multiples of 16 bytes load as 16-byte words.
A row is held in registers, one program a row at a time: up to 32768 columns a segment on 16 warps
(80 values a thread at E = 7680, F = 30720). With stages = 2 a program takes several rows, and the
next row is on its way to shared memory while this one is reduced.

Source: written for rtc.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # the plain reference runs instead
    triton = tl = None

__all__ = ["Config", "launch", "quantize_rows", "reference", "swiglu_quantize"]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INTERPRET = triton is not None and triton.knobs.runtime.interpret

_jit = triton.jit if triton is not None else lambda f: f


def reference(
    parts: list[torch.Tensor],
    act: torch.Tensor | None,
    up: torch.Tensor | None,
    amax: torch.Tensor | None,
    floor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch: (q, s), the product rounded as eager rounds it."""
    last = [] if act is None or up is None else [F.silu(act) * up]
    segments = [t.float() for t in [*parts, *last]]
    row = torch.cat(segments, -1)
    if amax is not None:
        found = [t.abs().amax(-1, keepdim=True) for t in segments[:-1] if t.shape[1]]
        top = torch.stack([amax.view(-1, 1).float(), *found]).amax(0)
    else:
        top = row.abs().amax(-1, keepdim=True)
    s = top.clamp(min=floor) / FP8_MAX
    return (row / s).clamp(-FP8_MAX, FP8_MAX).to(FP8), s


@_jit
def _silu_mul(a, u, ASM: tl.constexpr):
    """silu(a) * u in f32. ASM: exp and 1/x without the scaling for subnormals, half the work."""
    a = a.to(tl.float32)
    if ASM:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [a * -1.4426950408889634], tl.float32, True, 1
        )
        g = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], tl.float32, True, 1
        )
    else:
        g = 1.0 / (1.0 + tl.exp(-a))
    return a * g * u.to(tl.float32)


@_jit
def _put(q_ptr, y, inv, keep):
    y = tl.clamp(y * inv, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(q_ptr, y.to(q_ptr.dtype.element_ty), mask=keep)


@_jit
def _row(
    r,
    a_ptr,  # first part, or None
    b_ptr,  # second part, or None
    act_ptr,  # or None, with up_ptr
    up_ptr,
    amax_ptr,
    q_ptr,
    s_ptr,
    a_stride,
    b_stride,
    act_stride,
    up_stride,
    floor,
    A: tl.constexpr,
    B: tl.constexpr,
    F: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_F: tl.constexpr,
    ASM: tl.constexpr,
):
    row = r.to(tl.int64)
    a_c = tl.arange(0, BLOCK_A)
    b_c = tl.arange(0, BLOCK_B)
    f_c = tl.arange(0, BLOCK_F)
    out = q_ptr + row * (A + B + F)
    top = floor
    if amax_ptr is not None:
        top = tl.maximum(top, tl.load(amax_ptr + row))
    # All loads stand before the first reduction, so that all are in flight at once.
    if act_ptr is not None:
        act = tl.load(act_ptr + row * act_stride + f_c, mask=f_c < F, other=0.0)
        up = tl.load(up_ptr + row * up_stride + f_c, mask=f_c < F, other=0.0)
    if a_ptr is not None:
        a = tl.load(a_ptr + row * a_stride + a_c, mask=a_c < A, other=0.0).to(tl.float32)
    if b_ptr is not None:
        b = tl.load(b_ptr + row * b_stride + b_c, mask=b_c < B, other=0.0).to(tl.float32)
    if a_ptr is not None and (amax_ptr is None or b_ptr is not None or act_ptr is not None):
        top = tl.maximum(top, tl.max(tl.abs(a), 0))
    if b_ptr is not None and (amax_ptr is None or act_ptr is not None):
        top = tl.maximum(top, tl.max(tl.abs(b), 0))
    if act_ptr is not None:
        y = _silu_mul(act, up, ASM)
        if amax_ptr is None:
            top = tl.maximum(top, tl.max(tl.abs(y), 0))
    s = top / 448.0
    tl.store(s_ptr + row, s)
    inv = 1.0 / s
    if a_ptr is not None:
        _put(out + a_c, a, inv, a_c < A)
    if b_ptr is not None:
        _put(out + A + b_c, b, inv, b_c < B)
    if act_ptr is not None:
        _put(out + A + B + f_c, y, inv, f_c < F)


# fmt: off
@_jit
def _kernel(
    a_ptr, b_ptr, act_ptr, up_ptr, amax_ptr, q_ptr, s_ptr,
    a_stride, b_stride, act_stride, up_stride, M, floor,
    A: tl.constexpr, B: tl.constexpr, F: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr, LOOP: tl.constexpr, ASM: tl.constexpr,
):
    if LOOP:
        for r in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
            _row(r, a_ptr, b_ptr, act_ptr, up_ptr, amax_ptr, q_ptr, s_ptr,
                 a_stride, b_stride, act_stride, up_stride, floor,
                 A, B, F, BLOCK_A, BLOCK_B, BLOCK_F, ASM)
    else:
        _row(tl.program_id(0), a_ptr, b_ptr, act_ptr, up_ptr, amax_ptr, q_ptr, s_ptr,
             a_stride, b_stride, act_stride, up_stride, floor,
             A, B, F, BLOCK_A, BLOCK_B, BLOCK_F, ASM)
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


# (compute capability, M, E of the parts, F or 0) -> Config; swept by bench/bench_pointwise.py.
TUNED: dict[tuple[tuple[int, int], int, tuple[int, ...], int], Config] = {}


def default_config(widths: list[int]) -> Config:
    """About 64 values a thread in the widest segment, no row ahead: that is slower on an H200, in a
    burst (54.6 us, not 44.8, at E, F = 7680, 30720) and at the power limit (23.1, not 22.7, at
    half of them)."""
    warps = min(max(triton.next_power_of_2(max(widths)) // 2048, 1), 16)
    return Config(warps)


def launch(
    parts: list[torch.Tensor],
    act: torch.Tensor | None,
    up: torch.Tensor | None,
    amax: torch.Tensor | None,
    floor: float,
    out: tuple[torch.Tensor, torch.Tensor],
    config: Config | None = None,
) -> None:
    """Run the kernel into out = (q, s), contiguous."""
    q, s = out
    M = q.shape[0]
    if M == 0:
        return
    parts = [p for p in parts if p.shape[1]] or parts[:1]
    a, b = (*parts, None, None)[:2]
    A, B, width = (0 if t is None else t.shape[1] for t in (a, b, act))
    blocks = [triton.next_power_of_2(max(n, 1)) for n in (A, B, width)]
    if config is None:
        arch = torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)
        config = TUNED.get((arch, M, tuple(p.shape[1] for p in parts), width))
    if config is None:
        config = default_config([A, B, width])
    programs = M
    if config.per_sm and not INTERPRET:  # no tl.range there
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        programs = min(M, config.per_sm * sms)
    # Triton's interpreter truncates in casts to FP8; there the kernel writes f32 and torch rounds.
    q_out = torch.empty_like(q, dtype=torch.float32) if INTERPRET else q
    with torch.cuda.device_of(q):
        _kernel[(programs,)](
            a,
            b,
            act,
            up,
            amax,
            q_out,
            s,
            *(0 if t is None else t.stride(0) for t in (a, b, act, up)),
            M,
            floor,
            A=A,
            B=B,
            F=width,
            BLOCK_A=blocks[0],
            BLOCK_B=blocks[1],
            BLOCK_F=blocks[2],
            STAGES=config.stages,
            LOOP=programs < M,
            ASM=not INTERPRET and torch.version.hip is None,
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
    parts: list[torch.Tensor],
    act: torch.Tensor | None,
    up: torch.Tensor | None,
    amax: torch.Tensor | None,
    floor: float,
) -> None:
    if len(parts) > 2 or (not parts and act is None):
        raise ValueError(f"parts must be at most two tensors, and one without act: {len(parts)}")
    named = {f"parts[{i}]": p for i, p in enumerate(parts)}
    if act is not None and up is not None:
        named |= {"act": act, "up": up}
        if act.shape != up.shape:
            raise ValueError(f"act {_show(act)} and up {_show(up)} must have one shape")
    rows = next(iter(named.values())).shape[0]
    for name, t in named.items():
        if t.dim() != 2 or t.shape[0] != rows or (t.stride(1) != 1 and t.shape[1] > 1):
            raise ValueError(f"{name} must be [{rows}, n] with unit column stride, not {_show(t)}")
    if amax is not None and (
        amax.numel() != rows or amax.dtype != torch.float32 or not amax.is_contiguous()
    ):
        raise ValueError(f"amax must be contiguous f32 [{rows}, 1], not {amax.dtype} {_show(amax)}")
    if not floor > 0:
        raise ValueError(f"floor must be above 0 (a row of zeros has no scale), not {floor}")


def _show(t: torch.Tensor) -> str:
    return f"{tuple(t.shape)} with strides {t.stride()}"


def _empty(parts: list[torch.Tensor], act: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    all_parts = parts if act is None else [*parts, act]
    like, M = all_parts[0], all_parts[0].shape[0]
    q = like.new_empty((M, sum(t.shape[1] for t in all_parts)), dtype=FP8)
    return q, like.new_empty((M, 1), dtype=torch.float32)


def _run(
    parts: list[torch.Tensor],
    act: torch.Tensor | None,
    up: torch.Tensor | None,
    amax: torch.Tensor | None,
    floor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(parts, act, up, amax, floor)
    q, s = _empty(parts, act)
    if not _has_kernel(q):
        return reference(parts, act, up, amax, floor)
    launch(parts, act, up, amax, floor, (q, s))
    return q, s


@torch.library.custom_op("rtc::swiglu_quantize", mutates_args=())
def swiglu_quantize(
    parts: list[torch.Tensor],
    act: torch.Tensor,
    up: torch.Tensor,
    amax: torch.Tensor | None,
    floor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, s) of cat([*parts, silu(act) * up], -1); amax, if known, is that of silu(act) * up."""
    return _run(parts, act, up, amax, floor)


@torch.library.custom_op("rtc::quantize_rows", mutates_args=())
def quantize_rows(
    parts: list[torch.Tensor], amax: torch.Tensor | None, floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, s) of cat(parts, -1), one or two parts; amax, if known, is that of the last part."""
    return _run(parts, None, None, amax, floor)


@swiglu_quantize.register_fake
def _(parts, act, up, amax, floor):
    _check(parts, act, up, amax, floor)
    return _empty(parts, act)


@quantize_rows.register_fake
def _(parts, amax, floor):
    _check(parts, None, None, amax, floor)
    return _empty(parts, None)
