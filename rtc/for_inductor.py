"""What Inductor computes wrong, spelled so that it computes it right.

Both were found by holding compiled models against eager ones, and are torch.compile's own (2.11 to
2.14, on a CPU): attention over more than four axes, and an int that changes from call to call in
the arithmetic of a half type, to which Inductor rounds it first (65,505 is infinite in float16).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rtc.passes.analysis.effects import is_random

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_ARITHMETIC = {
    op
    for name in ("add", "sub", "mul", "div", "rsub", "remainder")
    for packet in (getattr(aten, name),)
    for op in (getattr(packet, overload, None) for overload in ("Tensor", "Scalar"))
    if op is not None
}


def spell(gm: fx.GraphModule) -> None:
    """Changes an ATen graph in place."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.scaled_dot_product_attention.default:
            _four_axes(gm.graph, node)
        elif node.target in _ARITHMETIC:
            _number(gm.graph, node)
    gm.recompile()


def settings(gm: fx.GraphModule) -> dict[str, Any]:
    """Attention that is written out over more than four axes is taken for another's pattern.
    Random numbers are those that eager draws, not Inductor's own."""
    soft = gm.graph.find_nodes(op="call_function", target=aten._softmax.default)
    many = any(_val(n).dim() > 4 for n in soft if isinstance(_val(n), torch.Tensor))
    given: dict[str, Any] = {"pattern_matcher": False} if many else {}
    if any(
        isinstance(n.target, torch._ops.OpOverload) and is_random(n.target) for n in gm.graph.nodes
    ):
        given["fallback_random"] = True
    return given


def _val(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, fx.Node) else x


def _number(graph: fx.Graph, node: fx.Node) -> None:
    """In float32, as eager computes it."""
    out = _val(node)
    if not isinstance(out, torch.Tensor) or out.dtype not in _HALF:
        return
    symbols = [a for a in node.args if isinstance(_val(a), (torch.SymInt, torch.SymFloat))]
    tensors = [a for a in node.args if isinstance(_val(a), torch.Tensor)]
    if not symbols or any(_val(t).dtype != out.dtype for t in tensors):
        return
    with graph.inserting_before(node):
        wide = {t: _to(graph, t, torch.float32) for t in tensors}
        args = tuple(wide[a] if a in tensors else a for a in node.args)
        new = graph.call_function(node.target, args, node.kwargs)  # type: ignore[arg-type]
        new.meta = {**node.meta, "val": out.to(torch.float32)}
        back = _to(graph, new, out.dtype)
        back.meta = dict(node.meta)
    node.replace_all_uses_with(back)
    graph.erase_node(node)


def _to(graph: fx.Graph, x: Any, dtype: torch.dtype) -> fx.Node:
    new = graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
    new.meta["val"] = _val(x).to(dtype)
    return new


def _four_axes(graph: fx.Graph, node: fx.Node) -> None:
    """[B, F, H, T, D] as [B F, H, T, D], where the leading axes are the same for all operands."""
    q, k, v = node.args[:3]
    shapes = [tuple(_val(x).shape) for x in (q, k, v)]
    lead = shapes[0][:-3]
    if len(lead) < 2 or any(s[:-3] != lead for s in shapes):
        return
    sizes = [n if isinstance(n, int) else -1 for n in lead]
    if sizes.count(-1) > 1:
        return
    mask = node.args[3] if len(node.args) > 3 else None
    with graph.inserting_before(node):
        if mask is not None and _val(mask).dim() > 3:
            if -1 in sizes:
                return
            mask = graph.call_function(
                aten.expand.default, (mask, [*sizes, *_sizes(_val(mask).shape[-3:])])
            )
            mask = _flat(graph, mask, len(lead))
        args = [_flat(graph, x, len(lead)) for x in (q, k, v)]
        new = graph.call_function(
            node.target,  # type: ignore[arg-type]
            (*args, mask, *node.args[4:]),
            node.kwargs,
        )
        out = graph.call_function(aten.unflatten.int, (new, 0, sizes))
        out.meta = dict(node.meta)
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def _sizes(shape: Any) -> list[Any]:
    return [n if isinstance(n, int) else -1 for n in shape]  # -1: as it is


def _flat(graph: fx.Graph, x: Any, count: int) -> fx.Node:
    return graph.call_function(aten.flatten.using_ints, (x, 0, count - 1))


__all__ = ["settings", "spell"]
