"""When a call had handed its work to the device (after its last replay of a graph), and what took
the time until then."""

import functools
import statistics
import time
from typing import Any

import torch

from rtc.runtime.graph import GraphRuntime
from rtc.runtime.session import Session
from rtc.runtime.step import Step


class Launches:
    """Notes the time of the last `replay` of `kind`. A context manager."""

    def __init__(self, kind: Any = torch.cuda.CUDAGraph) -> None:
        self.kind = kind

    def __enter__(self) -> "Launches":
        self.at: float | None = None
        self._replay: Any = self.kind.replay
        replay = self._replay

        def noted(graph: Any) -> None:
            replay(graph)
            self.at = time.perf_counter()

        self.kind.replay = noted
        return self

    def __exit__(self, *exc: object) -> None:
        self.kind.replay = self._replay

    def since(self, start: float) -> float | None:
        """Seconds from `start` to the last replay, None if there was none after it."""
        return self.at - start if self.at is not None and self.at >= start else None


# What ends each part of a call, in order: (a name, the class, its method, at its entry or its end).
# None: the class of captured graphs.
_MARKS: list[tuple[str, Any, str, str]] = [
    ("guards lifted", Session, "before_call", "end"),
    ("Dynamo's guards", Session, "before_graph", "entry"),
    ("versions", Session, "before_graph", "end"),
    ("AOT's wrapper", GraphRuntime, "__call__", "entry"),
    ("states and what is ahead", GraphRuntime, "_run", "entry"),
    ("inputs", Step, "__call__", "entry"),
    ("staging", None, "replay", "entry"),
    ("launch of the graph", None, "replay", "end"),
]


class Parts:
    """Notes when a call passes the places above. A context manager around all calls."""

    def __init__(self, kind: Any = torch.cuda.CUDAGraph) -> None:
        self.marks = [(m, cls or kind, name, when) for m, cls, name, when in _MARKS]

    def __enter__(self) -> "Parts":
        self.at: dict[str, float] = {}
        self.calls: list[dict[str, float]] = []
        self.kept = [(kind, name, getattr(kind, name)) for _, kind, name, _ in self.marks]
        for mark, kind, name, when in self.marks:
            setattr(kind, name, self._noting(getattr(kind, name), mark, when))
        return self

    def _noting(self, method: Any, mark: str, when: str) -> Any:
        @functools.wraps(method)
        def noting(*args: Any, **kwargs: Any) -> Any:
            if when == "entry":
                self.at[mark] = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                if when == "end":
                    self.at[mark] = time.perf_counter()

        return noting

    def __exit__(self, *exc: object) -> None:
        for kind, name, method in reversed(self.kept):
            setattr(kind, name, method)

    def call(self, start: float) -> None:
        """After a call that began at `start`: keep its parts, in seconds."""
        found, last = {}, start
        for mark, *_ in _MARKS:
            if self.at.get(mark, 0.0) >= last:
                found[mark] = self.at[mark] - last
                last = self.at[mark]
        self.calls.append(found)

    def medians(self) -> dict[str, float]:
        """Milliseconds by part, of the calls kept."""
        names = [m for m, *_ in _MARKS if any(m in c for c in self.calls)]
        return {m: 1e3 * statistics.median(c[m] for c in self.calls if m in c) for m in names}
