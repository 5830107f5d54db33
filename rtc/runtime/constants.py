"""Values that follow from parameters and calibrated scales alone: made once, and when those change.

The compiled program takes them as inputs more, at fixed addresses, so that a captured graph of it
stays right when they are made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rtc.passes.analysis.host import InputInfo
from rtc.runtime.state import Stamps


class WithConstants:
    """``run`` on its arguments and on what ``make`` gives for those at ``where``."""

    _boxed_call = True

    def __init__(
        self, run: Callable[[list[Any]], Any], make: Callable[[list[Any]], Sequence[torch.Tensor]],
        where: Sequence[int], epoch: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        """``where`` rises; ``epoch`` counts how often the user asked to forget
        (``compiled.invalidate()``)."""
        self.epoch = epoch
        self.run, self.make, self.where = run, make, list(where)
        # of what the values were made from: all of it, and without what ``marks`` stand for
        self.stamps = self.own = Stamps([], 0)
        self.marks: list[object] = []
        self.held: list[torch.Tensor] = []
        self.made = 0

    def refresh(
        self, args: Sequence[Any], more: Sequence[Any] = (), marks: Sequence[object] = ()
    ) -> None:
        """Make the values anew if a parameter or a scale is another, or was written.

        Writes to inference tensors cannot be seen: with such, in every call. ``more``: arguments
        after ``args``, which are what they were, unwritten, while ``marks`` are the same objects.
        """
        epoch, n = self.epoch(), len(args)
        looked_at = [args[i] for i in self.where if i < n]
        if marks and self.marks == [*marks] and self.own.are_of(looked_at, epoch):
            return
        given = looked_at + [more[i - n] for i in self.where if i >= n]
        if not self.held or not self.stamps.are_of(given, epoch):
            self.stamps = self.own = Stamps([], 0)  # after a Ctrl-C, none of them holds
            self.marks = []
            self._make(given)
            self.stamps = Stamps(given, epoch)
        self.own, self.marks = Stamps(looked_at, epoch), [*marks]

    def _make(self, given: list[Any]) -> None:
        new = self.make(given)
        if self.held:
            for old, x in zip(self.held, new, strict=True):
                old.copy_(x)
        else:
            with torch.inference_mode(False):  # kept for calls in any mode
                self.held = [torch.empty_like(x).copy_(x) for x in new]
        self.made += 1

    def __call__(self, args: list[Any]) -> Any:
        self.refresh(args)
        return self.run([*args, *self.held])


class ConstEval:
    """Values of constant subexpressions on their own device, from the call's inputs."""

    def __init__(self, inputs: Mapping[fx.Node, InputInfo], get_attr: Callable[[str], Any]) -> None:
        self.inputs, self.get_attr = inputs, get_attr
        self.args: Sequence[Any] = ()
        self.scales: dict[fx.Node, torch.Tensor] = {}

    def __call__(self, node: fx.Node) -> Any:
        if node in self.scales:
            return self.scales[node]
        if node.op == "placeholder":
            return self.args[self.inputs[node].index]
        if node.op == "get_attr":
            return self.get_attr(str(node.target))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self)
        return node.target(*args, **kwargs)  # type: ignore[operator]
