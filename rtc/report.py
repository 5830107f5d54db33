"""What was decided and done: as data for programs, as text for people."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import fx

from rtc.names import readable, source_name
from rtc.options import Options
from rtc.passes.analysis.host import InputInfo
from rtc.passes.pipeline import Result
from rtc.runtime.session import Session
from rtc.work import count_work

_DEEP = 1000  # nodes of a graph whose tracing takes more than a second


@dataclass
class GraphReport:
    """One captured graph."""

    name: str
    nodes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    passes: list[dict[str, Any]] = field(default_factory=list)
    work: dict[str, dict[str, int]] = field(default_factory=dict)
    caches: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    regions: dict[str, int] = field(default_factory=dict)  # how it was cut up, if it was
    whole: str = ""  # why its layers were not traced once for all of them, if they were not
    _indices: list[int] = field(default_factory=list)
    _since: float = field(default_factory=time.perf_counter)

    def starts(self, at: float) -> None:
        """The first phase began at ``at``, a ``time.perf_counter()``."""
        self._since = at

    def ends(self, phase: str) -> None:
        """All time since the phase before belongs to ``phase``: none is left out."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def before(self, gm: fx.GraphModule, inputs: Sequence[InputInfo]) -> None:
        self.nodes = len(gm.graph.nodes)
        self._indices = [i.index for i in inputs if i.mutated and not i.is_int]
        nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.work["before"] = count_work(gm, [nodes[i] for i in self._indices])

    def after(self, gm: fx.GraphModule, result: Result) -> None:
        self.work["after"] = count_work(gm, _cache_nodes(gm, self._indices, result))
        for name, (p, enabled, out) in result.outcomes.items():
            self.passes.append(
                {
                    "name": name,
                    "tier": p.tier,
                    "enabled": enabled,
                    "matched": out.matched,
                    "applied": out.applied,
                    "refused": [{**asdict(r), "reason": readable(r.reason)} for r in out.refused],
                    "notes": [readable(n) for n in out.notes],
                }
            )
        for cohort in result.plan.cohorts:
            for i, c in enumerate(cohort.caches):
                views = [v for v in cohort.views if v.cache == i]
                self.caches.append(
                    {
                        **_facts(c.info),
                        "slot_dims": list(c.dims),
                        "slots": c.slots,
                        "new_rows": sum(m for _, m in cohort.stored.present)
                        if cohort.stored
                        else 0,
                        "order": cohort.order,
                        "views": ["raw" if v.raw else f"{v.fn.arithmetic()} ops" for v in views],
                        "view_bytes": sum(
                            math.prod(v.storage_shape(cohort.capacity)) * v.fn.dtype.itemsize
                            for v in views
                            if not (cohort.unified and v.raw) and cohort.order != "plain"
                        ),
                    }
                )
        for info, refusal in result.plan.unmatched:
            self.caches.append(
                {
                    **_facts(info), "slot_dims": [], "slots": 0, "new_rows": 0, "order": "plain",
                    "views": [], "view_bytes": 0, "refused": readable(refusal.reason),
                }
            )  # fmt: skip


def _facts(info: InputInfo) -> dict[str, Any]:
    val = info.node.meta["val"]
    return {
        "name": source_name(info.source),
        "shape": [int(s) if isinstance(s, int) else str(s) for s in val.shape],
        "dtype": str(val.dtype).removeprefix("torch."),
        "bytes": val.dtype.itemsize * math.prod(s if isinstance(s, int) else 0 for s in val.shape),
    }


def _cache_nodes(gm: fx.GraphModule, indices: Sequence[int], result: Result) -> list[fx.Node]:
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    indices = [*indices, *(i.index for i in result.inputs if i.part is not None)]
    views = zip(result.rewritten.extras, result.rewritten.nodes, strict=True)
    return [nodes[i] for i in indices] + [n for e, n in views if e.kind == "view"]


@dataclass
class Report:
    """``to_dict()`` for programs, ``str()`` for people."""

    graphs: Sequence[GraphReport]
    session: Session
    options: Options
    step_seconds: Sequence[float]

    def to_dict(self) -> dict[str, Any]:
        from rtc import __version__

        s = self.session
        return {
            "rtc": __version__,
            "torch": torch.__version__,
            "graphs": [
                {k: v for k, v in asdict(g).items() if not k.startswith("_")} for g in self.graphs
            ],
            "runtime": {
                "calls": s.calls,
                "plain_calls": s.plain_calls,
                **asdict(s.counters),
                "saturated_values": s.saturated(),
                "notes": list(s.notes),
                "state_bytes": sum(
                    t.numel() * t.element_size() for st in s.states for t in st.storages.values()
                ),
                "step_seconds": list(self.step_seconds),
            },
            "options": self.options.to_dict(),
        }

    def counts(self) -> dict[str, int]:
        """Pass name -> places applied, over all graphs."""
        out: dict[str, int] = {}
        for g in self.graphs:
            for p in g.passes:
                out[p["name"]] = out.get(p["name"], 0) + p["applied"]
        return out

    def __str__(self) -> str:
        lines = []
        for g in self.graphs:
            secs = ", ".join(f"{k} {v:.1f} s" for k, v in g.seconds.items())
            lines.append(f"{g.name}: {g.nodes} nodes ({secs})")
            for p in g.passes:
                state = f"{p['applied']} of {p['matched']}" if p["enabled"] else "off"
                lines.append(f"  {p['name']:<22} {p['tier']:<9} {state}")
                for r in _grouped(p["refused"]):
                    lines.append(f"    refused {r}")
                for n in p["notes"]:
                    lines.append(f"    {n}")
            lines += [f"  {n}" for n in g.notes]
            if g.whole and g.nodes >= _DEEP:
                lines.append(f"  its layers were traced one by one: {g.whole}")
            if g.work:
                b, a = g.work["before"], g.work.get("after", {})
                for k in b:
                    lines.append(f"  {k.replace('_', ' ')}: {b[k]:,} -> {a.get(k, 0):,}")
        s = self.session
        lines.append(
            f"{s.calls} calls, {s.plain_calls} on the plain path, {s.counters.imports} imports, "
            f"{s.counters.refreshed_slots} slots refreshed"
        )
        lines += [f"  {n}" for n in s.notes]
        return "\n".join(lines)


def _grouped(refused: Sequence[dict[str, str]]) -> list[str]:
    count: dict[str, int] = {}
    for r in refused:
        # calls of one line in many layers make one entry
        at = f" [{r['where'] or r['node']}]" if r["node"] else ""
        text = r["reason"] + at
        count[text] = count.get(text, 0) + 1
    return [f"{n} x: {t}" if n > 1 else t for t, n in count.items()]
