"""Traces layers that are alike once.

AOTAutograd takes a millisecond an op, and a deep model is one layer over and over: 42 s of the
first call of 60 layers in four denoising passes. Here Dynamo's graph is cut where layers begin; of
segments that agree in ops, constants and layouts one is traced, and the others are copies of it.

Before (Dynamo's graph):
    x1 = layer(x0, w1, c1);  x2 = layer(x1, w2, c2)        # each writes its cache in place
Traced once:
    f(x, w, c):  new = g(x, w, c);  copy_(c, new);  return y
After (functional, as AOTAutograd makes it of the whole):
    new1, x1 = f'(x0, w1, c1);  new2, x2 = f'(x1, w2, c2);  copy_(c1, new1);  copy_(c2, new2)

A copy reads, for an input that an earlier segment wrote, what that segment left in it. That is all
there is to it if no tensor that is written has another name where segments meet: inputs and what
goes from segment to segment are told apart by their memory, and where they cannot be the graph is
traced as a whole. The wrapper that AOTAutograd puts around the whole comes from a stand-in: a graph
of the same inputs and results that writes the same inputs.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext
from torch._subclasses import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

aten = torch.ops.aten

_LEAST = 400  # nodes: smaller graphs are traced in no time
_ALIKE = 3  # layers, at least
_MANY = 1_000_000  # more values than go from one layer to the next
_WORTH = 0.5  # of the nodes that need not be traced, at least

Trace = Callable[[fx.GraphModule, list[Any], Callable[..., Any]], Any]

_LIB = torch.library.Library("rtc", "FRAGMENT")
_LIB.define("boundary(Tensor x) -> Tensor")


def _boundary(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


# hides from AOTAutograd that what leaves a segment may be a view of something
_LIB.impl("boundary", _boundary, "Meta")
_LIB.impl("boundary", _boundary, "CompositeExplicitAutograd")
_BOUNDARY = torch.ops.rtc.boundary.default


class Whole(Exception):
    """Why the graph must be traced as a whole."""


def traced(
    gm: fx.GraphModule, inputs: Sequence[Any], inner: Callable[..., Any], aot: Trace
) -> tuple[Any, str]:
    """(what ``aot(gm, inputs, inner)`` would give, why it was traced as a whole or "").

    ``aot`` is AOTAutograd: it calls ``inner(functional graph, inputs)`` for a callable of it.
    """
    try:
        functional, flags = _Layers(gm, aot).run()
        return _stood_in(gm, inputs, functional, flags, inner, aot), ""
    except Whole as e:
        why = str(e)
    return aot(gm, list(inputs), inner), why  # errors of its own, not on top of that one


@dataclass
class _Segment:
    nodes: list[fx.Node]
    given: list[fx.Node] = field(default_factory=list)  # what it takes; ints are placeholders
    left: list[fx.Node] = field(default_factory=list)  # what later nodes read of it
    ints: list[fx.Node] = field(default_factory=list)  # int nodes made anew in it
    key: Any = None


@dataclass
class _Once:
    """A traced segment."""

    graph: fx.Graph
    module: fx.GraphModule
    writes: dict[int, fx.Node]  # number of an input -> what is in it in the end
    results: list[Any]
    flags: dict[int, Any]  # of the inputs that it writes


class _Layers:
    def __init__(self, gm: fx.GraphModule, aot: Trace) -> None:
        self.aot = aot
        self.nodes = list(gm.graph.nodes)
        self.places = [n for n in self.nodes if n.op == "placeholder"]
        self.output = self.nodes[-1]
        self.int: dict[fx.Node, bool] = {}
        self.told: dict[fx.Node, Any] = {}  # what a node is, but for where its inputs come from

    def run(self) -> tuple[fx.GraphModule, dict[fx.Node, Any]]:
        """The functional graph, with placeholders as in Dynamo's; for inputs that it writes, what
        AOTAutograd says of them."""
        if len(self.nodes) < _LEAST:
            raise Whole("it is small")
        for n in self.nodes:
            self._look(n)
        segments = self._segments()
        memory = {
            n: _memory(n.meta["example_value"])
            for n in self.nodes
            if isinstance(n.meta.get("example_value"), FakeTensor)
        }
        once: dict[Any, _Once] = {}
        for s in segments:
            if s.key not in once:
                once[s.key] = self._trace(s)
        return self._joined(segments, once, memory)

    # -- what may be cut ------------------------------------------------------------------------

    def _look(self, n: fx.Node) -> None:
        value = n.meta.get("example_value")
        if n.op == "placeholder":
            if not isinstance(value, (torch.SymInt, torch.Tensor)):
                raise Whole(f"the input {n.name} is a {type(value).__name__}")
            self.int[n] = isinstance(value, torch.SymInt)
            if isinstance(value, torch.SymInt):
                if free_unbacked_symbols(value):
                    raise Whole(f"{n.name} is only known on the device")
                self.told[n] = str(value.node.expr), value.node.hint
            else:
                self.told[n] = _tensor(n, value)
            return
        if n.op == "output":
            return
        if n.op not in ("call_function", "call_method") or not _plain(n):
            raise Whole(f"{n.name} is a {n.op} of {n.target}")
        ints = isinstance(value, torch.SymInt) or type(value) is int
        if ints and all(self.int[a] for a in n.all_input_nodes):
            self.int[n] = True
            if free_unbacked_symbols(value):
                raise Whole(f"{n.name} is only known on the device")
            self.told[n] = str(value.node.expr if isinstance(value, torch.SymInt) else value)
            return
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Whole(f"{n.name} is a number made from a tensor")
        self.int[n] = False
        self.told[n] = (n.op, str(n.target), _constants((n.args, n.kwargs), self._number), _made(n))

    def _number(self, n: fx.Node) -> Any:
        return ("int", self.told[n]) if self.int[n] else "node"

    # -- where ----------------------------------------------------------------------------------

    def _segments(self) -> list[_Segment]:
        work = [n for n in self.nodes if n.op not in ("placeholder", "output") and not self.int[n]]
        cuts = self._cuts(work)
        segments = [
            _Segment(work[a:b]) for a, b in zip([0, *cuts], [*cuts, len(work)], strict=True)
        ]
        segments = [s for s in segments if s.nodes]
        home = {n: i for i, s in enumerate(segments) for n in s.nodes}
        for i, s in enumerate(segments):
            self._ends(s, i, home)
        ints = [r for r in _results(self.output) if isinstance(r, fx.Node) and self.int[r]]
        last = _Segment([], left=[r for r in dict.fromkeys(ints) if r.op != "placeholder"])
        if last.left:
            self._ends(last, len(segments), home)
            segments.append(last)
        for s in segments:
            s.key = self._key(s)
        unique = {s.key: len(s.nodes) for s in segments}
        if sum(unique.values()) > (1 - _WORTH) * len(work):
            raise Whole("its layers are not alike")
        return segments

    def _cuts(self, work: list[fx.Node]) -> list[int]:
        """Where layers begin: once in as many nodes as one of them has, and where the fewest
        values go from one to the next."""
        found: dict[Any, list[int]] = defaultdict(list)
        for i, n in enumerate(work):
            found[self.told[n]].append(i)
        best: tuple[int, int, list[int]] = (0, 0, [])
        for at in found.values():
            if len(at) < _ALIKE:
                continue
            gaps = Counter(b - a for a, b in itertools.pairwise(at))
            gap, times = gaps.most_common(1)[0]
            best = max(best, (gap * (times - 1), -gap, at), key=lambda b: b[:2])
        covered, gap, at = best[0], -best[1], best[2]
        if not gap or covered < _WORTH * len(work):
            raise Whole("no layers were found in it")
        crossing = self._crossing(work)
        starts = [a for a, b in itertools.pairwise(at) if b - a == gap]
        fewest = min(range(gap), key=lambda r: sum(crossing[a + r] for a in starts))
        cuts = [a + fewest for a in at if 0 < a + fewest < len(work)]
        return [c for c in cuts if crossing[c] < _MANY]

    @staticmethod
    def _crossing(work: list[fx.Node]) -> list[int]:
        """For each node, how many values made before it are read by it or after it."""
        index = {n: i for i, n in enumerate(work)}
        change = [0] * (len(work) + 2)
        for n, i in index.items():
            ends = [index.get(u, len(work)) for u in n.users]
            if ends:
                # several results at once can only be told apart on the side that made them
                weight = 1 if isinstance(n.meta.get("example_value"), FakeTensor) else _MANY
                change[i + 1] += weight
                change[max(ends) + 1] -= weight
        out, now = [], 0
        for i in range(len(work)):
            now += change[i]
            out.append(now)
        return out

    def _ends(self, s: _Segment, number: int, home: dict[fx.Node, int]) -> None:
        given: dict[fx.Node, None] = {}
        ints: dict[fx.Node, None] = {}

        def take(a: fx.Node) -> None:
            if a.op == "placeholder":
                given[a] = None
            elif self.int[a]:
                if a not in ints:
                    for b in a.all_input_nodes:
                        take(b)
                    ints[a] = None
            elif home[a] != number:
                given[a] = None

        for n in (*s.nodes, *s.left):
            for a in n.all_input_nodes:
                take(a)
        for n in s.left:
            take(n)
        s.given, s.ints = list(given), list(ints)
        for n in s.nodes:
            if any(u.op == "output" or home.get(u) != number for u in n.users):
                if not isinstance(n.meta.get("example_value"), FakeTensor):
                    raise Whole(f"{n.name} goes from layer to layer and is no tensor")
                s.left.append(n)

    def _key(self, s: _Segment) -> Any:
        number: dict[fx.Node, int] = {}
        lines: list[Any] = []
        for n in s.given:
            number[n] = len(number)
            value = n.meta["example_value"]
            # whether it is an input of the graph does not matter, but whose symbol an int is does
            lines.append(self.told[n] if self.int[n] else _tensor(n, value))
        for n in (*s.ints, *s.nodes):
            number[n] = len(number)
            lines.append(
                (n.op, str(n.target), _constants((n.args, n.kwargs), number.__getitem__),
                 self.told[n], _line(n))
            )  # fmt: skip
        lines.append([number[n] for n in s.left])
        # AOTAutograd looks for inputs that are one tensor, or share memory
        tensors = [n.meta["example_value"] for n in s.given if not self.int[n]]
        for of in (id, _memory):
            groups = dict[int, int]()
            lines.append([groups.setdefault(of(t), len(groups)) for t in tensors])
        return repr(lines)

    # -- one of each ----------------------------------------------------------------------------

    def _trace(self, s: _Segment) -> _Once:
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for i, n in enumerate(s.given):
            made[n] = graph.placeholder(f"given_{i}")
            made[n].meta = {"example_value": n.meta["example_value"]}
        for n in (*s.ints, *s.nodes):
            made[n] = graph.node_copy(n, made.__getitem__)
        marked = [
            made[n] if self.int[n] else graph.call_function(_BOUNDARY, (made[n],)) for n in s.left
        ]
        graph.output(tuple(marked))
        found: list[fx.GraphModule] = []

        def grab(functional: fx.GraphModule, fakes: Sequence[Any]) -> Any:
            found.append(functional)
            return make_boxed_func(functional.forward)

        module = fx.GraphModule(torch.nn.Module(), graph)
        try:
            self.aot(module, [n.meta["example_value"] for n in s.given], grab)
        except Exception as e:  # in the whole graph more may be known
            raise Whole(f"a layer cannot be traced alone: {type(e).__name__}") from e
        context = TracingContext.try_get()
        about = None if context is None else context.fw_metadata
        if about is None or len(found) != 1:
            raise Whole("AOTAutograd did not say what it made")
        return _once(found[0], s, about)

    # -- all together ---------------------------------------------------------------------------

    def _joined(
        self, segments: list[_Segment], once: dict[Any, _Once], memory: dict[fx.Node, Any]
    ) -> tuple[fx.GraphModule, dict[fx.Node, Any]]:
        root, graph = torch.nn.Module(), fx.Graph()
        now: dict[fx.Node, fx.Node] = {}  # Dynamo's node -> its value at this point
        for p in self.places:
            now[p] = graph.placeholder(p.name)
        flags: dict[fx.Node, Any] = {}
        constants: dict[Any, str] = {}
        for s in segments:
            one = once[s.key]
            env: dict[fx.Node, fx.Node] = {}
            taken = iter([now[n] if self.int[n] else self._read(n, now[n]) for n in s.given])
            for n in one.graph.nodes:
                if n.op == "placeholder":
                    env[n] = next(taken)
                elif n.op == "get_attr":
                    name = constants.get((s.key, n.target))
                    if name is None:
                        name = constants[s.key, n.target] = f"_layer_constant_{len(constants)}"
                        setattr(root, name, getattr(one.module, str(n.target)))
                    env[n] = graph.get_attr(name)
                    env[n].meta = dict(n.meta)
                elif n.op == "call_function" and n.target is _BOUNDARY:
                    env[n] = env[n.args[0]]
                elif n.op == "call_function" and not _epilogue(n):
                    env[n] = _again(graph, n, env)
            for i, value in one.writes.items():
                given = s.given[i]
                if given.op != "placeholder":
                    raise Whole(f"{given.name} is written in another layer than made it")
                if flags.setdefault(given, one.flags[i]) != one.flags[i]:
                    raise Whole("layers write an input in different ways")
                now[given] = env[value]
            for n, r in zip(s.left, one.results, strict=True):
                now[n] = env[r]
        return self._finished(root, graph, now, flags, memory), flags

    @staticmethod
    def _read(n: fx.Node, value: fx.Node) -> fx.Node:
        """``value``, if it lies in memory as what its readers were traced with. An in-place op
        keeps strides, and the functional one in its place may not."""
        if value.op == "placeholder":
            return value
        want, have = n.meta["example_value"], value.meta.get("val")
        if not isinstance(have, torch.Tensor):
            raise Whole(f"{n.name} is no tensor when it is traced")
        lies = [(x.shape, x.stride(), x.storage_offset(), x.dtype) for x in (want, have)]
        if lies[0] != lies[1]:
            raise Whole(f"{n.name} lies in memory otherwise than in the program")
        return value

    def _finished(
        self, root: torch.nn.Module, graph: fx.Graph, now: dict[fx.Node, fx.Node],
        flags: dict[fx.Node, Any], memory: dict[fx.Node, Any],
    ) -> fx.GraphModule:  # fmt: skip
        written = {memory[n] for n in flags}
        others = [n for n in now if not self.int[n] and n not in flags]
        if len(written) < len(flags) or any(memory[n] in written for n in others):
            raise Whole("what is written has another name where layers meet")
        seen = {memory[n] for n in self.places if not self.int[n]}
        for r in _results(self.output):
            if isinstance(r, fx.Node) and not self.int[r]:
                _tensor(r, r.meta["example_value"])
                self._read(r, now[r])
                if memory[r] in seen:
                    raise Whole("a result shares memory with an input, or another result")
                seen.add(memory[r])
        for p, n in zip(self.places, list(graph.nodes), strict=False):
            if p in flags:
                copy = graph.call_function(aten.copy_.default, (n, now[p]))
                copy.meta = {"val": p.meta["example_value"]}
        graph.output(fx.map_arg(tuple(_results(self.output)), now.__getitem__))
        return _LazyGraphModule(root, graph)  # it is not run as it is: it needs no code


def _stood_in(
    gm: fx.GraphModule, inputs: Sequence[Any], functional: fx.GraphModule,
    flags: dict[fx.Node, Any], inner: Callable[..., Any], aot: Trace,
) -> Any:  # fmt: skip
    """AOTAutograd's wrapper for the whole, around what ``inner`` makes of ``functional``."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for p in places:
        made[p] = graph.placeholder(p.name)
        made[p].meta = dict(p.meta)
    for p in flags:
        graph.call_method("zero_", (made[p],))
    outs: list[Any] = []
    for r in _results(next(iter(reversed(gm.graph.nodes)))):
        value = r.meta["example_value"] if isinstance(r, fx.Node) else None
        if isinstance(value, FakeTensor):
            like: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            made_of = (list(value.shape), list(value.stride()))
            outs.append(graph.call_function(torch.empty_strided, made_of, like))
        elif isinstance(r, fx.Node):
            outs.append(_int(r, graph, made))
        else:
            outs.append(r)
    graph.output(tuple(outs))

    came = False

    def instead(stand_in: fx.GraphModule, fakes: Sequence[Any]) -> Any:
        nonlocal came
        new = [n for n in functional.graph.nodes if n.op == "placeholder"]
        old = [n for n in stand_in.graph.nodes if n.op == "placeholder"]
        context = TracingContext.try_get()
        about = None if context is None else context.fw_metadata
        if len(new) != len(old) or about is None:
            raise Whole("AOTAutograd took other inputs")
        for a, b in zip(new, old, strict=True):
            a.meta = dict(b.meta)
        mine = [flags.get(p) for p in places]
        its = [
            dataclasses.astuple(i) if i.mutates_data or i.mutates_metadata else None
            for i in about.input_info
        ]
        kinds = {o.output_type for o in about.output_info}
        if mine != its or not kinds <= {OutputType.non_alias}:
            raise Whole("AOTAutograd would wrap it otherwise")
        came = True
        return inner(functional, fakes)

    try:
        return aot(fx.GraphModule(torch.nn.Module(), graph), list(inputs), instead)
    except Exception as e:
        if came:
            raise
        raise Whole(f"the stand-in cannot be traced: {type(e).__name__}: {e}") from e


