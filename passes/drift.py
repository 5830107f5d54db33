"""What will the tables do? A look ahead on the host, before anything is compiled.

Every int input but sizes is advanced by one a call, from the first call's values, and the tables of
each view class are read as the runtime will read them. A kept slot whose row changes must be
computed again, unless the change is one rotation common to most slots: then the queries are turned
instead, and only the other slots (the sink) are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from rtc.passes import entries
from rtc.passes.analysis.exprs import evaluate
from rtc.passes.analysis.host import HostProgram
from rtc.passes.analysis.layout import Fallback
from rtc.passes.analysis.tables import changed
from rtc.passes.plan import CachePlan, Cohort, Refusal, View, moves_slots
from rtc.passes.rotation import Rotation, find, rotated, score_axis

LOOK_AHEAD = 100  # calls; the published model resets its positions every 42
# Above this share of kept slots to compute again in most calls, hoisting would save nothing.
TOO_MANY = 0.5


@dataclass
class Drift:
    """``rotations``: view class -> rotation, for classes that turn within the look-ahead."""

    refusal: Refusal | None = None
    notes: list[str] = field(default_factory=list)
    rotations: dict[str, Rotation] = field(default_factory=dict)


@dataclass
class Turn:
    """One call's change of a class: the common rotation, and the slots that do not share it."""

    common: np.ndarray  # [D] complex
    odd: np.ndarray  # mask over kept slots


def common_turn(old: np.ndarray, new: np.ndarray, eps: float) -> Turn | None:
    """The rotation that most kept slots share between two sets of turns [n, D], or None.

    ``eps``: precision of the tables. None where no candidate is a pure rotation.
    """
    tol = 8 * eps  # rounding of two tables; more would be a silent error
    live = old != 0  # a turn of nothing is nothing
    if live.all():
        ratio = new / old
        pure = (np.abs(np.abs(ratio) - 1.0) <= tol).all(1)
    else:
        ratio = np.where(live, new / np.where(live, old, 1.0), 1.0)
        pure = (np.abs(np.abs(ratio) - 1.0) <= tol).all(1) & (live | (new == 0)).all(1)
    best: Turn | None = None
    # first, last, middle and quarter points: a turn shared by most slots shows at one of them
    for i in dict.fromkeys(int(q * (len(old) - 1)) for q in (0.5, 0.75, 0.25, 1.0, 0.0)):
        if not pure[i] or (best is not None and best.odd.sum() < len(old) / 2):
            continue
        odd = (_square(ratio - ratio[i]) > tol * tol).any(1) | ~pure
        if best is None or odd.sum() < best.odd.sum():
            best = Turn(ratio[i] / np.abs(ratio[i]), odd)
    return best


def _square(z: np.ndarray) -> np.ndarray:
    return z.real * z.real + z.imag * z.imag


def apart(old: np.ndarray, new: np.ndarray, eps: float) -> np.ndarray:
    """Mask of turns [n, D] that differ by more than rounding."""
    with np.errstate(invalid="ignore"):
        scale = np.maximum(_square(old), _square(new))
        far = _square(new - old) > (8 * eps) ** 2 * scale
    odd = ~(np.isfinite(old) & np.isfinite(new)) & (old != new) & ~(np.isnan(old) & np.isnan(new))
    return (far | odd).any(1)


def drift(plan: CachePlan, cohort: Cohort) -> Drift:
    """Look ahead for every view class of a cohort."""
    with _disable_current_modes(), torch.no_grad():  # compile time has fake tensors in force
        return _drift(plan, cohort)


def _drift(plan: CachePlan, cohort: Cohort) -> Drift:
    out = Drift()
    classes: dict[str, View] = {}
    for v in cohort.views:
        if v.tables():
            classes.setdefault(v.klass, v)
    if not classes:
        return out
    nodes = {n for e in (*cohort.reads, cohort.commit) for n in e.host_nodes()}
    for v in classes.values():
        for read in v.by_read:
            for o in v.tables(read):
                nodes |= {n for n, _ in o.entries}.union(*(e.host_nodes() for _, e in o.entries))
            for reader in entries.tables(plan.host, cohort, v, read).readers:
                nodes |= reader.nodes
    host = HostProgram(plan.host, nodes)
    if host.const_inputs:
        # the module's own tables: their values are not there yet at compile time
        out.notes.append("tables come from module attributes: changes are followed at run time")
        for klass, v in classes.items():
            rot = _foldable(cohort, klass, v)
            if rot is not None and (host.int_inputs or moves_slots(plan, cohort)):
                out.rotations[klass] = rot
        return out
    for klass, v in classes.items():
        _look(plan, cohort, klass, v, host, out)
    return out


