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
looks (linear_all_reduce_digests.py): what differs ends like a wait in vain. The residual is looked
at where ``compare`` says so: a call that goes on from another's rows has nobody to compare with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rtc.kernels import linear_all_reduce_digests as digests
from rtc.kernels.linear_all_reduce_digests import DIGEST, VECTORS
from rtc.kernels.linear_all_reduce_space import DONE, EPOCH, ERROR, OTHERS, Space
from rtc.kernels.modulate_quantize import FP8, INTERPRET

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU builds of torch come without it
    triton = None

if triton is not None:
    from rtc.kernels.linear_all_reduce_digests import differs
    from rtc.kernels.linear_all_reduce_space import arrived, pointer

__all__ = ["Norm", "empty", "finish", "launch", "product", "send_scales"]

PUBLISH, FINISH, COLLECT = 1, 2, 4


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
                    differ = differs(0, *box, WHICH, 8, WORLD, DIGEST)
                    if COMPARE:
                        for row in tl.range(first + pid, last, programs, num_stages=1):
                            differ |= differs(VECTORS + row - first, *box, 1, 1, WORLD, DIGEST)
                    if differ != 0:
                        tl.atomic_cas(control + ERROR, 0, OTHERS, sem="relaxed", scope="gpu")
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
                if said != 0:  # before it ends; what was the matter first is what counts
                    for step in tl.static_range(1, WORLD):
                        words = pointer(tl.load(bases + (rank + step) % WORLD), 0, control)
                        tl.atomic_cas(words + ERROR, 0, said, sem="release", scope="sys")
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
                digests.send(space, norm.residual if norm.compare else None, norm.vectors)
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
