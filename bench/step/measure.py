"""Run sides of bench_step.py, alternating or one after the other, and sum up their step times."""

import contextlib
import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.launch import Launches
from bench.power import Sampler
from bench.step.sides import Side, free
from rtc.demo import stats
from rtc.model import Config, DiT, example_inputs

Row = dict[str, Any]

_HOST_STEPS = 9  # single calls whose host time is taken
_POOL = 64  # inputs that are drawn beforehand; a longer run uses them again
_FP8_PEAK = {"H100": 1979e12, "H200": 1979e12, "GH200": 1979e12}  # dense, SXM


class Inputs:
    """Inputs of any step, on the device: drawing and sending them is not part of a step."""

    def __init__(self, cfg: Config, count: int, device: str, dtype: torch.dtype) -> None:
        self.pool = [
            example_inputs(cfg, i, seed=1, device=device, dtype=dtype)[:2]
            for i in range(min(count, _POOL))
        ]

    def __call__(self, step: int) -> tuple[Tensor, Tensor, int]:
        return (*self.pool[step % len(self.pool)], step)


class TooFar(Exception):
    """Outputs differ from eager's by more than the tolerance."""


def _world() -> int:
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def summary(cfg: Config, seconds: Sequence[float], first_step: int) -> Row:
    """Statistics of timed steps, of which the first had the index `first_step`."""
    n = len(seconds)
    resets = [i for i in range(n) if (i + first_step) % cfg.reset_period == 0]
    med = statistics.median(seconds)
    return {
        "steps": n,
        "median_ms": med * 1e3,
        "p95_ms": sorted(seconds)[int(0.95 * (n - 1))] * 1e3,
        "mean_ms": sum(seconds) / n * 1e3,
        "late_ms": statistics.median(seconds[-max(1, n // 4) :]) * 1e3,
        "reset_over_median": max(seconds[i] for i in resets) / med if resets else None,
        "resets": len(resets),
        "reset_ratio": stats.steps(seconds, resets, skip=0).get("reset_ratio"),
        "worst_over_median": max(seconds) / med,
        "tflops": cfg.flops_per_step / _world() / med / 1e12,  # of one GPU
    }


def alternate(
    cfg: Config, sides: dict[str, Side], inputs: Inputs, steps: int, warmup: int, tolerance: float
) -> dict[str, Row]:
    """Every step on all sides in turn, each on a model of its own; outputs compared in every step.

    Drift of a shared machine's speed hits all sides alike. "eager" is the first. Raises TooFar.
    """
    sync = torch.cuda.synchronize if inputs(0)[0].is_cuda else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    error = dict.fromkeys(sides, 0.0)
    for step in range(warmup + steps):
        out = {}
        for name, side in sides.items():
            sync()
            t = time.perf_counter()
            out[name] = side(*inputs(step)).clone()
            sync()
            seconds[name].append(time.perf_counter() - t)
            far = relative(out[name], out["eager"])
            error[name] = max(error[name], far)
            if not far <= tolerance:
                raise TooFar(f"step {step}: {name} differs from eager by {far:.2e}")
    return {
        name: {
            "first_s": s[0],
            "error": error[name],
            **summary(cfg, s[warmup:], warmup),
            **sides[name].facts(),
        }
        for name, s in seconds.items()
    }


class Sequential:
    """One side after the other on one model: weights and caches are there once.

    Every side starts from the same random caches, a few steps before a reset of the positions, and
    its first `check` outputs are compared with eager's before it is timed.
    """

    def __init__(
        self, model: DiT, inputs: Inputs, device: str, check: int, warmup: int, tolerance: float
    ) -> None:
        self.model, self.cfg, self.inputs, self.device = model, model.cfg, inputs, device
        self.check, self.warmup, self.tolerance = check, warmup, tolerance
        self.start = max(0, self.cfg.reset_period - 3)
        self.cuda = device.startswith("cuda")
        self.reference: list[Tensor] = []

    def run(self, make: Callable[[], Side], steps: int, warm: bool = False) -> Row:
        """Make a side, check it, time `steps` steps (0: the checked ones), and close it.

        `warm`: compile once more, with nothing left but Inductor's caches, and time that too.
        An exception becomes the row's "failed".
        """
        row: Row = {}
        try:
            self._measure(make, steps, row)
            free(self.device)
            if warm:
                self._begin()
                with contextlib.closing(make()) as side:
                    row["warm_s"] = self._call(side, self.start)[1]
        except Exception as e:
            lines = str(e).strip().splitlines()
            row["failed"] = f"{type(e).__name__}: {lines[0] if lines else ''}"[:300]
            if not isinstance(e, TooFar):
                row["traceback"] = traceback.format_exc()[-2000:]
        side = None  # its memory goes before the next one comes
        free(self.device)
        if self.cuda:
            memory = row.setdefault("memory", {})
            memory["left"] = torch.cuda.memory_allocated() - sum(self._own())
        return row

    def _measure(self, make: Callable[[], Side], steps: int, row: Row) -> None:
        self._begin()
        with contextlib.closing(make()) as side:
            try:
                self._first_calls(side, row)
            except TooFar:
                row |= side.facts()  # rtc's report tells what it did
                raise
            if steps:
                self._timed(side, steps, row)
            row |= side.facts()

    def _begin(self) -> None:
        """The caches of a session that goes on: random, the same for every side."""
        self.model.reset_session()
        generator = torch.Generator(self.device).manual_seed(7)
        for cache in self.model.caches.buffers():
            cache.normal_(generator=generator)
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def _call(self, side: Side, step: int) -> tuple[Tensor, float]:
        t = time.perf_counter()
        out = side(*self.inputs(step))
        if self.cuda:
            torch.cuda.synchronize()
        return out.double().cpu(), time.perf_counter() - t

    def _first_calls(self, side: Side, row: Row) -> None:
        seconds, worst, reference = [], 0.0, self.reference
        made: list[Tensor] = []
        for i in range(self.check):
            out, took = self._call(side, self.start + i)
            seconds.append(took)
            made.append(out)
            row |= {"first_s": seconds[0], "first_calls_s": seconds.copy()}
            if reference:
                far = relative(out, reference[i])
                row["error"] = worst = worst if far <= worst else far  # NaN stays
                if not far <= self.tolerance:  # so that NaN is too far as well
                    raise TooFar(f"step {self.start + i} differs from eager by {far:.2e}")
        if not reference:  # the first side is eager
            self.reference = made
            row |= summary(self.cfg, seconds[1:] or seconds, self.start + 1) | {"error": 0.0}
        if self.cuda:
            row["memory"] = self._memory() | {"first_peak": torch.cuda.max_memory_allocated()}

    def _timed(self, side: Side, steps: int, row: Row) -> None:
        """Steps back to back: nothing waits for the device, so that the host runs ahead."""
        at = self.start + self.check
        for step in range(at, at + self.warmup):
            side(*self.inputs(step))
        at += self.warmup
        host: list[float] = []
        marks: list[Any] = []
        mark: Callable[[], Any]
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

            def mark() -> Any:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                return event
        else:
            mark = time.perf_counter
        with Sampler(self.device) as sampler:
            total = time.perf_counter()
            marks.append(mark())
            for step in range(at, at + steps):
                t = time.perf_counter()
                side(*self.inputs(step))
                host.append(time.perf_counter() - t)
                marks.append(mark())
            if self.cuda:
                torch.cuda.synchronize()
            total = time.perf_counter() - total
        pairs = itertools.pairwise(marks)
        seconds = [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in pairs]
        row |= summary(self.cfg, seconds, at)
        row |= {"total_s": total, "host_ms": statistics.median(host) * 1e3}
        row["power"] = sampler.summary()
        if self.cuda:
            row["memory"] |= self._memory()
            peak = next((v for k, v in _FP8_PEAK.items() if k in _name(self.device)), None)
            row["fp8_peak"] = row["tflops"] * 1e12 / peak if peak else None
            self._host(side, at + steps, row)

    def _host(self, side: Side, at: int, row: Row) -> None:
        """Host time of single calls on an idle device: until all is launched, and in all."""
        launched, whole = [], []
        with Launches() as launches:
            for step in range(at, at + _HOST_STEPS):
                torch.cuda.synchronize()
                t = time.perf_counter()
                side(*self.inputs(step))
                whole.append(time.perf_counter() - t)
                launched.append(launches.since(t))
        row["call_ms"] = statistics.median(whole) * 1e3
        if all(x is not None for x in launched):
            row["launch_ms"] = statistics.median(launched) * 1e3  # type: ignore[type-var, operator]

    def _memory(self) -> dict[str, int]:
        """Bytes: the highest so far, and what of that is neither weights nor caches."""
        weights, caches = self._own()
        peak = torch.cuda.max_memory_allocated()
        free_bytes, all_bytes = torch.cuda.mem_get_info()
        return {
            "weights": weights,
            "caches": caches,
            "peak": peak,
            "rest": peak - weights - caches,
            "reserved": torch.cuda.max_memory_reserved(),
            "used": all_bytes - free_bytes,
        }

    def _own(self) -> tuple[int, int]:
        """Bytes of the weights and of the caches."""
        weights = sum(p.nbytes for p in self.model.parameters())
        return weights, sum(b.nbytes for b in self.model.caches.buffers())


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device)
