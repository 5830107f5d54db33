"""Small int tensors that a model makes from numbers, followed while it is traced.

``sizes = torch.tensor([[f, h, w]])``, ``sizes[0, 0] = frames``, ``sizes.tolist()``: published code
passes sizes about in tensors. Dynamo forgets what is in them as soon as one of the numbers changes
from call to call, and to read them is then a host read. Here the operations between are carried out
beside the trace on arrays of ints and of Dynamo's symbols, and the read gives what was written. An
operation that is not known here leaves its result unknown; one that writes leaves everything
unknown that has the same memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

MOST = 64  # elements
_INTS = (torch.int32, torch.int64)


class _Unknown(Exception):
    """It cannot be said what is in the tensor."""


class SmallInts:
    """What is known of the tensors of one Dynamo graph, node by node."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.held: dict[fx.Node, np.ndarray[Any, Any]] = {}
        self.last: fx.Node | None = None

    def read(self, node: fx.Node) -> Any:
        """The number in ``node``, a tensor of one element; None where it is unknown."""
        self._go_on(node)
        found = self.held.get(node)
        return None if found is None or found.size != 1 else found.reshape(-1)[0]

    def _go_on(self, until: fx.Node) -> None:
        nodes = list(self.graph.nodes)
        start = 0 if self.last is None else nodes.index(self.last) + 1
        for node in nodes[start : nodes.index(until) + 1]:
            self._step(node)
        self.last = until if nodes.index(until) >= start else self.last

    def _step(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr", "output"):
            return
        name = node.target if isinstance(node.target, str) else _name(node.target)
        touched = [n for n in node.all_input_nodes if n in self.held]
        writing = writes(node)
        if not (touched or writing or name in _MAKERS):
            return
        try:
            if name not in _RULES or not _known(node):
                raise _Unknown
            kwargs = {k: self._arg(v) for k, v in node.kwargs.items()}
            made = _RULES[name](*map(self._arg, node.args), **kwargs)
        except (_Unknown, TypeError, ValueError, LookupError, ArithmeticError):
            if writing:
                self._forget(node.all_input_nodes)
            return
        if isinstance(made, np.ndarray) and made.size <= MOST:
            found = self._as(node, made, touched)
            if found is not None:
                self.held[node] = found

    def _as(self, node: fx.Node, made: Any, touched: list[fx.Node]) -> Any:
        """``made``, if shape, type and memory are those of the fake tensor."""
        fake = node.meta.get("example_value")
        if fake is None:
            return made  # of tolist(), an element at a time
        if not isinstance(fake, torch.Tensor) or fake.dtype not in _INTS:
            return None
        if tuple(fake.shape) != made.shape or not all(_holds(fake.dtype, n) for n in made.flat):
            return None
        for n in touched:
            other = n.meta.get("example_value")
            if isinstance(other, torch.Tensor):
                shared = np.shares_memory(made, self.held[n])
                if memory(fake) == memory(other):
                    if not shared:
                        return None
                elif shared:
                    made = made.copy()  # to another device
        return made

    def _forget(self, nodes: list[fx.Node]) -> None:
        """What has the memory of these, seen by whatever view."""
        fakes = [n.meta.get("example_value") for n in nodes]
        gone = {memory(x) for x in fakes if isinstance(x, torch.Tensor)}
        for n in list(self.held):
            fake = n.meta.get("example_value")
            if not isinstance(fake, torch.Tensor) or memory(fake) in gone:
                del self.held[n]

    def _arg(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            if x in self.held:
                return self.held[x]
            value = x.meta.get("example_value")
            if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
                return value
            raise _Unknown
        if isinstance(x, (list, tuple)):
            return type(x)(self._arg(y) for y in x)
        if isinstance(x, slice):
            return slice(*(self._arg(y) for y in (x.start, x.stop, x.step)))
        return x


def memory(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _name(target: Any) -> str:
    return getattr(target, "__name__", "")


def _holds(dtype: torch.dtype, n: Any) -> bool:
    """Whether a number lies within a type, which would wrap around. Asking a symbol guards it."""
    info = torch.iinfo(dtype)
    return bool(n >= info.min) and bool(n <= info.max)


def _known(node: fx.Node) -> bool:
    """Whether the target is PyTorch's or Python's own function of its name."""
    target: Any = node.target
    if node.op == "call_method":
        return True
    if isinstance(target, (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)):
        return False
    return (getattr(target, "__module__", None) or "").split(".")[0] in _PURE


def writes(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph may write to what it is given."""
    target: Any = node.target
    if node.op == "call_method":
        return str(target).endswith("_")
    if node.op != "call_function":
        return True
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, "default", None)
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if not _known(node):
        return True
    name = _name(target)
    flags = any(x is True for x in (*node.args, *node.kwargs.values()))  # relu(x, inplace=True)
    inside = flags and "functional" in (getattr(target, "__module__", None) or "")
    return name.endswith("_") or name in _IN_PLACE or "out" in node.kwargs or inside


# modules of functions that say by their names whether they write
_PURE = {"torch", "_operator", "operator", "math", "builtins", ""}
_IN_PLACE = {"setitem", "delitem"} | {
    f"i{name}"
    for name in (
        "add", "and", "concat", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift",
        "sub", "truediv", "xor",
    )
}  # fmt: skip


# ---- rules ---------------------------------------------------------------------------------------


def _whole(x: Any) -> Any:
    """A number that an int tensor takes as it is."""
    if isinstance(x, np.ndarray):
        return x
    if type(x) is float and x == int(x):
        return int(x)
    if type(x) is int or isinstance(x, torch.SymInt):
        return x
    raise _Unknown


def _typed(*found: Any) -> None:
    if any(isinstance(x, torch.dtype) and x not in _INTS for x in found):
        raise _Unknown


def _array(data: Any) -> np.ndarray[Any, Any]:
    def shape(x: Any) -> tuple[int, ...]:
        return (len(x), *shape(x[0])) if isinstance(x, (list, tuple)) else ()

    out = np.empty(shape(data), dtype=object)

    def fill(place: Any, x: Any) -> None:
        if place.ndim == 0:
            place[()] = _whole(x)
        elif len(x) != len(place):
            raise _Unknown
        else:
            for i, y in enumerate(x):
                fill(place[i, ...], y)

    fill(out, data)
    return out


def _tensor(data: Any, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
    _typed(dtype)
    if rest or not isinstance(data, (list, tuple, int, torch.SymInt)) or isinstance(data, bool):
        raise _Unknown
    return _array(data)


def _index(i: Any) -> Any:
    parts = i if isinstance(i, tuple) else (i,)
    for p in parts:
        ends = (p.start, p.stop, p.step) if isinstance(p, slice) else (p,)
        if any(not (e is None or e is Ellipsis or type(e) is int) for e in ends):
            raise _Unknown
    return parts if any(p is Ellipsis for p in parts) else (*parts, ...)


def _getitem(x: Any, i: Any) -> Any:
    return x[_index(i)]


def _setitem(x: Any, i: Any, value: Any) -> None:
    x[_index(i)] = _whole(value)


def _fill(x: Any, value: Any) -> Any:
    x[...] = _whole(value)
    return x


def _copy(x: Any, **kwargs: Any) -> Any:
    return x.copy()


def _moved(x: Any, *args: Any, **kwargs: Any) -> Any:
    # whether it is the same memory is looked up at the fake tensor: _as
    _typed(*args, *kwargs.values())
    return x


def _arithmetic(op: Callable[..., Any], *, inside: bool = False) -> Callable[..., Any]:
    def rule(a: Any, b: Any) -> Any:
        x, y = _whole(a), _whole(b)
        if inside:
            x[...] = op(x, y)
            return x
        made = np.asarray(
            op(np.asarray(x, dtype=object), np.asarray(y, dtype=object)), dtype=object
        )
        return made

    return rule


def _product(x: Any) -> Any:
    out: Any = 1
    for y in x.reshape(-1):
        out = out * y
    return np.asarray(out, dtype=object)


def _sum(x: Any) -> Any:
    out: Any = 0
    for y in x.reshape(-1):
        out = out + y
    return np.asarray(out, dtype=object)


def _stack(parts: Any, dim: int = 0) -> Any:
    if not all(isinstance(p, np.ndarray) for p in parts):
        raise _Unknown
    return np.stack(parts, dim)


def _cat(parts: Any, dim: int = 0) -> Any:
    if not all(isinstance(p, np.ndarray) for p in parts):
        raise _Unknown
    return np.concatenate(parts, dim)


def _reshape(x: Any, *size: Any) -> Any:
    sizes = size[0] if len(size) == 1 and isinstance(size[0], (list, tuple)) else size
    if any(type(n) is not int for n in sizes):
        raise _Unknown
    return x.reshape(*sizes)


_RULES: dict[str, Callable[..., Any]] = {
    "tensor": _tensor,
    "getitem": _getitem,
    "setitem": _setitem,
    "fill_": _fill,
    "clone": _copy,
    "to": _moved,
    "long": _moved,
    "int": _moved,
    "cpu": _moved,
    "cuda": _moved,
    "contiguous": _moved,
    "detach": _moved,
    "add": _arithmetic(operator.add),
    "sub": _arithmetic(operator.sub),
    "mul": _arithmetic(operator.mul),
    "floordiv": _arithmetic(operator.floordiv),
    "floor_divide": _arithmetic(operator.floordiv),
    "add_": _arithmetic(operator.add, inside=True),
    "sub_": _arithmetic(operator.sub, inside=True),
    "mul_": _arithmetic(operator.mul, inside=True),
    "iadd": _arithmetic(operator.add, inside=True),
    "isub": _arithmetic(operator.sub, inside=True),
    "imul": _arithmetic(operator.mul, inside=True),
    "prod": _product,
    "sum": _sum,
    "stack": _stack,
    "cat": _cat,
    "unsqueeze": lambda x, dim: np.expand_dims(x, dim),
    "view": _reshape,
    "reshape": _reshape,
    "flatten": lambda x: x.reshape(-1),
}  # fmt: skip
_MAKERS = {"tensor"}


__all__ = ["MOST", "SmallInts", "memory", "writes"]
