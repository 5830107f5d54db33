"""close(), and what is left of a compiled model."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import gc

import pytest
import torch

import rtc
from rtc.runtime import owners

from .models import EAGER, Window, chain, pair, runtime, same_caches, x


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def test_close_puts_the_caches_in_order_and_frees_the_state():
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    compiled.close()
    assert type(model.k) is torch.Tensor
    same_caches(eager, model)
    assert not owners.owners(model.k)
    assert not owners.owners(model.v)
    assert runtime(compiled)["state_bytes"] == 0


def test_close_is_idempotent_and_later_calls_say_so():
    eager, model, compiled = pair()
    chain(eager, compiled, range(3))
    compiled.close()
    compiled.close()
    with pytest.raises(rtc.StateError, match=r"(?i)closed"):
        compiled(x(3), 3)
    same_caches(eager, model)
    assert compiled.report().to_dict()["runtime"]["calls"] == 3


def test_close_before_the_first_call():
    _, _, compiled = pair()
    compiled.close()


def test_the_model_goes_on_without_rtc_and_with_it_again():
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    compiled.close()
    chain(eager, model, range(7, 9))
    chain(eager, rtc.compile(model, options=EAGER), range(9, 16))
    same_caches(eager, model)


def test_as_a_context_manager():
    eager, model, compiled = pair()
    with compiled as run:
        chain(eager, run, range(7))
    same_caches(eager, model)
    with pytest.raises(rtc.StateError):
        compiled(x(7), 7)


def test_closed_by_an_exception():
    eager, model, compiled = pair()
    with pytest.raises(ZeroDivisionError), compiled:
        chain(eager, compiled, range(5))
        _ = 1 / 0
    same_caches(eager, model)


def test_dropped_without_close():
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    del compiled
    gc.collect()
    same_caches(eager, model)
    chain(eager, model, range(7, 12))
    same_caches(eager, model)


def test_materialize_any_time():
    eager, model, compiled = pair()
    compiled.materialize()
    for step in range(16):
        chain(eager, compiled, [step])
        if step % 3:
            compiled.materialize()
            compiled.materialize()
    same_caches(eager, model)


def test_attributes_and_methods_are_the_model_s():
    _, model, compiled = pair()
    assert compiled.qkv is model.qkv
    assert compiled.k is model.k
    assert dict(compiled.named_buffers()).keys() == dict(model.named_buffers()).keys()
    assert "Window" in repr(compiled)
    with pytest.raises(AttributeError):
        _ = compiled.no_such_thing


def test_step_times_are_kept_for_a_while_only():
    """lingbot-world#44: whatever grows with the session makes it slower in the end."""
    _, _, compiled = pair(Window)
    compiled(x(0), 0)
    for _ in range(3):
        compiled._seconds.extend([0.0] * 100_000)
    assert len(runtime(compiled)["step_seconds"]) < 100_000


def test_what_returns_the_model_returns_the_compiled_one():
    """``rtc.compile(model).eval()`` must not run eager from there on, unnoticed."""
    _, twin, compiled = pair()
    assert compiled.eval() is compiled
    assert compiled.to(torch.float64).requires_grad_(False) is compiled
    assert compiled.train(False).double() is compiled
    assert compiled.state_dict().keys() == twin.state_dict().keys()
    assert next(iter(compiled.modules())) is twin
    assert not twin.training


@pytest.mark.parametrize("limit", ["rtc.backend.GRAPHS", "rtc.capture._ENTRIES"])
def test_what_changes_in_every_call_and_is_compiled_for(monkeypatch, limit):
    monkeypatch.setattr(limit, 3)

    class Named(Window):
        def forward(self, x, step, name):
            return super().forward(x, step) * len(name)

    _, _, compiled = pair(Named)
    with pytest.raises(rtc.errors.UnsupportedError, match="changes from call to call"):
        for step in range(12):
            compiled(x(step), step, "a" * step)
