"""State of one cohort of caches: the views rtc keeps, and where every slot lies.

The user's cache tensors stay the master copy of the raw slots, in ring order while rtc owns them.
Views are derived: any slot of a view can be computed again from the raw slot and the coming call's
table row, so that whatever the host finds changed (an outside write, a position reset) is made good
before the graph runs.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from rtc.errors import StateError
from rtc.passes.analysis.fn import structural_key
from rtc.passes.analysis.host import cut
from rtc.passes.analysis.layout import Placement
from rtc.passes.plan import Cohort
from rtc.runtime import writes
from rtc.runtime.classes import ClassState


class Handle:
    """A cache by weak reference: a tensor of the user's, or one part of a stacked one."""

    def __init__(self, tensor: torch.Tensor, part: tuple[int, int, int] | None) -> None:
        self.ref, self.part = weakref.ref(tensor), part
        self.key = (id(tensor), part)

    def owner(self) -> torch.Tensor | None:
        """The user's tensor, or None if it is gone."""
        return self.ref()

    def overlaps(self, other: Handle) -> bool:
        """Whether the two share memory, as far as tensor objects tell."""
        if self.key[0] != other.key[0]:
            return False
        if self.part is None or other.part is None or self.part[::2] != other.part[::2]:
            return True
        return self.part == other.part

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.part is None:
            return tensor
        with torch.no_grad():
            return cut(tensor, self.part)


class Stamp:
    """Which tensor, and which version of it: a constant is what it was if the stamps agree.

    An inference tensor has no version: what graphs write is counted, and ``epoch`` counts how often
    the user asked to forget.
    """

    def __init__(self, tensor: torch.Tensor, epoch: int) -> None:
        self.ref = weakref.ref(tensor)  # an id may come back once its tensor is gone
        # .data = gives it other memory and counts no version; twice, and the address may be what it
        # was, but not the storage while somebody refers to it
        version = (writes.count(tensor), None) if tensor.is_inference() else tensor._version
        self.rest = (version, tensor.data_ptr(), _memory(tensor), epoch)

    def same(self, other: Stamp) -> bool:
        mine = self.ref()
        return mine is not None and mine is other.ref() and self.rest == other.rest


class Stamps:
    """Stamps of many tensors, compared at once."""

    def __init__(self, tensors: Sequence[torch.Tensor], epoch: int) -> None:
        self.refs = [weakref.ref(t) for t in tensors]
        self.memory = [_memory(t) for t in tensors]
        self.rest = self._rest(tensors, epoch)

    @staticmethod
    def _rest(tensors: Sequence[torch.Tensor], epoch: int) -> tuple[Any, ...]:
        storages = [t.untyped_storage()._cdata for t in tensors]
        return versions(tensors), [t.data_ptr() for t in tensors], storages, epoch

    def are_of(self, tensors: Sequence[torch.Tensor], epoch: int) -> bool:
        """Whether these are the tensors, unchanged; writes to inference tensors cannot be seen."""
        if len(tensors) != len(self.refs):
            return False
        if not all(map(operator.is_, [ref() for ref in self.refs], tensors)):
            return False
        now = self._rest(tensors, epoch)
        return now == self.rest and None not in now[0]


class _Memory(StorageWeakRef):
    """A storage, which no other one is equal to, later ones included, and which is not kept."""

    def __deepcopy__(self, memo: Any) -> _Memory:
        return self  # of a copy, what it holds would be let go of twice

    def __copy__(self) -> _Memory:
        return self


def _memory(tensor: torch.Tensor) -> _Memory:
    return _Memory(tensor.untyped_storage())


def versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """How often each was written; None for inference tensors, which do not count it."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:
        return [None if t.is_inference() else t._version for t in tensors]


_FREED = (
    "a cache tensor was freed while rtc kept its state: hold the tensors for as long as the "
    "compiled model runs on them, or call compiled.close() first"
)


def layout_key(cohort: Cohort) -> tuple[Any, ...]:
    """Graphs that agree on it can share a state: a frame that turns is turned by all of them."""
    views = tuple((v.cache, structural_key(v.fn), v.klass) for v in cohort.views)
    turns = tuple(sorted(cohort.rotations))
    maxima = tuple(
        (i, structural_key(fn), str(n.target), str(n.args[1:]), str(n.kwargs))
        for n, (i, fn) in cohort.scales().items()
    )
    return (cohort.order, cohort.unified, cohort.capacity, cohort.slots, views, turns, maxima)


@dataclass
class Counters:
    imports: int = 0
    materializations: int = 0
    refreshed_slots: int = 0
    folds: int = 0
    replays: int = 0  # calls served from a captured graph
    refresh_replays: int = 0  # refreshes, likewise
    prepared_ahead: int = 0  # calls whose host work was done while the call before ran


class Kept:
    """Inputs of a graph that lie on the device from call to call, with their numbers.

    Nobody but rtc has these tensors: while the object is the same they are, and lie, as before.
    """

    def __init__(
        self, scales: tuple[Any, Any], values: dict[int, torch.Tensor], inputs: int
    ) -> None:
        self.scales, self.values = scales, values
        self.row: list[torch.Tensor | None] = [values.get(i) for i in range(inputs)]
        self.mark = object()  # may be held for longer than the tensors should live


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
        self._refs = [h.ref for h in self.by_id.values()]  # of the user's tensors, each once
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
                self.storages[j] = torch.empty(
                    v.storage_shape(cap), dtype=v.storage_dtype, device=dev
                )
            self.axes[j] = v.axis
            self.classes.setdefault(v.klass, ClassState(np.full(cap, -1, dtype=np.int64)))
        self.versions: list[int | None] = [None] * len(self._refs)  # of the user's tensors
        self.write_back = False  # the caches must be in order after every call
        self.watched = True  # guarded between calls
        self.exported = False  # its memory was handed out: it must stay in order
        self.untrusted = False  # writes cannot be seen: views are made anew in every call
        self.dirty = False  # a tensor without a version counter was touched from outside
        self.consts: list[Stamp] | None = None
        # captured steps that run on this state; one goes with the graph that it replays
        self.steps: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        # of a graph, by cohort: inputs that stay while the scales do, with their numbers
        self.kept: weakref.WeakKeyDictionary[Any, dict[int, Kept]] = weakref.WeakKeyDictionary()
        self.changes = 0  # counts up whenever slots, views or scales are others than before
        self.released = False
        self.tables: dict[str, Stamp] = {}  # constants that tables are made from
        self.scales: list[torch.Tensor] | None = None  # calibrated maxima, None: to be measured
        # sizes of the queries of a graph, by cohort: another graph may ask the views otherwise
        self.queries: weakref.WeakKeyDictionary[Any, dict[int, list[torch.Tensor]]]
        self.queries = weakref.WeakKeyDictionary()
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
        return [t for ref in self._refs if (t := ref()) is not None]

    @property
    def alive(self) -> bool:
        return len(self.tensors()) == len(self._refs)

    def lies_on(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors behind its caches, in the cohort's order."""
        mine = [h.ref() for h in self.handles]
        return len(mine) == len(tensors) and all(map(operator.is_, mine, tensors))

    def caches(self) -> list[torch.Tensor]:
        """The caches (parts cut out of stacked tensors), in the cohort's order."""
        out = []
        for h in self.handles:
            t = h.ref()
            if t is None:
                raise StateError(_FREED)
            out.append(t if h.part is None else h.cut(t))
        return out

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
        # it may be the garbage collector that calls, in the middle of another model's tracing
        with _disable_current_modes():
            self._put_in_order()

    def _put_in_order(self) -> None:
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
        self.changes += 1
        self.counters.materializations += 1
        if self.alive:
            self.record_versions()

    def invalidate(self) -> None:
        """The caches were written from outside: every view is out of date."""
        self.changes += 1
        n = len(self.cids)
        self.cids = self.next_cid + np.arange(n, dtype=np.int64)
        self.next_cid += n
        self.place.content = self.cids.copy()
        if not self.unified:
            self.view_place.content[:] = -1
        for c in self.classes.values():
            c.invalidate()
        self.forget_scales()
        self.counters.imports += 1

    def _check_untouched(self) -> None:
        """Raise StateError if a cache in ring order was written past the guard."""
        for ref, version in zip(self._refs, self.versions, strict=True):
            t = ref()
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
        live = self.tensors()
        if len(live) < len(self._refs):
            raise StateError(_FREED)
        now = versions(live)
        if now == self.versions:
            return
        for t, then, new in zip(live, self.versions, now, strict=True):
            if then is None or new is None or then == new:
                continue
            if not self.in_order:
                raise StateError(
                    f"a cache of shape {tuple(t.shape)} was written through another alias while "
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
        live = self.tensors()
        if len(live) < len(self._refs):
            raise StateError(_FREED)
        self.versions = versions(live)

    # -- constants -----------------------------------------------------------------------------

    def check_consts(self, stamps: list[Stamp]) -> None:
        """Constants of the session that entered the views: if one changed, so did every view, and
        what was the largest in it."""
        have = stamps if self.consts is None else self.consts
        if len(have) != len(stamps) or not all(map(Stamp.same, have, stamps)):
            self.drop_views()
            self.forget_scales()
        self.consts = stamps

    def check_tables(self, stamps: Mapping[str, Stamp]) -> None:
        """Constants that tables are made from: keys of rows mean nothing once they changed."""
        if any(k in self.tables and not self.tables[k].same(v) for k, v in stamps.items()):
            self.drop_views()
            self.forget_scales()
        self.tables.update(stamps)

    def forget_scales(self) -> None:
        self.scales = None
        self.queries.clear()

    def drop_views(self) -> None:
        self.changes += 1
        for c in self.classes.values():
            c.invalidate()
