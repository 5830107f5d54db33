"""Cold and warm compile time of a preset, whole model in one graph.

    python bench/bench_compile.py --preset deep
    python bench/bench_compile.py --preset 57b --device cuda --dtype bfloat16 \
        --options '{"quantize": "calibrated", "fp8_attention": true}'

Cold: an empty Inductor cache. Warm: the same model compiled again in a new process on that cache.
The phases add up to the whole first call; --set changes sizes of the preset (the widths that make a
model of many layers small enough to compile anywhere). cpu: the process's own seconds, all threads.
Prints a table and appends a JSON line to bench/results/compile.jsonl.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import dataclasses, json, sys, time
import torch, rtc
from rtc.model import PRESETS, build, example_inputs
preset, dtype, device, sizes, options = sys.argv[1:]
cfg = dataclasses.replace(PRESETS[preset], **json.loads(sizes))
kw = dict(device=device, dtype=getattr(torch, dtype), seed=0)
model = build(cfg, **kw)
compiled = rtc.compile(model, options=rtc.Options(**json.loads(options)))
inputs = example_inputs(cfg, 0, **kw)
t, cpu = time.perf_counter(), time.process_time()
compiled(*inputs)
if device.startswith("cuda"):
    torch.cuda.synchronize()
seconds, cpu = time.perf_counter() - t, time.process_time() - cpu
report = compiled.report().to_dict()
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "graphs": len(report["graphs"]),
                  "nodes": report["graphs"][0]["nodes"], "phases": report["graphs"][0]["seconds"],
                  "counts": compiled.report().counts(), "torch": torch.__version__,
                  "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else None}))
"""


def main() -> None:
    args = _arguments()
    sizes = {key: int(value) for key, value in (pair.split("=") for pair in args.set)}
    runs = {}
    with tempfile.TemporaryDirectory(prefix="rtc-bench-") as cache:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        for name in ("cold", "warm"):
            given = [args.preset, args.dtype, args.device, json.dumps(sizes), args.options]
            cmd = [sys.executable, "-c", CHILD, *given]
            done = subprocess.run(cmd, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            runs[name] = json.loads(done.stdout.strip().splitlines()[-1])
            gpu = runs[name].pop("gpu")
            print(_row(name, runs[name]), flush=True)
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "preset": " ".join([args.preset, *args.set]),
        "machine": gpu or f"{platform.machine()}, {os.cpu_count()} threads",
        "device": args.device,
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        **runs,
    }
    if json.loads(args.options):
        line["options"] = json.loads(args.options)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as f:
        f.write(json.dumps(line) + "\n")


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--preset", default="deep")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--device", default="cpu")
    p.add_argument("--options", default="{}", metavar="JSON", help="of rtc.Options")
    p.add_argument("--set", nargs="*", default=[], metavar="KEY=INT", help="other sizes")
    p.add_argument("--out", default="bench/results/compile.jsonl")
    return p.parse_args()


def _row(name: str, run: dict) -> str:
    phases = ", ".join(f"{k} {v:.1f}" for k, v in run["phases"].items())
    size = f"{run['graphs']} graph, {run['nodes']} nodes"
    return f"{name}: {run['seconds']:.1f} s, cpu {run['cpu_seconds']:.1f} ({phases}); {size}"


if __name__ == "__main__":
    main()
