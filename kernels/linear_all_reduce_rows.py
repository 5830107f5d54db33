"""Linear + all-reduce, each rank finishing its own rows: the sum, or all up to the next product.

    total = sum over ranks r, in their order, of xs_r * ws_r * round(x_r @ w_r.T)
    new   = round(residual + gate * total)
    q, s  = quantize(norm(new) [* weight + bias] * scale + shift)        as modulate_quantize.py

Shapes: x [M, K] and w [N, K] FP8 of this rank; residual, new, q [M, N]; the vectors [N]; s [M, 1].
Rank r finishes rows r * own up to (r + 1) * own, own = ceil(M / world), and sends q and s to all;
``whole``: new as well. Without, new holds this rank's rows only and the others' are undefined: the
next call reads no others (sequence parallelism, as Megatron's: Korthikanti et al.,
arXiv:2205.05198, here with the gathered rows in FP8).

Bytes between two ranks, a direction, M, N = 757, 7680: 5.8 MB of parts and 2.9 of q, where a sum
for all moves 11.6; and each rank runs the norm for half of the rows.

The product is cuBLAS's, without scales, in one piece a rank that finishes it: the peers' pieces
first, written by the product's own epilogue straight into the peer's memory, so that they travel
while this rank's own piece is computed beside and after them (the wave that the first piece leaves
unfilled). Reading them over NVLink afterwards took 30 us more.

Why nothing is written too early: a rank writes its parts of the next call after this call's kernel
has ended, so after all q of this call have come, and a rank sends its last q after it has read its
last part. It sends q of the next call after it has read parts of the next call of all ranks, so
after all those have ended this one.

A wait is bounded (``Space``). A rank that has waited in vain tells all ranks before it ends; rows
finished from then on are NaN, and so is every later call.

A row is normed by one rank for all, so residual and vectors must be the same on all. Every call
looks: with its scales a rank sends digests, which the finisher compares with its own. A digest of a
row is its sums under 7 fixed patterns of signs, and its sum of squares: sums that differ by more
than 2^-5 of the row's norm end like a wait in vain. Less may be another path's roundings. Where two
rows differ by a tenth of their norm, one call in 17,000 sees nothing (0.25^7); all values of a
vector, or many rows, are looked at in every call. The residual is compared where ``compare`` says
so: a call that goes on from another's rows has nobody to compare them with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rtc.kernels.linear_all_reduce_space import CONTROL, DONE, EPOCH, ERROR, OTHERS, Space, _up
from rtc.kernels.modulate_quantize import FP8, INTERPRET

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU builds of torch come without it
    triton = None

if triton is not None:
    from rtc.kernels.linear_all_reduce_space import arrived, pointer

__all__ = ["Norm", "Rows", "RowsLayout", "launch", "own_rows"]

PUBLISH, FINISH, COLLECT = 1, 2, 4
VECTORS, DIGEST = 5, 8  # vectors of a norm; numbers of a digest
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


if triton is not None:

    @triton.jit
    def _scales_kernel(xs_ptr, ws_ptr, like, bases, M, N, rank, scales, stride,
                       X_ROWS: tl.constexpr, W_ROWS: tl.constexpr, WORLD: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
        """This rank's scales to all ranks. like: a float32 pointer."""
        gap = tl.cdiv(M, 64) * 64
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        xs = tl.load(xs_ptr + (i if X_ROWS else i * 0), mask=i < M)
        ws = tl.load(ws_ptr + (i if W_ROWS else i * 0), mask=i < N)
        for r in tl.static_range(WORLD):
            there = pointer(tl.load(bases + r), scales + rank * stride * 4, like)
            tl.store(there + i, xs, mask=i < M)
            tl.store(there + gap + i, ws, mask=i < N)

    @triton.jit
    def _put_digest(to, v_ptr, keep, c, DIGEST: tl.constexpr):
        v = tl.load(v_ptr + c, mask=keep, other=0.0).to(tl.float32)
        h = c.to(tl.uint32) * 0x9E3779B1
        h = (h ^ (h >> 15)) * 0x85EBCA6B
        h = h ^ (h >> 13)
        for k in tl.static_range(DIGEST - 1):
            minus = (h >> (4 * k + 2)) & 1
            tl.store(to + k, tl.sum(tl.where(minus != 0, -v, v), 0))
        tl.store(to + DIGEST - 1, tl.sum(v * v, 0))

    @triton.jit
    def _put_vector(v_ptr, number: tl.constexpr, like, bases, rank, digests, digest_bytes, keep, c,
                    WORLD: tl.constexpr, DIGEST: tl.constexpr):  # fmt: skip
        if v_ptr is not None:  # noqa: SIM102
            if tl.program_id(0) == number:
                for r in tl.static_range(WORLD):
                    there = pointer(tl.load(bases + r), digests + rank * digest_bytes, like)
                    _put_digest(there + number * DIGEST, v_ptr, keep, c, DIGEST)

    @triton.jit(do_not_specialize=["rank"])
    def _digests_kernel(x_ptr, gate_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, like, bases,
                        x_stride, own, rank, digests, digest_bytes, C: tl.constexpr,
                        BLOCK: tl.constexpr, WORLD: tl.constexpr, VECTORS: tl.constexpr,
                        DIGEST: tl.constexpr):  # fmt: skip
        """Digests of this rank's vectors to all, of its residual's rows to their finishers."""
        pid = tl.program_id(0)
        c = tl.arange(0, BLOCK)
        keep = c < C
        to = (like, bases, rank, digests, digest_bytes, keep, c)
        _put_vector(gate_ptr, 0, *to, WORLD, DIGEST)
        _put_vector(weight_ptr, 1, *to, WORLD, DIGEST)
        _put_vector(bias_ptr, 2, *to, WORLD, DIGEST)
        _put_vector(scale_ptr, 3, *to, WORLD, DIGEST)
        _put_vector(shift_ptr, 4, *to, WORLD, DIGEST)
        if pid >= VECTORS:
            row = pid - VECTORS
            there = pointer(tl.load(bases + row // own), digests + rank * digest_bytes, like)
            at = x_ptr + tl.full((), 0, tl.int64) + row.to(tl.int64) * x_stride
            _put_digest(there + (VECTORS + row % own) * DIGEST, at, keep, c, DIGEST)

    @triton.jit
    def _differs(first, here, like, rank, digests, digest_bytes, WHICH: tl.constexpr,
                 COUNT: tl.constexpr, WORLD: tl.constexpr, DIGEST: tl.constexpr):  # fmt: skip
        """1 where a rank's digests are not this rank's, else 0: one value for all threads.

        Of COUNT digests from the first on those whose bits are set in WHICH.
        """
        k = tl.arange(0, COUNT * DIGEST)
        at = first * DIGEST + k
        squares = at // DIGEST * DIGEST + DIGEST - 1
        keep = ((WHICH >> (k // DIGEST)) & 1) != 0
        keep = keep & (at != squares)
        here_r = pointer(here, digests + rank * digest_bytes, like)
        mine = tl.load(here_r + at, mask=keep, other=0.0, cache_modifier=".cg")
        size = tl.load(here_r + squares, mask=keep, other=0.0, cache_modifier=".cg")
        far = tl.zeros((COUNT * DIGEST,), tl.int32)
        for r in tl.static_range(WORLD):
            here_r = pointer(here, digests + r * digest_bytes, like)
            other = tl.load(here_r + at, mask=keep, other=0.0, cache_modifier=".cg")
            largest = tl.load(here_r + squares, mask=keep, other=0.0, cache_modifier=".cg")
            apart = tl.abs(mine - other) > 0.03125 * tl.sqrt(tl.maximum(size, largest))
            alone = (mine != mine) != (other != other)  # NaN on one of them
            far = far | (apart | alone).to(tl.int32)
        return tl.max(far, 0)

    @triton.jit
    def _finish(row, x_ptr, gate_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, new_ptr,
                q_ptr, s_ptr, like, bases, here, x_stride, M, own, rank, scales, stride,
                parts, part_bytes, news,
                s_box, q_box, eps, floor, C: tl.constexpr, BLOCK: tl.constexpr,
                LAYER: tl.constexpr, WORLD: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
        """One row of this rank's: summed, normed, quantized, sent to all."""
        at = tl.full((), 0, tl.int64) + row
        c = tl.arange(0, BLOCK)
        keep = c < C
        gap = tl.cdiv(M, 64) * 64
        total = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(WORLD):
            from_r = pointer(here, parts + r * part_bytes, new_ptr) + (at - rank * own) * C
            value = tl.load(from_r + c, mask=keep, cache_modifier=".cg").to(tl.float32)
            scale_r = pointer(here, scales + r * stride * 4, like)
            xs = tl.load(scale_r + row, cache_modifier=".cg")
            ws = tl.load(scale_r + gap + c, mask=keep, cache_modifier=".cg")
            total += value * xs * ws
        if gate_ptr is not None:
            total *= tl.load(gate_ptr + c, mask=keep).to(tl.float32)
        if x_ptr is not None:
            total += tl.load(x_ptr + at * x_stride + c, mask=keep).to(tl.float32)
        new = tl.where(keep, total, 0.0).to(new_ptr.dtype.element_ty)
        tl.store(new_ptr + at * C + c, new, mask=keep)
        if WHOLE:
            for step in tl.static_range(1, WORLD):
                there = tl.load(bases + (rank + step) % WORLD)
                tl.store(pointer(there, news, new_ptr) + at * C + c, new, mask=keep)
        if q_ptr is not None:
            y = new.to(tl.float32)
            if LAYER:
                y = tl.where(keep, y - tl.sum(y, 0) / C, 0.0)
            y *= tl.rsqrt(tl.sum(y * y, 0) / C + eps)
            if weight_ptr is not None:
                y *= tl.load(weight_ptr + c, mask=keep).to(tl.float32)
            if bias_ptr is not None:
                y += tl.load(bias_ptr + c, mask=keep).to(tl.float32)
            y = y * tl.load(scale_ptr + c, mask=keep).to(tl.float32)
            y += tl.load(shift_ptr + c, mask=keep).to(tl.float32)
            s = tl.maximum(tl.max(tl.where(keep, tl.abs(y), 0.0), 0), floor) / 448.0
            y = tl.clamp(y * (1.0 / s), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            q = y.to(q_ptr.dtype.element_ty)
            tl.store(q_ptr + at * C + c, q, mask=keep)
            tl.store(s_ptr + at, s)
            for step in tl.static_range(1, WORLD):
                there = tl.load(bases + (rank + step) % WORLD)
                tl.store(pointer(there, q_box, q_ptr) + at * C + c, q, mask=keep)
                tl.store(pointer(there, s_box, s_ptr) + at, s)

    @triton.jit
    def _spoil(row, new_ptr, s_ptr, bases, rank, news, s_box, C: tl.constexpr,
               BLOCK: tl.constexpr, WORLD: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
        """NaN in place of a row: its s makes q NaN too."""
        at = tl.full((), 0, tl.int64) + row
        c = tl.arange(0, BLOCK)
        nan = tl.full((BLOCK,), float("nan"), tl.float32).to(new_ptr.dtype.element_ty)
        tl.store(new_ptr + at * C + c, nan, mask=c < C)
        if s_ptr is not None:
            tl.store(s_ptr + at, float("nan"))
        for step in tl.static_range(1, WORLD):
            there = tl.load(bases + (rank + step) % WORLD)
            if s_ptr is not None:
                tl.store(pointer(there, s_box, s_ptr) + at, float("nan"))
            if WHOLE:
                tl.store(pointer(there, news, new_ptr) + at * C + c, nan, mask=c < C)

    @triton.jit(do_not_specialize=["rank", "limit"])
    def _rows_kernel(x_ptr, gate_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, new_ptr, q_ptr,
                     s_ptr, like, bases, control, x_stride, M, own, rank, ready, flags, marks,
                     scales, stride, digests, digest_bytes, parts, part_bytes, news, s_box, q_box,
                     eps, floor, limit, C: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr,
                     WORLD: tl.constexpr, WHOLE: tl.constexpr, COMPARE: tl.constexpr,
                     STAGE: tl.constexpr, EPOCH: tl.constexpr, DONE: tl.constexpr,
                     ERROR: tl.constexpr, OTHERS: tl.constexpr, VECTORS: tl.constexpr,
                     WHICH: tl.constexpr, DIGEST: tl.constexpr):  # fmt: skip
        """STAGE: 1 tells that the part is ready, 2 finishes rows, 4 takes the others' in; a sum."""
        pid = tl.program_id(0)
        programs = tl.num_programs(0)
        epoch = tl.load(control + EPOCH) + 1
        here = tl.load(bases + rank)
        # Of what kind the call is: ranks that make others would read what nobody wrote.
        call = epoch * 8 + (4 if COMPARE else 0) + (2 if WHOLE else 0)
        call += 1 if q_ptr is not None else 0
        # One value for all threads, as barriers stand in its branches: ``seen`` looks at ERROR.
        good = pid >= 0
        if (STAGE & 1) and (pid == 0):
            for step in tl.static_range(1, WORLD):
                ones = pointer(tl.load(bases + (rank + step) % WORLD), ready, control)
                tl.atomic_xchg(ones + rank, call, sem="release", scope="sys")
        if STAGE & 2:
            for step in tl.static_range(1, WORLD):
                flag = pointer(here, ready, control) + (rank + step) % WORLD
                good = arrived(flag, call, control + ERROR, limit, "sys") & good
                good = good & (tl.atomic_add(flag, 0, sem="acquire", scope="sys") == call)
            if not good:
                tl.atomic_max(control + ERROR, 1, sem="relaxed", scope="gpu")
            first = rank * own
            last = tl.minimum(first + own, M)
            if good:  # else a peer may still be taking the last call's rows in
                for row in tl.range(first + pid, last, programs, num_stages=1):
                    _finish(row, x_ptr, gate_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
                            new_ptr, q_ptr, s_ptr, like, bases, here, x_stride, M, own, rank,
                            scales, stride, parts, part_bytes, news, s_box, q_box, eps, floor, C,
                            BLOCK, LAYER, WORLD, WHOLE)  # fmt: skip
                if q_ptr is not None:  # here, so that it is waited for beside the rows' own way
                    box = (here, like, rank, digests, digest_bytes)
                    differ = _differs(0, *box, WHICH, 8, WORLD, DIGEST)
                    if COMPARE:
                        for row in tl.range(first + pid, last, programs, num_stages=1):
                            differ |= _differs(VECTORS + row - first, *box, 1, 1, WORLD, DIGEST)
                    if differ != 0:
                        tl.atomic_max(control + ERROR, OTHERS, sem="relaxed", scope="gpu")
            # A rank that goes on without this one says so first: what was read may be of two calls.
            tl.debug_barrier()
            seen = tl.atomic_add(control + ERROR, 0, sem="acq_rel", scope="sys")
            good = good & (seen == 0)
            if not good:
                for row in tl.range(first + pid, last, programs, num_stages=1):
                    _spoil(row, new_ptr, s_ptr, bases, rank, news, s_box, C, BLOCK, WORLD, WHOLE)
            tl.debug_barrier()
            for step in tl.static_range(1, WORLD):
                there = tl.load(bases + (rank + step) % WORLD)
                flag = pointer(there, flags, control) + rank * marks + pid
                tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
        if STAGE & 4:
            c = tl.arange(0, BLOCK)
            keep = c < C
            for step in tl.static_range(1, WORLD):
                peer = (rank + step) % WORLD
                flag = pointer(here, flags, control) + peer * marks + pid
                came = arrived(flag, epoch, control + ERROR, limit, "sys") & good
                good = came
                first = peer * own
                for row in tl.range(first + pid, tl.minimum(first + own, M), programs,
                                    num_stages=1):  # fmt: skip
                    at = tl.full((), 0, tl.int64) + row
                    if q_ptr is not None:
                        q = tl.load(pointer(here, q_box, q_ptr) + at * C + c, mask=keep,
                                    cache_modifier=".cg")  # fmt: skip
                        s = tl.load(pointer(here, s_box, s_ptr) + at, cache_modifier=".cg")
                        tl.store(q_ptr + at * C + c, q, mask=keep)
                        tl.store(s_ptr + at, tl.where(came, s, float("nan")))
                    if WHOLE:
                        new = tl.load(pointer(here, news, new_ptr) + at * C + c, mask=keep,
                                      other=0.0, cache_modifier=".cg")  # fmt: skip
                        new = tl.where(came, new.to(tl.float32), float("nan"))
                        tl.store(new_ptr + at * C + c, new.to(new_ptr.dtype.element_ty), mask=keep)
            tl.debug_barrier()
            done = tl.atomic_add(control + DONE, 1, sem="acq_rel", scope="gpu")
            if done == programs - 1:
                said = tl.atomic_add(control + ERROR, 0, sem="acq_rel", scope="sys")
                if said != 0:  # before it ends: the others' rows of the next call are NaN, too
                    for step in tl.static_range(1, WORLD):
                        words = pointer(tl.load(bases + (rank + step) % WORLD), 0, control)
                        tl.atomic_max(words + ERROR, said, sem="release", scope="sys")
                tl.store(control + DONE, 0)
                tl.store(control + EPOCH, epoch)


@dataclass(frozen=True)
class Norm:
    """What follows the sum. Vectors [N]; ``whole``: new of all rows on all ranks."""

    residual: torch.Tensor
    gate: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    scale: torch.Tensor
    shift: torch.Tensor
    norm: str
    eps: float
    floor: float
    whole: bool
    compare: bool = True  # the residual with the other ranks'

    @property
    def vectors(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of their digests."""
        return self.gate, self.weight, self.bias, self.scale, self.shift


Out = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # new, q, s


def launch(
    space: Space,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    norm: Norm | None = None,
) -> Out:
    """(new, q, s), fresh; without ``norm`` the sum itself, rounded once, of all rows."""
    assert space.side is not None
    main, side = torch.cuda.current_stream(x.device), space.side
    with torch.cuda.device_of(x):
        side.wait_stream(main)
        with torch.cuda.stream(side):  # of high priority: what travels comes first
            for step in range(1, space.layout.world):
                product(space, x, w, (space.rank + step) % space.layout.world)
            if norm is not None:  # behind what travels, beside this rank's own piece
                send_digests(space, norm)
        if not space.config.beside:
            main.wait_stream(side)
        send_scales(space, x_scale, w_scale)
        product(space, x, w, space.rank)
        main.wait_stream(side)
        out = empty(space, x, norm)
        finish(space, norm, out)
    return out


def empty(space: Space, x: torch.Tensor, norm: Norm | None) -> Out:
    m, n = space.layout.m, space.layout.n
    new = x.new_empty((m, n), dtype=space.layout.dtype)
    if norm is None:
        return new, None, None
    return new, x.new_empty((m, n), dtype=FP8), x.new_empty((m, 1), dtype=torch.float32)


def product(space: Space, x: torch.Tensor, w: torch.Tensor, finisher: int) -> None:
    """This rank's part of the rows that ``finisher`` finishes, into the finisher's memory."""
    rows = space.layout.rows(finisher)
    if not rows:
        return
    out, one = space.layout.part(space.peers[finisher], space.rank, len(rows)), space.one
    x = x[rows.start : rows.stop]
    torch._scaled_mm(x, w.t(), one, one, out_dtype=out.dtype, use_fast_accum=True, out=out)


def send_scales(space: Space, x_scale: torch.Tensor, w_scale: torch.Tensor) -> None:
    at, block = space.layout, 1024
    _scales_kernel[(-(-max(at.m, at.n) // block),)](
        x_scale.contiguous(),
        w_scale.contiguous(),
        space.one,
        space.bases,
        at.m,
        at.n,
        space.rank,
        at.scales,
        at.scale_stride,
        X_ROWS=x_scale.numel() > 1,
        W_ROWS=w_scale.numel() > 1,
        WORLD=at.world,
        BLOCK=block,
        num_warps=4,
    )


def send_digests(space: Space, norm: Norm) -> None:
    at = space.layout
    _digests_kernel[(VECTORS + (at.m if norm.compare else 0),)](
        norm.residual,
        *norm.vectors,
        space.one,
        space.bases,
        norm.residual.stride(0),
        at.own,
        space.rank,
        at.digests,
        at.digest_bytes,
        C=at.n,
        BLOCK=triton.next_power_of_2(at.n),
        WORLD=at.world,
        VECTORS=VECTORS,
        DIGEST=DIGEST,
        num_warps=8,
    )


def finish(
    space: Space, norm: Norm | None, out: Out, stage: int = PUBLISH | FINISH | COLLECT
) -> None:
    """The second kernel, or stages of it: in one process, one rank's after the other's."""
    at, config = space.layout, space.config
    new, q, s = out
    q_out = q
    if INTERPRET and q is not None:
        q_out = q.float()
    more: dict[str, Any] = {}
    if not INTERPRET:
        more = {"maxnreg": config.registers, "launch_cooperative_grid": config.cooperative}
    _rows_kernel[(config.programs,)](
        norm and norm.residual,
        norm and norm.gate,
        norm and norm.weight,
        norm and norm.bias,
        norm and norm.scale,
        norm and norm.shift,
        new,
        q_out,
        s,
        space.one,
        space.bases,
        space.control,
        norm.residual.stride(0) if norm else 0,
        at.m,
        at.own,
        space.rank,
        at.ready,
        at.flags,
        at.marks,
        at.scales,
        at.scale_stride,
        at.digests,
        at.digest_bytes,
        at.parts,
        at.part_bytes,
        at.news,
        at.s,
        at.q,
        norm.eps if norm else 0.0,
        norm.floor if norm else 0.0,
        space.limit,
        C=at.n,
        BLOCK=triton.next_power_of_2(at.n),
        LAYER=norm is not None and norm.norm == "layer",
        WORLD=at.world,
        WHOLE=norm is None or norm.whole,
        COMPARE=norm is not None and norm.compare,
        STAGE=stage,
        EPOCH=EPOCH,
        DONE=DONE,
        ERROR=ERROR,
        OTHERS=OTHERS,
        VECTORS=VECTORS,
        WHICH=sum((v is not None) << i for i, v in enumerate(norm.vectors)) if norm else 0,
        DIGEST=DIGEST,
        num_warps=config.warps,
        **more,
    )
    if q is not None and q_out is not q and q_out is not None:
        q.copy_(q_out)
