"""What each numerics-changing switch costs in precision, against the same model in float64.

    python bench/bench_numerics.py --device cuda                  # one block of full size
    python bench/bench_numerics.py --preset cpu --steps 100       # chained steps of a small model

The reference is eager in float64 with an unquantized cache (weights as they are; FP8 linears
quantize their input, in float64). Rows: eager without and with the model's own FP8 cache, rtc with
exact passes only, and with each switch that changes numerics on top. The error of a step is the
norm of the difference over the norm of the reference, of the outputs; median and largest over the
steps.
"run to run": the row before, on inputs that differ by one rounding to the model's dtype.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import rtc
from bench.bench_step import _commit, _machine
from rtc.model import PRESETS, build, example_inputs

CALIBRATED = {"quantize": "calibrated"}
ROWS: dict[str, tuple[bool, dict[str, Any] | None]] = {
    # name -> (the model quantizes its cache, options of rtc; None: eager)
    "eager": (False, None),
    "eager, run to run": (False, None),
    "eager, its own FP8 cache (a maximum in every call)": (True, None),
    "rtc, exact passes": (False, {}),
    "rtc, FP8 cache, exact passes": (True, {}),
    "rtc, FP8 cache, calibrated scales": (True, CALIBRATED),
    "rtc, quantize_kv": (False, {**CALIBRATED, "quantize_kv": True}),
    "rtc, FP8 cache, calibrated, fp8_attention": (True, {**CALIBRATED, "fp8_attention": True}),
}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--preset", default="57b", choices=sorted(PRESETS))
    p.add_argument("--layers", type=int)
    p.add_argument("--passes", type=int)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype")
    p.add_argument("--out", default="bench/results/numerics.jsonl")
    args = p.parse_args()
    block = args.preset == "57b"
    dtype = getattr(torch, args.dtype or ("bfloat16" if args.device != "cpu" else "float32"))
    cfg = PRESETS[args.preset]
    cfg = dataclasses.replace(
        cfg, layers=args.layers or (1 if block else cfg.layers),
        passes=args.passes or (1 if block else cfg.passes), quantize_kv=False,
    )  # fmt: skip
    start = cfg.reset_period - 4 if block else 0
    steps = range(start, start + args.steps)

    def chain(name: str, quantized: bool, options: Any, wide: bool = False) -> list[torch.Tensor]:
        c = dataclasses.replace(cfg, quantize_kv=quantized)
        model = build(c, device=args.device, dtype=dtype, seed=0)
        generator = torch.Generator(args.device).manual_seed(1)
        for cache in model.caches.buffers():
            cache.normal_(generator=generator)
        model = model.double() if wide else model
        call = model if options is None else rtc.compile(model, options=rtc.Options(**options))
        outs = []
        for step in steps:
            noise, cond, at = example_inputs(c, step, seed=1, device=args.device, dtype=dtype)
            if "run to run" in name:
                noise = noise * (1 + torch.finfo(dtype).eps)
            if wide:
                noise, cond = noise.double(), cond.double()
            with torch.no_grad():
                outs.append(call(noise, cond, at).double().cpu())
        del call, model
        torch._dynamo.reset()
        gc.collect()
        return outs

    want = chain("float64", False, None, wide=True)
    print(f"{'median':>10}{'largest':>10}  ({len(want)} steps, {cfg.layers} layers, {dtype})")
    for name, (quantized, options) in ROWS.items():
        try:
            outs = chain(name, quantized, options)
        except Exception as e:
            print(f"{name}: {type(e).__name__}: {str(e)[:200]}")
            continue
        errors = [((o - w).norm() / w.norm()).item() for o, w in zip(outs, want, strict=True)]
        median, worst = statistics.median(errors), max(errors)
        print(f"{median:10.1e}{worst:10.1e}  {name}", flush=True)
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": _commit(),
            "machine": _machine(args.device), "torch": torch.__version__, "preset": args.preset,
            "layers": cfg.layers, "passes": cfg.passes, "dtype": str(dtype), "steps": len(want),
            "row": name, "options": options, "median": median, "largest": worst,
        }  # fmt: skip
        with Path(args.out).open("a") as f:
            f.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