def _once(functional: fx.GraphModule, s: _Segment, about: Any) -> _Once:
    """Raises Whole where AOTAutograd did more than to make a graph of it."""
    graph = functional.graph
    places = [n for n in graph.nodes if n.op == "placeholder"]
    if len(places) != len(s.given) or len(about.input_info) != len(places):
        raise Whole("AOTAutograd took other inputs of a layer")
    number = {p: i for i, p in enumerate(places)}
    writes: dict[int, fx.Node] = {}
    for n in graph.nodes:
        if _epilogue(n):
            if n.args[0] not in number or n.users:
                raise Whole("a layer writes what is not an input of it")
            writes[number[n.args[0]]] = n.args[1]
        elif n.op == "call_function" and n.target is not operator.getitem:
            target = n.target
            if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
                raise Whole(f"a layer writes by {target}")
    flags = {i: dataclasses.astuple(a) for i, a in enumerate(about.input_info) if a.mutates_data}
    if any(a.mutates_metadata for a in about.input_info) or flags.keys() != writes.keys():
        raise Whole("a layer changes more of its inputs than values")
    results = _results(list(graph.nodes)[-1])
    if len(results) != len(s.left) or not all(isinstance(r, fx.Node) for r in results):
        raise Whole("AOTAutograd gave other results of a layer")
    return _Once(graph, functional, writes, results, flags)


