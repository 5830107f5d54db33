"""When a call had handed its work to the device: after its last replay of a CUDA graph."""

import time
from typing import Any

import torch


class Launches:
    """Notes the time of the last `CUDAGraph.replay`. A context manager."""

    def __enter__(self) -> "Launches":
        self.at: float | None = None
        self._replay: Any = torch.cuda.CUDAGraph.replay
        replay = self._replay

        def noted(graph: Any) -> None:
            replay(graph)
            self.at = time.perf_counter()

        torch.cuda.CUDAGraph.replay = noted  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        torch.cuda.CUDAGraph.replay = self._replay  # type: ignore[method-assign]

    def since(self, start: float) -> float | None:
        """Seconds from `start` to the last replay, None if there was none after it."""
        return self.at - start if self.at is not None and self.at >= start else None
