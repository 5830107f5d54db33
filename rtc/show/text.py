"""Reports on a terminal. No colour when piped: rich leaves it out."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rtc.show.facts import PassRow, bytes_text, cache_groups, pass_rows, work_rows

_STYLE = {"applied": "green", "partly applied": "yellow", "refused": "yellow", "off": "dim"}


def console(*, stderr: bool = False) -> Console:
    """rich takes 80 columns where there is no terminal; text for a file or a grep wants more."""
    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else 140
    return Console(file=file, width=width, highlight=False, soft_wrap=not file.isatty())


def table(*columns: str, right: tuple[str, ...] = (), title: str | None = None) -> Table:
    out = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        out.add_column(name, justify="right" if name in right else "left", header_style="dim")
    return out


def print_passes(con: Console, passes: list[dict[str, Any]]) -> None:
    t = table("pass", "tier", "default", "switch", "what it does")
    for p in passes:
        default = "on" if p["default"] else "off"
        t.add_row(p["name"], p["tier"], default, p["switch"], Text(p["summary"]))
    con.print(t)


def print_report(con: Console, report: dict[str, Any]) -> None:
    """Every graph of ``Report.to_dict()``."""
    for graph in report["graphs"]:
        seconds = ", ".join(f"{k} {v:.1f} s" for k, v in graph["seconds"].items())
        con.print(Text(f"{graph['name']}: {graph['nodes']:,} nodes ({seconds})", style="bold"))
        for row in pass_rows(graph):
            print_pass(con, row)
        _print_work(con, graph)
        _print_caches(con, graph)


def print_pass(con: Console, row: PassRow) -> None:
    head = Text.assemble("  ", (f"{row.name:<24}", "bold"), f"{row.tier:<10}")
    head.append(row.verdict, style=_STYLE.get(row.verdict, "dim"))
    if row.enabled and row.matched:
        head.append(f": {row.applied} of {row.matched} places")
    con.print(head)
    for r in row.refused:
        times = f"{r.count} x " if r.count > 1 else ""
        con.print(Text(f"    refused {times}{r.reason}"))
        if r.place:
            con.print(Text(f"      at {r.place}", style="dim"))
    for note in row.notes:
        con.print(Text(f"    {note}"))


def _print_work(con: Console, graph: dict[str, Any]) -> None:
    rows = work_rows(graph)
    if not rows:
        return
    t = table("  whole-cache work in one call, elements", "before", "after", "removed",
              right=("before", "after", "removed"))  # fmt: skip
    for row in rows:
        removed = "-" if row.removed is None else f"{row.removed:.0%}"
        t.add_row(f"  {row.label}", f"{row.before:,}", f"{row.after:,}", removed)
    con.print()
    con.print(t)


def _print_caches(con: Console, graph: dict[str, Any]) -> None:
    groups = cache_groups(graph)
    con.print()
    if not groups:
        con.print(Text("  no caches found: no input is written back by slots", style="dim"))
        return
    t = table("  caches", "shape", "slots", "new", "order", "views", "view memory", "names",
              right=("slots", "new", "view memory"))  # fmt: skip
    for g in groups:
        names = g.names[0] if len(g.names) == 1 else f"{g.names[0]} ... {g.names[-1]}"
        shape = " x ".join(map(str, g.shape))
        t.add_row(
            f"  {len(g.names)}", shape, str(g.slots), str(g.new_rows), g.order,
            ", ".join(g.views) or "-", bytes_text(g.view_bytes), Text(names),
        )  # fmt: skip
    con.print(t)
