"""Random models against eager, a fixed set of seeds; ``bench/fuzz_forms.py`` runs any others."""

import pytest

import rtc

from . import drive, spec

# Found something once, or cover what others do not: stacked caches, frames, several passes, masks
# with prompt keys, parameters, rows made from the cache itself.
SEEDS = (
    415,
    7,
    17,
    41,
    66,
    72,
    97,
    132,
    165,
    175,
    206,
    275,
    285,
    3,
    11,
    13,
    24,
    29,
    58,
    84,
    120,
    734,
    858,
    1276,
)


@pytest.mark.parametrize("seed", SEEDS)
def test_matches_eager(seed):
    found = drive.run(spec.draw(seed, 25), rtc.Options(lowering="eager", warn=False), 25)
    assert found.status in ("ok", "refused", "invalid"), f"{found.place}: {found.message}"