def _look(
    plan: CachePlan, cohort: Cohort, klass: str, v: View, host: HostProgram, out: Drift
) -> None:
    expr = next(e for e in reversed(cohort.reads) if any(u[2].expr.key == e.key for u in v.uses))
    tables = entries.tables(plan.host, cohort, v, expr.key)
    rot = _foldable(cohort, klass, v)
    before: tuple[np.ndarray, np.ndarray] | None = None
    heavy = moved = folded = calls = 0
    odd_slots = 0
    for t in range(LOOK_AHEAD):
        memo: dict[Any, Any] = {}
        try:
            env = host.run(plan.coming(t), {})
            ids = evaluate(expr, env, memo).ravel()
            if t == 0:
                for reader in tables.readers:
                    reader.verify(env)
            keys = tables.keys(expr, ids, env, memo)
        except (Fallback, IndexError):
            break
        except Exception:  # ints that go another way in truth may lead anywhere
            if t == 0:
                raise
            break
        if before is not None:
            at, old = before
            kept = (ids >= 0) & (at[np.maximum(ids, 0)] >= 0)
            src = at[np.maximum(ids, 0)][kept]
            bad = (old[src] != keys[kept]).any(1)
            if bad.any():
                have, rows = tables.rows(env, old[src]), tables.rows(env, keys)
                want = [r[torch.from_numpy(np.nonzero(kept)[0])] for r in rows]
                bad[:] = False
                for a, b in zip(have, want, strict=True):
                    bad |= changed(a, b)
            if bad.any():
                moved += 1
                left = bad
                if rot is not None:
                    eps = max(torch.finfo(r.dtype).eps for r in rows)
                    old_turns, new_turns = (rot.turns(r, half=True) for r in (have, want))
                    if not (rot.straight(old_turns, eps) and rot.straight(new_turns, eps)):
                        rot = turn = None
                    else:
                        turn = common_turn(old_turns, new_turns, eps)
                    if turn is not None and turn.odd.sum() < bad.sum():
                        folded += 1
                        left = turn.odd
                odd_slots = max(odd_slots, int(left.sum()))
                heavy += left.sum() > TOO_MANY * len(left)
            calls += 1
        stored = evaluate(cohort.commit, env, memo).ravel()
        before = (_positions(ids, stored), keys)
    if heavy > calls / 2:
        names = ", ".join(o.node.name for o in v.tables())
        out.refusal = Refusal.at(
            f"the table rows of most kept slots change from call to call, and not by one common "
            f"rotation ({names})",
            v.uses[0][0],
        )
        return
    if folded and rot is not None:
        out.rotations[klass] = rot
        out.notes.append(
            f"positions turn in {moved} of {calls} coming calls: folded into the queries in "
            f"{folded}, at most {odd_slots} slots computed again in one call"
        )
    elif moved:
        out.notes.append(
            f"table rows change in {moved} of {calls} coming calls: at most {odd_slots} slots "
            "computed again in one call"
        )


def _positions(read: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """For each stored slot, the position at which the read held it, or -1."""
    order = np.argsort(read, kind="stable")
    pos = np.minimum(np.searchsorted(read, stored, sorter=order), len(read) - 1)
    at = order[pos]
    return np.where(read[at] == stored, at, -1)


def _foldable(cohort: Cohort, klass: str, v: View) -> Rotation | None:
    """The class's rotation, if every use of every view of the class contracts with a query, and
    all fresh rows are rotated here."""
    alike = [w for w in cohort.views if w.klass == klass]
    if any(score_axis(w, u) is None for w in alike for u in w.uses):
        return None
    for w in alike:
        at = rotated(w.fn)
        if at is None or not entries.goes_through(cohort, w, at):
            return None
    return find(v)
