"""Makes places of views again from raw slots."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from rtc.passes.analysis.fn import Fn, Operand, emit, raw_fn, structural_key, with_slots
from rtc.passes.analysis.tables import shaped_rows
from rtc.passes.nodes import Emitter
from rtc.passes.plan import View
from rtc.passes.rotation import Rotation, rotated
from rtc.runtime.prepare import Refresh
from rtc.runtime.state import CohortState

aten = torch.ops.aten

Views = Sequence[tuple[int, View]]  # with their numbers in the cohort


def _run(target: Any, args: Any, kwargs: Any) -> Any:
    return target(*args, **kwargs)


def sent(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host value on its way to ``device``; from pinned memory, since the copy would wait."""
    if device.type != "cuda":
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)


def _span(at: np.ndarray) -> tuple[int, int] | None:
    """(first, length) of places that lie side by side, as a sink's do: no index is needed."""
    if len(at) and at[-1] - at[0] == len(at) - 1 and (np.diff(at) == 1).all():
        return int(at[0]), len(at)
    return None


def _sent_rows(op: Operand, rows: torch.Tensor, device: torch.device) -> Any:
    out = shaped_rows(op, rows, torch.device("cpu"))
    return sent(out, device) if isinstance(out, torch.Tensor) else out


def turned(run: Any, x: Any, perm: Any, c: Any, s: Any) -> Any:
    """x * c + x[perm] * s along the last axis, in float32 at least; ``run`` does or records ops."""
    dtype = _wide(x)
    narrow = _dtype(x)
    y = x if dtype == narrow else run(aten._to_copy.default, (x,), {"dtype": dtype})
    swapped = run(aten.index_select.default, (y, -1, perm), {})
    y = run(aten.mul.Tensor, (y, c), {})
    y = run(aten.add.Tensor, (y, run(aten.mul.Tensor, (swapped, s), {})), {})
    return y if dtype == narrow else run(aten._to_copy.default, (y,), {"dtype": narrow})


def _dtype(x: Any) -> torch.dtype:
    return (x.meta["val"] if isinstance(x, fx.Node) else x).dtype


def _wide(x: Any) -> torch.dtype:
    return _dtype(x) if _dtype(x) in (torch.float32, torch.float64) else torch.float32


@dataclass
class _Work:
    """The work of some views with the very same function on ``n`` slots, side by side."""

    view: View
    dims: tuple[int, ...]
    shape: tuple[int, ...]  # of a cache
    n: int
    rot: Rotation | None  # set where the rotated part is turned into the class's frame

    def __call__(self, run: Any, raw: Any, operands: Sequence[Any], turn: Sequence[Any]) -> Any:
        """``raw``: the slots' raw rows; ``operands``: of the view's function, in their order;
        ``turn``: perm, cosines and sines."""
        fn = self.view.fn
        values = {o.key: x for o, x in zip(fn.operands(), operands, strict=True)}
        key = raw_fn(self.shape, self.dims, _dtype(raw)).key
        pivot = rotated(fn) if self.rot is not None else None

        def leaf(f: Fn) -> Any:
            return raw if f.key == key else None

        def operand(o: Operand) -> Any:
            return values[o.key]

        def framed(f: Fn) -> Any:
            """The rotated subtree, turned back into the class's frame."""
            if pivot is None or f.key != pivot.key:
                return leaf(f)
            return turned(run, emit(f, self.n, run, leaf, operand), *turn)

        out = emit(fn, self.n, run, framed, operand)
        out = run(aten.reshape.default, (out, list(self.view.storage_shape(self.n))), {})
        if self.view.storage_dtype != fn.dtype:
            out = run(aten.view.dtype, (out, self.view.storage_dtype), {})
        return out


