"""State of one cohort of caches: the views rtc keeps, and where every slot lies.

The user's cache tensors stay the master copy of the raw slots, in ring order while rtc owns them.
Views are derived: any slot of a view can be computed again from the raw slot and the coming call's
table row, so that whatever the host finds changed (an outside write, a position reset) is made good
before the graph runs.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from rtc.errors import StateError
from rtc.passes import entries
from rtc.passes.analysis.exprs import evaluate, split_row_ids
from rtc.passes.analysis.fn import Fn, Operand, emit, raw_fn, structural_key, with_slots
from rtc.passes.analysis.layout import Fallback, Placement
from rtc.passes.analysis.tables import TableReader, changed, shaped_rows
from rtc.passes.drift import common_turn
from rtc.passes.plan import Cohort, Event, View
from rtc.passes.rewrite import Extra, first_of_class
from rtc.passes.rotation import Rotation, rotated


class Handle:
    """A cache by weak reference: a tensor of the user's, or one part of a stacked one."""

    def __init__(self, tensor: torch.Tensor, part: tuple[int, int] | None) -> None:
        self.ref, self.part = weakref.ref(tensor), part
        self.key = (id(tensor), part)

    def owner(self) -> torch.Tensor | None:
        """The user's tensor, or None if it is gone."""
        return self.ref()

    def overlaps(self, other: Handle) -> bool:
        """Whether the two share memory, as far as tensor objects tell."""
        if self.key[0] != other.key[0]:
            return False
        if self.part is None or other.part is None or self.part[0] != other.part[0]:
            return True
        return self.part == other.part

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.part is None:
            return tensor
        with torch.no_grad():
            return tensor.narrow(self.part[0], self.part[1], 1)


class Stamp:
    """Which tensor, and which version of it: a constant is what it was if the stamps agree.

    An inference tensor has no version; ``epoch`` counts how often the user asked to forget.
    """

    def __init__(self, tensor: torch.Tensor, epoch: int) -> None:
        self.ref = weakref.ref(tensor)  # an id may come back once its tensor is gone
        self.rest = (None if tensor.is_inference() else tensor._version, epoch)

    def same(self, other: Stamp) -> bool:
        mine = self.ref()
        return mine is not None and mine is other.ref() and self.rest == other.rest


@dataclass
class ClassState:
    """Views with equal work and equal tables: which content each place holds, with which rows."""

    cid: np.ndarray
    rows: list[torch.Tensor] | None = None
    # rotation by which queries are turned instead of the slots: [D] complex, None for none
    frame: np.ndarray | None = None
    # [slots, D] complex: what each slot is turned by in effect, once the frame has turned
    turns: np.ndarray | None = None

    def invalidate(self) -> None:
        self.cid[:] = -1

    def follow(self, came: np.ndarray) -> None:
        """Take the order in which place i holds what was at ``came[i]`` (-1: something new)."""
        at = np.maximum(came, 0)
        self.cid = np.where(came < 0, -1, self.cid[at])
        if self.rows is not None:
            self.rows = [r[torch.from_numpy(at)] for r in self.rows]
        if self.turns is not None:
            self.turns = self.turns[at]


def layout_key(cohort: Cohort) -> tuple[Any, ...]:
    """Graphs that agree on it can share a state."""
    views = tuple((v.cache, structural_key(v.fn), v.klass) for v in cohort.views)
    return (cohort.order, cohort.unified, cohort.capacity, cohort.slots, views)


@dataclass
class Counters:
    imports: int = 0
    materializations: int = 0
    refreshed_slots: int = 0
    folds: int = 0


def _device(cohort: Cohort) -> torch.device:
    return cohort.caches[0].info.node.meta["val"].device


