"""When a call had handed its work to the device: after its last replay of a graph."""

import time
from typing import Any

import torch


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
