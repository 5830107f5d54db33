"""Where device work meets what follows from Python ints: there the host's values come in."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import fx

from rtc.passes.analysis.collectives import is_collective
from rtc.passes.analysis.heavy import is_heavy
from rtc.passes.analysis.host import Deps, HostInfo
from rtc.passes.analysis.shapes import hint
from rtc.passes.analysis.slots import is_pointwise

aten = torch.ops.aten

_MOST = 1 << 20  # elements; a larger table is cheaper made on the device
_WEIGHTS = 1 << 16  # elements
WIDE = 1 << 20  # bytes; as much is not worked out and sent in every call if a part of it will do


def meetings(
    graph: fx.Graph, host: HostInfo
) -> Iterator[tuple[fx.Node, fx.Node, tuple[int, ...], torch.dtype]]:
    """(host value, its user on the device, shape and dtype of the tensor to send)."""
    live = _live(graph)  # what was rewritten is still there, for the host to evaluate
    # what follows from ints; products with weights stay on the device, else the host would have
    # those of a time embedding, and its work
    numbers: dict[fx.Node, None] = {}
    work: set[fx.Node] = set()
    for n in graph.nodes:
        if host.deps.get(n, Deps.DATA) & (Deps.INT | Deps.DATA) != Deps.INT:
            continue
        if _is_work(n) or any(a in work for a in n.all_input_nodes):
            work.add(n)
        else:
            numbers[n] = None

    def users(node: fx.Node) -> list[fx.Node]:
        return [
            u for u in node.users
            if u in live and u.op != "output"
            and (u in work or Deps.DATA in host.deps.get(u, Deps.DATA))
        ]  # fmt: skip

    here: set[fx.Node] = set()  # made on the device, from less
    for node in numbers:
        if users(node):
            here |= _from_less(node, numbers)
    for node in numbers:
        if node in here:
            continue
        val = node.meta["val"]
        for user in [*users(node), *(u for u in node.users if u in here)]:
            if isinstance(val, torch.Tensor):
                if _stays(node) and val.numel() <= _MOST:
                    yield node, user, tuple(val.shape), val.dtype
            elif _takes_tensor(user, node):
                whole = isinstance(val, (int, torch.SymInt))
                yield node, user, (), torch.int64 if whole else torch.float64


def _is_work(node: fx.Node) -> bool:
    """A product with weights, or another library's op. A small product may make a table of
    positions, whose others are made on the host: all of them round alike."""
    if not is_heavy(node):
        return False
    sizes = [_size(a) for a in node.all_input_nodes]
    return max(sizes, default=0) >= _WEIGHTS or not _is_aten(node)


def _size(node: fx.Node) -> int:
    val = node.meta["val"]
    return int(hint(val.numel())) if isinstance(val, torch.Tensor) else 0


def _is_aten(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"


def _from_less(node: fx.Node, numbers: Collection[fx.Node]) -> set[fx.Node]:
    """What the device can make of a few small values instead of getting a wide ``node`` sent: a
    table of all tokens from those of its frames, say. ``numbers``: what the host works out."""
    wide = _bytes(node) if _stays(node) else 0
    if wide < WIDE:
        return set()
    device = node.meta["val"].device
    made: set[fx.Node] = set()
    sent: dict[fx.Node, int] = {}
    todo = [node]
    while todo:
        n = todo.pop()
        behind = [a for a in n.all_input_nodes if a in numbers]
        if all(_stays(a) and a.meta["val"].device == device for a in behind):
            made.add(n)
            todo += [a for a in behind if a not in made]
        else:
            sent[n] = _bytes(n)  # node itself, or a tensor whose sizes stay
    return made if 4 * sum(sent.values()) <= wide and sent else set()


def _stays(node: fx.Node) -> bool:
    """A tensor whose sizes stay."""
    val = node.meta["val"]
    return isinstance(val, torch.Tensor) and all(isinstance(s, int) for s in val.shape)


def _bytes(node: fx.Node) -> int:
    return node.meta["val"].numel() * node.meta["val"].dtype.itemsize


def _takes_tensor(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user`` takes a number in the places of ``node`` as a tensor just as well."""
    if not isinstance(user.target, torch._ops.OpOverload) or not is_pointwise(user.target):
        return False
    if not isinstance(user.meta.get("val"), torch.Tensor):
        return False
    others = [a.meta["val"] for a in user.all_input_nodes if a is not node]
    tensors = [v for v in others if isinstance(v, torch.Tensor)]
    # a number has no say in the result's dtype; a tensor of no dimension has, beside another such
    # one, or beside tensors of a lesser kind
    whole = isinstance(node.meta["val"], (int, torch.SymInt))
    if any(v.dim() == 0 for v in tensors) or not any(
        v.is_floating_point() or (whole and v.dtype != torch.bool) for v in tensors
    ):
        return False
    params = user.target._schema.arguments
    at = [i for i, a in enumerate(user.args) if a is node]
    if not at or any(a is node for a in user.kwargs.values()):
        return False
    return all(isinstance(params[i].type, torch.TensorType) for i in at)


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that the output, a write or another rank depends on."""
    stack = [
        n for n in graph.nodes
        if n.op == "output" or n.target is aten.copy_.default or is_collective(n)
    ]  # fmt: skip
    live: set[fx.Node] = set()
    while stack:
        n = stack.pop()
        if n not in live:
            live.add(n)
            stack += n.all_input_nodes
    return live


__all__ = ["meetings"]
