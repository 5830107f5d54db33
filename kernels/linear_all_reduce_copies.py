"""Linear + all-reduce in column chunks: cuBLAS computes one while a copy engine sends the last.

    y = round(sum over ranks r, in their order, of xs_r * ws_r * round(x_r @ w_r.T))    (raw)
    y = round(sum over ranks r, in their order, of round(xs_r * ws_r * (x_r @ w_r.T)))  (else)

Shapes: x [M, K] and w [N, K] FP8 of this rank, y [M, N]; chunk c is columns starts[c] up to
starts[c + 1] of it and lies in a slot as one run of memory, [M, width]. ``raw``: cuBLAS without row
scales, which is faster where K is long; every rank's scales then go to all, and the reduction
applies them.

The side stream waits until the peers have read what this slot held, sends the scales, and for each
chunk copies it to the peers (DMA: no multiprocessor is taken from the products) and raises their
flags by a kernel of one warp. It joins the main stream before the reduction, so that a reduction
that waits for a peer never keeps this rank's own flags from running. Both streams may be captured.

A captured copy has fixed addresses: slots alternate from call to call on the host, in capture as in
eager mode, so that a graph with an odd number of calls uses one slot twice in a row when it is
replayed. Acknowledgements make that right, and only then is it slower; counts are kept per slot.

Nothing can hold a copy back. A rank that has waited in vain for an acknowledgement therefore sets
its peers' error words before its copies start, and a reduction looks at its error word once more
after it has read: what it added may be of two calls, and is replaced by NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from rtc.kernels.linear_all_reduce_space import USES, Space

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU builds of torch come without it
    triton = None

if triton is not None:
    from rtc.kernels.linear_all_reduce_space import arrived, pointer

__all__ = ["Copies", "launch"]

MOST = 16  # chunks


@dataclass(frozen=True)
class Copies:
    """Column chunks, and what follows them. The same on all ranks."""

    chunks: tuple[int, ...]  # columns of each, multiples of 16
    raw: bool = True
    warps: int = 8  # of the reduction
    rows: int = 16  # of a block of the reduction
    columns: int = 256
    ctas: int = 2  # of the reduction, a multiprocessor

    def __post_init__(self) -> None:
        if not self.chunks or min(self.chunks) < 16 or any(c % 16 for c in self.chunks):
            raise ValueError(f"chunks {self.chunks} must be positive multiples of 16 columns")
        if len(self.chunks) > MOST:
            raise ValueError(f"{len(self.chunks)} chunks are more than {MOST}")
        for name in ("warps", "rows", "columns"):
            v = getattr(self, name)
            if v < 1 or v & (v - 1):
                raise ValueError(f"{name} = {v} must be a power of two")

    @property
    def table(self) -> tuple[int, ...]:
        """First column of each chunk, and the end."""
        return tuple(accumulate(self.chunks, initial=0))

    def marks(self, m: int, n: int) -> int:
        """Flags a rank: one a chunk and slot."""
        if sum(self.chunks) != n:
            raise ValueError(f"chunks {self.chunks} are {sum(self.chunks)} columns of {n}")
        return 2 * MOST


if triton is not None:

    @triton.jit(do_not_specialize=["rank", "limit", "which"])
    def _open_kernel(xs_ptr, ws_ptr, like, bases, control, M, N, rank, which, acks, scales, stride,
                     limit, X_ROWS: tl.constexpr, W_ROWS: tl.constexpr, SCALES: tl.constexpr,
                     WORLD: tl.constexpr, USES: tl.constexpr,
                     BLOCK: tl.constexpr):  # fmt: skip
        """Wait until the peers have read this slot's last contents; scales to all ranks. One CTA.

        like: a float32 pointer. [M] and [N] scales lie behind each other, from 64-element bounds.
        """
        use = tl.load(control + USES + which)
        mine = pointer(tl.load(bases + rank), acks, control)
        good = True
        for step in tl.static_range(1, WORLD):
            peer = (rank + step) % WORLD
            good = arrived(mine + peer * 2 + which, use, control + 2, limit, "sys") & good
        if not good:
            for step in tl.static_range(1, WORLD):
                there = pointer(tl.load(bases + (rank + step) % WORLD), 0, control)
                tl.atomic_xchg(there + 2, 1, sem="release", scope="sys")
        if SCALES:
            to = scales + (which * WORLD + rank) * stride.to(tl.int64) * 4
            gap = tl.cdiv(M, 64) * 64
            for r in tl.static_range(WORLD):
                there = pointer(tl.load(bases + r), to, like)
                for start in tl.range(0, M, BLOCK, num_stages=1):
                    i = start + tl.arange(0, BLOCK)
                    value = tl.load(xs_ptr + (i if X_ROWS else i * 0), mask=i < M)
                    tl.store(there + i, value, mask=i < M)
                for start in tl.range(0, N, BLOCK, num_stages=1):
                    i = start + tl.arange(0, BLOCK)
                    value = tl.load(ws_ptr + (i if W_ROWS else i * 0), mask=i < N)
                    tl.store(there + gap + i, value, mask=i < N)

    @triton.jit(do_not_specialize=["rank", "which", "chunk"])
    def _flag_kernel(bases, control, rank, which, chunk, flags, marks, WORLD: tl.constexpr,
                     USES: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
        """A chunk's copies are complete: they are before this kernel on its stream."""
        use = tl.load(control + USES + which) + 1
        for r in tl.static_range(WORLD):
            flag = pointer(tl.load(bases + r), flags, control)
            tl.atomic_xchg(flag + rank * marks + which * MOST + chunk, use, sem="release",
                           scope="sys")  # fmt: skip

    @triton.jit(do_not_specialize=["rank", "limit", "which"])
    def _reduce_kernel(y_ptr, like, bases, control, starts, M, N, rank, which, flags, marks, acks,
                       scales, stride, slots, part, limit, COUNT: tl.constexpr,
                       SCALES: tl.constexpr, WORLD: tl.constexpr, ITEM: tl.constexpr,
                       USES: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr,
                       COLUMNS: tl.constexpr):  # fmt: skip
        pid = tl.program_id(0)
        programs = tl.num_programs(0)
        use = tl.load(control + USES + which) + 1
        here = tl.load(bases + rank)
        mine = pointer(here, flags, control)
        wide = part.to(tl.int64)
        first_slot = pointer(here, slots + which * WORLD * wide * ITEM, y_ptr)
        first_scale = pointer(here, scales + which * WORLD * stride.to(tl.int64) * 4, like)
        gap = tl.cdiv(M, 64) * 64
        live = tl.load(control + 2) == 0
        for c in tl.range(0, COUNT, num_stages=1):
            good = live
            for r in tl.static_range(WORLD):
                flag = mine + r * marks + which * MOST + c
                good = arrived(flag, use, control + 2, limit, "sys") & good
            start = tl.multiple_of(tl.load(starts + c), 16)
            width = tl.multiple_of(tl.load(starts + c + 1) - start, 16)
            across = tl.cdiv(width, COLUMNS)
            chunk = start.to(tl.int64) * M
            for unit in tl.range(pid, tl.cdiv(M, ROWS) * across, programs, num_stages=1):
                rows = unit // across * ROWS + tl.arange(0, ROWS)
                cols = unit % across * COLUMNS + tl.arange(0, COLUMNS)
                inside = (rows < M)[:, None] & (cols < width)[None, :]
                at = chunk + rows.to(tl.int64)[:, None] * width + cols[None, :]
                total = tl.zeros((ROWS, COLUMNS), tl.float32)
                for r in tl.static_range(WORLD):
                    value = tl.load(first_slot + r * wide + at, mask=inside, cache_modifier=".cg")
                    value = value.to(tl.float32)
                    if SCALES:
                        scale = first_scale + r * stride
                        xs = tl.load(scale + rows, mask=rows < M, cache_modifier=".cg")
                        ws = tl.load(scale + gap + start + cols, mask=cols < width,
                                     cache_modifier=".cg")  # fmt: skip
                        value = value * xs[:, None] * ws[None, :]
                    total += value
                total = tl.where(good, total, float("nan"))
                there = y_ptr + rows.to(tl.int64)[:, None] * N + (start + cols)[None, :]
                tl.store(there, total.to(y_ptr.dtype.element_ty), mask=inside)
        # The last CTA to have read tells the peers that they may write this slot again.
        tl.debug_barrier()
        done = tl.atomic_add(control + 1, 1, sem="acq_rel", scope="gpu")
        if done == programs - 1:
            if tl.atomic_add(control + 2, 0, sem="acq_rel", scope="sys") != 0:
                nan = tl.full((ROWS, COLUMNS), float("nan"), tl.float32).to(y_ptr.dtype.element_ty)
                across = tl.cdiv(N, COLUMNS)
                for unit in tl.range(0, tl.cdiv(M, ROWS) * across, num_stages=1):
                    rows = unit // across * ROWS + tl.arange(0, ROWS)
                    cols = unit % across * COLUMNS + tl.arange(0, COLUMNS)
                    there = y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
                    tl.store(there, nan, mask=(rows < M)[:, None] & (cols < N)[None, :])
            tl.store(control + 1, 0)
            tl.store(control + USES + which, use)
            for step in tl.static_range(1, WORLD):
                peer = (rank + step) % WORLD
                ack = pointer(tl.load(bases + peer), acks, control)
                tl.atomic_xchg(ack + rank * 2 + which, use, sem="release", scope="sys")


