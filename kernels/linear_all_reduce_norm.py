"""``rtc::linear_all_reduce_norm``: a row-parallel linear, its sum, and the norm that reads it.

    total   = linear_all_reduce(x, w, x_scale, w_scale)
    new     = residual + gate * total
    q, s    = quantize(norm(new) [* weight + bias] * scale + shift)

Shapes and dtypes: those of ``rtc::linear_all_reduce`` (x, w and their scales) and of
``rtc::residual_modulate_quantize`` (the rest); residual [M, N] of ``dtype``.
residual and the vectors must be the same on all ranks: a row is normed by one of them for all.
Every call compares them, up to roundings: on the CPU by value (ValueError), on a GPU by digests, so
that nobody waits: the result is NaN, and so are all later ones (linear_all_reduce_rows.py; without
such a workspace nothing looks on a GPU).
``compare``: the residual too. Without, it must be the ``new`` of a call before.
``whole``: new holds all rows. Without, it holds those that this rank finishes: rank r's are
``own_rows(M, world, r)``; the others are undefined (NaN wherever that costs nothing), for readers
that want no others, like this op's own ``residual``. q and s are whole, and the same bits on all
ranks, as is new.

With a workspace of the design ``Rows`` (linear_all_reduce.prepare) by linear_all_reduce_rows.py:
total is not rounded then. Else composed of the two ops and the group's all-gather.

Source: own.
"""

from __future__ import annotations

from typing import Any

import torch

from rtc.kernels import linear_all_reduce as sums
from rtc.kernels import linear_all_reduce_rows as rows
from rtc.kernels import modulate_quantize as tail
from rtc.kernels.linear_all_reduce_rows import Norm
from rtc.kernels.linear_all_reduce_rows_layout import Rows, own_rows

__all__ = ["linear_all_reduce_norm", "own_rows"]


def _check(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor,
    dtype: torch.dtype, world: int, n: Norm,
) -> None:  # fmt: skip
    sums._check(x, w, x_scale, w_scale, dtype, world)
    r = n.residual
    if r.shape != (x.shape[0], w.shape[0]) or r.dtype != dtype:
        raise ValueError(
            f"linear_all_reduce_norm: residual must be {dtype} [{x.shape[0]}, {w.shape[0]}], "
            f"not {r.dtype} {list(r.shape)}"
        )
    vectors = {k: getattr(n, k) for k in ("gate", "weight", "bias", "scale", "shift")}
    tail._check(r, r, vectors, n.norm, n.floor)


@torch.library.custom_op("rtc::linear_all_reduce_norm", mutates_args=())
def linear_all_reduce_norm(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    norm: str,
    eps: float,
    floor: float,
    whole: bool,
    compare: bool,
    dtype: torch.dtype,
    world: int,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(new, q, s). world: ranks of the group named ``group``."""
    n = Norm(residual, gate, weight, bias, scale, shift, norm, eps, floor, whole, compare)
    _check(x, w, x_scale, w_scale, dtype, world, n)
    if world > 1 and sums._resolve(group).size() != world:
        raise ValueError(f"linear_all_reduce_norm: group {group!r} is not of {world} ranks")
    space = sums.space_of(group, x, w, dtype) if world > 1 else None
    if space is not None and isinstance(space.config, Rows):
        x, w = sums._fitting(x), sums._fitting(w)
        new, q, s = rows.launch(space, x, w, x_scale, w_scale, n)
        assert q is not None
        assert s is not None
        return new, q, s
    total = sums.linear_all_reduce(x, w, x_scale, w_scale, dtype, world, group)
    if world == 1:
        return _finished(total, n, slice(None))
    return _gathered(total, n, world, group)


def _finished(
    total: torch.Tensor, n: Norm, at: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows ``at`` of (new, q, s)."""
    vectors = (n.gate, n.weight, n.bias, n.scale, n.shift)
    return tail.residual_modulate_quantize(
        n.residual[at], total[at], *vectors, n.norm, n.eps, n.floor
    )


def _gathered(
    total: torch.Tensor, n: Norm, world: int, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's rows finished, those of the others from them: residual may hold no others."""
    import torch.distributed as dist

    pg, m = sums._resolve(group), total.shape[0]
    mine = own_rows(m, world, pg.rank())
    if not total.is_cuda:
        _compare(n, world, pg)
    finished = _finished(total, n, slice(mine.start, mine.stop))

    def gather(own: torch.Tensor) -> torch.Tensor:
        padded = own.new_zeros((-(-m // world), own.shape[1]))
        padded[: len(mine)] = own
        parts = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(parts, padded, group=pg)
        return torch.cat(parts)[:m]

    new, q, s = finished
    if n.whole:
        new = gather(new)
    else:
        new = torch.full_like(total, float("nan"))
        new[mine.start : mine.stop] = finished[0]
    return new, gather(q.view(torch.uint8)).view(q.dtype), gather(s)


def _compare(n: Norm, world: int, pg: Any) -> None:
    """Raise ValueError, on all ranks, where rows or vectors are not those of the other ranks.

    Ranks on other paths round otherwise: an eighth of a row's norm is left to that. Without
    ``compare``, NaN on a rank is a row that it does not have.
    """
    import torch.distributed as dist

    vectors = [v.reshape(1, -1) for v in n.vectors if v is not None]
    mine = torch.cat([t.float() for t in (n.residual, *vectors)])
    said = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(said, mine, group=pg)
    every = torch.stack(said)
    nan = every.isnan()
    alone = nan.any(0) & ~nan.all(0)
    if not n.compare:
        alone[: len(n.residual)] = False
    least = every.masked_fill(nan, torch.inf).amin(0)
    most = every.masked_fill(nan, -torch.inf).amax(0)
    spread = torch.where((most <= least) | nan.all(0), 0.0, most - least)
    size = every.nan_to_num(0.0, 0.0, 0.0).abs().amax(0).norm(dim=-1)
    if bool((alone.any(-1) | (spread.norm(dim=-1) > size / 8)).any()):
        raise ValueError(
            "linear_all_reduce_norm: the residual or a vector of the norm differs between ranks: "
            "give every rank the same inputs and the same weights of norms and modulation, or "
            "compile without Options(fuse_all_reduce_norm=True)"
        )


@linear_all_reduce_norm.register_fake
def _(x, w, x_scale, w_scale, residual, gate, weight, bias, scale, shift, norm, eps, floor, whole,
      compare, dtype, world, group):  # fmt: skip
    n = Norm(residual, gate, weight, bias, scale, shift, norm, eps, floor, whole, compare)
    _check(x, w, x_scale, w_scale, dtype, world, n)
    return residual.new_empty(residual.shape), *tail._empty(residual)
