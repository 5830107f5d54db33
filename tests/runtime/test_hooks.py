"""Hooks of all modules (torch.nn.modules.module) come and go between calls."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import warnings

import pytest
import torch
from torch.nn.modules import module

import rtc
from tests.runtime.models import close, graphs, pair, same_caches, x

SIDES = {
    "eager": {"lowering": "eager"},
    "replayed": {"lowering": "eager", "step_graph": "simulate"},
}
KINDS = {
    "after": lambda: module.register_module_forward_hook(lambda m, args, out: out * 2),
    "before": lambda: module.register_module_forward_pre_hook(
        lambda m, args: (args[0] + 1, *args[1:])
    ),
    "of some": lambda: module.register_module_forward_hook(
        lambda m, args, out: out - 1 if isinstance(m, torch.nn.Linear) else None
    ),
}


@pytest.mark.parametrize(
    ("kind", "side"), [*((kind, "replayed") for kind in KINDS), ("of some", "eager")]
)
def test_come_and_go(kind, side):
    eager, twin, compiled = pair(options=rtc.Options(warn=False, **SIDES[side]))
    hook = None
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch's own: one hook, called twice
        for step in range(20):
            if step in (4, 14):
                hook = KINDS[kind]()
            if step in (9, 17):
                hook.remove()
            close(eager(x(step), step), compiled(x(step), step))
    same_caches(eager, twin)


def test_one_that_stays_costs_no_traces():
    eager, _, compiled = pair()
    hook = KINDS["after"]()
    try:
        for step in range(6):
            close(eager(x(step), step), compiled(x(step), step))
        first = graphs(compiled)
        for step in range(6, 12):
            close(eager(x(step), step), compiled(x(step), step))
        assert graphs(compiled) == first
    finally:
        hook.remove()


def test_a_model_that_is_compiled_otherwise_is_refused():
    """Its calls would go to the other compiler, caches in ring order."""
    eager, twin, compiled = pair()
    for step in range(4):
        close(eager(x(step), step), compiled(x(step), step))
    twin.compile(backend="eager")
    with pytest.raises(rtc.UnsupportedError, match=r"Window.compile\(\) was called"):
        compiled(x(4), 4)
    same_caches(eager, twin)
    with pytest.raises(rtc.UnsupportedError, match=r"Window.compile\(\) was called"):
        rtc.compile(twin)
    twin._compiled_call_impl = None
    close(eager(x(4), 4), compiled(x(4), 4))


def test_of_a_model_without_cache_passes():
    eager, twin, compiled = pair()
    close(eager(x(0), 0), compiled(x(0), 0))
    compiled._demote("as if graphs had taken turns")
    close(eager(x(1), 1), compiled(x(1), 1))
    hook = KINDS["after"]()
    try:
        close(eager(x(2), 2), compiled(x(2), 2))
    finally:
        hook.remove()
    close(eager(x(3), 3), compiled(x(3), 3))
    same_caches(eager, twin)


@pytest.mark.parametrize("side", SIDES)
def test_of_the_model_itself(side):
    """torch runs them beside the model's graph, while its caches wait to be used."""
    eager, twin, compiled = pair(options=rtc.Options(warn=False, **SIDES[side]))
    for m in (eager, twin):
        m.register_forward_pre_hook(lambda m, args: (args[0] + 1, *args[1:]))
        m.register_forward_hook(lambda m, args, out: out * 2 + args[0].sum() + m.k.sum())
    for step in range(16):
        close(eager(x(step), step), compiled(x(step), step))
    same_caches(eager, twin)
    assert graphs(compiled) <= 5
