"""Cold and warm compile time of a preset, whole model in one graph.

    python bench/bench_compile.py --preset deep

Cold: an empty Inductor cache. Warm: the same model compiled again in a new process on that cache.
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
import json, sys, time
import torch, rtc
from rtc.model import build, example_inputs
preset, dtype, device = sys.argv[1:]
kw = dict(device=device, dtype=getattr(torch, dtype), seed=0)
model = build(preset, **kw)
compiled = rtc.compile(model)
t = time.perf_counter()
compiled(*example_inputs(preset, 0, **kw))
seconds = time.perf_counter() - t
report = compiled.report().to_dict()
print(json.dumps({"seconds": seconds, "graphs": len(report["graphs"]),
                  "nodes": report["graphs"][0]["nodes"], "phases": report["graphs"][0]["seconds"],
                  "counts": compiled.report().counts(), "torch": torch.__version__}))
"""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--preset", default="deep")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--device", default="cpu")
    p.add_argument("--out", default="bench/results/compile.jsonl")
    args = p.parse_args()
    runs = {}
    with tempfile.TemporaryDirectory(prefix="rtc-bench-") as cache:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        for name in ("cold", "warm"):
            cmd = [sys.executable, "-c", CHILD, args.preset, args.dtype, args.device]
            done = subprocess.run(cmd, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            runs[name] = json.loads(done.stdout.strip().splitlines()[-1])
            r = runs[name]
            phases = ", ".join(f"{k} {v:.1f}" for k, v in r["phases"].items())
            size = f"{r['graphs']} graph, {r['nodes']} nodes"
            print(f"{name}: {r['seconds']:.1f} s ({phases}); {size}")
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "preset": args.preset,
        "machine": f"{platform.machine()}, {os.cpu_count()} threads",
        "device": args.device,
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        **runs,
    }
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as f:
        f.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
