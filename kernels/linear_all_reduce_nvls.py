"""Linear + all-reduce with the sum in the switch (NVLink SHARP): one persistent Triton kernel.

    y = round(sum over ranks r of part_r),  part_r = round(xs * ws * (x @ w.T))

**Compiled to SASS for sm_90a, not run: the machines it was written on must not use multicast.**
Its twin, with plain loads and stores in the places of multimem's, ran in Triton's interpreter.

Shapes: x [M, K] and w [N, K] FP8 of this rank, y and parts [M, N]; a tile is [BM, BN], a piece a
SPLIT-th of it. Parts and sums are stored tile after tile, so that a piece is one run of memory.

Protocol. A rank's buffer holds its own part and, behind it, the sum. Tile t is owned by rank
t mod world.
1. CTAs 0 .. PROGRAMS - 1 compute tiles, store them to this rank's own part, and add one to the
   tile's count at its owner.
2. The owner waits until the count is world * epoch, reads each piece through the multicast address
   (multimem.ld_reduce: the switch fetches it from all ranks and answers with the sum), writes the
   answer through the multicast address (multimem.st: the switch writes it to all ranks), and raises
   the piece's flag on every rank. CTAs from PROGRAMS on do this for the first EARLY waves while the
   others compute; all CTAs do it for the rest.
3. Every rank waits for a piece's flag and copies it to y.
Steps 1 wait for nothing, steps 2 for steps 1, steps 3 for steps 2: no order of ranks can deadlock,
nor can one of CTAs, which all run at once. Waits are bounded (``Space``).

One part and one sum suffice, no slot is doubled: a rank ends a call only when it has seen the flags
of all pieces, so that all reads of its part are over, and it counts itself in the next call only
then, so that no owner writes a sum which is still being copied. A rank that has waited in vain
neither writes its part nor counts itself from its next call on.

Sums: one thread of one rank sums each element, and all ranks copy its bits: they get the same. But
the order of the addition, its precision (PTX promises float32 at least) and its last rounding are
the switch's: the bits may differ from other designs'. The twin adds in the order of ranks.

Bytes: each rank sends its part once and 1 / world of the sum; it receives the sum once and, as an
owner, 1 / world of it more: M N itemsize (1 + 1 / world) a direction, instead of (world - 1) times
M N itemsize: 1.3 instead of 2 at three ranks, 1.1 instead of 7 at eight. The copy to y is local.

Order: unicast and multicast addresses of one memory are aliases, in PTX's terms: an alias fence
lies on each way from an access by the one to an access by the other. Flags are always unicast.

Demands: compute capability 9.0 or more, all ranks on one NVSwitch fabric, a multicast object
(``handle.multicast_ptr`` of torch's symmetric memory), more than two ranks, bfloat16 or float16,
and consent: ``InSwitch(multicast=True)``. No table and no default chooses this design.

Source: own; the in-switch reduction is NVLink SHARP's (Klenk et al., ISCA 2020).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from rtc.kernels.linear_all_reduce_space import PAD, Layout, Space

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # the CPU builds of torch come without it
    triton = None

if triton is not None:
    from rtc.kernels.linear_all_reduce_space import arrived, pointer
    from rtc.kernels.linear_fp8_triton import _accumulate, origin, scaled

__all__ = ["InSwitch", "Pair", "launch", "refusal", "supported"]

GEMM, SUM, COPY = 1, 2, 4

# Where an operator has turned multicast off for a machine, a program's consent does not count.
VETOES = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(frozen=True)
class InSwitch:
    """Consent, tile and pipeline, who computes and who sums. The same on all ranks."""

    multicast: bool = False  # consent to NVLink multicast; without it the kernel does not start
    bm: int = 128
    bn: int = 128
    bk: int = 128
    warps: int = 4
    stages: int = 4
    group: int = 8  # row blocks that share a column block before the next column block
    programs: int = 120  # CTAs that compute
    summers: int = 12  # CTAs that sum; together at most one a multiprocessor
    early: int = 2  # first waves whose tiles the summers sum and copy
    split: int = 4  # pieces of a tile in which it is summed and copied

    def __post_init__(self) -> None:
        for name in ("bm", "bn", "bk", "warps", "split"):
            v = getattr(self, name)
            if v < 1 or v & (v - 1):
                raise ValueError(f"{name} = {v} must be a power of two")
        if max(self.bm, self.bn) > PAD:
            raise ValueError(f"tiles of at most {PAD} x {PAD}, not {self.bm} x {self.bn}")
        # A piece that two threads shared would be summed twice, and may be rounded in two ways.
        if self.bm // self.split * self.bn < 256 * self.warps:
            raise ValueError(f"split = {self.split}: pieces of less than 16 bytes a thread")
        if self.programs < 1 or min(self.summers, self.early) < 0:
            raise ValueError("programs must be positive; summers and early at least 0")
        if self.early and not self.summers:
            raise ValueError("early tiles are summed by summers: there are none")

    @property
    def table(self) -> tuple[int, ...]:
        """The kernel reads no table."""
        return ()

    def tiles(self, m: int, n: int) -> int:
        return -(-m // self.bm) * -(-n // self.bn)

    def marks(self, m: int, n: int) -> int:
        """Words: a count of parts a tile, then a flag a piece. Only one row of them is used."""
        return self.tiles(m, n) * (1 + self.split)


@dataclass(frozen=True)
class Pair(Layout):
    """``Layout`` with slots [2, part] instead of [2, world, part]: the own part, then the sum."""

    @property
    def bytes(self) -> int:
        return self.slots + 2 * self.part * self.dtype.itemsize


def refusal(config: InSwitch, world: int, properties: Any) -> str | None:
    """Why the kernel must not start here, or None; known before anything is allocated.

    properties: of the CUDA device, as torch gives them.
    """
    if not config.multicast:
        return "NVLink multicast is used only with consent: InSwitch(multicast=True)"
    for name, value in VETOES.items():
        if os.environ.get(name) == value:
            return f"NVLink multicast is turned off on this machine: {name}={value}"
    if triton is None:
        return "the in-switch sum needs triton"
    if properties.major < 9:
        return f"compute capability {properties.major}.{properties.minor} has no multimem"
    if world <= 2:
        return f"with {world} ranks a sum in the switch moves more bytes than one at the ranks"
    count = config.programs + config.summers
    if count > properties.multi_processor_count:
        return f"{count} CTAs do not run at once on {properties.multi_processor_count} SMs"
    return None


def supported(handle: Any, config: InSwitch, properties: Any) -> str | None:
    """Why the kernel must not start on an exchanged buffer, or None.

    handle: what torch's symmetric memory returned for the whole buffer; None for other memory.
    """
    if handle is None:
        return "the workspace is not torch's symmetric memory"
    why = refusal(config, handle.world_size, properties)
    if why:
        return why
    address = handle.multicast_ptr
    if not address:
        return "the workspace has no multicast address: no NVSwitch, or torch makes no use of it"
    return f"the multicast address {address:#x} is not a multiple of 16" if address % 16 else None


if triton is not None:
    # Triton's inline PTX is a function of values: each has one to take and one to give.
    @triton.jit
    def _fence(KIND: tl.constexpr, value):
        """A fence of every thread's own."""
        tl.inline_asm_elementwise("fence." + KIND + "; mov.u32 $0, $1;", "=r,r,~{memory}", [value],
                                  tl.int32, False, 1)  # fmt: skip

    @triton.jit
    def _load_sum(address, TYPE: tl.constexpr):
        """16 bytes at each multicast address, summed over the ranks: four registers of two."""
        WHAT: tl.constexpr = "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4." + TYPE
        return tl.inline_asm_elementwise(WHAT + " {$0, $1, $2, $3}, [$4];",
                                         "=r,=r,=r,=r,l,~{memory}", [address],
                                         (tl.uint32, tl.uint32, tl.uint32, tl.uint32), False,
                                         1)  # fmt: skip

    @triton.jit
    def _store_to_all(address, a, b, c, d, TYPE: tl.constexpr):
        """The same 16 bytes to each multicast address, on all ranks."""
        WHAT: tl.constexpr = "multimem.st.relaxed.sys.global.v4." + TYPE
        tl.inline_asm_elementwise(WHAT + " [$1], {$2, $3, $4, $5}; mov.u32 $0, $2;",
                                  "=r,l,r,r,r,r,~{memory}", [address, a, b, c, d], tl.uint32, False,
                                  1)  # fmt: skip

    @triton.jit
    def _sum_piece(tile, piece, live, multicast, bases, flag_offset, flag_like, slots, part_bytes,
                   like, rank, tiles, epoch, error, limit, WORLD: tl.constexpr, SIZE: tl.constexpr,
                   SPLIT: tl.constexpr, ITEM: tl.constexpr, SWITCH: tl.constexpr):  # fmt: skip
        """Step 2 for one piece of an owned tile."""
        RUN: tl.constexpr = SIZE // SPLIT
        TYPE: tl.constexpr = "bf16x2" if like.dtype.element_ty == tl.bfloat16 else "f16x2"
        count = pointer(tl.load(bases + rank), flag_offset, flag_like) + tile
        if arrived(count, epoch * WORLD, error, limit, "sys") & live:
            first = tile * SIZE + piece * RUN
            if SWITCH:
                _fence("proxy.alias", epoch)
                address = multicast + slots + first.to(tl.int64) * ITEM
                address += tl.arange(0, RUN * ITEM // 16).to(tl.int64) * 16
                a, b, c, d = _load_sum(address, TYPE)
                _store_to_all(address + part_bytes, a, b, c, d, TYPE)
                _fence("proxy.alias", epoch)
            else:
                at = first + tl.arange(0, RUN)
                total = tl.zeros((RUN,), tl.float32)
                for r in tl.static_range(WORLD):
                    there = pointer(tl.load(bases + r), slots, like)
                    total += tl.load(there + at, cache_modifier=".cg").to(tl.float32)
                for r in tl.static_range(WORLD):
                    there = pointer(tl.load(bases + r), slots + part_bytes, like)
                    tl.store(there + at, total.to(like.dtype.element_ty))
            # All threads' stores before the one thread's flags; one fence for all of them.
            tl.debug_barrier()
            if SWITCH:
                _fence("acq_rel.sys", epoch)
            for step in tl.static_range(1, WORLD + 1):
                base = tl.load(bases + (rank + step) % WORLD)
                flag = pointer(base, flag_offset, flag_like) + tiles + tile * SPLIT + piece
                tl.atomic_xchg(flag, epoch, sem="relaxed" if SWITCH else "release", scope="sys")

    @triton.jit
    def _copy_piece(tile, piece, live, y_ptr, total_ptr, sum_flags, epoch, error, limit, M, N,
                    tiles_m, tiles_n, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
                    GROUP: tl.constexpr, SWITCH: tl.constexpr):  # fmt: skip
        """Step 3 for one piece of any tile; NaN where its sum did not come."""
        HEIGHT: tl.constexpr = BM // SPLIT
        good = arrived(sum_flags + tile * SPLIT + piece, epoch, error, limit, "sys") & live
        if SWITCH:
            _fence("proxy.alias", epoch)
        rows = piece * HEIGHT + tl.arange(0, HEIGHT)
        cols = tl.arange(0, BN)
        at = tile * (BM * BN) + rows[:, None] * BN + cols[None, :]
        value = tl.load(total_ptr + at, cache_modifier=".cg").to(tl.float32)
        value = tl.where(good, value, float("nan"))
        bm, bn = origin(tile, tiles_m, tiles_n, GROUP)
        rows += bm * BM
        cols += bn * BN
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        there = y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(there, value.to(y_ptr.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["rank", "limit", "multicast"])  # one binary for all ranks
    def _in_switch_kernel(x_desc, w_desc, y_ptr, xs_ptr, ws_ptr, bases, control, multicast, M, N, K,
                          rank, flag_offset, slots, part, limit, X_ROWS: tl.constexpr,
                          W_ROWS: tl.constexpr, WORLD: tl.constexpr, ITEM: tl.constexpr,
                          BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                          GROUP: tl.constexpr, PROGRAMS: tl.constexpr, SUMMERS: tl.constexpr,
                          EARLY: tl.constexpr, SPLIT: tl.constexpr, SWITCH: tl.constexpr,
                          PHASES: tl.constexpr):  # fmt: skip
        pid = tl.program_id(0)
        tiles_m = tl.cdiv(M, BM)
        tiles_n = tl.cdiv(N, BN)
        tiles = tiles_m * tiles_n
        early = min(tiles, EARLY * PROGRAMS)
        # Tiles that this rank owns: rank, rank + WORLD, ...
        owned = tl.cdiv(max(tiles - rank, 0), WORLD)
        owned_early = tl.cdiv(max(early - rank, 0), WORLD)

        # Every CTA reads the epoch before it counts itself done; the last one advances it.
        epoch = tl.load(control) + 1
        error = control + 2
        live = tl.load(error) == 0
        part_bytes = part.to(tl.int64) * ITEM
        here = tl.load(bases + rank)
        own = pointer(here, slots, y_ptr)
        total_ptr = pointer(here, slots + part_bytes, y_ptr)
        sum_flags = pointer(here, flag_offset, control) + tiles

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
                    # A rank that gave up may have peers that still read its part.
                    if live:
                        tl.store(own + tile * (BM * BN) + inner, y.to(y_ptr.dtype.element_ty))
                        tl.debug_barrier()
                        base = tl.load(bases + tile % WORLD)
                        count = pointer(base, flag_offset, control) + tile
                        tl.atomic_add(count, 1, sem="release", scope="sys")
        elif SUMMERS:
            if PHASES & 2:
                for u in tl.range(pid - PROGRAMS, owned_early * SPLIT, SUMMERS, num_stages=1):
                    _sum_piece(u // SPLIT * WORLD + rank, u % SPLIT, live, multicast, bases,
                               flag_offset, control, slots, part_bytes, y_ptr, rank, tiles,
                               epoch, error, limit, WORLD, BM * BN, SPLIT, ITEM,
                               SWITCH)  # fmt: skip
            if PHASES & 4:
                for u in tl.range(pid - PROGRAMS, early * SPLIT, SUMMERS, num_stages=1):
                    _copy_piece(u // SPLIT, u % SPLIT, live, y_ptr, total_ptr, sum_flags, epoch,
                                error, limit, M, N, tiles_m, tiles_n, BM, BN, SPLIT, GROUP,
                                SWITCH)  # fmt: skip

        if PHASES & 2:
            late = (owned - owned_early) * SPLIT
            for u in tl.range(pid, late, PROGRAMS + SUMMERS, num_stages=1):
                _sum_piece((owned_early + u // SPLIT) * WORLD + rank, u % SPLIT, live, multicast,
                           bases, flag_offset, control, slots, part_bytes, y_ptr, rank, tiles,
                           epoch, error, limit, WORLD, BM * BN, SPLIT, ITEM,
                           SWITCH)  # fmt: skip
        if PHASES & 4:
            late = (tiles - early) * SPLIT
            for u in tl.range(pid, late, PROGRAMS + SUMMERS, num_stages=1):
                _copy_piece(early + u // SPLIT, u % SPLIT, live, y_ptr, total_ptr, sum_flags, epoch,
                            error, limit, M, N, tiles_m, tiles_n, BM, BN, SPLIT, GROUP,
                            SWITCH)  # fmt: skip
            tl.debug_barrier()
            done = tl.atomic_add(control + 1, 1, sem="acq_rel", scope="gpu")
            if done == PROGRAMS + SUMMERS - 1:
                tl.store(control + 1, 0)
                tl.store(control, epoch)


def _multicast(space: Space) -> int:
    """The multicast address of the workspace. Raises RuntimeError where it must not be used."""
    config, handle, buffer = space.config, space.handle, space.buffer
    properties = torch.cuda.get_device_properties(buffer.device) if buffer.is_cuda else None
    why = supported(handle, config, properties)
    if why is None and handle.buffer_ptrs[space.rank] != buffer.data_ptr():
        why = "the workspace does not start where its multicast address points to"
    if why:
        raise RuntimeError(f"linear_all_reduce: {why}")
    return handle.multicast_ptr


def launch(
    space: Space,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    phases: int = GEMM | SUM | COPY,
    y: torch.Tensor | None = None,
    twin: bool = False,
) -> torch.Tensor:
    """y [M, N], fresh. ``twin``: plain loads and stores between ranks instead of multicast.

    ``phases`` and ``y``: for a test whose ranks take turns in one process. Raises RuntimeError
    where ``supported`` gives a reason, unless ``twin``; nothing has been started then.
    """
    multicast = 0 if twin else _multicast(space)
    c, at = space.config, space.layout
    (m, k), n = x.shape, w.shape[0]
    assert (m, n) == (at.m, at.n), "another workspace's shape"
    assert isinstance(at, Pair), "another design's layout"
    assert at.dtype in (torch.bfloat16, torch.float16), "the switch is told to add one of these"
    y = x.new_empty((m, n), dtype=at.dtype) if y is None else y
    with torch.cuda.device_of(x):
        _in_switch_kernel[(c.programs + c.summers,)](
            TensorDescriptor.from_tensor(x, [c.bm, c.bk]),
            TensorDescriptor.from_tensor(w, [c.bn, c.bk]),
            y,
            x_scale.contiguous(),
            w_scale.contiguous(),
            space.bases,
            space.control,
            multicast,
            m,
            n,
            k,
            space.rank,
            at.flags,
            at.slots,
            at.part,
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
            SUMMERS=c.summers,
            EARLY=c.early,
            SPLIT=c.split,
            SWITCH=not twin,
            PHASES=phases,
            num_warps=c.warps,
            num_stages=c.stages,
        )
    return y
