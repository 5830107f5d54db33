"""Attention of a traced model as the one op that passes know, and back.

SDPA, and FlashAttention's own functions (flash-attn 2, FlashAttention-3), become ``rtc::attention``
where their arguments say no more than that: FlashAttention's op is opaque, and nothing could be
proved of a cache that it reads. It goes back to ``scaled_dot_product_attention``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from rtc.kernels import attention as _attention  # registers the op
from rtc.small_ints import memory, writes

aten = torch.ops.aten


def hide(gm: fx.GraphModule) -> None:
    """Calls of a Dynamo graph become the opaque op, where their arguments allow."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is F.scaled_dot_product_attention:
            _sdpa(gm.graph, node)
        elif _name(node.target) in _FLASH:
            _flash(gm.graph, node)
    gm.recompile()


def show(gm: fx.GraphModule) -> None:
    """The opaque op becomes SDPA again, for the device to lower as it knows best."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.rtc.attention.default:
            q, k, v, mask, causal, scale, gqa = node.args
            kwargs = {"scale": scale, "enable_gqa": gqa}
            with gm.graph.inserting_before(node):
                new = gm.graph.call_function(
                    aten.scaled_dot_product_attention.default, (q, k, v, mask, 0.0, causal), kwargs
                )
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
        elif node.op == "call_function" and node.target is aten.view.default:
            # strides differ where a view stands in for a cache
            node.target = aten.reshape.default
    gm.recompile()


def _sdpa(graph: fx.Graph, node: fx.Node) -> None:
    names = (
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    )  # fmt: skip
    bound = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if bound.get("dropout_p", 0.0) != 0.0:
        return
    with graph.inserting_before(node):
        new = graph.call_function(
            torch.ops.rtc.sdpa.default,
            (
                bound["query"],
                bound["key"],
                bound["value"],
                bound.get("attn_mask"),
                bound.get("is_causal", False),
                bound.get("scale"),
                bound.get("enable_gqa", False),
            ),
        )
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


# ---- FlashAttention ------------------------------------------------------------------------------

# q, k, v [B, T, H, D], or [B T, H, D] with lengths: flash_attn_interface.py of both packages (BSD)
_FLASH = {
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::_flash_attn_forward",
    "fa3_fwd::_flash_attn_forward",
}
_KNOWN = {
    "q", "k", "v", "causal", "softmax_scale",
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
}  # fmt: skip
# how the kernel goes about it, or what it gives besides
_NO_MATTER = {
    "return_softmax", "zero_tensors", "num_splits", "pack_gqa", "sm_margin", "rotary_interleaved",
    "scheduler_metadata", "deterministic",
}  # fmt: skip
_NOTHING = {
    "dropout_p": 0.0, "softcap": 0.0, "attention_chunk": 0,
    "window_size_left": -1, "window_size_right": -1,
}  # fmt: skip


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return getattr(target, "_qualified_op_name", "")


def _flash(graph: fx.Graph, node: fx.Node) -> None:
    """out [.., H, D] of FlashAttention, if nothing asks for more than attention."""
    target: Any = node.target
    op = target if isinstance(target, torch._ops.OpOverload) else target.default
    bound: dict[str, Any] = {}
    for i, arg in enumerate(op._schema.arguments):
        default = arg.default_value if arg.has_default_value() else None
        bound[arg.name] = node.args[i] if i < len(node.args) else node.kwargs.get(arg.name, default)
    for name, value in bound.items():
        if name not in _KNOWN | _NO_MATTER and value != _NOTHING.get(name):
            return
    if any(u.target is not operator.getitem or u.args[1] != 0 for u in node.users):
        return  # sums of exponentials, too
    q, k, v = (bound[n] for n in ("q", "k", "v"))
    shapes = [_value(x).shape for x in (q, k, v)]
    lengths: list[Any] = []
    if bound.get("cu_seqlens_q") is not None or bound.get("cu_seqlens_k") is not None:
        lengths = [
            _equal(bound.get(f"cu_seqlens_{x}"), bound.get(f"max_seqlen_{x}"), shape[0])
            for x, shape in zip("qk", shapes, strict=False)
        ]
        if None in lengths or lengths[0] != lengths[1]:
            return
    elif len(shapes[0]) != 4:
        return
    rows = [bound["max_seqlen_q"], bound["max_seqlen_k"]] if lengths else []
    sizes = [_value(x) for x in rows] if lengths else [shapes[0][1], shapes[1][1]]
    if bound["causal"] and not _same(sizes[0], sizes[1]):
        return  # flash-attn counts from the last key, SDPA from the first
    with graph.inserting_before(node):
        if lengths:
            q = _batched(graph, node, q, lengths[0], rows[0])
            k, v = (_batched(graph, node, x, lengths[0], rows[1]) for x in (k, v))
        heads = [graph.call_method("transpose", (x, 1, 2)) for x in (q, k, v)]
        gqa = not _same(shapes[0][-2], shapes[1][-2])
        args = (*heads, None, bool(bound["causal"]), bound["softmax_scale"], gqa)
        out = graph.call_function(torch.ops.rtc.attention.default, args)
        out.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        out = graph.call_method("transpose", (out, 1, 2))
        if lengths:
            out = graph.call_method("flatten", (out, 0, 1))
    for user in list(node.users):
        user.replace_all_uses_with(out)
        graph.erase_node(user)
    graph.erase_node(node)


def _batched(graph: fx.Graph, node: fx.Node, x: Any, batch: int, rows: Any) -> fx.Node:
    """[batch rows, H, D] as [batch, rows, H, D]: what it was, if it was that, and still is."""
    whole = x.args[0] if x.target == "flatten" and tuple(x.args[1:]) == (0, 1) else None
    if whole is not None and not x.kwargs:
        shape = _value(whole).shape
        same = len(shape) == 4 and shape[0] == batch and _same(shape[1], _value(rows))
        if same and not _written([whole], x, node):
            return whole
    return graph.call_method("unflatten", (x, 0, (batch, rows)))


def _equal(cumulative: Any, longest: Any, total: Any) -> int | None:
    """How many sequences there are, if they are all of the length of the longest."""
    chain: list[fx.Node] = []
    ends = _numbers(cumulative, chain)
    if not ends or len(ends) < 2 or _written(chain):
        return None
    size = _value(longest)
    if not isinstance(size, (int, torch.SymInt)):
        return None
    alike = all(_same(end, i * size) for i, end in enumerate(ends))
    return len(ends) - 1 if alike and _same(total, ends[-1]) else None


def _value(x: Any) -> Any:
    return x.meta["example_value"] if isinstance(x, fx.Node) else x


def _same(a: Any, b: Any) -> bool:
    """Equal in every call: nothing is guarded for it."""
    a, b = (x.node.expr if isinstance(x, torch.SymInt) else x for x in (a, b))
    return bool(a == b)


def _written(
    tensors: list[fx.Node], after: fx.Node | None = None, before: fx.Node | None = None
) -> bool:
    """Whether the graph, or the part of it between two nodes, may write to the memory of these."""
    at = {memory(t) for n in tensors if isinstance(t := _value(n), torch.Tensor)}
    nodes = list(tensors[0].graph.nodes) if tensors else []
    start = 0 if after is None else nodes.index(after) + 1
    end = len(nodes) if before is None else nodes.index(before)
    return any(
        memory(t) in at
        for n in nodes[start:end]
        if n.op in ("call_function", "call_method") and writes(n)
        for x in n.all_input_nodes
        if isinstance(t := x.meta.get("example_value"), torch.Tensor)
    )


def _numbers(x: Any, chain: list[fx.Node]) -> list[Any] | None:
    """The elements of a 1-D tensor that the graph makes from numbers; None where it does not.
    ``chain`` takes the tensors on the way."""
    if not isinstance(x, fx.Node) or x.op not in ("call_function", "call_method"):
        return None
    chain.append(x)
    args: list[Any] = list(x.args)
    kwargs: dict[str, Any] = dict(x.kwargs)
    name = x.target if isinstance(x.target, str) else getattr(x.target, "__name__", "")
    first = args[0] if args else None
    dtypes = [y for y in (*args, *kwargs.values()) if isinstance(y, torch.dtype)]
    if any(y not in (torch.int32, torch.int64) for y in dtypes):
        return None
    if name in ("to", "cuda", "int", "long", "contiguous", "type"):
        return _numbers(first, chain)
    if name == "tensor":
        return list(map(_value, first)) if _ints(first) else None  # type: ignore[arg-type]
    if name in ("zeros", "new_zeros"):
        size = args[1 if name == "new_zeros" else 0]
        count = size[0] if isinstance(size, (list, tuple)) and len(size) == 1 else size
        return [0] * count if type(count) is int else None
    if name in ("cat", "concat", "concatenate") and isinstance(first, (list, tuple)):
        pieces = [_numbers(piece, chain) for piece in first]
        if None in pieces or [*args[1:], *kwargs.values()] not in ([], [0], [-1]):
            return None
        return [n for piece in pieces for n in piece or ()]
    if name == "cumsum":
        numbers = _numbers(first, chain)
        if numbers is None or (args[1] if len(args) > 1 else kwargs.get("dim")) not in (0, -1):
            return None
        return [sum(numbers[: i + 1]) for i in range(len(numbers))]
    if name in ("pad", "_pad"):
        numbers = _numbers(first, chain)
        rest = [tuple(y) if isinstance(y, list) else y for y in (*args[1:], *kwargs.values())]
        if numbers is None or rest[:1] != [(1, 0)] or {*rest[1:]} - {"constant", None, 0}:
            return None
        return [0, *numbers]
    return None


def _ints(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and all(
        type(_value(n)) is int or isinstance(_value(n), torch.SymInt) for n in x
    )


_ = _attention

__all__ = ["hide", "show"]
