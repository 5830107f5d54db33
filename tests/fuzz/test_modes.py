"""Calls in modes over the same caches: seeds that were wrong before, and some that were not."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import pytest

from .modes import run


@pytest.mark.parametrize("step_graph", ["off", "simulate"])
@pytest.mark.parametrize("seed", range(8))
def test_modes(seed, step_graph):
    run(seed, step_graph=step_graph)
