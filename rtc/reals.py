"""Complex arithmetic that ends in ``view_as_real``, spelled in reals.

Rotations are often written with complex numbers, which Inductor has no code for: it falls back op
by op, each through memory, in complex128 as often as not. In reals the whole rotation is one kernel
with what stands around it. A complex x [...] is [..., 2] here. Products are torch's to the last bit
or so; what would lie in memory otherwise than torch lays it out is left as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rtc.passes.analysis.shapes import hint
from rtc.passes.nodes import Emitter

aten = torch.ops.aten

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
# op -> the place of its argument that counts axes
_AXES = {
    aten.cat.default: 1,
    aten.slice.Tensor: 1,
    aten.select.int: 1,
    aten.unsqueeze.default: 1,
    aten.index_select.default: 1,
    aten.split_with_sizes.default: 2,
    aten.split.Tensor: 2,
}
# op on sizes -> its spelling, and what stands for the last axis
_SIZES: dict[Any, tuple[Any, int]] = {
    aten.view.default: (aten.reshape.default, 2),  # the reals may lie in memory otherwise
    aten.reshape.default: (aten.reshape.default, 2),
    aten._unsafe_view.default: (aten.reshape.default, 2),
    aten.expand.default: (aten.expand.default, 2),
    aten.repeat.default: (aten.repeat.default, 1),
}
_ALIKE = {aten.clone.default, aten.alias.default, aten.detach.default, aten.index.Tensor}
_CONJ = {aten.conj_physical.default, aten._conj_physical.default, aten._conj.default}
_OTHERS = {operator.getitem, aten.permute.default, aten.transpose.int, *_ALIKE, *_CONJ}
_TO = {"dtype", "device", "layout", "non_blocking"}
_SOURCES = {aten.view_as_complex.default, aten.polar.default}


def spell(gm: fx.GraphModule) -> None:
    """Changes an ATen graph in place."""
    known: dict[fx.Node, bool] = {}
    found = gm.graph.find_nodes(op="call_function", target=aten.view_as_real.default)
    ends = [n for n in found if _has_spelling(n.args[0], known)]
    wanted: set[fx.Node] = set()
    todo: list[Any] = [n.args[0] for n in ends]
    while todo:
        node = todo.pop()
        if node not in wanted:
            wanted.add(node)
            todo += _operands(node)
    reals: dict[fx.Node, Any] = {}
    before = dict.fromkeys(gm.graph.nodes)
    for node in before:
        if node in wanted:
            at = node  # there: what it reads may be written later
            while at.op == "placeholder":
                at = at.next
            with gm.graph.inserting_before(at):
                reals[node] = _spelling(node, reals, Emitter(gm.graph, node))
    for node in ends:
        if _laid_out_alike(reals[node.args[0]], node):
            node.replace_all_uses_with(reals[node.args[0]])
            gm.graph.erase_node(node)
    for node in reversed(list(gm.graph.nodes)):
        mine = node not in before or (node in wanted and node.op != "placeholder")
        if mine and not node.users:
            gm.graph.erase_node(node)
    if ends:
        gm.recompile()


def _laid_out_alike(a: fx.Node, b: fx.Node) -> bool:
    """Of one shape: whether strides agree, where they matter."""
    x, y = a.meta["val"], b.meta["val"]
    strides = zip(x.shape, x.stride(), y.stride(), strict=True)
    return all(hint(n) == 1 or hint(s) == hint(t) for n, s, t in strides)


def _val(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, fx.Node) else None


def _is_complex(x: Any) -> bool:
    """Of a tensor, or of all in a list."""
    val = _val(x)
    vals = val if isinstance(val, (list, tuple)) else [val]
    return bool(vals) and all(isinstance(v, torch.Tensor) and v.dtype in _REAL for v in vals)


def _operands(node: fx.Node) -> list[fx.Node]:
    """What has to be in reals for ``node`` to be."""
    if node.op == "placeholder" or node.target in _SOURCES:
        return []
    return [n for n in node.all_input_nodes if _is_complex(n)]


def _has_spelling(node: Any, known: dict[fx.Node, bool]) -> bool:
    todo = [node]
    while todo:
        n = todo[-1]
        unknown = [m for m in _operands(n) if m not in known] if n not in known else []
        if unknown and _is_known(n):
            todo += unknown
            continue
        if n not in known:
            known[n] = _is_known(n) and all(known[m] for m in _operands(n))
        todo.pop()
    return known[node]


def _is_known(node: fx.Node) -> bool:
    """Whether there is a spelling if there is one for its operands."""
    if not _is_complex(node):
        return False
    if node.op == "placeholder":
        return not _val(node).is_conj()
    tensors = [_val(n) for n in node.all_input_nodes if isinstance(_val(n), torch.Tensor)]
    if len({t.device for t in tensors}) > 1 or any(t.dim() == 0 for t in tensors):
        return False
    if node.target in _SOURCES:
        return True
    if node.target is aten._to_copy.default:
        return _is_complex(node.args[0]) and node.kwargs.keys() <= _TO
    if node.kwargs:
        return False
    if node.target is aten.cat.default:
        axes = {_val(a).dim() for a in node.all_input_nodes}
        return len(axes) == 1 and _of_one_dtype(node.args[0], [_val(node).dtype])
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return _of_one_dtype(node.args, [_val(node).dtype])
    if node.target is aten.mul.Tensor:
        return _of_one_dtype(node.args, [_val(node).dtype, _REAL[_val(node).dtype]])
    return node.target in _AXES or node.target in _SIZES or node.target in _OTHERS


def _of_one_dtype(args: Any, dtypes: list[torch.dtype]) -> bool:
    """Promotion is torch's affair."""
    return all(isinstance(_val(a), torch.Tensor) and _val(a).dtype in dtypes for a in args)


