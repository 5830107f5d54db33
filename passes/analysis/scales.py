"""Is a whole-cache maximum nothing but the scale of values cast to FP8 and back?

Consent to calibrated scales (``Options(quantize="calibrated")``) is consent to hold such scales: a
floating-point format loses no precision by a scale somewhat too large. Whatever else a model does
with a maximum (a normalisation, a grid of integers) would come out otherwise.

    s = f(maximum)                       any pointwise work
    q = to_f8(clamp(k / s))              k / s, k * (1 / s), casts and layout in between
    w = wide(q) * s                      the same values again, or an op that reads q and s
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rtc.passes.analysis.fn import LAYOUT, PICKS
from rtc.passes.analysis.fp8 import CASTS, SAME

aten = torch.ops.aten

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FACTORS = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)
_BOUNDS = (
    aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default,
    aten.minimum.default, aten.maximum.default,
)  # fmt: skip
_MOVES = {*LAYOUT, *PICKS, *SAME, operator.getitem}


def other_use(maximum: fx.Node, pointwise: Callable[[Any], bool]) -> fx.Node | None:
    """A node that uses ``maximum`` otherwise, None where there is none."""
    alone = {maximum}  # what follows from the maximum and from numbers
    scaled: set[fx.Node] = set()  # data by such a value, on its way to a cast
    casts: set[fx.Node] = set()
    wide: set[fx.Node] = set()  # FP8 values, widened or not
    # Readers of those, in the graph's order. Not all nodes: a deep model has hundreds of maxima.
    queue, seen = [*maximum.users], {*maximum.users}
    heapq.heapify(queue)
    while queue:
        node = heapq.heappop(queue)
        reads, t = set(node.all_input_nodes), node.target
        if reads & wide:
            if reads & scaled:
                return node
            if reads & alone:  # to its old size, or an op that does that itself
                if pointwise(t) and t not in _FACTORS:
                    return node
            elif t in {*CASTS, *_MOVES, *_FACTORS}:
                wide.add(node)
        elif reads & scaled:
            if _is_cast(node):
                casts.add(node)
                wide.add(node)
            elif t in {*_FACTORS, *_BOUNDS, *CASTS, *_MOVES}:
                scaled.add(node)
            else:
                return node
        elif all(a in alone or _number(a) for a in reads):
            if not (pointwise(t) or t in _MOVES) or _is_cast(node):
                return node
            alone.add(node)
        elif t in {*_FACTORS, *_BOUNDS}:
            scaled.add(node)
        else:
            return node
        if node in alone or node in scaled or node in wide:
            for u in node.users:
                if u not in seen:
                    seen.add(u)
                    heapq.heappush(queue, u)
    return None if casts else next(iter(maximum.users), maximum)


def _number(n: fx.Node) -> bool:
    return n.op == "get_attr" or (n.op == "call_function" and not n.all_input_nodes)


def _is_cast(n: fx.Node) -> bool:
    val = n.meta.get("val")
    return n.target in CASTS and isinstance(val, torch.Tensor) and val.dtype in _FP8


__all__ = ["other_use"]
