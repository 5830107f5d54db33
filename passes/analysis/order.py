"""Do the consumers of a cache care in which order its slots lie?

Past the slot-local region, values mix slots with this call's data. They may still be
*order-equivariant*: permuting the slots permutes one axis of the value and nothing else. Attention
is: scores are, softmax is, and the product with the values sums over the slots. What is not, is
named, and keeps the slots in the program's own order.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import rtc.kernels.attention  # noqa: F401  (registers the op)
from rtc.passes.analysis import shapes
from rtc.passes.analysis.fn import LAYOUT, permutation
from rtc.passes.analysis.host import HostInfo, where
from rtc.passes.analysis.shapes import NotLocal
from rtc.passes.analysis.slots import (
    ALONG,
    COPIES,
    LIKE,
    NORMS,
    REDUCE,
    is_pointwise,
    keepdim,
    reduced_dims,
    shape_of,
)

aten = torch.ops.aten
attention = torch.ops.rtc.attention.default
flex_attention = torch.ops.higher_order.flex_attention


@dataclass(frozen=True)
class Ordered:
    """Axes that enumerate slots, and a token: equal tokens lie in the same order in every call."""

    dims: tuple[int, ...]
    token: Any


@dataclass(frozen=True)
class Bias:
    """An outside operand that varies along the slots and must be permuted along with them."""

    user: fx.Node
    operand: fx.Node
    axis: int  # slot axis in the operand
    token: Any


@dataclass
class OrderAnalysis:
    """``sensitive``: token -> why; ``biases``: operands to permute where the order is free.

    ``start`` maps slot-local nodes to their Ordered; ``ends`` are the (node, user) pairs at which
    the slot-local regions end.
    """

    host: HostInfo
    start: Mapping[fx.Node, Ordered]
    ends: set[tuple[fx.Node, fx.Node]]
    sensitive: dict[Any, tuple[str, fx.Node]] = field(default_factory=dict)
    biases: list[Bias] = field(default_factory=list)

    attends: bool = False  # slots are contracted somewhere, as attention does

    def __post_init__(self) -> None:
        self.vals: dict[fx.Node, Ordered] = {}
        index = self.host.index
        queue = sorted({index[user] for _, user in self.ends})
        done = -1
        while queue:
            i = heapq.heappop(queue)
            if i == done:
                continue
            done, node = i, self.host.nodes[i]
            ins = {a: o for a in node.all_input_nodes if (o := self._in(a, node)) is not None}
            try:
                out = self._rule(node, ins)
            except NotLocal as e:
                for o in ins.values():
                    self.sensitive.setdefault(o.token, (str(e), node))
                continue
            if out is not None:
                self.vals[node] = out
                for user in node.users:
                    heapq.heappush(queue, index[user])
            elif node.target in (attention, aten.bmm.default, aten.mm.default):
                self.attends = True

    def _in(self, a: fx.Node, user: fx.Node) -> Ordered | None:
        if a in self.vals:
            return self.vals[a]
        return self.start[a] if (a, user) in self.ends else None

    def _rule(self, node: fx.Node, ins: dict[fx.Node, Ordered]) -> Ordered | None:
        t = node.target
        if node.op == "output":
            raise NotLocal("it is returned to the caller in slot order")
        if node.op != "call_function":
            raise NotLocal(f"{node.op} uses it")
        if t is aten.copy_.default:
            raise NotLocal("it is stored in slot order")
        if t is flex_attention and any(x in ins for x in node.args[1:3]):
            self.attends = True
            raise NotLocal("flex_attention's mask and scores may go by slot order")
        if len({o.token for o in ins.values()}) > 1:
            raise NotLocal("caches that move differently meet")
        token = next(iter(ins.values())).token
        if t is attention:
            self._attention(node, ins, token)
            return None
        if t in (aten.bmm.default, aten.mm.default):
            return self._product(node, ins, token)
        if t in LIKE:
            return None
        if t in COPIES:
            return ins[node.args[0]]  # type: ignore[index]
        if t in LAYOUT:
            return self._layout(node, ins)
        if t in (aten.view_as_real.default, aten.view_as_complex.default):
            o = ins[node.args[0]]  # type: ignore[index]
            if o.dims[-1] >= len(shape_of(node)):
                raise NotLocal("the slot axis is the complex pair")
            return o  # the pair is the last axis: the others stay
        if is_pointwise(t):
            return self._pointwise(node, ins, token)
        first = node.args[0]
        if not isinstance(first, fx.Node) or set(ins) != {first}:
            raise NotLocal(f"{t} may depend on the order of the slots")
        dims, rank = ins[first].dims, len(shape_of(first))
        if t in REDUCE:
            red = reduced_dims(node, rank)
            hit = [d for d in dims if d in red]
            if hit and (len(hit) != len(dims) or isinstance(node.meta["val"], (tuple, list))):
                raise NotLocal(f"{t} over part of the slots")
            if hit:
                return None
            if keepdim(node, REDUCE[t][1]):
                return Ordered(dims, token)
            return Ordered(tuple(d - sum(1 for r in red if r < d) for d in dims), token)
        if t in ALONG:
            pos = ALONG[t]
            arg = node.args[pos] if len(node.args) > pos else -1
            along = shapes.normal_dims(arg, rank)
            over = any(d in along for d in dims)
            soft = t in (aten._softmax.default, aten._log_softmax.default)
            if over and (not soft or len(dims) != 1):
                raise NotLocal(f"{t} runs along the slots")
            if isinstance(node.meta["val"], (tuple, list)):
                raise NotLocal(f"{t} has several outputs")
            return Ordered(dims, token)
        if t in (aten.slice.Tensor, aten.select.int):
            axis = (int(node.args[1]) if len(node.args) > 1 else 0) % rank  # type: ignore[arg-type]
            if axis in dims:
                raise NotLocal("slots are picked by their place")
            return Ordered(tuple(d - (axis < d and t is aten.select.int) for d in dims), token)
        if t in NORMS:
            raise NotLocal("a norm over values that mix slots")
        raise NotLocal(f"{t} may depend on the order of the slots")

    def _attention(self, node: fx.Node, ins: dict[fx.Node, Ordered], token: Any) -> None:
        q, k, v, mask, causal = node.args[:5]
        for x, name in ((k, "key"), (v, "value")):
            if x not in ins:
                raise NotLocal(f"attention whose {name} is not a cache of the same movement")
            if ins[x].dims != (len(shape_of(x)) - 2,):  # type: ignore[arg-type,index]
                raise NotLocal("the slots are not attention's key axis")
        if q in ins:
            raise NotLocal("the cache is attention's query")
        if causal:
            raise NotLocal("is_causal masks by slot order")
        if mask is not None:
            if mask in ins:
                raise NotLocal("the mask is made from the cache")
            self._bias(node, mask, len(shape_of(mask)) - 1, token)  # type: ignore[arg-type]

    def _bias(self, node: fx.Node, operand: fx.Node, axis: int, token: Any) -> None:
        if shape_of(operand)[axis] == 1:
            return
        if not self.host.on_host(operand):
            raise NotLocal(
                f"{operand.name} varies along the slots and depends on "
                f"{self.host.why_data(operand)}, known on the device only"
            )
        self.biases.append(Bias(node, operand, axis, token))

    def _product(self, node: fx.Node, ins: dict[fx.Node, Ordered], token: Any) -> Ordered | None:
        a, b = node.args[:2]
        rank = len(shape_of(node))
        da = ins[a].dims if a in ins else None  # type: ignore[index]
        db = ins[b].dims if b in ins else None  # type: ignore[index]
        if a is b:
            raise NotLocal("product of the cache with itself")
        if da is not None and db is not None:
            if da == (rank - 1,) and db == (rank - 2,):
                return None
            raise NotLocal("a product that pairs slots with slots")
        if da == (rank - 2,):
            return Ordered((rank - 2,), token)
        if db == (rank - 1,):
            return Ordered((rank - 1,), token)
        raise NotLocal("slots are summed with weights that go by place")

    def _layout(self, node: fx.Node, ins: dict[fx.Node, Ordered]) -> Ordered:
        x: fx.Node = node.args[0]  # type: ignore[assignment]
        o, src, dst = ins[x], shape_of(x), shape_of(node)
        perm = permutation(node.target, node.args, len(src))
        if perm is not None:
            dims = tuple(perm.index(d) for d in o.dims)
            if list(dims) != sorted(dims):
                raise NotLocal("slot axes are swapped")
            return Ordered(dims, o.token)
        if node.target is aten.expand.default:
            off = len(dst) - len(src)
            return Ordered(tuple(d + off for d in o.dims), o.token)
        dims = shapes.reshape_dims(src, dst, o.dims)
        if len(dims) != len(o.dims):
            raise NotLocal("the slot axis is regrouped")
        return Ordered(dims, o.token)

    def _pointwise(self, node: fx.Node, ins: dict[fx.Node, Ordered], token: Any) -> Ordered:
        rank = len(shape_of(node))
        dims: tuple[int, ...] | None = None
        for a, o in ins.items():
            d = tuple(x + rank - len(shape_of(a)) for x in o.dims)
            if dims is not None and dims != d:
                raise NotLocal("slots meet other slots")
            dims = d
        assert dims is not None
        for a in node.all_input_nodes:
            if a in ins or not isinstance(a.meta["val"], torch.Tensor):
                continue
            sa = shape_of(a)
            axes = [d - (rank - len(sa)) for d in dims]
            if all(x < 0 or sa[x] == 1 for x in axes):
                continue
            if len(axes) != 1:
                raise NotLocal("an operand varies over several slot axes")
            self._bias(node, a, axes[0], token)
        return Ordered(dims, token)


def explain(reason: str, node: fx.Node) -> str:
    at = where(node)
    return f"{reason} ({node.name}{', ' + at if at else ''})"
