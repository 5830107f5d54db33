"""The result of ``rtc run`` on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from rtc.show.facts import bytes_text, pass_rows
from rtc.show.text import table


def print_run(con: Console, result: dict[str, Any]) -> None:
    """Result of ``rtc.run.run``: times and memory of each rank, and what the passes did."""
    ranks = result["ranks"]
    count = f"{len(ranks)} ranks, " if len(ranks) > 1 else ""
    title = f"{result['target']}: {count}{result['steps']} steps"
    grown = ", ".join(f"{k} by {v}" for k, v in result["advanced"].items())
    con.print(Text.assemble((title, "bold"), f" ({grown} a step)" if grown else ""))
    numbers = ("median ms", "p95 ms", "first call", "peak memory")
    t = table("rank", "device", *numbers, right=numbers)
    for r in ranks:
        t.add_row(
            str(r["rank"]), r["device"], f"{r['median_ms']:.2f}", f"{r['p95_ms']:.2f}",
            f"{r['first_call_s']:.1f} s", bytes_text(r["peak_memory_bytes"]),
        )  # fmt: skip
    con.print(t)
    for graph in result["report"]["graphs"]:
        con.print(Text(f"{graph['name']}: {graph['nodes']:,} nodes", style="bold"))
        for row in pass_rows(graph):
            if row.enabled and row.matched:
                con.print(f"  {row.name}: {row.applied} of {row.matched} places")
    runtime = result["report"]["runtime"]
    con.print(f"{runtime['calls']} calls, {runtime['plain_calls']} on the plain path")
    for note in runtime["notes"]:
        con.print(Text(f"  note    {note}", style="yellow"))
