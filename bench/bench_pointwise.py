"""Pointwise FP8 kernels against the copy rate: modulate, SwiGLU, pre-attention; one run.

    python bench/bench_pointwise.py
    python bench/bench_pointwise.py --tp 2 --only swiglu --sweep

Sides: eager and torch.compile of the plain reference, our kernel in a few configurations, and a
copy of as many bytes (half read, half written) by cudaMemcpyAsync and by a kernel, of which the
faster counts; a 2 GB copy gives the ceiling. Every side is a CUDA
graph of calls that go round several sets of inputs, more than the L2 cache holds; medians of
replays, taken in turns. Bytes count once each, whatever a side really moves.

Checks each kernel against the reference before it is timed, prints a table, appends a JSON line per
operator to bench/results/pointwise.jsonl.
"""

import argparse
import functools
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rtc.kernels import modulate_quantize, pre_attention, swiglu_quantize

FP8 = torch.float8_e4m3fn
M, C, HEADS, D, SLOTS = 757, 7680, 60, 128, 5788
L2_BYTES = 3 * 60e6  # what the sets of inputs add up to, at least
GRAPH_SECONDS = 4e-4  # about how long one replay takes: the cost of its launch is lost in it
FLOOR = 1e-4


@dataclass
class Case:
    """One operator: sets of arguments, how to run it on a set, what it moves."""

    name: str
    bytes: int
    make: Callable[[], Any]  # a set of arguments
    reference: Callable[[Any], Any]
    ours: dict[str, Callable[[Any], Any]]  # by configuration; returns what `reference` does
    values: Callable[[Any], torch.Tensor]  # the result as real numbers, for the check
    compiled: bool = True


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def fp8(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=FP8)


def label(warps: int, stages: int, per_sm: int) -> str:
    return f"{warps} warps, {stages} stages, {per_sm or 'all'} an SM"


def modulate_case(residual: bool, sweep: bool) -> Case:
    mod = modulate_quantize

    def make() -> Any:
        args = [randn(M, C), randn(M, C), randn(1, C)] if residual else [randn(M, C), None, None]
        out = (randn(M, C) if residual else None, fp8(M, C), torch.empty(M, 1, device="cuda"))
        return (*args, None, None, 1 + 0.1 * randn(C), randn(C), "layer", 1e-6, FLOOR), out

    ones = torch.ones(M, 1, device="cuda")

    def ours(config: Any, given: Any, delta_scale: Any = None) -> Any:
        args, out = given
        mod.launch(*args, out=out, config=config, delta_scale=delta_scale)
        return out

    configs = [(4, 1, 0), (8, 1, 0), (16, 1, 0), (16, 2, 1 if residual else 2)]
    if sweep:
        configs += [(32, 1, 0), (8, 1, 2), (8, 2, 2), (16, 2, 2 if residual else 1), (16, 1, 2)]
    sides = {label(*c): functools.partial(ours, mod.Config(*c)) for c in configs}
    if residual:  # a raw delta: 3 kB more to read
        sides["8 warps, delta_scale"] = functools.partial(ours, mod.Config(8), delta_scale=ones)
    return Case(
        name="residual_modulate_quantize" if residual else "modulate_quantize",
        bytes=M * C * (7 if residual else 3) + C * 2 * (3 if residual else 2) + M * 4,
        make=make,
        reference=lambda given: mod.reference(*given[0]),
        ours=sides,
        values=lambda out: out[1].float() * out[2],
    )


