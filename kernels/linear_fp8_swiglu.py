"""``rtc::linear_fp8_swiglu``: an FP8 linear layer whose gated columns leave as SwiGLU + row maxima.

    h[m, n]    = x_scale[m] * w_scale[n] * sum_k x[m, k] * w[n, k]
    y[m, j]    = silu(h[m, act + j]) * h[m, up + j],   0 <= j < width,   silu(a) = a / (1 + exp(-a))
    amax[m, 0] = max_j |y[m, j]|,    of y as rounded: what a row-wise quantization of y needs
    rest       = the other columns of h, in order

Shapes: x [M, K], w [N, K], scales as in linear_fp8.py; rest [M, N - 2 width], y [M, width], amax
[M, 1] float32, all contiguous; rest and y in ``out_dtype``. h and the product are float32. The rows
[act, act + width) and [up, up + width) of w must not overlap.
Bytes: M K + N K + M (N - width) * itemsize; the product of 2 * width columns is never written.

Triton: one launch for all columns. A tile of y multiplies BN / 2 rows of w from act on and BN / 2
from up on. One tensor descriptor of shape [2, width, K] over w, its outer stride the distance of
the branches, loads both at a time, stacked as one operand: no weights are laid out anew, the tensor
cores see one BN-wide tile, and both branches of an element of y land in one thread. The other
columns are plain tiles in the same schedule: at M = 757, N = 84480 that makes 1,980 tiles, 15.0
waves of 132, where two launches need 16. Demands: as in linear_fp8_triton.py.

Backends: "triton" on Hopper, "composed" (linear_fp8, then torch) elsewhere. Source: own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rtc.kernels.linear_fp8 import check, linear_fp8, wide_dtype
from rtc.kernels.linear_fp8_triton import WIDE, Config, fitted, programs, rows_aligned, triton_fits

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    from rtc.kernels.linear_fp8_triton import halves, multiply, origin, scaled
except ImportError:
    triton = None

__all__ = ["TABLE", "linear_fp8_swiglu", "run"]

# (major compute capability, M, N, K, width) -> "triton" or "composed", Config; to be filled by
# bench/bench_linear.py.
TABLE: dict[tuple[int, int, int, int, int], tuple[str, Config]] = {}


if triton is not None:

    @triton.jit
    def _put(value, desc, ptr, row, col, limit, M, stride, BM: tl.constexpr, BN: tl.constexpr):
        """Store a block at [row, col], up to column ``limit``; by descriptor where there is one."""
        if desc is not None:
            desc.store([row, col], value)
        else:
            rows = row + tl.arange(0, BM)
            cols = col + tl.arange(0, BN)
            at = rows.to(tl.int64)[:, None] * stride + cols[None, :]
            tl.store(ptr + at, value, mask=(rows < M)[:, None] & (cols < limit)[None, :])

    @triton.jit
    def _swiglu_kernel(x_desc, w_desc, pair_desc, y_desc, rest_desc, y_ptr, rest_ptr, amax_ptr,
                       xs_ptr, ws_ptr, M, N, K, LOW, HIGH, WIDTH, X_ROWS: tl.constexpr,
                       W_ROWS: tl.constexpr, ACT_LOW: tl.constexpr, BM: tl.constexpr,
                       BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                       PROMOTE: tl.constexpr, FLATTEN: tl.constexpr,
                       PROGRAMS: tl.constexpr):  # fmt: skip
        HALF: tl.constexpr = BN // 2
        tiles_m = tl.cdiv(M, BM)
        # Blocks of columns: those of y, then those of the rest: [0, LOW), [LOW + WIDTH, HIGH) and
        # [HIGH + WIDTH, N), each of its own so that a tile is one run of rows of w.
        pairs = tl.cdiv(WIDTH, HALF)
        below = pairs + tl.cdiv(LOW, BN)
        between = below + tl.cdiv(HIGH - LOW - WIDTH, BN)
        blocks = between + tl.cdiv(N - HIGH - WIDTH, BN)
        steps = tl.cdiv(K, BK)
        for tile in tl.range(tl.program_id(0), tiles_m * blocks, PROGRAMS, flatten=FLATTEN):
            bm, bn = origin(tile, tiles_m, blocks, GROUP)
            m0 = bm * BM
            rows = m0 + tl.arange(0, BM)
            acc = tl.zeros((BM, BN), tl.float32)
            if bn < pairs:
                n0 = bn * HALF
                for k in tl.range(0, steps):
                    a = x_desc.load([m0, k * BK])
                    b = pair_desc.load([0, n0, k * BK]).reshape(BN, BK)
                    acc = multiply(a, b, acc, PROMOTE)
                low, high = halves(acc, BM, BN)
                cols = n0 + tl.arange(0, HALF)
                low = scaled(low, rows, LOW + cols, xs_ptr, ws_ptr, M, N, X_ROWS, W_ROWS)
                high = scaled(high, rows, HIGH + cols, xs_ptr, ws_ptr, M, N, X_ROWS, W_ROWS)
                if ACT_LOW:
                    y = low / (1.0 + tl.exp(-low)) * high
                else:
                    y = high / (1.0 + tl.exp(-high)) * low
                y = y.to(y_ptr.dtype.element_ty)
                # Columns past WIDTH are zeros: pair_desc ends there.
                top = tl.max(tl.abs(y.to(tl.float32)), axis=1)
                # Of floats >= 0 the bits order like the values.
                tl.atomic_max(amax_ptr + rows, top.to(tl.int32, bitcast=True), mask=rows < M,
                              sem="relaxed")  # fmt: skip
                _put(y, y_desc, y_ptr, m0, n0, WIDTH, M, WIDTH, BM, HALF)
            else:
                if bn < below:
                    n0 = (bn - pairs) * BN
                    limit = LOW
                    skip = 0
                elif bn < between:
                    n0 = LOW + WIDTH + (bn - below) * BN
                    limit = HIGH
                    skip = WIDTH
                else:
                    n0 = HIGH + WIDTH + (bn - between) * BN
                    limit = N
                    skip = 2 * WIDTH
                for k in tl.range(0, steps):
                    a = x_desc.load([m0, k * BK])
                    b = w_desc.load([n0, k * BK])
                    acc = multiply(a, b, acc, PROMOTE)
                left, right = halves(acc, BM, BN)
                cols = n0 + tl.arange(0, HALF)
                left = scaled(left, rows, cols, xs_ptr, ws_ptr, M, N, X_ROWS, W_ROWS)
                right = scaled(right, rows, cols + HALF, xs_ptr, ws_ptr, M, N, X_ROWS, W_ROWS)
                out = y_ptr.dtype.element_ty
                stride = N - 2 * WIDTH
                _put(left.to(out), rest_desc, rest_ptr, m0, n0 - skip, limit - skip, M, stride,
                     BM, HALF)  # fmt: skip
                _put(right.to(out), rest_desc, rest_ptr, m0, n0 - skip + HALF, limit - skip, M,
                     stride, BM, HALF)  # fmt: skip


def _triton(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    act: int,
    up: int,
    width: int,
    dtype: torch.dtype,
    config: Config,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (m, k), n = x.shape, w.shape[0]
    c = fitted(config, dtype.itemsize, halves=True)
    low, high = min(act, up), max(act, up)
    rest = x.new_empty((m, n - 2 * width), dtype=dtype)
    y = x.new_empty((m, width), dtype=dtype)
    amax = x.new_zeros((m, 1), dtype=torch.float32)
    half = c.bn // 2
    runs = [low, high - low - width, n - high - width]
    blocks = -(-width // half) + sum(-(-r // c.bn) for r in runs)
    # A store by descriptor ends at the end of the tensor alone: not for a run that ends inside it.
    ragged = [r % c.bn != 0 for r in runs if r]
    by_desc = rows_aligned(rest) and not any(ragged[:-1])
    tiles = -(-m // c.bm) * blocks
    grid = programs(x, c)
    step = w.stride(0)
    with torch.cuda.device_of(x):
        _swiglu_kernel[(min(tiles, grid),)](
            TensorDescriptor.from_tensor(x, [c.bm, c.bk]),
            TensorDescriptor.from_tensor(w, [c.bn, c.bk]),
            TensorDescriptor(
                w[low:], [2, width, k], [(high - low) * step, step, 1], [2, half, c.bk]
            ),
            TensorDescriptor.from_tensor(y, [c.bm, half]) if rows_aligned(y) else None,
            TensorDescriptor.from_tensor(rest, [c.bm, half]) if by_desc else None,
            y,
            rest,
            amax.view(torch.int32),
            x_scale.contiguous(),
            w_scale.contiguous(),
            m,
            n,
            k,
            low,
            high,
            width,
            X_ROWS=x_scale.numel() > 1,
            W_ROWS=w_scale.numel() > 1,
            ACT_LOW=act < up,
            BM=c.bm,
            BN=c.bn,
            BK=c.bk,
            GROUP=c.group,
            PROMOTE=c.promote,
            FLATTEN=c.flatten,
            PROGRAMS=grid,
            num_warps=c.warps,
            num_stages=c.stages,
        )
    return rest, y, amax


def _composed(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    act: int,
    up: int,
    width: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h = linear_fp8(x, w, x_scale, w_scale, None, wide_dtype(x, w, x_scale, w_scale, dtype))
    a, b = h[:, act : act + width].float(), h[:, up : up + width].float()
    y = (F.silu(a) * b).to(dtype)
    low, high = min(act, up), max(act, up)
    rest = torch.cat([h[:, :low], h[:, low + width : high], h[:, high + width :]], dim=1).to(dtype)
    return rest, y, y.float().abs().amax(dim=1, keepdim=True)


def _check(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    act: int,
    up: int,
    width: int,
    dtype: torch.dtype,
) -> None:
    check(x, w, x_scale, w_scale, dtype)
    low, high = min(act, up), max(act, up)
    if width < 1 or low < 0 or low + width > high or high + width > w.shape[0]:
        raise ValueError(
            f"linear_fp8_swiglu: {width} rows from {act} and from {up} overlap, "
            f"or are not all among the {w.shape[0]} of w"
        )


def run(
    backend: str,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    act: int,
    up: int,
    width: int,
    out_dtype: torch.dtype = torch.bfloat16,
    config: Config = WIDE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One backend by name, for tests and benchmarks."""
    if backend == "triton":
        return _triton(x, w, x_scale, w_scale, act, up, width, out_dtype, config)
    assert backend == "composed", backend
    return _composed(x, w, x_scale, w_scale, act, up, width, out_dtype)


def _choose(x: torch.Tensor, w: torch.Tensor, width: int) -> tuple[str, Config]:
    major = torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0
    if major != 9 or not triton_fits(x, w):
        return "composed", WIDE
    return TABLE.get((major, x.shape[0], *w.shape, width), ("triton", WIDE))


@torch.library.custom_op("rtc::linear_fp8_swiglu", mutates_args=())
def linear_fp8_swiglu(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    act: int,
    up: int,
    width: int,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(x, w, x_scale, w_scale, act, up, width, out_dtype)
    backend, config = _choose(x, w, width)
    return run(backend, x, w, x_scale, w_scale, act, up, width, out_dtype, config)


@linear_fp8_swiglu.register_fake
def _(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    act: int,
    up: int,
    width: int,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(x, w, x_scale, w_scale, act, up, width, out_dtype)
    m, n = x.shape[0], w.shape[0]
    return (
        x.new_empty((m, n - 2 * width), dtype=out_dtype),
        x.new_empty((m, width), dtype=out_dtype),
        x.new_empty((m, 1), dtype=torch.float32),
    )
