"""Table rows on the host: which row of each table belongs to which slot, and did it change?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from rtc.passes.analysis.exprs import SlotExpr, evaluate, split_row_ids
from rtc.passes.analysis.fn import Operand, with_slots
from rtc.passes.analysis.layout import Fallback

# Two evaluations of one formula may differ in the last bits (vector and scalar code paths).
_ULPS = 4


@dataclass
class TableReader:
    """Rows of one operand for the positions of a read.

    ``later``: sources of fresh rows that join past the operand; their positions get zeros.
    """

    operand: Operand
    later: frozenset[int] = frozenset()

    def rows(
        self, expr: SlotExpr, ids: np.ndarray, env: Mapping[fx.Node, Any], memo: dict[Any, Any]
    ) -> torch.Tensor:
        """[len(ids), *rest]: the row of each position; NaN-free, on the CPU."""
        op = self.operand
        if op.axes is None:
            val = env[op.entries[0][0]]
            val = val if isinstance(val, torch.Tensor) else torch.tensor(val, dtype=op.dtype)
            if len(op.entries) > 1 and not all(
                torch.equal(torch.as_tensor(env[n]), val) for n, _ in op.entries
            ):
                raise Fallback("an operand differs between parts of the cache")
            return val.reshape(1, -1).expand(len(ids), -1)
        for node, entry in op.entries:
            if entry.key == expr.key:
                return self._flat(env[node], entry.shape)
        out: torch.Tensor | None = None
        missing = np.ones(len(ids), dtype=bool)
        for node, entry in op.entries:
            flat = self._flat(env[node], entry.shape)
            have = evaluate(entry, env, memo).ravel()
            order = np.argsort(have, kind="stable")
            pos = np.minimum(np.searchsorted(have, ids, sorter=order), len(have) - 1)
            j = order[pos]
            hit = (have[j] == ids) & missing
            if out is None:
                out = torch.zeros((len(ids), flat.shape[1]), dtype=flat.dtype)
            where = torch.from_numpy(np.nonzero(hit)[0])
            out[where] = flat[torch.from_numpy(j[hit])]
            missing &= ~hit
        if self.later and missing.any():
            source, _ = split_row_ids(np.minimum(ids, -1))
            missing &= ~((ids < 0) & np.isin(source, list(self.later)))
        if missing.any() or out is None:
            raise Fallback("a slot is read past the work that applies to it")
        return out

    def _flat(self, val: torch.Tensor, slots: tuple[int, ...]) -> torch.Tensor:
        axes = self.operand.axes
        assert axes is not None
        shape = list(val.shape)
        for a, n in zip(axes, slots, strict=True):
            shape[a] = n
        val = val.expand(shape)
        rest = [d for d in range(val.dim()) if d not in axes]
        n = int(np.prod([val.shape[a] for a in axes]))
        return val.permute(*axes, *rest).reshape(n, -1)


def shaped_rows(op: Operand, rows: torch.Tensor, device: torch.device) -> Any:
    """Rows [n, rest] in the operand's own layout, slot axes (1, .., n)."""
    if not isinstance(op.node.meta["val"], torch.Tensor):
        return rows[0, 0].item() if len(rows) else 0
    if op.axes is None:
        return rows[0].reshape(op.shape).to(device)
    n = len(rows)
    shape = with_slots(op.shape, op.axes, n)
    rest = [d for d in range(len(shape)) if d not in op.axes]
    x = rows.reshape(*(shape[a] for a in op.axes), *(shape[d] for d in rest))
    perm = [*op.axes, *rest]
    return x.permute([perm.index(i) for i in range(len(perm))]).contiguous().to(device)


def changed(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """Mask of rows of ``a`` that differ from ``b`` by more than rounding."""
    if not len(a):
        return np.zeros(0, dtype=bool)
    if not a.is_floating_point() and not a.is_complex():
        return (a != b).any(-1).numpy()
    real = torch.finfo(a.dtype).eps
    x, y = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    # at the scale of each column: a table of small values is compared among small values
    tol = _ULPS * real * torch.maximum(x.abs(), y.abs()).amax(0)
    return ((x - y).abs() > tol).any(-1).numpy()
