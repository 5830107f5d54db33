"""Rows that are an affine function of a normalised row: norm(h) * A + B, A and B one a channel.

    norm: "layer": (h - mean(h)) / sqrt(var(h) + eps)      "rms": h / sqrt(mean(h^2) + eps)

The ops for a norm are known. A norm that is spelled out is any product or quotient of a row and one
number a row that computes the same as one of the two formulas: it is run in float64 on sample rows,
from the candidate for h on, and eps is read off rows that are almost zero. Around the norm are
products and sums with values per channel, casts among float types (their rounding is not kept) and
reshapes that leave the last axis whole.

Shapes: rows [.., C], M of them; vectors per channel C elements, all other axes 1, or one element.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from rtc.passes.analysis import kinks
from rtc.passes.analysis.fn import LAYOUT
from rtc.passes.analysis.fp8 import CASTS, SAME
from rtc.passes.analysis.slots import COPIES, is_pointwise
from rtc.passes.nodes import Emitter, arg_by_name, val
from rtc.passes.plan import Refusal

aten = torch.ops.aten

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_SAME = {*SAME, *COPIES}
_LAYER = (aten.native_layer_norm.default, aten.layer_norm.default)
_RMS = (aten._fused_rms_norm.default, aten.rms_norm.default)
_MUL = (aten.mul.Tensor, aten.mul.Scalar)
_DIV = (aten.div.Tensor, aten.div.Scalar)
_ADD = (aten.add.Tensor, aten.add.Scalar)
_SUB = (aten.sub.Tensor, aten.sub.Scalar)
_REDUCTIONS = (
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.var.correction,
    aten.var.dim,
    aten.var_mean.correction,
    aten.var_mean.dim,
    aten.linalg_vector_norm.default,
)
_LIMIT = 64  # nodes of a norm that is spelled out
_FACTOR = "a factor that differs from row to row, or within a row's channels"


class NotNormed(Exception):
    """No norm behind it."""


class Refused(Exception):
    """A norm, but with something around it that is not affine a channel."""

    def __init__(self, reason: str, node: fx.Node) -> None:
        super().__init__(reason)
        self.refusal = Refusal.at(reason, node)


# ---- vectors -------------------------------------------------------------------------------------

Vec = Any  # a node [C] or of one element, a number, or (ATen op, Vec, Vec)


def times(a: Vec, b: Vec) -> Vec:
    if a == 1:
        return b
    return a if b == 1 else (aten.mul.Tensor, a, b)


def over(a: Vec, b: Vec) -> Vec:
    return (aten.div.Tensor, a, b)


def plus(a: Vec, b: Vec) -> Vec:
    if a == 0:
        return b
    return a if b == 0 else (aten.add.Tensor, a, b)


def leaves(v: Vec) -> set[fx.Node]:
    if isinstance(v, tuple):
        return leaves(v[1]) | leaves(v[2])
    return {v} if isinstance(v, fx.Node) else set()


def emit_vector(emit: Emitter, v: Vec, columns: int, like: fx.Node) -> fx.Node:
    """``v`` as a contiguous [C]: in its own dtype if it is a node, else computed in float32."""
    if not leaves(v):
        number = float(_number(v))
        device = val(like).device
        return emit(aten.full.default, [columns], number, dtype=torch.float32, device=device)
    made = _flat(emit, v, False) if isinstance(v, fx.Node) else _emitted(emit, v)
    if val(made).numel() != columns:
        made = emit(aten.expand.default, made, [columns])
    if not val(made).is_contiguous():
        made = emit(aten.clone.default, made, memory_format=torch.contiguous_format)
    return made


def _number(v: Vec) -> float:
    if not isinstance(v, tuple):
        return v
    a, b = _number(v[1]), _number(v[2])
    op = {aten.mul.Tensor: operator.mul, aten.add.Tensor: operator.add}.get(v[0], operator.truediv)
    return op(a, b)


def _flat(emit: Emitter, node: fx.Node, wide: bool) -> fx.Node:
    if wide and val(node).dtype != torch.float32:
        node = emit(aten._to_copy.default, node, dtype=torch.float32)
    count = val(node).numel()
    return node if val(node).dim() == 1 else emit(aten.reshape.default, node, [count])


def _emitted(emit: Emitter, v: Vec) -> Any:
    if isinstance(v, fx.Node):
        return _flat(emit, v, True)
    if not isinstance(v, tuple):
        return v
    if not leaves(v):
        return _number(v)
    a, b = _emitted(emit, v[1]), _emitted(emit, v[2])
    if not isinstance(a, fx.Node):
        if v[0] is aten.div.Tensor:
            inverse = emit(aten.reciprocal.default, b)
            return inverse if a == 1 else emit(aten.mul.Tensor, inverse, a)
        a, b = b, a  # a product or a sum
    return emit(v[0], a, b)


# ---- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """norm(h), then ``steps``: ("mul", vector) or ("add", vector), in order."""

    norm: str
    h: fx.Node
    eps: float
    steps: tuple[tuple[str, Vec], ...] = ()

    def then(self, kind: str, v: Vec) -> Row:
        *rest, last = self.steps or (("", None),)
        if kind == last[0]:
            both = times(last[1], v) if kind == "mul" else plus(last[1], v)
            return Row(self.norm, self.h, self.eps, (*rest, (kind, both)))
        return Row(self.norm, self.h, self.eps, (*self.steps, (kind, v)))

    def folded(self) -> tuple[Vec, Vec]:
        """A, B of norm(h) * A + B."""
        a: Vec = 1
        b: Vec = 0
        for kind, v in self.steps:
            if kind == "add":
                b = plus(b, v)
            else:
                a, b = times(a, v), b if b == 0 else times(b, v)
        return a, b

    def slots(self) -> tuple[Vec | None, Vec | None, Vec, Vec]:
        """weight, bias, scale, shift of norm(h) [* weight + bias] * scale + shift."""
        out: list[Vec | None] = [None] * 4
        at = 3
        for kind, v in reversed(self.steps):
            at -= (kind == "add") != (at % 2 == 1)
            if at < 0:
                return None, None, *self.folded()
            out[at] = v
            at -= 1
        weight, bias, scale, shift = out
        return weight, bias, 1 if scale is None else scale, 0 if shift is None else shift


@dataclass
class Rows:
    """Reads rows of ``columns`` channels, ``count`` elements in all."""

    columns: int
    count: int
    device: torch.device
    memo: dict[fx.Node, Row | Exception] = field(default_factory=dict)

    def __call__(self, node: fx.Node) -> Row:
        """Raises NotNormed or Refused."""
        if node not in self.memo:
            try:
                self.memo[node] = self._row(node)
            except (NotNormed, Refused) as e:
                self.memo[node] = e
        found = self.memo[node]
        if isinstance(found, Exception):
            raise found
        return found

    def full(self, x: Any) -> bool:
        """Whether it is rows by its shape."""
        return (
            isinstance(x, fx.Node)
            and isinstance(x.meta.get("val"), torch.Tensor)
            and val(x).dim() > 0
            and val(x).shape[-1] == self.columns
            and val(x).numel() == self.count
        )

    def vector(self, x: Any) -> bool:
        if not isinstance(x, fx.Node):
            return isinstance(x, (int, float)) and not isinstance(x, bool)
        v = x.meta.get("val")
        if not isinstance(v, torch.Tensor) or v.dtype not in FLOATS or v.device != self.device:
            return False
        return v.numel() == 1 or (v.numel() == self.columns == v.shape[-1])

    def _row(self, node: fx.Node) -> Row:
        if node.op != "call_function" or not self.full(node):
            raise NotNormed
        if val(node).dtype not in FLOATS:
            raise Refused(f"rows of {val(node).dtype}", node) if self._behind(node) else NotNormed
        t, args = node.target, node.args
        if t is operator.getitem and args[1] == 0 and isinstance(args[0], fx.Node):
            if args[0].target in (*_LAYER, *_RMS):
                return self._known(args[0])
        elif t in (*_LAYER, *_RMS):
            return self._known(node)
        elif t in CASTS or t in _SAME or (t in LAYOUT and t not in _MOVING):
            return self(args[0])  # type: ignore[arg-type]
        elif t is aten.neg.default:
            return self(args[0]).then("mul", -1.0)  # type: ignore[arg-type]
        elif t in _MUL:
            return self._product(node, args[0], args[1])
        elif t in _DIV:
            return self._product(node, args[0], args[1], divide=True)
        elif t in (*_ADD, *_SUB):
            alpha = arg_by_name(node, "alpha")
            return self._sum(node, args[0], args[1], alpha if t in _ADD else -alpha)
        elif t is aten.addcmul.default:
            value = arg_by_name(node, "value")
            a, b, c = args[:3]
            return self._plus(node, self._term(a), self._mul(node, b, c, value))
        raise NotNormed

    def _behind(self, node: fx.Node) -> bool:
        inner = [a for a in node.all_input_nodes if self.full(a) and a.op == "call_function"]
        return any(self._normed(a) for a in inner)

    def _normed(self, x: Any) -> bool:
        """Whether ``x`` is such a row."""
        try:
            return self.full(x) and bool(self(x))
        except (NotNormed, Refused):
            return False

    def _known(self, node: fx.Node) -> Row:
        h, eps = node.args[0], arg_by_name(node, "eps")
        assert isinstance(h, fx.Node)
        if list(arg_by_name(node, "normalized_shape")) != [self.columns]:
            raise Refused("a norm over more than the last axis", node)
        if eps is None:
            if val(h).dtype != torch.float32:
                raise Refused("an eps that depends on the dtype", node)
            eps = torch.finfo(torch.float32).eps
        row = Row("layer" if node.target in _LAYER else "rms", base(h), float(eps))
        weight = arg_by_name(node, "weight")
        bias = arg_by_name(node, "bias") if node.target in _LAYER else None
        for kind, v in (("mul", weight), ("add", bias)):
            if v is not None:
                if not self.vector(v):
                    raise Refused(f"a weight of {val(v).dtype}", node)
                row = row.then(kind, v)
        return row

    def _term(self, x: Any) -> Row | Vec:
        """Rows, where there are any to see; else a vector."""
        if self.full(x):
            try:
                return self(x)
            except NotNormed:
                if not self.vector(x):
                    raise
        if self.vector(x):
            return x
        raise NotNormed

    def _product(self, node: fx.Node, a: Any, b: Any, divide: bool = False) -> Row:
        found = self._spelled_out(node, a, b, divide)
        if found is not None:
            return found
        made = self._mul(node, a, b, 1, divide)
        if not isinstance(made, Row):
            raise NotNormed
        return made

    def _mul(self, node: fx.Node, a: Any, b: Any, value: float, divide: bool = False) -> Row | Vec:
        """a * b * value or a / b * value."""
        if not (self.vector(a) or self.vector(b)):
            if self._normed(a) or self._normed(b):
                raise Refused(_FACTOR, node)
            raise NotNormed
        x, y = self._term(a), self._term(b)
        if isinstance(y, Row) and (divide or isinstance(x, Row)):
            raise Refused("a norm that is divided by or squared", node)
        if isinstance(y, Row):
            x, y = y, x
        factor = over(value, y) if divide else times(value, y)
        if isinstance(x, Row):
            return x.then("mul", factor)
        return times(x, factor)

    def _sum(self, node: fx.Node, a: Any, b: Any, alpha: float) -> Row:
        for x, y in ((a, b), (b, a)):
            if not self.vector(x) and not self._normed(x) and self._normed(y):
                raise Refused("a term that differs from row to row", node)
        x, y = self._term(a), self._term(b)
        if alpha != 1:
            y = y.then("mul", alpha) if isinstance(y, Row) else times(y, alpha)
        return self._plus(node, x, y)

    def _plus(self, node: fx.Node, x: Row | Vec, y: Row | Vec) -> Row:
        if isinstance(x, Row) and isinstance(y, Row):
            if (x.norm, x.h, x.eps) != (y.norm, y.h, y.eps):
                raise Refused("a sum of two norms", node)
            (a, b), (c, d) = x.folded(), y.folded()
            row = Row(x.norm, x.h, x.eps).then("mul", plus(a, c))
            return row if b == d == 0 else row.then("add", plus(b, d))
        if isinstance(y, Row):
            x, y = y, x
        if not isinstance(x, Row):
            raise NotNormed
        return x.then("add", y)

    def _spelled_out(self, node: fx.Node, a: Any, b: Any, divide: bool) -> Row | None:
        """``node`` as a norm by its values: a row times or over one number a row."""
        for x, stat in ((a, b),) if divide else ((a, b), (b, a)):
            if not (self.full(x) and isinstance(stat, fx.Node)):
                continue
            if val(stat).dim() == 0 or val(stat).numel() * self.columns != self.count:
                continue
            if self.columns == 1 or val(stat).shape[-1] != 1:
                continue
            inner = base(x, views=False)
            behind = inner.args[0] if inner.target in _SUB else None  # h of h - mean(h)
            candidates = [base(behind, views=False)] if self.full(behind) else []  # type: ignore[arg-type]
            for leaf in (*candidates, inner):
                found = _measured(node, leaf)
                if found is not None:
                    return Row(found[0], base(leaf), found[1])
        return None


_MOVING = (aten.permute.default, aten.transpose.int, aten.t.default, aten.expand.default)


def base(node: fx.Node, views: bool = True) -> fx.Node:
    """What rows are before copies, casts that widen, and reshapes that keep the last axis."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        below = node.args[0]
        v, u = val(node), below.meta.get("val")
        if not isinstance(u, torch.Tensor) or u.dtype not in FLOATS:
            break
        if node.target in CASTS:
            if torch.promote_types(u.dtype, v.dtype) != v.dtype:
                break
        elif node.target in LAYOUT and node.target not in _MOVING and views:
            if not u.shape or u.shape[-1] != v.shape[-1] or u.numel() != v.numel():
                break
        elif node.target not in _SAME:
            break
        node = below
    return node


