"""Linear + all-reduce in one persistent Triton kernel; a few CTAs of their own move the tiles.

    y = round(sum over ranks r, in their order, of part_r),  part_r = round(xs * ws * (x @ w.T))

Shapes: x [M, K] and w [N, K] FP8 of this rank, y and parts [M, N]; a tile is [BM, BN]. Parts are
stored tile after tile, so that a tile is one run of memory.

CTAs 0 .. PROGRAMS - 1 compute tiles pid, pid + PROGRAMS, ... and store them to this rank's own
slot, then raise the tile's flag. CTAs from PROGRAMS on are movers: they wait for a tile's flag,
copy the tile into every peer's slot over NVLink (16 bytes a thread) and raise the peer's flag,
while the others are in the next wave's main loop; at M, N = 757, 7680 there are 360 tiles, three
waves of 120, and 12 multiprocessors to spare. The tiles of the last DIRECT waves have no main loop
to hide behind: the CTA that computed them stores them to the peers itself. Tiles of the first EARLY
waves are added by movers, LAG batches after they pushed them, the rest by all CTAs after their last
tile; with KEEP a CTA adds its own last tile, which then makes no round trip through memory. Nobody
waits inside a product, and a push waits for nothing but its own tile: no order of CTAs or ranks can
deadlock.

A rank that has waited in vain pushes nothing from its next call on: its peers may still have to
read what lies there, and give up likewise.

Order: a CTA's stores, a barrier, one thread's release (of gpu scope for the own flag, of system
scope for a peer's); the reader's acquire, a barrier, its loads from L2 (.cg).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rtc.kernels.linear_all_reduce_space import PAD, Space

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # the CPU builds of torch come without it
    triton = None

if triton is not None:
    from rtc.kernels.linear_all_reduce_space import arrived, pointer
    from rtc.kernels.linear_fp8_triton import _accumulate, origin, scaled

__all__ = ["Movers", "launch"]

GEMM, PUSH, REDUCE = 1, 2, 4


@dataclass(frozen=True)
class Movers:
    """Tile and pipeline, who computes, who moves, and who adds. The same on all ranks."""

    bm: int = 128
    bn: int = 128
    bk: int = 128
    warps: int = 4
    stages: int = 4
    group: int = 8  # row blocks that share a column block before the next column block
    programs: int = 120  # CTAs that compute
    movers: int = 12  # CTAs that move; together at most one a multiprocessor
    batch: int = 2  # tiles that a mover copies before it raises their flags
    direct: int = 1  # last waves whose tiles go to the peers straight from the epilogue
    early: int = 0  # first waves whose tiles the movers add
    lag: int = 2  # batches between pushing a tile and adding it
    split: int = 4  # pieces of a tile in which it is added
    copies: int = 2  # pieces of a tile in which it is copied
    keep: bool = False  # a CTA adds its last tile itself, straight from its accumulator

    def __post_init__(self) -> None:
        for name in ("bm", "bn", "bk", "warps", "split", "copies"):
            v = getattr(self, name)
            if v < 1 or v & (v - 1):
                raise ValueError(f"{name} = {v} must be a power of two")
        if max(self.bm, self.bn) > PAD:
            raise ValueError(f"tiles of at most {PAD} x {PAD}, not {self.bm} x {self.bn}")
        if self.split > self.bm:
            raise ValueError(f"split = {self.split} is more than the {self.bm} rows of a tile")
        if self.programs < 1 or self.batch < 1 or min(self.direct, self.early, self.lag) < 0:
            raise ValueError("programs and batch must be positive; direct, early, lag at least 0")
        if self.keep and not self.direct:
            raise ValueError("keep takes direct waves: a mover reads what is kept in registers")
        if self.movers < 0 or (self.movers == 0 and self.early):
            raise ValueError("early tiles are added by movers: there are none")

    @property
    def table(self) -> tuple[int, ...]:
        """The kernel reads no table."""
        return ()

    def marks(self, m: int, n: int) -> int:
        """Flags a rank: one a tile."""
        return -(-m // self.bm) * -(-n // self.bn)


if triton is not None:

    @triton.jit
    def _push(tile, own, flags, slots, epoch, parity, bases, like, error, limit, rank, part_bytes,
              marks, WORLD: tl.constexpr, SIZE: tl.constexpr,
              COPIES: tl.constexpr):  # fmt: skip
        """Copy a finished tile to all peers."""
        arrived(flags + rank * marks + tile, epoch, error, limit, "gpu")
        piece = tl.arange(0, SIZE // COPIES)
        for c in tl.range(0, COPIES, num_stages=1):
            at = tile * SIZE + c * (SIZE // COPIES) + piece
            value = tl.load(own + at, cache_modifier=".cg")
            for step in tl.static_range(1, WORLD):
                base = tl.load(bases + (rank + step) % WORLD)
                there = pointer(base, slots + (parity * WORLD + rank) * part_bytes, like)
                tl.store(there + at, value)

    @triton.jit
    def _announce(tile, epoch, bases, flag_offset, flag_like, rank, marks, WORLD: tl.constexpr):
        """Raise a tile's flag on all peers. All threads' stores are before it: call a barrier."""
        for step in tl.static_range(1, WORLD):
            base = tl.load(bases + (rank + step) % WORLD)
            flag = pointer(base, flag_offset, flag_like) + rank * marks + tile
            tl.atomic_xchg(flag, epoch, sem="release", scope="sys")

    @triton.jit
    def _add(tile, piece, live, y_ptr, first_slot, part, flags, marks, epoch, error, limit, M, N,
             tiles_m, tiles_n, WORLD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
             SPLIT: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
        """y of one piece of a tile: all ranks' parts, in their order."""
        HEIGHT: tl.constexpr = BM // SPLIT
        rows = piece * HEIGHT + tl.arange(0, HEIGHT)
        cols = tl.arange(0, BN)
        at = tile * (BM * BN) + rows[:, None] * BN + cols[None, :]
        total = tl.zeros((HEIGHT, BN), tl.float32)
        good = live
        for r in tl.static_range(WORLD):
            good = arrived(flags + r * marks + tile, epoch, error, limit, "sys") & good
            total += tl.load(first_slot + r * part + at, cache_modifier=".cg").to(tl.float32)
        total = tl.where(good, total, float("nan"))
        bm, bn = origin(tile, tiles_m, tiles_n, GROUP)
        rows += bm * BM
        cols += bn * BN
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        there = y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(there, total.to(y_ptr.dtype.element_ty), mask=inside)

    @triton.jit
    def _add_to(y, at, tile, live, y_ptr, first_slot, part, flags, marks, epoch, error, limit, M, N,
                rank, bm, bn, WORLD: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr):  # fmt: skip
        """y of a tile whose own part is at hand."""
        total = tl.zeros((BM, BN), tl.float32)
        good = live
        for r in tl.static_range(WORLD):
            if r == rank:
                total += y.to(tl.float32)
            else:
                good = arrived(flags + r * marks + tile, epoch, error, limit, "sys") & good
                value = tl.load(first_slot + r * part + at, cache_modifier=".cg")
                total += value.to(tl.float32)
        total = tl.where(good, total, float("nan"))
        rows = bm * BM + tl.arange(0, BM)
        cols = bn * BN + tl.arange(0, BN)
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        there = y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(there, total.to(y_ptr.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["rank", "limit"])  # one binary for all ranks
    def _movers_kernel(x_desc, w_desc, y_ptr, xs_ptr, ws_ptr, bases, control, M, N, K, rank,
                       flag_offset, slots, part, marks, limit, X_ROWS: tl.constexpr,
                       W_ROWS: tl.constexpr, WORLD: tl.constexpr, ITEM: tl.constexpr,
                       BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                       PROGRAMS: tl.constexpr, MOVERS: tl.constexpr, BATCH: tl.constexpr,
                       DIRECT: tl.constexpr, EARLY: tl.constexpr, LAG: tl.constexpr,
                       SPLIT: tl.constexpr, COPIES: tl.constexpr, KEEP: tl.constexpr,
                       PHASES: tl.constexpr):  # fmt: skip
        pid = tl.program_id(0)
        tiles_m = tl.cdiv(M, BM)
        tiles_n = tl.cdiv(N, BN)
        tiles = tiles_m * tiles_n
        waves = tl.cdiv(tiles, PROGRAMS)
        # Without movers there is nobody else to push.
        moved = min(tiles, max(waves - DIRECT, 0) * PROGRAMS) if MOVERS else 0
        # In phases (the interpreter) the peers' parts come after the product: nothing is kept.
        kept = max(moved, tiles - PROGRAMS) if KEEP and PHASES == 7 else tiles
        early = min(kept, EARLY * PROGRAMS)

        # Every CTA reads the epoch before it counts itself done; the last one advances it.
        epoch = tl.load(control) + 1
        error = control + 2
        live = tl.load(error) == 0
        parity = epoch & 1
        part_bytes = part.to(tl.int64) * ITEM
        here = tl.load(bases + rank)
        flags = pointer(here, flag_offset, control)
        first_slot = pointer(here, slots + parity * WORLD * part_bytes, y_ptr)
        own = first_slot + rank * part.to(tl.int64)

        if pid < PROGRAMS:
            if PHASES & 1:
                inner = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
                for tile in tl.range(pid, tiles, PROGRAMS):
                    bm, bn = origin(tile, tiles_m, tiles_n, GROUP)
                    acc = _accumulate(x_desc, w_desc, bm * BM, bn * BN, 0, tl.cdiv(K, BK), BM, BN,
                                      BK, 0)  # fmt: skip
                    rows = bm * BM + tl.arange(0, BM)
                    cols = bn * BN + tl.arange(0, BN)
                    y = scaled(acc, rows, cols, xs_ptr, ws_ptr, M, N, X_ROWS, W_ROWS)
                    y = y.to(y_ptr.dtype.element_ty)
                    at = tile * (BM * BN) + inner
                    if tile < kept:
                        tl.store(own + at, y)
                        tl.debug_barrier()
                        own_flag = flags + rank * marks + tile
                        tl.atomic_xchg(own_flag, epoch, sem="release", scope="gpu")
                    if (tile >= moved) & live:
                        for step in tl.static_range(1, WORLD):
                            base = tl.load(bases + (rank + step) % WORLD)
                            to = slots + (parity * WORLD + rank) * part_bytes
                            tl.store(pointer(base, to, y_ptr) + at, y)
                        tl.debug_barrier()
                        _announce(tile, epoch, bases, flag_offset, control, rank, marks, WORLD)
                    if KEEP and PHASES == 7 and tile >= kept:
                        _add_to(y, at, tile, live, y_ptr, first_slot, part.to(tl.int64), flags,
                                marks, epoch, error, limit, M, N, rank, bm, bn, WORLD, BM,
                                BN)  # fmt: skip
        elif MOVERS:
            mover = pid - PROGRAMS
            batches = tl.cdiv(max(moved, early), MOVERS * BATCH)
            for b in tl.range(0, batches + LAG, num_stages=1):
                if PHASES & 2:
                    for i in tl.range(0, BATCH, num_stages=1):
                        tile = (b * BATCH + i) * MOVERS + mover
                        if (tile < moved) & live:
                            _push(tile, own, flags, slots, epoch, parity, bases, y_ptr, error,
                                  limit, rank, part_bytes, marks, WORLD, BM * BN,
                                  COPIES)  # fmt: skip
                    tl.debug_barrier()
                    for i in tl.range(0, BATCH, num_stages=1):
                        tile = (b * BATCH + i) * MOVERS + mover
                        if (tile < moved) & live:
                            _announce(tile, epoch, bases, flag_offset, control, rank, marks, WORLD)
                if PHASES & 4:
                    for i in tl.range(0, BATCH, num_stages=1):
                        tile = ((b - LAG) * BATCH + i) * MOVERS + mover
                        if (tile >= 0) & (tile < early):
                            for piece in tl.range(0, SPLIT, num_stages=1):
                                _add(tile, piece, live, y_ptr, first_slot, part.to(tl.int64), flags,
                                     marks, epoch, error, limit, M, N, tiles_m, tiles_n, WORLD, BM,
                                     BN, SPLIT, GROUP)  # fmt: skip

        if PHASES & 4:
            late = kept - early
            for unit in tl.range(pid, late * SPLIT, PROGRAMS + MOVERS, num_stages=1):
                # Piece after piece: a CTA's first unit is of the tile that it has just computed.
                _add(early + unit % late, unit // late, live, y_ptr, first_slot, part.to(tl.int64),
                     flags, marks, epoch, error, limit, M, N, tiles_m, tiles_n, WORLD, BM, BN,
                     SPLIT, GROUP)  # fmt: skip
            tl.debug_barrier()
            done = tl.atomic_add(control + 1, 1, sem="acq_rel", scope="gpu")
            if done == PROGRAMS + MOVERS - 1:
                tl.store(control + 1, 0)
                tl.store(control, epoch)


def launch(
    space: Space,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    phases: int = GEMM | PUSH | REDUCE,
    y: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [M, N], fresh. ``phases`` and ``y``: for a test whose ranks take turns in one process."""
    c: Movers = space.config
    at = space.layout
    (m, k), n = x.shape, w.shape[0]
    assert (m, n) == (at.m, at.n), "another workspace's shape"
    y = x.new_empty((m, n), dtype=at.dtype) if y is None else y
    with torch.cuda.device_of(x):
        _movers_kernel[(c.programs + c.movers,)](
            TensorDescriptor.from_tensor(x, [c.bm, c.bk]),
            TensorDescriptor.from_tensor(w, [c.bn, c.bk]),
            y,
            x_scale.contiguous(),
            w_scale.contiguous(),
            space.bases,
            space.control,
            m,
            n,
            k,
            space.rank,
            at.flags,
            at.slots,
            at.part,
            at.marks,
            space.limit,
            X_ROWS=x_scale.numel() > 1,
            W_ROWS=w_scale.numel() > 1,
            WORLD=at.world,
            ITEM=at.dtype.itemsize,
            BM=c.bm,
            BN=c.bn,
            BK=c.bk,
            GROUP=c.group,
            PROGRAMS=c.programs,
            MOVERS=c.movers,
            BATCH=c.batch,
            DIRECT=c.direct,
            EARLY=c.early,
            LAG=c.lag,
            SPLIT=c.split,
            COPIES=c.copies,
            KEEP=c.keep,
            PHASES=phases,
            num_warps=c.warps,
            num_stages=c.stages,
        )
    return y