def swiglu_case(kind: str, tp: int, sweep: bool) -> Case:
    """kind: "swiglu", or "rows" with the last part's amax known."""
    mod = swiglu_quantize
    E, F = C // tp, 4 * C // tp

    def make() -> Any:
        out = (fp8(M, E + F), torch.empty(M, 1, device="cuda"))
        if kind == "swiglu":
            wide = randn(M, 3 * E + 2 * F)  # as linear1 leaves it: q, k, v, act, up
            act, up = wide[:, 3 * E : 3 * E + F], wide[:, 3 * E + F :]
            return ([randn(M, E)], act, up, None, FLOOR), out
        parts = [randn(M, E), randn(M, F)]
        return (parts, None, None, parts[1].abs().amax(-1, keepdim=True).float(), FLOOR), out

    def ours(config: Any, given: Any) -> Any:
        args, out = given
        mod.launch(*args, out=out, config=config)
        return out

    top = 16 if F > 16384 else 8
    configs = [(top, 1, 0), (top, 2, 16 // top), (2 * top, 2, 16 // top)]
    if sweep:
        configs += [(2 * top, 1, 0), (top // 2, 1, 0), (top // 2, 2, 16 // top), (top, 1, 1)]
        configs += [(top // 4, 1, 0), (top, 1, 16 // top)]
    return Case(
        name="swiglu_quantize" if kind == "swiglu" else "quantize_rows",
        bytes=M * (3 * E + (5 if kind == "swiglu" else 3) * F) + M * 4,
        make=make,
        reference=lambda given: mod.reference(*given[0]),
        ours={label(*c): functools.partial(ours, mod.Config(*c)) for c in configs},
        values=lambda out: out[0].float() * out[1],
        compiled=kind == "swiglu",
    )


def pre_attention_case(
    rope: str, raw: bool, tp: int, sweep: bool, key_heads: int | None = None
) -> Case:
    """``key_heads`` 1: queries almost alone; the difference is what the caches cost."""
    mod = pre_attention
    H = HEADS // tp
    G = key_heads or H

    def make() -> Any:
        wide = randn(1, M, 11 * H * D)  # as linear1 leaves it
        q, k, v = (x.unflatten(-1, (H, D)) for x in wide[..., : 3 * H * D].chunk(3, -1))
        k, v = k[:, :, :G], v[:, :, :G]
        angle = torch.rand(M, D, device="cuda") * 6
        tables = [angle.cos(), angle.sin()] * 2
        scales = [torch.rand(n, device="cuda") + 50 for n in (H, G, G)]
        slots = torch.arange(1246, 1246 + M, device="cuda")
        caches = [fp8(1, SLOTS, G, D), fp8(1, SLOTS, G, D)]
        for cache in caches:
            cache.view(torch.uint8).zero_()
        raws = [randn(1, SLOTS, G, D), randn(1, SLOTS, G, D)] if raw else [None, None]
        weights = [1 + 0.1 * randn(D), 1 + 0.1 * randn(D)]
        count = torch.zeros(1, dtype=torch.int64, device="cuda")
        args = (q, k, v, *weights, *tables, *scales, slots, *caches, *raws, count, rope, 1e-6)
        return args, fp8(1, M, H, D)

    def reference(given: Any) -> Any:
        args = given[0]
        return mod.reference(*args), args[13], args[14]

    def ours(config: Any, given: Any) -> Any:
        args, q8 = given
        mod.launch(args, q8, config)
        return q8, args[13], args[14]

    def values(out: Any) -> torch.Tensor:
        rows = [cache[:, 1246 : 1246 + M] for cache in out[1:]]
        return torch.cat([x.float().flatten() for x in (out[0], *rows)])

    configs = [(16, 4), (32, 4), (64, 8)]
    if sweep:
        configs += [(64, 4), (16, 2), (32, 8), (8, 2), (4, 1), (64, 16)]
    return Case(
        name=f"pre_attention {rope}{', raw caches' if raw else ''}"
        + (f", {G} key head" if key_heads else ""),
        bytes=M * D * (3 * H + G * (6 + (4 if raw else 0))) + 4 * M * D * 4,
        make=make,
        reference=reference,
        ours={
            f"{h} heads, {w} warps": functools.partial(ours, mod.Config(h, w)) for h, w in configs
        },
        values=values,
        compiled=rope == "half" and not raw and key_heads is None,
    )


def poison(given: Any) -> None:
    """NaN into every FP8 tensor of a set: all are outputs, and a check must see them written."""
    if isinstance(given, torch.Tensor) and given.dtype == FP8:
        given.view(torch.uint8).fill_(0x7F)
    elif isinstance(given, (tuple, list)):
        for item in given:
            poison(item)


def capture(call: Callable[[Any], Any], sets: list[Any], calls: int) -> torch.cuda.CUDAGraph:
    """`calls` calls, going round the sets."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for given in sets[:2]:
            call(given)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(sets[i % len(sets)])
    return graph


def measure(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, list[float]]:
    """Seconds of every replay, one of each in turn."""
    events: dict[str, list[Any]] = {name: [] for name in graphs}
    for i in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            if i >= 2:
                events[name].append((start, end))
        torch.cuda.synchronize()
    return {n: [a.elapsed_time(b) * 1e-3 for a, b in pairs] for n, pairs in events.items()}


def run_case(case: Case, rounds: int, compile_reference: bool) -> dict[str, Any]:
    count = max(2, int(L2_BYTES // case.bytes) + 1)
    sets = [case.make() for _ in range(count)]
    calls = count * max(1, int(GRAPH_SECONDS / (count * case.bytes / 4e12)))
    half = case.bytes // 32 * 16
    pool = [[torch.empty(half, dtype=torch.uint8, device="cuda") for _ in "io"] for _ in sets]
    big = [torch.empty(2 * 10**9, dtype=torch.uint8, device="cuda").fill_(1) for _ in "io"]

    def copy(pair: Any) -> None:
        pair[1].copy_(pair[0])

    def copy_kernel(pair: Any) -> None:
        torch.bitwise_not(pair[0].view(torch.int64), out=pair[1].view(torch.int64))

    want = case.values(case.reference(sets[0])).clone()
    graphs, errors, used = {}, {}, {}
    sides: dict[str, Callable[[Any], Any]] = {"eager": case.reference}
    if compile_reference and case.compiled:
        sides["torch.compile"] = torch.compile(
            case.reference, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs"
        )
    sides |= {f"ours: {name}": call for name, call in case.ours.items()}
    for name, call in sides.items():
        try:
            poison(sets[0])
            got = case.values(call(sets[0]))
            error = ((got - want).norm() / want.norm()).item()
            if (
                not error <= 0.02
            ):  # a rounding apart in f32 or bf16, an FP8 step apart here and there
                raise ValueError(f"off by {error:.1e} from the reference")
            used[name] = calls if name.startswith("ours") else count
            graphs[name] = capture(call, sets, used[name])
        except Exception as e:  # one side that fails must not stop the others
            errors[name] = f"{type(e).__name__}: {e}".splitlines()[0][:200]
            torch.cuda.synchronize()
    used |= {"copy": calls, "copy by a kernel": calls, "copy 2 GB": 1}
    graphs["copy"] = capture(copy, pool, calls)
    graphs["copy by a kernel"] = capture(copy_kernel, pool, calls)
    graphs["copy 2 GB"] = capture(copy, [big], 1)
    seconds = measure(graphs, rounds)

    rows: dict[str, Any] = {}
    rates = {}
    for name, taken in seconds.items():
        moved = 2 * big[0].numel() if name == "copy 2 GB" else case.bytes
        times = sorted(t / used[name] for t in taken)
        rates[name] = moved / statistics.median(times)
        rows[name] = {
            "us": statistics.median(times) * 1e6,
            "p95_us": times[int(0.95 * (len(times) - 1))] * 1e6,
            "GB/s": rates[name] / 1e9,
        }
    print(
        f"\n{case.name}: {case.bytes / 1e6:.1f} MB, {count} sets of inputs, {calls} calls a graph"
    )
    print(f"  {'':34}{'us':>9}{'p95':>9}{'GB/s':>8}{'of copy':>9}{'of 2 GB copy':>14}")
    for name, row in rows.items():
        row["of_copy"] = rates[name] / max(rates["copy"], rates["copy by a kernel"])
        row["of_copy_2gb"] = rates[name] / rates["copy 2 GB"]
        print(
            f"  {name:34}{row['us']:9.2f}{row['p95_us']:9.2f}{row['GB/s']:8.0f}"
            f"{row['of_copy']:9.1%}{row['of_copy_2gb']:14.1%}"
        )
    for name, text in errors.items():
        print(f"  {name:34}{text}")
    return {"bytes": case.bytes, "sets": count, "calls": calls, "sides": rows, "errors": errors}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tp", type=int, default=1, help="GPUs that share the heads and the MLP")
    p.add_argument("--only", default="", help="operators whose name contains this")
    p.add_argument("--sweep", action="store_true", help="more configurations")
    p.add_argument("--rounds", type=int, default=40)
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--out", default="bench/results/pointwise.jsonl")
    args = p.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_pointwise needs a CUDA GPU")
    torch.manual_seed(0)
    cases: list[Callable[[], Case]] = [
        lambda: modulate_case(False, args.sweep),
        lambda: modulate_case(True, args.sweep),
        lambda: swiglu_case("swiglu", args.tp, args.sweep),
        lambda: swiglu_case("rows", args.tp, args.sweep),
        lambda: pre_attention_case("half", False, args.tp, args.sweep),
        lambda: pre_attention_case("half", True, args.tp, args.sweep),
        lambda: pre_attention_case("half", True, args.tp, args.sweep, 1),
        lambda: pre_attention_case("interleaved", False, args.tp, args.sweep),
    ]
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    for build in cases:
        case = build()
        if args.only not in case.name:
            continue
        with torch.no_grad():
            try:
                result = run_case(case, args.rounds, not args.no_compile)
            except Exception as e:  # the next operator may still run
                print(f"\n{case.name}: {type(e).__name__}: {str(e).splitlines()[:1]}")
                continue
        torch.cuda.empty_cache()
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": _commit(),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton_version,
            "op": case.name,
            "config": {"M": M, "C": C, "heads": HEADS, "D": D, "slots": SLOTS, "tp": args.tp},
            "rounds": args.rounds,
            **result,
        }
        out = Path(args.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as f:
            f.write(json.dumps(line) + "\n")


def _commit() -> str:
    try:
        cmd = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(cmd, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    main()