class Refresher:
    """Makes places of views again: op by op, or with code compiled ahead for coming calls.

    ``lower(gm, fakes)`` compiles; None: always op by op.
    """

    def __init__(self, lower: Callable[[fx.GraphModule, list[Any]], Any] | None) -> None:
        self.lower = lower
        self._code: dict[Any, Callable[[list[Any]], Any]] = {}
        self._keys: dict[int, str] = {}  # of views' functions, by id: the plan keeps them
        # the table rows of one refresh, sent once for all views
        self._sent: tuple[Any, dict[Any, Any]] = (None, {})

    def expect(self, st: CohortState, parts: Sequence[Views], r: Refresh, rot: Any) -> None:
        """Compile what ``run`` will need for a refresh like this one."""
        for views in parts if self.lower is not None else ():
            work, given = self._work(st, views, r, rot)
            key = self._key(work, given)
            if not all(isinstance(x, torch.Tensor) for x in given):
                continue  # a number would be compiled in
            if key not in self._code:
                self._code[key] = self._compiled(work, given, st.caches()[0].device)

    def run(
        self, st: CohortState, views: Views, r: Refresh, src: np.ndarray, const: Any, rot: Any
    ) -> None:
        """Compute places ``r.at`` of views with the very same work again, from raw slots ``src``.

        The work is slot-local, so the slots of all views go through it side by side, in one pass.
        """
        work, given = self._work(st, views, r, rot, const)
        first = work.view
        dev = st.caches()[first.cache].device
        given[0] = _picked(st, views, src, dev).reshape(with_slots(work.shape, work.dims, work.n))
        code = self._code.get(self._key(work, given))
        if code is not None:
            out = code(given)[0]
        else:
            k = len(first.fn.operands()) + 1
            out = work(_run, given[0], given[1:k], given[k:])
        store = _span(r.at)
        at = sent(torch.from_numpy(r.at), dev) if store is None else None
        for (j, v), part in zip(views, out.split(len(src), first.axis), strict=True):
            if store is None:
                st.storages[j].index_copy_(v.axis, at, part)
            else:
                st.storages[j].narrow(v.axis, *store).copy_(part)

    def _work(
        self, st: CohortState, views: Views, r: Refresh, rot: Any, const: Any = None
    ) -> tuple[_Work, list[Any]]:
        """The work, and its inputs: raw rows (not yet there), operands, turn."""
        view, count = views[0][1], len(views)
        cache = st.caches()[view.cache]
        dims, n = st.dims[view.cache], len(r.cids) * count
        turns = rot is not None and r.frame is not None and (r.frame != 1).any()
        work = _Work(view, dims, tuple(cache.shape), n, rot if turns else None)
        dev = cache.device
        tables = {t.operand.key: x for t, x in zip(r.readers, r.rows, strict=True)}
        if self._sent[0] is not r:
            self._sent = r, {}
        known = self._sent[1]

        def send(key: Any, make: Callable[[], Any]) -> Any:
            if key not in known:
                known[key] = make()
            return known[key]

        shape = with_slots(cache.shape, dims, n)
        given: list[Any] = [torch.empty(shape, dtype=cache.dtype, device="meta")]
        for o in view.fn.operands():
            if o.role == "table":
                rows = functools.partial(_sent_rows, o, tables[o.key].repeat(count, 1), dev)
                given.append(send((o.key, count), rows))
            elif const is not None:
                given.append(const(o.node))
            else:
                given.append(o.node.meta["val"])
        if turns:
            by, dtype = r.frame.conj(), cache.dtype if cache.dtype == torch.float64 else None
            wide = dtype or torch.float32
            turn = rot.perm, by.real.copy(), by.imag.copy()
            for i, part in enumerate(turn):
                x = torch.from_numpy(part) if i == 0 else torch.from_numpy(part).to(wide)
                given.append(send(("turn", i), functools.partial(sent, x, dev)))
        return work, given

    def _key(self, work: _Work, given: Sequence[Any]) -> Any:
        """What code depends on: the work, with constants of any value, and all layouts."""
        fn = work.view.fn
        if id(fn) not in self._keys:
            self._keys[id(fn)] = structural_key(fn, consts=False)
        facts = [
            (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else type(x)
            for x in given[1:]
        ]
        turns = work.rot is not None
        dims, axis = work.dims, work.view.axis
        return (self._keys[id(fn)], work.shape, dims, axis, work.n, turns, tuple(facts))

    def _compiled(
        self, work: _Work, given: list[Any], dev: torch.device
    ) -> Callable[[list[Any]], Any]:
        assert self.lower is not None
        graph, places = fx.Graph(), []
        with FakeTensorMode():
            for i, x in enumerate(given):
                node = graph.placeholder(f"a{i}")
                if isinstance(x, torch.Tensor):
                    node.meta["val"] = torch.empty_strided(
                        x.shape, x.stride(), dtype=x.dtype,
                        device=dev if x.device.type == "meta" else x.device,
                    )  # fmt: skip
                else:
                    node.meta["val"] = x
                places.append(node)

            def call(target: Any, args: Any, kwargs: Any) -> fx.Node:
                return Emitter(graph)(target, *args, **kwargs)

            k = len(work.view.fn.operands()) + 1
            out = work(call, places[0], places[1:k], places[k:])
        graph.output((out,))
        gm = fx.GraphModule(torch.nn.Module(), graph)
        return self.lower(gm, [p.meta["val"] for p in places])


def _picked(st: CohortState, views: Views, src: np.ndarray, dev: torch.device) -> torch.Tensor:
    """Raw slots at ``src`` of the views' caches, side by side."""
    caches, take = st.caches(), _span(src)
    dims = st.dims[views[0][1].cache]
    idx = sent(torch.from_numpy(src), dev) if take is None else None
    picked = []
    for _, v in views:
        flat = st.merged(caches[v.cache], dims)
        picked.append(
            flat.index_select(dims[0], idx) if take is None else flat.narrow(dims[0], *take)
        )
    # never a view of the cache: whoever keeps one alive makes the cache look shared
    return torch.cat(picked, dims[0]) if len(views) > 1 else picked[0].clone()
