"""Rotations and norms of rows on their way to attention: what pieces compute, found by running.

Rows are [B, T, H, D] or [B, H, T, D]: sizes do not tell which, they may be equal. ``axis`` says
where the tokens are, 1 or 2; a piece may change it. Pieces that turn have tables of their own for
every token; heads and batches share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from rtc.passes.analysis.pieces import Piece, random_leaves
from rtc.passes.nodes import val

_NORM_OPS = "pow square mul mean sum add rsqrt sqrt reciprocal div rms_norm _fused_rms_norm".split()
_CLOSE = 1e-4  # of float32 pieces, relative to the largest value


@dataclass(frozen=True)
class Turn:
    """rope: pairs "half" (i, i + D/2), "interleaved" (2i, 2i + 1), or "none": nothing is turned.

    axis: where the tokens are in the piece's start; swapped: its end has them in the other place.
    """

    rope: str
    axis: int
    swapped: bool


@dataclass(frozen=True)
class Norm:
    """RMSNorm over a head's channels; plus_one: its weight is stored less one."""

    eps: float
    plus_one: bool
    swapped: bool


class Prober:
    """Remembers what pieces were found to be: blocks repeat."""

    def __init__(self, known: Mapping[fx.Node, torch.Tensor]) -> None:
        self.known = known
        self.turns: dict[str, Turn | None] = {}
        self.norms: dict[str, Norm | None] = {}
        self.generator = torch.Generator().manual_seed(0)

    def turn(self, piece: Piece, axis: int) -> Turn | None:
        """What a piece does to rows whose tokens are on ``axis`` at its end; None: no such turn."""
        known = [self.known[n].tolist() for n in piece.leaves if n in self.known]
        key = f"{axis}\n{piece.key}\n{known}"
        if key not in self.turns:
            with _disable_current_modes():
                self.turns[key] = self._turn(piece, axis)
        return self.turns[key]

    def _turn(self, piece: Piece, axis: int) -> Turn | None:
        shape = tuple(val(piece.start).shape)
        leaves = random_leaves(piece, self.known, self.generator)
        if leaves is None or not piece.is_linear:
            return None
        x = torch.randn(shape, generator=self.generator)
        try:
            y = piece.run(x, leaves)
            for swapped, at in _places(y, shape, axis):
                if not piece.leaves:
                    if torch.equal(_placed(y, swapped), x):
                        return Turn("none", at, swapped)
                    continue
                for rope in ("half", "interleaved"):
                    low = _mask(rope, shape[-1])
                    mask, other = low.expand(shape), (1 - low).expand(shape)
                    # as the tables are made: no memory of their own behind the masks
                    a, b = (_placed(piece.run(m, leaves), swapped) for m in (mask, other))
                    # one table row for each token: that of the first batch and head
                    cos, sin = (
                        t[:1].narrow(3 - at, 0, 1)
                        for t in (torch.where(mask > 0, a, b), torch.where(mask > 0, -b, a))
                    )
                    want = x * cos + _turned(x, rope) * sin
                    if (_placed(y, swapped) - want).abs().max() <= _CLOSE * y.abs().max():
                        return Turn(rope, at, swapped)
        except (RuntimeError, TypeError, IndexError):
            return None
        return None

    def norm(self, piece: Piece) -> Norm | None:
        """The RMSNorm that a piece is; None where it is none."""
        if piece.key not in self.norms:
            with _disable_current_modes():
                self.norms[piece.key] = self._norm(piece)
        return self.norms[piece.key]

    def _norm(self, piece: Piece) -> Norm | None:
        shape = tuple(val(piece.start).shape)
        dim = shape[-1]
        if (
            not piece.only(_NORM_OPS)
            or len(piece.leaves) > 1
            or any(_numel(n) != dim for n in piece.leaves)
        ):
            return None
        leaves = random_leaves(piece, self.known, self.generator)
        if leaves is None:
            return None
        weight = leaves[0].reshape(dim) if leaves else torch.ones(dim)
        try:
            tiny = torch.full(shape, 1e-15)
            ratio = piece.run(tiny, leaves).flatten()[:dim].double() / 1e-15
            x = torch.randn(shape, generator=self.generator)
            ys = {size: piece.run(x * size, leaves) for size in (1.0, 1e3)}
            for plus_one in (False, True):
                w = weight + 1 if plus_one else weight
                eps = float(((w.double() / ratio) ** 2).median())
                if not 0 < eps < 1:
                    continue
                near = eps**0.5  # where the place of eps in the formula shows
                ys[near] = piece.run(x * near, leaves)
                for swapped, _ in _places(ys[1.0], shape, 1):
                    if all(
                        _normed(x * size, w, eps, _placed(y, swapped)) for size, y in ys.items()
                    ):
                        return Norm(float(f"{eps:.4g}"), plus_one, swapped)
        except (RuntimeError, TypeError, IndexError):
            return None
        return None


def _normed(x: torch.Tensor, w: torch.Tensor, eps: float, y: torch.Tensor) -> bool:
    want = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w
    return bool((y - want).abs().max() <= _CLOSE * want.abs().max())


def _places(y: torch.Tensor, shape: tuple[int, ...], axis: int) -> Iterator[tuple[bool, int]]:
    """(swapped, token axis at the start) that y's shape allows, ``axis`` being that of y."""
    if tuple(y.shape) == shape:
        yield False, axis
    if tuple(y.shape) == (shape[0], shape[2], shape[1], shape[3]):
        yield True, 3 - axis


def _placed(y: torch.Tensor, swapped: bool) -> torch.Tensor:
    return y.transpose(1, 2) if swapped else y


def _numel(n: fx.Node) -> int:
    v = n.meta.get("val")
    return v.numel() if isinstance(v, torch.Tensor) else -1


def _mask(rope: str, dim: int) -> torch.Tensor:
    at = torch.arange(dim)
    return ((at < dim // 2) if rope == "half" else (at % 2 == 0)).float()


def _turned(x: torch.Tensor, rope: str) -> torch.Tensor:
    if rope == "half":
        low, high = x.chunk(2, -1)
        return torch.cat([-high, low], -1)
    return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
