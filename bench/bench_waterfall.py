"""Device time of one block as rtc's switches come on one after the other, and without each of them.

    python bench/bench_waterfall.py --layers 2 --passes 2

Sums of kernel times, taken by the profiler over replayed steps of a model of few layers (so few
that the host, not the device, would set the pace of whole steps). Prints a table, appends a JSON
line a row to bench/results/waterfall.jsonl.
"""

import argparse
import dataclasses
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity, profile

import rtc
from bench.bench_step import _commit, _machine
from rtc.model import PRESETS, build, example_inputs

FUSED = ("fuse_pre_attention", "fuse_swiglu_quantize", "fuse_modulate_quantize", "fp8_linear")
ALL: dict[str, Any] = {"quantize": "calibrated", "fp8_attention": True}


def without(*names: str, **options: Any) -> dict[str, Any]:
    return {**ALL, "passes": dict.fromkeys(names, False), **options}


CUMULATIVE: dict[str, dict[str, Any] | None] = {
    "naive, op by op": None,
    "caches maintained, code by Inductor": without(*FUSED, fp8_attention=False),
    "+ fp8_attention": without(*FUSED),
    "+ fuse_pre_attention": without(*FUSED[1:]),
    "+ fuse_swiglu_quantize": without(*FUSED[2:]),
    "+ fuse_modulate_quantize": without(*FUSED[3:]),
    "+ fp8_linear: all": ALL,
}
WITHOUT: dict[str, dict[str, Any] | None] = {
    "all but fuse_pre_attention": without("fuse_pre_attention"),
    "all but fuse_swiglu_quantize": without("fuse_swiglu_quantize"),
    "all but fp8_attention": {**ALL, "fp8_attention": False},
    "all but ring_cache": {**ALL, "ring_cache": False},
}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--preset", default="57b", choices=sorted(PRESETS))
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--passes", type=int, default=2)
    p.add_argument("--budget-s", type=float, default=1e9, help="start no row after that")
    p.add_argument("--out", default="bench/results/waterfall.jsonl")
    args = p.parse_args()
    cfg = dataclasses.replace(PRESETS[args.preset], layers=args.layers, passes=args.passes)
    model = build(cfg, device="cuda", dtype=torch.bfloat16, seed=0)
    started, before = time.monotonic(), None
    print(f"{'us a block':>11}{'change':>9}{'error':>10}  ({cfg.calls} blocks a step)")
    want = None
    for name, options in {**CUMULATIVE, **WITHOUT}.items():
        if time.monotonic() - started > args.budget_s:
            print("out of time:", name)
            break
        try:
            us, out = measure(model, cfg, options)
        except Exception as e:
            print(f"{name}: {type(e).__name__}: {str(e)[:200]}")
            continue
        want = out if want is None else want
        error = ((out - want).norm() / want.norm()).item()
        change = "" if before is None or name in WITHOUT else f"{us - before:+.0f}"
        print(f"{us:11.1f}{change:>9}{error:10.1e}  {name}", flush=True)
        before = us if name in CUMULATIVE else before
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": _commit(),
            "machine": _machine("cuda"), "torch": torch.__version__, "preset": args.preset,
            "layers": cfg.layers, "passes": cfg.passes, "row": name, "options": options,
            "cumulative": name in CUMULATIVE, "us_a_block": us, "error": error,
        }  # fmt: skip
        with Path(args.out).open("a") as f:
            f.write(json.dumps(line) + "\n")


def measure(model: Any, cfg: Any, options: dict[str, Any] | None) -> tuple[float, torch.Tensor]:
    """Microseconds a block, and the output of the last step; caches start at the same contents."""
    generator = torch.Generator("cuda").manual_seed(1)
    for cache in model.caches.buffers():
        cache.normal_(generator=generator)
    call = model if options is None else rtc.compile(model, options=rtc.Options(**options))
    inputs = [
        example_inputs(cfg, step, seed=1, device="cuda", dtype=torch.bfloat16) for step in range(9)
    ]
    with torch.no_grad():
        for x in inputs[:6]:
            call(*x)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            for x in inputs[6:]:
                out = call(*x)
            torch.cuda.synchronize()
    spent = sum(
        e.time_range.elapsed_us()
        for e in prof.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and "Memcpy HtoD" not in e.name
    )
    out = out.double().cpu()
    if options is not None:
        call.close()
    del call
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return spent / (3 * cfg.calls), out


if __name__ == "__main__":
    main()
