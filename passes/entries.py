"""Where fresh rows join a view's work: raw, half way, or past all of it.

Keys that the model has rotated already join a cache of raw keys after its RoPE; padding joins after
everything. Such rows pass through the rest of the work only, and need no rows of the tables below.
"""

from __future__ import annotations

from typing import Any

from rtc.passes.analysis.fn import Fn, Operand, invert_layout
from rtc.passes.analysis.host import HostInfo
from rtc.passes.analysis.slots import RowEntry, RowSource
from rtc.passes.analysis.tables import ClassTables, TableReader
from rtc.passes.plan import Cache, Cohort, View


def can_write(cache: Cache, source: RowSource, fn: Fn) -> str | None:
    """Why the rows of ``source`` cannot be written through ``fn``, or None."""
    if entry(source, fn) is not None:
        return None
    return "fresh rows join the cache in the middle of its work"


def entry(source: RowSource, fn: Fn | None) -> RowEntry | None:
    """The entry from which the rows are written through ``fn`` (None: as raw slots)."""
    found = raw_entry(source)
    if found is not None or fn is None:
        return found
    return _inner_entry(source, fn) or _outer_entry(source, fn)


def raw_entry(source: RowSource) -> RowEntry | None:
    for e in source.entries:
        if invert_layout(e.fn, 1, lambda *a: True, True) is not None:
            return e
    return None


def _inner_entry(source: RowSource, fn: Fn) -> RowEntry | None:
    for e in source.entries:
        if fn.contains(e.fn) and not fn.raw_outside(e.fn):
            return e
    return None


def _outer_entry(source: RowSource, fn: Fn) -> RowEntry | None:
    """Rows that join after ``fn``, with nothing but layout between."""
    for e in source.entries:
        if invert_layout(e.fn, 1, lambda *a: True, True, fn) is not None:
            return e
    return None


def _passed(source: RowSource, fn: Fn) -> set[Any] | None:
    """Keys of the subtrees and operands that the rows of ``source`` go through; None: no entry."""
    at = entry(source, fn)
    if at is None:
        return None
    if raw_entry(source) is None and not fn.contains(at.fn):
        return set()
    stop = None if raw_entry(source) is not None else at.fn.key
    found: set[Any] = set()
    queue = [fn]
    while queue:
        f = queue.pop()
        if f.key == stop or f.key in found:
            continue
        found.add(f.key)
        queue.extend(f.children)
        found.update(o.key for o in f.operands_here())
    return found


def goes_through(cohort: Cohort, view: View, at: Fn) -> bool:
    """Whether the rows of every source go through the subtree ``at`` of the view's work."""
    sources = cohort.caches[view.cache].sources
    kept = {k for e in cohort.events for k, _ in e.present}
    return all(at.key in (_passed(sources[k], view.fn) or ()) for k in kept)


def tables(host: HostInfo, cohort: Cohort, view: View, read: Any) -> ClassTables:
    """The tables of a view's class; rows of no meaning for sources that join later."""
    operands = view.tables(read)
    if not operands:
        return ClassTables([])
    alike = [v for v in cohort.views if v.klass == view.klass]
    # of each view: source -> what its rows go through
    passed = [
        {k: _passed(s, v.fn) for k, s in cohort.caches[v.cache].sources.items()} for v in alike
    ]

    def later(o: Operand) -> frozenset[int]:
        """Sources that skip this operand in every view of the class."""
        skip = [{k for k, p in by.items() if p is not None and o.key not in p} for by in passed]
        return frozenset(set.intersection(*skip) if skip else ())

    return ClassTables([TableReader(host, o, later(o)) for o in operands])
