"""Move whole-cache slot-local work (RoPE, key norms, casts, layout) from read time to write time.

Before:
    k: f64[B, S, H, D] = cos * c1 + sin * rotate(c1)     # c1: the cache after this call's write
    o = attention(q, k, v)
After:
    r: f64[B, T, H, D] = cos[new] * rows + sin[new] * rotate(rows)
    w: f64[B, S, H, D] = write(view, r)
    o = attention(q, w, v)

Refuses: tables that depend on device data; different work on different slots; whole-cache
statistics; fresh rows that join in the middle of the work; reads of several lengths in one call;
tables that change for most kept slots from call to call by more than one common rotation.
Numerics: exact (the same ops on the same values, on fewer slots).
"""

from __future__ import annotations

from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.drift import drift
from rtc.passes.entries import can_write
from rtc.passes.plan import Cohort, Refusal


def _legal(cohort: Cohort) -> Refusal | None:
    if cohort.refusals.get("hoist_rope"):
        return cohort.refusals["hoist_rope"][0]
    for view in cohort.views:
        cache = cohort.caches[view.cache]
        for event in cohort.events:
            if not any(u[2].expr.key == event.expr.key for u in view.uses):
                continue
            for k, _ in event.present:
                reason = can_write(cache, cache.sources[k], view.fn)
                if reason:
                    return Refusal.at(reason, view.uses[0][0])
    return None


def _in_order(ctx: Context, cohort: Cohort) -> bool:
    """Whether the views will be kept in the program's own order."""
    return not ctx.on("ring_cache") or bool(cohort.refusals.get("ring_cache"))


def run(ctx: Context) -> Outcome:
    out = Outcome()
    for info, refusal in ctx.plan.unmatched:
        out.matched += 1
        out.refused.append(refusal)
        del info
    for cohort in ctx.plan.cohorts:
        work = [v for v in cohort.views if v.fn.arithmetic()]
        out.matched += len(work)
        if not work:
            continue
        refusal = _legal(cohort)
        if refusal is None and len(cohort.reads) > 1 and _in_order(ctx, cohort):
            refusal = Refusal("several reads in one call, and the slots must stay in order")
        if refusal is None:
            found = drift(ctx.plan, cohort)
            refusal = found.refusal
            out.notes += found.notes
            cohort.rotations = found.rotations
        if refusal is not None:
            cohort.refuse("hoist_rope", refusal)
            out.refused += [refusal] * len(work)
            continue
        if _in_order(ctx, cohort):
            note = (
                "views stay in the program's own order: their slots are copied in every call, "
                "which may cost more than the work that was moved (ring_cache writes in place)"
            )
            out.notes += [note] if note not in out.notes else []
        cohort.hoist = True
        out.applied += len(work)
    return out


PASS = Pass("hoist_rope", "exact", run, "whole-cache RoPE and other slot-local work to write time")
