"""Bookkeeping of one view class: which content each place holds, made with which table rows.

Rows of tables are known by their keys (see ``rtc.passes.analysis.rowwise``). A kept slot is right
if it was made with the row that the coming call wants. Where the views are rotated and all want to
turn alike, the *frame* turns instead: queries are turned with it, slots stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class ClassState:
    """``cid`` [places]; ``made``, ``seen`` uint8 [places, width]: the key that each place was made
    with, and the one it was last found right for. Arrays are replaced, never written to, but for
    ``cid``, of which every call has a copy.
    """

    cid: np.ndarray
    made: np.ndarray | None = None
    seen: np.ndarray | None = None
    # rotation by which queries are turned instead of the slots: [D] complex, None for none
    frame: np.ndarray | None = None
    # the turns of the frame that some place has not been made with, and how many of them were
    # there already when each place was made
    folds: tuple[np.ndarray, ...] = ()
    since: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if not len(self.since):
            self.since = np.zeros(len(self.cid), dtype=np.int64)

    def invalidate(self) -> None:
        self.cid[:] = -1

    def expect(self, width: int) -> None:
        """Keys have this width; another one means another sort of keys."""
        if self.made is None or self.made.shape[1] != width:
            self.made = self.seen = np.zeros((len(self.cid), width), dtype=np.uint8)
            self.invalidate()

    def start_frame(self, features: int) -> None:
        """No place is held: nothing is turned."""
        self.frame, self.folds = np.ones(features, dtype=np.complex128), ()
        self.since = np.zeros_like(self.since)

    def follow(self, came: np.ndarray) -> None:
        """Take the order in which place i holds what was at ``came[i]`` (-1: something new)."""
        at = np.maximum(came, 0)
        self.cid = np.where(came < 0, -1, self.cid[at])
        self.since = self.since[at]
        if self.made is not None and self.seen is not None:
            self.made, self.seen = self.made[at], self.seen[at]

    def turn(self, common: np.ndarray) -> None:
        """The frame turns by ``common`` [D]."""
        assert self.frame is not None
        frame = self.frame * common
        self.frame = frame / np.abs(frame)
        self.folds = (*self.folds, common)

    def lag(self, where: np.ndarray) -> np.ndarray | None:
        """[n, D]: by what the frame has turned since each place was made; None for nothing.

        In effect, small differences must add up until they count.
        """
        since = self.since[where]
        if not self.folds or (since == len(self.folds)).all():
            return None
        out = np.ones((len(where), len(self.folds[0])), dtype=np.complex128)
        for s in np.unique(since):
            if s < len(self.folds):
                out[since == s] = math.prod(self.folds[s:], start=np.ones_like(self.folds[0]))
        return out

    def note(self, where: np.ndarray, keys: np.ndarray, new: np.ndarray) -> None:
        """Places ``where`` are right for ``keys``; those of the positions ``new`` are just made."""
        assert self.made is not None
        assert self.seen is not None
        self.seen = self.seen.copy()
        self.seen[where] = keys
        if new.any():
            self.made, self.since = self.made.copy(), self.since.copy()
            self.made[where[new]] = keys[new]
            self.since[where[new]] = len(self.folds)
        if self.folds:
            old = int(self.since[self.cid >= 0].min(initial=len(self.folds)))
            self.folds, self.since = self.folds[old:], np.maximum(self.since - old, 0)


__all__ = ["ClassState"]
