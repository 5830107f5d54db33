"""What bench_step.py prints: a row a side."""

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def _number(digits: int, scale: float = 1.0) -> Callable[[Any], str]:
    return lambda value: f"{value * scale:.{digits}f}"


# Heading, where the value stands in a row, how it is written.
_COLUMNS: list[tuple[str, str, Callable[[Any], str]]] = [
    ("error", "error", lambda v: f"{v:.1e}"),
    ("first s", "first_s", _number(1)),
    ("warm s", "warm_s", _number(1)),
    ("median ms", "median_ms", _number(2)),
    ("p95 ms", "p95_ms", _number(2)),
    ("mean ms", "mean_ms", _number(2)),
    ("late ms", "late_ms", _number(2)),
    ("host ms", "host_ms", _number(2)),
    ("reset", "reset_ratio", _number(3)),
    ("worst reset", "reset_over_median", _number(3)),
    ("worst", "worst_over_median", _number(3)),
    ("TFLOP/s", "tflops", _number(1)),
    ("% FP8", "fp8_peak", _number(1, 100)),
    ("W", "power.power_w", _number(0)),
    ("max W", "power.power_max_w", _number(0)),
    ("MHz", "power.sm_mhz", _number(0)),
    ("C", "power.temperature_c", _number(0)),
    ("peak GB", "memory.peak", _number(1, 1e-9)),
    ("rest GB", "memory.rest", _number(1, 1e-9)),
    ("first GB", "memory.first_peak", _number(1, 1e-9)),
    ("left GB", "memory.left", _number(2, 1e-9)),
    ("resv GB", "memory.reserved", _number(1, 1e-9)),
    ("used GB", "memory.used", _number(1, 1e-9)),
]


def table(rows: dict[str, Row]) -> str:
    """Columns that no row fills are left out."""
    cells = [
        [head, *(_cell(row, path, form) for row in rows.values())] for head, path, form in _COLUMNS
    ]
    kept = [["", *rows], *(column for column in cells if any(c != "-" for c in column[1:]))]
    widths = [max(map(len, column)) for column in kept]
    lines = []
    for i in range(len(rows) + 1):
        first, *rest = ((column[i], width) for column, width in zip(kept, widths, strict=True))
        lines.append("  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]))
    failed = [f"{name} FAILED: {row['failed']}" for name, row in rows.items() if "failed" in row]
    return "\n".join([*lines, *failed])


def progress(name: str, row: Row) -> str:
    """One line for a side that is done."""
    if "failed" in row:
        return f"{name}: FAILED: {row['failed']}"
    calls = " ".join(f"{s:.1f}" for s in row["first_calls_s"][:4])
    extra = f", host {row['host_ms']:.2f} ms" if "host_ms" in row else ""
    extra += f", {row['graphs']} compiled" if "graphs" in row else ""
    return (
        f"{name}: first calls {calls} s, error {row['error']:.1e}, "
        f"median {row['median_ms']:.2f} ms of {row['steps']} steps{extra}"
    )


def _cell(row: Row, path: str, form: Callable[[Any], str]) -> str:
    value: Any = row
    for key in path.split("."):
        value = (value or {}).get(key)
    return "-" if value is None else form(value)
