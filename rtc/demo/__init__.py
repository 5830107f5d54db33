"""The demo: a small autoregressive video model, streamed through eager, torch.compile and rtc.

``tiny`` and ``cpu`` are targets for ``rtc explain rtc.demo:tiny``.
"""

from __future__ import annotations

from typing import Any

from rtc.demo.settings import Settings
from rtc.demo.stages import run

__all__ = ["Settings", "cpu", "run", "tiny"]


def tiny() -> Any:
    """The smallest preset, as a target: model, args."""
    return _target("tiny")


def cpu() -> Any:
    """The preset that the demo streams, as a target: model, args."""
    return _target("cpu")


def _target(preset: str) -> Any:
    from rtc.model import build, example_inputs

    return build(preset), example_inputs(preset, 0)
