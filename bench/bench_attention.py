"""FP8 attention at the sizes of the workload: every backend, interleaved, checked first.

    python bench/bench_attention.py [--heads 60,30,20] [--quick] [--out FILE]

Each candidate is a CUDA graph of CALLS calls that go through COPIES sets of keys and values, as the
layers of a model do, so that the second call finds nothing of the first one's in L2. Candidates
alternate; figures are medians over the rounds, TFLOP/s = 4 T S D H / t. Every output is compared
with a float32 reference before anything is timed. Prints a table a head count and appends one
JSON line a row to bench/results/attention.jsonl.
"""

import argparse
import functools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rtc.kernels import attention_fp8 as A

CALLS, COPIES = 8, 4


@dataclass(eq=False)
class Sets:
    """One q, and COPIES of keys and values (a head's scale differs from the next one's)."""

    h: int
    t: int
    s: int
    d: int
    q: torch.Tensor = field(init=False)
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(init=False)
    k: list[torch.Tensor] = field(init=False)
    v: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        def fp8(n: int) -> torch.Tensor:
            x = torch.randn(1, n, self.h, self.d, device="cuda") * 2
            return x.to(A.FP8).transpose(1, 2)

        self.q = fp8(self.t)
        self.k = [fp8(self.s) for _ in range(COPIES)]
        self.v = [fp8(self.s) for _ in range(COPIES)]
        a, b, c = (torch.rand(1, self.h, device="cuda") * 0.5 + 0.25 for _ in range(3))
        self.scales = (a, b, c)

    def v_transposed(self) -> list[torch.Tensor]:
        """Slots at stride 1, rows 16 bytes apart."""
        out = []
        for v in self.v:
            rows = v.new_zeros(1, self.h, self.d, self.s + -self.s % 16)
            rows[..., : self.s] = v.transpose(2, 3)
            out.append(rows[..., : self.s].transpose(2, 3))
        return out

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.d)

    @functools.cache  # noqa: B019
    def reference(self, i: int) -> torch.Tensor:
        qs, ks, vs = (x[0].float() for x in self.scales)
        out = torch.empty(self.h, self.t, self.d, device="cuda")
        for h in range(self.h):
            s = (self.q[0, h].float() @ self.k[i][0, h].float().T) * (qs[h] * ks[h] * self.scale)
            out[h] = torch.softmax(s, -1) @ self.v[i][0, h].float() * vs[h]
        return out[None]


# A candidate: (label, call(set index) -> output). Built late, so that one failure costs one row.
Candidate = tuple[str, Callable[[int], torch.Tensor]]


def fp8_candidates(x: Sets, quick: bool) -> list[Candidate]:
    rows: list[Candidate] = []
    args, out_dtype = (*x.scales, x.scale), torch.bfloat16

    def library(splits: int) -> Callable[[int], torch.Tensor]:
        return lambda i: A.run("fa3", x.q, x.k[i], x.v[i], *args, out_dtype, num_splits=splits)

    reasons = A.backends("cuda")
    if reasons["fa3"] is None:
        rows += [(f"fa3 splits={n}", library(n)) for n in (1, 2, 3, 4)]
    else:
        print(f"fa3: skipped: {reasons['fa3']}")
    if reasons["triton"] is not None:
        print(f"triton: skipped: {reasons['triton']}")
        return rows

    from rtc.kernels import attention_fp8_triton as K

    def ours(vs: list[torch.Tensor], cfg: K.Config) -> Callable[[int], torch.Tensor]:
        def call(i: int) -> torch.Tensor:
            out = A._empty(x.q, vs[i], out_dtype)
            K.launch(out, x.q, x.k[i], vs[i], *args, cfg)
            return out

        return call

    vt = x.v_transposed()
    for cfg in sweep(K.Config, True)[: 3 if quick else None]:
        rows.append((f"triton vT {cfg.label}", ours(vt, cfg)))
    for cfg in sweep(K.Config, False)[: 1 if quick else None]:
        rows.append((f"triton v  {cfg.label}", ours(x.v, cfg)))
    return rows


def sweep(config: Callable, v_transposed: bool) -> list:
    """Most promising first. Registers and residency as of ptxas 12.8, sm_90a, D = 128."""
    if not v_transposed:
        return [
            config(pv="f16", num_stages=2),  # 216 registers, 2 CTAs an SM
            config(pv="f16", num_stages=2, split=2),
            config(block_n=64, num_stages=3, pv="f16"),
            config(block_m=128, block_n=128, num_warps=8, num_stages=2, pv="f16"),
            config(block_m=128, block_n=64, num_warps=8, num_stages=3, pv="f16"),
            config(),  # bytes transposed in registers: 128 one-byte stores a thread and tile
            config(block_m=128, block_n=128, num_warps=8, num_stages=2),
        ]
    return [
        config(),  # 170 registers, 2 CTAs
        config(split=2),  # 255 registers, 2 CTAs
        config(num_stages=2, maxnreg=168),  # 3 CTAs, wgmma serialized by ptxas
        config(block_n=64, num_stages=4),  # 130 registers, 3 CTAs
        config(block_n=64, num_stages=2, maxnreg=128),  # 4 CTAs, serialized
        config(num_stages=2),
        config(poly=True),
        config(block_n=64, num_stages=4, poly=True),
        config(permute=False),
        config(split=2, num_stages=2),
        config(split=3, block_n=64, num_stages=3, maxnreg=168),
        config(split=2, poly=True),
        config(tma=False),
        config(tma=False, permute=False),
        config(block_m=128, num_warps=8, num_stages=3),  # 176 registers, 1 CTA
        config(block_m=128, block_n=64, num_warps=8, num_stages=3, maxnreg=128),  # 2 CTAs, serial
        config(block_m=128, num_warps=4, num_stages=2),  # 254 registers, 2 CTAs, serialized
        config(block_m=128, num_warps=8, num_stages=3, poly=True),
    ]


