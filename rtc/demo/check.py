"""Holds every chunk, and at the end all caches, against eager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rtc.testing.compare import Bounds, Comparer, Errors

FACTOR, FLOOR, EXACT = 2.0, 4.0, 1e-10


class Check:
    """Compares sides over a stream. rtc must pass; the others' errors are kept to compare with.

    float64 is exact: within 1e-10 of eager. Else eager in float64 is the yardstick: rtc may be
    ``FACTOR`` times as far from it as eager is (plus ``FLOOR`` roundings of the largest value).
    With calibrated scales that yardstick does not quantize: FP8's own error counts on both sides.
    """

    def __init__(self, dtype: torch.dtype, quantize: str) -> None:
        self.against = "eager in float64"
        if quantize == "calibrated":
            self.against += " without FP8"
        self.exact = dtype == torch.float64 and quantize == "exact"
        mode = "exact" if self.exact else "tolerance"
        self.bounds = Bounds(mode, rtol=EXACT, atol=EXACT, factor=FACTOR, floor=FLOOR)
        self.comparers: dict[str, Comparer] = {}
        self.worst: dict[str, dict[str, list[float]]] = {"output": {}, "cache": {}}
        self.chunks = self.caches = 0
        self.failure: str | None = None

    @property
    def needs_reference(self) -> bool:
        return not self.exact

    def rule(self) -> str:
        if self.exact:
            return f"within {EXACT:g} of eager (absolute and relative), element by element"
        return (
            f"at most {FACTOR:g} x as far from {self.against} as eager itself is, plus {FLOOR:g} "
            "roundings of the largest value, in every tensor"
        )

    def compare(
        self, where: str, step: int, trees: Mapping[str, Any], reference: Any, must: str = "rtc"
    ) -> bool:
        """``trees``: side -> outputs or caches; ``must``: the side that has to pass."""
        eager = trees["eager"]
        for key, tree in trees.items():
            if key == "eager":
                continue
            comparer = self.comparers.setdefault(key, Comparer(self.bounds))
            try:
                errors, count = comparer.trees(step, where, eager, tree, reference)
            except ValueError as e:  # eager itself is too far from the reference
                self._fail(key == must, str(e))
                continue
            self._keep(where, key, errors)
            if key == must:
                self._keep(where, "eager", Errors(errors.eager_abs or 0.0, 0.0))
                if where == "output":
                    self.chunks = max(self.chunks, step + 1)
                else:
                    self.caches = count
            if errors.bad is not None:
                self._fail(key == must, str(errors.bad))
        return self.failure is None

    def variant(self, key: str, step: int, eager: Tensor, out: Tensor, reference: Any) -> None:
        """A chunk of a run with passes switched off, which has to pass too."""
        comparer = self.comparers.setdefault(key, Comparer(self.bounds))
        errors, _ = comparer.trees(step, "output", eager, out, reference)
        self._keep("output", key, errors)
        if errors.bad is not None:
            self._fail(True, f"{key}: {errors.bad}")

    def _keep(self, where: str, key: str, errors: Errors) -> None:
        seen = self.worst[where].setdefault(key, [0.0, 0.0])
        seen[0], seen[1] = max(seen[0], errors.abs), max(seen[1], errors.rel)

    def _fail(self, counts: bool, text: str) -> None:
        if counts and self.failure is None:
            self.failure = text

    def to_dict(self) -> dict[str, Any]:
        return {
            "against": "eager" if self.exact else self.against,
            "rule": self.rule(),
            "passed": self.failure is None,
            "failure": self.failure,
            "chunks": self.chunks,
            "caches": self.caches,
            "max_abs_error": {w: {k: v[0] for k, v in s.items()} for w, s in self.worst.items()},
        }
