"""Progress on stderr: a live line on a terminal, one line a stage in a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars

from rtc.show.text import console

EVERY = 25  # units between two lines in a pipe


class Stage:
    """One stage that is under way."""

    def __init__(self, con: Console, bars: Bars | None, task: TaskID, total: int | None) -> None:
        self._console, self._bars, self._task = con, bars, task
        self._total, self._done = total, 0

    def say(self, text: str) -> None:
        """What it is doing now."""
        if self._bars is not None:
            self._bars.update(self._task, detail=text)

    def advance(self, text: str = "") -> None:
        """One unit is done. Draws here and now, so that nothing is drawn while a step is timed."""
        self._done += 1
        if self._bars is not None:
            self._bars.update(self._task, advance=1, detail=text)
            self._bars.refresh()
        elif self._done % EVERY == 0:
            self._console.print(f"  {self._done} of {self._total}: {text}", markup=False)


class Progress:
    def __init__(self, con: Console | None = None) -> None:
        self.console = con or console(stderr=True)

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        """A stage of ``total`` units, or of unknown length (then drawn by a thread of its own)."""
        start = time.perf_counter()
        if self.console.is_terminal:
            columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}")]
            columns += [BarColumn(30), MofNCompleteColumn()] if total else []
            columns += [TimeElapsedColumn(), TextColumn("[dim]{task.fields[detail]}")]
            bars = Bars(
                *columns, console=self.console, transient=True, auto_refresh=total is None,
                refresh_per_second=4,
            )  # fmt: skip
            with bars:
                yield Stage(self.console, bars, bars.add_task(name, total=total, detail=""), total)
        else:
            self.console.print(f"{name} ...", markup=False)
            yield Stage(self.console, None, TaskID(0), total)
        self.console.print(
            f"{name}: {time.perf_counter() - start:.1f} s", style="dim", markup=False
        )

    def note(self, text: str) -> None:
        self.console.print(text, style="yellow", markup=False)
