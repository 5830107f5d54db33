"""Pin what each pass did: a pass that stops matching must be seen, not only be slower."""

import re
from collections.abc import Mapping
from typing import Any


def _dict(report: Any) -> Mapping[str, Any]:
    """The report as data, from a `Report`, its `to_dict()`, or a compiled model."""
    if isinstance(report, Mapping):
        return report
    if callable(getattr(report, "report", None)):
        report = report.report()
    if callable(getattr(report, "to_dict", None)):
        return report.to_dict()
    raise TypeError(f"expected a report, its dict or a compiled model, not {type(report).__name__}")


def _passes(report: Any, graph: str | None) -> list[Mapping[str, Any]]:
    graphs = _dict(report)["graphs"]
    names = [g["name"] for g in graphs]
    if graph is not None and graph not in names:
        raise ValueError(f"no graph {graph!r} in the report; there are {names}")
    return [p for g in graphs if graph in (None, g["name"]) for p in g["passes"]]


def pass_counts(report: Any, field: str = "applied", graph: str | None = None) -> dict[str, int]:
    """Sum of `field` ("applied" or "matched") by pass, over all graphs or the named one."""
    if field not in ("applied", "matched"):
        raise ValueError(f"field must be 'applied' or 'matched', not {field!r}")
    counts: dict[str, int] = {}
    for entry in _passes(report, graph):
        counts[entry["name"]] = counts.get(entry["name"], 0) + entry[field]
    return counts


def _refusals(entries: list[Mapping[str, Any]], name: str) -> list[str]:
    found = [r for p in entries if p["name"] == name for r in p["refused"]]
    return [f"{r['reason']} (at {r['node']}, {r['where']})" for r in found]


def assert_pass_counts(
    report: Any, expected: Mapping[str, int], *, field: str = "applied", graph: str | None = None
) -> None:
    """Every named pass did exactly what is pinned, e.g. `{"hoist_rope": 4, "ring_cache": 8}`.

    report   of a compiled model: the model itself, its `report()` or that as a dict
    graph    only this graph; by default the sum over all of them

    The AssertionError gives the reasons of the passes that refused.
    """
    counts, entries = pass_counts(report, field, graph), _passes(report, graph)
    unknown = expected.keys() - counts.keys()
    if unknown:
        raise ValueError(f"no pass {sorted(unknown)} in the report; there are {sorted(counts)}")
    lines = []
    for name, count in expected.items():
        if counts[name] == count:
            continue
        lines.append(f"{name}: {field} {counts[name]}, expected {count}")
        if not all(p.get("enabled", True) for p in entries if p["name"] == name):
            lines.append("  it is switched off")
        lines += [f"  refused: {r}" for r in _refusals(entries, name)]
    if lines:
        raise AssertionError("\n".join(lines))


def assert_refused(report: Any, name: str, match: str, *, graph: str | None = None) -> None:
    """Pass `name` refused at least once for a reason (with node and line) that `match` finds."""
    entries = _passes(report, graph)
    reasons = _refusals(entries, name)
    if not any(re.search(match, r) for r in reasons):
        listed = "".join(f"\n  {r}" for r in reasons) or " nothing"
        raise AssertionError(f"{name} did not refuse for {match!r}; it refused:{listed}")
