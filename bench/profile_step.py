"""Kernels of one step by device time: where the milliseconds of a compiled step go.

python bench/profile_step.py --layers 2 --options '{"quantize": "calibrated"}'
"""

import argparse
import collections
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity, profile

import rtc
from rtc.model import PRESETS, build, example_inputs


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--preset", default="57b", choices=sorted(PRESETS))
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--passes", type=int, default=2)
    p.add_argument("--rows", type=int, default=24)
    p.add_argument("--options", default='{"quantize": "calibrated"}', help="of rtc.Options, JSON")
    args = p.parse_args()

    cfg = dataclasses.replace(PRESETS[args.preset], layers=args.layers, passes=args.passes)
    model = build(cfg, device="cuda", dtype=torch.bfloat16, seed=0)
    compiled = rtc.compile(model, options=rtc.Options(**json.loads(args.options)))
    for step in range(6):
        compiled(*example_inputs(cfg, step, seed=1, device="cuda", dtype=torch.bfloat16))
    inputs = [
        example_inputs(cfg, step, seed=1, device="cuda", dtype=torch.bfloat16)
        for step in range(6, 10)
    ]
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for x in inputs:
            compiled(*x)
        torch.cuda.synchronize()
    total: dict[str, float] = collections.defaultdict(float)
    count: collections.Counter[str] = collections.Counter()
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name] += event.time_range.elapsed_us()
            count[event.name] += 1
    n = len(inputs) * cfg.calls
    print(f"{'us a block':>11}{'a block':>9}{'us each':>9}  kernel ({cfg.calls} blocks a step)")
    for name in sorted(total, key=total.get, reverse=True)[: args.rows]:  # type: ignore[arg-type]
        each = total[name] / count[name]
        print(f"{total[name] / n:11.1f}{count[name] / n:9.2f}{each:9.1f}  {name[:90]}")
    print(f"{sum(total.values()) / n:11.1f}  all kernels")
    print(compiled.report())


if __name__ == "__main__":
    main()
