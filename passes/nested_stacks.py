"""A tensor of stacks, [layers, keys and values, ..], of which single parts are used, as one stack.

Before:
    row = select(c, 0, l);  k = select(row, 0, j)                  # c [L, K, ..], k [..]
    c' = select_scatter(c, select_scatter(row, k', 0, j), 0, l);  copy_(c, c')
After:
    k = select(f, 0, l * K + j)                                    # f [L * K, ..] shares c's memory
    f' = select_scatter(f, k', 0, l * K + j);  copy_(f, f')

Refuses: any other use of the tensor, of a row or of a version of them; memory that two axes do not
share evenly. All or nothing: looked through first, then rewritten.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rtc.passes.analysis.host import InputInfo

aten = torch.ops.aten

_SAME = (aten.clone.default, aten.alias.default, aten.detach.default)


class _Other(Exception):
    """A use that is none of a single part."""


@dataclass
class _Row:
    """``whole``[at] but for the parts in ``new``."""

    whole: fx.Node
    at: int
    new: dict[int, fx.Node] = field(default_factory=dict)


class _Reader:
    """What each node that comes from the tensor is: a version of it, a row, a part."""

    def __init__(self, gm: fx.GraphModule, info: InputInfo) -> None:
        self.info = info
        val = info.node.meta["val"]
        self.counts = tuple(int(n) for n in val.shape[:2])
        self.versions: dict[fx.Node, tuple[fx.Node, _Row | None]] = {}  # whole -> (before, row)
        self.rows: dict[fx.Node, _Row] = {}
        self.unbound: dict[fx.Node, _Row] = {}
        self.parts: dict[fx.Node, tuple[_Row, int]] = {}
        self.stores: list[fx.Node] = []
        known: set[fx.Node] = {info.node}
        for node in gm.graph.nodes:
            if node is info.node or not any(a in known for a in node.all_input_nodes):
                continue
            if self._read(node):
                known.add(node)

    def _whole(self, x: Any) -> bool:
        return x is self.info.node or x in self.versions

    def _index(self, node: fx.Node, at: int, axis: int) -> int:
        """The constant index along axis 0, which stands at argument ``at``."""
        got = node.args[axis] if len(node.args) > axis else 0
        i = node.args[at]
        if not isinstance(i, int) or not isinstance(got, int):
            raise _Other
        rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
        if got % rank != 0:
            raise _Other
        size = int(node.args[0].meta["val"].shape[0])  # type: ignore[union-attr]
        return i % size

    def _read(self, node: fx.Node) -> bool:
        """Take note of a user; whether its own users matter. Raises _Other."""
        t, a = node.target, node.args
        if t is aten.copy_.default and a[0] is self.info.node and self._whole(a[1]):
            self.stores.append(node)
            return False
        x = a[0] if a else None
        others = [n for n in node.all_input_nodes if n is not x]
        if t in _SAME and self._whole(x):
            self.versions[node] = x, None  # type: ignore[assignment]
            return True
        if t in _SAME and x in self.rows:
            self.rows[node] = self.rows[x]  # type: ignore[index]
            return True
        if t is aten.select.int and self._whole(x):
            self.rows[node] = _Row(x, self._index(node, 2, 1))  # type: ignore[arg-type]
            return True
        if t is aten.select.int and x in self.rows:
            self.parts[node] = self.rows[x], self._index(node, 2, 1)  # type: ignore[index]
            return False
        if t is aten.unbind.int and x in self.rows and (len(a) < 2 or a[1] == 0):
            self.unbound[node] = self.rows[x]  # type: ignore[index]
            return True
        if t is operator.getitem and x in self.unbound:
            self.parts[node] = self.unbound[x], int(a[1])  # type: ignore[index, call-overload]
            return False
        if t is aten.select_scatter.default and x in self.rows:
            if any(n in self.rows or self._whole(n) for n in others):
                raise _Other
            row = self.rows[x]  # type: ignore[index]
            at = self._index(node, 3, 2)
            self.rows[node] = _Row(row.whole, row.at, {**row.new, at: a[1]})  # type: ignore[dict-item]
            return True
        if t is aten.select_scatter.default and self._whole(x) and a[1] in self.rows:
            row = self.rows[a[1]]  # type: ignore[index]
            same = row.whole is x and row.at == self._index(node, 3, 2)
            if not same and len(row.new) < self.counts[1]:
                raise _Other
            self.versions[node] = x, _Row(x, self._index(node, 3, 2), row.new)  # type: ignore[assignment, arg-type]
            return True
        raise _Other


def flatten(gm: fx.GraphModule, info: InputInfo, most: int) -> InputInfo | None:
    """Rewrite the uses of a tensor of stacks, of at most ``most`` parts.

    The input in its place, for the caller to split up and take out again, or None.
    """
    val = info.node.meta["val"]
    if not isinstance(val, torch.Tensor) or val.dim() < 4 or not info.mutated:
        return None
    if any(not isinstance(n, int) for n in (*val.shape, *val.stride())):
        return None
    if min(val.shape[:2]) < 2 or val.stride(0) != val.stride(1) * val.shape[1]:
        return None
    if val.shape[0] * val.shape[1] > most:
        return None
    try:
        found = _Reader(gm, info)
    except _Other:
        return None
    if not found.parts or not found.stores:
        return None
    return _rewritten(gm, found)


def _rewritten(gm: fx.GraphModule, found: _Reader) -> InputInfo:
    graph, info = gm.graph, found.info
    val, per = info.node.meta["val"], found.counts[1]
    with graph.inserting_after([n for n in graph.nodes if n.op == "placeholder"][-1]):
        node = graph.placeholder(f"{info.node.name}_flat")
    with val.fake_mode:
        node.meta = {"val": val.flatten(0, 1)}
    flat: dict[fx.Node, fx.Node] = {info.node: node}
    made: dict[fx.Node, fx.Node] = {}  # part -> what stands in its place

    def now(part: fx.Node) -> fx.Node:
        while part in made:
            part = made[part]
        return part

    def call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
        new = graph.call_function(target, args)
        vals = fx.node.map_arg(args, lambda n: n.meta["val"])
        with val.fake_mode, torch.no_grad():
            new.meta = {"val": target(*vals)}
        if "stack_trace" in like.meta:
            new.meta["stack_trace"] = like.meta["stack_trace"]
        return new

    for use in list(graph.nodes):
        with graph.inserting_before(use):
            if use in found.versions:
                before, new_row = found.versions[use]
                at = flat[before]
                for j, part in (new_row.new if new_row is not None else {}).items():
                    place = new_row.at * per + j  # type: ignore[union-attr]
                    at = call(use, aten.select_scatter.default, at, now(part), 0, place)
                flat[use] = at
            elif use in found.parts:
                row, j = found.parts[use]
                if j in row.new:
                    made[use] = now(row.new[j])
                else:
                    made[use] = call(use, aten.select.int, flat[row.whole], 0, row.at * per + j)
                use.replace_all_uses_with(made[use])
            elif use in found.stores:
                call(use, aten.copy_.default, node, flat[use.args[1]])  # type: ignore[index]
                graph.erase_node(use)
    return InputInfo(
        -1, node, info.source, mutated=True, attribute=info.attribute, parent=info,
        part=(0, 0, 2),
    )  # fmt: skip
