"""Carry out a cache plan on the graph.

Before:
    c1 = <movement of the placeholder c and fresh rows>      # [.., S, ..]
    k  = f(c1)                                               # whole-cache work
    o  = attention(q, k, v)
    copy_(c, c1)
After (ring order):
    r  = f(rows)                                             # the fresh rows only
    w  = index_put(view, [.., idx], r)                       # view, idx: new inputs
    o  = attention(q, w, v)
    c1 = index_put(c, [.., idx], rows);  copy_(c, c1);  copy_(view, w)
In the program's own order ("logical"): ``w = index_select(cat(view, r), src)`` instead.

New inputs come last, in the order of ``Rewritten.extras``; the runtime supplies them for each call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from rtc.passes import entries, lifting
from rtc.passes.analysis import shapes
from rtc.passes.analysis.effects import dead_code
from rtc.passes.analysis.fn import (
    Fn,
    Operand,
    emit,
    invert_layout,
    substituting,
    with_slots,
)
from rtc.passes.analysis.host import Deps
from rtc.passes.analysis.slots import RowEntry, RowSource, SlotVal, shape_of
from rtc.passes.nodes import Emitter, fake_mode
from rtc.passes.plan import Cache, CachePlan, Cohort, View
from rtc.passes.rotation import rotated

aten = torch.ops.aten


@dataclass(frozen=True)
class Extra:
    """One new graph input.

    kind: "index" (positions of fresh rows, or the gather of a logical event), "select" (which rows
    of a source are kept), "table" (table rows for fresh rows), "view" (a storage), "bias" (an
    operand permuted along with the slots), "fold", "unfold" and "perm" (cosine, sine and pairing by
    which queries and fresh rows of a view class are turned), "host" (another value that the host
    works out: ``operand`` counts ``Rewritten.lifted``).
    """

    kind: str
    cohort: int
    event: int = -1
    source: int = -1
    view: int = -1  # view index, or the first view of a class
    operand: int = -1
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64


@dataclass
class Rewritten:
    """The new graph; ``nodes`` are its placeholders for ``extras``, in order."""

    extras: list[Extra] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    gm: fx.GraphModule | None = None
    # placeholders for calibrated maxima in the analysed graph, where constants are evaluated
    scales: dict[fx.Node, Extra] = field(default_factory=dict)
    lifted: list[fx.Node] = field(default_factory=list)  # host values that are inputs now
    # outputs that are ints, by their number: the host works them out, the graph returns None
    ints: dict[int, fx.Node] = field(default_factory=dict)


class Rewriter:
    """Rewrites one graph for all cohorts that a pass has put into an order."""

    def __init__(self, gm: fx.GraphModule, plan: CachePlan) -> None:
        self.gm, self.graph, self.plan = gm, gm.graph, plan
        self.out = Rewritten()
        self._last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        self._output = next(n for n in self.graph.nodes if n.op == "output")
        self._extra: dict[Any, fx.Node] = {}
        self._scale_inputs: dict[fx.Node, fx.Node] = {}
        # counter -> what is to be added to it, with the name of the view that it belongs to
        self._counts: dict[fx.Node, list[tuple[fx.Node, str]]] = {}

    def run(self, *, lift: bool = False) -> Rewritten:
        """``lift``: hand in small values that follow from Python ints, so that the device's own
        graph is the same in every call."""
        for i, cohort in enumerate(self.plan.cohorts):
            if cohort.order != "plain":
                self._scales(i, cohort)
                for c in range(len(cohort.caches)):
                    self._cache(i, cohort, c)
                self._biases(i, cohort)
        with self.graph.inserting_before(self._output):
            for counter, counts in self._counts.items():
                total = counter
                for n, name in counts:
                    total = self.call(aten.add.Tensor, (total, n), {})
                    total.meta["counts"] = name
                self.call(aten.copy_.default, (counter, total), {})
        if lift:
            self._lift()
        # The analysed graph keeps its nodes: the runtime evaluates host values from it. What the
        # device runs is a copy without the dead ones.
        self.out.gm = copied(self.gm)
        dead_code(self.out.gm.graph)
        self.out.gm.graph.lint()
        self.out.gm.recompile()
        inputs = [n for n in self.out.gm.graph.nodes if n.op == "placeholder"]
        self.out.nodes = inputs[len(inputs) - len(self.out.extras) :]
        return self.out

    def _lift(self) -> None:
        """Where device work meets a value made from Python ints, the host's value comes in."""
        host = self.plan.host
        if not self.out.extras:
            return  # nothing was rewritten: the graph stays as it is
        outputs = list(self._output.args[0])  # type: ignore[arg-type]
        for i, out in enumerate(outputs):
            # what the rewriter made (a read of a cache) has no entry there, and is no number
            known = isinstance(out, fx.Node) and Deps.DATA not in host.deps.get(out, Deps.DATA)
            if known and isinstance(out.meta["val"], (int, torch.SymInt)):
                self.out.ints[i], outputs[i] = out, None
        self._output.args = (tuple(outputs),)
        made: dict[Any, fx.Node] = {}
        for node, user, shape, dtype in lifting.meetings(self.graph, host):
            val = node.meta["val"]
            device = val.device if isinstance(val, torch.Tensor) else user.meta["val"].device
            key = (host.key(node), dtype, device)
            if key not in made:
                e = Extra("host", 0, operand=len(self.out.lifted), shape=shape, dtype=dtype)
                made[key] = self.extra(e, device)
                self.out.lifted.append(node)
            user.replace_input_with(node, made[key])

    # -- inputs --------------------------------------------------------------------------------

    def extra(self, e: Extra, device: torch.device) -> fx.Node:
        """The placeholder for ``e``, made once."""
        if e not in self._extra:
            with self.graph.inserting_after(self._last):
                name = "_".join(
                    [
                        "rtc",
                        e.kind,
                        *(
                            str(x)
                            for x in (e.cohort, e.event, e.source, e.view, e.operand)
                            if x >= 0
                        ),
                    ]
                )
                node = self.graph.placeholder(name)
            with fake_mode(self.graph):
                node.meta["val"] = torch.empty(e.shape, dtype=e.dtype, device=device)
            self._extra[e] = self._last = node
            self.out.extras.append(e)
        return self._extra[e]

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Record an op with its fake value, so that later ops and passes see shapes."""
        return Emitter(self.graph)(target, *args, **kwargs)

    def _scales(self, i: int, cohort: Cohort) -> None:
        """Calibrated maxima become inputs."""
        for num, node in enumerate(cohort.scales()):
            val = node.meta["val"]
            e = Extra("scale", i, operand=num, shape=tuple(val.shape), dtype=val.dtype)
            new = self.extra(e, val.device)
            self._scale_inputs[node] = new
            self.out.scales[new] = e
            node.replace_all_uses_with(new)
        first = len(cohort.scales())
        for num, (user, query) in enumerate(cohort.queries, first):
            val = query.meta["val"]
            shape = (*val.shape[:2], 1, 1)
            e = Extra("scale", i, operand=num, shape=shape, dtype=torch.float32)
            user.meta["query_amax"] = self.extra(e, val.device).name
        if cohort.scales() or cohort.queries:  # for kernels that count in passing
            self.extra(Extra("saturated", i, shape=(1,)), _device(cohort))

    def _count(self, i: int, cohort: Cohort, view: View, f: Fn, rows: fx.Node) -> None:
        """Count fresh values beyond a calibrated maximum, on the device."""
        for node, (cache, fn) in cohort.scales().items():
            if cache != view.cache or fn.key != f.key:
                continue
            dev = rows.meta["val"].device
            counter = self.extra(Extra("saturated", i, shape=(1,)), dev)
            reduced = _reduced(node)
            shape = [1 if d in reduced else s for d, s in enumerate(rows.meta["val"].shape)]
            top = self._as(self._scale_inputs[node], tuple(shape))
            over = self.call(aten.gt.Tensor, (self.call(aten.abs.default, (rows,), {}), top), {})
            n = self.call(aten.sum.default, (over,), {})
            lead = Extra(
                "view", i, view=cohort.views.index(view),
                shape=view.storage_shape(cohort.capacity), dtype=view.storage_dtype,
            )  # fmt: skip
            self._counts.setdefault(counter, []).append((n, self._extra[lead].name))

    # -- one cache -----------------------------------------------------------------------------

    def _cache(self, i: int, cohort: Cohort, c: int) -> None:
        cache = cohort.caches[c]
        device = cache.info.node.meta["val"].device
        index = self.plan.host.index
        output = self._output
        views = [(j, v) for j, v in enumerate(cohort.views) if v.cache == c]
        epilogue = [
            n
            for n in cache.info.node.users
            if n.target is aten.copy_.default and n.args[0] is cache.info.node
        ]
        end = epilogue[0] if epilogue else output
        # storages: the cache itself (None) and each view with work of its own
        store: dict[int | None, fx.Node] = {}
        if cohort.unified:
            with self.graph.inserting_before(_first(self.graph, index, cache, views, end)):
                store[None] = self._merged(cache)
        for j, v in views:
            if not (cohort.unified and v.raw):
                shape = v.storage_shape(cohort.capacity)
                store[j] = self.extra(
                    Extra("view", i, view=j, shape=shape, dtype=v.storage_dtype), device
                )
        start = dict(store)
        written: dict[int | None, set[int]] = {s: set() for s in store}
        for e, event in enumerate(cohort.events):
            uses = [
                (j, v, use) for j, v in views for use in v.uses if use[2].expr.key == event.expr.key
            ]
            uses.sort(key=lambda u: index[u[2][1]])
            reading = {j for j, _, _ in uses}
            at = min((u[1] for _, _, u in uses), key=lambda n: index[n], default=end)
            for s in store:
                if s is not None and s not in reading:
                    continue  # its rows are made when it is read: its tables are known then
                view = None if s is None else cohort.views[s]
                new = [(k, m) for k, m in event.present if k not in written[s]]
                written[s] |= {k for k, _ in new}
                first = next((u[1] for j, _, u in uses if j == s), at)
                with self.graph.inserting_before(at if s is None else first):
                    store[s] = self._write(i, cohort, cache, e, new, view, store[s], device)
            made: dict[fx.Node, fx.Node] = {}
            for j, v, (node, user, val) in uses:
                if node not in made:
                    held = store[None if cohort.unified and v.raw else j]
                    with self.graph.inserting_before(user):
                        made[node] = self._read(node, v, val, held, cohort.capacity)
            for _, v, (node, user, _) in uses:
                user.replace_input_with(node, made[node])
                if v.klass in cohort.rotations:
                    self._fold_query(i, v, made[node], user)
        with self.graph.inserting_before(end):
            if epilogue:
                if not cohort.unified:
                    held = self._commit(i, cohort, cache, device)
                else:
                    held = store[None]
                shape = shape_of(cache.info.node)
                new = held if held is start.get(None) else self._as(held, shape)
                if held is start.get(None):
                    self.graph.erase_node(epilogue[0])
                else:
                    epilogue[0].args = (cache.info.node, new)
        with self.graph.inserting_before(output):
            for s, node in store.items():
                if s is not None and node is not start[s]:
                    self.call(aten.copy_.default, (start[s], node), {})

    def _merged(self, cache: Cache) -> fx.Node:
        shape = shape_of(cache.info.node)
        d = cache.dims
        if len(d) == 1:
            return cache.info.node
        merged = (*shape[: d[0]], cache.slots, *shape[d[-1] + 1 :])
        return self._as(cache.info.node, merged)

    def _as(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        if tuple(node.meta["val"].shape) == tuple(shape):
            return node
        return self.call(aten.reshape.default, (node, list(shape)), {})

    def _read(self, node: fx.Node, v: View, val: SlotVal, held: fx.Node, n: int) -> fx.Node:
        """``node``'s value out of the storage: the layout ops that were not stored."""
        rows = self._bits(self._as(held, with_slots(v.fn.shape, v.fn.dims, n)), v.fn.dtype)
        # what was not stored: layout, and scales of FP8 values
        out = emit(val.fn, n, self.call, substituting(v.fn, rows), self._const)
        return self._as(out, shape_of(node))

    def _bits(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """FP8 as bytes, bytes as FP8; all else is of the dtype already."""
        if torch.uint8 not in (dtype, have := node.meta["val"].dtype) or have == dtype:
            return node
        return self.call(aten.view.dtype, (node, dtype), {})

    def _const(self, o: Operand) -> fx.Node:
        return self._scale_inputs.get(o.node, o.node)

    def _write(
        self, i: int, cohort: Cohort, cache: Cache, e: int, new: list[tuple[int, int]],
        view: View | None, held: fx.Node, device: torch.device,
    ) -> fx.Node:  # fmt: skip
        axis = cache.dims[0] if view is None else view.axis
        dtype = held.meta["val"].dtype
        parts = [
            (k, m, self._bits(self._rows(i, cohort, cache, e, k, m, view, device), dtype))
            for k, m in new
        ]
        return self._place(i, cohort, e, axis, held, parts, device)

    def _place(
        self, i: int, cohort: Cohort, e: int, axis: int, held: fx.Node,
        parts: list[tuple[int, int, fx.Node]], device: torch.device,
    ) -> fx.Node:  # fmt: skip
        if cohort.order == "ring":
            for k, m, rows in parts:
                idx = self.extra(Extra("index", i, e, k, shape=(m,)), device)
                where: list[Any] = [None] * axis + [idx]
                held = self.call(aten.index_put.default, (held, where, rows), {})
            return held
        n = held.meta["val"].shape[axis]
        src = self.extra(Extra("index", i, e, shape=(n,)), device)
        if parts:
            held = self.call(aten.cat.default, ([held, *(r for _, _, r in parts)], axis), {})
        return self.call(aten.index_select.default, (held, axis, src), {})

    def _rows(
        self, i: int, cohort: Cohort, cache: Cache, e: int, k: int, m: int, view: View | None,
        device: torch.device,
    ) -> fx.Node:  # fmt: skip
        """The ``m`` kept fresh rows of source ``k``, through the view's work, storage-shaped."""
        source = cache.sources[k]
        fn = view.fn if view is not None else None
        raw, entry = entries.raw_entry(source), entries.entry(source, fn)
        assert entry is not None, "legality was checked by the passes"
        value = self._entry(entry, source)
        if m < source.count:
            sel = self.extra(Extra("select", i, e, k, shape=(m,)), device)
            flat = self._as(value, _merge(entry.shape, entry.dims))
            flat = self.call(aten.index_select.default, (flat, entry.dims[0], sel), {})
            value = flat
        value = self._as(value, with_slots(entry.shape, entry.dims, m))
        leaf = entry.fn
        if raw is not None:
            value = invert_layout(entry.fn, m, self.call, value)
            leaf = cache.analysis.vals[cache.info.node].fn
        elif fn is not None and not fn.contains(entry.fn):
            value = invert_layout(entry.fn, m, self.call, value, fn)
            return self._as(value, view.storage_shape(m))  # type: ignore[union-attr]
        if view is None:
            assert raw is not None
            shape = shape_of(cache.info.node)
            return self._as(value, _merge(with_slots(shape, cache.dims, m), cache.dims))

        def operand(o: Operand) -> fx.Node:
            if o.role == "const" or not isinstance(o.node.meta["val"], torch.Tensor):
                return self._const(o)
            j = first_of_class(cohort, view)
            num = [t.key for t in view.tables()].index(o.key)
            return self.extra(
                Extra("table", i, e, k, j, num, shape=o.rows_shape(m), dtype=o.dtype), device
            )

        measured = {fn.key for c, fn in cohort.scales().values() if c == view.cache}
        if leaf.key in measured:
            self._count(i, cohort, view, leaf, value)
        given = substituting(leaf, value)
        rot = cohort.rotations.get(view.klass)
        at = rotated(view.fn) if rot is not None and rot.inverse is None else None
        counted: set[Any] = set()

        def framed(f: Fn) -> Any:
            if f.key in measured and f.key not in counted and f.key != leaf.key:
                counted.add(f.key)
                x = emit(f, m, self.call, framed, operand)
                self._count(i, cohort, view, f, x)
                return x
            if at is None or f.key != at.key:
                return given(f)  # the turn is in the table rows where it can be
            x = emit(f, m, self.call, given, operand)
            return self._rotate(x, "unfold", i, view)

        out = emit(view.fn, m, self.call, framed, operand)
        return self._as(out, view.storage_shape(m))

    def _entry(self, entry: RowEntry, source: RowSource) -> fx.Node:
        """The fresh rows in the shape and dtype in which they enter."""
        if entry.fill is not None:
            dev = entry.node.meta["val"].device
            kw = {"dtype": entry.dtype, "device": dev}
            return self.call(aten.full.default, (list(entry.shape), entry.fill), kw)
        node = entry.node
        if node.meta["val"].dtype != entry.dtype:
            node = self.call(aten._to_copy.default, (node,), {"dtype": entry.dtype})
        if node.meta["val"].numel() == torch.Size(entry.shape).numel():
            return self._as(node, entry.shape)
        return self.call(aten.expand.default, (node, list(entry.shape)), {})

    def _commit(self, i: int, cohort: Cohort, cache: Cache, device: torch.device) -> fx.Node:
        """Split cohorts: the cache's own write, in its own placement (event -1)."""
        held = self._merged(cache)
        assert cohort.stored is not None
        parts = [
            (k, m, self._rows(i, cohort, cache, -1, k, m, None, device))
            for k, m in cohort.stored.present
        ]
        return self._place(i, cohort, -1, cache.dims[0], held, parts, device)

    # -- frames and biases ---------------------------------------------------------------------

    def _rotate(self, x: fx.Node, kind: str, i: int, view: View) -> fx.Node:
        """x * c + x[perm] * s along the last axis: one rotation for all rows."""
        cohort = self.plan.cohorts[i]
        lead, val = first_of_class(cohort, view), x.meta["val"]
        d, last, dev = len(cohort.rotations[view.klass].perm), val.dim() - 1, val.device
        # half precision would turn by the wrong angle
        dtype = val.dtype if val.dtype in (torch.float32, torch.float64) else torch.float32
        y = x if dtype == val.dtype else self.call(aten._to_copy.default, (x,), {"dtype": dtype})
        c, s = (
            self.extra(Extra(kind, i, view=lead, operand=q, shape=(d,), dtype=dtype), dev)
            for q in (0, 1)
        )
        idx = self.extra(Extra("perm", i, view=lead, shape=(d,)), dev)
        swapped = self.call(aten.index_select.default, (y, last, idx), {})
        a = self.call(aten.mul.Tensor, (y, c), {})
        b = self.call(aten.mul.Tensor, (swapped, s), {})
        out = self.call(aten.add.Tensor, (a, b), {})
        if dtype != val.dtype:
            out = self.call(aten._to_copy.default, (out,), {"dtype": val.dtype})
        return out

    def _fold_query(self, i: int, v: View, key: fx.Node, user: fx.Node) -> None:
        """Turn the query that meets ``key`` in ``user`` into the frame of the view's class."""
        pos, axis = query_operand(user, key)
        q = user.args[pos]
        assert isinstance(q, fx.Node)
        with self.graph.inserting_before(user):
            last = q.meta["val"].dim() - 1
            x = q if axis == last else self.call(aten.transpose.int, (q, axis, last), {})
            x = self._rotate(x, "fold", i, v)
            x = x if axis == last else self.call(aten.transpose.int, (x, axis, last), {})
        user.update_arg(pos, x)

    def _biases(self, i: int, cohort: Cohort) -> None:
        if cohort.order != "ring":
            return
        for num, b in enumerate(cohort.biases):
            val = b.operand.meta["val"]
            event = [e.expr.key for e in cohort.events].index(b.token[1])
            node = self.extra(
                Extra("bias", i, event, operand=num, shape=shape_of(b.operand), dtype=val.dtype),
                val.device,
            )
            b.user.replace_input_with(b.operand, node)


def _reduced(node: fx.Node) -> list[int]:
    """Axes of a maximum; all where it names none."""
    arg = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    return list(shapes.normal_dims(arg, rank))


def _device(cohort: Cohort) -> torch.device:
    return cohort.caches[0].info.node.meta["val"].device


def query_operand(user: fx.Node, key: fx.Node) -> tuple[int, int]:
    """(argument number, contracted axis) of the query that meets ``key`` in ``user``."""
    if user.target is torch.ops.rtc.attention.default:
        q = user.args[0]
        return 0, len(q.meta["val"].shape) - 1  # type: ignore[union-attr]
    rank = len(user.meta["val"].shape)
    if user.args[0] is key:
        return 1, rank - 2
    return 0, rank - 1


def first_of_class(cohort: Cohort, view: View) -> int:
    """Views of one class share table rows: the first stands for all."""
    return next(j for j, v in enumerate(cohort.views) if v.klass == view.klass)


def _merge(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    n = 1
    for d in dims:
        n *= shape[d]
    return (*shape[: dims[0]], n, *shape[dims[-1] + 1 :])


def _first(
    graph: fx.Graph, index: dict[fx.Node, int], cache: Cache, views: list[Any], end: fx.Node
) -> fx.Node:
    users = [u[1] for _, v in views for u in v.uses]
    return min(users, key=lambda n: index[n], default=end)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module with its own graph over the same attributes. Its Python code is made when it
    is asked for, so ``recompile`` costs nothing: few copies are ever run as they are."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return _LazyGraphModule(gm, graph)
