"""Writes of compiled graphs to inference tensors, which count none themselves.

Counted by memory, as a view may be what is written. Writes from outside are the user's to tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_MOST = 4096  # memories; what is freed is not heard of
_counts: dict[int, int] = {}
_clock = 0  # of all writes: a memory that comes back at an address has another count
_base = 0  # of memories whose count is not known


def wrote(values: Iterable[Any]) -> None:
    """Note that a graph wrote these tensors; others than inference tensors count it themselves."""
    global _clock, _base
    for t in values:
        if isinstance(t, torch.Tensor) and t.is_inference():
            _clock += 1
            if len(_counts) >= _MOST:
                _counts.clear()
                _base = _clock
            _counts[t.untyped_storage()._cdata] = _clock


def count(t: torch.Tensor) -> int:
    """Another number after every write that was noted, and perhaps at other times."""
    return _counts.get(t.untyped_storage()._cdata, _base)


__all__ = ["count", "wrote"]
