"""Replace window shifts by copying with writes of the fresh rows in place.

Before:
    c1 = cat([c[:, :sink], c[:, sink + T:], new], 1);  o = attention(q, c1, v);  copy_(c, c1)
After:
    c1 = index_put(c, [None, idx], new);               o = attention(q, c1, v);  copy_(c, c1)
with ``idx`` the places of the evicted slots, tracked on the host.

Refuses: consumers that depend on the order of the slots (causal and distance masks on device data,
scans, convolutions, a cache returned to the caller); work at read time that could not be hoisted.
Numerics: exact (attention sums its slots in another order).
"""

from __future__ import annotations

from rtc.passes.base import Context, IllegalCombination, Outcome, Pass
from rtc.passes.entries import can_write
from rtc.passes.plan import Cohort, Refusal, build, moves_slots


def _check_combination(ctx: Context) -> None:
    """Ring order with tables applied at read time by slot order is wrong: never silently."""
    full = build(ctx.host, ctx.inputs, ctx.sample)
    for cohort in full.cohorts:
        for view in cohort.views:
            if any(o.axes is not None for o in view.tables()) and moves_slots(full, cohort):
                where = Refusal.at("", view.uses[0][0])
                raise IllegalCombination(
                    f"ring_cache is on and hoist_rope is off, but {where.node} ({where.where}) "
                    "applies a table by slot order at read time: in ring order every slot would "
                    "get another slot's row. Switch ring_cache off as well, or hoist_rope on."
                )


def _legal(cohort: Cohort) -> Refusal | None:
    if cohort.refusals.get("ring_cache"):
        return cohort.refusals["ring_cache"][0]
    if cohort.arithmetic and not cohort.hoist:
        return Refusal("its read has work that was not hoisted")
    for view in cohort.views:
        cache = cohort.caches[view.cache]
        for event in cohort.events:
            for k, _ in event.present:
                reason = can_write(cache, cache.sources[k], view.fn)
                if reason:
                    return Refusal.at(reason, view.uses[0][0])
    return None


def run(ctx: Context) -> Outcome:
    out = Outcome()
    if not ctx.on("hoist_rope"):
        _check_combination(ctx)
    for _, refusal in ctx.plan.unmatched:
        out.matched += 1
        out.refused.append(refusal)
    for cohort in ctx.plan.cohorts:
        if not cohort.events:
            out.matched += len(cohort.caches)
            out.refused += cohort.refusals["ring_cache"] * len(cohort.caches)
            continue
        moves = moves_slots(ctx.plan, cohort)
        # taking turns with a graph that does move them, it would have them put in order every time
        others = any(c.info.source in ctx.rings for c in cohort.caches) and ctx.on("hoist_rope")
        if not (moves or cohort.hoist or others):
            continue
        out.matched += len(cohort.caches)
        refusal = _legal(cohort)
        if refusal is not None:
            out.refused += [refusal] * len(cohort.caches)
            continue
        cohort.order = "ring"
        out.applied += len(cohort.caches)
    return out


PASS = Pass("ring_cache", "exact", run, "window shift by copying -> write in place")
