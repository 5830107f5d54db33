"""FP8 linear layer cut along K and summed over GPUs: fused designs against product + all-reduce.

    torchrun --nproc-per-node 2 bench/bench_linear_all_reduce.py --check
    torchrun --nproc-per-node 2 bench/bench_linear_all_reduce.py --sweep --shapes 757x7680x19200

A shape is M x N x K, K of one rank; left out: 757 x 7680 x 38400 / ranks. Every candidate is
compared with parts summed in float64 first, and its ranks' results with each other. Times: CUDA
graphs of 20 calls over 4 sets of weights, so that the L2 cache holds none, in alternating rounds
that start together on all ranks; medians of rank 0, microseconds a call.

hidden: 1 - (fused - product) / (nccl - product), from the fastest product with row scales and the
fastest sum by NCCL of one. Candidates marked * leave row scales out: bounds, not rivals. (The
copies apply them in their reduction.)

--check first runs what needs several GPUs: values, --replays graph replays under skew for each
design, 1,000 token counts, a peer that never comes. Multicast is switched off. A hang is
impossible: waits are bounded and a watchdog ends the process after --limit seconds.

Prints a table, appends JSON lines to bench/results/linear_all_reduce.jsonl.
"""

import os

# Before torch is imported. The machines that this is tried on must not use NVLink multicast.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.all_reduce.candidates import Candidate, candidates, followed
from bench.all_reduce.check import everything
from bench.all_reduce.ranks import Operands, Ranks
from bench.power import Sampler

CALLS, SETS = 20, 4


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--shapes", nargs="*", help="MxNxK, K of one rank")
    p.add_argument("--check", action="store_true", help="check first")
    p.add_argument("--no-times", action="store_true", help="only check")
    p.add_argument("--replays", type=int, default=500, help="of each graph in --check")
    p.add_argument("--sweep", action="store_true", help="more configurations")
    p.add_argument("--only", nargs="*", help="checks and fused candidates with this in their names")
    p.add_argument(
        "--skip-baselines", action="store_true", help="all but cuBLAS without and with NCCL"
    )
    p.add_argument("--norm", action="store_true", help="with the residual and norm that follow")
    p.add_argument("--sustain", type=float, default=0, metavar="S", help="then seconds a side")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--limit", type=float, default=200, help="seconds until the watchdog bites")
    p.add_argument("--out", default="bench/results/linear_all_reduce.jsonl")
    args = p.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_linear_all_reduce needs CUDA GPUs")

    ranks = Ranks.start(args.limit)
    good = True
    if args.check:
        good = everything(ranks, args.replays, args.only)
        ranks.say(f"checks: {'all ok' if good else 'FAILED'} {ranks.watchdog.elapsed():.0f} s")
    if not args.no_times:
        for text in args.shapes or [f"757x7680x{38400 // ranks.world // 16 * 16}"]:
            m, n, k = map(int, text.split("x"))
            times(ranks, args, m, n, k)
    ranks.say(f"{ranks.watchdog.elapsed():.0f} s in all")
    dist.barrier()
    # Without tearing the group down: graphs still hold NCCL's kernels.
    sys.stdout.flush()
    os._exit(0 if good else 1)


def times(ranks: Ranks, args: argparse.Namespace, m: int, n: int, k: int) -> None:
    torch.manual_seed(0)
    ranks.stage("operands")
    sets = [ranks.operands(m, n, k, seed) for seed in range(SETS)]
    rows: dict[str, dict[str, Any]] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    make = followed if args.norm else candidates
    chosen = make(ranks, m, n, args.sweep, not args.skip_baselines)
    if args.only:
        optional = ("fused", "alone")
        chosen = [
            c for c in chosen if c.kind not in optional or any(o in c.name for o in args.only)
        ]
    for c in chosen:
        row, why = ranks.attempt(f"capture {c.name}", lambda c=c: captured(ranks, c, sets))
        ranks.say(f"  {ranks.watchdog.elapsed():4.0f} s {c.name}: {why or row[1] or 'right'}")
        rows[c.name] = c.described()
        if why:
            rows[c.name]["failed"] = why
        else:
            graphs[c.name], rows[c.name]["wrong"] = row
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    order = random.Random(0)  # the same on all ranks
    for i in range(args.rounds + 2):
        for name in order.sample(list(graphs), len(graphs)):
            us, why = ranks.attempt(f"time {name}", lambda g=graphs[name]: replayed(g))
            if why:
                rows[name]["failed"] = why
                del graphs[name]
            elif i >= 2:
                samples[name].append(us)
    for c in chosen:
        if c.name in graphs:
            t = samples[c.name]
            p95 = sorted(t)[int(0.95 * (len(t) - 1))]
            rows[c.name] |= {"median_us": statistics.median(t), "p95_us": p95}
            if args.sustain:
                count = [max(2, int(args.sustain * 5e5 / CALLS / statistics.median(t)))]
                dist.broadcast_object_list(count)  # as many on all ranks, or they never meet
                power, why = ranks.attempt(
                    f"sustain {c.name}", lambda g=graphs[c.name], k=count[0]: sustained(g, k)
                )
                rows[c.name] |= {"failed": why} if why else power
            if c.finish is not None:
                _, rows[c.name]["late"] = ranks.attempt(f"finish {c.name}", c.finish)
    if ranks.rank == 0:
        show(rows, m, n, k, ranks.world)
        head = heading()
        line = {"bench": "linear_all_reduce", "M": m, "N": n, "K": k, "world": ranks.world,
                "norm": args.norm}  # fmt: skip
        for name, row in rows.items():
            write(args.out, {**head, **line, "rounds": args.rounds, "name": name, **row})


