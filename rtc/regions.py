"""Cut a graph into regions, so that regions which are alike are compiled once.

A deep model is one block over and over. Heavy ops (products, attention, ops of other namespaces)
run as they are; what lies between them is cut into regions, each computed as late as its users
allow, so that it fuses with them. Regions that agree in ops, constants and layouts share one
compiled function: code generation takes as long as one block, not as long as the model.

Before:
    c1 = index_put(c, [idx], f(x));  o = heavy(q, c1);  y = g(o);  copy_(c, c1)
After, run in this order:
    region0(c, idx, x): copy_(c, index_put(c, [idx], f(x)))   # c is written in place here
    o = heavy(q, c)
    y = region1(o)

A write moves from the graph's end to where it is computed. That is legal if every reader of the
older content comes before it: readers are ordered so, and where the graph's own order says
otherwise the write stays at the end. Views are made anew in every region that reads through them,
so that no region has two inputs that share memory with one that it writes.

Collectives run as they are, in the graph's own order whatever their levels, so that ranks whose
graphs are not cut, or cut otherwise, meet in them. Until a collective was waited for it may still
read: its waits count as readers of what it reads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rtc.kernels.pre_attention_graph import IN_PLACE
from rtc.passes.analysis.collectives import is_wait, issues
from rtc.passes.analysis.heavy import is_heavy
from rtc.region_ops import (
    COPIES,
    RESHAPES,
    aten_name,
    held_by,
    is_view,
    owner,
    shrinks,
    waits,
)
from rtc.runtime.program import Program, Slot

aten = torch.ops.aten


@dataclass
class _Write:
    """A write in place: ``node`` writes ``base`` (a placeholder), seen in ``shape``."""

    node: fx.Node
    base: fx.Node
    shape: tuple[int, ...]


@dataclass
class _Region:
    nodes: list[fx.Node] = field(default_factory=list)


@dataclass
class Cut:
    """What was cut: for the report and for tests."""

    regions: int = 0
    unique: int = 0
    heavy: int = 0
    in_place: int = 0
    writes: int = 0


class Cutter:
    """Cuts one graph; ``compile_region(gm, fakes)`` makes one region's callable."""

    def __init__(
        self, gm: fx.GraphModule, compile_region: Callable[[fx.GraphModule, list[Any]], Any]
    ) -> None:
        self.gm, self.compile_region = gm, compile_region
        self.nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
        self.inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.index = {n: i for i, n in enumerate(gm.graph.nodes)}
        self.view = {n: is_view(n) for n in self.nodes}
        self.heavy = {n: is_heavy(n) for n in self.nodes}
        self.writes: dict[fx.Node, _Write] = {}
        self.dropped: set[fx.Node] = set()  # copy_ of writes that happen in place
        self.before: dict[fx.Node, list[fx.Node]] = {}  # extra order: must come first
        self.after: dict[fx.Node, list[fx.Node]] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        self.done: dict[Any, Any] = {}
        self.cut = Cut()

    def run(self) -> Program:
        self._find_writes()
        self._snapshots()
        self._levels()
        return self._assemble()

    # -- writes ---------------------------------------------------------------------------------

    def readers(self, n: fx.Node) -> list[fx.Node]:
        """Nodes that read ``n``'s memory, through views or not; no views themselves."""
        have = self._readers.get(n)
        if have is None:
            found: dict[fx.Node, None] = {}
            stack = list(n.users)
            while stack:
                u = stack.pop()
                if u.op == "output" or not self.view[u]:
                    found[u] = None
                    if issues(u):
                        found.update(dict.fromkeys(waits(u)))
                    elif is_wait(u):  # hands on the memory that it is given
                        stack += u.users
                else:
                    stack += u.users
            have = self._readers[n] = list(found)
        return have

    def _find_writes(self) -> None:
        copies = [n for n in self.nodes if n.target is aten.copy_.default]
        self.cut.writes = len(copies)
        chains: dict[fx.Node, list[fx.Node]] = {}  # copy_ -> the writes that happen in place
        for n in copies:
            chain = self._chain(n.args[0], n.args[1])  # type: ignore[arg-type]
            if chain and self._ordered(n.args[0], chain, n):  # type: ignore[arg-type]
                chains[n] = chain
        while True:  # an op that writes several caches does so in place for all of them or none
            done = {w for chain in chains.values() for w in chain}
            half = {owner(w) for w in done if any(o not in done for o in self._outputs(w))}
            bad = [n for n, chain in chains.items() if any(owner(w) in half for w in chain)]
            if not bad:
                break
            for n in bad:
                del chains[n]
        for n in copies:
            base = n.args[0]
            assert isinstance(base, fx.Node)
            if n not in chains:
                self._order([r for r in self.readers(base) if r is not n], n)
                continue
            self.cut.in_place += 1
            self.dropped.add(n)
            older = base
            for w in chains[n]:
                held, own = held_by(w), owner(w)
                assert held is not None
                self.writes[w] = _Write(w, base, tuple(held.meta["val"].shape))
                self._order([r for r in self.readers(older) if r not in (own, n)], own)
                older = w

    def _snapshots(self) -> None:
        """Copies of memory that is written run as they are: Inductor may hand out the written
        memory itself for one of them (so does torch.compile 2.13 on a whole graph)."""
        written = {n.args[0] for n in self.nodes if n.target is aten.copy_.default}
        for n in self.nodes:
            if aten_name(n) in COPIES and self.root(n.args[0]) in written:  # type: ignore[arg-type]
                self.heavy[n] = True

    def _outputs(self, write: fx.Node) -> list[fx.Node]:
        """All that the op of a write writes, where it is one of several outputs."""
        own = owner(write)
        if own is write:
            return [write]
        new = IN_PLACE[own.target][1]
        used = [u for u in own.users if u.args[1] in new]
        given = [i for i, a in new.items() if isinstance(own.args[a], fx.Node)]
        return used if len(used) == len(given) else [own]  # [own]: never among the writes

    def _order(self, first: Iterable[fx.Node], then: fx.Node) -> None:
        for r in first:
            if r.op != "output":
                self.before.setdefault(then, []).append(r)
                self.after.setdefault(r, []).append(then)

    def _chain(self, base: fx.Node, new: fx.Node) -> list[fx.Node] | None:
        """The writes that lead from ``base`` to ``new``, with nothing but reshapes in between."""
        chain: list[fx.Node] = []
        at, reshaped = new, False
        while at is not base:
            below = held_by(at)
            if below is not None:
                chain.append(at)
            elif at.target in RESHAPES:
                reshaped, below = True, at.args[0]  # type: ignore[assignment]
            if not isinstance(below, fx.Node) or below.op == "get_attr":
                return None
            at = below
        if base.op != "placeholder" or (reshaped and not base.meta["val"].is_contiguous()):
            return None
        return chain[::-1] or None

    def _ordered(self, base: fx.Node, chain: list[fx.Node], copy: fx.Node) -> bool:
        """Whether every reader of an older content comes before the next write in the graph."""
        older = base
        for w in chain:
            if w.meta["val"].dtype != base.meta["val"].dtype:
                return False
            own = owner(w)
            rest = [a for a in own.all_input_nodes if a is not held_by(w)]
            if any(self.root(a) is older or a is older for a in rest):
                return False  # it writes what it reads from the same memory
            for r in self.readers(older):
                if r is not own and r is not copy and self.index[r] > self.index[own]:
                    return False
            older = w
        return not any(r.op == "output" for r in self.readers(older))

    def root(self, n: fx.Node) -> fx.Node:
        while n.op == "call_function" and self.view[n]:
            n = n.args[0]  # type: ignore[assignment]
        return n

    # -- when -----------------------------------------------------------------------------------

    def _levels(self) -> None:
        """``level``: heavy ops run at theirs; a region of a level runs after its heavy ops."""
        level: dict[fx.Node, int] = {}
        collective = 0  # level of the last one
        for n in self.nodes:
            if self.view[n] or n in self.dropped:
                continue
            roots = [self.root(a) for a in n.all_input_nodes]
            lowest = max((level.get(r, 0) for r in (*roots, *self.before.get(n, ()))), default=0)
            picks = n.target is operator.getitem
            level[n] = lowest + 1 if self.heavy[n] and not picks else lowest
            if issues(n):
                level[n] = collective = max(level[n], collective)
        self.last = max(level.values(), default=0)
        for n in reversed(self.nodes):
            if n not in level or self.heavy[n] or self._effect(n):
                continue
            latest = self.last
            for u in (*self.readers(n), *self.after.get(n, ())):
                if u.op == "output" or u in self.dropped:
                    continue
                latest = min(latest, level[u] - 1 if self.heavy[u] else level[u])
            assert latest >= level[n]
            if not shrinks(n):
                level[n] = latest
            for u in n.users:  # an op and its several outputs are in one region
                if u.target is operator.getitem:
                    level[u] = level[n]
        self.level = level

    def _effect(self, n: fx.Node) -> bool:
        return n in self.writes or n.target is aten.copy_.default

    def _components(self, nodes: list[fx.Node]) -> list[_Region]:
        """Nodes of one level, apart where they share neither values nor a heavy op's result."""
        parent: dict[fx.Node, fx.Node] = {}

        def find(x: fx.Node) -> fx.Node:
            parent.setdefault(x, x)
            while parent[x] is not x:
                parent[x] = parent[parent[x]]
                x = parent[x]
            return x

        here = set(nodes)
        for n in nodes:
            find(n)
            for a in n.all_input_nodes:
                r = self.root(a)
                if r.op == "call_function" and (r in here or self.heavy[r]):
                    parent[find(r)] = find(n)
                if self.writes.get(r) and r not in here:
                    parent[find(self.writes[r].base)] = find(n)
            base = self.writes[n].base if n in self.writes else None
            if n.target is aten.copy_.default:
                base = n.args[0]  # type: ignore[assignment]
            if base is not None:  # writers of one memory, and readers beside them, stay together
                parent[find(base)] = find(n)
            for r in (*self.before.get(n, ()), *self.after.get(n, ())):
                if r in here:
                    parent[find(r)] = find(n)
        groups: dict[fx.Node, _Region] = {}
        for n in nodes:
            groups.setdefault(find(n), _Region()).nodes.append(n)
        return list(groups.values())

    # -- what runs ------------------------------------------------------------------------------

    def _assemble(self) -> Program:
        by_level: dict[int, tuple[list[fx.Node], list[fx.Node]]] = {}
        for n in self.nodes:
            if n in self.level:
                heavy, glue = by_level.setdefault(self.level[n], ([], []))
                (heavy if self.heavy[n] else glue).append(n)
        self.program = Program(len(self.inputs))
        self.slot: dict[Any, Slot] = {n: Slot(i) for i, n in enumerate(self.inputs)}
        self.memory: dict[Slot, Slot] = {}  # view -> the input that it looks at
        for lv in sorted(by_level):
            heavy, glue = by_level[lv]
            for n in heavy:
                if n not in self.slot:
                    self._run_op(n)
                self.cut.heavy += n.target is not operator.getitem
            for region in self._components(glue):
                self._run_region(region)
        output = next(n for n in self.gm.graph.nodes if n.op == "output")
        self.program.finish(fx.map_arg(output.args[0], self._value))
        self.cut.unique = len(self.done)
        return self.program

    def _value(self, n: fx.Node) -> Slot:
        """Where the program holds a node's value; views and constants are made on demand."""
        if n in self.slot:
            return self.slot[n]
        if n.op == "get_attr":
            self.slot[n] = self.program.constant(getattr(self.gm, str(n.target)))
        elif n in self.writes:
            w = self.writes[n]
            self.slot[n] = self._seen_in(w.base, tuple(n.meta["val"].shape))
        elif n.target is aten.copy_.default:  # ``self.n += 1`` hands on what it wrote
            self.slot[n] = self._value(n.args[0])  # type: ignore[arg-type]
        else:
            assert self.view[n], n
            self._run_op(n)
        return self.slot[n]

    def _seen_in(self, base: fx.Node, shape: tuple[int, ...]) -> Slot:
        if tuple(base.meta["val"].shape) == shape:
            return self.slot[base]
        if (base, shape) not in self.slot:
            args = (self.slot[base], list(shape))
            slot = self.slot[base, shape] = self.program.op(aten.view.default, args, {})
            self.memory[slot] = self.slot[base]
        return self.slot[base, shape]

    def _run_op(self, n: fx.Node) -> None:
        if n in self.writes:
            return  # seen where it was written
        if n.target in IN_PLACE and any(u in self.writes for u in n.users):
            self._run_in_place(n)
            return
        args, kwargs = fx.map_arg((n.args, n.kwargs), self._value)
        target = aten.reshape.default if n.target in RESHAPES else n.target
        strides = None
        val = n.meta.get("val")
        # what is waited for is not read before, not even to lay it out
        pending = issues(n) and waits(n)
        if self.heavy[n] and isinstance(val, torch.Tensor) and not pending:
            strides = tuple(val.stride())
        self.slot[n] = self.program.op(target, args, kwargs, strides)

    def _run_in_place(self, n: fx.Node) -> None:
        write, new = IN_PLACE[n.target]
        args = list(fx.map_arg(n.args, self._value))
        for u in n.users:
            if u in self.writes:
                w = self.writes[u]
                args[new[u.args[1]]] = self._seen_in(w.base, w.shape)
        out = self.program.op(write, args, {})
        for u in n.users:
            if u not in self.writes:
                assert u.args[1] == 0
                self.slot[u] = out

    def _run_region(self, region: _Region) -> None:
        built = _Build(self, region)
        if built.shared:
            built = _Build(self, region, whole=True)
        self.cut.regions += 1
        fn = self.done.get(built.key)
        if fn is None:
            fn = self.done[built.key] = self.compile_region(built.module(), built.fakes())
        for n, slot in zip(
            built.outputs, self.program.call(fn, built.slots, len(built.outputs)), strict=True
        ):
            self.slot[n] = slot


