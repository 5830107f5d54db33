"""Schedule and helpers of ``kernels/linear_all_reduce_gluon.py``: who loads, stores, and adds.

Shapes and terms as there: a unit is 64 rows by 128 columns, a panel 128 columns of a part, [M up
to a multiple of 256, 128]; a tall tile is 256 rows high, a short one 128. Warpgroup W of two takes
rows 128 W of a tall tile on, 64 W of a short one.
"""

from __future__ import annotations

try:
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
except ImportError:  # the CPU builds of torch come without triton, old tritons without Gluon
    triton = None

if triton is not None:
    from rtc.kernels.linear_all_reduce_space import arrived, pointer

__all__: list[str] = []

if triton is not None:

    @gluon.jit
    def tall(tile, M):
        """First row and column block."""
        high = (M + 255) // 256
        return tile % high * 256, tile // high

    @gluon.jit
    def short(tile, M, tall_columns):
        high = (M + 127) // 128
        return tile % high * 128, tall_columns + tile // high

    @gluon.jit
    def plan(pid, M, N, short_columns, PROGRAMS: gl.constexpr):
        """Tall tiles, short tiles, the first column of those, this CTA's first short tile.

        A CTA takes tall tiles pid, pid + PROGRAMS, ... and short tiles first, first + PROGRAMS, ...
        """
        columns = (N + 127) // 128
        tall_columns = columns - min(columns, short_columns)
        talls = tall_columns * ((M + 255) // 256)
        shorts = (columns - tall_columns) * ((M + 127) // 128)
        return talls, shorts, tall_columns, (pid + PROGRAMS - talls % PROGRAMS) % PROGRAMS

    @gluon.jit
    def duty(first, talls, shorts, PROGRAMS: gl.constexpr):
        """Who adds units that are not kept: this CTA's number (negative: none), of how many, units.

        Kept are the last short tile of each CTA that has one. The CTAs without one add the rest
        while those run; if all have one, all add, after it.
        """
        early = max(shorts - PROGRAMS, 0)
        if shorts < PROGRAMS:
            helper = first - shorts
            helpers = PROGRAMS - shorts
        else:
            helper = first
            helpers = PROGRAMS
        return helper, helpers, talls * 4 + early * 2

    @gluon.jit
    def deferred(unit, M, talls, tall_columns):
        """First row and column block of a unit that others than its own CTA add."""
        if unit < talls * 4:
            m0, column = tall(unit // 4, M)
            m0 += unit % 4 * 64
        else:
            m0, column = short((unit - talls * 4) // 2, M, tall_columns)
            m0 += unit % 2 * 64
        return m0, column

    @gluon.jit
    def _load(x_desc, w_desc, units, blocks, full, empty, i, m0, column, k, HIGH: gl.constexpr,
              STAGES: gl.constexpr, BK: gl.constexpr):  # fmt: skip
        """K block ``k`` of a tile of HIGH units into step ``i`` of a ring of HIGH + 2 units each.

        ``blocks``: the same memory in pairs of units, for the columns.
        """
        s = i % STAGES
        mbarrier.wait(empty.index(s), (i // STAGES & 1) ^ 1)
        bar = full.index(s)
        mbarrier.expect(bar, (HIGH * 64 + 128) * BK)
        columns = blocks.index((s * (HIGH + 2) + HIGH) // 2)
        tma.async_copy_global_to_shared(w_desc, [column * 128, k], bar, columns)
        for u in gl.static_range(HIGH):
            rows = units.index(s * (HIGH + 2) + u)
            tma.async_copy_global_to_shared(x_desc, [m0 + u * 64, k], bar, rows)

    @gluon.jit
    def producer(x_desc, w_desc, units, blocks, full, empty, short_full, short_empty, M, N, K,
                 short_columns, PROGRAMS: gl.constexpr, BK: gl.constexpr,
                 STAGES: gl.constexpr, SHORT_STAGES: gl.constexpr):  # fmt: skip
        """Both rings lie in the same memory: the first is emptied before the second is filled."""
        pid = gl.program_id(0)
        talls, shorts, tall_columns, first = plan(pid, M, N, short_columns, PROGRAMS)
        i = 0
        for tile in range(pid, talls, PROGRAMS):
            m0, column = tall(tile, M)
            for k in range(0, K, BK):
                _load(x_desc, w_desc, units, blocks, full, empty, i, m0, column, k, 4, STAGES,
                      BK)  # fmt: skip
                i += 1
        for _ in gl.static_range(STAGES):
            mbarrier.wait(empty.index(i % STAGES), (i // STAGES & 1) ^ 1)
            i += 1
        i = 0
        for tile in range(first, shorts, PROGRAMS):
            m0, column = short(tile, M, tall_columns)
            for k in range(0, K, BK):
                _load(x_desc, w_desc, units, blocks, short_full, short_empty, i, m0, column, k, 2,
                      SHORT_STAGES, BK)  # fmt: skip
                i += 1

    @gluon.jit
    def _send(staging, m0, column, own_desc, peer1, peer2, peer3, panel, slot_row, keep, live):
        """Start copies of one unit to the slots of this rank (unless kept) and of all peers."""
        at = slot_row + column * panel + m0
        if not keep:
            tma.async_copy_shared_to_global(own_desc, [at, 0], staging)
        if live:
            if peer1 is not None:
                tma.async_copy_shared_to_global(peer1, [at, 0], staging)
            if peer2 is not None:
                tma.async_copy_shared_to_global(peer2, [at, 0], staging)
            if peer3 is not None:
                tma.async_copy_shared_to_global(peer3, [at, 0], staging)

    @gluon.jit
    def _complete():
        """All bulk stores of this thread have arrived where they went, for generic accesses too."""
        gl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async; mov.u32 $0, 0;", "=r", [],
            dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip
        gl.thread_barrier()

    @gluon.jit
    def _announce(m0, column, epoch, bases, flag_offset, control, rank, marks, panel, keep, live,
                  WORLD: gl.constexpr):  # fmt: skip
        flag = rank * marks + column * (panel // 64) + m0 // 64
        if live:
            for step in gl.static_range(1, WORLD):
                base = gl.load(bases + (rank + step) % WORLD)
                there = pointer(base, flag_offset, control) + flag
                gl.atomic_xchg(there, epoch, sem="release", scope="sys")
        if not keep:
            here = pointer(gl.load(bases + rank), flag_offset, control) + flag
            gl.atomic_xchg(here, epoch, sem="release", scope="gpu")

    @gluon.jit
    def storer(W: gl.constexpr, own_desc, peer1, peer2, peer3, staging, staged, drained, bases,
                control, M, N, rank, flag_offset, part, marks, epoch, live, short_columns,
                PROGRAMS: gl.constexpr, WORLD: gl.constexpr):  # fmt: skip
        pid = gl.program_id(0)
        talls, shorts, tall_columns, first = plan(pid, M, N, short_columns, PROGRAMS)
        panel = (M + 255) // 256 * 256
        slot_row = ((epoch & 1) * WORLD + rank) * (part // 128)
        turn = 0
        for tile in range(pid, talls, PROGRAMS):
            m0, column = tall(tile, M)
            mbarrier.wait(staged, turn & 1)
            for u in gl.static_range(2):
                _send(staging.index(u), m0 + W * 128 + u * 64, column, own_desc, peer1, peer2,
                      peer3, panel, slot_row, False, live)  # fmt: skip
            tma.store_wait(0)
            mbarrier.arrive(drained, count=1)
            _complete()
            for u in gl.static_range(2):
                _announce(m0 + W * 128 + u * 64, column, epoch, bases, flag_offset, control, rank,
                          marks, panel, False, live, WORLD)  # fmt: skip
            turn += 1
        for tile in range(first, shorts, PROGRAMS):
            m0, column = short(tile, M, tall_columns)
            keep = tile >= shorts - PROGRAMS
            mbarrier.wait(staged, turn & 1)
            _send(staging.index(0), m0 + W * 64, column, own_desc, peer1, peer2, peer3, panel,
                  slot_row, keep, live)  # fmt: skip
            tma.store_wait(0)
            mbarrier.arrive(drained, count=1)
            _complete()
            _announce(m0 + W * 64, column, epoch, bases, flag_offset, control, rank, marks, panel,
                      keep, live, WORLD)  # fmt: skip
            turn += 1

    @gluon.jit
    def add(buffer, kept: gl.constexpr, m0, column, live, y_ptr, slot_base, part, marks,
             panel, epoch, error, limit, M, N, rank, flags, WORLD: gl.constexpr):  # fmt: skip
        """y of one unit: all ranks' parts, in their order; this rank's from ``buffer`` if kept."""
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
        cols = gl.arange(0, 128, gl.SliceLayout(0, layout))
        flag = column * (panel // 64) + m0 // 64
        at = (column * panel + m0 + rows)[:, None] * 128 + cols[None, :]
        total = gl.zeros([64, 128], gl.float32, layout)
        good = live
        for r in gl.static_range(WORLD):
            if kept and r == rank:
                total += buffer.load(layout).to(gl.float32)
            else:
                good = arrived(flags + r * marks + flag, epoch, error, limit, "sys") & good
                slot = slot_base + r * part.to(gl.int64)
                total += gl.load(slot + at, cache_modifier=".cg").to(gl.float32)
        total = gl.where(good, total, float("nan"))
        rows += m0
        cols += column * 128
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        there = y_ptr + rows.to(gl.int64)[:, None] * N + cols[None, :]
        gl.store(there, total.to(y_ptr.dtype.element_ty), mask=inside)
