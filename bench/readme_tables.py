"""Write the README's result tables from bench/results: ``python bench/readme_tables.py``."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def rows(name: str) -> list[dict[str, Any]]:
    path = ROOT / "bench" / "results" / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def latest(lines: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """The last line of each configuration."""
    out: dict[str, dict[str, Any]] = {}
    for line in lines:
        out[repr([line.get(k) for k in keys])] = line
    return list(out.values())


def steps() -> list[str]:
    out = [
        "| model, machine, torch | eager | torch.compile | rtc | rtc against torch.compile | "
        "reset step | whole-cache elements a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in latest(rows("step.jsonl"), "preset", "machine", "config"):
        s = r["sides"]
        ms = [f"{s[k]['median_ms']:.0f} ms" for k in ("eager", "torch.compile", "rtc")]
        reset = s["rtc"].get("reset_ratio") or s["rtc"]["reset_over_median"]
        work = r["work"][0]
        what = r["preset"] + (", calibrated" if r["config"]["quantize"] == "calibrated" else "")
        out.append(
            f"| {what}; {r['machine']}; {r['torch']} | {' | '.join(ms)} | "
            f"{r['speedup_over_stock']:.2f}x | {f'{reset:.2f}x' if reset else '-'} | "
            f"{work['before']['whole_cache_elements']:,} -> "
            f"{work['after']['whole_cache_elements']:,} |"
        )
    return out


def compiles() -> list[str]:
    out = ["| model | graphs, nodes | cold | warm |", "|---|---|---|---|"]
    for r in latest(rows("compile.jsonl"), "preset", "machine"):
        c, w = r["cold"], r["warm"]
        out.append(
            f"| {r['preset']} (60 layers), {r['machine']} | {c['graphs']}, {c['nodes']:,} | "
            f"{c['seconds']:.0f} s | {w['seconds']:.0f} s |"
        )
    return out


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    body = "\n".join(["", *steps(), "", *compiles(), ""])
    readme.write_text(f"{head}{BEGIN}{body}{END}{tail}")


if __name__ == "__main__":
    main()
