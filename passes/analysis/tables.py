"""Table rows on the host: which row of each table belongs to which slot, and did it change?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from rtc.passes.analysis.exprs import SlotExpr, evaluate, split_row_ids
from rtc.passes.analysis.fn import Operand, with_slots
from rtc.passes.analysis.host import HostInfo
from rtc.passes.analysis.layout import Fallback
from rtc.passes.analysis.rowwise import RowTable, as_bytes, decompose, trivial

# Two evaluations of one formula may differ in the last bits (vector and scalar code paths).
_ULPS = 4
# Coarser tables than float32's are compared bit by bit, and never turned.
FINE = torch.finfo(torch.float32).eps


class TableReader:
    """Rows of one operand for the positions of a read, by way of narrow keys (see rowwise).

    ``later``: sources of fresh rows that join past the operand; their positions get zeros.
    """

    def __init__(self, host: HostInfo, operand: Operand, later: frozenset[int]) -> None:
        self.operand, self.later, self._host = operand, later, host
        self.tables: list[RowTable] = []
        if operand.axes is not None:
            self.tables = [decompose(host, n, operand.axes, e.shape) for n, e in operand.entries]
            if len({t.signature for t in self.tables}) > 1:
                self.give_up()

    @property
    def signature(self) -> Any:
        """Readers of equal signatures have equal keys for equal rows."""
        return self.tables[0].signature if self.tables else ("same for all", self.operand.shape)

    @property
    def idents(self) -> list[Any]:
        """One for each of its keys: equal ones mean equal keys, of other operands too."""
        entries = tuple((self._host.key(n), e.key) for n, e in self.operand.entries)
        if not self.tables:
            return [("same for all", entries)]
        where = (tuple(e for _, e in entries), self.later)
        leaves = zip(*(t.leaves for t in self.tables), strict=True)
        return [
            (where, tuple((x.kind, self._host.key(x.node), x.axes, x.path) for x in same))
            for same in leaves
        ]

    def give_up(self) -> None:
        """Take the rows themselves as keys."""
        axes = self.operand.axes
        if axes is None:
            return
        self.tables = [trivial(n, axes, e.shape) for n, e in self.operand.entries]

    @property
    def nodes(self) -> set[fx.Node]:
        """Host values that it needs in every call."""
        out = set().union(*(e.host_nodes() for _, e in self.operand.entries))
        if self.operand.axes is None:
            return out | {n for n, _ in self.operand.entries}
        return out.union(*(t.nodes for t in self.tables))

    def verify(self, env: Mapping[fx.Node, Any]) -> None:
        """Check on the call at hand that rows from keys are the table's rows; else use those."""
        for (node, entry), table in zip(self.operand.entries, self.tables, strict=False):
            every = np.arange(entry.count)
            whole = trivial(node, table.axes, entry.shape)
            want = whole.rows(env, whole.keys(env, every))
            got = table.rows(env, table.keys(env, every))
            if got.shape != want.shape or got.dtype != want.dtype or changed(got, want).any():
                self.give_up()
                return

    def keys(
        self, expr: SlotExpr, ids: np.ndarray, env: Mapping[fx.Node, Any], memo: dict[Any, Any]
    ) -> list[torch.Tensor]:
        """[len(ids), width] each: equal keys mean equal rows."""
        op = self.operand
        if op.axes is None:
            val = as_value(env[op.entries[0][0]])
            if any(not torch.equal(as_value(env[n]), val) for n, _ in op.entries[1:]):
                raise Fallback("an operand differs between parts of the cache")
            return [val.reshape(1, -1).expand(len(ids), -1)]
        out: list[torch.Tensor] = []
        missing = np.ones(len(ids), dtype=bool)
        for (_, entry), table in zip(op.entries, self.tables, strict=True):
            if entry.key == expr.key:
                return table.keys(env, np.arange(len(ids)))
            at = _places(entry, expr, ids, env, memo)
            hit = (at >= 0) & missing
            found = table.keys(env, at[hit])
            if not out:
                out = [torch.zeros((len(ids), k.shape[1]), dtype=k.dtype) for k in found]
            where = torch.from_numpy(np.nonzero(hit)[0])
            for o, k in zip(out, found, strict=True):
                o[where] = k
            missing &= ~hit
        if self.later and missing.any():
            source, _ = split_row_ids(np.minimum(ids, -1))
            missing &= ~((ids < 0) & np.isin(source, list(self.later)))
        if missing.any():
            raise Fallback("a slot is read past the work that applies to it")
        return out

    def rows(
        self, env: Mapping[fx.Node, Any], keys: list[torch.Tensor], memo: Any = None
    ) -> torch.Tensor:
        """[n, rest]: the rows that the keys stand for; ``memo``: of one call."""
        if self.operand.axes is None:
            return keys[0].to(self.operand.dtype)
        return self.tables[0].rows(env, keys, memo)


