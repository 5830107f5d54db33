"""Put a functional graph into the form that the analysis reads: same meaning, fewer spellings.

* ``new_zeros(x, ..)`` and its kin take only dtype and device from ``x``: they become ``full(..)``.
* ``select_scatter(x, copy(select(x, i), new), i)`` needs no look at the old frame.
* ``stack([x])`` is an axis more, a slice of everything is what it is cut from, and a size is
  computed from the int inputs, not asked of a tensor.
* A conjugate that is put off (``_conj``, resolved by a copy somewhere) is taken at once.
* A tensor in which several caches are stacked along an axis that only ``select``, ``unbind`` and
  ``select_scatter`` touch becomes one input per part (rank kept, that axis of size 1), so that keys
  and values may move and be read differently. Two such axes in front count as one
  (``nested_stacks.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rtc.passes.analysis.effects import dead_code
from rtc.passes.analysis.host import InputInfo
from rtc.passes.analysis.symbols import spelled
from rtc.passes.nested_stacks import flatten

aten = torch.ops.aten

_MOST = 128  # parts of a stack: the layers of a model

_FILLS = {
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_empty.default: 0,
    aten.new_full.default: None,
}


def run(gm: fx.GraphModule, inputs: Sequence[InputInfo]) -> list[InputInfo]:
    """Normalise ``gm`` in place; the inputs, with parts of stacked caches appended."""
    _fills(gm)
    _single(gm)
    _sizes(gm)
    _whole(gm)
    _conjugates(gm)
    _stores(gm)
    out = list(inputs)
    for info in inputs:
        if not info.is_int and (info.mutated or not info.parameter):
            flat = flatten(gm, info, _MOST)
            out += _unstack(gm, info if flat is None else flat, len(out))
            if flat is not None:
                gm.graph.erase_node(flat.node)
    gm.graph.lint()
    return out


def _fills(gm: fx.GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _FILLS:
            continue
        val = node.meta["val"]
        fill = _FILLS[node.target]
        fill = node.args[2] if fill is None else fill
        if not all(isinstance(s, int) for s in val.shape) or isinstance(fill, fx.Node):
            continue
        with gm.graph.inserting_before(node):
            kw = {"dtype": val.dtype, "device": val.device}
            new = gm.graph.call_function(aten.full.default, (list(val.shape), fill), kw)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)


def _single(gm: fx.GraphModule) -> None:
    """``stack([x])`` and ``cat([x])``: loops over a batch of one end so."""
    for node in list(gm.graph.nodes):
        if node.target not in (aten.stack.default, aten.cat.default) or len(node.args[0]) != 1:
            continue
        (x,), axis = node.args[0], node.args[1] if len(node.args) > 1 else 0
        if x.meta["val"].dtype != node.meta["val"].dtype:
            continue
        with gm.graph.inserting_before(node):
            if node.target is aten.stack.default:
                val = x.meta["val"].unsqueeze(axis)
                x = gm.graph.call_function(aten.unsqueeze.default, (x, axis))
                x.meta = {**node.meta, "val": val}
            new = gm.graph.call_function(aten.clone.default, (x,))  # no view: it may be returned
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)


def _whole(gm: fx.GraphModule) -> None:
    """A slice as long as what it is cut from, wherever its ends come from."""
    for node in list(gm.graph.nodes):
        if node.target is not aten.slice.Tensor:
            continue
        x = node.args[0]
        shapes = [tuple(n.meta["val"].shape) for n in (x, node)]
        # asking symbolic sizes would guard, and trace again where the window is just full
        if all(type(n) is int for n in (*shapes[0], *shapes[1])) and shapes[0] == shapes[1]:
            node.replace_all_uses_with(x)
            gm.graph.erase_node(node)


def _sizes(gm: fx.GraphModule) -> None:
    """A size follows from numbers, whatever the tensor holds."""
    for node in list(gm.graph.nodes):
        if node.target is aten.sym_size.int and isinstance(node.meta["val"], torch.SymInt):
            made = spelled(gm.graph, node, node.meta["val"], "val")
            if made is not None:
                node.replace_all_uses_with(made)
                gm.graph.erase_node(node)


def _conjugates(gm: fx.GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.target is aten._conj.default:
            node.target = aten.conj_physical.default
            node.meta = {**node.meta, "val": aten.conj_physical.default(node.args[0].meta["val"])}


def _stores(gm: fx.GraphModule) -> None:
    """``cache[:, i] = k``: what is stored, without a look at what was there."""
    for node in list(gm.graph.nodes):
        if node.target is not aten.copy.default or len(node.args) < 2:
            continue
        there, src = node.args[:2]
        if there.target is not aten.select.int or not isinstance(src, fx.Node):
            continue
        old, new = there.meta["val"], src.meta["val"]
        same = old.dtype == new.dtype and old.shape == new.shape and old.device == new.device
        if same and all(u.target is aten.select_scatter.default for u in node.users):
            node.replace_all_uses_with(src)
            gm.graph.erase_node(node)
            if not there.users:
                gm.graph.erase_node(there)


class _GiveUp(Exception):
    pass


def _unstack(gm: fx.GraphModule, info: InputInfo, first: int) -> list[InputInfo]:
    axis = _stack_axis(gm, info) if info.mutated else _taken_apart(info)
    if axis is None:
        return []
    try:
        return _Splitter(gm, info, axis, first).run()
    except _GiveUp:
        return []


def _stack_axis(gm: fx.GraphModule, info: InputInfo) -> int | None:
    """The axis of which single parts are stored, if there is one and it is short."""
    rank = info.node.meta["val"].dim()
    users = sorted(info.node.users)  # in graph order
    stored = [u for u in users if u.target is aten.copy_.default and u.args[0] is info.node]
    seen: set[fx.Node] = set()
    stack = [n for u in stored for n in (u.args[1],) if isinstance(n, fx.Node)]
    while stack:
        node = stack.pop()
        if node in seen or node is info.node:
            continue
        seen.add(node)
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or val.shape != info.node.meta["val"].shape:
            continue
        if node.target is aten.select_scatter.default:
            axis = int(node.args[2]) % rank  # type: ignore[call-overload]
            if isinstance(node.args[3], int) and info.node.meta["val"].shape[axis] <= _MOST:
                return axis
        stack.extend(node.all_input_nodes)
    return None


def _taken_apart(info: InputInfo) -> int | None:
    """The axis along which a tensor that is only read is used in single parts, if it is short.

    A batch of latents looks no different; to take it apart costs nothing.
    """
    val = info.node.meta["val"]
    if not isinstance(val, torch.Tensor) or not val.is_floating_point() or val.dim() < 4:
        return None
    found: set[int] = set()
    for user in info.node.users:
        if user.target not in (aten.select.int, aten.unbind.int):
            return None
        axis = user.args[1] if len(user.args) > 1 else 0
        if user.target is aten.select.int and not isinstance(user.args[2], int):
            return None
        found.add(int(axis) % val.dim())  # type: ignore[call-overload]
    axis = found.pop() if len(found) == 1 else None
    return axis if axis is not None and val.shape[axis] in range(2, _MOST + 1) else None


class _Splitter:
    """Splits the cone of one stacked input into parts; all or nothing (built, then swapped in)."""

    def __init__(self, gm: fx.GraphModule, info: InputInfo, axis: int, first: int) -> None:
        self.gm, self.info, self.axis, self.first = gm, info, axis, first
        self.n = int(info.node.meta["val"].shape[axis])
        self.parts: dict[fx.Node, list[fx.Node]] = {}

    def run(self) -> list[InputInfo]:
        whole, swaps, stores = self._plan()
        graph, fakes = self.gm.graph, self.info.node.meta["val"]
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
        infos, nodes, source = [], [], self.info.source
        for i in range(self.n):
            with graph.inserting_after(last):
                node = last = graph.placeholder(f"{self.info.node.name}_part{i}")
            with fakes.fake_mode:
                node.meta = {"val": fakes.narrow(self.axis, i, 1).clone()}
            nodes.append(node)
            infos.append(
                InputInfo(
                    self.first + i, node, f"{source}[{':, ' * self.axis}{self._name(i)}]",
                    mutated=self.info.mutated, attribute=self.info.attribute,
                    parent=self.info.parent or self.info, part=(self.axis, i, self._axes),
                )
            )  # fmt: skip
        self.parts[self.info.node] = nodes
        for node in whole:
            with graph.inserting_before(node):
                self.parts[node] = [self._part(node, i) for i in range(self.n)]
        for node, i in swaps:
            src: Any = node.args[0]
            if src.target is aten.unbind.int:
                src = src.args[0]
            x = self.parts[src][i]
            with graph.inserting_before(node):
                new = self._call(node, aten.squeeze.dim, (x, self.axis))
            node.replace_all_uses_with(new)
        for store in stores:
            with graph.inserting_before(store):
                for base, part in zip(nodes, self.parts[store.args[1]], strict=True):  # type: ignore[index]
                    self._call(store, aten.copy_.default, (base, part))
            graph.erase_node(store)
        dead_code(graph)
        return infos

    @property
    def _axes(self) -> int:
        return self.info.part[2] if self.info.part is not None else 1

    def _name(self, i: int) -> str:
        if self._axes == 1:
            return str(i)
        assert self.info.parent is not None
        per = int(self.info.parent.node.meta["val"].shape[1])
        return f"{i // per}, {i % per}"

    def _plan(self) -> tuple[list[fx.Node], list[tuple[fx.Node, int]], list[fx.Node]]:
        """Whole-stack values in order, reads of one part, and the stores. Raises _GiveUp."""
        whole: list[fx.Node] = []
        swaps: list[tuple[fx.Node, int]] = []
        stores: list[fx.Node] = []
        known = {self.info.node}
        unbound: set[fx.Node] = set()
        for node in self.gm.graph.nodes:
            ins = [a for a in node.all_input_nodes if a in known or a in unbound]
            if not ins:
                continue
            t = node.target
            if t is operator.getitem and node.args[0] in unbound:
                swaps.append((node, int(node.args[1])))  # type: ignore[call-overload]
            elif t is aten.select.int and self._at(node, 1) == self.axis:
                swaps.append((node, int(node.args[2]) % self.n))  # type: ignore[call-overload]
            elif t is aten.unbind.int and self._at(node, 1) == self.axis:
                unbound.add(node)
            elif t is aten.copy_.default and node.args[0] is self.info.node:
                stores.append(node)
            elif self._splits(node):
                known.add(node)
                whole.append(node)
            else:
                raise _GiveUp
        return whole, swaps, stores

    def _at(self, node: fx.Node, pos: int) -> int:
        rank = self.info.node.meta["val"].dim()
        return (int(node.args[pos]) if len(node.args) > pos else 0) % rank  # type: ignore[call-overload]

    def _splits(self, node: fx.Node) -> bool:
        t = node.target
        if t in (aten.clone.default, aten.copy.default):
            return True
        if t is aten.select_scatter.default:
            return self._at(node, 2) == self.axis and isinstance(node.args[3], int)
        if t is aten.slice.Tensor:
            return self._at(node, 1) != self.axis
        if t is aten.slice_scatter.default:
            return self._at(node, 2) != self.axis
        if t is aten.cat.default:
            return self._at(node, 1) != self.axis
        if t is aten.roll.default:
            rank = self.info.node.meta["val"].dim()
            dims = node.args[2] if len(node.args) > 2 else []
            return bool(dims) and all(int(d) % rank != self.axis for d in dims)  # type: ignore[union-attr,call-overload]
        return False

    def _part(self, node: fx.Node, i: int) -> fx.Node:
        t = node.target
        if t is aten.select_scatter.default:
            if int(node.args[3]) % self.n != i:  # type: ignore[call-overload]
                return self._of(node.args[0], i)
            return self._call(node, aten.unsqueeze.default, (node.args[1], self.axis))
        args = fx.node.map_arg(node.args, lambda a: self._of(a, i))
        return self._call(node, t, args, dict(node.kwargs))

    def _of(self, a: Any, i: int) -> fx.Node:
        """Part ``i`` of an argument: known, or cut from a tensor of the full rank."""
        if a in self.parts:
            return self.parts[a][i]
        val = a.meta["val"]
        # what has fewer axes is broadcast, from the right
        axis = self.axis - (self.info.node.meta["val"].dim() - val.dim()) if _is_tensor(val) else -1
        if axis < 0 or val.shape[axis] == 1:
            return a
        return self._call(a, aten.slice.Tensor, (a, axis, i, i + 1))

    def _call(self, like: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        node = self.gm.graph.call_function(target, tuple(args), kwargs or {})
        vals = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.info.node.meta["val"].fake_mode, torch.no_grad():
            node.meta["val"] = target(*vals[0], **vals[1])
        if "stack_trace" in like.meta:
            node.meta["stack_trace"] = like.meta["stack_trace"]
        return node


def _is_tensor(val: Any) -> bool:
    return isinstance(val, torch.Tensor)
