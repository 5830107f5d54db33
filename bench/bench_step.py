"""Step time of the reference model: naive eager, stock torch.compile, rtc.

    python bench/bench_step.py --preset cpu --steps 60
    python bench/bench_step.py --preset 57b --device cuda --steps 200 --warm \
        --options '{"quantize": "calibrated"}' --variants '{"no rope": {"hoist_rope": false}}'

On a CPU the sides alternate step by step, each on a copy of the model, and every step is compared
with eager. On a GPU (--no-alternate) they run one after the other on one model, so that the
largest one fits: each starts from the same random caches, is compared with eager over its first
steps (a reset of the positions among them), then runs --steps steps back to back without waiting
for the device. --variants are further rtc sides, each with its options on top of --options.

Stock torch.compile takes the whole model as one graph with the step index symbolic (--stock
whole), or, where that is too deep to compile, one block shared by all calls, the step captured as
one CUDA graph (--stock blocks).

reset: a step at which positions jump back over the median of the 16 steps around it, the median of
all such; worst reset: the slowest of them over the median of all steps; late: median of the last
quarter; host: the call's own time, device not waited for; peak: memory while timed; rest: that
less weights and caches; first GB: peak of the first calls; left GB: what a side did not give back;
% FP8: of the dense FP8 peak.

Prints a table, appends a JSON line to bench/results/step.jsonl (where a side is missing or failed:
to step_partial.jsonl beside it, and exits with 1 if one failed). A run of one side
after the other that is ended early (Ctrl-C, SIGTERM) writes those that it has. Weights and inputs
are random.
"""

import argparse
import copy
import dataclasses
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from bench.step import measure, sides
from bench.step.table import progress, table
from rtc.model import PRESETS, Config, Shard, build

Makers = dict[str, Callable[[Any], sides.Side]]

_REPORT_LINES = 40