def _places(
    entry: SlotExpr, expr: SlotExpr, ids: np.ndarray, env: Mapping[fx.Node, Any],
    memo: dict[Any, Any],
) -> np.ndarray:  # fmt: skip
    """Where in ``entry`` each slot of a read is, or -1; found once a call for all its operands."""
    key = ("places", entry.key, expr.key)
    if key not in memo:
        have = evaluate(entry, env, memo).ravel()
        order = np.argsort(have, kind="stable")
        pos = np.minimum(np.searchsorted(have, ids, sorter=order), len(have) - 1)
        at = order[pos]
        memo[key] = np.where(have[at] == ids, at, -1)
    return memo[key]


class Lifted:
    """A host value that the device asks for, worked out from something narrow where it can be: of
    a table of all slots that is cut to the new ones, only their rows."""

    def __init__(self, host: HostInfo, node: fx.Node) -> None:
        self.node, self.table = node, None
        val = node.meta["val"]
        shape = tuple(val.shape) if isinstance(val, torch.Tensor) else ()
        axis = max(range(len(shape)), key=lambda d: shape[d], default=None)
        if axis is not None and shape[axis] > 1:
            self.table = decompose(host, node, (axis,), (shape[axis],))
        self.rows = np.arange(shape[axis]) if axis is not None else np.zeros(0, dtype=np.int64)
        self.axis = axis

    @property
    def nodes(self) -> set[fx.Node]:
        return {self.node} if self.table is None else self.table.nodes

    def verify(self, env: Mapping[fx.Node, Any]) -> None:
        want = env[self.node]
        if self.table is not None and not torch.equal(self.value(env), want):
            self.table = None

    def value(self, env: Mapping[fx.Node, Any], memo: Any = None) -> torch.Tensor:
        if self.table is None or self.axis is None:
            return as_value(env[self.node])
        flat = self.table.rows(env, self.table.keys(env, self.rows), memo)
        shape = list(self.node.meta["val"].shape)
        n = shape.pop(self.axis)
        return flat.reshape(n, *shape).movedim(0, self.axis)


class ClassTables:
    """The tables of a view class: keys of all operands side by side, as bytes; what several
    operands share (cosine and sine of one position) stands there once."""

    def __init__(self, readers: Sequence[TableReader]) -> None:
        self.readers = list(readers)
        # for each reader, where its keys stand: first byte, size and dtype
        self._layout: list[list[tuple[int, int, torch.dtype]]] = []

    def keys(
        self, expr: SlotExpr, ids: np.ndarray, env: Mapping[fx.Node, Any], memo: dict[Any, Any]
    ) -> np.ndarray:
        """uint8 [len(ids), width]"""
        parts, known, width = [np.zeros((len(ids), 0), dtype=np.uint8)], {}, 0
        self._layout = []
        for r in self.readers:
            idents = r.idents
            if not idents or not all(ident in known for ident in idents):
                for ident, key in zip(idents, r.keys(expr, ids, env, memo), strict=True):
                    if ident not in known:
                        part = as_bytes(key)
                        parts.append(part)
                        known[ident] = width, part.shape[1], key.dtype
                        width += part.shape[1]
            self._layout.append([known[ident] for ident in idents])
        return np.concatenate(parts, axis=1)

    def rows(
        self, env: Mapping[fx.Node, Any], keys: np.ndarray, memo: Any = None
    ) -> list[torch.Tensor]:
        """The table rows of each operand; ``memo``: of one call."""
        out = []
        for reader, layout in zip(self.readers, self._layout, strict=True):
            parts = []
            for at, size, dtype in layout:
                if size:
                    part = keys[:, at : at + size].copy()
                    parts.append(torch.from_numpy(part).view(dtype))
                else:
                    parts.append(torch.empty((len(keys), 0), dtype=dtype))
            out.append(reader.rows(env, parts, memo))
        return out


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
    if real > FINE:  # a turn of a few degrees is less than its rounding
        return (a != b).any(-1).numpy()
    x, y = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    # entry by entry: beside a huge one (a masked slot's) any other would look the same
    far = (x - y).abs() > _ULPS * real * torch.maximum(x.abs(), y.abs())
    # what is infinite or no number is the same or it is not
    odd = ~(x.isfinite() & y.isfinite()) & (x != y) & ~(x.isnan() & y.isnan())
    return (far | odd).any(-1).numpy()


def as_value(v: Any) -> torch.Tensor:
    """A host value as a tensor; Python floats are double, which torch would make single."""
    return torch.as_tensor(v, dtype=torch.float64 if isinstance(v, float) else None)
