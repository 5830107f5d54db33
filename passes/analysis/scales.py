"""Is a whole-cache maximum nothing but the scale of values cast to FP8 and back?

Consent to calibrated scales (``Options(quantize="calibrated")``) is consent to hold such scales: a
floating-point format loses no precision by a scale somewhat too large. Whatever else a model does
with a maximum (a normalisation, a grid of integers, a clip) would come out otherwise.

    s = f(maximum of |k|)                any pointwise work
    q = to_f8(clamp(k / s))              k / s or k * (1 / s); bounds that only keep it in range
    w = wide(q) * s                      the only reader of q, through casts, layout and numbers

What is cast must be what the maximum is of, each element by its own (a head by its head's), its
largest value must become a normal number of the format, and the way back must undo the way there:
both are tried out on a few maxima. The maximum must be one of magnitudes: a held scale would not
clip the negative values that one of the values themselves leaves beyond it.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from rtc.passes.analysis import elements, shapes
from rtc.passes.analysis.elements import Numbers
from rtc.passes.analysis.fn import LAYOUT, PICKS, Fn, structural_key
from rtc.passes.analysis.fp8 import CASTS, SAME, WIDE
from rtc.passes.analysis.host import Deps, HostInfo
from rtc.passes.analysis.shapes import NotLocal

aten = torch.ops.aten

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_MUL = (aten.mul.Tensor, aten.mul.Scalar)
_DIV = (aten.div.Tensor, aten.div.Scalar)
_MOVES = {*LAYOUT, *PICKS, *SAME, operator.getitem}
_SAMPLES = (1e-2, 1.0, 2.0, 1e3)
_LEAST = 0.25  # of the largest code: below, FP8 has few bits left


class _Other(Exception):
    """The node uses the maximum otherwise; how, where there is more to say."""


@dataclass
class _Flow:
    """Values on their way, and by what they were multiplied so far at each sample maximum."""

    pointwise: Callable[[Any], bool]
    bare: fx.Node  # what the maximum is of
    bare_at: Numbers
    alone: dict[fx.Node, list[float]]
    at: dict[fx.Node, Any]  # the elements of the maximum that those of a value go with
    scaled: dict[fx.Node, list[float]] = field(default_factory=dict)
    bounds: dict[fx.Node, float] = field(default_factory=dict)  # tightest of a scaled value
    codes: dict[fx.Node, list[float]] = field(default_factory=dict)  # FP8, widened or not
    back: bool = False

    def step(self, node: fx.Node) -> None:
        """Raises _Other."""
        reads = set(node.all_input_nodes)
        if reads & self.codes.keys():
            self._code(node)
        elif reads & self.scaled.keys():
            self._scaled(node)
        elif all(a in self.alone or _number(a) for a in reads):
            self._alone(node)
        else:
            self._divide(node)

    def _alone(self, node: fx.Node) -> None:
        val = node.meta.get("val")
        wide = isinstance(val, torch.Tensor) and val.dtype in WIDE
        if node.target in _MOVES or (node.target in CASTS and wide):
            below: fx.Node = node.args[0]  # type: ignore[assignment]
            self.alone[node] = self.alone[below]
            self.at[node] = elements.moved(node, self.at[below])
            return
        if not self.pointwise(node.target) or not wide:
            raise _Other
        first, *others = (self.at[a] for a in node.all_input_nodes if a in self.alone)
        self._meet(node, first, *others)
        try:
            self.alone[node] = [self._value(node, i) for i in range(len(_SAMPLES))]
        except (TypeError, RuntimeError, ValueError) as e:
            raise _Other from e

    def _meet(self, node: fx.Node, first: Numbers, *others: Numbers) -> None:
        """Operands of ``node`` go with the same elements of the maximum."""
        shape = shapes.ints(node.meta["val"].shape)
        if not all(first.same(o, shape) for o in others):
            raise _Other("pairs elements with the maximum of others")
        self.at[node] = first.spread(shape)

    def _value(self, node: fx.Node, i: int) -> float:
        def at(a: fx.Node) -> torch.Tensor:
            value = self.alone[a][i] if a in self.alone else _constant(a)
            return torch.tensor(value, dtype=torch.float64)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), at)
        drop = ("dtype", "device", "layout", "pin_memory")
        out = node.target(*args, **{k: v for k, v in kwargs.items() if k not in drop})  # type: ignore[operator]
        return float(out)

    def _divide(self, node: fx.Node) -> None:
        """k / s or k * (1 / s)."""
        a, b = (*node.args[:2], None, None)[:2]
        if node.target in _MUL and a in self.alone:
            a, b = b, a
        if node.target not in (*_MUL, *_DIV) or b not in self.alone or a in self.alone:
            raise _Other
        path = _path(a, self.bare)
        if path[-1] is not self.bare:
            raise _Other
        at = self.bare_at
        for n in reversed(path[:-1]):
            at = elements.moved(n, at)
        self._meet(node, at, self.at[b])  # type: ignore[index]
        values = self.alone[b]  # type: ignore[index]
        self.scaled[node] = [v if node.target in _MUL else 1 / v for v in values]
        self.bounds[node] = math.inf

    def _scaled(self, node: fx.Node) -> None:
        below = node.args[0] if node.args else None
        t, val = node.target, node.meta.get("val")
        if below not in self.scaled or len(set(node.all_input_nodes)) != 1:
            raise _Other
        by, bound = self.scaled[below], self.bounds[below]  # type: ignore[index]
        if t in CASTS and isinstance(val, torch.Tensor) and val.dtype in _FP8:
            largest = [abs(v * m) for v, m in zip(by, _SAMPLES, strict=True)]
            top = torch.finfo(val.dtype).max
            if bound < top or not all(_LEAST <= x <= top * 1.001 for x in largest):
                raise _Other
            self.codes[node], self.at[node] = by, self.at[below]  # type: ignore[index]
            return
        if t in (*_MUL, *_DIV) and isinstance(node.args[1], (int, float)):
            f = float(node.args[1])
            by = [v * f if t in _MUL else v / f for v in by]
            bound = bound * abs(f) if t in _MUL else bound / abs(f)
        elif t is aten.clamp.default:
            low, high = (*node.args[1:3], None, None)[:2]
            low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
            if not all(x is None or isinstance(x, (int, float)) for x in (low, high)):
                raise _Other
            ends = [-low if low is not None else math.inf, high if high is not None else math.inf]  # type: ignore[operator]
            bound = min(bound, *(float(x) for x in ends))
        elif not (t in _MOVES or (t in CASTS and val is not None and val.dtype in WIDE)):
            raise _Other
        self.scaled[node], self.bounds[node] = by, bound
        self.at[node] = elements.moved(node, self.at[below])  # type: ignore[index]

    def _code(self, node: fx.Node) -> None:
        a, b = (*node.args[:2], None, None)[:2]
        t, val = node.target, node.meta.get("val")
        if t in _MUL and b in self.codes:
            a, b = b, a
        if a not in self.codes or b in self.codes:
            raise _Other
        by = self.codes[a]  # type: ignore[index]
        if t in (*_MUL, *_DIV) and b in self.alone:
            up = self.alone[b]  # type: ignore[index]
            whole = [v * u if t in _MUL else v / u for v, u in zip(by, up, strict=True)]
            if not all(math.isclose(w, whole[0], rel_tol=1e-4) for w in whole):
                raise _Other
            self._meet(node, self.at[a], self.at[b])  # type: ignore[index]
            self.back = True
        elif t in (*_MUL, *_DIV) and isinstance(b, (int, float)):
            self.codes[node] = [v * b if t in _MUL else v / b for v in by]
            self.at[node] = self.at[a]  # type: ignore[index]
        elif len(set(node.all_input_nodes)) == 1 and (
            t in _MOVES or (t in CASTS and isinstance(val, torch.Tensor) and val.dtype in WIDE)
        ):
            self.codes[node], self.at[node] = by, elements.moved(node, self.at[a])  # type: ignore[index]
        else:
            raise _Other


def other_use(
    maximum: fx.Node, over: Sequence[int], pointwise: Callable[[Any], bool]
) -> str | None:
    """What else ``maximum``, over the axes ``over``, is used for; None where there is nothing."""
    try:
        with _disable_current_modes(), torch.no_grad():
            return _other_use(maximum, over, pointwise)
    except NotLocal as e:
        return str(e)


def _other_use(
    maximum: fx.Node, over: Sequence[int], pointwise: Callable[[Any], bool]
) -> str | None:
    x: fx.Node = maximum.args[0]  # type: ignore[assignment]
    path = _path(x)
    if not any(n.target is aten.abs.default for n in path):
        return "it is of the values, not of their magnitudes"
    at = elements.numbered(shapes.ints(x.meta["val"].shape), over)
    for n in path[:-1]:
        at = elements.moved_back(n, at)
    own = elements.numbered(shapes.ints(maximum.meta["val"].shape))
    flow = _Flow(pointwise, path[-1], at, {maximum: list(_SAMPLES)}, {maximum: own})
    # In the graph's order, and only what reads it: a deep model has hundreds of maxima.
    queue, seen = [*maximum.users], {*maximum.users}
    heapq.heapify(queue)
    while queue:
        node = heapq.heappop(queue)
        try:
            flow.step(node)
        except _Other as e:
            return f"{node.name} {str(e) or 'uses it otherwise'}"
        except ArithmeticError:  # a scale of zero, or none that a float holds
            return f"{node.name} uses it otherwise"
        if node in flow.alone or node in flow.scaled or node in flow.codes:
            for u in node.users:
                if u not in seen:
                    seen.add(u)
                    heapq.heappush(queue, u)
    return None if flow.back else f"{next(iter(maximum.users), maximum).name} uses it otherwise"


def _path(n: Any, end: fx.Node | None = None) -> list[Any]:
    """From ``n`` down through what leaves magnitudes as they are, to ``end`` if it is met.

    Without an ``end`` to meet, what repeats elements is not passed: one has no single place then.
    """
    path = [n]
    while isinstance(n, fx.Node) and n is not end and n.op == "call_function":
        wide = n.target in CASTS and n.meta["val"].dtype in WIDE
        if not (wide or n.target in (aten.abs.default, *LAYOUT, *SAME)):
            break
        below: fx.Node = n.args[0]  # type: ignore[assignment]
        if end is None and _count(n) != _count(below):
            break
        path.append(n := below)
    return path


def _count(n: fx.Node) -> int:
    return math.prod(shapes.ints(n.meta["val"].shape))


def _number(n: fx.Node) -> bool:
    return n.op == "get_attr" or (n.op == "call_function" and not n.all_input_nodes)


def _constant(n: fx.Node) -> float:
    if n.op == "get_attr":
        return float(getattr(n.graph.owning_module, str(n.target)))
    if n.target in (aten.full.default, aten.scalar_tensor.default):
        return float(n.args[1 if n.target is aten.full.default else 0])  # type: ignore[arg-type]
    raise TypeError(n)


def made_of(
    node: fx.Node, maxima: Mapping[fx.Node, Fn], host: HostInfo, pointwise: Callable[[Any], bool]
) -> bool:
    """Whether device data enters ``node`` through held maxima alone, and nothing that changes from
    call to call beside them."""
    if not maxima:
        return False
    if node in maxima:
        return True
    if host.on_host(node):
        return Deps.INT not in host.deps[node]
    if node.op != "call_function" or not (pointwise(node.target) or node.target in LAYOUT):
        return False
    return all(made_of(a, maxima, host, pointwise) for a in node.all_input_nodes)


def key(node: fx.Node, maxima: Mapping[fx.Node, Fn], host: HostInfo) -> str:
    """What is made of which maximum: graphs share views only where both are the same.

    ``maxima``: of one cache, with the work that each measures.
    """

    def go(a: Any) -> Any:
        if not isinstance(a, fx.Node):
            return host.key(a)
        if a in maxima:
            below = maxima[a]
            tables = [o.key for o in below.operands()]
            # each denoising pass may have a maximum of its own, all of them alike
            which = list(maxima).index(a)
            rest = host.key([*a.args[1:]]), host.key(a.kwargs)
            return ("maximum", which, structural_key(below), tables, str(a.target), *rest)
        if host.on_host(a):
            return host.key(a)
        args = [go(x) for x in a.args], sorted((k, go(x)) for k, x in a.kwargs.items())
        return (str(a.target), str(args))

    return hashlib.sha1(repr(go(node)).encode()).hexdigest()


__all__ = ["key", "made_of", "other_use"]
