"""What each pass is worth: rtc with the passes that applied switched on one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from rtc.demo import sides, stats
from rtc.demo.check import Check
from rtc.demo.settings import Settings, without
from rtc.demo.sides import Side
from rtc.errors import OptionsError
from rtc.options import Options
from rtc.passes.pipeline import names as pass_names
from rtc.show.progress import Stage

CHUNKS = 30


class Ladder:
    """The first rung has all passes off; the last one is rtc itself, timed along again.

    Switched on in the order of the pipeline: a later pass may need an earlier one.
    """

    def __init__(
        self, settings: Settings, options: Options, folder: str,
        stage: Callable[..., AbstractContextManager[Stage]], note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.settings, self.options, self.folder = settings, options, folder
        self.stage, self.note = stage, note
        self.rungs: list[Side] = []
        self.full: list[float] = []  # seconds of rtc, chunk by chunk beside the rungs
        self.label = ""

    def compile(self, report: dict[str, Any]) -> None:
        """``report``: of rtc with everything on. One compilation a rung."""
        applied = {p["name"] for g in report["graphs"] for p in g["passes"] if p["applied"]}
        on = [n for n in pass_names() if n in applied]
        self.label = " + ".join(on)
        for i in range(len(on)):
            self._rung(" + ".join(on[:i]) or "all passes off", without(self.options, on[i:]))

    def _rung(self, label: str, options: Options) -> None:
        key = label.replace(" ", "")
        with self.stage(f"compiling with rtc, {label}") as stage:
            side = sides.rtc_side(self.settings, options, key, label, on_phase=stage.say)
            try:
                with sides.code_cache(f"{self.folder}/{key}"):
                    side.step(sides.inputs(self.settings, 0))
            except OptionsError as e:
                self.note(f"{label} is not a legal combination: {e}")
                return
        self.rungs.append(side)

    def stream(
        self, full: Side, outputs: Sequence[tuple[Tensor, Tensor | None]], check: Check
    ) -> None:
        """``outputs``: eager's and the reference's, of the chunks from 0 on."""
        n, begin = min(CHUNKS, len(outputs)), len(full.seconds)
        if not self.rungs:
            return
        try:
            name = f"streaming {n} chunks with passes switched off"
            with self.stage(name, total=n - 1) as stage, sides.no_collections():
                for i in range(1, n):
                    eager, reference = outputs[i]
                    for side in self.rungs:
                        out = side.step(sides.inputs(self.settings, i))
                        check.variant(side.label, i, eager, out, reference)
                    # rtc goes on with its own stream: the work of a step does not depend on data
                    full.step(sides.inputs(self.settings, begin + i - 1))
                    stage.advance()
        finally:
            self.full = full.seconds[begin:]
            del full.seconds[begin:]

    def close(self) -> list[dict[str, Any]]:
        """The rows, slowest rung first; frees the rungs."""
        tail = [0.0, *self.full]  # in step with the rungs, whose first call compiles
        rows = []
        for label, seconds, last in [
            *((x.label, x.seconds, False) for x in self.rungs), (self.label, tail, True),
        ]:  # fmt: skip
            found = stats.steps(seconds, [])
            if found:
                ratio = stats.paired_ratio(seconds, tail)
                rows.append({"label": label, **found, "ratio": ratio, "full": last})
        for side in self.rungs:
            side.close()
        return rows
