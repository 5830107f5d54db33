"""FP8 linear layers of the 57B workload: cuBLAS, the Triton kernels, and what follows the layer.

    python bench/bench_linear.py                    # all shapes
    python bench/bench_linear.py --tp 1 --sustain 10

Per shape: linear1 [M, 11 d / tp, d] and linear2 [M, d, 5 d / tp], plain; linear1 with SwiGLU and
row maxima against cuBLAS + torch.compile; linear2 with gate and residual likewise. Every candidate
is checked against float64 on some columns first. Times: CUDA graphs of one call for each of two
weight copies (the L2 cache holds neither), replayed in turns; medians. Weights and inputs are
normal, quantized by row. ``--sustain S`` then runs the linear1 + linear2 mix for S seconds a side,
with epilogues, and reports rate, power and clock: the GPU is power-limited, bursts flatter.

Prints a table a shape and appends JSON lines to bench/results/linear.jsonl.
"""

import argparse
import dataclasses
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rtc.kernels import linear_fp8 as op
from rtc.kernels import linear_fp8_swiglu as swiglu
from rtc.kernels.linear_fp8_triton import Config

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
M, D = 757, 7680
COPIES = 2

WIDE = {
    "wide 3": Config(),
    "wide 3h": Config(halves=True),
    "wide 4h": Config(stages=4, halves=True),
    "wide 4h flat": Config(stages=4, halves=True, flatten=True),
    "wide 4h stream": Config(stages=4, halves=True, stream=True),
}
NARROW = {
    "narrow 4": Config(bn=128, warps=4, stages=4),
    "narrow 3h x2": Config(bn=128, warps=4, stages=3, halves=True, ctas=2),
    "narrow 4 stream": Config(bn=128, warps=4, stages=4, stream=True),
}
# Promotion needs twice the registers.
PROMOTED = {"narrow 4 promote": Config(bn=128, warps=8, stages=4, promote=128)}
# The epilogue of SwiGLU is in halves by nature, and its kernel has no stream.
SWIGLU = {
    "wide 3": Config(),
    "wide 4": Config(stages=4),
    "wide 3 flat": Config(flatten=True),
    "wide 4 group 3": Config(stages=4, group=3),
    "narrow 3 x2": Config(bn=128, warps=4, stages=3, ctas=2),
}
SPECIALIZED = {
    "wide 3 ws": Config(warps=4, specialize=True),
    "wide 4 ws": Config(warps=4, stages=4, specialize=True),
}

Call = Callable[[int], Any]  # of a weight copy


@dataclasses.dataclass
class Shape:
    """Inputs of one layer; scales of a row each, and one element each for cuBLAS's other kernel."""

    name: str
    N: int
    K: int

    def __post_init__(self) -> None:
        x, self.xs = quantize(torch.randn(M, self.K, device="cuda"))
        w = torch.empty(self.N, self.K, dtype=FP8, device="cuda")
        self.ws = torch.empty(self.N, device="cuda")
        for rows in torch.arange(self.N, device="cuda").split(8192):
            w[rows[0] : rows[-1] + 1], s = quantize(torch.randn(len(rows), self.K, device="cuda"))
            self.ws[rows] = s[:, 0] * 0.02
        self.x = x
        bits = w.view(torch.uint8)  # FP8 does not roll
        self.w = [w, *(bits.roll(64 * i, 0).view(w.dtype) for i in range(1, COPIES))]
        self.one = torch.tensor(1e-3, device="cuda")
        self.flops = 2 * M * self.N * self.K
        self.columns = torch.randperm(self.N, device="cuda")[:256]

    def exact(self, columns: torch.Tensor, rows: bool = True) -> torch.Tensor:
        """float64, of the last weight copy, which is the last that a candidate computes."""
        w = self.w[-1].view(torch.uint8)[columns].view(FP8)
        xs, ws = (self.xs, self.ws[columns]) if rows else (self.one, self.one)
        return op.reference(self.x, w, xs, ws, None, torch.float64)