def captured(ranks: Ranks, c: Candidate, sets: list[Operands]) -> tuple[torch.cuda.CUDAGraph, str]:
    call = c.call = c.make()  # kept: the graph uses what it holds
    wrong = ""
    for args in sets[:2]:
        y = call(args)
        if c.kind in ("unfused", "fused") and not c.raw:
            if c.norm is None:
                wrong = wrong or ranks.verify(y, args)
            else:
                wrong = wrong or ranks.verify_norm(y, args, c.norm)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(sets[i % SETS])
    return graph, wrong


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds a call. The barrier lets all ranks start together."""
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    a.record()
    graph.replay()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) * 1e3 / CALLS


def sustained(graph: torch.cuda.CUDAGraph, replays: int) -> dict[str, Any]:
    """Microseconds a call, power and joules of this rank's GPU once its clocks have settled."""
    for count in (replays, replays):
        dist.barrier()
        torch.cuda.synchronize()
        with Sampler("cuda", every=0.1) as sampler:
            a = time.perf_counter()
            for i in range(count):
                graph.replay()
                if i % 20 == 19:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            us = (time.perf_counter() - a) * 1e6 / count / CALLS
    power = sampler.summary() or {"power_w": float("nan"), "sm_mhz": float("nan")}
    return {"sustained_us": us, "power": power, "joules": power["power_w"] * us / 1e6}


def show(rows: dict[str, dict[str, Any]], m: int, n: int, k: int, world: int) -> None:
    def best(kind: str, nccl: bool) -> float:
        fits = [
            r["median_us"]
            for name, r in rows.items()
            if r["kind"] == kind and not r["raw"] and "median_us" in r and ("nccl" in name) >= nccl
        ]
        return min(fits, default=float("nan"))

    product, nccl = best("product", False), best("unfused", True)
    print(f"\nlinear_all_reduce [{m}, {n}, {k}] on {world} GPUs")
    print(f"  {'':30}{'us':>8}{'p95':>8}{'+ us':>8}{'hidden':>8}")
    for name, r in sorted(rows.items(), key=lambda x: x[1].get("median_us", 1e9)):
        label = name + (" *" if r["raw"] else "")
        if "failed" in r:
            print(f"  {label:30}failed: {r['failed']}")
            continue
        over = r["median_us"] - product
        summed = r["kind"] in ("unfused", "fused")
        r["hidden"] = 1 - over / (nccl - product) if summed else None
        hidden = "" if r["hidden"] is None else f"{r['hidden']:8.0%}"
        if "sustained_us" in r:
            hidden += f"{r['sustained_us']:9.1f}{r['power']['power_w']:6.0f} W"
            hidden += f"{r['power']['sm_mhz']:6.0f} MHz{r['joules']:8.4f} J"
        note = "".join(f"  {key.upper()}: {r[key]}" for key in ("wrong", "late") if r.get(key))
        print(f"  {label:30}{r['median_us']:8.1f}{r['p95_us']:8.1f}{over:8.1f}{hidden}{note}")


def heading() -> dict[str, Any]:
    try:
        cmd = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(cmd, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    import triton

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit,
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def write(out: str, line: dict[str, Any]) -> None:
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
