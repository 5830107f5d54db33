"""What fails, fails loudly, and the next call works."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import inspect

import pytest
import torch
import torch.nn.functional as F

import rtc
from rtc.passes import pipeline

from .models import EAGER, Given, Window, chain, close, graphs, pair, runtime, same_caches, x, zeros


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def dies_once(runtime, error, after):
    """The graph raises once, before or after it ran."""
    run = runtime.rewritten

    def fail(args):
        runtime.rewritten = run
        if after:
            run(args)
        raise error

    runtime.rewritten = fail


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
def test_a_call_that_dies_before_it_wrote_has_not_happened(graph_runtimes, error):
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    dies_once(graph_runtimes[0], error, after=False)
    with pytest.raises(type(error)):
        compiled(x(50), 50)
    same_caches(eager, model)
    chain(eager, compiled, range(7, 12))
    dies_once(graph_runtimes[0], error, after=False)
    with pytest.raises(type(error)):
        compiled(x(50), 50)
    chain(eager, compiled, range(12, 20))
    same_caches(eager, model)


def test_a_new_session_after_a_call_that_died_half_way(graph_runtimes):
    """The caches may be half written then, as in eager; zeroed they are sound again."""
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    dies_once(graph_runtimes[0], RuntimeError("lost"), after=True)
    with pytest.raises(RuntimeError, match="lost"):
        compiled(x(50), 50)
    assert model.k.isfinite().all()
    for m in (eager, model):
        m.k.zero_()
        m.v.zero_()
    chain(eager, compiled, range(10))
    same_caches(eager, model)


def test_after_a_call_that_died_half_way_views_fit_the_caches(graph_runtimes):
    """What is in the caches then is nobody's business, but it is what the next call attends to."""
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    dies_once(graph_runtimes[0], RuntimeError("lost"), after=True)
    with pytest.raises(RuntimeError, match="lost"):
        compiled(x(50), 50)
    eager.k.copy_(model.k)
    eager.v.copy_(model.v)
    chain(eager, compiled, range(8, 18))
    same_caches(eager, model)


def test_wrong_inputs_leave_the_state_alone():
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    for bad in (torch.zeros(1, 3, 5).double(), torch.zeros(3, 6), x(0).float()):
        with pytest.raises(Exception):  # noqa: B017, PT011  (torch's own, of several types)
            compiled(bad, 7)
    with pytest.raises(TypeError):
        compiled()
    same_caches(eager, model)
    chain(eager, compiled, range(7, 14))
    same_caches(eager, model)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
