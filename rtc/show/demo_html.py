"""The HTML report of ``rtc demo``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rtc.show import charts
from rtc.show.facts import bytes_text, count_text, faster_text, number_text, work_rows
from rtc.show.html import graph_sections, pairs
from rtc.show.page import TIMES, Raw, box, cell, details, page, section, table, tile

_CSS = {"eager": "c-eager", "stock": "c-stock", "rtc": "c-rtc"}


def demo_page(result: dict[str, Any]) -> str:
    """Everything that ``rtc demo`` measured."""
    graphs = (result["report"] or {}).get("graphs", [])
    body = [_head(result), *_problems(result), _tiles(result, graphs)]
    body += [_steps(result), _medians(result), _switches(result)]
    for graph in graphs:
        body += graph_sections(graph, "")
    body += [_correctness(result), _compile(result, graphs), _setting(result)]
    return page("rtc demo", body)


def _head(result: dict[str, Any]) -> str:
    s, m = result["settings"], result["machine"]
    if result["interrupted"]:
        badge = '<span class="badge warn">interrupted</span>'
    elif result["failures"]:
        badge = '<span class="badge bad">a check failed</span>'
    else:
        badge = '<span class="badge ok">all checks passed</span>'
    cfg, chunks = s["config"], result["chunks"]
    calls = cfg["passes"] * cfg["layers"]
    slots = cfg["sink"] + cfg["window"] * (cfg["grid_h"] * cfg["grid_w"] + cfg["cond_tokens"])
    return (
        f"<h1>rtc demo {badge}</h1>"
        f"<p>Preset <b>{cell(s['preset'])}</b>, {cell(s['dtype'])}: {cfg['layers']} layers {TIMES} "
        f"{cfg['passes']} denoising passes = {calls} attention calls a step, each over its own "
        f"cache of {slots:,} slots. {chunks['done']} of {chunks['planned']} chunks streamed.</p>"
        f'<p class="dim">{cell(m.get("gpu") or m.get("cpu", ""))}, {m.get("threads", "?")} '
        f"thread(s), torch {cell(m.get('torch', ''))}, rtc {cell(m.get('rtc', ''))}, "
        f"{cell(result['started'])}.</p>"
    )


def _problems(result: dict[str, Any]) -> list[str]:
    out = [box(f, "bad") for f in result["failures"]]
    if result["interrupted"]:
        out.append(
            box(f"Interrupted while: {result['interrupted']}. What follows is what was measured.")
        )
    return out + [box(n) for n in result["notes"]]


def _tiles(result: dict[str, Any], graphs: list[dict[str, Any]]) -> str:
    out = []
    by = {v["key"]: v for v in result["variants"]}
    for key, name in (("stock", "torch.compile"), ("eager", "eager")):
        r = result["speedup"].get(key)
        if r:
            text = f"than {name} (middle half of chunks: {r['p25']:.2f}-{r['p75']:.2f}{TIMES})"
            out.append(tile(faster_text(r["median"]), text))
    if "median_ms" in by.get("rtc", {}):
        out.append(tile(f"{by['rtc']['median_ms']:.1f} ms", "rtc, median step"))
    rows = [w for g in graphs for w in work_rows(g)]
    before, after = sum(w.before for w in rows), sum(w.after for w in rows)
    if before:
        out.append(
            tile(
                f"{1 - after / before:.0%}",
                f"of {count_text(before)} elements of whole-cache work removed",
            )
        )
    ex = result["exactness"]
    if ex:
        out.append(
            tile(number_text(ex["max_abs_error"]), f"largest error in float64, {ex['steps']} steps")
        )
    return f'<div class="tiles">{"".join(out)}</div>' if out else ""


def _timed(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [v for v in result["variants"] if "median_ms" in v]


def _steps(result: dict[str, Any]) -> str:
    skip, resets = result["chunks"]["skipped"], result["chunks"]["resets"]
    timed = _timed(result)
    series = [charts.Series(v["label"], _CSS[v["key"]], v["step_ms"][skip:], skip) for v in timed]
    lead = (
        "Every chunk goes through all of them in turn. At a reset the positions of the whole "
        "window jump back: large dots."
    )
    rows = [
        (v["label"], f"{v['reset_ms']:.1f} ms", f"{v['reset_ratio']:.2f}{TIMES}")
        for v in timed
        if v.get("reset_ratio")
    ]
    note = table(("", "reset step", "to a median step"), rows, right=(1, 2)) if rows else ""
    return section(
        "Step times", charts.legend([(s.label, s.css) for s in series]) if series else "",
        charts.step_chart(series, resets, "Step time over chunks"), note, lead=lead,
    )  # fmt: skip


def _medians(result: dict[str, Any]) -> str:
    timed = _timed(result)
    bars = []
    for v in timed:
        text = f"{v['median_ms']:.1f} ms"
        ratio = result["speedup"].get(v["key"])
        if ratio:
            text += f", rtc is {faster_text(ratio['median'])}"
        bars.append(
            charts.Bar(v["label"], _CSS[v["key"]], v["median_ms"], text, v["p05_ms"], v["p95_ms"])
        )
    rows = [
        (v["label"], *(f"{v[k]:.1f}" for k in _QUANTILES), v["chunks"])
        for v in timed
    ]  # fmt: skip
    names = ("ms a step", "median", "5 %", "25 %", "75 %", "95 %", "fastest", "chunks")
    return section(
        "Medians",
        charts.bar_chart(bars, "median step time, ms; whiskers: 5 % to 95 % of chunks", "Medians"),
        table(names, rows, right=range(1, 8)) if rows else "",
        lead="Ratios are medians over chunks of the two times of the same chunk. "
        f"The first {result['chunks']['skipped']} chunks (compiling, warming up) are left out.",
    )


_QUANTILES = ("median_ms", "p05_ms", "p25_ms", "p75_ms", "p95_ms", "min_ms")


def _switches(result: dict[str, Any]) -> str:
    bars = []
    for r in result["switches"]:
        text = f"{r['median_ms']:.1f} ms"
        if r["ratio"] and not r["full"]:
            text += f", {r['ratio']['median']:.2f}{TIMES} rtc"
        css = "c-rtc" if r["full"] else "c-part"
        bars.append(charts.Bar(r["label"], css, r["median_ms"], text, r["p05_ms"], r["p95_ms"]))
    return section(
        "What each pass is worth",
        charts.bar_chart(bars, "median step time, ms", "rtc with passes switched off", 240),
        lead="rtc with passes switched on one after the other, timed side by side in a run of "
        "their own; the last is rtc with everything that applied.",
    )


def _correctness(result: dict[str, Any]) -> str:
    c, ex, out = result["comparison"], result["exactness"], []
    if ex:
        verdict = "passed" if ex["passed"] else "failed"
        out.append(
            (
                f"rtc, preset {ex['preset']}, {ex['dtype']}", f"{ex['steps']} steps, caches too",
                "eager", number_text(ex["max_abs_error"]), number_text(ex["bound"]),
                Raw(f'<span class="s-{verdict}">{verdict}</span>'),
            )
        )  # fmt: skip
    bound = number_text(ex["bound"]) if c["against"] == "eager" and ex else "as said above"
    labels = {v["key"]: v["label"] for v in result["variants"]}
    for where, what in (
        ("output", f"outputs of {c['chunks']} chunks"),
        ("cache", f"{c['caches']} caches"),
    ):
        errors = c["max_abs_error"][where]
        for key in [*(k for k in labels if k in errors), *(k for k in errors if k not in labels)]:
            ours = key not in ("eager", "stock")
            verdict = ("passed" if c["passed"] else "failed") if ours else ""
            out.append(
                (
                    labels.get(key, f"rtc, {key}"), what, c["against"], number_text(errors[key]),
                    bound if ours else "", Raw(f'<span class="s-{verdict}">{verdict}</span>'),
                )
            )  # fmt: skip
    if not out:
        return ""
    names = ("who", "what", "against", "largest error", "bound", "")
    return section(
        "Correctness", table(names, out, right=(3, 4)),
        lead=f"For the preset streamed above, rtc has to be {c['rule']}.",
    )  # fmt: skip


def _compile(result: dict[str, Any], graphs: list[dict[str, Any]]) -> str:
    rows = []
    for v in result["variants"]:
        if v.get("cold_s") is not None:
            warm = "-" if v.get("warm_s") is None else f"{v['warm_s']:.1f} s"
            rows.append((v["label"], f"{v['cold_s']:.1f} s", warm))
    if not rows:
        return ""
    parts = ", ".join(f"{k} {v:.1f} s" for g in graphs for k, v in g["seconds"].items())
    return section(
        "Compile time",
        table(
            ("first call", "code cache empty", "new process, code cache filled"), rows,
            right=(1, 2),
        ),
        f'<p class="dim">Inside rtc: {cell(parts)}.</p>' if parts else "",
    )  # fmt: skip


def _setting(result: dict[str, Any]) -> str:
    m = {**result["machine"]}
    if "memory_bytes" in m:
        m["memory"] = bytes_text(m.pop("memory_bytes"))
    if "busy_cores" in m:
        m["cores used by others before the run"] = m.pop("busy_cores")
    s = result["settings"]
    rest = {k: v for k, v in s.items() if not isinstance(v, Mapping)}
    runtime = (result["report"] or {}).get("runtime", {})
    runtime = {k: v for k, v in runtime.items() if k != "step_seconds"}
    return section(
        "Machine and settings", pairs(m),
        details("Options of rtc.compile", pairs(s["options"])),
        details("Settings of the demo", pairs({**rest, "run took": f"{result['seconds']} s"})),
        details("The model", pairs(s["config"])),
        details("What the runtime did", pairs(runtime)) if runtime else "",
    )  # fmt: skip