def bf16_candidates(x: Sets) -> list[Candidate]:
    """The values of the FP8 tensors in bfloat16, scales folded in before the clock runs."""
    qs, ks, vs = (s[..., None, None] for s in x.scales)

    def wide(y: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return (y.float() * s).to(torch.bfloat16)

    q = wide(x.q, qs)
    k, v = [wide(y, ks) for y in x.k], [wide(y, vs) for y in x.v]

    def sdpa(which: SDPBackend) -> Callable[[int], torch.Tensor]:
        def call(i: int) -> torch.Tensor:
            with sdpa_kernel(which):
                return F.scaled_dot_product_attention(q, k[i], v[i], scale=x.scale)

        return call

    return [
        ("bf16 sdpa cudnn", sdpa(SDPBackend.CUDNN_ATTENTION)),
        ("bf16 sdpa flash", sdpa(SDPBackend.FLASH_ATTENTION)),
    ]


def prepare(x: Sets, label: str, call: Callable) -> tuple[torch.cuda.CUDAGraph, float] | None:
    """Check and capture. None, with a line, where it fails or is wrong."""
    try:
        worst = 0.0
        for i in (0, COPIES - 1):
            got, want = call(i).float(), x.reference(i)
            worst = max(worst, ((got - want).norm() / want.norm()).item())
        if not worst < 4e-2:  # also NaN
            print(f"{label}: WRONG, error {worst:.3g}")
            return None
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=stream):
            for i in range(CALLS):
                call(i % COPIES)
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{label}: failed: {type(error).__name__}: {str(error).splitlines()[:1]}")
        return None
    return graph, worst


def measure(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {label: [] for label in graphs}
    for n in range(rounds + 2):
        for label, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if n >= 2:
                times[label].append(start.elapsed_time(end) * 1e3 / CALLS)
    return times


def machine() -> dict[str, str]:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    gpu = torch.cuda.get_device_name()
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "time": when,
        "commit": commit,
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": version,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--heads", default="60,30,20")
    p.add_argument("--tokens", type=int, default=757)
    p.add_argument("--slots", type=int, default=5788)
    p.add_argument("--dim", type=int, default=128)
    p.add_argument("--rounds", type=int, default=20)
    p.add_argument("--quick", action="store_true", help="the first few configurations only")
    p.add_argument("--out", default="bench/results/attention.jsonl")
    args = p.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_attention: needs a CUDA GPU")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    about = machine()
    print(", ".join(about.values()))
    print("cudnn frontend sdpa_fp8: not run: one scale a tensor, and FP8 output only on Hopper")
    for h in map(int, args.heads.split(",")):
        x = Sets(h, args.tokens, args.slots, args.dim)
        ready = {}
        for label, call in [*fp8_candidates(x, args.quick), *bf16_candidates(x)]:
            if (done := prepare(x, label, call)) is not None:
                ready[label] = done
        times = measure({label: graph for label, (graph, _) in ready.items()}, args.rounds)
        flop = 4 * args.tokens * args.slots * args.dim * h
        print(f"\n{h} heads, T={args.tokens} S={args.slots} D={args.dim}")
        print(f"{'':52s} {'us':>7s} {'p95':>7s} {'TFLOP/s':>8s} {'error':>8s}")
        lines = []
        for label, us in sorted(times.items(), key=lambda item: sorted(item[1])[len(item[1]) // 2]):
            us.sort()
            median, p95 = us[len(us) // 2], us[int(0.95 * (len(us) - 1))]
            tflops, worst = flop / median / 1e6, ready[label][1]
            print(f"{label:52s} {median:7.1f} {p95:7.1f} {tflops:8.0f} {worst:8.1e}")
            row = {
                "candidate": label,
                "heads": h,
                "tokens": args.tokens,
                "slots": args.slots,
                "dim": args.dim,
                "us": round(median, 2),
                "p95_us": round(p95, 2),
                "tflops": round(tflops, 1),
                "error": worst,
            }
            lines.append(json.dumps({**about, **row, "calls": CALLS, "copies": COPIES}))
        out = Path(args.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.writelines(line + "\n" for line in lines)
        del x, ready
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
