"""Where slots lie: placement bookkeeping on the host, in numpy, once for a whole cohort.

Every slot content has a number (``cid``), given when its row is first written, kept for its life.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def twice(cids: np.ndarray) -> bool:
    """Whether a content occurs twice."""
    ordered = np.sort(cids)
    return bool((ordered[1:] == ordered[:-1]).any())


class Fallback(Exception):
    """This call cannot run on the rewritten graph; the plain one must serve it."""


@dataclass
class Placement:
    """``content[p]``: cid at place p of a storage, -1 where there is none."""

    content: np.ndarray

    @staticmethod
    def empty(n: int) -> Placement:
        return Placement(np.full(n, -1, dtype=np.int64))

    def copy(self) -> Placement:
        return Placement(self.content.copy())

    def find(self, cids: np.ndarray) -> np.ndarray:
        """Place of each cid, -1 where it is not held."""
        order = np.argsort(self.content, kind="stable")
        pos = np.searchsorted(self.content, cids, sorter=order)
        pos = np.minimum(pos, len(self.content) - 1)
        place = order[pos]
        return np.where(self.content[place] == cids, place, -1)

    def hold(self, cids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Make room for exactly these contents; (place of each, mask of the newly placed)."""
        if twice(cids):
            raise Fallback("one slot is read twice in a call")
        place = self.find(cids)
        missing = place < 0
        count = int(missing.sum())
        if count:
            free = np.ones(len(self.content), dtype=bool)
            free[place[~missing]] = False
            spots = np.nonzero(free)[0][:count]
            if len(spots) < count:
                raise Fallback("more slots are read than the storage holds")
            place[missing] = spots
            self.content[spots] = cids[missing]
        return place, missing

    def order(self, cids: np.ndarray) -> np.ndarray:
        """Take the given order; returns the place each content came from, -1 for new ones."""
        came = self.find(cids)
        self.content = cids.copy()
        return came
