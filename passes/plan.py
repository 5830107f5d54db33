"""The cache plan: what the analysis found and the cache passes decide, before the graph changes.

A *cohort* is a set of caches that move alike (same slot expressions at every read and at the
commit): the keys and values of all layers, usually. A cohort has one placement of slots, one set of
index inputs, and one decision about its order. A *view* is slot-local work on a cache of the
cohort, kept in a storage of its own; a view without arithmetic is the cache itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from rtc.passes.analysis import order
from rtc.passes.analysis.exprs import Exprs, SlotExpr, evaluate, split_row_ids
from rtc.passes.analysis.fn import LAYOUT, PICKS, Fn, Operand, off_slots, structural_key
from rtc.passes.analysis.fp8 import unfit
from rtc.passes.analysis.host import HostInfo, HostProgram, InputInfo, where
from rtc.passes.analysis.order import Bias
from rtc.passes.analysis.shapes import NotLocal
from rtc.passes.analysis.slots import (
    REDUCE,
    LocalAnalysis,
    RowSource,
    SlotVal,
    is_pointwise,
    shape_of,
)

if TYPE_CHECKING:
    from rtc.passes.rotation import Rotation

aten = torch.ops.aten


@dataclass(frozen=True)
class Refusal:
    """Why a pass left something alone: the reason, the node, the user's line."""

    reason: str
    node: str = ""
    where: str = ""

    @staticmethod
    def at(reason: str, node: fx.Node) -> Refusal:
        return Refusal(reason, node.name, where(node))


@dataclass
class View:
    """Slot-local work ``fn`` on cache ``cache`` of the cohort, read by ``uses``."""

    cache: int  # index into Cohort.caches
    fn: Fn
    uses: list[tuple[fx.Node, fx.Node, SlotVal]]  # (node, user, value of node)
    # read expression -> the same work with the table entries of that read
    by_read: dict[Any, Fn] = field(default_factory=dict)
    klass: str = ""  # structural key with the tables' host keys: equal classes share table rows

    @property
    def raw(self) -> bool:
        return self.fn.kind == "raw"

    @property
    def axis(self) -> int:
        return self.fn.dims[0]

    @property
    def storage_dtype(self) -> torch.dtype:
        """FP8 is kept as bytes: ops that move slots do not take FP8 on every device."""
        dtype = self.fn.dtype
        return torch.uint8 if dtype.is_floating_point and dtype.itemsize == 1 else dtype

    def storage_shape(self, slots: int) -> tuple[int, ...]:
        """``fn``'s shape, its slot axes merged into one of ``slots``."""
        dims = self.fn.dims
        off = off_slots(self.fn.shape, dims)
        return tuple(int(s) for s in (*off[: dims[0]], slots, *off[dims[-1] + 1 :]))

    def tables(self, read: Any = None) -> list[Operand]:
        """Table operands, in one order for all reads; ``read``: key of a read's expression."""
        fn = self.fn if read is None else self.by_read[read]
        return [o for o in fn.operands() if o.role == "table"]


@dataclass
class Cache:
    """One cache: its input, slot axes, the analysis, and the value that the call leaves in it."""

    info: InputInfo
    dims: tuple[int, ...]
    analysis: LocalAnalysis
    commit: SlotExpr
    sources: dict[int, RowSource] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        shape = shape_of(self.info.node)
        return int(np.prod([shape[d] for d in self.dims]))


@dataclass
class Event:
    """A point at which the storages must hold exactly the slots of ``expr``.

    ``present``: the fresh sources among them, with the number of their rows that are kept.
    """

    expr: SlotExpr
    present: list[tuple[int, int]]