def main() -> None:
    args = _arguments()
    cfg = _config(args)
    dtype = getattr(torch, args.dtype)
    kind = sides.stock_kind(cfg, args.stock)
    mode = args.stock_mode or ("max-autotune-no-cudagraphs" if kind == "blocks" else "default")
    options = {"quantize": args.quantize, **json.loads(args.options)}
    variants = {name: {**options, **o} for name, o in json.loads(args.variants).items()}
    cold = not any(Path(cache_dir()).glob("*"))

    makers: Makers = {"eager": sides.Eager}
    if not args.no_stock:
        makers["torch.compile"] = functools.partial(sides.stock, kind=kind, mode=mode)
    if not args.no_rtc:
        makers["rtc"] = functools.partial(sides.Rtc, options=options)
    for name, changed in variants.items():
        makers[name] = functools.partial(sides.Rtc, options=changed)

    say = _Clock()
    shard = Shard.of() if args.world > 1 else Shard()
    model = build(cfg, device=args.device, dtype=dtype, seed=0, shard=shard)
    size = dtype.itemsize
    say(
        f"{_label(args)}: {cfg.weight_bytes(size) / 1e9:.2f} GB of weights, "
        f"{cfg.cache_bytes(size) / 1e9:.2f} GB of caches, {cfg.flops_per_step / 1e12:.3g} TFLOP "
        f"and {cfg.calls} calls a step; stock: {kind}, {mode}; ranks: {args.world}"
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what `timeout` sends
    run = _alternate if args.alternate else _sequential
    rows = run(args, makers, model, dtype, say)

    reports = [row.pop("report", "") for row in rows.values()]
    report = reports[list(rows).index("rtc")].splitlines() if "rtc" in rows else []
    print("\n".join(report[:_REPORT_LINES]))
    if len(report) > _REPORT_LINES:
        print(f"... {len(report) - _REPORT_LINES} more lines of the report")
    print(table(rows))
    failed = [name for name, row in rows.items() if "failed" in row]
    whole = not failed and {"eager", "torch.compile", "rtc"} <= rows.keys()
    line = _line(args, cfg, rows)
    line |= {"stock": kind, "stock_mode": mode, "inductor_cache_empty": cold}
    line["config"] |= {"quantize": options["quantize"]}
    if set(options) > {"quantize"}:
        line["config"]["options"] = options
    if variants:
        line["variants"] = variants
    if whole:
        speedup = rows["torch.compile"]["median_ms"] / rows["rtc"]["median_ms"]
        line["speedup_over_stock"] = speedup
        print(f"rtc is {speedup:.2f}x stock torch.compile; error {line['worst_error']:.1e}")
    out = Path(args.out) if whole else Path(args.out).with_stem(f"{Path(args.out).stem}_partial")
    if args.rank == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as f:
            f.write(json.dumps(line) + "\n")
        say(f"written to {out}")
    if args.world > 1:
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(1 if failed else 0)  # without tearing down the group: graphs hold its kernels
    sys.exit(1 if failed else 0)


def _alternate(args: Any, makers: Makers, model: Any, dtype: Any, say: Any) -> dict[str, Any]:
    inputs = measure.Inputs(model.cfg, args.warmup + args.steps, args.device, dtype)
    made = {name: make(copy.deepcopy(model)) for name, make in makers.items()}
    try:
        return measure.alternate(model.cfg, made, inputs, args.steps, args.warmup, args.tolerance)
    except measure.TooFar as e:
        raise SystemExit(str(e)) from None


def _sequential(args: Any, makers: Makers, model: Any, dtype: Any, say: Any) -> dict[str, Any]:
    count = args.check + args.warmup + args.steps
    inputs = measure.Inputs(model.cfg, count, args.device, dtype)
    runner = measure.Sequential(model, inputs, args.device, args.check, args.warmup, args.tolerance)
    steps = {"eager": args.eager_steps, "torch.compile": args.stock_steps or args.steps}
    rows: dict[str, Any] = {}
    try:
        _each(args, makers, model, runner, steps, rows, say)
    except KeyboardInterrupt:  # SIGTERM too
        for name in makers:
            rows.setdefault(name, {"failed": "the run was ended before"})
    return rows


def _each(
    args: Any, makers: Makers, model: Any, runner: Any, steps: dict[str, int],
    rows: dict[str, Any], say: Any,
) -> None:  # fmt: skip
    for name, make in makers.items():
        if args.budget_s and say.seconds() > args.budget_s:
            rows[name] = {"failed": f"not started: --budget-s {args.budget_s} was over"}
        else:
            run = functools.partial(make, model)
            warm = args.warm and name == "rtc"
            rows[name] = runner.run(run, steps.get(name, args.steps), warm)
        say(progress(name, rows[name]))
        if "traceback" in rows[name]:
            print(rows[name].pop("traceback"), flush=True)
        if name == "eager" and "failed" in rows[name]:
            break  # nothing to compare with


def _line(args: Any, cfg: Config, rows: dict[str, Any]) -> dict[str, Any]:
    """The results as data; `work` and `runtime` are those of the side "rtc"."""
    config = dataclasses.asdict(cfg)
    if not cfg.fp8_linears:  # younger than the first results: without it they are of one config
        del config["fp8_linears"]
    ours = rows.get("rtc", {})
    return {
        "preset": _label(args),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "machine": _machine(args.device),
        "torch": torch.__version__,
        "config": {**config, "dtype": args.dtype},
        "steps": args.steps,
        "world": args.world,
        "alternate": args.alternate,
        "worst_error": ours.get("error"),
        "work": ours.pop("work", []),
        "runtime": ours.pop("runtime", {}),
        "sides": rows,
    }


class _Clock:
    """Prints lines with the seconds since the start."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def __call__(self, text: str) -> None:
        print(f"[{self.seconds():6.1f} s] {text}", flush=True)


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--preset", default="cpu", choices=sorted(PRESETS))
    p.add_argument("--layers", type=int)
    p.add_argument("--passes", type=int)
    p.add_argument("--set", nargs="*", default=[], metavar="KEY=INT", help="other sizes")
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--eager-steps", type=int, default=4, help="0: time the checked ones")
    p.add_argument("--stock-steps", type=int, help="default: as --steps")
    p.add_argument("--warmup", type=int, default=4)
    p.add_argument("--check", type=int, default=6, help="steps compared with eager before timing")
    p.add_argument("--no-quantize", action="store_true", help="leave the model's FP8 cache out")
    p.add_argument("--quantize", default="exact", choices=["exact", "calibrated"])
    p.add_argument("--options", default="{}", metavar="JSON", help="of rtc.Options")
    p.add_argument("--variants", default="{}", metavar="JSON", help="name -> more options")
    p.add_argument("--stock", default="auto", choices=["auto", "whole", "blocks"])
    p.add_argument("--stock-mode", help="mode of torch.compile")
    p.add_argument("--no-stock", action="store_true")
    p.add_argument("--no-rtc", action="store_true", help="only the variants, if any")
    p.add_argument(
        "--warm", action="store_true", help="time a second rtc.compile (not when alternating)"
    )
    p.add_argument("--alternate", action=argparse.BooleanOptionalAction)
    p.add_argument("--budget-s", type=float, help="start no further side after so many seconds")
    p.add_argument("--tolerance", type=float, help="default: 0.1 with FP8 linears, else 0.05")
    p.add_argument("--out", default="bench/results/step.jsonl")
    args = p.parse_args()
    _join(args)
    on_gpu = args.device.startswith("cuda")
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    args.alternate = not on_gpu if args.alternate is None else args.alternate
    return args


def _join(args: argparse.Namespace) -> None:
    """Under torchrun: this process is one rank of a tensor-parallel model. Rank 0 prints."""
    args.world, args.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if args.world == 1:
        return
    import torch.distributed as dist

    backend, device = "gloo", None
    if args.device.startswith("cuda"):
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        device = torch.device(args.device)
        torch.cuda.set_device(device)
        backend = "nccl"
    dist.init_process_group(backend, timeout=timedelta(minutes=5), device_id=device)
    args.alternate = False
    if args.rank:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - as long as the process


def _config(args: argparse.Namespace) -> Config:
    cfg = PRESETS[args.preset]
    changes = {k: v for k in ("layers", "passes") if (v := getattr(args, k)) is not None}
    for key, value in (pair.split("=") for pair in args.set):
        changes[key] = type(getattr(cfg, key))(int(value))
    if args.no_quantize:
        changes["quantize_kv"] = False
    cfg = dataclasses.replace(cfg, **changes)
    if args.tolerance is None:
        args.tolerance = 0.1 if cfg.fp8_linears else 0.05
    return cfg


def _commit() -> str:
    try:
        cmd = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(cmd, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _label(args: argparse.Namespace) -> str:
    """The preset, and in what it was changed."""
    parts = [args.preset]
    for name in ("layers", "passes"):
        if (value := getattr(args, name)) is not None:
            parts.append(f"{value} of {getattr(PRESETS[args.preset], name)} {name}")
    if args.no_quantize and PRESETS[args.preset].quantize_kv:
        parts.append("no FP8" if not PRESETS[args.preset].fp8_linears else "no FP8 cache")
    return ", ".join([*parts, *args.set])


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
