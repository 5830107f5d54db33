"""The rows that every rendering of a report shows, from ``Report.to_dict()``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rtc.names import readable, source_name

Graph = dict[str, Any]

WORK_LABELS = {
    "whole_cache_elements": "computed over whole caches",
    "copy_elements": "copied about in caches",
}


@dataclass(frozen=True)
class Refused:
    """One reason at one line of the user's code, ``where`` (empty if unknown), for these nodes."""

    reason: str
    where: str
    nodes: tuple[str, ...]
    count: int

    @property
    def place(self) -> str:
        """Line and node in a few words; empty where neither is known."""
        named = f"node {self.nodes[0]}" if self.nodes else ""
        if len(self.nodes) > 1:
            named += f" and {len(self.nodes) - 1} more"
        return ", ".join(x for x in (self.where, named) if x)


@dataclass(frozen=True)
class PassRow:
    """What one pass decided in one graph."""

    name: str
    tier: str
    enabled: bool
    matched: int
    applied: int
    refused: tuple[Refused, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """One word: off, nothing to do, applied, refused or partly applied."""
        if not self.enabled:
            return "off"
        if not self.matched:
            return "nothing to do"
        if not self.applied:
            return "refused"
        return "applied" if self.applied >= self.matched else "partly applied"


def pass_rows(graph: Graph) -> list[PassRow]:
    out = []
    for p in graph["passes"]:
        found: dict[tuple[str, str], list[str]] = {}
        for r in p["refused"]:
            found.setdefault((readable(r["reason"]), r["where"]), []).append(r["node"])
        refused = tuple(
            Refused(*key, tuple(n for n in dict.fromkeys(nodes) if n), len(nodes))
            for key, nodes in found.items()
        )
        out.append(
            PassRow(
                p["name"], p["tier"], p["enabled"], p["matched"], p["applied"],
                refused, tuple(map(readable, p["notes"])),
            )
        )  # fmt: skip
    return out


@dataclass
class CacheGroup:
    """Caches that are alike but for their names. ``view_bytes``: memory of their views together."""

    shape: tuple[int, ...]
    slots: int
    new_rows: int
    order: str
    views: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    view_bytes: int = 0


def cache_groups(graph: Graph) -> list[CacheGroup]:
    groups: dict[Any, CacheGroup] = {}
    for c in graph["caches"]:
        key = (tuple(c["shape"]), c["slots"], c["new_rows"], c["order"], tuple(c["views"]))
        group = groups.setdefault(key, CacheGroup(*key))
        group.names.append(source_name(c["name"]))
        group.view_bytes += c.get("view_bytes", 0)
    return list(groups.values())


@dataclass(frozen=True)
class WorkRow:
    """Elements of one kind of whole-cache work in one call, before and after the passes."""

    key: str
    label: str
    before: int
    after: int

    @property
    def removed(self) -> float | None:
        """Share that is gone; None where there was nothing."""
        return 1 - self.after / self.before if self.before else None


def work_rows(graph: Graph) -> list[WorkRow]:
    before, after = graph["work"].get("before", {}), graph["work"].get("after", {})
    return [WorkRow(k, WORK_LABELS.get(k, k), n, after.get(k, 0)) for k, n in before.items()]


def count_text(n: float) -> str:
    """12_345_678 as ``12.3 M``."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(n) >= limit:
            return f"{n / limit:.3g}{unit}"
    return f"{n:.3g}" if isinstance(n, float) else str(n)


def bytes_text(n: int) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if n >= 1000 * 1024 ** (power - 1):
            return f"{n / 1024**power:.3g} {unit}"
    return f"{n} B"


def faster_text(ratio: float) -> str:
    """1.29 as ``1.29x faster``, 0.8 as ``1.25x slower``."""
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def number_text(x: float | None) -> str:
    """An error or a tolerance in short scientific form."""
    if x is None:
        return "-"
    return "0" if x == 0 else f"{x:.1e}"
