"""A refresh in parts: views of a class by equal work, as many as are worth doing side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rtc.runtime.prepare import CohortRuntime, Refresh
from rtc.runtime.refresh import Part
from rtc.runtime.state import CohortState

# Refreshed rows of several views go through their work side by side, as many as stay in a CPU's
# cache; a GPU wants few large launches.
_CHUNK_BYTES = {"cpu": 1 << 23}
_CHUNK_ELSEWHERE = 1 << 28


def part_of(c: CohortRuntime, st: CohortState, r: Refresh, src: np.ndarray) -> Part:
    return Part(r, src, c.cohort.rotations.get(r.klass), list(_alike(c, st, r)))


def _alike(c: CohortRuntime, st: CohortState, r: Refresh) -> Iterator[list[Any]]:
    """The views of a class by equal work, as many as are refreshed side by side."""
    alike: dict[Any, list[Any]] = {}
    for j, v in enumerate(c.cohort.views):
        if v.klass == r.klass and j in st.storages:
            alike.setdefault((v.fn.key, st.dims[v.cache]), []).append((j, v))
    for views in alike.values():
        yield from _chunks(views, len(r.cids), st)


def _chunks(views: list[Any], slots: int, st: CohortState) -> Iterator[list[Any]]:
    storage = st.storages[views[0][0]]
    row = storage.numel() * storage.element_size() // storage.shape[st.axes[views[0][0]]]
    size = max(1, _CHUNK_BYTES.get(storage.device.type, _CHUNK_ELSEWHERE) // (row * slots))
    for i in range(0, len(views), size):
        yield views[i : i + size]
