"""Makes places of views again from raw slots."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from rtc.graphs.step import CaptureError, Staging, captured
from rtc.passes.analysis.fn import Fn, Operand, emit, raw_fn, structural_key, with_slots
from rtc.passes.analysis.tables import shaped_rows
from rtc.passes.nodes import Emitter
from rtc.passes.plan import View
from rtc.passes.rotation import Rotation, rotated
from rtc.runtime.prepare import Refresh
from rtc.runtime.state import CohortState

aten = torch.ops.aten

Views = Sequence[tuple[int, View]]  # with their numbers in the cohort

_GRAPHS = 8  # kinds of refreshes that are captured for a state: position resets have few


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
    """The work of some views with the very same function on ``slots`` slots each, side by side."""

    view: View
    dims: tuple[int, ...]
    shape: tuple[int, ...]  # of a cache
    slots: int
    count: int  # views side by side
    rot: Rotation | None  # set where the rotated part is turned into the class's frame

    @property
    def n(self) -> int:
        return self.slots * self.count

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


@dataclass(frozen=True)
class Feed:
    """A host value that device work reads: of which refresh of a call, and what of it."""

    refresh: int
    what: Any  # an operand's key, "src", "at", or ("turn", i)

    def value(self, parts: Sequence[Part]) -> torch.Tensor:
        r = parts[self.refresh].refresh
        if self.what == "src":
            return torch.from_numpy(parts[self.refresh].src)
        if self.what == "at":
            return torch.from_numpy(r.at)
        if isinstance(self.what, tuple) and self.what[0] == "turn":
            rot, by = parts[self.refresh].rot, r.frame.conj()  # type: ignore[union-attr]
            turn = rot.perm, by.real.copy(), by.imag.copy()
            x = torch.from_numpy(turn[self.what[1]])
            return x if self.what[1] == 0 else x.to(self.what[2])
        rows = {t.operand.key: (t.operand, x) for t, x in zip(r.readers, r.rows, strict=True)}
        operand, x = rows[self.what]
        out: torch.Tensor = shaped_rows(operand, x, torch.device("cpu"))
        return out


@dataclass(frozen=True)
class _Fed:
    """A feed as an input of the work: rows of one view, ``times`` over along their slot axis."""

    feed: Feed
    axis: int = 0
    times: int = 1

    def of(self, value: torch.Tensor) -> torch.Tensor:
        if self.times == 1:
            return value
        reps = [1] * value.dim()
        reps[self.axis] = self.times
        return value.repeat(reps)


@dataclass
class Part:
    """One refresh of a call: ``src`` says where its raw slots lie, ``groups`` which views go
    through the work side by side."""

    refresh: Refresh
    src: np.ndarray
    rot: Rotation | None
    groups: Sequence[Views]

    @property
    def turns(self) -> bool:
        frame = self.refresh.frame
        return self.rot is not None and frame is not None and bool((frame != 1).any())

    @property
    def key(self) -> Any:
        """What the device work depends on, beside the state it runs on."""
        r = self.refresh
        at, src = _span(r.at), _span(self.src)
        shapes = tuple((tuple(x.shape), x.dtype) for x in r.rows)
        return (r.klass, len(r.cids), at, src, shapes, self.turns)


@dataclass
class _Replay:
    """All refreshes of a call as one graph, on static inputs."""

    graph: Any
    feeds: list[Feed]
    staging: Staging
    addresses: list[int]


class Refresher:
    """Makes places of views again: op by op, with code compiled ahead, or as one captured graph.

    ``lower(gm, fakes)`` compiles; None: always op by op. ``capture``: capture the refreshes that
    are expected, so that such a call costs one launch more.
    """

    def __init__(
        self, lower: Callable[[fx.GraphModule, list[Any]], Any] | None, capture: bool = False
    ) -> None:
        self.lower, self.capture = lower, capture
        self._code: dict[Any, Callable[[list[Any]], Any]] = {}
        self._again = 0  # graphs that were captured anew
        self._keys: dict[int, str] = {}  # of views' functions, by id: the plan keeps them
        self._graphs: weakref.WeakKeyDictionary[CohortState, dict[Any, _Replay]] = (
            weakref.WeakKeyDictionary()
        )

    def expect(
        self, st: CohortState, parts: Sequence[Part], const: Any, fixed: Sequence[torch.Tensor]
    ) -> None:
        """Get ready for a call with refreshes like these: compile the work, and capture it.

        ``fixed``: tensors beside the state's own that ``const`` reads.
        """
        if self.lower is None:
            return
        caches = st.caches()
        for part in parts:
            for views in part.groups:
                work, given = self._work(st, views, 0, part, const, caches)
                if not all(isinstance(x, (torch.Tensor, _Fed)) for x in given):
                    return  # a number would be compiled in
                given = [
                    x.of(x.feed.value([part])).to("meta") if isinstance(x, _Fed) else x
                    for x in given
                ]
                key = self._key(work, given)
                if key not in self._code:
                    self._code[key] = self._compiled(work, given, caches[0].device)
                    if self.capture and caches[0].is_cuda:  # loads its kernels before the capture
                        self._code[key]([_dummy(x, caches[0].device) for x in given])
        # a graph would keep the value of a number that lies on the CPU
        if self.capture and all(t.device == caches[0].device for t in fixed):
            graphs = self._graphs.setdefault(st, {})
            key = tuple(p.key for p in parts)
            if key not in graphs and len(graphs) < _GRAPHS:
                graphs[key] = self._captured(st, parts, const, fixed)

    def _captured(
        self, st: CohortState, parts: Sequence[Part], const: Any, fixed: Sequence[torch.Tensor]
    ) -> _Replay:
        feeds: list[Feed] = []

        def listed(feed: Feed) -> torch.Tensor:
            if feed not in feeds:
                feeds.append(feed)
            return feed.value(parts)

        caches = st.caches()
        self._each_feed(st, parts, const, listed, caches)
        values = [f.value(parts) for f in feeds]
        with torch.inference_mode(False):  # kept for calls in any mode
            staging = Staging([(tuple(v.shape), v.dtype) for v in values], caches[0].device)

        ref = weakref.ref(st)  # the graph goes with the state

        def run() -> None:
            live = ref()
            assert live is not None
            on_device = dict(zip(feeds, staging.device, strict=True))
            self._run(live, parts, const, on_device.__getitem__, live.caches())

        graph = captured(run, caches[0].is_cuda)
        return _Replay(graph, feeds, staging, _addresses(st, fixed))

    def _each_feed(
        self, st: CohortState, parts: Sequence[Part], const: Any,
        see: Callable[[Feed], torch.Tensor], caches: list[torch.Tensor],
    ) -> None:  # fmt: skip
        for i, part in enumerate(parts):
            for views in part.groups:
                for x in self._work(st, views, i, part, const, caches)[1]:
                    if isinstance(x, _Fed):
                        see(x.feed)
            for what, at in (("src", part.src), ("at", part.refresh.at)):
                if _span(at) is None:
                    see(Feed(i, what))

    def run(
        self, st: CohortState, parts: Sequence[Part], const: Any, fixed: Sequence[torch.Tensor]
    ) -> None:
        """Compute places of views again, from raw slots that lie at ``part.src``."""
        replay = self._replay(st, parts, const, fixed)
        if replay is not None:
            replay.staging.put([f.value(parts) for f in replay.feeds])
            replay.graph.replay()
            st.counters.refresh_replays += 1
            return
        caches = st.caches()
        known: dict[Feed, torch.Tensor] = {}

        def send(feed: Feed) -> torch.Tensor:
            if feed not in known:  # rows are sent once for all views
                known[feed] = sent(feed.value(parts), caches[0].device)
            return known[feed]

        self._run(st, parts, const, send, caches)

    def _replay(
        self, st: CohortState, parts: Sequence[Part], const: Any, fixed: Sequence[torch.Tensor]
    ) -> _Replay | None:
        """The graph of refreshes like these, if one was captured; anew where tensors it reads lie
        elsewhere now (scales that were calibrated again)."""
        graphs = self._graphs.get(st, {})
        key = tuple(p.key for p in parts)
        have = graphs.get(key)
        if have is None or have.addresses == _addresses(st, fixed):
            return have
        del graphs[key]
        if self._again >= _GRAPHS:
            return None
        self._again += 1
        with contextlib.suppress(CaptureError):
            graphs[key] = self._captured(st, parts, const, fixed)
        return graphs.get(key)

    def _run(
        self, st: CohortState, parts: Sequence[Part], const: Any,
        send: Callable[[Feed], torch.Tensor], caches: list[torch.Tensor],
    ) -> None:  # fmt: skip
        """The work is slot-local, so the slots of a group's views go through it side by side."""
        for i, part in enumerate(parts):
            src: Any = _span(part.src) or send(Feed(i, "src"))
            at: Any = _span(part.refresh.at) or send(Feed(i, "at"))
            for views in part.groups:
                work, given = self._work(st, views, i, part, const, caches)
                given = [x.of(send(x.feed)) if isinstance(x, _Fed) else x for x in given]
                raw = _picked(st, views, src, caches)
                given[0] = raw.reshape(with_slots(work.shape, work.dims, work.n))
                code = self._code.get(self._key(work, given))
                if code is not None:
                    out = code(given)[0]
                else:
                    k = len(work.view.fn.operands()) + 1
                    out = work(_run, given[0], given[1:k], given[k:])
                for (j, v), y in zip(views, out.split(len(part.src), work.view.axis), strict=True):
                    if isinstance(at, tuple):
                        st.storages[j].narrow(v.axis, *at).copy_(y)
                    else:
                        st.storages[j].index_copy_(v.axis, at, y)

    def _work(
        self, st: CohortState, views: Views, number: int, part: Part, const: Any,
        caches: list[torch.Tensor],
    ) -> tuple[_Work, list[Any]]:  # fmt: skip
        """The work, and its inputs: raw rows (not yet there), operands, turn."""
        view, count, r = views[0][1], len(views), part.refresh
        cache = caches[view.cache]
        dims = st.dims[view.cache]
        work = _Work(
            view, dims, tuple(cache.shape), len(r.cids), count, part.rot if part.turns else None
        )
        shape = with_slots(cache.shape, dims, work.n)
        given: list[Any] = [torch.empty(shape, dtype=cache.dtype, device="meta")]
        numbers = None
        for o in view.fn.operands():
            if o.role != "table":
                given.append(const(o.node))
            elif isinstance(o.node.meta["val"], torch.Tensor):
                feed, times = Feed(number, o.key), 1 if o.axes is None else count
                given.append(_Fed(feed, o.axes[-1] if o.axes else 0, times))
            else:
                if numbers is None:
                    numbers = {t.operand.key: x for t, x in zip(r.readers, r.rows, strict=True)}
                given.append(shaped_rows(o, numbers[o.key], cache.device))
        if part.turns:
            wide = torch.float64 if cache.dtype == torch.float64 else torch.float32
            given += [_Fed(Feed(number, ("turn", i, wide))) for i in range(3)]
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


def _dummy(x: torch.Tensor, dev: torch.device) -> torch.Tensor:
    return torch.zeros_like(x, device=dev) if x.device.type == "meta" else x


def _addresses(st: CohortState, fixed: Sequence[torch.Tensor]) -> list[int]:
    kept = (*st.caches(), *st.storages.values(), *(st.scales or ()), *fixed)
    return [t.data_ptr() for t in kept]


def _picked(
    st: CohortState, views: Views, src: Any, caches: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Raw slots of the views' caches, side by side; ``src``: (first, length) or an index."""
    dims = st.dims[views[0][1].cache]
    picked = []
    for _, v in views:
        flat = st.merged(caches[v.cache], dims)
        picked.append(
            flat.narrow(dims[0], *src) if isinstance(src, tuple)
            else flat.index_select(dims[0], src)
        )  # fmt: skip
    # never a view of the cache: whoever keeps one alive makes the cache look shared
    return torch.cat(picked, dims[0]) if len(views) > 1 else picked[0].clone()