def _again(graph: fx.Graph, n: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """A copy of ``n``, whose name others have. Without the number at its end: torch 2.11 would try
    one after the other, 5 of 10 s for 60 layers."""
    args, kwargs = (fx.map_arg(a, env.__getitem__) for a in (n.args, n.kwargs))
    base = _NUMBER.sub("", n.name)
    made = graph.create_node(n.op, n.target, args, kwargs, base or None, n.type)  # type: ignore[arg-type]
    made.meta = dict(n.meta)
    return made


def _epilogue(n: fx.Node) -> bool:
    return n.op == "call_function" and n.target is aten.copy_.default


def _results(output: fx.Node) -> list[Any]:
    found = output.args[0]
    return list(found) if isinstance(found, (tuple, list)) else [found]


def _int(n: fx.Node, graph: fx.Graph, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """An int of Dynamo's graph, made anew in another one."""
    if n not in made:
        for a in n.all_input_nodes:
            _int(a, graph, made)
        made[n] = graph.node_copy(n, made.__getitem__)
    return made[n]


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


# -- what nodes are --------------------------------------------------------------------------------


def _tensor(n: fx.Node, value: Any) -> Any:
    """What tracing can tell of an input. Raises Whole for what it may treat in ways of its own."""
    if not isinstance(value, FakeTensor):
        raise Whole(f"{n.name} is a {type(value).__name__}")
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    odd = value.is_conj() or value.is_neg() or value.layout is not torch.strided
    if odd or any(type(x) is not int for x in sizes):
        raise Whole(f"{n.name} has a size that changes, or is lazily conjugated")
    return (
        tuple(value.shape), value.stride(), value.storage_offset(), str(value.dtype),
        str(value.device), value.requires_grad, value.is_inference(),
        isinstance(value, torch.nn.Parameter), value.is_leaf,
    )  # fmt: skip


def _made(n: fx.Node) -> Any:
    def one(x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return tuple(one(y) for y in x)
        if isinstance(x, torch.Tensor):
            return str(x.shape), str(x.stride()), str(x.dtype), str(x.device)
        return str(x)

    return one(n.meta.get("example_value"))


_CONSTANT = (
    int, float, bool, str, complex, type(None), type(...), torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip


def _constants(a: Any, number: Callable[[fx.Node], Any]) -> Any:
    """Arguments as data that tells True from 1 and 1.0. Raises Whole."""
    if isinstance(a, fx.Node):
        return "%", number(a)
    if isinstance(a, slice):
        return ("slice", *(_constants(x, number) for x in (a.start, a.stop, a.step)))
    if isinstance(a, (tuple, list)):
        return (type(a).__name__, *(_constants(x, number) for x in a))
    if isinstance(a, dict):
        return ("dict", *((str(k), _constants(v, number)) for k, v in a.items()))
    if type(a) in _CONSTANT:
        return type(a).__name__, repr(a)
    raise Whole(f"an argument is a {type(a).__name__}")


_MODULES = re.compile(
    r"(_operator|torch(\.functional|\.nn\.functional|\._C\._(nn|special|linalg|fft))?)$"
)


def _plain(n: fx.Node) -> bool:
    """Whether it does what it does to its arguments alone, not to the state of torch."""
    if n.op == "call_method":
        return isinstance(n.target, str) and "grad" not in n.target and "set_" not in n.target
    t = n.target
    if isinstance(t, torch._ops.OpOverload):
        return t.namespace in ("aten", "rtc", "prims")
    name, home = getattr(t, "__name__", "_"), getattr(t, "__module__", None) or ""
    own = name.startswith("_") and not hasattr(torch._C._VariableFunctions, name)  # not ATen's
    state = own or "grad" in name or "set_" in name
    return bool(_MODULES.match(home)) and not state


_NUMBER = re.compile(r"_\d+$")
_LAST = re.compile(r'File "[^"]+", line \d+, in \S+')


def _line(n: fx.Node) -> str:
    """The line of the user's program, for messages: a copy says its own."""
    found = _LAST.findall(n.meta.get("stack_trace") or "")
    return found[-1] if found else ""


__all__ = ["Whole", "traced"]
