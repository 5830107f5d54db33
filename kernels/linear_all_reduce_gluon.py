"""Linear + all-reduce in one warp-specialized Gluon kernel: tiles leave while the next one runs.

    y = round(sum over ranks r, in their order, of part_r),  part_r = round(xs * ws * (x @ w.T))

Shapes: x [M, K] and w [N, K] FP8 of this rank, y [M, N] bfloat16 or float16. A *unit* is 64 rows
by 128 columns. Parts lie in panels of 128 columns, one after the other; a panel is one run of
memory, [M up to a multiple of 256, 128]; flags are one a unit.

Each CTA: a producer warp loads K blocks into a ring of shared memory by TMA; two consumer
warpgroups multiply (wgmma), round, and write their part to a staging buffer of their own; a storer
warp for each of them sends the buffer by TMA to this rank's slot and straight to every peer's over
NVLink, waits until that is complete, and raises the flags. Consumers never wait for NVLink: they
wait for the staging buffer one tile later.

First come *tall* tiles, 256 x 128, a warpgroup 128 rows: they need 48 bytes of the L2 cache a
cycle at full speed. The last ``short`` column blocks are cut into tiles of 128 x 128, a warpgroup
64 rows. At M, N = 757, 7680 on 132 multiprocessors: 132 tall tiles, then 96 short ones. Only their
push is exposed, 9 us at 350 GB/s. The CTA that computed a last short tile adds its peers' parts to
it as they come, from its staging buffer; the CTAs without one add all others meanwhile.

Nobody waits for a peer before its own products and pushes are under way: no order of CTAs or ranks
can deadlock. Order: a bulk store complete (wait_group, not .read), a proxy fence, a barrier of the
warp, one thread's release; the reader's acquire, a barrier, its loads from L2 (.cg).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rtc.kernels.linear_all_reduce_space import Space

try:
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if not hasattr(gl.shared_memory_descriptor, "_reinterpret"):
        raise ImportError("a Gluon that is not Triton 3.6's: names changed since")
except ImportError:  # the CPU builds of torch come without triton, other tritons with other Gluons
    triton = None

if triton is not None:
    from rtc.kernels.linear_all_reduce_gluon_roles import (
        add,
        deferred,
        duty,
        plan,
        producer,
        short,
        storer,
        tall,
    )
    from rtc.kernels.linear_all_reduce_space import pointer

__all__ = ["Specialized", "launch", "refusal"]

UNIT, WIDTH, MOST = 64, 128, 4
RUNTIME = ["M", "rank", "marks", "limit", "short_columns"]  # one binary for all ranks and shapes


@dataclass(frozen=True)
class Specialized:
    """Grid, where tall tiles end, and K block. The same on all ranks."""

    programs: int = 132
    short: int = 16  # column blocks in short tiles
    bk: int = 128

    def __post_init__(self) -> None:
        if self.bk not in (64, 128):
            raise ValueError(f"bk = {self.bk} must be 64 or 128")
        if self.programs < 1 or self.short < 0:
            raise ValueError("programs must be positive, short at least 0")

    @property
    def units(self) -> int:
        """Of the ring, 160 KB: three stages of tall tiles or five of short ones, at bk = 128."""
        return 20 * 128 // self.bk

    @property
    def table(self) -> tuple[int, ...]:
        """The kernel reads no table."""
        return ()

    def marks(self, m: int, n: int) -> int:
        """Flags a rank: one a unit, whole panels."""
        return -(-m // 256) * 4 * -(-n // WIDTH)

    @classmethod
    def fitting(cls, m: int, n: int, programs: int) -> Specialized:
        """Of the shortest schedules, the one with most tall tiles."""

        def length(short: int) -> int:
            talls = (-(-n // WIDTH) - short) * -(-m // 256)
            shorts = short * -(-m // 128)
            (whole, rest), (each, more) = divmod(talls, programs), divmod(shorts, programs)
            # CTAs without a last tall tile come first in the turn of the short ones.
            last = max(more > 0, 2 + (more > programs - rest) if rest else 0)
            return 2 * whole + each + last

        best = min(range(-(-n // WIDTH) + 1), key=lambda short: (length(short), short))
        return cls(programs, best)


def refusal(config: Specialized, world: int, properties: Any) -> str | None:
    """Why the kernel does not run here, or None."""
    if triton is None:
        return "this triton has no Gluon, or another one"
    if properties.major != 9:
        return f"compute capability {properties.major}.{properties.minor} has no wgmma"
    if world > MOST:
        return f"{world} ranks are more than the {MOST} that this kernel stores to"
    if config.programs > properties.multi_processor_count:
        return (
            f"{config.programs} CTAs do not run at once on {properties.multi_processor_count} SMs"
        )
    return None


if triton is not None:

    @gluon.jit
    def _factors(scales, start, end, MANY: gl.constexpr, COUNT: gl.constexpr,
                 layout: gl.constexpr):  # fmt: skip
        """COUNT scales from ``start`` on, or the only one as often."""
        at = start + gl.arange(0, COUNT, layout)
        return gl.load(scales + (at if MANY else at * 0), mask=at < end, other=0.0)

    @gluon.jit
    def _consumer(W: gl.constexpr, units, blocks, full, empty, short_full, short_empty, staging,
                  staged, drained, y_ptr, xs_ptr, ws_ptr, bases, control, M, N, K, rank,
                  flag_offset, slots, part, marks, limit, epoch, live, X_ROWS: gl.constexpr,
                  W_ROWS: gl.constexpr, short_columns, PROGRAMS: gl.constexpr, WORLD: gl.constexpr,
                  ITEM: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
                  SHORT_STAGES: gl.constexpr):  # fmt: skip
        pid = gl.program_id(0)
        talls, shorts, tall_columns, first = plan(pid, M, N, short_columns, PROGRAMS)
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
        down: gl.constexpr = gl.SliceLayout(1, layout)
        across: gl.constexpr = gl.SliceLayout(0, layout)
        panel = (M + 255) // 256 * 256
        error = control + 2
        here = gl.load(bases + rank)
        flags = pointer(here, flag_offset, control)
        part_bytes = part.to(gl.int64) * ITEM
        slot_base = pointer(here, slots + (epoch & 1) * WORLD * part_bytes, y_ptr)
        steps = (K + BK - 1) // BK
        i = 0
        turn = 0
        for tile in range(pid, talls, PROGRAMS):
            m0, column = tall(tile, M)
            m0 += W * 128
            acc0 = gl.zeros([64, 128], gl.float32, layout)
            acc1 = gl.zeros([64, 128], gl.float32, layout)
            for k in range(steps):
                s = i % STAGES
                mbarrier.wait(full.index(s), i // STAGES & 1)
                b = blocks.index(s * 3 + 2).permute((1, 0))
                acc0 = warpgroup_mma(units.index(s * 6 + 2 * W), b, acc0, is_async=True)
                acc1 = warpgroup_mma(units.index(s * 6 + 2 * W + 1), b, acc1, is_async=True)
                acc0, acc1 = warpgroup_mma_wait(2, deps=(acc0, acc1))
                # The step before has been read by all four warps.
                gl.thread_barrier()
                mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=k > 0)
                i += 1
            # While the last products run.
            ws = _factors(ws_ptr, column * 128, N, W_ROWS, 128, across)
            xs0 = _factors(xs_ptr, m0, M, X_ROWS, 64, down)
            xs1 = _factors(xs_ptr, m0 + 64, M, X_ROWS, 64, down)
            acc0, acc1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
            gl.thread_barrier()
            mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1)
            mbarrier.wait(drained, (turn & 1) ^ 1)
            staging.index(0).store((acc0 * xs0[:, None] * ws[None, :]).to(staging.dtype))
            staging.index(1).store((acc1 * xs1[:, None] * ws[None, :]).to(staging.dtype))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(staged, count=1)
            turn += 1
        i = 0
        for tile in range(first, shorts, PROGRAMS):
            m0, column = short(tile, M, tall_columns)
            m0 += W * 64
            acc = gl.zeros([64, 128], gl.float32, layout)
            for k in range(steps):
                s = i % SHORT_STAGES
                mbarrier.wait(short_full.index(s), i // SHORT_STAGES & 1)
                b = blocks.index(s * 2 + 1).permute((1, 0))
                acc = warpgroup_mma(units.index(s * 4 + W), b, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                gl.thread_barrier()
                mbarrier.arrive(
                    short_empty.index((i + SHORT_STAGES - 1) % SHORT_STAGES), count=1, pred=k > 0
                )
                i += 1
            ws = _factors(ws_ptr, column * 128, N, W_ROWS, 128, across)
            xs = _factors(xs_ptr, m0, M, X_ROWS, 64, down)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            gl.thread_barrier()
            mbarrier.arrive(short_empty.index((i + SHORT_STAGES - 1) % SHORT_STAGES), count=1)
            mbarrier.wait(drained, (turn & 1) ^ 1)
            staging.index(0).store((acc * xs[:, None] * ws[None, :]).to(staging.dtype))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(staged, count=1)
            turn += 1
            if tile >= shorts - PROGRAMS:
                add(staging.index(0), True, m0, column, live, y_ptr, slot_base, part, marks,
                     panel, epoch, error, limit, M, N, rank, flags, WORLD)  # fmt: skip
        # The others: by the CTAs that have no short tile, if there are any.
        helper, helpers, units = duty(first, talls, shorts, PROGRAMS)
        if helper >= 0:
            for unit in range(helper * 2 + W, units, helpers * 2):
                m0, column = deferred(unit, M, talls, tall_columns)
                if m0 < M:
                    add(staging.index(0), False, m0, column, live, y_ptr, slot_base, part,
                         marks, panel, epoch, error, limit, M, N, rank, flags,
                         WORLD)  # fmt: skip

    @gluon.jit(do_not_specialize=RUNTIME)
    def _specialized_kernel(x_desc, w_desc, own_desc, peer1, peer2, peer3, y_ptr, xs_ptr, ws_ptr,
                            bases, control, M, N, K, rank, flag_offset, slots, part, marks, limit,
                            X_ROWS: gl.constexpr, W_ROWS: gl.constexpr, short_columns,
                            PROGRAMS: gl.constexpr, WORLD: gl.constexpr, ITEM: gl.constexpr,
                            BK: gl.constexpr, UNITS: gl.constexpr):  # fmt: skip
        STAGES: gl.constexpr = UNITS // 6
        SHORT_STAGES: gl.constexpr = UNITS // 4
        units = gl.allocate_shared_memory(x_desc.dtype, [UNITS, 64, BK], x_desc.layout)
        blocks = units._reinterpret(w_desc.dtype, [UNITS // 2, 128, BK], w_desc.layout)
        staging0 = gl.allocate_shared_memory(own_desc.dtype, [2, 64, 128], own_desc.layout)
        staging1 = gl.allocate_shared_memory(own_desc.dtype, [2, 64, 128], own_desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        short_full = gl.allocate_shared_memory(gl.int64, [SHORT_STAGES, 1],
                                               mbarrier.MBarrierLayout())  # fmt: skip
        short_empty = gl.allocate_shared_memory(gl.int64, [SHORT_STAGES, 1],
                                                mbarrier.MBarrierLayout())  # fmt: skip
        staged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        drained = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(STAGES):
            mbarrier.init(full.index(s), count=1)
            mbarrier.init(empty.index(s), count=2)
        for s in gl.static_range(SHORT_STAGES):
            mbarrier.init(short_full.index(s), count=1)
            mbarrier.init(short_empty.index(s), count=2)
        for w in gl.static_range(2):
            mbarrier.init(staged.index(w), count=1)
            mbarrier.init(drained.index(w), count=1)
        fence_async_shared()
        # Every CTA reads the epoch before it counts itself done; the last one advances it.
        epoch = gl.load(control) + 1
        live = gl.load(control + 2) == 0
        gl.warp_specialize(
            [
                (_consumer, (0, units, blocks, full, empty, short_full, short_empty, staging0,
                             staged.index(0), drained.index(0), y_ptr, xs_ptr, ws_ptr, bases,
                             control, M, N, K, rank, flag_offset, slots, part, marks, limit, epoch,
                             live, X_ROWS, W_ROWS, short_columns, PROGRAMS, WORLD, ITEM, BK, STAGES,
                             SHORT_STAGES)),
                (_consumer, (1, units, blocks, full, empty, short_full, short_empty, staging1,
                             staged.index(1), drained.index(1), y_ptr, xs_ptr, ws_ptr, bases,
                             control, M, N, K, rank, flag_offset, slots, part, marks, limit, epoch,
                             live, X_ROWS, W_ROWS, short_columns, PROGRAMS, WORLD, ITEM, BK, STAGES,
                             SHORT_STAGES)),
                (producer, (x_desc, w_desc, units, blocks, full, empty, short_full, short_empty, M,
                            N, K, short_columns, PROGRAMS, BK, STAGES, SHORT_STAGES)),
                (storer, (0, own_desc, peer1, peer2, peer3, staging0, staged.index(0),
                           drained.index(0), bases, control, M, N, rank, flag_offset, part, marks,
                           epoch, live, short_columns, PROGRAMS, WORLD)),
                (storer, (1, own_desc, peer1, peer2, peer3, staging1, staged.index(1),
                           drained.index(1), bases, control, M, N, rank, flag_offset, part, marks,
                           epoch, live, short_columns, PROGRAMS, WORLD)),
            ],
            [4, 1, 1, 1],
            [216, 48, 48, 48],
        )  # fmt: skip
        gl.thread_barrier()
        done = gl.atomic_add(control + 1, 1, sem="acq_rel", scope="gpu")
        if done == PROGRAMS - 1:
            gl.store(control + 1, 0)
            gl.store(control, epoch)


def rows_of(space: Space, rank: int) -> torch.Tensor:
    """All slots of a rank's buffer, as rows of panels [2 world part / 128, 128]."""
    at = space.layout
    size = 2 * at.world * at.part * at.dtype.itemsize
    return space.peers[rank][at.slots : at.slots + size].view(at.dtype).view(-1, WIDTH)


def launch(
    space: Space,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
) -> torch.Tensor:
    """y [M, N], fresh."""
    c: Specialized = space.config
    at = space.layout
    (m, k), n = x.shape, w.shape[0]
    assert (m, n) == (at.m, at.n), "another workspace's shape"
    y = x.new_empty((m, n), dtype=at.dtype)
    ring = gl.NVMMASharedLayout(swizzle_byte_width=c.bk, element_bitwidth=8)
    staging = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    slots = []
    for step in range(MOST):
        if step < at.world:
            rows = rows_of(space, (space.rank + step) % at.world)
            slots.append(TensorDescriptor.from_tensor(rows, [UNIT, WIDTH], staging))
        else:
            slots.append(None)
    with torch.cuda.device_of(x):
        _specialized_kernel[(c.programs,)](
            TensorDescriptor.from_tensor(x, [UNIT, c.bk], ring),
            TensorDescriptor.from_tensor(w, [WIDTH, c.bk], ring),
            *slots,
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
            short_columns=c.short,
            PROGRAMS=c.programs,
            WORLD=at.world,
            ITEM=at.dtype.itemsize,
            BK=c.bk,
            UNITS=c.units,
            num_warps=4,
        )
    return y