def test_interrupted_while_compiling(monkeypatch, error):
    eager, model, compiled = pair()
    run, calls = pipeline.run, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise error
        return run(*args, **kwargs)

    monkeypatch.setattr(pipeline, "run", interrupted)
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        compiled(x(0), 0)
    chain_of = [
        caught.value,
        caught.value.__cause__,
        getattr(caught.value, "inner_exception", None),
    ]
    assert any(isinstance(e, type(error)) for e in chain_of)
    chain(eager, compiled, range(10))
    same_caches(eager, model)
    assert graphs(compiled) == 1


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0", "3.0.0", "2.20.0a0+git1234"])
def test_a_torch_that_was_not_checked(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(rtc.UnsupportedError, match=version.replace("+", r"\+")) as caught:
        rtc.compile(Window())
    assert "2.11" in str(caught.value)
    with pytest.raises(rtc.UnsupportedError):
        rtc.explain(Window(), x(0), 0)


class Syncing(Window):
    def forward(self, x, step):
        if self.k.abs().max().item() > 100.0:
            self.k.zero_()
        return self.attend(x, self.k, self.v, step)


class SyncingPosition(Window):
    def forward(self, x, step):
        at = int(torch.tensor(step).sum().item()) % 4
        self.k[:, :, at] += 1.0
        return self.attend(x, self.k, self.v, step)


class Branching(Window):
    def forward(self, x, step):
        if x.sum() > 0:
            x = x * 2
        return self.attend(x, self.k, self.v, step)


@pytest.mark.parametrize("model", [Syncing, Branching])
def test_a_host_read_is_refused_with_its_line(model):
    """FastVideo#1687: 2,100 host waits in a generation."""
    _, _, compiled = pair(model)
    lines, first = inspect.getsourcelines(model.forward)
    line = first + next(i for i, code in enumerate(lines) if ".item()" in code or "x.sum()" in code)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        compiled(x(0), 0)
    assert isinstance(caught.value, rtc.HostSyncError)
    assert f"test_failures.py:{line}" in str(caught.value)


def test_a_read_of_a_tensor_made_from_ints_is_none():
    eager, _, compiled = pair(SyncingPosition)
    for step in range(6):
        torch.testing.assert_close(compiled(x(step), step), eager(x(step), step))


class FiniteTable(Window):
    """lingbot-world-v2#10: a table of positions that runs out in the middle of a session."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(40, 8).double())

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:, :, :-3] = cache[:, :, 3:].clone()
            cache[:, :, -3:] = new
        rows = self.table[torch.arange(14) + 3 * step]
        return self.o(
            F.scaled_dot_product_attention(q, self.k + rows, self.v).transpose(1, 2).flatten(2)
        )


def test_a_table_that_runs_out():
    eager, model, compiled = pair(FiniteTable)
    chain(eager, compiled, range(9))
    with pytest.raises(IndexError):
        eager(x(9), 9)
    with pytest.raises(Exception):  # noqa: B017, PT011
        compiled(x(9), 9)
    for m in (eager, model):  # eager wrote its caches before it failed
        m.k.zero_()
        m.v.zero_()
    chain(eager, compiled, range(8))


class PastTheEnd(Window):
    """Self-Forcing#39, #63: a write past the last slot is an empty slice."""

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        p = 3 * step
        self.k[:, :, p : p + 3] = k
        self.v[:, :, p : p + 3] = v
        y = F.scaled_dot_product_attention(q, self.k * self.freq.repeat(2), self.v)
        return self.o(y.transpose(1, 2).flatten(2))


def test_a_write_past_the_last_slot_fails_as_in_eager():
    eager, model, compiled = pair(PastTheEnd)
    chain(eager, compiled, range(4))
    for step in (4, 5):
        with pytest.raises(RuntimeError):
            eager(x(step), step)
        with pytest.raises(Exception):  # noqa: B017, PT011
            compiled(x(step), step)
    same_caches(eager, model)
    chain(eager, compiled, [1, 3, 0, 2])
    same_caches(eager, model)


def test_an_index_past_the_last_slot_fails_as_in_eager():
    class Model(Window):
        def forward(self, x, step):
            q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
            idx = torch.arange(3) + 3 * step
            self.k.index_copy_(2, idx, k)
            self.v.index_copy_(2, idx, v)
            y = F.scaled_dot_product_attention(q, self.k * self.freq.repeat(2), self.v)
            return self.o(y.transpose(1, 2).flatten(2))

    eager, model, compiled = pair(Model)
    chain(eager, compiled, range(4))
    for step in (4, -1):
        with pytest.raises((IndexError, RuntimeError)):
            eager(x(step), step)
        with pytest.raises(IndexError):
            compiled(x(step), step)
    # eager's own index_copy_ leaves its first rows written; rtc wrote nothing
    for cache in (eager.k, eager.v, model.k, model.v):
        cache.zero_()
    chain(eager, compiled, [1, 3, 0, 2])


def test_options_that_contradict_the_model_leave_nothing_behind():
    """Ring order under a RoPE by slot order that stays at the read."""
    eager, model, _ = pair()
    compiled = rtc.compile(model, options=rtc.Options(lowering="eager", hoist_rope=False))
    for _ in range(2):
        with pytest.raises(rtc.OptionsError, match=r"models\.py"):
            compiled(x(0), 0)
    same_caches(eager, model)
    chain(eager, rtc.compile(model, options=EAGER), range(6))


def test_two_models_one_of_which_fails(graph_runtimes):
    eager, model, first = pair(Given)
    second = rtc.compile(model, options=EAGER)
    a, b = (zeros(), zeros()), (zeros(), zeros())
    for step in range(6):
        close(eager(x(step), *a, step), (first if step % 2 else second)(x(step), *b, step))
    for made in graph_runtimes:
        dies_once(made, RuntimeError("lost"), after=False)
    for run in (first, second):
        with pytest.raises(RuntimeError, match="lost"):
            run(x(50), *b, 50)
    for step in range(6, 12):
        close(eager(x(step), *a, step), (first if step % 2 else second)(x(step), *b, step))
    close(a[0], b[0])
    assert runtime(first)["plain_calls"] == 0
