"""Host time of one step at the full model's number of slots: what the call itself takes.

    python bench/bench_host.py --device cuda --layers 60 --profile

The model is narrow, so the device is never waited for; slots, tokens, positions and (with --layers
60) caches are as many as those of the preset. Prints milliseconds a call (median, p95, resets
apart), until the step was launched (by part), and from there on, while the device works; appends a
JSON line. On the CPU a replay does nothing once the step was captured: what is left is the host's
share. With --forbid-syncs a call that waits for the device ends the run.
"""

import argparse
import cProfile
import dataclasses
import json
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import rtc
from bench.bench_step import _commit, _machine
from bench.launch import Launches, Parts
from rtc.graphs import step as step_graphs
from rtc.model import PRESETS, build, example_inputs


class _Still:
    """In place of a captured graph, where there is no device: its first replay alone is real."""

    def __init__(self, run: Any) -> None:
        self.run: Any = run

    def replay(self) -> None:
        run, self.run = self.run, None
        if run is not None:
            run()


def _ms(x: float | None) -> str:
    return "unknown (no launch was seen)" if x is None else f"{x:.2f} ms"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--preset", default="57b", choices=sorted(PRESETS))
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--device", default="cpu")
    p.add_argument("--forbid-syncs", action="store_true", help="after the first calls")
    p.add_argument("--profile", action="store_true", help="print where the time goes")
    p.add_argument("--options", default='{"quantize": "calibrated"}', help="of rtc.Options, JSON")
    p.add_argument("--out", default="bench/results/host.jsonl")
    args = p.parse_args()

    full = PRESETS[args.preset]
    cfg = dataclasses.replace(full, layers=args.layers, dim=128, heads=1, hidden=64)
    options = json.loads(args.options)
    if args.device == "cpu":
        step_graphs._Rerun = _Still  # type: ignore[assignment, misc]
        here = {"step_graph": "simulate", "lowering": "eager", "regions": "on", "kernels": "on"}
        options = {**here, **options}
    model = build(cfg, device=args.device, dtype=torch.float32, seed=0)
    compiled = rtc.compile(model, options=rtc.Options(**options))
    sync = torch.cuda.synchronize if args.device != "cpu" else lambda: None
    start = full.reset_period - 4
    seconds, launched, profile = {}, {}, cProfile.Profile()
    graphs = _Still if args.device == "cpu" else torch.cuda.CUDAGraph
    launches = Launches(graphs)
    launches.__enter__()
    parts = Parts(graphs)
    parts.__enter__()
    for step in range(start, start + args.steps):
        inputs = example_inputs(cfg, step, seed=1, device=args.device)
        if not args.forbid_syncs:
            sync()
        reset = step % full.reset_period == 0
        profiled = args.profile and step > start + 8 and not reset
        if profiled:
            profile.enable()
        forbidden = args.forbid_syncs and step > start + 8
        if args.device != "cpu":
            torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
        t = time.perf_counter()
        compiled(*inputs)
        seconds[step], launched[step] = time.perf_counter() - t, launches.since(t)
        if step > start + 8 and not reset:
            parts.call(t)
        if args.device != "cpu":
            torch.cuda.set_sync_debug_mode("default")
        if profiled:
            profile.disable()
    timed = {s: v * 1e3 for s, v in seconds.items() if s > start + 8}
    resets = [v for s, v in timed.items() if s % full.reset_period == 0]
    rest = sorted(v for s, v in timed.items() if s % full.reset_period)
    launch = [v * 1e3 for s, v in launched.items() if s in timed and v is not None]
    after = [timed[s] - v * 1e3 for s, v in launched.items() if s in timed and v is not None]
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "machine": _machine(args.device),
        "torch": torch.__version__,
        "preset": args.preset,
        "layers": args.layers,
        "options": options,
        "threads": torch.get_num_threads(),
        "host_ms": statistics.median(rest),
        "p95_ms": rest[int(0.95 * (len(rest) - 1))],
        "resets_ms": resets,
        "launch_ms": statistics.median(launch) if launch else None,
        "launch_parts_ms": parts.medians(),
        "while_running_ms": statistics.median(after) if after else None,
        "syncs_forbidden": sum(s > start + 8 for s in seconds) if args.forbid_syncs else 0,
        "replays": compiled.report().to_dict()["runtime"]["replays"],
    }
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)
    print(f"host {line['host_ms']:.2f} ms a call, until launch {_ms(line['launch_ms'])}", end=", ")
    print(f"while the device works {_ms(line['while_running_ms'])}")
    for name, ms in parts.medians().items():
        print(f"  {ms:7.3f} ms  {name}")
    print(json.dumps(line))
    with Path(args.out).open("a") as f:
        f.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
