"""Makes places of views again from raw slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rtc.passes.analysis.fn import Fn, Operand, emit, raw_fn, with_slots
from rtc.passes.analysis.tables import shaped_rows
from rtc.passes.plan import View
from rtc.passes.rotation import Rotation, rotated
from rtc.runtime.prepare import Refresh
from rtc.runtime.state import CohortState


def _run(target: Any, args: Any, kwargs: Any) -> Any:
    return target(*args, **kwargs)


def sent(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host value on its way to ``device``; from pinned memory, since the copy would wait."""
    if device.type != "cuda":
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)


def _span(at: np.ndarray) -> tuple[int, int] | None:
    """(first, length) of places that lie side by side, as a sink's do: no index is needed."""
    if len(at) and at[-1] - at[0] == len(at) - 1 and (np.diff(at) == 1).all():
        return int(at[0]), len(at)
    return None


def _sent_rows(op: Operand, rows: torch.Tensor, device: torch.device) -> Any:
    out = shaped_rows(op, rows, torch.device("cpu"))
    return sent(out, device) if isinstance(out, torch.Tensor) else out


def turned(x: torch.Tensor, perm: np.ndarray, by: np.ndarray) -> torch.Tensor:
    """x * c + x[perm] * s along the last axis, in float32 at least."""
    dtype = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    c, s = (sent(torch.from_numpy(v.copy()).to(dtype), x.device) for v in (by.real, by.imag))
    y = x.to(dtype)
    return (y * c + y.index_select(-1, sent(torch.from_numpy(perm), x.device)) * s).to(x.dtype)


def refresh(
    st: CohortState, views: Sequence[tuple[int, View]], r: Refresh, src: np.ndarray,
    const: Any, rot: Rotation | None,
) -> None:  # fmt: skip
    """Compute places ``r.at`` of views with the very same work again, from raw slots at ``src``.

    The work is slot-local, so the slots of all views go through it side by side, in one pass.
    """
    caches = st.caches()
    first = views[0][1]
    dims, shape, dev = st.dims[first.cache], caches[first.cache].shape, caches[first.cache].device
    take, store = _span(src), _span(r.at)
    at, idx = (sent(torch.from_numpy(x), dev) for x in (r.at, src))
    picked = []
    for _, v in views:
        flat = st.merged(caches[v.cache], dims)
        picked.append(
            flat.index_select(dims[0], idx) if take is None else flat.narrow(dims[0], *take)
        )
    n, count = len(src), len(views)
    # never a view of the cache: whoever keeps one alive makes the cache look shared
    raw = torch.cat(picked, dims[0]) if count > 1 else picked[0].clone()
    del picked
    raw = raw.reshape(with_slots(shape, dims, n * count))
    values = {
        t.operand.key: _sent_rows(t.operand, x.repeat(count, 1), dev)
        for t, x in zip(r.readers, r.rows, strict=True)
    }

    def operand(o: Operand) -> Any:
        return values[o.key] if o.role == "table" else const(o.node)

    key = raw_fn(shape, dims, raw.dtype).key

    def leaf(f: Fn) -> Any:
        return raw if f.key == key else None

    turns = rot is not None and r.frame is not None and (r.frame != 1).any()
    pivot = rotated(first.fn) if turns else None

    def framed(f: Fn) -> Any:
        """The rotated subtree, turned back into the class's frame."""
        if pivot is None or f.key != pivot.key:
            return leaf(f)
        return turned(emit(f, n * count, _run, leaf, operand), rot.perm, r.frame.conj())

    out = emit(first.fn, n * count, _run, framed, operand)
    out = out.reshape(first.storage_shape(n * count))
    for (j, v), part in zip(views, out.split(n, first.axis), strict=True):
        if store is None:
            st.storages[j].index_copy_(v.axis, at, part)
        else:
            st.storages[j].narrow(v.axis, *store).copy_(part)