# ---- probing -------------------------------------------------------------------------------------


def _measured(node: fx.Node, leaf: fx.Node) -> tuple[str, float] | None:
    """("layer" or "rms", eps) if ``node`` is the norm of ``leaf``, else None."""
    shape = val(leaf).shape
    if len(shape) > 5 or len(shape) != val(node).dim():
        return None
    with _disable_current_modes(), torch.no_grad():
        sample = _samples([2] * (len(shape) - 1) + [int(shape[-1])])
        found = _evaluate(node, leaf, sample)
        if found is None or found.shape != sample.shape:
            return None
        tiny = sample[(0,) * (sample.dim() - 1)] * 1e-40
        small = _evaluate(node, leaf, tiny.expand(sample.shape))
        for norm in ("layer", "rms"):
            d = tiny - tiny.mean() if norm == "layer" else tiny
            at = d.abs().argmax()
            assert small is not None
            eps = (d[at] / small[(0,) * (sample.dim() - 1)][at]).square().item()
            eps = eps if eps > 1e-30 else 0.0
            if not eps < 1.0:
                continue
            x = sample - sample.mean(-1, keepdim=True) if norm == "layer" else sample
            want = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
            large = _evaluate(node, leaf, sample * 1e10)  # where higher powers would show
            assert large is not None
            same = torch.allclose(found, want, rtol=1e-9, atol=1e-9)
            if same and torch.allclose(
                large, x * (x.square().mean(-1, keepdim=True) + eps / 1e20).rsqrt()
            ):
                return norm, eps
    return None


