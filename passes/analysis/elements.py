"""Which element of a small tensor goes with each element of a large one, through layout and picks?

Every element of the small tensor has a number. Which number goes with an element of the large one
is kept as a sum over its axes, so that a cache of millions of elements costs a vector an axis; a
reshape whose outcome is no such sum raises NotLocal.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rtc.passes.analysis import shapes
from rtc.passes.analysis.fn import LAYOUT, PICKS, permutation
from rtc.passes.analysis.movement import SPLITS
from rtc.passes.analysis.shapes import NotLocal

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Numbers:
    """The element at (i, j, ...) goes with ``start + axes[0][i] + axes[1][j] + ...``.

    Each axis begins with 0.
    """

    start: int
    axes: tuple[torch.Tensor, ...]

    def spread(self, shape: Sequence[int]) -> Numbers:
        """Broadcast to ``shape``."""
        ones = [_none(1)] * (len(shape) - len(self.axes))
        axes = zip([*ones, *self.axes], shape, strict=True)
        return Numbers(self.start, tuple(a if len(a) == n else _none(n) for a, n in axes))

    def same(self, other: Numbers, shape: Sequence[int]) -> bool:
        """Whether the two are equal once broadcast to ``shape``."""
        a, b = self.spread(shape), other.spread(shape)
        return a.start == b.start and all(map(torch.equal, a.axes, b.axes))

    def reshape(self, shape: Sequence[int]) -> Numbers:
        if not any(a.any() for a in self.axes):  # all go with one, however they are regrouped
            return Numbers(self.start, tuple(_none(n) for n in shape))
        axes = [_none(1)] * len(shape)
        for src, dst in shapes.reshape_groups([len(a) for a in self.axes], shape):
            flat = _none(1)
            for d in src:
                flat = (flat[:, None] + self.axes[d]).flatten()
            for d in dst:
                rows = flat.reshape(shape[d], -1)
                axes[d], flat = rows[:, 0], rows[0]
                if not torch.equal(axes[d][:, None] + flat, rows):
                    raise NotLocal("a reshape regroups what has maxima of its own unevenly")
        return Numbers(self.start, tuple(axes))


def _none(n: int) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device="cpu").expand(n)


def numbered(shape: Sequence[int], over: Sequence[int] = ()) -> Numbers:
    """A number for each element of a tensor of ``shape`` once its axes ``over`` are reduced."""
    sizes = [1 if d in over else n for d, n in enumerate(shape)]
    axes = (torch.arange(n, device="cpu") * math.prod(sizes[d + 1 :]) for d, n in enumerate(sizes))
    return Numbers(0, tuple(axes)).spread(shape)


def moved(node: fx.Node, at: Any) -> Any:
    """The Numbers of what a layout op or a pick makes; a list for ops with several outputs."""
    t = node.target
    if t is operator.getitem:
        return at[node.args[1]]
    if t in PICKS:
        return _picked(node, at)
    if t not in LAYOUT:
        return at  # a copy
    perm = permutation(t, node.args, len(at.axes))
    if perm is not None:
        return Numbers(at.start, tuple(at.axes[p] for p in perm))
    shape = shapes.ints(node.meta["val"].shape)
    return at.spread(shape) if t is aten.expand.default else at.reshape(shape)


def moved_back(node: fx.Node, at: Numbers) -> Numbers:
    """The Numbers of what a layout op that repeats nothing was applied to."""
    x: fx.Node = node.args[0]  # type: ignore[assignment]
    perm = permutation(node.target, node.args, len(at.axes))
    if perm is not None:
        return Numbers(at.start, tuple(at.axes[perm.index(d)] for d in range(len(perm))))
    return at.reshape(shapes.ints(x.meta["val"].shape)) if node.target in LAYOUT else at


def _picked(node: fx.Node, at: Numbers) -> Any:
    if len(node.all_input_nodes) > 1:
        raise NotLocal("a part is cut at a changing place")
    pos = SPLITS.get(node.target, 1)
    args, kwargs = list(node.args), dict(node.kwargs)
    dim = int(args[pos] if len(args) > pos else kwargs.get("dim", 0)) % len(at.axes)  # type: ignore[call-overload]
    # the op itself, on that axis alone
    args[0] = at.axes[dim]
    args[pos : pos + 1] = [0] * len(args[pos : pos + 1])
    parts = node.target(*args, **{**kwargs, **({"dim": 0} if "dim" in kwargs else {})})  # type: ignore[operator]
    out = []
    for p in [parts] if isinstance(parts, torch.Tensor) else parts:
        if not p.numel():
            raise NotLocal("a part is empty")
        first = int(p.flatten()[0])
        axis = (p - first,) if p.dim() else ()
        out.append(Numbers(at.start + first, (*at.axes[:dim], *axis, *at.axes[dim + 1 :])))
    return out[0] if isinstance(parts, torch.Tensor) else out


__all__ = ["Numbers", "moved", "moved_back", "numbered"]
