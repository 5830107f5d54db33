"""The workspace of ``kernels/linear_all_reduce.py``: memory that all ranks of a group can write.

One buffer a rank, of the same layout everywhere, allocated and exchanged once, before anything is
compiled or captured; nothing is allocated per call. From its first byte:

    control  int32 [CONTROL]          epoch, CTAs done, error, uses of either slot (of this rank)
    flags    int32 [world, marks]     epoch up to which rank r's part i has arrived here
    acks     int32 [world, 2]         use of slot s up to which rank r has read what came from here
    scales   float32 [2, world, M+N]  row and column scales of parts that come unscaled
    slots    dtype [2, world, part]   rank r's partial result; own parts lie here as well

Epochs only grow (they wrap after 2^31 calls, and are compared by the sign of their difference), are
kept in device memory and advanced by the kernels themselves: a CUDA graph replays without a reset.
Two slots a rank: a peer may write the next call's parts while this one's are still read, but not
the call's after that, because that needs flags which this rank raises only after it has read.
A wait is bounded: it gives up after ``limit`` polls and sets the error word. The result is NaN
then, and so are all later ones, on all ranks: no rank ever adds parts of different calls. ``check``
raises on it.

Use one stream at a time for one workspace, and the same order of calls on all ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU builds of torch come without it
    triton = None

__all__ = ["LIMIT", "OTHERS", "Layout", "Space"]

CONTROL = 64
EPOCH, DONE, ERROR, USES = 0, 1, 2, 4
OTHERS = 2  # in ERROR: other values than the other ranks'; 1: a wait in vain
LIMIT = 1 << 26  # polls of about a microsecond each: in first calls ranks are many seconds apart
PAD = 256  # rows and columns of a part are whole multiples: the largest tile


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Layout:
    """Byte offsets from the start of each rank's buffer."""

    world: int
    m: int
    n: int
    marks: int  # flags a rank
    dtype: torch.dtype

    @property
    def part(self) -> int:
        """Elements of a partial result, whole tiles."""
        return _up(self.m, PAD) * _up(self.n, PAD)

    @property
    def flags(self) -> int:
        return CONTROL * 4

    @property
    def acks(self) -> int:
        return self.flags + _up(self.world * self.marks * 4, 256)

    @property
    def scales(self) -> int:
        return self.acks + _up(self.world * 2 * 4, 256)

    @property
    def scale_stride(self) -> int:
        """float32 elements from one rank's scales to the next's."""
        return _up(self.m, 64) + _up(self.n, 64)

    @property
    def slots(self) -> int:
        return _up(self.scales + 2 * self.world * self.scale_stride * 4, 1024)

    @property
    def bytes(self) -> int:
        return self.slots + 2 * self.world * self.part * self.dtype.itemsize


class Space:
    """One rank's side of a workspace. ``peers[r]`` is rank r's buffer, uint8, seen from here."""

    def __init__(
        self,
        layout: Any,  # a Layout, or what the design has instead
        rank: int,
        peers: list[torch.Tensor],
        config: Any,
        handle: Any = None,
    ) -> None:
        self.layout, self.rank, self.peers, self.config = layout, rank, peers, config
        self.handle = handle  # owns the peers' mappings
        self.buffer = peers[rank]
        device = self.buffer.device
        self.bases = torch.tensor([p.data_ptr() for p in peers], dtype=torch.int64, device=device)
        self.table = torch.tensor(config.table, dtype=torch.int32, device=device)
        self.control = self.buffer[: CONTROL * 4].view(torch.int32)
        self.limit = LIMIT
        self.one = torch.ones((), device=device)  # a scale for products that are scaled later
        self.side: torch.cuda.Stream | None = None
        self.calls = 0

    @classmethod
    def allocate(cls, group: Any, layout: Any, config: Any, device: torch.device) -> Space:
        """Collective over ``group``: the buffer, its exchange, and a barrier after both."""
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        if not getattr(config, "multicast", False):  # torch would set it up for every buffer
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        with torch.cuda.device(device):
            buffer = symmetric.empty(layout.bytes, dtype=torch.uint8, device=device)
            # Before the exchange: a peer's first flag must not be zeroed away.
            buffer.zero_()
            torch.cuda.synchronize(device)
            handle = symmetric.rendezvous(buffer, group)
            rank = dist.get_rank(group)
            peers = [
                handle.get_buffer(r, (layout.bytes,), torch.uint8) for r in range(layout.world)
            ]
            if peers[rank].data_ptr() != buffer.data_ptr():
                raise RuntimeError("symmetric memory: get_buffer is not at the tensor's own offset")
            peers[rank] = buffer
            space = cls(layout, rank, peers, config, handle)
            space.side = torch.cuda.Stream(device, priority=-1)
            torch.cuda.synchronize(device)
            dist.barrier(group)
        return space

    def slot(self, which: int, rank: int, on: int) -> torch.Tensor:
        """Rank ``rank``'s partial in slot ``which`` of rank ``on``'s buffer, flat."""
        at = self.layout
        size = at.part * at.dtype.itemsize
        start = at.slots + (which * at.world + rank) * size
        return self.peers[on][start : start + size].view(at.dtype)

    def check(self) -> None:
        """Raise if a peer's part did not come in time, or ranks differ. Waits for the device."""
        said = self.control[ERROR].item()
        if said == OTHERS:
            raise RuntimeError(
                f"linear_all_reduce: rank {self.rank} and another have different residuals or "
                "vectors of a norm; the results since then are NaN"
            )
        if said:
            raise RuntimeError(
                f"linear_all_reduce: rank {self.rank} or a peer of it waited in vain; the results "
                "since then are NaN. Did every rank make the same calls in the same order?"
            )


if triton is not None:

    @triton.jit
    def arrived(flag, want, error, limit, SCOPE: tl.constexpr):
        """Wait until ``flag`` has reached ``want``; False, and the error word set, if it does not.

        One thread polls; the barrier that hands its value to the others orders their reads too.
        """
        seen = tl.atomic_add(flag, 0, sem="acquire", scope=SCOPE)
        if seen - want < 0:
            # Wait in full only once: a peer that is gone would cost the limit for each tile. By an
            # atomic: one thread's value for all, where a load could part them at a barrier.
            broken = tl.atomic_add(error, 0, sem="relaxed", scope="gpu")
            polls = tl.where(broken != 0, limit, 0)
            while (seen - want < 0) & (polls < limit):
                seen = tl.atomic_add(flag, 0, sem="acquire", scope=SCOPE)
                polls += 1
            if seen - want < 0:
                tl.atomic_max(error, 1, sem="relaxed", scope="gpu")
        return seen - want >= 0

    @triton.jit
    def pointer(base, offset, like):
        """``base`` + ``offset`` bytes as a pointer of ``like``'s type, 16-byte aligned."""
        address = tl.multiple_of(base + offset, 16)
        return tl.multiple_of(address.to(like.dtype), 16)
