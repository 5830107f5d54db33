"""The demo, stage by stage. What is measured is kept at once: an interrupt loses nothing."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from rtc.demo import machine, sides, stats, warm
from rtc.demo.check import Check
from rtc.demo.ladder import CHUNKS as LADDER_CHUNKS
from rtc.demo.ladder import Ladder
from rtc.demo.result import collect
from rtc.demo.settings import Settings
from rtc.demo.sides import Side
from rtc.model import build, example_inputs
from rtc.show.progress import Progress, Stage
from rtc.testing import check_compile

EXACT_STEPS = 60


def run(settings: Settings, progress: Progress | None = None) -> dict[str, Any]:
    """Everything that ``rtc demo`` shows, as plain data. A failed check is in ``failures``."""
    demo = Demo(settings, progress or Progress())
    return demo.run()


class Demo:
    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.settings, self.progress = settings, progress
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.exactness: dict[str, Any] | None = None
        self.check = Check(settings.torch_dtype, settings.options.quantize)
        self.sides: list[Side] = []
        self.reference: Side | None = None
        self.ladder: list[dict[str, Any]] = []
        self.compile: dict[str, dict[str, Any]] = {}
        self.report: dict[str, Any] | None = None
        self.outputs: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # eager's, reference's
        self.inductor: dict[str, Any] = {}
        self.options = settings.options
        self.machine: dict[str, Any] = {}
        self.stage_name = "starting"
        self.folder = ""

    def run(self) -> dict[str, Any]:
        started, interrupted, threads = time.time(), None, torch.get_num_threads()
        self.folder = tempfile.mkdtemp(prefix="rtc-demo-")
        # once more at exit: after an interrupt, a compile worker may write there a little longer
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        try:
            self._all()
        except KeyboardInterrupt:
            interrupted = self.stage_name
        finally:
            self._read_report()
            for side in self.sides:
                side.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            torch.set_num_threads(threads)
        return collect(self, started, interrupted)

    def _all(self) -> None:
        self.machine = machine.describe(self.settings.device)
        self._choose_threads()
        self._choose_lowering()
        self._exactness()
        self._compile()
        self._stream()
        if not self.settings.quick and self.options.lowering != "eager" and not self.failures:
            self._ladder()
            self._warm()

    @contextmanager
    def _stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        self.stage_name = name
        with self.progress.stage(name, total) as stage:
            yield stage

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self.progress.note(text)

    # -- stages --------------------------------------------------------------------------------

    def _choose_threads(self) -> None:
        """As many as there are free cores: one thread that has to share its core makes all wait.

        On two cores under load, two threads took about ten times as long as one.
        """
        cores, busy = self.machine["cores"], self.machine["busy_cores"]
        have = torch.get_num_threads()
        threads = self.settings.threads or max(1, min(have, round(cores - busy)))
        torch.set_num_threads(threads)
        self.machine["threads"] = threads
        if busy > 0.2:
            fewer = f", and {threads} instead of {have} threads are used" if threads < have else ""
            self.note(
                f"other processes keep {busy:.1f} of this machine's {cores} cores busy: the "
                f"timings are noisy{fewer}"
            )

    def _choose_lowering(self) -> None:
        if self.options.lowering == "eager":
            self.note("lowering eager: numerics are checked; the timings say nothing about speed")
            return
        with self._stage("trying the compiler"), sides.code_cache(f"{self.folder}/try"):
            problem = machine.lowering_problem(self.settings.device)
        if problem is None:
            self.inductor = sides.inductor_settings(self.settings)
            given = {**self.inductor, **self.options.inductor}
            self.options = replace(self.options, inductor=given)
            return
        self.options = replace(self.options, lowering="eager")
        self.note(
            f"{problem}. Going on with lowering eager: numerics are checked, torch.compile is "
            "left out, and the timings say nothing about speed"
        )

    def _exactness(self) -> None:
        """Float64 on the smallest preset: a wrong slot or position cannot hide behind rounding."""
        options = replace(self.options, quantize="exact", inductor={})
        with (
            self._stage("float64 against eager, preset tiny"),
            sides.code_cache(f"{self.folder}/tiny"),
        ):
            result = check_compile(
                lambda: build("tiny", dtype=torch.float64),
                lambda step: (example_inputs("tiny", step, dtype=torch.float64), {}),
                steps=EXACT_STEPS, options=options, check=False, every=16, name="tiny float64",
            )  # fmt: skip
        self.exactness = {
            "preset": "tiny", "dtype": "float64", "steps": len(result.errors), "bound": 1e-10,
            "passed": result.passed, "max_abs_error": result.worst,
            "outputs": result.outputs, "caches": result.caches,
            "failure": None if result.passed else str(result),
        }  # fmt: skip
        if not result.passed:
            self.failures.append(f"preset tiny in float64 differs from eager: {result}")
        torch._dynamo.reset()

    def _compile(self) -> None:
        s = self.settings
        with self._stage("building the models"):
            self.sides = [sides.eager_side(s)]
            if self.check.needs_reference:
                self.reference = sides.reference_side(s)
        first = [(self.sides[0], "eager")]
        if self.options.lowering != "eager":
            first.append((sides.stock_side(s, self.inductor), "torch.compile"))
        trees = {"eager": self._first(*first[0])}
        for side, name in first[1:]:
            try:
                trees[side.key] = self._first(side, name)
                self.sides.append(side)
            except Exception as e:  # stock torch.compile is not what is checked here
                self.note(f"torch.compile failed and is left out: {type(e).__name__}: {_line(e)}")
        with self._stage("compiling with rtc") as stage:
            side = sides.rtc_side(s, self.options, "rtc", "rtc", on_phase=stage.say)
            self.sides.append(side)
            trees["rtc"] = self._compiled(side)
        self._compare(0, trees)

    def _first(self, side: Side, name: str) -> torch.Tensor:
        if side.key == "eager":
            return side.step(sides.inputs(self.settings, 0))
        with self._stage(f"compiling with {name}"):
            return self._compiled(side)

    def _compiled(self, side: Side) -> torch.Tensor:
        """The first call, with a code cache of its own."""
        with sides.code_cache(f"{self.folder}/{side.key}"):
            out = side.step(sides.inputs(self.settings, 0))
        self.compile[side.key] = {"cold_s": side.seconds[0], "warm_s": None}
        return out

    def _stream(self) -> None:
        """The same chunks through every side, in turn, so that a slow moment hits all alike."""
        n = self.settings.chunks
        graphs = sides.graphs_compiled()
        with self._stage(f"streaming {n} chunks", total=n - 1) as stage, sides.no_collections():
            for i in range(1, n):
                args = sides.inputs(self.settings, i)
                k = i % len(self.sides)
                trees = {x.key: x.step(args) for x in (*self.sides[k:], *self.sides[:k])}
                if not self._compare(i, trees):
                    break
                stage.advance(self._so_far())
        if sides.graphs_compiled() > graphs:
            self.note(f"{sides.graphs_compiled() - graphs} graphs were compiled again on the way")
        if self.check.failure is None:
            with self._stage("comparing all caches"):
                caches = {x.key: x.caches() for x in self.sides}
                ref = self.reference.caches() if self.reference else None
                self.check.compare("cache", self.settings.chunks - 1, caches, ref)
        self._read_report()
        if self.check.failure is not None:
            self.failures.append(f"rtc differs from eager at {self.check.failure}")

    def _compare(self, step: int, trees: dict[str, torch.Tensor]) -> bool:
        ref = None
        if self.reference is not None:
            ref = self.reference.step(sides.inputs(self.settings, step, double=True))
        if step < LADDER_CHUNKS:
            self.outputs.append((trees["eager"], ref))
        return self.check.compare("output", step, trees, ref)

    def _so_far(self) -> str:
        parts = []
        for side in self.sides:
            s = stats.steps(side.seconds, self.settings.resets)
            if s:
                parts.append(f"{side.label} {s['median_ms']:.0f} ms")
        return ", ".join(parts)

    def _read_report(self) -> None:
        side = next((x for x in self.sides if x.key == "rtc"), None)
        if side is not None:
            self.report = side.call.report().to_dict()  # type: ignore[attr-defined]

    # -- beyond the three -----------------------------------------------------------------------

    def _ladder(self) -> None:
        assert self.report is not None
        ladder = Ladder(self.settings, self.options, self.folder, self._stage, self.note)
        full = next(x for x in self.sides if x.key == "rtc")
        ladder.compile(self.report)
        try:
            ladder.stream(full, self.outputs, self.check)
        finally:
            self.ladder = ladder.close()
        if self.check.failure is not None:
            self.failures.append(f"rtc with passes off differs from eager at {self.check.failure}")

    def _warm(self) -> None:
        for side in self.sides[1:]:
            with self._stage(f"compiling with {side.label} in a new process, code cache filled"):
                try:
                    seconds = warm.measure(
                        replace(
                            self.settings, options=self.options, threads=self.machine["threads"]
                        ),
                        side.key, self.inductor,
                        f"{self.folder}/{side.key}",
                    )  # fmt: skip
                    self.compile[side.key]["warm_s"] = seconds
                except RuntimeError as e:
                    self.note(f"no warm compile time of {side.label}: {e}")


def _line(e: BaseException) -> str:
    lines = [x for x in str(e).splitlines() if x.strip()]
    return lines[0] if lines else ""