class _Build:
    """One region as a graph of its own, and the key by which alike ones are known."""

    def __init__(self, cutter: Cutter, region: _Region, whole: bool = False) -> None:
        """``whole``: written memory comes in as it is and is reshaped inside."""
        self.c, self.whole = cutter, whole
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.number: dict[fx.Node, int] = {}  # of new nodes, for the key
        self.lines: list[Any] = []
        self.given: list[tuple[fx.Node, Slot, Any]] = []  # placeholder, where from, fake value
        self._inputs: dict[Slot, fx.Node] = {}
        members = set(region.nodes)
        self.members = members
        bases: dict[fx.Node, fx.Node] = {}  # written memory -> the region's input for it
        copies: list[tuple[fx.Node, fx.Node]] = []
        for n in region.nodes:
            if n.target is aten.copy_.default:
                copies.append((self._arg(n.args[0]), self._arg(n.args[1])))
                continue
            new = self._copy(n)
            if n in cutter.writes:
                root = cutter.writes[n].base
                if root not in bases:
                    bases[root] = self._base(n)
                base = bases[root]
                copies = [c for c in copies if c[0] is not base] + [(base, new)]
        self.outputs = [
            n for n in region.nodes
            if n not in cutter.writes and n.target is not aten.copy_.default
            and any(self._outside(u) for u in cutter.readers(n))
        ]  # fmt: skip
        for base, new in copies:
            if base.meta["val"].shape != new.meta["val"].shape:
                new = self._emit(aten.reshape.default, (new, list(base.meta["val"].shape)), base)
            self.lines.append(("copy_", self.number[base], self.number[new]))
            self.graph.call_function(aten.copy_.default, (base, new)).meta = dict(base.meta)
        outs = [self.made[n] for n in self.outputs]
        self.lines.append(("out", *(self.number[o] for o in outs)))
        self.graph.output(tuple(outs))
        self.key = repr(self.lines)
        self.slots = [s for _, s, _ in self.given]
        # a second input of the same memory beside a written one: not to be had from a compiler
        self.shared = any(
            cutter.memory.get(s, s) == cutter.slot[root] and self._inputs[s] is not base
            for root, base in bases.items()
            for s in self.slots
        )

    def _outside(self, user: fx.Node) -> bool:
        return user.op == "output" or (user not in self.members and user not in self.c.dropped)

    def _base(self, write: fx.Node) -> fx.Node:
        """The memory that a write goes to, as the region's input."""
        held = self.made.get(write.args[0])  # type: ignore[arg-type]
        if held is not None and held.op == "placeholder":
            return held
        w = self.c.writes[write]
        if self.whole:
            return self._input(self.c.slot[w.base], w.base.meta["val"])
        return self._input(self.c._seen_in(w.base, w.shape), write.args[0].meta["val"])  # type: ignore[union-attr]

    def _input(self, slot: Slot, val: Any) -> fx.Node:
        if slot not in self._inputs:
            p = self.graph.placeholder(f"a{len(self.given)}")
            p.meta["val"] = val
            self._inputs[slot] = p
            self.number[p] = len(self.number)
            self.given.append((p, slot, val))
            self.lines.append(("in", tuple(val.shape), val.stride(), val.dtype, str(val.device)))
        return self._inputs[slot]

    def _arg(self, n: fx.Node) -> fx.Node:
        """The region's own node for a value: made here, a view made anew, or an input."""
        if n in self.made:
            return self.made[n]
        if n in self.c.writes and self.whole:
            base = self.c.writes[n].base
            new = self._input(self.c.slot[base], base.meta["val"])
            if new.meta["val"].shape != n.meta["val"].shape:
                new = self._emit(aten.reshape.default, (new, list(n.meta["val"].shape)), n)
        elif n in self.c.writes:  # written in an earlier region
            new = self._input(self.c._value(n), n.meta["val"])
        elif n.op == "call_function" and self.c.view[n]:
            held = self._written(n)
            new = held if held is not None else self._copy(n)
        else:
            new = self._input(self.c._value(n), n.meta["val"])
        self.made[n] = new
        return new

    def _written(self, n: fx.Node) -> fx.Node | None:
        """A reshaped placeholder that some write goes to: the very input that is written."""
        if self.whole or not isinstance(n.meta["val"], torch.Tensor):
            return None
        root, shape = self.c.root(n), tuple(n.meta["val"].shape)
        for w in self.members & self.c.writes.keys():
            write = self.c.writes[w]
            if write.base is root and w.args[0] is n and write.shape == shape:
                return self._input(self.c._seen_in(root, shape), n.meta["val"])
        return None

    def _copy(self, n: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((n.args, n.kwargs), self._arg)
        target = aten.reshape.default if n.target in RESHAPES else n.target
        new = self._emit(target, args, n, kwargs)
        self.made[n] = new
        return new

    def _emit(self, target: Any, args: Any, like: fx.Node, kwargs: Any = None) -> fx.Node:
        kwargs = kwargs or {}
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {k: like.meta[k] for k in ("val", "stack_trace") if k in like.meta}
        told = fx.map_arg((args, kwargs), lambda a: ("node", self.number[a]))
        self.number[new] = len(self.number)
        self.lines.append((str(target), told))
        return new

    def module(self) -> fx.GraphModule:
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def fakes(self) -> list[Any]:
        """Of the inputs; all apart, as a compiler takes one object twice for one input."""
        seen: set[int] = set()
        out = []
        for p, _, v in self.given:
            if id(v) in seen and isinstance(v, torch._subclasses.FakeTensor):
                with v.fake_mode:
                    v = torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
                p.meta["val"] = v
            seen.add(id(v))
            out.append(v)
        return out


def early_writes(gm: fx.GraphModule) -> fx.GraphModule:
    """Store each cache as soon as its older content is read no more, for a graph that is run op by
    op: at the end, the new contents of all caches would be held side by side. Returns ``gm``."""
    cutter = Cutter(gm, lambda gm, fakes: None)
    for n in [n for n in cutter.nodes if n.target is aten.copy_.default]:
        base, new = n.args
        assert isinstance(base, fx.Node)
        after = [r for r in cutter.readers(base) if r is not n]
        if isinstance(new, fx.Node):
            after.append(new)
        if all(r.op == "call_function" for r in after):
            max(after).append(n)  # as they stand now: others were moved before
    gm.graph.lint()
    gm.recompile()
    return gm


def cut(
    gm: fx.GraphModule, compile_region: Callable[[fx.GraphModule, list[Any]], Any]
) -> tuple[Program, Cut]:
    """A program for ``gm``. Raises nothing but what ``compile_region`` raises; see ``obstacle``."""
    cutter = Cutter(gm, compile_region)
    return cutter.run(), cutter.cut
