"""Counts whole-cache work in a graph: elements, not time. A count proves what a timing hints."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import fx

from rtc.passes.analysis.fn import LAYOUT
from rtc.passes.analysis.movement import SPLITS
from rtc.passes.analysis.shapes import hint
from rtc.passes.analysis.slots import is_pointwise

aten = torch.ops.aten
_VIEWS = {*LAYOUT, *SPLITS, aten.slice.Tensor, aten.select.int, operator.getitem,
          aten.view_as_real.default, aten.view_as_complex.default}  # fmt: skip
_MOVES = {aten.cat.default, aten.clone.default, aten.copy.default, aten.roll.default,
          aten.slice_scatter.default, aten.select_scatter.default, aten.index_select.default,
          aten.constant_pad_nd.default, aten.index.Tensor, aten.stack.default}  # fmt: skip
# These write in place once lowered: they cost their fresh rows, not the cache.
_WRITES = {aten.index_put.default: 2, aten.index_copy.default: 3}


def count_work(gm: fx.GraphModule, caches: Sequence[fx.Node]) -> dict[str, int]:
    """Elements that a call computes pointwise over whole caches, and that it copies about.

    ``whole_cache_elements``: outputs of pointwise ops and reductions' inputs, at least as large as
    half a cache (RoPE works on halves), reached from a cache through layout, movement and pointwise
    ops. ``copy_elements``: outputs of ops that copy as many elements. ``caches``: the inputs that
    count.
    """
    reach: dict[fx.Node, int] = {n: _elements(n.meta["val"]) for n in caches}
    pointwise = copies = 0
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is aten.copy_.default:
            continue
        sizes = [reach[a] for a in node.all_input_nodes if a in reach]
        if not sizes:
            continue
        t, val = node.target, node.meta.get("val")
        whole = max(min(sizes) // 2, 1)
        if t in _VIEWS:
            reach[node] = max(sizes)
            continue
        if t in _WRITES:
            reach[node] = max(sizes)
            continue
        if not isinstance(val, torch.Tensor):
            continue
        n = _elements(val)
        if t in _MOVES:
            reach[node] = max(sizes)
            if n >= whole:
                copies += n
        elif is_pointwise(t):
            reach[node] = max(sizes)
            if n >= whole:
                pointwise += n
        elif torch.Tag.reduction in getattr(t, "tags", ()) and n <= whole:
            pointwise += max(sizes)
    return {"whole_cache_elements": pointwise, "copy_elements": copies}


def _elements(val: torch.Tensor) -> int:
    """Of the call that was traced: to ask a symbolic size for its value would fix it."""
    return math.prod(hint(s) for s in val.shape)
