"""Move whole-cache quantization to write time, with scales calibrated once a session.

Before:
    s: f32[B, 1, H, 1] = amax(abs(k), [1, 3]) / 448       # over all slots, in every call
    q: f8[B, S, H, D]  = to_f8(clamp(k / s))
    o = attention(q8, f32(q) * s, v)
After:
    r: f8[B, T, H, D]  = to_f8(clamp(rows / s_cal))       # s_cal: measured once, times a margin
    o = attention(q8, write(view, f32(r) * s_cal), v)

Refuses: without consent (``Options(quantize="calibrated")``), since a whole-cache maximum makes
every slot of a view depend on every other; maxima of anything but the magnitudes of slot-local
work; maxima that are used for anything but casting to FP8 and back, each element by its own.
Numerics: changes (the scale is held; rows beyond it are clamped, and counted on the device).
Quantization by fixed scales needs no consent: ``hoist_rope`` moves it like any slot-local work.
"""

from __future__ import annotations

from rtc.passes.analysis.slots import AMAX
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.plan import Refusal


def run(ctx: Context) -> Outcome:
    out = Outcome()
    for cohort in ctx.plan.cohorts:
        scales = cohort.scales()
        out.matched += len(scales)
        out.applied += len(scales)
        for cache in cohort.caches:
            for _, user, reason in cache.analysis.ends:
                if user.target in AMAX and "over the slots" in reason:
                    out.matched += 1
                    why = (
                        "a whole-cache amax: hoisting it changes numerics and needs your consent, "
                        "Options(quantize='calibrated')"
                    )
                    if "over the slots, and" in reason:
                        why = f"calibrated scales are those of FP8 casts: {reason}"
                    out.refused.append(Refusal.at(why, user))
    return out


PASS = Pass("hoist_quantize", "numerics", run, "whole-cache quantization to write time")
