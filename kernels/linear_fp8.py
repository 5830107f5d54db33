"""``rtc::linear_fp8``, ``linear_fp8_residual``, ``linear_fp8_raw``: FP8 linear layers.

    y[m, n]   = x_scale[m] * w_scale[n] * sum_k x[m, k] * w[n, k]  (+ bias[n])
    out[m, n] = residual[m, n] + gate[n] * y[m, n]                 (linear_fp8_residual)
    raw[m, n] = sum_k x[m, k] * w[n, k]                            (linear_fp8_raw)

Shapes: x [M, K] and w [N, K], both float8_e4m3fn and row-major, rows a multiple of 16 bytes apart
(``torch._scaled_mm(x, w.t(), ...)`` takes the same); x_scale [M, 1] (a row each) or one element,
w_scale [N] or [1, N] (likewise) or one element, both float32 descales: real = fp8 * scale; bias and
gate [N], any float dtype; y [M, N] contiguous, float32, bfloat16 or float16; residual [M, N], out
like it. y is float32 until the last rounding, inside ``linear_fp8_residual`` too.
``raw``'s scales are left to the kernel that reads it: cuBLAS takes 299 us without row scales and
339 with at M, N, K = 757, 7680, 38400. Up to 448^2 K, bfloat16 or float32 only: float16 ends at
65504. ``pays_raw`` says for which shapes the table has it faster.
Bytes: M K + N K + M N * itemsize; at M = 757 the arithmetic takes longer (650 MB of weights: 135 us
of 740).

Backends, looked up in ``TABLE`` by (architecture, M, N, K, kind of scale), never by the caller:
"cublas" (torch._scaled_mm), "triton" (linear_fp8_triton.py), "reference" (torch in float32, any
device); of ``linear_fp8_residual``: "triton" or "composed" (linear_fp8, then torch).
Launches depend on shapes alone and nothing synchronizes: CUDA graphs may capture every backend.

Source: own. cuBLAS through torch is the baseline and the fallback.
"""

from __future__ import annotations

import torch

from rtc.kernels.linear_fp8_triton import (
    NARROW,
    SMALL,
    WIDE,
    Config,
    launch,
    rows_aligned,
    triton_fits,
)

__all__ = [
    "TABLE",
    "Config",
    "linear_fp8",
    "linear_fp8_raw",
    "linear_fp8_residual",
    "pays_raw",
    "reference",
    "run",
    "run_residual",
]

FP8 = torch.float8_e4m3fn
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# (major compute capability, M, N, K, a scale for each row) -> backend, Config; medians on one H200.
TABLE: dict[tuple[int, int, int, int, bool], tuple[str, Config]] = {
    # What runs for seconds runs at the power limit: 395 us of cuBLAS there, 408 of Triton, which
    # is the faster one in a burst (352; cuBLAS 369). The same below: 189 and 198; 185 and 167.
    (9, 757, 42240, 7680, True): ("cublas", WIDE),
    (9, 757, 42240, 7680, False): ("cublas", WIDE),  # 396 us sustained
    (9, 757, 7680, 19200, True): ("cublas", NARROW),
    (9, 757, 7680, 19200, False): ("cublas", NARROW),  # 151 us
    (9, 757, 7680, 12800, True): ("triton", NARROW),  # 118 us, cuBLAS 128
    (9, 757, 7680, 12800, False): ("cublas", NARROW),  # 106 us
    (9, 757, 7680, 38400, False): ("cublas", NARROW),  # 331 us
    (9, 757, 84480, 7680, True): ("cublas", NARROW),  # 711 us, Triton's best of ten 744
    (9, 757, 7680, 38400, True): ("cublas", NARROW),  # 339 us, Triton's best of ten 335
}

# (major compute capability, M, N, K) -> whether linear_fp8_raw and scales elsewhere is faster.
RAW_PAYS: dict[tuple[int, int, int, int], bool] = {
    (9, 757, 7680, 38400): True,  # cuBLAS 299 us without row scales, 339 with
    (9, 757, 7680, 19200): True,  # 151 us; the best with row scales 167
    (9, 757, 7680, 12800): True,  # 106 us; 118
    (9, 757, 84480, 7680): False,  # 740 and 711: noise
}

