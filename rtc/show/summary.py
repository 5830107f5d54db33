"""The demo's result on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from rtc.show.facts import faster_text, number_text
from rtc.show.text import print_report, table


def print_demo(con: Console, result: dict[str, Any]) -> None:
    """Result of ``rtc.demo.run``: decisions, times, checks."""
    if result["report"]:
        print_report(con, result["report"])
    _times(con, result)
    _switches(con, result)
    _checks(con, result)
    for note in result["notes"]:
        con.print(Text(f"  note    {note}", style="yellow"))


def _times(con: Console, result: dict[str, Any]) -> None:
    rows = [v for v in result["variants"] if "median_ms" in v]
    if not rows:
        return
    numbers = ("median ms", "p5-p95 ms", "rtc is", "reset step", "cold compile", "warm")
    t = table("step", *numbers, right=numbers)
    for v in rows:
        ratio = result["speedup"].get(v["key"])
        reset = f"{v['reset_ratio']:.2f}x" if v["reset_ratio"] else "-"
        cold, warm = (v.get(k) for k in ("cold_s", "warm_s"))
        t.add_row(
            v["label"], f"{v['median_ms']:.1f}", f"{v['p05_ms']:.1f}-{v['p95_ms']:.1f}",
            faster_text(ratio["median"]) if ratio else "-", reset,
            f"{cold:.1f} s" if cold else "-", f"{warm:.1f} s" if warm else "-",
        )  # fmt: skip
    con.print()
    con.print(t)


def _switches(con: Console, result: dict[str, Any]) -> None:
    if not result["switches"]:
        return
    t = table("passes on", "median ms", "to rtc", right=("median ms", "to rtc"))
    for r in result["switches"]:
        ratio = "-" if r["full"] or not r["ratio"] else f"{r['ratio']['median']:.2f}x"
        t.add_row(r["label"], f"{r['median_ms']:.1f}", ratio)
    con.print()
    con.print(t)


def _checks(con: Console, result: dict[str, Any]) -> None:
    con.print()
    ex, c = result["exactness"], result["comparison"]
    if ex:
        _verdict(
            con, ex["passed"],
            f"float64, preset {ex['preset']}: {ex['steps']} steps and {ex['caches']} caches within "
            f"{number_text(ex['max_abs_error'])} of eager (bound {number_text(ex['bound'])})",
        )  # fmt: skip
    if c["chunks"]:
        for where, what in (
            ("output", f"{c['chunks']} chunks"),
            ("cache", f"{c['caches']} caches"),
        ):
            errors = c["max_abs_error"][where]
            if errors:
                said = ", ".join(f"{k} {number_text(v)}" for k, v in errors.items())
                name = result["settings"]["dtype"]
                _verdict(con, c["passed"], f"{name}, {what}: error against {c['against']}: {said}")
        con.print(Text(f"    rule: rtc is {c['rule']}", style="dim"))


def _verdict(con: Console, passed: bool, text: str) -> None:
    word = ("passed", "green") if passed else ("FAILED", "bold red")
    con.print(Text.assemble("  ", word, "  ", text))