def quantize(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = t.abs().amax(1, keepdim=True) / 448
    return (t / scale).to(FP8), scale


def off(y: torch.Tensor, want: torch.Tensor) -> float:
    return ((y.double() - want).norm() / want.norm()).item()


class Bench:
    """Candidates of one shape: checked, captured, replayed in turns."""

    def __init__(self, shape: Shape, title: str) -> None:
        self.shape, self.title = shape, title
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.keep: list[Any] = []

    def add(
        self,
        name: str,
        call: Call,
        error: Callable[[Any], float],
        config: Config | None = None,
    ) -> None:
        """Skip a candidate that fails, in one line: the others still count."""
        # Fast accumulation truncates 2^-14 of a sum, on average, at each step of 32 products.
        limit = 1e-2 + self.shape.K / 32 * 2.0**-13
        row: dict[str, Any] = {"config": dataclasses.asdict(config) if config else None}
        self.rows[name] = row
        try:
            for i in range(COPIES):
                out = call(i)
            row["error"] = error(out)
            if not row["error"] < limit:
                raise RuntimeError(f"error {row['error']:.2e}")
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.keep.append([call(i) for i in range(COPIES)])
            graph.replay()
            torch.cuda.synchronize()
            self.graphs[name] = graph
        except Exception as e:
            row["failed"] = f"{type(e).__name__}: {e}".splitlines()[0][:150]

    def run(self, rounds: int) -> dict[str, dict[str, Any]]:
        times: dict[str, list[float]] = {name: [] for name in self.graphs}
        for i in range(rounds + 2):
            events = {}
            for name in random.sample(list(self.graphs), len(self.graphs)):
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record()
                self.graphs[name].replay()
                b.record()
                events[name] = a, b
            torch.cuda.synchronize()
            if i >= 2:
                for name, (a, b) in events.items():
                    times[name].append(a.elapsed_time(b) * 1e3 / COPIES)
        for name, t in times.items():
            us = statistics.median(t)
            p95 = sorted(t)[int(0.95 * (len(t) - 1))]
            tflops = self.shape.flops / us / 1e6
            self.rows[name] |= {"median_us": us, "p95_us": p95, "tflops": tflops}
        self.show()
        self.graphs.clear()
        self.keep.clear()
        return self.rows

    def show(self) -> None:
        s = self.shape
        print(f"\n{self.title}: {s.name} [{M}, {s.N}, {s.K}]")
        print(f"  {'':26}{'us':>8}{'p95':>8}{'TFLOP/s':>9}{'error':>10}")
        for name, r in sorted(self.rows.items(), key=lambda x: x[1].get("median_us", 1e9)):
            if "failed" in r:
                print(f"  {name:26}failed: {r['failed']}")
            else:
                print(
                    f"  {name:26}{r['median_us']:8.1f}{r['p95_us']:8.1f}{r['tflops']:9.0f}"
                    f"{r['error']:10.1e}"
                )

    def best(self) -> Config | None:
        """The fastest of the Triton configurations."""
        ours = [r for r in self.rows.values() if r["config"] and "median_us" in r]
        return Config(**min(ours, key=lambda r: r["median_us"])["config"]) if ours else None


def add_plain(b: Bench, configs: dict[str, Config]) -> None:
    s = b.shape
    want = s.exact(s.columns)
    scalar = s.exact(s.columns, rows=False)

    def run(backend: str, i: int, config: Config = WIDE["wide 3"]) -> torch.Tensor:
        return op.run(backend, s.x, s.w[i], s.xs, s.ws, None, BF16, config)

    def error(y: torch.Tensor) -> float:
        return off(y[:, s.columns], want)

    b.add("cublas row-wise", lambda i: run("cublas", i), error)
    b.add(
        "cublas per-tensor",
        lambda i: op.run("cublas", s.x, s.w[i], s.one, s.one, None, BF16),
        lambda y: off(y[:, s.columns], scalar),
    )
    for name, c in configs.items():
        b.add(name, lambda i, c=c: run("triton", i, c), error, c)


def add_swiglu(b: Bench, act: int, up: int, width: int, configs: dict[str, Config]) -> None:
    s = b.shape
    j = torch.randperm(width, device="cuda")[:256]
    want = F.silu(s.exact(act + j)) * s.exact(up + j)
    first = torch.arange(min(act, 256), device="cuda")
    plain = s.exact(first)

    def error(out: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> float:
        rest, y, amax = out
        if not torch.equal(amax.float(), y.float().abs().amax(1, keepdim=True)):
            return float("nan")
        return max(off(y[:, j], want), off(rest[:, first], plain))

    @torch.compile(fullgraph=True, dynamic=False)
    def epilogue(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = h[:, act : act + width].float(), h[:, up : up + width].float()
        y = (F.silu(a) * b).to(BF16)
        return y, y.float().abs().amax(1, keepdim=True)

    def composed(i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = op.run("cublas", s.x, s.w[i], s.xs, s.ws, None, BF16)
        return (h[:, :act], *epilogue(h))  # a view: nothing is copied

    b.add("cublas + torch.compile", composed, error)
    for name, c in configs.items():

        def fused(i: int, c: Config = c) -> Any:
            return swiglu.run("triton", s.x, s.w[i], s.xs, s.ws, act, up, width, BF16, c)

        b.add(name, fused, error, c)


def add_residual(b: Bench, configs: dict[str, Config]) -> None:
    s = b.shape
    gate = torch.randn(s.N, device="cuda")
    residual = torch.randn(M, s.N, device="cuda").to(BF16)
    want = residual[:, s.columns].double() + gate[s.columns].double() * s.exact(s.columns)

    def error(y: torch.Tensor) -> float:
        return off(y[:, s.columns], want)

    @torch.compile(fullgraph=True, dynamic=False)
    def epilogue(y: torch.Tensor) -> torch.Tensor:
        return (residual.float() + gate * y.float()).to(BF16)

    def composed(i: int) -> torch.Tensor:
        return epilogue(op.run("cublas", s.x, s.w[i], s.xs, s.ws, None, BF16))

    b.add("cublas + torch.compile", composed, error)
    for name, c in configs.items():

        def fused(i: int, c: Config = c) -> torch.Tensor:
            return op.run_residual("triton", s.x, s.w[i], s.xs, s.ws, gate, residual, c)

        b.add(name, fused, error, c)


def sustain(one: Shape, two: Shape, tp: int, seconds: float, best: list[Config | None]) -> list:
    """linear1 with SwiGLU and linear2 with the residual in turns, by each side for ``seconds``."""
    act, up, width = cut(tp)
    gate, residual = torch.randn(D, device="cuda"), torch.randn(M, D, device="cuda").to(BF16)

    def first(i: int, c: Config) -> Any:
        return swiglu.run("triton", one.x, one.w[i], one.xs, one.ws, act, up, width, BF16, c)

    def second(i: int, c: Config) -> Any:
        return op.run_residual("triton", two.x, two.w[i], two.xs, two.ws, gate, residual, c)

    def table(i: int) -> None:
        args = one.x, one.w[i], one.xs, one.ws
        swiglu.linear_fp8_swiglu(*args, act, up, width, BF16)
        op.linear_fp8_residual(two.x, two.w[i], two.xs, two.ws, gate, residual)

    def cublas(i: int) -> None:
        for s in (one, two):
            op.run("cublas", s.x, s.w[i], s.xs, s.ws, None, BF16)

    sides: dict[str, Call] = {"as the tables choose": table, "cublas, no epilogues": cublas}
    if best[0] is not None and best[1] is not None:
        a, b = best[0], best[1]
        sides["the sweep's best"] = lambda i: (first(i, a), second(i, b))
    lines = []
    for name, call in sides.items():
        try:
            rate, summary = sustained(call, seconds, one.flops + two.flops)
        except Exception as e:
            print(f"{name}: failed: {str(e).splitlines()[0][:150]}")
            continue
        lines.append({"side": name, "tflops": rate, "power": summary})
        p = summary or {}
        print(
            f"  sustained {seconds:.0f} s, {name:24}{rate:7.0f} TFLOP/s, "
            f"{p.get('power_w', 0):.0f} W, SM clock {p.get('sm_mhz', 0):.0f} MHz"
        )
    return lines


def sustained(call: Call, seconds: float, flops: int) -> tuple[float, dict[str, float] | None]:
    """TFLOP/s and power, both from the second half: by then clocks have settled."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from bench.power import Sampler

    for i in range(COPIES):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(COPIES):
            call(i)

    def replay(until: float) -> int:
        n = 0
        while time.perf_counter() < until:
            for _ in range(10):
                graph.replay()
            n += 10
            torch.cuda.synchronize()
        return n

    replay(time.perf_counter() + seconds / 2)
    with Sampler("cuda", every=0.1) as sampler:
        t = time.perf_counter()
        n = replay(t + seconds / 2)
        t = time.perf_counter() - t
    return n * COPIES * flops / t / 1e12, sampler.summary()


def cut(tp: int) -> tuple[int, int, int]:
    """linear1's columns on each GPU: q, k, v, then activation branch and up branch."""
    return 3 * D // tp, 7 * D // tp, 4 * D // tp


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tp", type=int, nargs="*", default=[1, 2, 3], help="GPUs a layer is cut for")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--sustain", type=float, default=0, metavar="S", help="seconds a side")
    p.add_argument("--specialize", action="store_true", help="warp-specialized candidates too")
    p.add_argument("--out", default="bench/results/linear.jsonl")
    args = p.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_linear needs a CUDA GPU")
    torch.manual_seed(0)
    random.seed(0)

    plain = WIDE | NARROW | PROMOTED | (SPECIALIZED if args.specialize else {})
    for tp in args.tp:
        act, up, width = cut(tp)
        one = Shape(f"linear1 TP{tp}", 11 * D // tp, D)
        two = Shape(f"linear2 TP{tp}", D, 5 * D // tp)
        best = []
        for shape in (one, two):
            b = Bench(shape, "linear_fp8")
            add_plain(b, plain)
            record(args, b, b.run(args.rounds))
        b = Bench(one, "linear_fp8_swiglu")
        add_swiglu(b, act, up, width, SWIGLU)
        record(args, b, b.run(args.rounds))
        best.append(b.best())
        b = Bench(two, "linear_fp8_residual")
        add_residual(b, WIDE | NARROW)
        record(args, b, b.run(args.rounds))
        best.append(b.best())
        if args.sustain:
            print()
            lines = sustain(one, two, tp, args.sustain, best)
            append(args.out, {"bench": "linear_sustained", "tp": tp, "M": M, "sides": lines})
        del one, two, b, shape
        torch.cuda.empty_cache()


def record(args: argparse.Namespace, b: Bench, rows: dict[str, dict[str, Any]]) -> None:
    s = b.shape
    line = {"bench": b.title, "shape": s.name, "M": M, "N": s.N, "K": s.K, "rounds": args.rounds}
    append(args.out, {**line, "candidates": rows})


def append(out: str, line: dict[str, Any]) -> None:
    try:
        cmd = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(cmd, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    head = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit,
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version,
    }
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.write(json.dumps({**head, **line}) + "\n")


if __name__ == "__main__":
    main()
