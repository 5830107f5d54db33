"""The machine, its versions, and whether Inductor can generate code on it."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from typing import Any

import torch


def describe(device: str) -> dict[str, Any]:
    """What a reader needs to place the timings. ``busy_cores``: used by others before the run."""
    import rtc

    out: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "busy_cores": round(busy_cores(), 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rtc": rtc.__version__,
        "compiler": _compiler(),
    }
    if device.startswith("cuda"):
        out["gpu"] = torch.cuda.get_device_name(device)
    return out


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that other processes keep busy, over a moment in which this one sleeps."""

    def used() -> float:
        try:
            with open("/proc/stat", encoding="utf-8") as f:
                user, nice, system, _idle, _iowait, *rest = map(int, f.readline().split()[1:9])
        except (OSError, ValueError):
            return 0.0
        return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")

    before, start = used(), time.perf_counter()
    time.sleep(seconds)
    return (used() - before) / (time.perf_counter() - start)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            names = [line.partition(":")[2].strip() for line in f if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _compiler() -> str | None:
    """First line of the C++ compiler's version, None without one."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        name = get_cpp_compiler()
        done = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=20)
        return done.stdout.splitlines()[0]
    except Exception:
        return None


def available_bytes(device: str) -> int | None:
    """Free memory of the device, None where that is unknown."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="utf-8") as f:
            fields = dict(line.split(":", 1) for line in f)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def lowering_problem(device: str) -> str | None:
    """Why Inductor cannot generate code here, by compiling one small function; None if it can."""
    if not device.startswith("cuda") and _compiler() is None:
        return (
            "no C++ compiler: Inductor needs one on the CPU. Install g++ or clang++, "
            "or name one in the environment variable CXX"
        )
    try:
        torch.compile(lambda x: (x + 1).sin())(torch.zeros(8, device=device))
    except Exception as e:
        cause = getattr(e, "inner_exception", None) or e
        lines = [x for x in str(cause).splitlines() if x.strip()] or [""]
        return f"Inductor cannot compile here: {type(cause).__name__}: {lines[0]}"
    return None