# The same of linear_fp8_residual, "triton" or "composed"; to be filled by bench/bench_linear.py.
RESIDUAL_TABLE: dict[tuple[int, int, int, int, bool], tuple[str, Config]] = {}


def reference(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The formula in plain torch, computed in ``dtype`` (float64 for tests)."""
    y = x.to(dtype) @ w.to(dtype).T
    y = y * _rows(x_scale).to(dtype) * _columns(w_scale).to(dtype)
    return y if bias is None else y + bias.to(dtype)


def _cublas(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    if x_scale.numel() > 1 or w_scale.numel() > 1:  # it takes both of a row each, or neither
        x_scale = _rows(x_scale).expand(x.shape[0], 1).contiguous()
        w_scale = _columns(w_scale).expand(1, w.shape[0]).contiguous()
    else:
        x_scale, w_scale = x_scale.reshape(()), w_scale.reshape(())
    return torch._scaled_mm(x, w.t(), x_scale, w_scale, bias, None, dtype, use_fast_accum=True)


def cublas_fits(
    x: torch.Tensor,
    w: torch.Tensor,
    row_wise: bool,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> bool:
    return (
        rows_aligned(x)
        and rows_aligned(w)
        and x.shape[1] % 16 == 0
        and w.shape[0] % 16 == 0
        and (bias is None or (bias.dtype == dtype and dtype != torch.float32))
        and (dtype == torch.bfloat16 or not row_wise)
    )


def _choose(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[str, Config]:
    """The backend, and the kernel's configuration in case it is the Triton one."""
    major = torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0
    if major < 9:
        return "reference", WIDE
    (m, k), n = x.shape, w.shape[0]
    row_wise = x_scale.numel() > 1 or w_scale.numel() > 1
    hit = TABLE.get((major, m, n, k, row_wise))
    if hit is None:
        # Where nothing was measured, the vendor's kernel is the safer guess.
        hit = "cublas", _default(m, n)
    fits = {
        "triton": triton_fits(x, w),
        "cublas": cublas_fits(x, w, row_wise, bias, dtype),
    }
    order = [hit[0], "triton", "cublas"]
    return next((b for b in order if fits[b]), "reference"), hit[1]


def _default(m: int, n: int) -> Config:
    """The wider tile, unless narrow ones fill the last wave of a Hopper (132) much better."""

    def filled(bn: int) -> float:
        tiles = -(-m // 128) * -(-n // bn)
        return tiles / (-(-tiles // 132) * 132)

    if m <= 64:
        return SMALL
    return WIDE if filled(256) >= 0.95 * filled(128) else NARROW


def wide_dtype(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.dtype:
    """float32 for a result that more arithmetic follows; ``dtype`` where only cuBLAS is fast."""
    fast = _choose(x, w, x_scale, w_scale, None, torch.float32)[0] != "reference"
    return torch.float32 if fast or not x.is_cuda else dtype


def _rows(x_scale: torch.Tensor) -> torch.Tensor:
    return x_scale.reshape(-1, 1)


def _columns(w_scale: torch.Tensor) -> torch.Tensor:
    return w_scale.reshape(1, -1)


def check(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError on operands that no backend takes. Also run on fake tensors."""
    if x.dtype != FP8 or w.dtype != FP8:
        raise ValueError(f"linear_fp8: x and w must be {FP8}, not {x.dtype} and {w.dtype}")
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"linear_fp8: x [M, K] and w [N, K], not {(*x.shape,)} and {(*w.shape,)}")
    for name, scale, count in (("x", x_scale, x.shape[0]), ("w", w_scale, w.shape[0])):
        if scale.dtype != torch.float32:
            raise ValueError(f"linear_fp8: {name}_scale must be float32, not {scale.dtype}")
        if scale.numel() not in (1, count):
            raise ValueError(
                f"linear_fp8: {name}_scale has {scale.numel()} elements; 1 or {count} needed"
            )
    if dtype not in OUT_DTYPES:
        raise ValueError(f"linear_fp8: output dtype {dtype} is none of {OUT_DTYPES}")


def run(
    backend: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: Config = WIDE,
) -> torch.Tensor:
    """One backend by name, for tests and benchmarks."""
    if backend == "triton":
        return launch(x, w, x_scale, w_scale, bias, out_dtype, config)
    if backend == "cublas":
        return _cublas(x, w, x_scale, w_scale, bias, out_dtype)
    assert backend == "reference", backend
    return reference(x, w, x_scale, w_scale, bias).to(out_dtype)


@torch.library.custom_op("rtc::linear_fp8", mutates_args=())
def linear_fp8(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    check(x, w, x_scale, w_scale, out_dtype)
    backend, config = _choose(x, w, x_scale, w_scale, bias, out_dtype)
    return run(backend, x, w, x_scale, w_scale, bias, out_dtype, config)


@linear_fp8.register_fake
def _(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    check(x, w, x_scale, w_scale, out_dtype)
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)


def _choose_residual(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    residual: torch.Tensor,
) -> tuple[str, Config]:
    major = torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0
    aligned = residual.shape[1] * residual.element_size() % 16 == 0 and residual.numel() > 0
    if major != 9 or not aligned or not triton_fits(x, w):
        return "composed", WIDE
    (m, k), n = x.shape, w.shape[0]
    row_wise = x_scale.numel() > 1 or w_scale.numel() > 1
    return RESIDUAL_TABLE.get((major, m, n, k, row_wise), ("triton", _default(m, n)))


def run_residual(
    backend: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    gate: torch.Tensor,
    residual: torch.Tensor,
    config: Config = WIDE,
) -> torch.Tensor:
    """``linear_fp8_residual`` by one backend, for tests and benchmarks."""
    if backend == "triton":
        return launch(x, w, x_scale, w_scale, None, residual.dtype, config, gate, residual)
    assert backend == "composed", backend
    dtype = wide_dtype(x, w, x_scale, w_scale, residual.dtype)
    y = linear_fp8(x, w, x_scale, w_scale, None, dtype)
    return (residual.float() + gate.float() * y).to(residual.dtype).contiguous()


@torch.library.custom_op("rtc::linear_fp8_residual", mutates_args=())
def linear_fp8_residual(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    gate: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    check(x, w, x_scale, w_scale, residual.dtype)
    backend, config = _choose_residual(x, w, x_scale, w_scale, residual)
    return run_residual(backend, x, w, x_scale, w_scale, gate, residual, config)


@linear_fp8_residual.register_fake
def _(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    gate: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    check(x, w, x_scale, w_scale, residual.dtype)
    return residual.new_empty(residual.shape)


# A one per device, made outside graph capture: memory of a capture belongs to its graph.
_ONES: dict[torch.device, torch.Tensor] = {}


def _one(x: torch.Tensor) -> torch.Tensor:
    known = _ONES.get(x.device)
    if known is None:
        known = x.new_ones((), dtype=torch.float32)
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            _ONES[x.device] = known
    return known


def pays_raw(m: int, n: int, k: int, arch: tuple[int, int]) -> bool:
    """Whether a product without scales, and its reader applying them, is faster than with them.

    arch: compute capability. Unmeasured shapes: where K is long and a row of y not too wide for
    one kernel to hold, as it is then the second linear of a block.
    """
    default = arch[0] >= 9 and n <= 16384 and k >= 2 * n
    return RAW_PAYS.get((arch[0], m, n, k), default)


def _check_raw(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"linear_fp8_raw: unscaled values need bfloat16 or float32, not {dtype}")
    one = x.new_empty((1,), dtype=torch.float32)
    check(x, w, one, one, dtype)


@torch.library.custom_op("rtc::linear_fp8_raw", mutates_args=())
def linear_fp8_raw(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x @ w.T [M, N] of FP8 values as they are, no scales."""
    _check_raw(x, w, out_dtype)
    one = _one(x)
    backend, config = _choose(x, w, one, one, None, out_dtype)
    measured = (9, x.shape[0], w.shape[0], x.shape[1], False) in TABLE
    if backend == "triton" and not measured and cublas_fits(x, w, False, None, out_dtype):
        backend = "cublas"  # with long K it was the faster one at every shape measured
    return run(backend, x, w, one, one, None, out_dtype, config)


@linear_fp8_raw.register_fake
def _(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    _check_raw(x, w, out_dtype)
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)
