"""Write the README's result tables from bench/results: ``python bench/readme_tables.py``."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FP8_PEAK = 1979  # TFLOP/s, dense, of an H200 by its datasheet
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def rows(name: str) -> list[dict[str, Any]]:
    path = ROOT / "bench" / "results" / name
    lines = path.read_text().splitlines() if path.exists() else []
    return [{"world": 1, **json.loads(line)} for line in lines]  # old lines do not say it


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
    found = [r for r in rows("step.jsonl") if " of " not in r["preset"]]
    for r in latest(found, "preset", "machine", "config", "world"):
        s = r["sides"]
        ms = [f"{s[k]['median_ms']:.0f} ms" for k in ("eager", "torch.compile", "rtc")]
        reset = s["rtc"].get("reset_ratio") or s["rtc"]["reset_over_median"]
        work = r["work"][0]
        what = r["preset"] + (", calibrated" if r["config"]["quantize"] == "calibrated" else "")
        if r["config"].get("options", {}).get("fuse_all_reduce_norm"):
            what += ", norms by rows"
        out.append(
            f"| {what}; {_count(r)}{r['machine']}; {r['torch']} | {' | '.join(ms)} | "
            f"{r['speedup_over_stock']:.2f}x | {f'{reset:.2f}x' if reset else '-'} | "
            f"{work['before']['whole_cache_elements']:,} -> "
            f"{work['after']['whole_cache_elements']:,} |"
        )
    return out


def rolling() -> list[str]:
    """A model in the manner of published ones, whose window is kept by numbers in tensors."""
    out = [
        "| rolling cache, 5 calls a block | eager | torch.compile | rtc | against eager "
        "| against torch.compile | slowest block: torch.compile, rtc |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in latest(rows("rolling.jsonl"), "preset", "config", "options", "machine"):
        s = r["sides"]
        mine = s["rtc"]["block_ms"]
        sides = ("eager", "torch.compile", "rtc")
        ms = [f"{s[k]['block_ms']:.0f} ms" if k in s else "not run" for k in sides]
        faster = [f"{s[k]['block_ms'] / mine:.2f}x" if k in s else "-" for k in sides[:2]]
        first = ", ".join(f"{s[k]['slowest_block_s']:.0f} s" if k in s else "-" for k in sides[1:])
        out.append(
            f"| {r['preset']}, {r['config']['layers']} layers, {r['machine']}, {r['torch']} "
            f"| {' | '.join([*ms, *faster])} | {first} |"
        )
    return out if len(out) > 2 else []


def _count(r: dict[str, Any]) -> str:
    world = r.get("world", 1)
    return f"{world} x " if world > 1 else ""


def compiles() -> list[str]:
    out = ["| model | graphs, nodes | cold | warm |", "|---|---|---|---|"]
    for r in latest(rows("compile.jsonl"), "preset", "machine"):
        c, w = r["cold"], r["warm"]
        out.append(
            f"| {r['preset']} (60 layers), {r['machine']} | {c['graphs']}, {c['nodes']:,} | "
            f"{c['seconds']:.0f} s | {w['seconds']:.0f} s |"
        )
    return out


def _alone(run: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """rtc in later runs of as many steps without torch.compile beside it."""
    keys = ("preset", "machine", "world", "steps")
    return [
        (f"rtc, alone, {r['time'][:10]}", r["sides"]["rtc"])
        for r in rows("step_partial.jsonl")
        if [r.get(k, 1) for k in keys] == [run.get(k, 1) for k in keys]
        and r["time"] > run["time"] and "median_ms" in r["sides"].get("rtc", {})
    ][-1:]  # fmt: skip


def full_step() -> list[str]:
    """Rows of the sustained step of the full model, the latest run on each machine."""
    out = []
    for r in latest([r for r in rows("step.jsonl") if r["preset"] == "57b"], "machine", "world"):
        count = {1: "one", 2: "two"}.get(r.get("world", 1), r.get("world"))
        out += [
            *([""] if out else []),
            f"57b on {count} {r['machine']}, torch {r['torch']}, {r['steps']} steps:",
            "",
            "| | step | error | reset step | of FP8 peak | power | SM clock | peak memory |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, s in [*r["sides"].items(), *_alone(r)]:
            power = s.get("power") or {}
            reset = s.get("reset_ratio")
            out.append(
                f"| {name} | {s['median_ms']:.0f} ms | {_error(s.get('error'))} | "
                f"{f'{reset:.2f}x' if reset else '-'} | {_of(s['tflops'] / FP8_PEAK, '{:.0%}')} | "
                f"{_of(power.get('power_w'), '{:.0f} W')} | "
                f"{_of(power.get('sm_mhz'), '{:.0f} MHz')} | {s['memory']['peak'] / 1e9:.0f} GB |"
            )
    return out


def sums(norm: bool = False) -> list[str]:
    """The fused linear + all-reduce beside its parts, the best of each kind. norm: with what
    follows, at the power limit too, of the last run alone (cards differ by some per cent)."""
    found = [r for r in rows("linear_all_reduce.jsonl") if "median_us" in r]
    found = [r for r in found if bool(r.get("norm")) == norm and "note" not in r]
    if not found:
        return []
    head = found[-1]
    found = (
        [r for r in found if r["time"] == head["time"]] if norm else latest(found, "name", "world")
    )
    what = "FP8 linear + all-reduce" + " + residual + norm + FP8" * norm
    more = " in a sequence of seconds |" * norm
    out = [
        f"| {what}, [{head['M']}, {head['K']}] x {head['N']}, {head['world']} {head['machine']} "
        f"| us | of the all-reduce hidden |{more}",
        "|---|---|---|" + "---|" * norm,
    ]
    best: dict[str, dict[str, Any]] = {}
    for r in sorted(found, key=lambda r: r["median_us"]):
        design = (r.get("config") or {}).get("design", "")
        if r["kind"] != "fused" and design:
            continue  # a fused kernel without a peer
        best.setdefault(design or r["name"], r)
    for kind, r in best.items():
        label = f"fused, {kind.lower()} ({r['name']})" if r["kind"] == "fused" else r["name"]
        line = f"| {label} | {r['median_us']:.0f} | {_of(r.get('hidden'), '{:.0%}')} |"
        lasting = f" {_of(r.get('sustained_us'), '{:.0f} us')}, {_watts(r)} |" * norm
        out.append(line + lasting)
    return out


def _watts(r: dict[str, Any]) -> str:
    return _of((r.get("power") or {}).get("power_w"), "{:.0f} W")


def _of(x: float | None, form: str) -> str:
    return "-" if x is None else form.format(x)


def _error(x: float | None) -> str:
    return "-" if not x else f"{x:.1e}"


def waterfall() -> list[str]:
    found = latest(rows("waterfall.jsonl"), "row", "machine")
    if not found:
        return []
    out = ["| device time of a block | us | error |", "|---|---|---|"]
    return out + [f"| {r['row']} | {r['us_a_block']:.0f} | {r['error']:.1e} |" for r in found]


def numerics() -> list[str]:
    found = latest(rows("numerics.jsonl"), "row", "machine", "preset")
    if not found:
        return []
    out = ["| error against float64, outputs of a step | model | median | largest |"]
    out.append("|---|---|---|---|")
    return out + [
        f"| {r['row']} | {r['preset']}, {r['layers']} layers, {r['dtype'][6:]}, {r['steps']} steps "
        f"| {r['median']:.1e} | {r['largest']:.1e} |"
        for r in found
    ]


def kernels() -> list[str]:
    """The best of each kind at the sizes of one GPU."""
    out = ["| kernel, 757 tokens, one H200 | fastest | beside it |", "|---|---|---|"]
    for heads in (60, 30):
        found = [r for r in rows("attention.jsonl") if r["heads"] == heads]
        fp8 = sorted((r for r in found if "sdpa" not in r["candidate"]), key=lambda r: r["us"])
        bf16 = min((r for r in found if "sdpa" in r["candidate"]), key=lambda r: r["us"])
        out.append(
            f"| FP8 attention, {heads} heads | {fp8[0]['candidate'].split(' ')[0]} "
            f"{fp8[0]['us']:.0f} us, {fp8[0]['tflops']:.0f} TFLOP/s | {bf16['candidate']} "
            f"{bf16['us']:.0f} us |"
        )
    for r in latest(rows("linear.jsonl"), "bench", "shape"):
        if r.get("bench") != "linear_fp8":
            continue
        best = sorted(r["candidates"].items(), key=lambda kv: kv[1].get("median_us", 1e9))[:2]
        cells = [f"{n} {c['median_us']:.0f} us, {c['tflops']:.0f} TFLOP/s" for n, c in best]
        out.append(f"| FP8 product, {r['shape']} | {cells[0]} | {cells[1]} |")
    for r in latest(rows("pointwise.jsonl"), "op"):
        own = [c for n, c in r["sides"].items() if n.startswith("ours")]
        ours = min(own, key=lambda c: c["us"])
        stock = r["sides"].get("torch.compile")
        beside = f"torch.compile {stock['us']:.0f} us" if stock else "-"
        out.append(
            f"| {r['op']} | {ours['us']:.1f} us, {ours['of_copy']:.0%} of a copy kernel's rate, "
            f"{ours['of_copy_2gb']:.0%} of a 2 GB copy's | {beside} |"
        )
    return out


def picture() -> None:
    """bench/results/waterfall.svg: device time of a block, switch by switch."""
    found = [r for r in latest(rows("waterfall.jsonl"), "row") if r["cumulative"]][1:]
    if not found:
        return
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "rtc"
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(figsize=(8, 0.45 * len(found) + 0.8))
    us = [r["us_a_block"] for r in found]
    ax.barh([r["row"] for r in found], us, color=["#9aa7b5"] + ["#2f7ed8"] * (len(found) - 1))
    for i, x in enumerate(us):
        ax.text(x, i, f" {x:.0f}", va="center", fontsize=9)
    ax.invert_yaxis()
    ax.set_xlabel(f"device time of a block, us ({found[-1]['machine']})")
    ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(ROOT / "bench" / "results" / "waterfall.svg", metadata={"Date": None})


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    parts = [
        full_step(),
        sums(),
        sums(norm=True),
        waterfall(),
        numerics(),
        kernels(),
        steps(),
        rolling(),
        compiles(),
    ]
    body = "\n".join(["", *(line for part in parts if part for line in (*part, ""))])
    readme.write_text(f"{head}{BEGIN}{body}{END}{tail}")
    picture()


if __name__ == "__main__":
    main()
