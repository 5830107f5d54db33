"""The ecosystem's road: torch.compile(model, backend="rtc")."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
from torch._dynamo.backends.registry import list_backends

import rtc

from .models import EAGER, Given, Window, chain, close, same_caches, x, zeros

OPTIONS = {"lowering": "eager", "warn": False}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def models(model=Window, **options):
    torch.manual_seed(0)
    eager = model()
    twin = copy.deepcopy(eager)
    with_step = {"dynamic_sources": "L['step']"}
    compiled = torch.compile(twin, backend="rtc", options={**OPTIONS, **options})

    def call(*args, **kwargs):
        with torch.compiler.config.patch(**with_step):
            return compiled(*args, **kwargs)

    return eager, twin, call


def test_is_registered():
    assert "rtc" in list_backends()


@pytest.mark.parametrize(
    "options", [{}, {"ring_cache": False}, {"hoist_rope": False, "ring_cache": False}]
)
def test_caches_are_current_after_every_call(options):
    eager, model, compiled = models(**options)
    for step in range(16):
        chain(eager, compiled, [step])
        close(eager.k, model.k, 0.0)
        close(eager.v, model.v, 0.0)
        assert type(model.k) is torch.Tensor


def test_caches_are_current_in_memory_held_elsewhere():
    eager, model, compiled = models()
    held = model.k.numpy(), model.v[:, :, -3:]
    for step in range(10):
        chain(eager, compiled, [step])
        close(eager.k, torch.from_numpy(held[0]))
        close(eager.v[:, :, -3:], held[1])


def test_outside_writes_and_sessions():
    eager, model, compiled = models()
    for step in range(20):
        chain(eager, compiled, [step])
        if step in (6, 12):
            for m in (eager, model):
                m.k.zero_()
        if step == 15:
            for m in (eager, model):
                m.k, m.v = zeros() + 0.5, zeros()
    same_caches(eager, model)


def test_caches_as_arguments():
    eager, _, compiled = models(Given)
    ours, theirs = [(zeros(), zeros()) for _ in range(2)], [(zeros(), zeros()) for _ in range(2)]
    for call in range(16):
        s = call % 2
        close(eager(x(call), *ours[s], call), compiled(x(call), *theirs[s], call))
    close(ours[0][0], theirs[0][0])
    close(ours[1][1], theirs[1][1])


def test_inference_tensors():
    eager, _, compiled = models(Given)
    with torch.inference_mode():
        (k, v), (k2, v2) = (zeros(), zeros()), (zeros(), zeros())
        for step in range(12):
            close(eager(x(step), k, v, step), compiled(x(step), k2, v2, step))
            if step in (5, 8):
                k.zero_(), k2.zero_()
        close(k, k2)


def test_takes_turns_with_a_compiled_model():
    eager, model, compiled = models()
    other = rtc.compile(model, options=EAGER)
    for step in range(18):
        chain(eager, compiled if step % 4 < 2 else other, [step])
        if step % 5 == 4:
            same_caches(eager, model)
    same_caches(eager, model)


def test_without_symbolic_steps():
    """As most will call it: the first step is a constant, the second makes it a symbol."""
    torch.manual_seed(0)
    eager = Window()
    model = copy.deepcopy(eager)
    chain(eager, torch.compile(model, backend="rtc", options=OPTIONS), range(12))
    same_caches(eager, model)


def test_an_option_that_does_not_exist():
    _, _, compiled = models(no_such_option=True)
    with pytest.raises(Exception, match="no_such_option"):
        compiled(x(0), 0)


def test_training_is_refused():
    _, _, compiled = models()
    with torch.enable_grad(), pytest.raises(Exception, match=r"(?i)inference|no_grad"):
        compiled(x(0).requires_grad_(), 0)
