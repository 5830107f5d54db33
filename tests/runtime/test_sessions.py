"""Caches as arguments: several sessions on one compiled model, and what becomes of their state."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import gc
import weakref

import pytest
import torch

import rtc
from rtc.runtime import owners

from .models import EAGER, Given, InDict, close, graphs, pair, runtime, x, zeros


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def sessions(n):
    return [(zeros(), zeros()) for _ in range(n)], [(zeros(), zeros()) for _ in range(n)]


def test_interleaved_sessions_are_independent_and_share_one_graph():
    eager, _, compiled = pair(Given)
    ours, theirs = sessions(3)
    steps = [0, 0, 0]
    order = [0, 1, 0, 2, 2, 1, 0, 0, 0, 1, 2, 1] * 3
    for call, s in enumerate(order):
        step = steps[s]
        steps[s] += 1
        close(eager(x(call), *ours[s], step), compiled(x(call), *theirs[s], step))
        if call % 7 == 6:
            close(ours[1][0], theirs[1][0])
    for a, b in zip(ours, theirs, strict=True):
        close(a[0], b[0])
        close(a[1], b[1])
    assert graphs(compiled) == 1
    assert runtime(compiled)["plain_calls"] == 0


def test_sessions_that_share_one_cache():
    """The same keys with two sets of values: state of one is given up for the other."""
    eager, _, compiled = pair(Given)
    (k, v), (k2, v2) = (zeros(), zeros()), (zeros(), zeros())
    other, other2 = zeros(), zeros()
    for step in range(20):
        mine, yours = ((k, v), (k2, v2)) if step % 3 else ((k, other), (k2, other2))
        close(eager(x(step), *mine, step), compiled(x(step), *yours, step))
    for a, b in ((k, k2), (v, v2), (other, other2)):
        close(a, b)


def test_one_tensor_as_keys_and_values():
    eager, _, compiled = pair(Given)
    a, b = zeros(), zeros()
    for step in range(12):
        close(eager(x(step), a, a, step), compiled(x(step), b, b, step))
    close(a, b)


def test_the_roles_of_two_tensors_change_places():
    eager, _, compiled = pair(Given)
    (k, v), (k2, v2) = (zeros(), zeros()), (zeros(), zeros())
    for step in range(16):
        mine, yours = ((k, v), (k2, v2)) if step % 5 else ((v, k), (v2, k2))
        close(eager(x(step), *mine, step), compiled(x(step), *yours, step))
    close(k, k2)
    close(v, v2)


@pytest.mark.parametrize("axis", [0, 3])
def test_caches_cut_out_of_one_allocation(axis):
    """Views of one tensor, which is itself read and written between calls."""
    eager, _, compiled = pair(Given)
    shape = [1, 2, 14, 8]
    shape.insert(axis, 2)
    mine, yours = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    for step in range(20):
        a, b = (t.unbind(axis) for t in (mine, yours))
        close(eager(x(step), *a, step), compiled(x(step), *b, step))
        if step in (6, 7, 12):
            mine.mul_(0.5), yours.mul_(0.5)
        if step % 4 == 1:
            close(mine, yours)
    close(mine, yours)


def test_caches_that_are_not_contiguous():
    eager, _, compiled = pair(Given)
    mine, yours = (
        tuple(torch.zeros(1, 14, 2, 8).double().transpose(1, 2) for _ in range(2)) for _ in range(2)
    )
    for step in range(16):
        close(eager(x(step), *mine, step), compiled(x(step), *yours, step))
    close(mine[0], yours[0])


def test_nested_containers_by_keyword():
    eager, _, compiled = pair(InDict)
    states = [{"kv": [zeros(), zeros()], "at": {"step": 0}} for _ in range(2)]
    for step in [0, 1, 2, 3, 4, 11, 12, 5, 5, 6, 0, 1]:
        for s in states:
            s["at"]["step"] = step
        close(eager(x(step), state=states[0]), compiled(x(step), state=states[1]))
    close(states[0]["kv"][0], states[1]["kv"][0])
    assert graphs(compiled) == 1


def test_state_goes_with_the_caches():
    eager, _, compiled = pair(Given)
    k, v = zeros(), zeros()
    for step in range(5):
        compiled(x(step), k, v, step)
    assert runtime(compiled)["state_bytes"] > 0
    views = [weakref.ref(t) for st in owners.owners(k) for t in st.storages.values()]
    tensors = weakref.ref(k), weakref.ref(v)
    assert views
    del k, v
    gc.collect()
    assert [ref() for ref in tensors] == [None, None], "rtc keeps the caller's caches alive"
    assert [ref() for ref in views] == [None] * len(views), "rtc keeps views of freed caches"
    assert runtime(compiled)["state_bytes"] == 0
    a, b = (zeros(), zeros()), (zeros(), zeros())
    for step in range(8):  # and goes on with others
        close(eager(x(step), *a, step), compiled(x(step), *b, step))


def test_inputs_are_not_kept_alive():
    _, _, compiled = pair(Given)
    k, v, given = zeros(), zeros(), x(0)
    compiled(given, k, v, 0)
    ref = weakref.ref(given)
    del given
    gc.collect()
    assert ref() is None


def test_state_is_bounded_over_many_sessions():
    eager, _, compiled = pair(Given)
    most = 0
    for session in range(12):
        a, b = (zeros(), zeros()), (zeros(), zeros())
        for step in range(3):
            i = session * 3 + step
            close(eager(x(i), *a, step), compiled(x(i), *b, step))
        most = max(most, runtime(compiled)["state_bytes"])
        if session == 0:
            one = most
    assert most == one
    assert graphs(compiled) == 1


def test_one_cache_freed_leaves_the_other_in_order():
    eager, _, compiled = pair(Given)
    (k, v), (k2, v2) = (zeros(), zeros()), (zeros(), zeros())
    for step in range(7):
        eager(x(step), k, v, step), compiled(x(step), k2, v2, step)
    del k2
    gc.collect()
    close(v, v2)
    k3, k4 = zeros(), zeros()
    for step in range(7, 14):
        close(eager(x(step), k3, v, step), compiled(x(step), k4, v2, step))
    close(v, v2)


def test_finalizers_do_not_pile_up():
    """Two models with different layouts take a cache from each other, again and again."""
    _, model, first = pair(Given)
    second = rtc.compile(model, options=rtc.Options(lowering="eager", ring_cache=False, warn=False))
    k, v = zeros(), zeros()
    for step in range(4):
        (first if step % 2 else second)(x(step), k, v, step)
    before = len(weakref.finalize._registry)  # type: ignore[attr-defined]
    for step in range(4, 24):
        (first if step % 2 else second)(x(step), k, v, step)
    assert len(weakref.finalize._registry) <= before + 4  # type: ignore[attr-defined]


class Returning(Given):
    """The caches are returned as well, as functional code does."""

    def forward(self, x, k, v, step):
        return self.attend(x, k, v, step), k, v


@pytest.mark.parametrize("options", [EAGER, rtc.Options(lowering="eager", ring_cache=False)])
def test_returned_caches_are_fed_back(options):
    """pytorch#192748: a mutated input that is an output and the next call's input."""
    eager, _, compiled = pair(Returning, options)
    mine, yours = (zeros(), zeros()), (zeros(), zeros())
    for step in range(16):
        y, *mine = eager(x(step), *mine, step)
        z, *yours = compiled(x(step), *yours, step)
        close(y, z)
        close(mine[0], yours[0])
    close(mine[1], yours[1])
