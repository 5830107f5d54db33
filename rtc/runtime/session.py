"""What one compiled model keeps between calls: its states, and what happened so far."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from rtc.errors import StateError
from rtc.runtime import guard
from rtc.runtime.owners import (
    OWNERS,
    TURN,
    UNDER_WAY,
    guard_all,
    keepers,
    met,
    owns,
    release,
    states,
    under_way,
)
from rtc.runtime.reach import MOST, tensors
from rtc.runtime.state import CohortState, Counters


@dataclass
class Session:
    """What one compiled model keeps: its states, and what happened so far."""

    write_back: bool = False
    watches: bool = True  # between calls the caches are guarded
    counters: Counters = field(default_factory=Counters)
    states: list[CohortState] = field(default_factory=list)
    touched: list[CohortState] = field(default_factory=list)
    calls: int = 0
    plain_calls: int = 0
    calibrations: int = 0
    plain_in_a_row: int = 0
    undone: bool = False  # in this call, what another graph had made of a cache
    notes: list[str] = field(default_factory=list)
    epoch: int = 0  # how often the user said that something was written unseen
    closed: bool = False
    # caches that do not hang on the arguments, but on the model, say: by id
    hidden: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    # what was lifted for the call under way, until its graph is known
    _lifted: list[CohortState] = field(default_factory=list)
    _values: list[Any] = field(default_factory=list)  # arguments of calls under way

    def before_call(self, values: Any) -> None:
        """Lift the guards of the call's caches, so that they look like plain tensors to Dynamo.

        ``values``: its arguments. Caches of other sessions stay guarded: other threads may look at
        them. Calls of other threads wait until ``after_call``.
        """
        if self.closed:
            raise StateError("this compiled model was closed: compile the model again")
        TURN.acquire()
        self.undone = False
        used: list[CohortState] = []
        UNDER_WAY.append(used)
        self._values.append(values)
        self._lifted = []
        try:
            used += met(values)
            hidden = keepers(t for ref in self.hidden.values() if (t := ref()) is not None)
            used += [st for st in hidden if all(st is not s for s in used)]
            for st in used:
                live = st.tensors()
                if any(map(guard.guarded, live)):
                    self._lifted.append(st)
                    guard.lift(*live)
            if _steps_aside():
                for st in states():
                    if not under_way(st, UNDER_WAY[:-1]):
                        release(st)
        except BaseException:  # Ctrl-C
            self._end(used)
            raise

    def after_call(self) -> None:
        """Guard the caches until the next call."""
        self.calls += 1
        used = UNDER_WAY[-1]
        try:
            self.after_graph()
        except BaseException:  # Ctrl-C: a cache without its guard would be read in ring order
            self.after_graph()
            raise
        finally:
            self._end(used)

    def _end(self, used: list[CohortState]) -> None:
        try:
            self._values.pop()
            UNDER_WAY.pop()
            try:
                guard_all(self.note, used)
            except BaseException:  # Ctrl-C
                guard_all(self.note, used)
                raise
        finally:
            TURN.release()

    def uses(self, st: CohortState) -> None:
        """The call under way runs on ``st``."""
        if not UNDER_WAY or not self._values:
            return  # torch.compile's own call of the backend "rtc"
        if all(st is not s for s in UNDER_WAY[-1]):
            UNDER_WAY[-1].append(st)
            # its caches came in by a way that is not looked at before a call
            self._hide(st.tensors())

    def _hide(self, caches: Iterable[torch.Tensor]) -> None:
        met_now = {id(t) for t in tensors(self._values[-1], MOST)}
        self.hidden = {k: ref for k, ref in self.hidden.items() if ref() is not None}
        self.hidden |= {id(t): weakref.ref(t) for t in caches if id(t) not in met_now}

    def looks_at(self, values: Iterable[torch.Tensor]) -> None:
        """Dynamo asks these in every call what they are: kept ones must be plain then."""
        if self._values:
            self._hide(t for t in values if id(t) in OWNERS)

    def before_graph(self, args: Sequence[Any], aside: bool = False) -> None:
        """Notice outside writes: here, since AOT's wrapper counts versions up on its own later.

        ``aside``: the graph is not the model's, which is still to come (a hook of the model)."""
        found = keepers(args)
        for st in found:
            self.uses(st)
        if found or not aside:
            self._idle(found)
        for st in found:
            st.check_versions()

    def _idle(self, found: list[CohortState]) -> None:
        """Guard again what was lifted and is not of this graph: sessions that nobody runs now."""
        lifted, self._lifted = self._lifted, []
        for st in lifted:
            if all(st is not s for s in found) and owns(st):
                guard.put(*st.tensors())
                UNDER_WAY[-1][:] = [s for s in UNDER_WAY[-1] if s is not st]

    def after_graph(self) -> None:
        """Note versions once AOT's wrapper has run."""
        self.states = [st for st in self.states if owns(st)]
        for st in self.touched:
            if st.alive:
                st.record_versions()
        self.touched.clear()

    def saturated(self) -> int:
        """Values written beyond a calibrated maximum (clamped); waits for the device."""
        return sum(int(st.saturated.item()) for st in self.states)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def materialize(self) -> None:
        with TURN:
            for st in self.states:
                if owns(st):
                    guard.lift(*st.tensors())
                    st.materialize(between=True)
            guard_all(self.note, self.states)

    def invalidate(self) -> None:
        self.materialize()
        self.epoch += 1
        for st in self.states:
            st.invalidate()

    def release_all(self) -> None:
        with TURN:
            for st in self.states:
                release(st)
            self.states.clear()

    def close(self) -> None:
        self.release_all()
        self.closed = True


def _steps_aside() -> bool:
    """Whether Dynamo may run the model itself, eagerly or by another backend
    (``torch.compiler.set_stance``, a dispatch mode): its caches must be in order then."""
    stance: Any = eval_frame._stance
    if stance.stance not in ("default", "fail_on_recompile") or stance.backend is not None:
        return True
    return bool(is_in_torch_dispatch_mode(False))
