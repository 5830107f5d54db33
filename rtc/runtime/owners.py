"""Who keeps which cache, over all compiled models of the process: two of them may share caches."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo.callback

from rtc.runtime import guard
from rtc.runtime.reach import MOST, tensors
from rtc.runtime.state import CohortState

# id of a user's tensor -> the states that keep (a part of) it
OWNERS: dict[int, list[CohortState]] = {}
_STATES: dict[int, CohortState] = {}  # all of them, by id
_FINALIZERS: dict[int, Any] = {}
# A call lifts and guards the caches of all models: threads take turns, with whole calls.
TURN = threading.RLock()


def owners(t: Any) -> list[CohortState]:
    """The states that keep ``t`` or parts of it."""
    states = OWNERS.get(id(t)) if isinstance(t, torch.Tensor) else None
    return [st for st in states if st.keeps(t)] if states else []


def keepers(values: Iterable[Any]) -> list[CohortState]:
    """The states that keep (parts of) some of these values, each once."""
    found: dict[int, CohortState] = {}
    last: list[CohortState] = []
    for t in values:
        states = OWNERS.get(id(t))
        if states is None or states == last:
            continue  # hundreds of caches have one state
        for st in states:
            if id(st) not in found and st.keeps(t):
                found[id(st)] = st
        last = [st for st in states if id(st) in found]
    return list(found.values())


def owns(st: CohortState) -> bool:
    """Whether ``st`` still keeps its caches: another graph may have taken them over."""
    return not st.released and st.alive


def take(st: CohortState, tensors: Iterable[torch.Tensor]) -> None:
    """Note that ``st`` keeps these tensors from now on."""
    _STATES[id(st)] = st
    for t in tensors:
        OWNERS.setdefault(id(t), []).append(st)
        if id(t) not in _FINALIZERS:
            final = _FINALIZERS[id(t)] = weakref.finalize(t, _forget, id(t))
            final.atexit = False


def release(st: CohortState) -> None:
    """Give the caches back to the user, in order, and forget the views."""
    guard.lift(*st.tensors())
    st.materialize()
    for h in st.handles:
        _drop(h.key[0], st)
    _STATES.pop(id(st), None)
    st.released = True
    st.storages.clear()
    st.classes.clear()
    st.kept.clear()


def _drop(ident: int, st: CohortState) -> None:
    rest = [s for s in OWNERS.get(ident, ()) if s is not st]
    if rest:
        OWNERS[ident] = rest
        return
    OWNERS.pop(ident, None)
    final = _FINALIZERS.pop(ident, None)
    if final is not None:
        final.detach()


def _forget(ident: int) -> None:
    """A cache tensor died: its states go, and the tensors they also kept are put in order."""
    _FINALIZERS.pop(ident, None)
    guard.forget(ident)
    for st in OWNERS.get(ident, []).copy():
        release(st)


def states() -> list[CohortState]:
    """All states, each once."""
    return list(_STATES.values())


def yield_to_dynamo(*args: Any) -> None:
    """Another function is being compiled: it gets plain tensors, in order.

    Dynamo does not trace through a guard. A later call of that function finds the type changed and
    asks again; what it computes is right either way.
    """
    # what rtc itself compiles is seen to write, or is no function over these caches at all
    own = bool(UNDER_WAY) and TURN._is_owned()  # type: ignore[attr-defined]
    for st in states():
        if any(guard.guarded(t) for t in st.tensors()):
            guard.lift(*st.tensors())
            st.materialize(between=True)
            st.touched_outside(False, not own)


def _hear_of_compiles() -> None:
    """``torch._dynamo.reset()`` forgets callbacks: register again with every call."""
    handler = torch._dynamo.callback.callback_handler
    if yield_to_dynamo not in handler.start_callbacks:
        handler.register_start_callback(yield_to_dynamo)


def lift_all() -> None:
    """Make all kept caches plain tensors, as Dynamo must see them."""
    for st in states():
        guard.lift(*st.tensors())


def met(values: Any) -> list[CohortState]:
    """States that keep guarded tensors among a call's arguments, each once."""
    found: dict[int, CohortState] = {}
    last: Any = None
    for t in tensors(values, MOST):
        here = OWNERS.get(id(t))
        if here is None or here == last:
            continue  # hundreds of caches have one state
        for st in here:
            if st.keeps(t):
                found[id(st)] = st
        last = here
    return list(found.values())


# States of calls under way, innermost last: a call inside of one (a custom op makes it) leaves the
# caches of the others as they are.
UNDER_WAY: list[list[CohortState]] = []


def under_way(st: CohortState, calls: Iterable[list[CohortState]] = UNDER_WAY) -> bool:
    return any(st is s for used in calls for s in used)


def guard_all(note: Callable[[str], None], which: Iterable[CohortState] | None = None) -> None:
    """Watch kept caches until the next call, all or those of ``which``; keep in order those that
    cannot be watched."""
    _hear_of_compiles()
    for st in states() if which is None else [st for st in which if id(st) in _STATES]:
        if under_way(st):
            continue
        live = st.tensors()
        if st.write_back:
            st.materialize()
        if not st.watched:
            # nothing watches these tensors but their version counters
            st.untrusted = any(t.is_inference() or not guard.alone(t) for t in live)
        elif st.exported or not guard.possible(live):
            st.materialize()
            st.untrusted = True
            note(
                "caches are kept in order and views made anew in every call: something else holds "
                "their memory (a view, a detached or NumPy alias, a state_dict)"
            )
        else:
            st.untrusted = False
            guard.put(*live)
