"""How ``linear_all_reduce_rows.py`` runs and lays out its workspace: who finishes which rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rtc.kernels.linear_all_reduce_digests import DIGEST, VECTORS
from rtc.kernels.linear_all_reduce_space import CONTROL, _up
from rtc.kernels.modulate_quantize import INTERPRET

__all__ = ["WIDEST", "Rows", "RowsLayout", "own_rows", "refusal"]

WIDEST = 16384  # columns that a program holds


def own_rows(m: int, world: int, rank: int) -> range:
    """Rows that a rank finishes; the last ranks fewer, or none."""
    own = -(-m // world)
    return range(min(m, rank * own), min(m, (rank + 1) * own))


@dataclass(frozen=True)
class Rows:
    """Programs of the second kernel: all run at once. The same on all ranks."""

    warps: int = 16
    per_sm: int = 1
    multiprocessors: int = 132
    beside: bool = True  # this rank's own piece is computed beside the peers', not after them
    cooperative: bool = True  # the launch fails, rather than hangs, where not all run at once

    table = (0,)

    def __post_init__(self) -> None:
        if self.warps not in (1, 2, 4, 8, 16, 32) or not 1 <= self.per_sm <= 4:
            raise ValueError(f"warps are a power of two up to 32, per_sm is 1 to 4: {self}")
        if self.multiprocessors < 1:
            raise ValueError(f"no multiprocessors: {self}")
        if self.warps * self.per_sm > 64:
            raise ValueError(f"more than 64 warps of a multiprocessor: {self}")

    @property
    def programs(self) -> int:
        return self.per_sm * self.multiprocessors

    @property
    def registers(self) -> int | None:
        """What a thread may use for all programs to run at once; None: no limit."""
        limit = 65536 // (32 * self.warps * self.per_sm)
        return limit // 8 * 8 if limit < 255 else None

    def marks(self, m: int, n: int) -> int:
        """Flags a rank: one a program."""
        return self.programs


@dataclass(frozen=True)
class RowsLayout:
    """Byte offsets from the start of each rank's buffer."""

    world: int
    m: int
    n: int
    marks: int
    dtype: torch.dtype  # of parts and of new

    @property
    def own(self) -> int:
        """Rows a rank finishes; the last ranks fewer, or none."""
        return -(-self.m // self.world)

    @property
    def ready(self) -> int:
        """int32 [world]: rank r's part of that call, 8 * epoch + its kind, may be read."""
        return CONTROL * 4

    @property
    def flags(self) -> int:
        """int32 [world, marks]: the rows of rank r's program i are here."""
        return self.ready + _up(self.world * 4, 256)

    @property
    def scales(self) -> int:
        """float32 [world, M + N], from 64-element bounds."""
        return self.flags + _up(self.world * self.marks * 4, 256)

    @property
    def scale_stride(self) -> int:
        return _up(self.m, 64) + _up(self.n, 64)

    @property
    def digests(self) -> int:
        """float32 [world, VECTORS + own, DIGEST]: of rank r's vectors, and of its residual in this
        rank's rows."""
        return _up(self.scales + self.world * self.scale_stride * 4, 256)

    @property
    def digest_bytes(self) -> int:
        return (VECTORS + self.own) * DIGEST * 4

    @property
    def parts(self) -> int:
        """dtype [world, own, N]: rank r's part of this rank's rows."""
        return _up(self.digests + self.world * self.digest_bytes, 1024)

    @property
    def part_bytes(self) -> int:
        return _up(self.own * self.n * self.dtype.itemsize, 1024)

    @property
    def news(self) -> int:
        """dtype [M, N]: rows of new from the others."""
        return self.parts + self.world * self.part_bytes

    @property
    def s(self) -> int:
        """float32 [M]."""
        return self.news + _up(self.m * self.n * self.dtype.itemsize, 1024)

    @property
    def q(self) -> int:
        """FP8 [M, N]; float32 in Triton's interpreter, whose casts to FP8 truncate."""
        return self.s + _up(self.m * 4, 1024)

    @property
    def bytes(self) -> int:
        return self.q + _up(self.m * self.n * (4 if INTERPRET else 1), 1024)

    def rows(self, rank: int) -> range:
        """Which a rank finishes."""
        return own_rows(self.m, self.world, rank)

    def part(self, buffer: torch.Tensor, rank: int, count: int) -> torch.Tensor:
        """Rank ``rank``'s part [count, N] of the rows that the buffer's owner finishes."""
        at, size = self.parts + rank * self.part_bytes, count * self.n * self.dtype.itemsize
        return buffer[at : at + size].view(self.dtype).view(count, self.n)


def refusal(
    config: Rows, m: int, n: int, world: int, dtype: torch.dtype, properties: Any
) -> str | None:
    """Why results [m, n] do not go this way on such a GPU."""
    if dtype != torch.bfloat16:
        return f"unscaled parts do not fit {dtype}"
    if n > WIDEST or n % 16:
        return f"{n} columns: a program holds up to {WIDEST}, a multiple of 16"
    if config.multiprocessors > properties.multi_processor_count:
        return f"{config.programs} programs do not run at once"
    if RowsLayout(world, m, n, config.programs, dtype).bytes >= 2**31:
        return "a workspace of 2 GiB or more"  # byte offsets are int32 in the kernel
    return None
