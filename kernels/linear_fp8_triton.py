"""The Triton kernel of ``kernels/linear_fp8.py``, its configuration and its launch.

    y[m, n] = (x @ w.T)[m, n] * x_scale[m] * w_scale[n]  (+ bias[n] | residual[m, n] + gate[n] * y)

Shapes: x [M, K], w [N, K], y and residual [M, N]; a tile is [BM, BN], a K block BK wide. Demands:
x, w and residual row-major, rows a multiple of 16 bytes apart, from a 16-byte address (tensor
descriptors; TMA on Hopper), which mask ragged M, N and K. CTAs are persistent over a tile order in
which GROUP row blocks share a column block, so that w is read once and x stays in the L2 cache.

``stream``: the tiles of the last, incomplete wave are cut along K into equal spans, one a CTA. The
parts meet in a workspace, and the CTA that comes last adds them in a fixed order: the result does
not depend on which one that is. At M = 757, N = 7680, 128x256 tiles: 1.36 waves instead of 2.

Accumulation: Hopper's tensor cores keep about 14 bits of the sum (DeepSeek-V3, arXiv:2412.19437,
section 3.3.2) and truncate at each step of 32 products, so that the error grows with K. ``promote``
= 0 leaves all of K to them, like cuBLAS's fast accumulation and Triton's default on Hopper;
``promote`` = bk adds each K block to a float32 sum outside of them, at twice the registers, so in
tiles of half the size. tests/kernels/test_linear_fp8.py prints the errors of both at K = 38,400.

Source: own; the cut of the last wave is stream-K's (Osama et al., arXiv:2301.03598).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # the CPU builds of torch come without it
    triton = None

__all__ = ["NARROW", "SMALL", "WIDE", "Config", "launch", "programs", "rows_aligned", "triton_fits"]


@dataclass(frozen=True)
class Config:
    """One instance of the kernel: tile, warps, stages of the pipeline, and the options above."""

    bm: int = 128
    bn: int = 256
    bk: int = 128
    warps: int = 8
    stages: int = 3
    group: int = 8  # row blocks that share a column block before the next column block
    ctas: int = 1  # CTAs a multiprocessor
    halves: bool = False  # the epilogue in two halves: half its shared memory, fewer registers
    stream: bool = False
    promote: int = 0
    flatten: bool = False  # one loop over tiles and K: the epilogue overlaps the next tile's loads
    specialize: bool = False  # warp specialization; 4 warps become a producer and two consumers

    def __post_init__(self) -> None:
        for name in ("bm", "bn", "bk", "warps"):
            v = getattr(self, name)
            if v < 1 or v & (v - 1):
                raise ValueError(f"{name} = {v} must be a power of two")
        if self.promote and (self.promote > self.bk or self.promote % 32):
            raise ValueError(f"promote = {self.promote} must be a multiple of 32, at most bk")
        if self.specialize and (self.warps != 4 or self.stream or self.halves or self.flatten):
            raise ValueError("specialize takes 4 warps, and neither stream, halves nor flatten")


WIDE = Config()
NARROW = Config(bn=128, warps=4, stages=4)
SMALL = Config(bm=64, bn=128, warps=4, stages=4)

if triton is not None:

    @triton.jit
    def origin(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
        """Row and column block of a tile: GROUP row blocks, column by column, for the L2 cache."""
        span = GROUP * tiles_n
        first = (tile // span) * GROUP
        height = min(tiles_m - first, GROUP)
        return first + (tile % span) % height, (tile % span) // height

    @triton.jit
    def multiply(a, b, acc, PROMOTE: tl.constexpr):
        if PROMOTE:
            return tl.dot(a, b.T, acc, max_num_imprecise_acc=PROMOTE)
        else:
            return tl.dot(a, b.T, acc)

    @triton.jit
    def _accumulate(x_desc, w_desc, m0, n0, k0, k1, BM: tl.constexpr, BN: tl.constexpr,
                    BK: tl.constexpr, PROMOTE: tl.constexpr):  # fmt: skip
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(k0, k1):
            a = x_desc.load([m0, k * BK])
            b = w_desc.load([n0, k * BK])
            acc = multiply(a, b, acc, PROMOTE)
        return acc

    @triton.jit
    def scaled(acc, rows, cols, xs_ptr, ws_ptr, M, N, X_ROWS: tl.constexpr, W_ROWS: tl.constexpr):
        if X_ROWS:
            acc = acc * tl.load(xs_ptr + rows, mask=rows < M, other=0.0)[:, None]
        else:
            acc = acc * tl.load(xs_ptr)
        if W_ROWS:
            acc = acc * tl.load(ws_ptr + cols, mask=cols < N, other=0.0)[None, :]
        else:
            acc = acc * tl.load(ws_ptr)
        return acc

    @triton.jit
    def halves(acc, BM: tl.constexpr, BN: tl.constexpr):
        """Left and right half of a tile. Columns c and c + BN / 2 are one thread's: no traffic."""
        return acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()

    @triton.jit
    def _store(acc, m0, n0, y_desc, y_ptr, xs_ptr, ws_ptr, bias_ptr, gate_ptr, r_desc, M, N,
               X_ROWS: tl.constexpr, W_ROWS: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr):  # fmt: skip
        rows = m0 + tl.arange(0, BM)
        cols = n0 + tl.arange(0, BN)
        y = scaled(acc, rows, cols, xs_ptr, ws_ptr, M, N, X_ROWS, W_ROWS)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        if r_desc is not None:
            gate = tl.load(gate_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            y = y * gate[None, :] + r_desc.load([m0, n0]).to(tl.float32)
        y = y.to(y_ptr.dtype.element_ty)
        if y_desc is not None:
            y_desc.store([m0, n0], y)
        else:
            inside = (rows < M)[:, None] & (cols < N)[None, :]
            tl.store(y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], y, mask=inside)

    @triton.jit
    def _finish(acc, m0, n0, y_desc, y_ptr, xs_ptr, ws_ptr, bias_ptr, gate_ptr, r_desc, M, N,
                X_ROWS: tl.constexpr, W_ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                HALVES: tl.constexpr):  # fmt: skip
        if HALVES:
            left, right = halves(acc, BM, BN)
            _store(left, m0, n0, y_desc, y_ptr, xs_ptr, ws_ptr, bias_ptr, gate_ptr, r_desc, M, N,
                   X_ROWS, W_ROWS, BM, BN // 2)  # fmt: skip
            _store(right, m0, n0 + BN // 2, y_desc, y_ptr, xs_ptr, ws_ptr, bias_ptr, gate_ptr,
                   r_desc, M, N, X_ROWS, W_ROWS, BM, BN // 2)  # fmt: skip
        else:
            _store(acc, m0, n0, y_desc, y_ptr, xs_ptr, ws_ptr, bias_ptr, gate_ptr, r_desc, M, N,
                   X_ROWS, W_ROWS, BM, BN)  # fmt: skip

    @triton.jit
    def _linear_kernel(x_desc, w_desc, y_desc, y_ptr, xs_ptr, ws_ptr, bias_ptr, gate_ptr, r_desc,
                       part_ptr, count_ptr, M, N, K, X_ROWS: tl.constexpr,
                       W_ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                       GROUP: tl.constexpr, PROMOTE: tl.constexpr, STREAM: tl.constexpr,
                       FLATTEN: tl.constexpr, HALVES: tl.constexpr,
                       SPECIALIZE: tl.constexpr, SET: tl.constexpr,
                       PROGRAMS: tl.constexpr):  # fmt: skip
        pid = tl.program_id(0)
        tiles_m = tl.cdiv(M, BM)
        tiles_n = tl.cdiv(N, BN)
        tiles = tiles_m * tiles_n
        steps = tl.cdiv(K, BK)
        tail = tiles % PROGRAMS if STREAM else 0
        whole = tiles - tail
        for tile in tl.range(pid, whole, PROGRAMS, flatten=FLATTEN, warp_specialize=SPECIALIZE):
            bm, bn = origin(tile, tiles_m, tiles_n, GROUP)
            acc = _accumulate(x_desc, w_desc, bm * BM, bn * BN, 0, steps, BM, BN, BK, PROMOTE)
            _finish(acc, bm * BM, bn * BN, y_desc, y_ptr, xs_ptr, ws_ptr,
                    bias_ptr, gate_ptr, r_desc, M, N, X_ROWS, W_ROWS, BM, BN, HALVES)  # fmt: skip
        if STREAM:
            # Tiles of the tail go in sets of SET that share a column block. A lane of SET CTAs
            # takes one member each and walks along K in step, so that w is read once. All K blocks
            # of all sets in one row are cut into one span a lane: as there are fewer sets than
            # lanes, a span is no longer than a tile and touches at most two.
            lane = pid // SET
            member = pid % SET
            work = tail // SET * steps
            span = tl.cdiv(work, PROGRAMS // SET)
            begin = min(lane * span, work)
            end = min(begin + span, work)
            inner = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
            for t in tl.range(begin // steps, tl.cdiv(end, steps)):
                k0 = tl.maximum(begin - t * steps, 0)
                k1 = tl.minimum(end - t * steps, steps)
                bm, bn = origin(whole + t * SET + member, tiles_m, tiles_n, GROUP)
                acc = _accumulate(x_desc, w_desc, bm * BM, bn * BN, k0, k1, BM, BN, BK, PROMOTE)
                first = t * steps // span
                last = ((t + 1) * steps - 1) // span
                arrived = last - first
                if first != last:
                    # Two slots a CTA: its first tile's part, and its second's.
                    slot = pid * 2 + t - begin // steps
                    tl.store(part_ptr + slot.to(tl.int64) * (BM * BN) + inner, acc)
                    tl.debug_barrier()  # all threads' parts before the one thread's release
                    counter = count_ptr + t * SET + member
                    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                    if arrived == last - first:
                        acc = tl.zeros((BM, BN), tl.float32)
                        for p in tl.range(first, last + 1, num_stages=1):
                            slot = (p * SET + member) * 2 + t - p * span // steps
                            # .cg: from L2, where the other CTAs' parts are.
                            acc += tl.load(part_ptr + slot.to(tl.int64) * (BM * BN) + inner,
                                           cache_modifier=".cg")  # fmt: skip
                if arrived == last - first:
                    _finish(acc, bm * BM, bn * BN, y_desc, y_ptr, xs_ptr, ws_ptr, bias_ptr,
                            gate_ptr, r_desc, M, N, X_ROWS, W_ROWS, BM, BN, HALVES)  # fmt: skip


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    config: Config,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    (m, k), n = x.shape, w.shape[0]
    y = x.new_empty((m, n), dtype=dtype)
    # One loop over tiles and K: the residual's tile is loaded while the next stages are.
    c = fitted(config, dtype.itemsize * (1 + (config.flatten and residual is not None)))
    rows = -(-m // c.bm)
    tiles = rows * -(-n // c.bn)
    width = programs(x, c)
    tail = tiles % width
    together = rows <= c.group and tail % rows == width % rows == 0
    part = count = None
    stream = c.stream and tail > 0
    if stream:
        part = x.new_empty(width * 2 * c.bm * c.bn, dtype=torch.float32)
        count = x.new_zeros(tail, dtype=torch.int32)
    if c.specialize and residual is not None:
        raise ValueError("specialize: Triton 3.6 does not compile the load of a residual")
    block = [c.bm, c.bn // 2 if c.halves else c.bn]
    # Triton 3.6 cannot split a store by descriptor between two consumers.
    by_desc = rows_aligned(y) and not c.specialize
    if residual is not None and not rows_aligned(residual):
        residual = residual.contiguous()
    with torch.cuda.device_of(x):
        _linear_kernel[(width if stream else min(width, tiles),)](
            TensorDescriptor.from_tensor(x, [c.bm, c.bk]),
            TensorDescriptor.from_tensor(w, [c.bn, c.bk]),
            TensorDescriptor.from_tensor(y, block) if by_desc else None,
            y,
            x_scale.contiguous(),
            w_scale.contiguous(),
            None if bias is None else bias.contiguous(),
            None if gate is None else gate.contiguous(),
            None if residual is None else TensorDescriptor.from_tensor(residual, block),
            part,
            count,
            m,
            n,
            k,
            X_ROWS=x_scale.numel() > 1,
            W_ROWS=w_scale.numel() > 1,
            BM=c.bm,
            BN=c.bn,
            BK=c.bk,
            GROUP=c.group,
            PROMOTE=c.promote,
            STREAM=stream,
            FLATTEN=c.flatten,
            HALVES=c.halves,
            SPECIALIZE=c.specialize,
            SET=rows if together else 1,
            PROGRAMS=width,
            num_warps=c.warps,
            num_stages=c.stages,
        )
    return y


def programs(x: torch.Tensor, config: Config) -> int:
    """CTAs that run at a time."""
    if not x.is_cuda:  # Triton's interpreter
        return 4
    return torch.cuda.get_device_properties(x.device).multi_processor_count * config.ctas


def fitted(config: Config, itemsize: int, halves: bool = False) -> Config:
    """``config`` with less in shared memory where the epilogue's tile is too wide for the rest.

    Sizes as Triton 3.6 allocates them; 227 KB a CTA on Hopper.
    """
    c = config
    while c.stages > 1:
        half = c.halves or halves
        tiles = c.stages * (c.bm + c.bn) * c.bk + c.bm * c.bn * itemsize // (1 + half)
        if tiles + 2048 <= 227 * 1024:
            break
        c = replace(c, stages=c.stages - 1) if half or c.specialize else replace(c, halves=True)
    return c


def rows_aligned(t: torch.Tensor) -> bool:
    """What a tensor descriptor demands: 16-byte rows from a 16-byte address."""
    return (
        t.stride(1) == 1
        and t.stride(0) * t.element_size() % 16 == 0
        and t.data_ptr() % 16 == 0
        and t.numel() > 0
    )


def triton_fits(x: torch.Tensor, w: torch.Tensor) -> bool:
    return triton is not None and rows_aligned(x) and rows_aligned(w)
