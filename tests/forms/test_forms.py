"""Every form: the form itself is sound, and rtc computes and keeps the same as eager."""

import copy
import functools
import inspect
import json
import re
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

import rtc
from rtc.testing import ChainResult, assert_pass_counts, assert_refused, check_chain

from .forms import FORMS
from .registry import Form, run, symbolic

BY_NAME = {form.name: form for form in FORMS}
NAMES = list(BY_NAME)
SYNCING = [form.name for form in FORMS if form.syncs]
QUIET = [name for name in NAMES if name not in SYNCING]
PINNED = [form.name for form in FORMS if form.expect or form.refuses or form.runtime]

# Overwritten as a whole before the next read: nothing that a later output could show.
EVICTED = re.compile(r"cache\['[kv]0'\]|cache\[0\]\[[01]\]")


def test_names_are_unique_and_chains_long():
    assert len(FORMS) == len(BY_NAME)
    assert all(form.steps >= 100 for form in FORMS)


@pytest.mark.parametrize("name", QUIET)
def test_traces_as_one_graph(name):
    """Eager repeats itself, and Dynamo and AOT take the form whole, with a symbolic step."""
    form, seen = BY_NAME[name], []

    def count(gm, example_inputs):
        seen.append(gm)
        return lookup_backend("aot_eager")(gm, example_inputs)

    with symbolic(form):
        run(form, lambda model: torch.compile(model, backend=count, fullgraph=True))
    assert form.graphs is None or len(seen) == form.graphs


class Sabotaged:
    """The model with one of its caches disturbed before call `at`."""

    def __init__(self, form: Form, model, leaf: int, at: int) -> None:
        self.form, self.model, self.leaf, self.at, self.calls = form, model, leaf, at, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *args, **kwargs):
        if self.calls == self.at:
            torch.manual_seed(0)
            cache = leaves(self.form, self.model, (args, kwargs))[self.leaf]
            with torch.no_grad():
                cache += 1e-3 * torch.randn_like(cache)
        self.calls += 1
        return self.model(*args, **kwargs)


def leaves(form: Form, model, inputs=None) -> list[torch.Tensor]:
    """The caches that can be disturbed; those held by the caller are found among the inputs."""
    if form.state is not None:
        tree = form.state() if inputs is None else inputs
        shapes = {leaf.shape for leaf in tensors(form.state())}
        return [t for t in tensors(tree) if t.shape in shapes]
    tree = form.caches(model) if form.caches else dict(model.named_buffers())
    return [t for t in tensors(tree) if t.is_floating_point() or t.is_complex()]


def tensors(tree) -> list[torch.Tensor]:
    flat, _ = torch.utils._pytree.tree_flatten(tree)
    return [t for t in flat if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", NAMES)
def test_every_cache_matters(name):
    """A form whose output ignored a cache would prove nothing about it."""
    form = BY_NAME[name]
    torch.manual_seed(0)
    model = form.build()
    for leaf in range(len(leaves(form, model))):
        torch.manual_seed(0)
        twin = Sabotaged(form, copy.deepcopy(model), leaf, at=6)
        result = check_chain(
            copy.deepcopy(model),
            twin,
            form.inputs,
            steps=8,
            state=form.state,
            caches=lambda model: {},  # outputs only
            check=False,
        )
        if result:
            paths = list(rtc.testing.compare.flatten(form.state() if form.state else {}, "cache"))
            where = paths[leaf] if paths else f"cache[{list(dict(model.named_buffers()))[leaf]!r}]"
            assert EVICTED.fullmatch(where), f"{where} changes no output"


def compile_with(options):
    return lambda model: rtc.compile(model, options=options)


@functools.cache
def chained(name: str) -> ChainResult:
    """The form under rtc, without code generation; run once for all tests that look at it."""
    return run(BY_NAME[name], compile_with(rtc.Options(lowering="eager")), check=False)


@pytest.mark.parametrize("name", QUIET)
def test_matches_eager(name):
    result = chained(name)
    assert result, str(result)


@pytest.mark.parametrize("name", PINNED)
def test_passes_do_what_is_pinned(name):
    form, report = BY_NAME[name], chained(name).report
    assert report is not None
    assert_pass_counts(report, form.expect)
    for refusing, why in form.refuses.items():
        assert_refused(report, refusing, why)
    assert form.runtime.items() <= report["runtime"].items()


@pytest.mark.parametrize("name", SYNCING)
def test_a_host_read_is_named_with_its_line(name):
    """An error, or an entry in the report: either says which line of the user's waits."""
    form = BY_NAME[name]
    try:
        result = run(form, compile_with(rtc.Options(lowering="eager")))
        text = json.dumps(result.report)
    except rtc.HostSyncError as error:
        text = str(error)
    model = form.build()
    source, first = inspect.getsourcelines(type(model).forward)
    line = first + next(i for i, code in enumerate(source) if ".item()" in code)
    assert re.search(form.syncs, text)
    assert f"forms_shared.py:{line}" in text


STEADY = ["rope_half", "layout_2bhsd", "position_reset_sink", "home_list_of_dicts"]


@pytest.mark.parametrize("name", STEADY)
def test_caches_may_be_looked_at_directly_after_every_step(name):
    options = rtc.Options(lowering="eager")
    run(BY_NAME[name], compile_with(options), every=1, materialize=False)


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("off", [{"ring_cache"}, {"hoist_rope", "ring_cache"}])
def test_switched_off_is_right_as_well(name, off):
    switches: dict[str, Any] = dict.fromkeys(off, False)
    options = rtc.Options(lowering="eager", **switches)
    result = run(BY_NAME[name], compile_with(options))
    assert_pass_counts(result.report, dict.fromkeys(off, 0))


def test_a_ring_under_slot_order_rope_needs_the_hoist():
    """Ring order under a RoPE by slot order is wrong, and shipped silently wrong once."""
    options = rtc.Options(lowering="eager", hoist_rope=False)
    with pytest.raises(rtc.OptionsError, match=r"forms_position\.py"):
        run(BY_NAME["position_slot_order_sink"], compile_with(options))
