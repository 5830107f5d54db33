"""Step time of the reference model: naive eager, stock torch.compile, rtc; alternating, one run.

    python bench/bench_step.py --preset cpu --steps 60
    python bench/bench_step.py --preset 57b --layers 2 --device cuda --dtype bfloat16

reset: a step at which positions jump back over the median of the 16 steps around it, the median of
all such; worst: the slowest of them over the median of all steps.

Checks before it times (outputs of every warm-up step against eager), prints a table, appends a JSON
line to bench/results/step.jsonl. Random weights and inputs. Stock torch.compile runs whole-graph
with the step index symbolic; on CUDA with its own CUDA graphs too (mode="reduce-overhead").
"""

import argparse
import copy
import dataclasses
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import rtc
from rtc.demo import stats
from rtc.model import PRESETS, build, example_inputs


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--preset", default="cpu", choices=sorted(PRESETS))
    p.add_argument("--layers", type=int)
    p.add_argument("--passes", type=int)
    p.add_argument("--set", nargs="*", default=[], metavar="KEY=INT", help="other sizes")
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--warmup", type=int, default=4)
    p.add_argument("--no-quantize", action="store_true", help="leave the model's FP8 cache out")
    p.add_argument("--quantize", default="exact", choices=["exact", "calibrated"])
    p.add_argument("--stock-mode", default="default")
    p.add_argument("--tolerance", type=float, default=0.05)
    p.add_argument("--out", default="bench/results/step.jsonl")
    args = p.parse_args()

    cfg = PRESETS[args.preset]
    changes = {k: v for k in ("layers", "passes") if (v := getattr(args, k)) is not None}
    changes |= {k: int(v) for k, v in (pair.split("=") for pair in args.set)}
    if args.no_quantize:
        changes["quantize_kv"] = False
    cfg = dataclasses.replace(cfg, **changes)
    dtype = getattr(torch, args.dtype)
    model = build(cfg, device=args.device, dtype=dtype, seed=0)
    stock_mode = None if args.stock_mode == "default" else args.stock_mode
    eager = model
    stock_model, rtc_model = copy.deepcopy(model), copy.deepcopy(model)
    stock = torch.compile(stock_model, fullgraph=True, mode=stock_mode)
    ours = rtc.compile(rtc_model, options=rtc.Options(quantize=args.quantize))
    sides: dict[str, Any] = {"eager": eager, "torch.compile": stock, "rtc": ours}
    seconds: dict[str, list[float]] = {k: [] for k in sides}
    first: dict[str, float] = {}
    worst = 0.0
    sync = torch.cuda.synchronize if args.device.startswith("cuda") else lambda: None

    settings: Any = torch.compiler.config
    for step in range(args.warmup + args.steps):
        inputs = example_inputs(cfg, step, seed=1, device=args.device, dtype=dtype)
        out = {}
        for name, call in sides.items():
            sync()
            t = time.perf_counter()
            with torch.no_grad(), settings.patch(dynamic_sources="L['step']"):
                out[name] = call(*inputs).clone()
            sync()
            t = time.perf_counter() - t
            if step == 0:
                first[name] = t
            if step >= args.warmup:
                seconds[name].append(t)
        error = ((out["rtc"] - out["eager"]).norm() / out["eager"].norm()).item()
        worst = max(worst, error)
        if not error <= args.tolerance:
            raise SystemExit(f"step {step}: rtc differs from eager by {error:.2e}")

    resets = [i for i in range(args.steps) if (i + args.warmup) % cfg.reset_period == 0]
    rows: dict[str, dict[str, Any]] = {}
    for name, s in seconds.items():
        med = statistics.median(s)
        rows[name] = {
            "first_s": first[name],
            "median_ms": med * 1e3,
            "p95_ms": sorted(s)[int(0.95 * (len(s) - 1))] * 1e3,
            "reset_over_median": max(s[i] for i in resets) / med if resets else None,
            "resets": len(resets),
            "reset_ratio": stats.steps(s, resets, skip=0).get("reset_ratio"),
        }
    print(f"{'':14}{'first s':>9}{'median ms':>11}{'p95 ms':>9}{'reset':>8}{'worst':>8}")
    for name, r in rows.items():
        reset, worst_reset = (
            f"{r[k]:.3f}" if r[k] else "-" for k in ("reset_ratio", "reset_over_median")
        )
        print(
            f"{name:14}{r['first_s']:9.1f}{r['median_ms']:11.2f}{r['p95_ms']:9.2f}"
            f"{reset:>8}{worst_reset:>8}"
        )
    report = ours.report().to_dict()
    line = {
        "preset": _label(args),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "machine": _machine(args.device),
        "torch": torch.__version__,
        "config": {**dataclasses.asdict(cfg), "dtype": args.dtype, "quantize": args.quantize},
        "stock_mode": args.stock_mode,
        "steps": args.steps,
        "worst_error": worst,
        "sides": rows,
        "speedup_over_stock": rows["torch.compile"]["median_ms"] / rows["rtc"]["median_ms"],
        "work": [g["work"] for g in report["graphs"]],
        "runtime": {k: v for k, v in report["runtime"].items() if k != "step_seconds"},
    }
    print(f"rtc is {line['speedup_over_stock']:.2f}x stock torch.compile; error {worst:.1e}")
    print(ours.report())
    out_path = Path(args.out)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    with out_path.open("a") as f:
        f.write(json.dumps(line) + "\n")


def _commit() -> str:
    try:
        cmd = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(cmd, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _label(args: argparse.Namespace) -> str:
    """The preset, and in what it was changed."""
    parts = [args.preset]
    if args.layers is not None:
        parts.append(f"{args.layers} of {PRESETS[args.preset].layers} layers")
    if args.no_quantize and PRESETS[args.preset].quantize_kv:
        parts.append("no FP8")
    return ", ".join([*parts, *args.set])


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
