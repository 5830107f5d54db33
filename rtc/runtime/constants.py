"""Values that follow from parameters and calibrated scales alone: made once, and when those change.

The compiled program takes them as inputs more, at fixed addresses, so that a captured graph of it
stays right when they are made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rtc.runtime.state import Stamp


class WithConstants:
    """``run`` on its arguments and on what ``make`` gives for those at ``where``."""

    _boxed_call = True

    def __init__(
        self, run: Callable[[list[Any]], Any], make: Callable[[list[Any]], Sequence[torch.Tensor]],
        where: Sequence[int], epoch: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        """``epoch`` counts how often the user asked to forget (``compiled.invalidate()``)."""
        self.epoch = epoch
        self.run, self.make, self.where = run, make, list(where)
        self.stamps: list[Stamp] = []
        self.held: list[torch.Tensor] = []
        self.made = 0

    def refresh(self, args: Sequence[Any]) -> None:
        """Make the values anew if a parameter or a scale is another, or was written.

        Writes to inference tensors cannot be seen: with such, in every call.
        """
        given, epoch = [args[i] for i in self.where], self.epoch()
        if self.held and len(self.stamps) == len(given):
            unseen = any(t.is_inference() for t in given)
            if not unseen and all(
                s.is_of(t, epoch) for s, t in zip(self.stamps, given, strict=True)
            ):
                return
        new = self.make(given)
        if self.held:
            for old, x in zip(self.held, new, strict=True):
                old.copy_(x)
        else:
            with torch.inference_mode(False):  # kept for calls in any mode
                self.held = [torch.empty_like(x).copy_(x) for x in new]
        self.stamps = [Stamp(t, epoch) for t in given]
        self.made += 1

    def __call__(self, args: list[Any]) -> Any:
        self.refresh(args)
        return self.run([*args, *self.held])
