"""Random models with a user who meddles: a few fixed seeds. `bench/fuzz_forms.py` runs many."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from .drive import Outcome, Pair, Side, build, ints, run
from .source import source
from .spec import ACTIONS, LAYOUTS, WRITES, Spec, draw, legal, simpler

STEPS = 16
SEEDS = range(25)
# Found something once, or cover what others do not: stacked caches, frames, several passes, masks
# with prompt keys, parameters, rows made from the cache itself. Each with the steps it was found in.
FOUND = {
    25: (415, 7, 17, 41, 66, 72, 97, 132, 165, 175, 206, 275, 285, 3, 11, 13, 24, 29, 58, 84, 120),
    20: (734, 858, 1276),
}
CASES = [(s, STEPS) for s in SEEDS] + [(s, steps) for steps, seeds in FOUND.items() for s in seeds]


@pytest.mark.parametrize(("seed", "steps"), CASES)
def test_matches_eager(seed, steps):
    found = run(draw(seed, steps), steps=steps)
    assert found.status == "ok", f"{found.place}: {found.message}\n{source(draw(seed, steps))}"


def test_the_seeds_reach_the_passes():
    """A fuzzer that rtc refuses everywhere would find nothing."""
    specs = [draw(seed, STEPS) for seed in SEEDS]
    assert len({s.layout for s in specs}) >= 7
    assert len({s.write for s in specs}) >= 10
    assert len({name for s in specs for _, name in s.actions}) >= 15


def test_a_seed_is_one_model():
    assert source(draw(5)) == source(draw(5))
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert ints(draw(5), 30) == ints(draw(5), 30)


def test_every_action_and_write_exists():
    assert all(hasattr(Pair, f"do_{name}") for name in ACTIONS)
    for movement, spellings in WRITES.items():
        for how in spellings:
            for layout in LAYOUTS:
                spec = legal(Spec(write=(movement, how), layout=layout, sink=1))
                model = build(spec)()
                side = Side(spec, model)
                with torch.no_grad():
                    for step in range(3):
                        x = torch.randn(spec.batch, spec.new, 6, dtype=torch.float64)
                        y = model(*side.arguments(x, step, True))
                assert y.isfinite().all(), spec


def test_what_is_wrong_is_found(monkeypatch):
    """A side that computes something else in one call is noticed in that call."""
    call = Pair.call

    def disturbed(self, t, step, **kwargs):
        if t == 5:
            self.other.get("k0").mul_(1.001)
        call(self, t, step, **kwargs)

    monkeypatch.setattr(Pair, "call", disturbed)
    found = run(Spec(start="normal"), steps=10)
    assert (found.status, found.step) == ("wrong", 5)
    assert found.bad


def test_a_crash_is_told_apart_from_a_refusal(monkeypatch):
    import rtc

    def fail(error):
        def call(self, t, step, **kwargs):
            raise error

        return call

    for error, status in ((rtc.StateError("no"), "refused"), (RuntimeError("oh"), "crash")):
        monkeypatch.setattr(Pair, "call", fail(error))
        found = run(Spec(), steps=2)
        assert found.status == status
        assert re.search("no|oh", found.message)


def test_the_shrinker_ends_at_what_matters():
    """With `run` replaced by a condition on the spec."""
    path = Path(__file__).parents[2] / "bench" / "fuzz_forms.py"
    module_spec = importlib.util.spec_from_file_location("fuzz_forms", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    cli = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(cli)

    class Drive:
        @staticmethod
        def run(spec, options, steps):
            bad = "rope" in spec.key_ops and any(name == "zero" for _, name in spec.actions)
            return Outcome("wrong" if bad else "ok")

    start = next(s for s in map(draw, range(1000)) if Drive.run(s, None, 0).status == "wrong")

    class Specs:
        pass

    Specs.simpler = staticmethod(simpler)
    cli.load = lambda name: {"drive": Drive, "spec": Specs}[name]
    small = cli.shrink(start, None, 0)
    assert small.key_ops == ("rope",)
    assert [name for _, name in small.actions] == ["zero"]
    assert small.layout == Spec().layout
    assert small.write == Spec().write
