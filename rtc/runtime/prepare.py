"""Prepares calls of one graph for one cohort: places, table rows, and what must be made again."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from rtc.passes import entries
from rtc.passes.analysis.exprs import evaluate, split_row_ids
from rtc.passes.analysis.host import HostInfo
from rtc.passes.analysis.layout import Fallback, Placement, twice
from rtc.passes.analysis.tables import ClassTables, TableReader, changed, shaped_rows
from rtc.passes.drift import apart, common_turn
from rtc.passes.plan import Cohort, Event
from rtc.passes.rewrite import Extra, first_of_class
from rtc.passes.rotation import BENT
from rtc.runtime.classes import ClassState
from rtc.runtime.state import CohortState, Counters, layout_key

_CPU = torch.device("cpu")
_REMEMBERED = 256  # comparisons of tables: position resets come back


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
    folds: int = 0
    commit: Any = None


class CohortRuntime:
    """Prepares calls of one graph for one cohort; static, shared by all sessions."""

    def __init__(self, index: int, cohort: Cohort, extras: Sequence[Extra], host: HostInfo) -> None:
        self.index, self.cohort = index, cohort
        self.key = layout_key(cohort)
        self.extras = [e for e in extras if e.cohort == index]
        self.turning = [e for e in self.extras if e.kind in ("fold", "unfold", "perm")]
        self.inputs = [c.info.index for c in cohort.caches]
        self.tables: dict[str, dict[Any, ClassTables]] = {}  # class -> read
        self.lead: dict[str, int] = {}
        for v in cohort.views:
            if not (cohort.unified and v.raw):
                reads = self.tables.setdefault(v.klass, {})
                for key in v.by_read:
                    if key not in reads:
                        reads[key] = entries.tables(host, cohort, v, key)
                self.lead[v.klass] = first_of_class(cohort, v)
        # what comparing two sets of rows gave: the places that differ, and a turn of the frame
        self.compared: dict[Any, tuple[np.ndarray, np.ndarray | None]] = {}
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
        self.queries = [q for _, q in cohort.queries]
        self.reading = {(v.klass, u[2].expr.key) for v in cohort.views for u in v.uses}
        self._tables = np.array([self.offsets.get(k, 0) for k in range(max(counts, default=0) + 1)])

    @property
    def readers(self) -> list[TableReader]:
        return [r for reads in self.tables.values() for t in reads.values() for r in t.readers]

    def verify(self, env: Mapping[fx.Node, Any]) -> None:
        """Check narrow keys on a first call; ``env`` holds the tables themselves as well."""
        for reader in self.readers:
            reader.verify(env)
        for reads in self.tables.values():
            if len({tuple(r.signature for r in t.readers) for t in reads.values()}) > 1:
                for t in reads.values():
                    for reader in t.readers:
                        reader.give_up()

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
                if twice(cids):
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
                tables = self.tables[klass][event.expr.key]
                keys = tables.keys(event.expr, ids, env, memo)
                c.expect(keys.shape[1])
                held = c.cid[where] == cids  # kept slots, and rows written earlier in this call
                again = klass in read
                moved, turn = self._compare(c, klass, tables, env, keys, where, held, not again)
                if turn is not None:
                    c.turn(turn)
                    out.folds += 1
                bad = (~held & ~fresh) | moved
                if bad.any():
                    if again or (e > 0 and co.order != "ring"):
                        raise Fallback("tables change between the reads of one call")
                    rows = self._framed(c, klass, tables.rows(env, keys[bad]))
                    frame = None if self._in_rows(klass) else c.frame
                    out.refresh.append(
                        Refresh(klass, cids[bad], came[bad], rows, tables.readers, frame)
                    )
                first = fresh & ~held
                for k, _ in event.present:
                    if k not in written[klass]:
                        at, _ = self._picked(ids, k)
                        rows = self._framed(c, klass, tables.rows(env, keys[at], memo))
                        self._table_inputs(out, e, k, klass, tables.readers, rows)
                        c.cid[where[at]] = cids[at]
                        written[klass].add(k)
                c.cid[where[bad]] = cids[bad]
                if (c.cid[where] != cids).any():
                    raise Fallback("a fresh row comes back after it was dropped")
                c.note(where, keys, bad | first)
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
        st.changes += 1
        place, view_place, noted, cids = out.commit
        st.place = place
        st.view_place = place if st.unified else view_place
        st.classes = noted
        st.cids = cids
        st.next_cid += self.fresh
        st.counters.folds += out.folds

    def rehearse(
        self, st: CohortState, host: Callable[[int], Mapping[fx.Node, Any]], calls: int,
        seconds: float,
    ) -> list[list[tuple[Refresh, np.ndarray]]]:  # fmt: skip
        """Play the coming calls through without running them, so that what their tables have in
        common is known when they come. ``host(t)``: host values of the call ``t`` calls ahead.
        Returns what will have to be made again in a call, and where its raw slots will lie."""
        ahead = copy.copy(st)
        coming = []
        ahead.counters, until = Counters(), time.perf_counter() + seconds
        for t in range(1, calls + 1):
            if time.perf_counter() > until:
                break
            try:
                prep = self.prepare(ahead, host(t), {})
                sources = [(r, ahead.place.find(r.cids)) for r in prep.refresh]
                self.finish(ahead, prep)
            except (Fallback, IndexError):
                break
            if sources:
                coming.append(sources)
        return coming

    # -- pieces --------------------------------------------------------------------------------

    def _cids(self, st: CohortState, ids: np.ndarray) -> np.ndarray:
        out = np.empty_like(ids)
        old = ids >= 0
        out[old] = st.cids[ids[old]]
        source, row = split_row_ids(ids[~old])
        out[~old] = st.next_cid + self._tables[source] + row
        return out

    def _reads(self, klass: str, event: Event) -> bool:
        return (klass, event.expr.key) in self.reading

    def _compare(
        self, c: ClassState, klass: str, tables: ClassTables, env: Mapping[fx.Node, Any],
        keys: np.ndarray, where: np.ndarray, held: np.ndarray, fold: bool,
    ) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
        """(held positions whose row has changed, turn of the frame that spares the others).

        Comparing rows is dear, and positions move in few ways: what came out is remembered.
        """
        rot = self.cohort.rotations.get(klass)
        # one frame serves all reads of a call: it starts anew before the first of them
        if rot is not None and (c.frame is None or (fold and not held.any())):
            c.start_frame(len(rot.perm))
        assert c.made is not None
        assert c.seen is not None
        differ = held & (c.seen[where] != keys).any(1)
        if not differ.any():
            return differ, None
        made, since = c.made[where], c.since[where]
        parts = (keys, made, held, differ, len(c.folds) - since, *c.folds[int(since.min()) :])
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(np.ascontiguousarray(part).data)
        key = (klass, fold, digest.digest())
        if key not in self.compared:
            if len(self.compared) >= _REMEMBERED:
                del self.compared[next(iter(self.compared))]
            at = np.nonzero(differ if rot is None else held)[0]
            have, want = tables.rows(env, made[at]), tables.rows(env, keys[at])
            odd, turn = np.zeros_like(held), None
            if rot is None:
                for a, b in zip(have, want, strict=True):
                    odd[at] |= changed(a, b)
            else:
                eps = max(torch.finfo(r.dtype).eps for r in want)
                old, new = (rot.turns(r, half=True) for r in (have, want))
                if not (rot.straight(old, eps) and rot.straight(new, eps)):
                    raise Fallback(BENT)
                lag = c.lag(where[at])
                old = old if lag is None else old * lag[:, rot.half]
                odd[at] = apart(old, new, eps)
                found = common_turn(old, new, eps) if fold and odd.any() else None
                if found is not None and found.odd.sum() < odd.sum():
                    odd[at], turn = found.odd, rot.whole(found.common)
            self.compared[key] = odd, turn
        odd, turn = self.compared[key]
        return odd.copy(), turn

    def _in_rows(self, klass: str) -> bool:
        rot = self.cohort.rotations.get(klass)
        return rot is not None and rot.inverse is not None

    def _framed(self, c: ClassState, klass: str, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Table rows that also turn slots back into the frame, where rows can hold that."""
        if not self._in_rows(klass) or c.frame is None:
            return rows
        return self.cohort.rotations[klass].turned_rows(rows, c.frame.conj())

    def _frames(self, out: Prepared, noted: dict[str, ClassState]) -> None:
        """Cosine and sine by which fresh rows and queries are turned back into the frame."""
        for e in self.turning:
            klass = self.cohort.views[e.view].klass
            if e.kind == "perm":
                self._put(out, e, self.cohort.rotations[klass].perm)
                continue
            frame = noted[klass].frame
            assert frame is not None
            value = frame.real if e.operand == 0 else -frame.imag
            out.extras[e] = torch.from_numpy(value.copy()).to(e.dtype)

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


__all__ = ["CohortRuntime", "Prepared", "Refresh"]
