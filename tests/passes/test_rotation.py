"""Rows of tables as turns of feature pairs, and back."""

import numpy as np
import pytest
import torch

from rtc.passes.rotation import Rotation


def _rotation(columns, weight, offset):
    """Of four features in halves: cosines stand in the first two ``columns``, sines in the last."""
    perm, a, b = np.array([2, 3, 0, 1]), np.zeros((4, 4)), np.zeros((4, 4))
    for i in range(4):
        a[i, columns[i % 2]] = weight
        b[i, columns[2 + i % 2]] = weight if i < 2 else -weight
    c0, s0 = np.full(4, offset), np.array([offset, offset, -offset, -offset])
    return Rotation(None, None, perm, a, b, c0, s0)  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [[0, 1, 2, 3], [3, 1, 0, 2]], ids=["side by side", "mixed"])
@pytest.mark.parametrize(("weight", "offset"), [(1.0, 0.0), (-2.0, 0.0), (1.0, 0.3)])
def test_turned_rows_turn_by_that_much_more(columns, weight, offset):
    rot = _rotation(columns, weight, offset)
    gen = torch.Generator().manual_seed(0)
    rows = [torch.randn(5, 2, dtype=torch.float64, generator=gen) for _ in range(2)]
    table = torch.cat(rows, 1).numpy()
    turns = rot.turns(rows)
    half = weight * (table[:, columns[:2]] + 1j * table[:, columns[2:]]) + offset * (1 + 1j)
    np.testing.assert_allclose(turns, np.concatenate([half, half.conj()], 1), rtol=1e-12)
    by = np.exp(1j * np.array([0.4, -1.1, -0.4, 1.1]))
    np.testing.assert_allclose(rot.turns(rot.turned_rows(rows, by)), turns * by, rtol=1e-12)