@dataclass
class Cohort:
    caches: list[Cache]
    views: list[View]
    reads: list[SlotExpr]
    commit: SlotExpr
    order: str = "plain"  # "ring", "logical", or "plain": left alone
    hoist: bool = False
    refusals: dict[str, list[Refusal]] = field(default_factory=dict)
    biases: list[Bias] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    stored: Event | None = None  # the commit
    unified: bool = False  # one placement for caches and views
    rotations: dict[str, Rotation] = field(default_factory=dict)  # view classes that are folded
    # attention over FP8 views, with its query as traced: calibrated like the views' scales
    queries: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    _scales: tuple[int, dict[fx.Node, tuple[int, Fn]]] | None = None

    @property
    def slots(self) -> int:
        return self.caches[0].slots

    @property
    def capacity(self) -> int:
        """Slots of every read."""
        return self.reads[0].count

    @property
    def arithmetic(self) -> int:
        return sum(v.fn.arithmetic() for v in self.views)

    def split(self) -> None:
        """Give the views a placement of their own, apart from the caches'."""
        self.unified = False
        keys = {e.key for e in self.reads}
        self.events = [e for e in self.events if e.expr.key in keys]

    def scales(self) -> dict[fx.Node, tuple[int, Fn]]:
        """Whole-cache maxima that are calibrated: node -> (cache, the work it measures)."""
        if self._scales is None or self._scales[0] != len(self.caches):
            found = {
                n: (i, _below_statistic(fn, n))
                for i, c in enumerate(self.caches)
                for n, fn in c.analysis.calibrated.items()
            }
            self._scales = len(self.caches), found
        return self._scales[1]

    def refuse(self, name: str, refusal: Refusal) -> None:
        self.refusals.setdefault(name, []).append(refusal)


@dataclass
class CachePlan:
    host: HostInfo
    exprs: Exprs
    cohorts: list[Cohort]
    unmatched: list[tuple[InputInfo, Refusal]]
    sample: dict[fx.Node, int]  # int inputs as the first call gave them

    def coming(self, calls: int) -> dict[fx.Node, int]:
        """Int inputs so many calls after the first, if those that may count calls do."""
        inputs = self.host.inputs
        return {n: x + calls * inputs[n].counts for n, x in self.sample.items()}

    def host_roots(self, cohort: Cohort) -> set[fx.Node]:
        """Host values that the runtime needs for this cohort, those of tables apart."""
        out = {b.operand for b in cohort.biases}
        for e in (*cohort.reads, cohort.commit):
            out |= e.host_nodes()
        return out


def build(
    host: HostInfo,
    inputs: Sequence[InputInfo],
    sample: Mapping[fx.Node, int],
    *,
    calibrate: bool = False,
    raw_only: bool = False,
    reads_fp8: Callable[[Fn], Fn | None] | None = None,
) -> CachePlan:
    """Analyse every tensor input that may be a cache and group what moves alike.

    ``reads_fp8``: which FP8 values attention may read instead of the work on top of them.
    """
    exprs = Exprs(host.key)
    unmatched: list[tuple[InputInfo, Refusal]] = []
    hints: dict[Any, list[tuple[int, ...]]] = {}
    candidates: list[Cache] = []
    for info in inputs:
        if (
            info.is_int
            or (info.parameter and not info.mutated)
            or not isinstance(info.node.meta["val"], torch.Tensor)
        ):
            continue
        found = _find_cache(host, exprs, info, hints, calibrate, raw_only)
        if isinstance(found, Cache):
            candidates.append(found)
        elif found is not None:
            unmatched.append((info, found))
    caches = _claim(candidates, unmatched)
    stored = _stored_fp8(caches, reads_fp8) if reads_fp8 else {}
    cohorts = _group(caches, stored)
    if calibrate:
        _queries(cohorts, stored)
    plan = CachePlan(host, exprs, cohorts, unmatched, dict(sample))
    _order(plan)
    for cohort in cohorts:
        _events(plan, cohort)
    return plan


def _claim(candidates: list[Cache], unmatched: list[tuple[InputInfo, Refusal]]) -> list[Cache]:
    """A read belongs to one cache; the others joined in it count as its fresh rows.

    Caches that are written come first: to a tensor that is only read, a cache joined with it looks
    like fresh rows. Then the larger one: more is saved there.
    """
    claimed: set[tuple[fx.Node, fx.Node]] = set()
    kept = []
    for c in sorted(candidates, key=lambda c: (not c.info.mutated, -c.slots)):
        reads = {(n, u) for n, u, _ in c.analysis.ends}
        if not reads & claimed:
            claimed |= reads
            kept.append(c)
        elif c.info.mutated:
            why = "its slots are read as one with those of another cache"
            unmatched.append((c.info, Refusal.at(f"{c.info.source}: {why}", c.info.node)))
    return sorted(kept, key=candidates.index)


