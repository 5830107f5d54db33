"""What a product costs when it runs for seconds: rate, power, clock, joules a call.

    python bench/bench_energy.py --tp 1 2 --seconds 3

A GPU at its power limit is slowed by what its kernels draw, so the fastest of a burst need not be
the fastest of a step that goes on for ever. Each backend of each product runs alone, replayed over
two copies of the weights; --rest: attention and the pointwise kernels, too. Prints a table, appends
JSON lines to bench/results/energy.jsonl.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench import bench_attention, bench_pointwise
from bench.bench_linear import BF16, D, M, Shape, sustained
from bench.bench_step import _commit, _machine
from rtc.kernels import attention_fp8, attention_fp8_triton
from rtc.kernels import linear_fp8 as op


def products(tp: int) -> list[Shape]:
    return [Shape(f"linear1 TP{tp}", 11 * D // tp, D), Shape(f"linear2 TP{tp}", D, 5 * D // tp)]


def sides(s: Shape) -> dict[str, Any]:
    def call(backend: str, config: Any, rows: bool) -> Any:
        scales = (s.xs, s.ws) if rows else (s.one, s.one)
        return lambda i: op.run(backend, s.x, s.w[i], *scales, None, BF16, config)

    out: dict[str, Any] = {
        "cublas row-wise": call("cublas", op.WIDE, True),
        "cublas per-tensor": call("cublas", op.WIDE, False),
    }
    name = "wide" if s.N > D else "narrow"
    out[f"triton {name}"] = call("triton", op.WIDE if s.N > D else op.NARROW, True)
    return out


def attention(tp: int) -> dict[str, Any]:
    """By side, of 60 / tp heads; V stored transposed for our kernel."""
    x = bench_attention.Sets(60 // tp, M, 5788, 128)
    given, turned = (*x.scales, x.scale), x.v_transposed()

    def ours(config: Any) -> Any:
        def call(i: int) -> None:
            out = attention_fp8._empty(x.q, turned[i], BF16)
            attention_fp8_triton.launch(out, x.q, x.k[i], turned[i], *given, config)

        return call

    out = {"fa3": lambda i: attention_fp8.run("fa3", x.q, x.k[i], x.v[i], *given, BF16)}
    for config in (
        attention_fp8_triton.Config(),
        attention_fp8_triton.Config(block_n=64, num_stages=4),
    ):
        out[f"triton, V transposed, {config.label}"] = ours(config)
    return out


def pointwise(tp: int) -> dict[str, Any]:
    """By operator and configuration; two sets of inputs."""
    cases = (
        bench_pointwise.modulate_case(True, False),
        bench_pointwise.swiglu_case("swiglu", tp, False),
        bench_pointwise.pre_attention_case("half", True, tp, False),
    )
    out = {}
    for case in cases:
        sets = [case.make() for _ in range(2)]
        for name, run in list(case.ours.items())[:2]:
            out[f"{case.name}, {name}"] = lambda i, run=run, sets=sets: run(sets[i])
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--tp", type=int, nargs="*", default=[1, 2])
    p.add_argument("--rest", action="store_true", help="attention and pointwise kernels as well")
    p.add_argument("--seconds", type=float, default=3.0, help="of each; the second half counts")
    p.add_argument("--out", default="bench/results/energy.jsonl")
    args = p.parse_args()
    torch.manual_seed(0)
    print(f"{'':60}{'us':>8}{'TFLOP/s':>9}{'W':>6}{'MHz':>6}{'J':>8}")
    for tp in args.tp:
        for s in products(tp):
            facts = {"shape": s.name, "M": M, "N": s.N, "K": s.K}
            measure(facts, sides(s), args.seconds, s.flops, args.out)
            del s
            torch.cuda.empty_cache()
        if args.rest:
            flops = 4 * M * 5788 * 128 * 60 // tp
            measure({"shape": f"attention TP{tp}"}, attention(tp), args.seconds, flops, args.out)
            measure({"shape": f"pointwise TP{tp}"}, pointwise(tp), args.seconds, 0, args.out)
            torch.cuda.empty_cache()


def measure(
    facts: dict[str, Any], calls: dict[str, Any], seconds: float, flops: int, out: str
) -> None:
    """A line for each side. flops: of a call, 0 where that says nothing."""
    for name, call in calls.items():
        try:
            rate, power = sustained(call, seconds, flops or 10**12)
        except Exception as e:
            print(f"{facts['shape']}, {name}: {str(e).splitlines()[0][:120]}")
            continue
        us = (flops or 10**12) / rate / 1e6
        watts = (power or {}).get("power_w", float("nan"))
        print(
            f"{facts['shape'] + ', ' + name:60}{us:8.1f}{rate * bool(flops):9.0f}{watts:6.0f}"
            f"{(power or {}).get('sm_mhz', 0):6.0f}{watts * us / 1e6:8.3f}",
            flush=True,
        )
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": _commit(), "machine": _machine("cuda"), "torch": torch.__version__,
            **facts, "side": name, "us": us, "tflops": rate if flops else None, "power": power,
            "joules": watts * us / 1e6,
        }  # fmt: skip
        with Path(out).open("a") as f:
            f.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
