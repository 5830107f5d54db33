"""First call in a new process with Inductor's cache filled: what a restart costs.

    python -m rtc.demo.warm '{"kind": "rtc", "settings": {...}, "inductor": {...}}'

prints one JSON line, ``{"seconds": ...}``. TORCHINDUCTOR_CACHE_DIR names the filled cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

from rtc.demo import sides
from rtc.demo.settings import Settings
from rtc.options import Options


def measure(settings: Settings, kind: str, inductor: dict[str, Any], folder: str) -> float:
    """Seconds of the first call. RuntimeError with the last line of a process that failed."""
    values = {
        k: getattr(settings, k) for k in ("preset", "chunks", "dtype", "device", "seed", "threads")
    }
    job = {
        "kind": kind,
        "settings": values,
        "options": settings.options.to_dict(),
        "inductor": inductor,
    }
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
    env["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
    done = subprocess.run(
        [sys.executable, "-m", "rtc.demo.warm", json.dumps(job)],
        capture_output=True, text=True, env=env, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(lines[-1])
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def main(job: dict[str, Any]) -> float:
    settings = Settings(**job["settings"], options=Options(**job["options"]))
    if settings.threads:  # Inductor's code depends on it
        torch.set_num_threads(settings.threads)
    if job["kind"] == "stock":
        side = sides.stock_side(settings, job["inductor"])
    else:
        side = sides.rtc_side(settings, settings.options, "rtc", "rtc")
    side.step(sides.inputs(settings, 0))
    return side.seconds[0]


if __name__ == "__main__":
    print(json.dumps({"seconds": main(json.loads(sys.argv[1]))}))
