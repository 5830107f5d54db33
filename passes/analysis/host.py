"""What the host can compute: values that depend on Python ints and constants alone.

Positions live on the host. The nodes leading to a RoPE table are evaluated on the CPU for the
coming step, ahead of the device, so that no decision ever needs a device-to-host read.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Flag
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from rtc.passes.analysis.effects import has_effect, is_foreign

aten = torch.ops.aten

_TORCH = f'File "{torch.__path__[0]}'


class Deps(Flag):
    """What a value depends on. ``DATA`` wins: it is only known on the device, during the step."""

    NONE = 0
    INT = 1  # a Python int argument, known on the host before each call
    CONST = 2  # a module attribute that the graph does not write
    DATA = 4


@dataclass
class InputInfo:
    """One graph input: where the user's program holds it, and what the graph does with it."""

    index: int
    node: fx.Node
    source: str  # e.g. L['self']._buffers['k']
    is_int: bool = False
    mutated: bool = False
    attribute: bool = False  # reached through a module attribute rather than a call argument
    parameter: bool = False
    parent: InputInfo | None = None  # of which this is one part: see passes/normalize.py
    # (axis, index, how many axes from there on count as one)
    part: tuple[int, int, int] | None = None

    @property
    def counts(self) -> bool:
        """Whether it may count calls: a size of a tensor does not."""
        return self.is_int and ".size()" not in self.source

    @property
    def deps(self) -> Deps:
        if self.is_int:
            return Deps.INT
        return Deps.CONST if self.attribute and not self.mutated else Deps.DATA


def cut(tensor: torch.Tensor, part: tuple[int, int, int]) -> torch.Tensor:
    """One part of a stacked tensor, sharing its memory; its axis stays, of size 1."""
    axis, index, axes = part
    if axes > 1:  # a view, or an error: never a copy
        shape = tensor.shape
        tensor = tensor.view(*shape[:axis], -1, *shape[axis + axes :])
    return tensor.narrow(axis, index, 1)


