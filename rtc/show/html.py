"""The HTML report of ``rtc explain``, and what it shares with the demo's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rtc.show import charts
from rtc.show.facts import (
    PassRow,
    bytes_text,
    cache_groups,
    count_text,
    pass_rows,
    work_rows,
)
from rtc.show.page import TIMES, Raw, cell, details, page, section, table


def explain_page(target: str, report: dict[str, Any]) -> str:
    """What ``rtc explain TARGET`` found."""
    body = [
        f"<h1>rtc explain</h1><p><code>{cell(target)}</code></p>",
        f'<p class="dim">rtc {cell(report["rtc"])}, torch {cell(report["torch"])}. '
        "Traced and decided; nothing was run.</p>",
    ]
    for graph in report["graphs"]:
        many = len(report["graphs"]) > 1
        body += graph_sections(graph, f"{graph['name']}: " if many else "")
    body.append(section("Options", pairs(report["options"])))
    return page(f"rtc explain {target}", body)


# -- one graph -------------------------------------------------------------------------------------


def graph_sections(graph: dict[str, Any], prefix: str) -> list[str]:
    """Work, passes and caches of one graph of a report."""
    rows = work_rows(graph)
    bars = []
    for w in rows:
        bars.append(charts.Bar(w.label, "c-before", w.before, count_text(w.before)))
        gone = "" if w.removed is None else f" ({w.removed:.0%} removed)"
        bars.append(charts.Bar("with rtc", "c-after", w.after, count_text(w.after) + gone))
    chart = charts.bar_chart(
        bars if any(b.value for b in bars) else [],
        "elements in one call", "Whole-cache work before and after", label_width=240,
    )  # fmt: skip
    passes = table(
        ("pass", "tier", "decision", "places", "why"),
        [
            (
                Raw(f'<code class="name">{cell(p.name)}</code>'), p.tier,
                _short(p.verdict, f"s-{p.verdict.split()[0]}"),
                _short(f"{p.applied} of {p.matched}" if p.enabled else "-"), _reasons(p),
            )
            for p in pass_rows(graph)
        ],
    )  # fmt: skip
    groups = cache_groups(graph)
    caches = table(
        ("caches", "shape", "slots", "new a call", "order", "views", "view memory"),
        [
            (
                Raw(_names(g.names)), f" {TIMES} ".join(map(str, g.shape)), g.slots, g.new_rows,
                g.order, ", ".join(g.views) or "-", bytes_text(g.view_bytes),
            )
            for g in groups
        ],
        right=(2, 3, 6),
    ) if groups else '<p class="dim">No input is written back by slots.</p>'  # fmt: skip
    lead = (
        "A view is what the model computes from a cache, kept and updated for new rows only; "
        "raw means that the cache is read as it is. In ring order new rows overwrite the oldest."
    )
    return [
        section(
            f"{prefix}Whole-cache work", chart,
            lead="Counted in the graph, before and after the passes: a count, not a timing.",
        ),
        section(f"{prefix}Passes", passes, lead=f"One graph of {graph['nodes']:,} nodes."),
        section(f"{prefix}Caches", caches, lead=lead),
    ]  # fmt: skip


def _short(text: str, css: str = "") -> Raw:
    return Raw(f'<span class="short {css}">{cell(text)}</span>')


def _reasons(p: PassRow) -> Raw:
    out = []
    for r in p.refused:
        times = f"{r.count} {TIMES} " if r.count > 1 else ""
        place = f'<br><span class="mono">{cell(r.place)}</span>' if r.place else ""
        out.append(f'<p class="reason">{cell(times + r.reason)}{place}</p>')
    out += [f'<p class="reason">{cell(n)}</p>' for n in p.notes]
    return Raw("".join(out))


def _names(names: list[str]) -> str:
    if len(names) <= 2:
        return "<br>".join(f"<code>{cell(n)}</code>" for n in names)
    items = "".join(f"<code>{cell(n)}</code><br>" for n in names)
    return f"<b>{len(names)}</b> " + details(f"{names[0]} ... {names[-1]}", items)


def pairs(values: Mapping[str, Any]) -> str:
    return table(("", ""), [(k.replace("_", " "), v) for k, v in values.items()])
