"""Whether ranks have the same rows and vectors, looked at on the way of an exchange.

A digest of a row is its sums under 7 fixed patterns of signs, and its norm. Each rank sends its
own; who reads them compares. Sums that differ by more than an eighth of the row's norm tell that
the rows differ: a difference d, spread over the row, moves each sum by about its own norm. Less is
left to other paths' roundings, which behind an FP8 linear are 1.5 % of a row. So unrelated rows are
missed once in 10^8, rows that differ by half of their norm once in 10^5; a few per cent, or one
element of a few times the row's mean size, are not seen. NaN or infinite in one of the two is a
difference, in both it is none.

Bytes a rank sends: 32 a row or vector.

Source: own; random signs as in AMS sketches (Alon, Matias and Szegedy, 1996).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rtc.kernels.linear_all_reduce_space import Space

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU builds of torch come without it
    triton = None

if triton is not None:
    from rtc.kernels.linear_all_reduce_space import pointer

__all__ = ["DIGEST", "VECTORS", "send"]

VECTORS, DIGEST = 5, 8  # vectors of a norm; numbers of a digest

if triton is not None:

    @triton.jit
    def _signs(c):
        h = c.to(tl.uint32) * 0x9E3779B1
        h = (h ^ (h >> 15)) * 0x85EBCA6B
        return h ^ (h >> 13)

    @triton.jit
    def _number(v, h, k: tl.constexpr, DIGEST: tl.constexpr):
        """Number k of a digest: a sum, or last the norm (whose norms may not overflow)."""
        if k < DIGEST - 1:
            return tl.sum(tl.where(((h >> (4 * k + 2)) & 1) != 0, -v, v), 0)
        else:
            most = tl.max(tl.abs(v), 0)
            unit = v / tl.where(most > 0, most, 1.0)
            return most * tl.sqrt(tl.sum(unit * unit, 0))

    @triton.jit
    def _put_vector(v_ptr, number: tl.constexpr, like, bases, rank, digests, digest_bytes, keep, c,
                    WORLD: tl.constexpr, DIGEST: tl.constexpr):  # fmt: skip
        if v_ptr is not None:  # noqa: SIM102
            if tl.program_id(0) == number:
                v = tl.load(v_ptr + c, mask=keep, other=0.0).to(tl.float32)
                h = _signs(c)
                for k in tl.static_range(DIGEST):
                    value = _number(v, h, k, DIGEST)
                    for r in tl.static_range(WORLD):
                        there = pointer(tl.load(bases + r), digests + rank * digest_bytes, like)
                        tl.store(there + number * DIGEST + k, value)

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
        if x_ptr is not None:  # noqa: SIM102
            if pid >= VECTORS:
                row = pid - VECTORS
                there = pointer(tl.load(bases + row // own), digests + rank * digest_bytes, like)
                at = x_ptr + row.to(tl.int64) * x_stride
                v = tl.load(at + c, mask=keep, other=0.0).to(tl.float32)
                h = _signs(c)
                for k in tl.static_range(DIGEST):
                    value = _number(v, h, k, DIGEST)
                    tl.store(there + (VECTORS + row % own) * DIGEST + k, value)

    @triton.jit
    def differs(first, here, like, rank, digests, digest_bytes, WHICH: tl.constexpr,
                 COUNT: tl.constexpr, WORLD: tl.constexpr, DIGEST: tl.constexpr):  # fmt: skip
        """1 where a rank's digests are not this rank's, else 0: one value for all of a warp.

        Of COUNT digests from the first on those whose bits are set in WHICH.
        """
        k = tl.arange(0, COUNT * DIGEST)
        at = first * DIGEST + k
        norms = at // DIGEST * DIGEST + DIGEST - 1
        keep = ((WHICH >> (k // DIGEST)) & 1) != 0
        keep = keep & (at != norms)
        here_r = pointer(here, digests + rank * digest_bytes, like)
        mine = tl.load(here_r + at, mask=keep, other=0.0, cache_modifier=".cg")
        size = tl.load(here_r + norms, mask=keep, other=0.0, cache_modifier=".cg")
        far = tl.zeros((COUNT * DIGEST,), tl.int32)
        for r in tl.static_range(WORLD):
            here_r = pointer(here, digests + r * digest_bytes, like)
            other = tl.load(here_r + at, mask=keep, other=0.0, cache_modifier=".cg")
            largest = tl.load(here_r + norms, mask=keep, other=0.0, cache_modifier=".cg")
            off = tl.abs(mine - other)
            near = (off <= 0.125 * tl.maximum(size, largest)) & (off < float("inf"))
            same = (mine == other) | ((mine != mine) & (other != other))
            far = far | (1 - (near | same).to(tl.int32))
        return tl.max(far, 0)


def send(
    space: Space, residual: torch.Tensor | None, vectors: Sequence[torch.Tensor | None]
) -> None:
    """This rank's digests: of vectors to all ranks, of the residual's rows to their finishers."""
    at = space.layout
    _digests_kernel[(VECTORS + (0 if residual is None else at.m),)](
        residual,
        *vectors,
        space.one,
        space.bases,
        0 if residual is None else residual.stride(0),
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