def _candidates(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Possible slot axes: one axis, or two adjacent ones (frames, tokens)."""
    one: list[tuple[int, ...]] = [(d,) for d in range(len(shape)) if shape[d] > 1]
    two = [(d, d + 1) for d in range(len(shape) - 1) if shape[d] > 1 and shape[d + 1] > 1]
    return one + two


def _find_cache(
    host: HostInfo, exprs: Exprs, info: InputInfo, hints: dict[Any, list[tuple[int, ...]]],
    calibrate: bool, raw_only: bool,
) -> Cache | Refusal | None:  # fmt: skip
    try:
        shape = shape_of(info.node)
    except NotLocal as e:
        return Refusal.at(str(e), info.node) if info.mutated else None
    if len(shape) < 2 or not (info.node.meta["val"].is_floating_point()):
        return None
    tried = hints.setdefault(shape, _candidates(shape))
    seen: list[LocalAnalysis] = []
    for dims in list(tried):
        an = LocalAnalysis(host, exprs, info, dims, calibrate=calibrate, raw_only=raw_only)
        seen.append(an)
        try:
            cache = _as_cache(info, an) if _attends(an) else None
        except NotLocal:
            cache = None  # a size that changes from call to call
        if cache is None:
            continue
        tried.remove(dims)
        tried.insert(0, dims)
        return cache
    return _why_not(info, seen) if info.mutated else None


# What ends a region is told in this order: the first is the cause of others further down.
_CAUSES = ("known on the device", "reduces over the slots", "along the slots", "different work")


def _why_not(info: InputInfo, seen: Sequence[LocalAnalysis]) -> Refusal | None:
    """The likeliest reason, over all slot axes that were tried: where rows join kept ones, and most
    of the work was followed. None for a tensor that is written and not read."""

    def followed(an: LocalAnalysis) -> tuple[bool, int]:
        final = an.val(an.final)
        kept = final is not None and final.expr.contains(an.vals[an.base.node].expr)
        return kept and bool(final and final.expr.sources()), len(an.vals)

    most = max(map(followed, seen), default=(False, 0))

    def rank(end: tuple[LocalAnalysis, fx.Node, str]) -> tuple[bool, int, int]:
        an, user, reason = end
        stored = user.target is aten.copy_.default
        cause = next((i for i, c in enumerate(_CAUSES) if c in reason), len(_CAUSES))
        return stored, cause, an.host.index[user]

    ends = [(an, u, r) for an in seen if followed(an) == most for _, u, r in an.ends]
    if not ends:
        return None
    _, user, reason = min(ends, key=rank)
    return Refusal.at(f"{info.source}: {reason}", user)


def _as_cache(info: InputInfo, an: LocalAnalysis) -> Cache | None:
    val = an.vals[info.node]
    if not info.mutated:
        # A tensor that is only read counts as a cache if new rows join it for the attention and
        # nothing else is made of it; otherwise any activation would look like one.
        joined = [
            v for n, u, _ in an.ends
            if (v := an.val(n)) and _attention_like(order.Ordered(v.dims, 0), n, u)
        ]  # fmt: skip
        if len(joined) < len(an.ends) or not all(v.expr.sources() for v in joined):
            return None
        entries = [e for s in an.sources.values() for e in s.entries]
        # padding, known on the host, may join later
        if not all(e.fn.is_layout or an.host.on_host(e.node) for e in entries):
            return None
        if not any(e.fn.is_layout for e in entries):
            return None
        commit = val.expr
    else:
        if an.final is None:
            return None
        final = an.val(an.final)
        assert final is not None
        if final.fn.key != val.fn.key or final.dims != val.dims:
            return None  # what is stored is not raw slots
        if final.expr.shape != val.expr.shape or not final.expr.contains(val.expr):
            return None  # overwritten as a whole, or made anew from itself: nothing to keep
        commit = final.expr
    return Cache(info, an.dims, an, commit, {s.index: s for s in an.sources.values()})


def _attends(an: LocalAnalysis) -> bool:
    """Whether some use of the slots contracts them as attention does its keys or values.

    Products that pair a cache with another cache are judged later, with all caches known; here the
    key side of a product is enough.
    """
    start = {n: order.Ordered(v.dims, 0) for n, _, _ in an.ends if (v := an.val(n)) is not None}
    ends = {(n, u) for n, u, _ in an.ends if n in start}
    found = order.OrderAnalysis(an.host, start, ends)
    return found.attends or any(_attention_like(o, n, u) for n, u, o in _edges(found, ends, start))


def _edges(found: order.OrderAnalysis, ends: Any, start: Any) -> list[Any]:
    """(node, user, where its slots are) for all uses seen by an order analysis."""
    out = [(n, u, start[n]) for n, u in ends]
    for n, o in found.vals.items():
        out += [(n, u, o) for u in n.users]
    return out


def _attention_like(o: order.Ordered, node: fx.Node, user: fx.Node) -> bool:
    """Whether ``user`` uses ``node`` as attention uses its keys or values."""
    if len(o.dims) != 1:
        return False
    rank = len(shape_of(node))
    if user.target in (order.attention, order.flex_attention):
        return node in user.args[1:3] and o.dims == (rank - 2,)
    if user.target in (aten.bmm.default, aten.mm.default):
        return (user.args[1] is node and o.dims[0] >= rank - 2) or o.dims == (rank - 2,)
    return False


def _below_statistic(fn: Fn, user: fx.Node) -> Fn:
    """A whole-cache statistic reads the work below its ``abs`` or ``pow``: no storage for those."""
    while user.target in REDUCE and fn.kind == "op" and is_pointwise(fn.target):
        if len(fn.children) != 1 or any(isinstance(a, Operand) for a in fn.args):
            break
        if fn.dtype != fn.children[0].dtype:
            break
        fn = fn.children[0]
    return fn


def _peel(fn: Fn) -> Fn:
    """The part of ``fn`` worth storing: layout on top is free at read time, unless it enlarges."""
    f = fn
    while f.kind == "item" or (f.kind == "op" and f.target in (LAYOUT | PICKS)):
        child = f.children[0]
        if f.kind == "item":
            if child.target not in PICKS:
                return f  # one output of several
            child = child.children[0]
        if _features(f) > _features(child):
            return fn  # repeats heads: the copy would come back at every read
        if _joins_parts(f, child):
            return f  # pairs of features stay side by side: one axis, that a query contracts with
        f = child
    return f


def _joins_parts(f: Fn, child: Fn) -> bool:
    """Whether ``f`` makes real features of the parts of complex ones."""
    parts = f.kind == "op" and child.kind == "op" and child.target is aten.view_as_real.default
    return parts and f.target is aten.reshape.default and f.shape[-1] == 2 * child.shape[-2]


def _features(f: Fn) -> int:
    return int(np.prod([s for s in off_slots(f.shape, f.dims) if s != -1]))


def _stored_fp8(
    caches: list[Cache], reads_fp8: Callable[[Fn], Fn | None]
) -> dict[tuple[fx.Node, fx.Node], Fn]:
    """(operand, attention) -> the FP8 values behind it, where keys and values both have such."""
    found: dict[tuple[fx.Node, fx.Node], Fn] = {}
    for c in caches:
        for node, user, _ in c.analysis.ends:
            v = c.analysis.val(node)
            if user.target is order.attention and v is not None and unfit(user) is None:
                fn = reads_fp8(v.fn)
                if fn is not None:
                    found[node, user] = fn
    both = {u for _, u in found if all((a, u) in found for a in u.args[1:3])}
    return {k: fn for k, fn in found.items() if k[1] in both}


def _queries(cohorts: list[Cohort], stored: Mapping[tuple[fx.Node, fx.Node], Fn]) -> None:
    for cohort in cohorts:
        for view in cohort.views:
            for node, user, _ in view.uses:
                query = user.args[0] if (node, user) in stored else None
                if isinstance(query, fx.Node) and user.args[1] is node:
                    cohort.queries.append((user, query))


def _group(caches: list[Cache], stored: Mapping[tuple[fx.Node, fx.Node], Fn]) -> list[Cohort]:
    groups: dict[Any, Cohort] = {}
    for c in caches:
        views: dict[Any, View] = {}
        for node, user, _ in c.analysis.ends:
            v = c.analysis.val(node)
            if v is None:
                continue
            fn = _peel(stored.get((node, user), _below_statistic(v.fn, user)))
            view = views.setdefault(fn.key, View(0, fn, []))
            view.uses.append((node, user, v))
            view.by_read.setdefault(v.expr.key, fn)
        uses = sorted(
            (u for v in views.values() for u in v.uses),
            key=lambda u: c.analysis.host.index[u[1]],
        )
        reads = list({v.expr.key: v.expr for _, _, v in uses}.values())
        shape = shape_of(c.info.node)
        sig = (
            tuple(shape[d] for d in c.dims),
            tuple(e.key for e in reads),
            c.commit.key,
            c.info.node.meta["val"].device,
        )
        cohort = groups.setdefault(sig, Cohort([], [], reads, c.commit))
        for view in views.values():
            view.cache = len(cohort.caches)
            tables = [(o.axes, o.key) for o in view.tables()]
            # views of a class are read at the same events: what one holds, all hold
            at = [i for i, e in enumerate(reads) if e.key in view.by_read]
            view.klass = f"{structural_key(view.fn, consts=False)}|{tables}|{at}"
            cohort.views.append(view)
        cohort.caches.append(c)
    return list(groups.values())


def _order(plan: CachePlan) -> None:
    """Run the order analysis over all cohorts at once and record what it says."""
    start: dict[fx.Node, order.Ordered] = {}
    ends: set[tuple[fx.Node, fx.Node]] = set()
    for i, cohort in enumerate(plan.cohorts):
        for view in cohort.views:
            for node, user, v in view.uses:
                start[node] = order.Ordered(v.dims, (i, v.expr.key))
                ends.add((node, user))
    result = order.OrderAnalysis(plan.host, start, ends)
    for (i, _), (reason, node) in result.sensitive.items():
        plan.cohorts[i].refuse("ring_cache", Refusal.at(reason, node))
    for b in result.biases:
        plan.cohorts[b.token[0]].biases.append(b)


def _events(plan: CachePlan, cohort: Cohort) -> None:
    """Lay out reads and commit as events, and count fresh rows with the first call's ints."""
    lengths = {e.count for e in cohort.reads}
    if len(lengths) != 1:
        cohort.refuse(
            "ring_cache", Refusal(f"reads of {sorted(lengths)} slots in one call: one length only")
        )
        cohort.refuse("hoist_rope", cohort.refusals["ring_cache"][-1])
        return
    env = HostProgram(
        plan.host, {n for e in (*cohort.reads, cohort.commit) for n in e.host_nodes()}
    )
    vals = env.run(plan.sample, {}) if not env.const_inputs else None
    if vals is None:
        refusal = Refusal("slots move by an index tensor that the module holds")
        cohort.refuse("ring_cache", refusal)
        cohort.refuse("hoist_rope", refusal)
        return
    chain = [*cohort.reads]
    if cohort.commit.key != cohort.reads[-1].key:
        chain.append(cohort.commit)
    cohort.unified = cohort.capacity == cohort.slots and all(
        b.contains(a) for a, b in itertools.pairwise(chain)
    )
    cohort.events = [event_of(e, vals) for e in (chain if cohort.unified else cohort.reads)]
    cohort.stored = event_of(cohort.commit, vals)
    counts = cohort.caches[0].sources
    for event in (*cohort.events, cohort.stored):
        if any(m > counts[k].count for k, m in event.present):
            refusal = Refusal("a fresh row stands in two slots at once")
            cohort.refuse("ring_cache", refusal)
            cohort.refuse("hoist_rope", refusal)


def event_of(expr: SlotExpr, vals: Mapping[fx.Node, Any]) -> Event:
    ids = evaluate(expr, vals).ravel()
    source, _ = split_row_ids(ids[ids < 0])
    return Event(expr, [(int(k), int((source == k).sum())) for k in np.unique(source)])


def moves_slots(plan: CachePlan, cohort: Cohort) -> bool:
    """Whether a call copies whole-cache data about: kept slots change place, or a copy is read."""
    base = cohort.caches[0].analysis.vals[cohort.caches[0].info.node].expr
    if cohort.capacity != cohort.slots:
        return True
    nodes = {n for e in (*cohort.reads, cohort.commit) for n in e.host_nodes()}
    vals = HostProgram(plan.host, nodes).run(plan.sample, {})
    home = evaluate(base, vals).ravel()
    for e in (*cohort.reads, cohort.commit):
        ids = evaluate(e, vals).ravel()
        if ((ids >= 0) & (ids != home)).any():
            return True
    return any(not cohort.commit.contains(e) for e in cohort.reads)


__all__ = ["Cache", "CachePlan", "Cohort", "Event", "Refusal", "View", "build"]
