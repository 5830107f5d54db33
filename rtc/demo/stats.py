"""Statistics of step times. Medians, since a shared machine has outliers on one side only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

NEAR = 8  # steps on either side of a reset that it is compared with
SKIP = 2  # chunk 0 compiles, chunk 1 may still warm up


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between the two nearest; NaN of nothing."""
    if not values:
        return math.nan
    v = sorted(values)
    at = q * (len(v) - 1)
    low = int(at)
    high = min(low + 1, len(v) - 1)
    return v[low] + (v[high] - v[low]) * (at - low)


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def steps(seconds: Sequence[float], resets: Sequence[int], skip: int = SKIP) -> dict[str, Any]:
    """Milliseconds over the chunks from ``skip`` on, resets apart from the others.

    ``reset_ratio``: a reset step over the median of the steps around it; None without a reset.
    """
    ms = [1e3 * s for s in seconds]
    jumps = {r for r in resets if skip <= r < len(ms)}
    plain = [x for i, x in enumerate(ms) if i >= skip and i not in jumps]
    at_reset = [ms[r] for r in sorted(jumps)]
    near = [ms[i] / median(_around(ms, i, jumps, skip)) for i in sorted(jumps)]
    if not plain:
        return {}
    middle = median(plain)
    timed = ms[skip:]
    return {
        "chunks": len(timed),
        "median_ms": middle,
        "p05_ms": quantile(timed, 0.05),
        "p25_ms": quantile(timed, 0.25),
        "p75_ms": quantile(timed, 0.75),
        "p95_ms": quantile(timed, 0.95),
        "min_ms": min(timed),
        "reset_ms": median(at_reset) if at_reset else None,
        "reset_ratio": median(near) if near else None,
    }


def _around(ms: Sequence[float], at: int, jumps: set[int], skip: int) -> list[float]:
    """The ``NEAR`` steps on either side: a machine's speed may change over a run."""
    found = range(max(skip, at - NEAR), min(len(ms), at + NEAR + 1))
    return [ms[i] for i in found if i not in jumps] or [math.nan]


def paired_ratio(
    slow: Sequence[float], fast: Sequence[float], skip: int = SKIP
) -> dict[str, float] | None:
    """slow / fast of the same chunk: a machine that slows down for a while slows both."""
    pairs = [a / b for a, b in list(zip(slow, fast, strict=False))[skip:]]
    if not pairs:
        return None
    return {
        "median": median(pairs),
        "p25": quantile(pairs, 0.25),
        "p75": quantile(pairs, 0.75),
    }