def launch(
    space: Space,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
) -> torch.Tensor:
    """y [M, N], fresh."""
    assert space.side is not None
    which = space.calls % 2
    space.calls += 1
    main, side = torch.cuda.current_stream(x.device), space.side
    with torch.cuda.device_of(x):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            opening(space, x_scale, w_scale, which)
        for i, (a, b) in enumerate(chunk_bounds(space)):
            scale = w_scale[..., a:b] if w_scale.numel() > 1 else w_scale
            product(space, x, w[a:b], x_scale, scale, own_chunk(space, which, i))
            side.wait_stream(main)
            with torch.cuda.stream(side):
                send(space, which, i)
        main.wait_stream(side)
        return reduction(space, which, x)


def chunk_bounds(space: Space) -> list[tuple[int, int]]:
    return list(pairwise(space.config.table))


def own_chunk(space: Space, which: int, i: int, on: int | None = None) -> torch.Tensor:
    """This rank's chunk i [M, width] in slot ``which`` of rank ``on``'s buffer, its own if None."""
    a, b = chunk_bounds(space)[i]
    m = space.layout.m
    slot = space.slot(which, space.rank, space.rank if on is None else on)
    return slot[a * m : b * m].view(m, b - a)


def opening(
    space: Space, x_scale: torch.Tensor, w_scale: torch.Tensor, which: int, limit: int | None = None
) -> None:
    at = space.layout
    _open_kernel[(1,)](
        x_scale.contiguous(),
        w_scale.contiguous(),
        space.one,
        space.bases,
        space.control,
        at.m,
        at.n,
        space.rank,
        which,
        at.acks,
        at.scales,
        at.scale_stride,
        space.limit if limit is None else limit,
        X_ROWS=x_scale.numel() > 1,
        W_ROWS=w_scale.numel() > 1,
        SCALES=space.config.raw,
        WORLD=at.world,
        USES=USES,
        BLOCK=1024,
        num_warps=8,
    )