def _impure(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return (
            has_effect(node)  # collectives of constants, too: other ranks have others
            or is_foreign(target)
            or target is aten.sym_size.int
            or target is aten._local_scalar_dense.default
        )
    return getattr(target, "__module__", "") not in ("_operator", "operator", "math", "torch")


@dataclass
class HostInfo:
    """Dependence and a structural key of every node of a functional graph."""

    graph: fx.Graph
    inputs: Mapping[fx.Node, InputInfo]
    get_attr: Callable[[str], Any]
    deps: dict[fx.Node, Deps] = field(default_factory=dict)
    _keys: dict[fx.Node, Any] = field(default_factory=dict)
    data_source: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = list(self.graph.nodes)
        self.index = {n: i for i, n in enumerate(self.nodes)}
        for node in self.nodes:
            self.deps[node] = self._deps(node)

    def _deps(self, node: fx.Node) -> Deps:
        if node.op == "placeholder":
            deps = self.inputs[node].deps
            if Deps.DATA in deps:
                self.data_source[node] = node
            return deps
        if node.op == "get_attr":
            return (
                Deps.NONE
                if isinstance(self.get_attr(str(node.target)), torch.Tensor)
                else Deps.DATA
            )
        if node.op != "call_function":
            return Deps.DATA
        deps = Deps.NONE
        for arg in node.all_input_nodes:
            deps |= self.deps[arg]
            if Deps.DATA in self.deps[arg]:
                self.data_source.setdefault(node, self.data_source.get(arg, arg))
        if _impure(node):
            self.data_source.setdefault(node, node)
            deps |= Deps.DATA
        return deps

    def on_host(self, node: fx.Node) -> bool:
        return Deps.DATA not in self.deps[node]

    def why_data(self, node: fx.Node) -> str:
        """Name the input (or op) that makes ``node`` device data."""
        src = self.data_source.get(node, node)
        if src in self.inputs:
            return f"tensor {self.inputs[src].source}"
        return f"{src.name}"

    def key(self, node: Any) -> Any:
        """A structural key: equal keys mean equal values in every call, in other graphs too."""
        if isinstance(node, fx.Node):
            if node not in self._keys:
                self._keys[node] = self._node_key(node)
            return self._keys[node]
        if isinstance(node, (list, tuple)):
            return ("seq", *(self.key(a) for a in node))
        if isinstance(node, slice):
            return ("slice", self.key(node.start), self.key(node.stop), self.key(node.step))
        if isinstance(node, dict):
            return ("map", *((k, self.key(v)) for k, v in sorted(node.items())))
        return (type(node).__name__, str(node))

    def _node_key(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            long: Any = ("input", self.inputs[node].source)
        elif node.op == "get_attr":
            long = ("attr", _content(self.get_attr(str(node.target)), str(node.target)))
        elif self.on_host(node):
            kwargs = {k: v for k, v in node.kwargs.items() if k != "pin_memory"}
            long = (str(node.target), self.key(node.args), self.key(kwargs))
        else:
            long = ("node", node.name, id(self.graph))
        # keys nest: a digest stands for the whole expression below
        return ("#", hashlib.sha1(repr(long).encode()).hexdigest())


def _content(value: Any, name: str) -> str:
    """A constant by what it holds: two graphs may both have a ``_tensor_constant0``."""
    if not isinstance(value, torch.Tensor):
        return name
    with _disable_current_modes(), torch.no_grad():
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{value.dtype}{tuple(value.shape)}{hashlib.sha1(data).hexdigest()}"


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


class HostProgram:
    """Evaluates a set of host nodes on the CPU, common subexpressions once.

    ``run(ints, consts)``: ``ints`` maps the int inputs and ``consts`` the constant inputs to their
    values (constants as CPU tensors). Returns a mapping from root node to int or CPU tensor.
    """

    def __init__(self, info: HostInfo, roots: Iterable[fx.Node]) -> None:
        self.info = info
        self.roots = list(dict.fromkeys(roots))
        needed: set[fx.Node] = set()
        stack = list(self.roots)
        while stack:
            node = stack.pop()
            if node in needed:
                continue
            assert info.on_host(node), f"{node} is not a host value"
            needed.add(node)
            stack.extend(node.all_input_nodes)
        self.int_inputs: list[InputInfo] = []
        self.const_inputs: list[InputInfo] = []
        self.steps: list[tuple[fx.Node, Any]] = []
        self._static: dict[Any, Any] = {}
        self._given: list[torch.Tensor] = []  # the constants of the last run
        self._made: dict[Any, Any] = {}  # what follows from them alone
        seen: set[Any] = set()
        for node in info.graph.nodes:
            if node not in needed:
                continue
            key = info.key(node)
            if node.op == "placeholder":
                inp = info.inputs[node]
                (self.int_inputs if inp.is_int else self.const_inputs).append(inp)
            elif key not in seen:
                self.steps.append((node, key))
            seen.add(key)

    def run(
        self, ints: Mapping[fx.Node, int], consts: Mapping[fx.Node, torch.Tensor]
    ) -> dict[fx.Node, Any]:
        info, vals = self.info, dict(self._static)
        given = [consts[inp.node] for inp in self.const_inputs]
        if len(given) != len(self._given) or not all(map(operator.is_, given, self._given)):
            self._given, self._made = given, {}
        vals.update(self._made)
        for inp in self.int_inputs:
            vals[info.key(inp.node)] = ints[inp.node]
        for inp in self.const_inputs:
            vals[info.key(inp.node)] = consts[inp.node]

        def get(a: fx.Node) -> Any:
            return vals[info.key(a)]

        # compile time has fake tensors and tracers in force; these values are real
        with _disable_current_modes(), torch.no_grad():
            for node, key in self.steps:
                if key in vals:
                    continue
                if node.op == "get_attr":
                    out = info.get_attr(str(node.target)).detach().cpu()
                else:
                    args = fx.node.map_arg(node.args, get)
                    kwargs = {k: _to_cpu(v) for k, v in fx.node.map_arg(node.kwargs, get).items()}
                    kwargs.pop("pin_memory", None)
                    args = fx.node.map_aggregate(args, _to_cpu)
                    out = node.target(*args, **kwargs)  # type: ignore[operator]
                vals[key] = out
                if info.deps[node] == Deps.NONE:
                    self._static[key] = out
                elif info.deps[node] == Deps.CONST:
                    self._made[key] = out
        return {r: vals[info.key(r)] for r in self.roots}


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def where(node: fx.Node) -> str:
    """``file.py:123 in forward`` of the user's line that made ``node``, or ''."""
    trace = node.meta.get("stack_trace") or ""
    frames = [ln.strip() for ln in trace.splitlines() if ln.strip().startswith("File ")]
    if not frames:
        return ""
    # torch's own functions (a collective's, a module's) are not the user's lines
    last = next((f for f in reversed(frames) if not f.startswith(_TORCH)), frames[-1])
    head = last.split(", ")
    if len(head) < 3:
        return last
    return f"{head[0][6:-1]}:{head[1][5:]} {head[2]}"
