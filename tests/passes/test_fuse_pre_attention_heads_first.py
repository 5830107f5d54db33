"""fuse_pre_attention: rows and caches [B, H, S, D], and sizes that do not tell axes apart."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import pytest

from .pre_attention_models import (
    ON,
    OWN,
    Chain,
    HeadsFirst,
    LessOne,
    Model,
    T,
    half_chunk,
    in_dtypes,
    interleaved_behind,
    interleaved_polar,
    layer_norm,
    no_norm,
    no_rope,
    polar_behind,
)

BEHIND = {
    "half": {},
    "interleaved": {"rope": interleaved_behind, "groups": 2},
    "polar": {"rope": polar_behind, "apart": True, "wide": True},
    "no_rope": {"rope": no_rope, "norm": no_norm},
    "ring": {"ring": True, "rope": interleaved_behind, "norm": layer_norm},
    "turned": {"turned": True},
    "turned_polar": {"turned": True, "ring": True, "rope": polar_behind, "norm": LessOne},
    "batches": {"batch": 2, "norm": no_norm},
    "drift": {"drift": True, "rope": interleaved_behind},
    "own": {"own": True, "batch": 2},
    "as_many_heads_as_tokens": {"heads": T, "groups": T},
    "turned_as_many": {"turned": True, "heads": T, "groups": T, "rope": polar_behind, "batch": T},
    "one_for_many": {"heads": 2 * T, "groups": T, "rope": no_rope, "norm": no_norm},
}


@pytest.mark.parametrize(
    ("form", "dtype"), in_dtypes(BEHIND, "half polar turned_polar own turned_as_many")
)
def test_heads_first(form, dtype):
    options = OWN if form == "own" else ON
    Chain(lambda: HeadsFirst(**BEHIND[form]), dtype, options, steps=26).check()


@pytest.mark.parametrize("rope", [no_rope, half_chunk, interleaved_polar])
def test_as_many_heads_as_new_slots(rope):
    """Sizes do not tell which axis is which."""
    Chain(lambda: Model(heads=T, groups=T, rope=rope), steps=26).check()