def product(
    space: Space,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One chunk by cuBLAS, into the slot."""
    if space.config.raw:
        x_scale = w_scale = space.one
    else:
        x_scale = x_scale.reshape(-1, 1).expand(x.shape[0], 1).contiguous()
        w_scale = w_scale.reshape(1, -1).expand(1, w.shape[0]).contiguous()
    torch._scaled_mm(x, w.t(), x_scale, w_scale, out_dtype=out.dtype, use_fast_accum=True, out=out)


def send(space: Space, which: int, i: int) -> None:
    """Chunk i to all peers, then its flag on all ranks."""
    at = space.layout
    for step in range(1, at.world):
        peer = (space.rank + step) % at.world
        own_chunk(space, which, i, peer).copy_(own_chunk(space, which, i))
    _flag_kernel[(1,)](
        space.bases,
        space.control,
        space.rank,
        which,
        i,
        at.flags,
        at.marks,
        WORLD=at.world,
        USES=USES,
        MOST=MOST,
        num_warps=1,
    )


def reduction(
    space: Space, which: int, x: torch.Tensor, y: torch.Tensor | None = None
) -> torch.Tensor:
    """y, once all parts are here; acknowledges them."""
    at, c = space.layout, space.config
    y = x.new_empty((at.m, at.n), dtype=at.dtype) if y is None else y
    programs = 3  # the interpreter's
    if x.is_cuda:
        count = torch.cuda.get_device_properties(x.device).multi_processor_count
        programs = count * c.ctas
    _reduce_kernel[(programs,)](
        y,
        space.one,
        space.bases,
        space.control,
        space.table,
        at.m,
        at.n,
        space.rank,
        which,
        at.flags,
        at.marks,
        at.acks,
        at.scales,
        at.scale_stride,
        at.slots,
        at.part,
        space.limit,
        COUNT=len(c.chunks),
        SCALES=c.raw,
        WORLD=at.world,
        ITEM=at.dtype.itemsize,
        USES=USES,
        MOST=MOST,
        ROWS=c.rows,
        COLUMNS=c.columns,
        num_warps=c.warps,
    )
    return y