class CohortState:
    """State for one tuple of cache tensors, shared by all graphs that lay it out alike."""

    def __init__(
        self, key: Any, cohort: Cohort, handles: Sequence[Handle], counters: Counters
    ) -> None:
        self.key = key
        self.handles = list(handles)
        self.ids = tuple(h.key for h in handles)
        self.by_id = {h.key[0]: h for h in handles}
        self.dims = [c.dims for c in cohort.caches]
        self.counters = counters
        self.unified = cohort.unified
        n = cohort.slots
        self.cids = np.arange(n, dtype=np.int64)  # of the logical slots
        self.place = Placement(np.arange(n, dtype=np.int64))  # of the caches
        self.next_cid = n
        cap = cohort.capacity
        self.view_place = self.place if cohort.unified else Placement.empty(cap)
        self.classes: dict[str, ClassState] = {}
        self.storages: dict[int, torch.Tensor] = {}
        self.axes: dict[int, int] = {}
        for j, v in enumerate(cohort.views):
            if cohort.unified and v.raw:
                continue
            dev = cohort.caches[v.cache].info.node.meta["val"].device
            with torch.inference_mode(False):  # kept for calls in any mode
                self.storages[j] = torch.empty(v.storage_shape(cap), dtype=v.fn.dtype, device=dev)
            self.axes[j] = v.axis
            self.classes.setdefault(v.klass, ClassState(np.full(cap, -1, dtype=np.int64)))
        self.versions: list[int | None] = [None] * len(handles)
        self.write_back = False  # the caches must be in order after every call
        self.watched = True  # guarded between calls
        self.exported = False  # its memory was handed out: it must stay in order
        self.untrusted = False  # writes cannot be seen: views are made anew in every call
        self.dirty = False  # a tensor without a version counter was touched from outside
        self.consts: list[Stamp] | None = None
        self.scales: list[torch.Tensor] | None = None  # calibrated maxima, None: to be measured
        with torch.inference_mode(False):
            self.saturated = torch.zeros(1, dtype=torch.int64, device=_device(cohort))
        counters.imports += 1

    # -- the user's tensors --------------------------------------------------------------------

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, or a part of it, is one of the caches."""
        handle = self.by_id.get(id(tensor))
        return handle is not None and handle.owner() is tensor

    def tensors(self) -> list[torch.Tensor]:
        """The user's live tensors, each once."""
        live = {id(t): t for h in self.handles if (t := h.owner()) is not None}
        return list(live.values())

    @property
    def alive(self) -> bool:
        return all(h.owner() is not None for h in self.handles)

    def caches(self) -> list[torch.Tensor]:
        """The caches (parts cut out of stacked tensors), in the cohort's order."""
        if not self.alive:
            raise StateError(
                "a cache tensor was freed while rtc kept its state: hold the tensors for as long "
                "as the compiled model runs on them, or call compiled.close() first"
            )
        return [h.cut(h.owner()) for h in self.handles]  # type: ignore[arg-type]

    @property
    def in_order(self) -> bool:
        """Whether the caches hold their slots in the program's own order."""
        return bool((self.place.content == self.cids).all())

    def merged(self, cache: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        """The cache with its slot axes as one, sharing memory."""
        if len(dims) == 1:
            return cache
        shape = (*cache.shape[: dims[0]], -1, *cache.shape[dims[-1] + 1 :])
        with torch.no_grad():
            return cache.view(shape)

    def materialize(self, *, between: bool = False) -> None:
        """Put the caches into the program's own order; views stay valid.

        ``between``: it is done between calls, when nobody but the user can have written them.
        """
        if self.in_order:
            return
        if between:
            self._check_untouched()
        src = self.place.find(self.cids)
        for h, dims in zip(self.handles, self.dims, strict=True):
            user = h.owner()
            if user is None:
                continue  # freed by the user; the others must be put in order all the same
            t = h.cut(user)
            flat = self.merged(t, dims)
            idx = torch.from_numpy(src).to(t.device)
            with torch.inference_mode(t.is_inference()), torch.no_grad():
                flat.copy_(flat.index_select(dims[0], idx))
        if self.unified:
            for j, s in self.storages.items():
                s.copy_(s.index_select(self.axes[j], torch.from_numpy(src).to(s.device)))
            for c in self.classes.values():
                c.follow(src)
        self.place.content = self.cids.copy()
        self.counters.materializations += 1
        if self.alive:
            self.record_versions()

    def invalidate(self) -> None:
        """The caches were written from outside: every view is out of date."""
        n = len(self.cids)
        self.cids = self.next_cid + np.arange(n, dtype=np.int64)
        self.next_cid += n
        self.place.content = self.cids.copy()
        if not self.unified:
            self.view_place.content[:] = -1
        for c in self.classes.values():
            c.invalidate()
        self.scales = None
        self.counters.imports += 1

    def _check_untouched(self) -> None:
        """Raise StateError if a cache in ring order was written past the guard."""
        for h, version in zip(self.handles, self.versions, strict=True):
            t = h.owner()
            if t is None or t.is_inference() or version is None or t._version == version:
                continue
            raise StateError(
                f"a cache of shape {tuple(t.shape)} was written, or given other memory, behind "
                "rtc's back while it lay in ring order. Write through the tensor that the model "
                "holds, or call compiled.materialize() first."
            )

    def check_versions(self) -> None:
        """Notice writes from outside since the last call."""
        if self.dirty or self.untrusted:
            self.dirty = False
            self.materialize()
            self.invalidate()
        for i, t in enumerate(self.caches()):
            if t.is_inference() or self.versions[i] is None or t._version == self.versions[i]:
                continue
            if not self.in_order:
                raise StateError(
                    f"cache {i} of shape {tuple(t.shape)} was written through another alias while "
                    "rtc kept it in ring order. Write through the tensor that the model holds, or "
                    "call compiled.materialize() first."
                )
            self.invalidate()
            break

    def touched_outside(self, exported: bool, uncounted: bool) -> None:
        """An operation outside rtc had one of the caches as an argument."""
        self.exported |= exported
        self.dirty |= exported or uncounted
        self.dirty |= any(t.is_inference() for t in self.caches())

    def record_versions(self) -> None:
        self.versions = [None if t.is_inference() else t._version for t in self.caches()]

    # -- constants -----------------------------------------------------------------------------

    def check_consts(self, stamps: list[Stamp]) -> None:
        """Constants of the session that entered the views: if one changed, so did every view."""
        have = stamps if self.consts is None else self.consts
        if len(have) != len(stamps) or not all(map(Stamp.same, have, stamps)):
            for c in self.classes.values():
                c.invalidate()
        self.consts = stamps


_CPU = torch.device("cpu")


@dataclass
class Refresh:
    """Places ``at`` of a view class to compute again from raw contents ``cids``."""

    klass: str
    cids: np.ndarray
    at: np.ndarray
    rows: list[torch.Tensor]
    readers: list[TableReader]
    frame: np.ndarray | None


@dataclass
class Prepared:
    """What one call needs, and what to note once it has run."""

    extras: dict[Extra, torch.Tensor] = field(default_factory=dict)
    refresh: list[Refresh] = field(default_factory=list)
    places: dict[int, np.ndarray] = field(default_factory=dict)  # event -> place of each position
    commit: Any = None


class CohortRuntime:
    """Prepares calls of one graph for one cohort; static, shared by all sessions."""

    def __init__(self, index: int, cohort: Cohort, extras: Sequence[Extra]) -> None:
        self.index, self.cohort = index, cohort
        self.key = layout_key(cohort)
        self.extras = [e for e in extras if e.cohort == index]
        self.inputs = [c.info.index for c in cohort.caches]
        self.readers: dict[str, dict[Any, list[TableReader]]] = {}  # class -> read -> operands
        self.lead: dict[str, int] = {}
        for v in cohort.views:
            if not (cohort.unified and v.raw):
                reads = self.readers.setdefault(v.klass, {})
                for key in v.by_read:
                    reads.setdefault(key, entries.readers(cohort, v, key))
                self.lead[v.klass] = first_of_class(cohort, v)
        counts: dict[int, int] = {}
        for c in cohort.caches:
            counts.update({k: s.count for k, s in c.sources.items()})
        self.offsets: dict[int, int] = {}
        total = 0
        for k in sorted(counts):
            self.offsets[k] = total
            total += counts[k]
        self.counts, self.fresh = counts, total
        self.scales = list(cohort.scales())
        self._tables = np.array([self.offsets.get(k, 0) for k in range(max(counts, default=0) + 1)])

    # -- one call ------------------------------------------------------------------------------

    def prepare(
        self, st: CohortState, env: Mapping[fx.Node, Any], memo: dict[Any, Any]
    ) -> Prepared:
        """Work out the coming call: index inputs, table rows, and what must be refreshed first.

        Raises Fallback where the rewritten graph does not fit this call; nothing has changed then.
        """
        co, out = self.cohort, Prepared()
        place = st.place.copy()
        views = place if st.unified else st.view_place.copy()
        start = views.copy()
        noted = {k: dataclasses.replace(c, cid=c.cid.copy()) for k, c in st.classes.items()}
        read: set[str] = set()
        written: dict[str, set[int]] = {k: set() for k in noted}
        for e, event in enumerate(co.events):
            ids = evaluate(event.expr, env, memo).ravel()
            cids = self._cids(st, ids)
            fresh = ids < 0
            if co.order == "ring":
                where, new = views.hold(cids)
                came = where
                stale = new & ~fresh
            else:
                if len(np.unique(cids)) != len(cids):
                    raise Fallback("one slot is read twice in a call")
                came = views.order(cids)
                where = np.arange(len(cids))
                stale = (came < 0) & ~fresh
                if e == 0 and stale.any():
                    came[stale] = _room(start, came, int(stale.sum()))
                for c in noted.values():
                    c.follow(came)
            if stale.any() and (st.unified or e > 0):
                raise Fallback("a slot comes back after it was evicted in the same call")
            out.places[e] = where
            self._positions(out, e, event, ids, came, len(start.content))
            for klass, c in noted.items():
                if not self._reads(klass, event):
                    continue
                readers = self.readers[klass][event.expr.key]
                rows = [r.rows(event.expr, ids, env, memo) for r in readers]
                held = c.cid[where] == cids  # kept slots, and rows written earlier in this call
                moved = np.zeros(len(ids), dtype=bool)
                for have, want in zip(c.rows or [], rows, strict=bool(c.rows)):
                    moved |= held & changed(have[torch.from_numpy(where)], want)
                if klass in read and moved.any():
                    raise Fallback("tables change between the reads of one call")
                bad, turned = (~held & ~fresh) | moved, False
                if klass not in read:
                    bad, turned = self._turn(st, c, klass, rows, where, held, bad)
                if bad.any():
                    if klass in read or (e > 0 and co.order != "ring"):
                        raise Fallback("tables change between the reads of one call")
                    pick = torch.from_numpy(np.nonzero(bad)[0])
                    picked = self._framed(c, klass, [r[pick] for r in rows])
                    frame = None if self._in_rows(klass) else c.frame
                    out.refresh.append(Refresh(klass, cids[bad], came[bad], picked, readers, frame))
                first = fresh & ~held
                for k, _ in event.present:
                    if k not in written[klass]:
                        at, _ = self._picked(ids, k)
                        new = [r[torch.from_numpy(at)] for r in rows]
                        new = self._framed(c, klass, new)
                        self._table_inputs(out, e, k, klass, readers, new)
                        c.cid[where[at]] = cids[at]
                        written[klass].add(k)
                c.cid[where[bad]] = cids[bad]
                if (c.cid[where] != cids).any():
                    raise Fallback("a fresh row comes back after it was dropped")
                self._note_rows(c, klass, rows, where, bad | first, turned)
                read.add(klass)
        ids = evaluate(co.commit, env, memo).ravel()
        cids = self._cids(st, ids)
        if not st.unified:
            self._commit_positions(out, place, ids, cids)
        elif (place.find(cids) < 0).any():
            raise Fallback("a stored slot was dropped on the way")
        self._biases(out, env)
        self._frames(out, noted)
        out.commit = (place, views, noted, cids)
        return out

    def finish(self, st: CohortState, out: Prepared) -> None:
        """Note that the call ran."""
        place, view_place, noted, cids = out.commit
        st.place = place
        st.view_place = place if st.unified else view_place
        st.classes = noted
        st.cids = cids
        st.next_cid += self.fresh

    # -- pieces --------------------------------------------------------------------------------

    def _cids(self, st: CohortState, ids: np.ndarray) -> np.ndarray:
        out = np.empty_like(ids)
        old = ids >= 0
        out[old] = st.cids[ids[old]]
        source, row = split_row_ids(ids[~old])
        out[~old] = st.next_cid + self._tables[source] + row
        return out

    def _reads(self, klass: str, event: Event) -> bool:
        return any(
            v.klass == klass and any(u[2].expr.key == event.expr.key for u in v.uses)
            for v in self.cohort.views
        )

    def _turn(
        self, st: CohortState, c: ClassState, klass: str, rows: list[torch.Tensor],
        where: np.ndarray, held: np.ndarray, bad: np.ndarray,
    ) -> tuple[np.ndarray, bool]:  # fmt: skip
        """Fold a rotation common to most held slots into the frame.

        Returns the slots that stay bad, and whether the frame turned.
        """
        rot = self.cohort.rotations.get(klass)
        if rot is None:
            return bad, False
        if c.frame is None or not held.any():
            c.frame = np.ones(len(rot.perm), dtype=np.complex128)
            c.turns = None
        if not (bad & held).any() or c.rows is None:
            return bad, False
        at = np.nonzero(held)[0]
        if c.turns is None:
            c.turns = rot.turns(c.rows)
        want = [r[torch.from_numpy(at)] for r in rows]
        eps = max(torch.finfo(r.dtype).eps for r in want)
        turn = common_turn(c.turns[where[at]], rot.turns(want), eps)
        if turn is None or turn.odd.sum() >= (bad & held).sum():
            return bad, False
        frame = c.frame * turn.common
        c.frame = frame / np.abs(frame)
        # what the slots are turned by in effect: small differences must add up until they count
        c.turns = c.turns * turn.common
        st.counters.folds += 1
        bad = bad.copy()
        bad[at] = turn.odd
        return bad, True

    def _in_rows(self, klass: str) -> bool:
        rot = self.cohort.rotations.get(klass)
        return rot is not None and rot.inverse is not None

    def _framed(self, c: ClassState, klass: str, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Table rows that also turn slots back into the frame, where rows can hold that."""
        if not self._in_rows(klass) or c.frame is None:
            return rows
        return self.cohort.rotations[klass].turned_rows(rows, c.frame.conj())

    def _note_rows(
        self, c: ClassState, klass: str, rows: list[torch.Tensor], where: np.ndarray,
        new: np.ndarray, turned: bool,
    ) -> None:  # fmt: skip
        """Note the rows that slots were made with; those of other slots stay as they were used."""
        if c.rows is None:
            new = np.ones_like(new)
        if c.turns is not None and new.any():
            pick = torch.from_numpy(np.nonzero(new)[0])
            c.turns = c.turns.copy()
            c.turns[where[new]] = self.cohort.rotations[klass].turns([r[pick] for r in rows])
        note = np.ones_like(new) if turned else new
        c.rows = _scattered(rows, c.rows, where, note, len(c.cid))

    def _frames(self, out: Prepared, noted: dict[str, ClassState]) -> None:
        """Cosine and sine by which fresh rows and queries are turned back into the frame."""
        for e in self.extras:
            if e.kind in ("fold", "unfold"):
                klass = self.cohort.views[e.view].klass
                frame = noted[klass].frame
                assert frame is not None
                value = frame.real if e.operand == 0 else -frame.imag
                out.extras[e] = torch.from_numpy(value.copy()).to(e.dtype)
            elif e.kind == "perm":
                perm = self.cohort.rotations[self.cohort.views[e.view].klass].perm
                self._put(out, e, perm)

    def _picked(self, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of source ``k``'s rows, in row order, and the rows."""
        source, row = split_row_ids(np.minimum(ids, -1))
        at = np.nonzero((ids < 0) & (source == k))[0]
        at = at[np.argsort(row[at], kind="stable")]
        return at, row[at]

    def _positions(
        self, out: Prepared, e: int, event: Event, ids: np.ndarray, came: np.ndarray, capacity: int
    ) -> None:
        """Index inputs of an event: ``came`` is the place of each content (logical: before it)."""
        offset, src = capacity, came.copy()
        for k, m in event.present:
            at, row = self._picked(ids, k)
            if len(at) != m:
                raise Fallback("another number of fresh rows is kept than when compiled")
            if self.cohort.order == "ring":
                self._put(out, Extra("index", self.index, e, k, shape=(m,)), came[at])
            src[at] = offset + np.arange(m)
            offset += m
            if m < self.counts[k]:
                self._put(out, Extra("select", self.index, e, k, shape=(m,)), row)
        if int((ids < 0).sum()) != sum(m for _, m in event.present):
            raise Fallback("fresh rows are kept that were not when compiled")
        if self.cohort.order != "ring":
            self._put(out, Extra("index", self.index, e, shape=(len(src),)), src)

    def _commit_positions(
        self, out: Prepared, place: Placement, ids: np.ndarray, cids: np.ndarray
    ) -> None:
        event = self.cohort.stored
        assert event is not None
        n = len(place.content)
        if self.cohort.order == "ring":
            came, new = place.hold(cids)
            lost = new & (ids >= 0)
        else:
            came = place.order(cids)
            lost = (came < 0) & (ids >= 0)
        if lost.any():
            raise Fallback("a stored slot comes from nowhere")
        self._positions(out, -1, event, ids, came, n)

    def _put(self, out: Prepared, extra: Extra, value: np.ndarray) -> None:
        out.extras[extra] = torch.from_numpy(np.ascontiguousarray(value, dtype=np.int64))

    def _table_inputs(
        self, out: Prepared, e: int, k: int, klass: str, readers: list[TableReader],
        rows: list[torch.Tensor],
    ) -> None:  # fmt: skip
        for num, (reader, r) in enumerate(zip(readers, rows, strict=True)):
            op = reader.operand
            if not isinstance(op.node.meta["val"], torch.Tensor):
                continue
            extra = Extra(
                "table", self.index, e, k, self.lead[klass], num,
                shape=op.rows_shape(len(r)), dtype=op.dtype,
            )  # fmt: skip
            out.extras[extra] = shaped_rows(op, r, _CPU)

    def _biases(self, out: Prepared, env: Mapping[fx.Node, Any]) -> None:
        if self.cohort.order != "ring":
            return
        for num, b in enumerate(self.cohort.biases):
            event = [e.expr.key for e in self.cohort.events].index(b.token[1])
            where = out.places[event]
            val = env[b.operand]
            idx = np.empty(len(where), dtype=np.int64)
            idx[where] = np.arange(len(where))
            moved = val.index_select(b.axis, torch.from_numpy(idx))
            extra = Extra(
                "bias", self.index, event, operand=num, shape=tuple(val.shape), dtype=val.dtype
            )
            out.extras[extra] = moved


def _room(start: Placement, used: np.ndarray, count: int) -> np.ndarray:
    """``count`` places of ``start`` that nothing in ``used`` needs."""
    free = np.ones(len(start.content), dtype=bool)
    free[used[used >= 0]] = False
    spots = np.nonzero(free)[0][:count]
    if len(spots) < count:
        raise Fallback("no room to bring slots back")
    return spots


def _scattered(
    rows: list[torch.Tensor],
    have: list[torch.Tensor] | None,
    where: np.ndarray,
    new: np.ndarray,
    n: int,
) -> list[torch.Tensor]:
    """Stored rows with those of the positions ``new`` replaced."""
    if have is None:
        have, new = [torch.zeros((n, r.shape[1]), dtype=r.dtype) for r in rows], new | True
    if not new.any():
        return have
    at, pick = torch.from_numpy(where[new]), torch.from_numpy(np.nonzero(new)[0])
    out = [h.clone() for h in have]
    for o, r in zip(out, rows, strict=True):
        o[at] = r[pick]
    return out


def _run(target: Any, args: Any, kwargs: Any) -> Any:
    return target(*args, **kwargs)


def turned(x: torch.Tensor, perm: np.ndarray, by: np.ndarray) -> torch.Tensor:
    """x * c + x[perm] * s along the last axis, in float32 at least."""
    dtype = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    c, s = (torch.from_numpy(v.copy()).to(x.device, dtype) for v in (by.real, by.imag))
    y = x.to(dtype)
    return (y * c + y.index_select(-1, torch.from_numpy(perm).to(x.device)) * s).to(x.dtype)


def refresh(
    st: CohortState, views: Sequence[tuple[int, View]], r: Refresh, src: np.ndarray,
    const: Any, rot: Rotation | None,
) -> None:  # fmt: skip
    """Compute places ``r.at`` of views with the very same work again, from raw slots at ``src``.

    The work is slot-local, so the slots of all views go through it side by side, in one pass.
    """
    caches = st.caches()
    first = views[0][1]
    dims, shape, dev = st.dims[first.cache], caches[first.cache].shape, caches[first.cache].device
    at, idx = (torch.from_numpy(x).to(dev) for x in (r.at, src))
    picked = [st.merged(caches[v.cache], dims).index_select(dims[0], idx) for _, v in views]
    n, count = len(src), len(views)
    raw = torch.cat(picked, dims[0]) if count > 1 else picked[0]
    raw = raw.reshape(with_slots(shape, dims, n * count))
    values = {
        t.operand.key: shaped_rows(t.operand, x.repeat(count, 1), dev)
        for t, x in zip(r.readers, r.rows, strict=True)
    }

    def operand(o: Operand) -> Any:
        return values[o.key] if o.role == "table" else const(o.node)

    key = raw_fn(shape, dims, raw.dtype).key

    def leaf(f: Fn) -> Any:
        return raw if f.key == key else None

    turns = rot is not None and r.frame is not None and (r.frame != 1).any()
    pivot = rotated(first.fn) if turns else None

    def framed(f: Fn) -> Any:
        """The rotated subtree, turned back into the class's frame."""
        if pivot is None or f.key != pivot.key:
            return leaf(f)
        return turned(emit(f, n * count, _run, leaf, operand), rot.perm, r.frame.conj())

    out = emit(first.fn, n * count, _run, framed, operand)
    out = out.reshape(first.storage_shape(n * count))
    for (j, v), part in zip(views, out.split(n, first.axis), strict=True):
        st.storages[j].index_copy_(v.axis, at, part)