def _samples(shape: list[int]) -> torch.Tensor:
    """Rows of quite different sizes, off zero by different amounts."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    rows = x.view(-1, shape[-1])
    for i in range(len(rows)):
        rows[i] = (rows[i] + 0.4 * i) * 10.0 ** (1 - 2 * (i % 3))
    return x


def _evaluate(node: fx.Node, leaf: fx.Node, sample: torch.Tensor) -> torch.Tensor | None:
    """``node`` in float64 with ``sample`` for ``leaf``; None if it needs anything else."""
    values: dict[fx.Node, Any] = {leaf: sample}

    def go(n: fx.Node) -> bool:
        if n in values:
            return True
        if n.op != "call_function" or len(values) > _LIMIT or not n.all_input_nodes:
            return False
        t = n.target
        known = t in _REDUCTIONS or t in CASTS or t in _SAME or t is aten.unsqueeze.default
        if not (known or t is operator.getitem or is_pointwise(t)):
            return False
        if not known and not kinks.algebraic(t, n.args):
            return False  # samples would not tell what it does
        if not all(go(a) for a in n.all_input_nodes):
            return False
        if t in CASTS or t in _SAME:
            if t in CASTS and val(n).dtype not in (*FLOATS, torch.float64):
                return False
            values[n] = values[n.args[0]]  # type: ignore[index]
            return True
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda a: values[a])
        kwargs = {k: v for k, v in kwargs.items() if k not in ("dtype", "device", "pin_memory")}
        values[n] = t(*args, **kwargs)  # type: ignore[operator]
        return True

    return values[node] if go(node) else None
