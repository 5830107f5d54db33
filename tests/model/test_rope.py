"""Positions by slot order, and the rotation itself."""

from dataclasses import replace

import pytest
import torch

from rtc.model import PRESETS
from rtc.model.rope import apply_rope, rope_tables, slot_positions

TINY = PRESETS["tiny"]


def test_kept_slots_keep_their_absolute_position_between_resets():
    new = TINY.tokens
    for step in range(3 * TINY.reset_period):
        before, after = slot_positions(TINY, step), slot_positions(TINY, step + 1)
        assert torch.equal(after[: TINY.sink], before[: TINY.sink])
        kept_before = before[TINY.sink + new :]  # these slots are `new` slots earlier after
        kept_after = after[TINY.sink : -new]
        if (step + 1) % TINY.reset_period:
            assert torch.equal(kept_after, kept_before)
        else:
            jump = kept_after - kept_before
            assert torch.equal(jump[:, 0].unique(), torch.tensor([-TINY.reset_period]))
            assert not jump[:, 1:].any()


def test_window_positions():
    cfg = replace(TINY, reset_period=42)
    t, h, w = slot_positions(cfg, 42 + 10).unbind(-1)
    assert t.tolist() == [0] * 5 + [11] * 8 + [12] * 8 + [13] * 8
    assert h[-8:].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]  # the conditioning row is below the grid
    assert w[-8:].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("axis", range(3))
def test_scores_depend_on_position_differences_only(axis):
    torch.manual_seed(axis)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(at_q, at_k):
        positions = torch.zeros(2, 3, dtype=torch.int64)
        positions[0, axis], positions[1, axis] = at_q, at_k
        cos, sin = rope_tables(positions, TINY.rope_axes, TINY.rope_theta, q.dtype)
        rotated_q = apply_rope(q, (cos[:1], sin[:1]))
        return (rotated_q * apply_rope(k, (cos[1:], sin[1:]))).sum()

    torch.testing.assert_close(score(3, 1), score(40, 38))
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


def test_rotation_keeps_dtype_and_norm():
    x = torch.randn(1, TINY.slots, 2, 16, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        tables = rope_tables(slot_positions(TINY, 5), TINY.rope_axes, TINY.rope_theta, dtype)
        assert tables[0].dtype == torch.promote_types(dtype, torch.float32)
        y = apply_rope(x.to(dtype), tables)
        assert y.dtype == dtype
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5  # bfloat16 keeps 8 bits
        torch.testing.assert_close(y.float().norm(dim=-1), x.norm(dim=-1), rtol=tolerance, atol=0)
