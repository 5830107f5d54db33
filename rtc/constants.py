"""Split off what follows from parameters and calibrated scales alone.

Before:
    a = f(weight);  y = g(x, a)
After:
    constants: a = f(weight)                     # once a session
    main:      y = g(x, a)                       # a: a new input, last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from rtc.passes.analysis.effects import dead_code, has_effect, is_foreign
from rtc.passes.rewrite import copied
from rtc.region_ops import is_view

_LARGEST = 1 << 20  # elements: a converted weight would cost more memory than it saves time


@dataclass
class Split:
    main: fx.GraphModule
    constants: fx.GraphModule
    where: list[int]  # numbers of the inputs that ``constants`` takes
    fakes: list[torch.Tensor]  # of the new inputs of ``main``


def split(gm: fx.GraphModule, given: Sequence[int]) -> Split | None:
    """``given``: numbers of the inputs that do not change; None where nothing follows from them."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    known = {inputs[i] for i in given}
    found: set[fx.Node] = set()  # views among them
    free: set[fx.Node] = set()  # made from nothing: no reason to keep them
    for n in gm.graph.nodes:
        if n.op != "call_function" or not _small(n) or _bound(n):
            continue
        if all(a in free for a in n.all_input_nodes):
            free.add(n)
        elif all(a in known or a in found or a in free for a in n.all_input_nodes):
            found.add(n)
    ends = [n for n in found if not is_view(n) and _kept(n, found)]
    ends.sort(key={n: i for i, n in enumerate(gm.graph.nodes)}.__getitem__)
    if not ends:
        return None
    return Split(*_main(gm, ends), *_constants(gm, inputs, ends, known))  # type: ignore[arg-type]


def _readers(n: fx.Node) -> list[fx.Node]:
    """Nodes that read it, through views or not; the views among them."""
    stack, seen = list(n.users), dict[fx.Node, None]()
    while stack:
        u = stack.pop()
        if u not in seen:
            seen[u] = None
            if is_view(u):
                stack += u.users
    return list(seen)


def _kept(n: fx.Node, found: set[fx.Node]) -> bool:
    """Whether something else than constants reads it, and it is not given to the caller, who may
    write there."""
    readers = _readers(n)
    return any(u not in found for u in readers) and all(u.op != "output" for u in readers)


def _small(n: fx.Node) -> bool:
    v = n.meta.get("val")
    vals = v if isinstance(v, (tuple, list)) else (v,)
    if is_view(n):
        return True
    return all(isinstance(x, torch.Tensor) and x.numel() <= _LARGEST for x in vals)


def _bound(n: fx.Node) -> bool:
    """Whether it belongs where the program has it, once a call."""
    return has_effect(n) or is_foreign(n.target)


def _main(gm: fx.GraphModule, ends: list[fx.Node]) -> tuple[fx.GraphModule]:
    names = {n.name for n in ends}
    main = copied(gm)
    nodes = list(main.graph.nodes)
    last = [n for n in nodes if n.op == "placeholder"][-1]
    for n in nodes:
        if n.name in names:
            with main.graph.inserting_after(last):
                last = main.graph.placeholder(f"constant_{n.name}")
            last.meta = {"val": n.meta["val"]}
            n.replace_all_uses_with(last)
            main.graph.erase_node(n)
    dead_code(main.graph)
    main.graph.lint()
    main.recompile()
    return (main,)


def _constants(
    gm: fx.GraphModule, inputs: list[fx.Node], ends: list[fx.Node], known: set[fx.Node]
) -> tuple[fx.GraphModule, list[int], list[torch.Tensor]]:
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    needed: set[fx.Node] = set()
    stack = list(ends)
    while stack:
        n = stack.pop()
        if n not in needed:
            needed.add(n)
            stack += n.all_input_nodes
    where = [i for i, n in enumerate(inputs) if n in needed]
    for n in gm.graph.nodes:
        if n in needed:
            made[n] = graph.node_copy(n, made.__getitem__)
    graph.output(tuple(made[n] for n in ends))
    module = fx.GraphModule(gm, graph)
    return module, where, [n.meta["val"] for n in ends]