def _spelling(node: fx.Node, reals: dict[fx.Node, Any], emit: Emitter) -> Any:
    """[..., 2] for a complex [...]."""
    target: Any = node.target
    if node.op == "placeholder":
        return emit(aten.view_as_real.default, node)
    if target is aten.view_as_complex.default:
        return node.args[0]
    if target is aten.polar.default:
        size, angle = node.args
        return emit(
            aten.stack.default,
            [emit(aten.mul.Tensor, size, emit(f.default, angle)) for f in (aten.cos, aten.sin)],
            -1,
        )
    args: list[Any] = list(fx.node.map_arg(node.args, lambda n: reals.get(n, n)))
    if target is aten.mul.Tensor:
        return _product(node, args, emit)
    if target in _CONJ:
        return emit(aten.cat.default, [_part(args[0], 0, emit), _negated(args[0], emit)], -1)
    axes = node.meta["val"].dim() if isinstance(node.meta["val"], torch.Tensor) else None
    if target is aten._to_copy.default:
        to: Any = {k: _REAL.get(v, v) for k, v in node.kwargs.items()}  # type: ignore[arg-type]
        return emit(target, *args, **to)
    if target in _SIZES:
        target, last = _SIZES[target]
        args[1] = [*args[1], last]
    elif target is aten.permute.default:
        args[1] = [*(d % axes for d in args[1]), axes]
    elif target is aten.transpose.int:
        args[1:] = [d % axes for d in args[1:]]
    elif target in _AXES:
        at = _AXES[target]
        if len(args) > at:
            first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            count = first.meta["val"].dim() - 1 + (target is aten.unsqueeze.default)
            args[at] %= count
    return emit(target, *args)


def _product(node: fx.Node, args: list[Any], emit: Emitter) -> Any:
    factors = [_is_complex(a) for a in node.args]
    if not all(factors):
        args = [
            a if c else emit(aten.unsqueeze.default, a, -1)
            for a, c in zip(args, factors, strict=True)
        ]
        return emit(aten.mul.Tensor, *args)
    # the smaller one is taken apart: a table, which is broadcast over heads
    sizes = [hint(a.meta["val"].numel()) for a in args]
    w, x = args if sizes[0] < sizes[1] else args[::-1]
    turned = emit(aten.cat.default, [_negated(w, emit), _part(w, 1, emit)], -1)
    straight = emit(aten.mul.Tensor, x, _part(w, 0, emit))
    crossed = emit(aten.mul.Tensor, emit(aten.flip.default, x, [-1]), turned)
    return emit(aten.add.Tensor, straight, crossed)


def _part(x: Any, i: int, emit: Emitter) -> fx.Node:
    """The real parts (0) or the imaginary ones (1): [..., 1]."""
    return emit(aten.slice.Tensor, x, -1, i, i + 1)


def _negated(x: Any, emit: Emitter) -> fx.Node:
    return emit(aten.neg.default, _part(x, 1, emit))
