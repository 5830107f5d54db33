"""Everything that was measured, as plain data."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rtc.demo import stats

if TYPE_CHECKING:
    from rtc.demo.stages import Demo

WIDE = 1.3  # quarter to three quarters of the step times; one run on a nearly idle machine had 1.05


def collect(demo: Demo, started: float, interrupted: str | None) -> dict[str, Any]:
    """``started``: seconds since the epoch; ``interrupted``: the stage that was cut short."""
    s = demo.settings
    by_key = {x.key: x for x in demo.sides}
    variants = []
    for side in demo.sides:
        ms = [round(1e3 * x, 4) for x in side.seconds]
        row = {"key": side.key, "label": side.label, **stats.steps(side.seconds, s.resets)}
        variants.append({**row, **demo.compile.get(side.key, {}), "step_ms": ms})
    speedup = {}
    if "rtc" in by_key and demo.options.lowering != "eager":
        for key in ("stock", "eager"):
            if key in by_key:
                speedup[key] = stats.paired_ratio(by_key[key].seconds, by_key["rtc"].seconds)
        rtc_row = next(v for v in variants if v["key"] == "rtc")
        if rtc_row.get("p75_ms", 0.0) > WIDE * rtc_row.get("p25_ms", 1.0):
            demo.note(
                "the step times spread widely: something else ran on this machine. Ratios are "
                "taken chunk by chunk, so they hold better than the times; run again when idle"
            )
    done = max((len(x.seconds) for x in demo.sides), default=0)
    return {
        "ok": not demo.failures and interrupted is None,
        "interrupted": interrupted,
        "failures": demo.failures,
        "notes": demo.notes,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(started)),
        "seconds": round(time.time() - started, 1),
        "settings": {
            **s.to_dict(),
            "options": demo.options.to_dict(),
            "inductor": demo.inductor,
        },
        "machine": demo.machine,
        "chunks": {
            "planned": s.chunks,
            "done": done,
            "skipped": stats.SKIP,
            "resets": s.resets,
        },
        "exactness": demo.exactness,
        "comparison": demo.check.to_dict(),
        "variants": variants,
        "speedup": speedup,
        "switches": demo.ladder,
        "report": demo.report,
    }
