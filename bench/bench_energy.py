"""What a product costs when it runs for seconds: rate, power, clock, joules a call.

    python bench/bench_energy.py --tp 1 2 --seconds 3

A GPU at its power limit is slowed by what its kernels draw, so the fastest of a burst need not be
the fastest of a step that goes on for ever. Each backend of each product runs alone, replayed over
two copies of the weights. Prints a table, appends JSON lines to bench/results/energy.jsonl.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.bench_linear import BF16, D, M, Shape, sustained
from bench.bench_step import _commit, _machine
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


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--tp", type=int, nargs="*", default=[1, 2])
    p.add_argument("--seconds", type=float, default=3.0, help="of each; the second half counts")
    p.add_argument("--out", default="bench/results/energy.jsonl")
    args = p.parse_args()
    torch.manual_seed(0)
    print(f"{'':34}{'us':>8}{'TFLOP/s':>9}{'W':>6}{'MHz':>6}{'J':>8}")
    for tp in args.tp:
        for s in products(tp):
            for name, call in sides(s).items():
                try:
                    rate, power = sustained(call, args.seconds, s.flops)
                except Exception as e:
                    print(f"{s.name}, {name}: {str(e).splitlines()[0][:120]}")
                    continue
                us = s.flops / rate / 1e6
                joules = (power or {}).get("power_w", float("nan")) * us / 1e6
                print(
                    f"{s.name + ', ' + name:34}{us:8.1f}{rate:9.0f}"
                    f"{(power or {}).get('power_w', 0):6.0f}{(power or {}).get('sm_mhz', 0):6.0f}"
                    f"{joules:8.3f}",
                    flush=True,
                )
                line = {
                    "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "commit": _commit(), "machine": _machine("cuda"), "torch": torch.__version__,
                    "shape": s.name, "M": M, "N": s.N, "K": s.K, "side": name, "us": us,
                    "tflops": rate, "power": power, "joules": joules,
                }  # fmt: skip
                with Path(args.out).open("a") as f:
                    f.write(json.dumps(line) + "\n")
            del s, call
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
