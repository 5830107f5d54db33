"""Power, SM clock, temperature and memory of a GPU, sampled while something else runs.

with Sampler("cuda") as sampler:
    ...
sampler.summary()  # None on a CPU, or where neither NVML (package nvidia-ml-py) nor nvidia-smi is
"""

import importlib
import shutil
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

Reading = tuple[float, float, float, float]  # W, MHz, degrees C, bytes in use

_FIELDS = "power.draw,clocks.sm,temperature.gpu,memory.used"


class Sampler:
    """Samples every `every` seconds in a thread of its own between enter and exit."""

    def __init__(self, device: str, every: float = 0.2) -> None:
        self.readings: list[Reading] = []
        self.every = every
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._source: Callable[[], Iterator[Reading]] | None = None
        if device.startswith("cuda"):
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            self._source = self._find()

    def __enter__(self) -> "Sampler":
        if self._source is not None:
            self._thread = threading.Thread(target=self._run, args=(self._source,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def summary(self) -> dict[str, float] | None:
        """Mean and highest power, median and lowest clock, highest temperature and memory."""
        if not self.readings:
            return None
        watts, clocks, degrees, used = (list(column) for column in zip(*self.readings, strict=True))
        return {
            "power_w": statistics.fmean(watts),
            "power_max_w": max(watts),
            "sm_mhz": statistics.median(clocks),
            "sm_min_mhz": min(clocks),
            "temperature_c": max(degrees),
            "used_bytes": max(used),
            "samples": len(watts),
        }

    def _run(self, source: Callable[[], Iterator[Reading]]) -> None:
        for reading in source():
            self.readings.append(reading)
            if self._stop.is_set():
                break

    def _find(self) -> Callable[[], Iterator[Reading]] | None:
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            return lambda: self._nvml(nvml, handle)
        except Exception:  # not installed, no driver, or no rights: nvidia-smi may still do
            return self._smi if shutil.which("nvidia-smi") else None

    def _nvml(self, nvml: Any, handle: Any) -> Iterator[Reading]:
        while not self._stop.wait(self.every):
            yield (
                nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                nvml.nvmlDeviceGetMemoryInfo(handle).used,
            )

    def _smi(self) -> Iterator[Reading]:
        """One process that prints a line every `every` seconds; it ends with the sampler."""
        cmd = ["nvidia-smi", "-i", self._uuid, f"--query-gpu={_FIELDS}"]
        cmd += ["--format=csv,noheader,nounits", "-lms", str(int(1000 * self.every))]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(cmd, stdout=pipe, stderr=null, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    try:
                        watts, mhz, degrees, mib = (float(x) for x in line.split(","))
                    except ValueError:  # "[N/A]", or a message
                        if self._stop.is_set():
                            break
                        continue
                    yield watts, mhz, degrees, mib * 2**20
            finally:
                process.kill()
