"""Attention that is written out, and heads repeated for it, as the one op that later passes know.

Before:
    w: f32[B, H, T, S] = _softmax(bmm(q, t(k)) * c, -1)     # whatever is reshaped on the way
    o: f32[B * H, T, E] = bmm(w, v)
    k: f32[B, H, S, D] = reshape(expand(unsqueeze(k0, 2), [B, G, H / G, S, D]));  attention(q, k, v)
After:
    o = reshape(attention(q, k, v, scale=c))
    attention(q, k0, v0, enable_gqa=True)

Does something only where attention may run in FP8, by the user's consent: there it has to see keys
and values as they come out of a cache.

Refuses (leaves as it is, unasked): masks, biases and dropout; weights that something else reads;
scores scaled by anything but numbers; repetitions with work on top; operands of several dtypes.
Numerics: exact, but for roundings of scores and weights to a half type, which are left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from rtc.kernels import attention as _kernel  # registers the op
from rtc.passes.analysis.effects import dead_code
from rtc.passes.analysis.fn import LAYOUT, permutation
from rtc.passes.analysis.fp8 import CASTS, SAME, WIDE
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.nodes import Emitter, val

aten = torch.ops.aten
attention = torch.ops.rtc.attention.default


def run(ctx: Context) -> Outcome:
    out = Outcome()
    if not (ctx.switches.get("fp8_attention") or ctx.switches.get("quantize_kv")):
        return out
    graph = ctx.gm.graph
    written = repeated = 0
    for node in list(graph.nodes):
        if node.target is aten.bmm.default:
            written += _written_out(graph, node)
    for node in list(graph.nodes):
        if node.target is attention:
            repeated += _repeated(graph, node)
    out.matched = out.applied = written + repeated
    if out.applied:
        out.notes.append(f"{written} written out, {repeated} with repeated heads")
        dead_code(graph)
        ctx.renew()  # a plan of what the graph is now
    return out


# ---- written out ---------------------------------------------------------------------------------

_Axes = tuple[int | None, int | None]  # of new tokens and of slots; None: there is but one


def _down(at: fx.Node, axes: _Axes) -> tuple[fx.Node, _Axes] | None:
    """One step of layout or cast down; None where there is none to take."""
    if at.op != "call_function" or len(at.users) != 1:
        return None
    if at.target in CASTS or at.target in SAME:
        return (at.args[0], axes) if val(at).dtype in WIDE else None  # type: ignore[return-value]
    if at.target not in LAYOUT:
        return None
    below: fx.Node = at.args[0]  # type: ignore[assignment]
    shape, source = list(val(at).shape), list(val(below).shape)
    perm = permutation(at.target, at.args, len(shape))
    if perm is not None:
        rest = [p for i, p in enumerate(perm) if i not in axes and shape[i] > 1]
        if rest != sorted(rest):
            return None
        return below, tuple(None if i is None else perm[i] for i in axes)  # type: ignore[return-value]
    if math.prod(shape) != math.prod(source):
        return None
    found = tuple(None if i is None else _same_axis(shape, i, source) for i in axes)
    if any(i is not None and f is None for i, f in zip(axes, found, strict=True)):
        return None
    return below, found  # type: ignore[return-value]


def _same_axis(shape: list[int], axis: int, source: list[int]) -> int | None:
    """The axis of ``source`` that a reshape to ``shape`` leaves as ``axis``, whole."""
    before = math.prod(shape[:axis])
    for i, n in enumerate(source):
        if n == shape[axis] and math.prod(source[:i]) == before:
            return i
    return None


def _written_out(graph: fx.Graph, node: fx.Node) -> bool:
    """``node``: the product of weights and values."""
    w, v = node.args
    assert isinstance(w, fx.Node)
    assert isinstance(v, fx.Node)
    sizes = (*val(node).shape, *val(w).shape, *val(v).shape)
    if any(not isinstance(n, int) for n in sizes):
        return False
    n, t, s = val(w).shape
    start: _Axes = (1 if t > 1 else None, 2 if s > 1 else None)
    step: tuple[fx.Node, _Axes] | None = (w, start)
    at, axes = w, start
    while step is not None:
        at, axes = step
        step = _down(at, axes)
    if at.target is not aten._softmax.default or len(at.users) != 1 or axes[1] is None:
        return False
    rank = val(at).dim()
    if int(at.args[1]) % rank != axes[1]:  # type: ignore[call-overload]
        return False
    lead = [int(x) for i, x in enumerate(val(at).shape) if i not in axes and x > 1]
    scale = 1.0
    at = at.args[0]  # type: ignore[assignment]
    while at.target is not aten.bmm.default:
        number = at.args[1] if len(at.args) > 1 else None
        if at.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
            if type(number) not in (int, float) or len(at.users) != 1 or not number:
                return False
            times = at.target in (aten.mul.Tensor, aten.mul.Scalar)
            scale = scale * number if times else scale / number  # type: ignore[operator]
            at = at.args[0]  # type: ignore[assignment]
            continue
        step = _down(at, axes)
        if step is None:
            return False
        at, axes = step
    if len(at.users) != 1 or axes != start or not scale > 0:
        return False
    q, k = at.args
    assert isinstance(q, fx.Node)
    assert isinstance(k, fx.Node)
    if tuple(val(at).shape) != (n, t, s) or len({val(x).dtype for x in (q, k, v, node)}) > 1:
        return False
    batch = lead[0] if len(lead) == 2 and math.prod(lead) == n else 1
    heads = n // batch
    with graph.inserting_before(node):
        emit = Emitter(graph, node)
        q4, k4, v4 = (_four_axes(emit, x, batch, heads) for x in (q, k, v))
        k4 = emit(aten.transpose.int, k4, 2, 3)
        y = emit(attention, q4, k4, v4, None, False, scale, False)
        y = emit(aten.reshape.default, y, list(val(node).shape))
    node.replace_all_uses_with(y)
    graph.erase_node(node)
    return True


def _four_axes(emit: Emitter, x: fx.Node, batch: int, heads: int) -> fx.Node:
    """[batch, heads, .., ..] of ``x`` [batch * heads, .., ..]: what it was before, or a reshape."""
    want = [batch, heads, *val(x).shape[1:]]
    at = x
    while at.op == "call_function" and at.target in (*LAYOUT, *SAME):
        if permutation(at.target, at.args, val(at).dim()) is not None:
            break
        at = at.args[0]  # type: ignore[assignment]
        if val(at).numel() != val(x).numel():
            break
        if list(val(at).shape) == want:
            return at
    return emit(aten.reshape.default, x, want)


# ---- repeated heads ------------------------------------------------------------------------------


def _repeated(graph: fx.Graph, node: fx.Node) -> bool:
    *operands, _, _, _, grouped = node.args
    shapes = [val(x).shape for x in operands]  # type: ignore[arg-type]
    if grouped or any(len(s) != 4 for s in shapes) or len({s[1] for s in shapes}) > 1:
        return False
    found = [_before_repetition(x) for x in operands[1:]]  # type: ignore[arg-type]
    repeats = [f for f in found if f is not None]
    if len(repeats) < 2 or repeats[0][0] != repeats[1][0]:
        return False
    with graph.inserting_before(node):
        emit = Emitter(graph, node)
        for i, (_, x, layout) in enumerate(repeats, 1):
            for target, arg in layout:
                x = emit(target, x, arg)
            node.update_arg(i, x)
    node.update_arg(6, True)
    return True


def _before_repetition(x: fx.Node) -> tuple[int, fx.Node, list[tuple[Any, list[int]]]] | None:
    """(times, node, layout on top) where each head of ``x`` [B, H, S, D] stands several times, one
    behind another; the layout makes [B, G, S, D] of the node."""
    chain: list[fx.Node] = []
    at = x
    while at.op == "call_function" and at.target in (*LAYOUT, *SAME):
        below: fx.Node = at.args[0]  # type: ignore[assignment]
        if at.target is aten.expand.default and val(at).numel() != val(below).numel():
            break
        chain.append(at)
        at = below
    if at.target is not aten.expand.default:
        return None
    below = at.args[0]  # type: ignore[assignment]
    shape, source = list(val(at).shape), list(val(below).shape)
    source = [1] * (len(shape) - len(source)) + source
    wide = [i for i, (a, b) in enumerate(zip(shape, source, strict=True)) if a != b]
    if len(wide) != 1 or any(not isinstance(size, int) for size in shape):
        return None
    (axis,) = wide
    for apart in (True, False):  # an axis of its own, that becomes part of the heads'; or theirs
        layout = _climbed(chain[::-1], shape, axis, apart)
        if layout is not None:
            return shape[axis], below, layout
    return None


def _climbed(
    chain: list[fx.Node], shape: list[int], axis: int, apart: bool
) -> list[tuple[Any, list[int]]] | None:
    """``chain`` as it is without the repetition on ``axis`` of ``shape``, if that ends in heads."""
    times, heads = shape[axis], None if apart else axis
    small = [size for i, size in enumerate(shape) if i != axis or not apart]
    small = small if apart else [*shape[:axis], 1, *shape[axis + 1 :]]
    layout: list[tuple[Any, list[int]]] = [(aten.reshape.default, small)]
    for n in chain:
        if n.target in SAME:
            continue
        after = list(val(n).shape)
        perm = permutation(n.target, n.args, len(shape))
        if perm is not None and heads is not None:
            heads = perm.index(heads)
            layout.append((aten.permute.default, perm))
        elif perm is not None:
            layout.append((aten.permute.default, [p - (p > axis) for p in perm if p != axis]))
            axis = perm.index(axis)
        elif after != shape and heads is not None:
            heads = _same_axis(shape, heads, after)
            if heads is None:
                return None
            rest = [size // times if i == heads else size for i, size in enumerate(after)]
            layout.append((aten.reshape.default, rest))
        elif after != shape:
            if axis == 0:
                return None
            heads = axis - 1
            if after != [*shape[:heads], shape[heads] * times, *shape[axis + 1 :]]:
                return None
        shape = after
    return layout if heads == 1 else None


PASS = Pass(
    "unify_attention",
    "exact",
    run,
    "attention written out, or over repeated heads, as one op, where it may run in FP8",
    stage="trace",
)

del _kernel
