"""Break rtc on purpose and see every input form fail: ``python bench/break_forms.py``.

A test that cannot fail proves nothing. Each mutant below breaks rtc in one place. A form is run
under one mutant after another, by the checks of tests/forms/test_forms.py themselves, until one of
them fails: wrong outputs or caches, wrong pass counts, a missing refusal, a host read not named. A
mutant that only raises some error does not count. ``--all`` goes on after the first failure.

Exit status 1 where no mutant breaks a form, or where a form fails with nothing broken.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib.machinery
import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import rtc
from rtc import attention_calls, backend
from rtc.passes import pipeline, ring_cache
from rtc.passes.analysis.host import Deps, InputInfo
from rtc.passes.analysis.order import OrderAnalysis
from rtc.passes.analysis.shapes import NotLocal
from rtc.passes.analysis.slots import LocalAnalysis
from rtc.passes.plan import Refusal
from rtc.runtime import owners, prepare, session
from rtc.runtime.graph import GraphRuntime
from rtc.runtime.prepare import CohortRuntime
from rtc.runtime.state import CohortState

ROOT = Path(__file__).resolve().parents[1]
aten = torch.ops.aten


def load(name: str) -> Any:
    """``tests/forms/<name>.py``, from wherever this is started."""
    package = "rtc_forms"
    if package not in sys.modules:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(ROOT / "tests" / "forms")]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.{name}")


# -- mutants ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """``where`` holds the attribute that is replaced by ``make(original)``."""

    name: str
    what: str
    where: Any
    attribute: str
    make: Callable[[Any], Any]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        original = self.where.__dict__[self.attribute]
        with mock.patch.object(self.where, self.attribute, self.make(original)):
            yield


MUTANTS: list[Mutant] = []


def mutant(where: Any, attribute: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register the function below, original -> broken, under its own name and docstring."""

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        what = (make.__doc__ or "").rstrip(".")
        MUTANTS.append(Mutant(make.__name__, what, where, attribute, make))
        return make

    return register


# What breaks forms of one kind stands first, then what breaks most, then the rest: each form falls
# early, and where it can to a break of what it is about.


@mutant(CohortRuntime, "_biases")
def bias_not_permuted(original):
    """Masks and biases by slot stay in the program's order under a ring."""

    def broken(self, out, env):
        original(self, out, env)
        for extra in out.extras:
            if extra.kind == "bias":
                out.extras[extra] = env[self.cohort.biases[extra.operand].operand]

    return broken


@mutant(OrderAnalysis, "__post_init__")
def order_ignored(original):
    """Consumers that go by the order of the slots are not noticed."""

    def broken(self):
        original(self)
        self.sensitive.clear()

    return broken


@mutant(CohortRuntime, "_frames")
def frame_ignored(original):
    """Queries are not turned when the frame is."""

    def broken(self, out, noted):
        still = {
            k: c if c.frame is None else dataclasses.replace(c, frame=np.ones_like(c.frame))
            for k, c in noted.items()
        }
        original(self, out, still)

    return broken


@mutant(CohortRuntime, "_table_inputs")
def table_row_late(original):
    """Fresh rows get the table row of the slot before."""

    def broken(self, out, e, k, klass, readers, rows):
        late = [r.roll(1, 0) for r in rows]
        original(self, out, e, k, klass, readers, late)

    return broken


@mutant(CohortRuntime, "_positions")
def place_off_by_one(original):
    """Fresh rows are written one place too far."""

    def broken(self, out, e, event, ids, came, capacity):
        before = set(out.extras)
        original(self, out, e, event, ids, came, capacity)
        ring = self.cohort.order == "ring"
        limit = capacity if ring else capacity + sum(m for _, m in event.present)
        for extra in out.extras.keys() - before:
            if extra.kind == "index":
                out.extras[extra] = (out.extras[extra] + 1) % limit

    return broken


@mutant(GraphRuntime, "_refresh")
def refresh_skipped(original):
    """Slots of a view that are out of date are not made anew."""
    return lambda self, c, st, prep: None


@mutant(CohortRuntime, "_framed")
def fresh_row_not_framed(original):
    """Fresh rows are not turned back into the frame."""
    return lambda self, c, klass, rows: rows


@mutant(prepare, "apart")
def turn_not_seen(original):
    """Kept slots are never found to have turned."""
    return lambda old, new, eps: np.zeros(len(old), dtype=bool)


@mutant(CohortRuntime, "_commit_positions")
def commit_off_by_one(original):
    """A cache with a placement of its own gets its fresh rows one place too far."""

    def broken(self, out, place, ids, cids):
        original(self, out, place, ids, cids)
        for extra in out.extras:
            if extra.kind == "index" and extra.event == -1:
                n = len(place.content)
                out.extras[extra] = (out.extras[extra] + 1) % n

    return broken


@mutant(CohortState, "materialize")
def not_materialized(original):
    """Caches are said to be in order again, and no slot has moved."""

    def broken(self, *, between=False):
        if not self.in_order:
            self.place.content = self.cids.copy()
            self.record_versions()

    return broken


@mutant(session, "_cut")
def wrong_half(original):
    """Of a stacked cache, the other half is taken."""

    def broken(tensor, part):
        axis, i = part
        return original(tensor, (axis, tensor.shape[axis] - 1 - i))

    return broken


@mutant(backend, "_owned")
def other_graph_not_told(original):
    """A graph without caches of its own reads what another one keeps in ring order."""
    return lambda run, inputs, session: run


@mutant(InputInfo, "deps")
def data_on_host(original):
    """Tensors that come in with the call count as known before it."""
    return property(lambda self: Deps.INT if self.is_int else Deps.CONST)


@mutant(pipeline, "run")
def no_consent_needed(original):
    """Whole-cache maxima are calibrated without the user's consent."""
    return lambda *args, **kwargs: original(*args, **{**kwargs, "calibrate": True})


@mutant(LocalAnalysis, "_rule")
def alias_not_named(original):
    """Tensors that share memory are refused like any op that is not known."""

    def broken(self, node):
        if node.target in (aten.as_strided.default, aten.as_strided_scatter.default):
            raise NotLocal("it is not known to be slot-local")
        return original(self, node)

    return broken


@mutant(LocalAnalysis, "__init__")
def hoists_not_found(original):
    """No work at the read is ever found to be slot-local."""

    def broken(self, *args, **kwargs):
        original(self, *args, **{**kwargs, "raw_only": True})

    return broken


@mutant(ring_cache, "_legal")
def rings_refused(original):
    """No cache may become a ring."""
    return lambda cohort: Refusal("broken on purpose")


@mutant(rtc.Options, "switches")
def passes_off(original):
    """No pass runs: all calls are those of the plain graph."""
    return lambda self: dict.fromkeys(original(self), False)


@mutant(backend, "_refuse_host_reads")
def host_read_allowed(original):
    """A host read in Dynamo's graph is not looked for."""
    return lambda gm: None


@mutant(backend.Compiler, "_lower")
def writes_lost(original):
    """Graphs compute, and write nothing back."""

    def broken(self, gm, fakes):
        for node in list(gm.graph.nodes):
            if node.target is aten.copy_.default:
                gm.graph.erase_node(node)
        gm.recompile()
        return original(self, gm, fakes)

    return broken


@mutant(attention_calls, "show")
def scale_lost(original):
    """Attention forgets the scale when it becomes SDPA again."""

    def broken(gm):
        original(gm)
        for node in gm.graph.nodes:
            if node.target is aten.scaled_dot_product_attention.default:
                node.kwargs = {**node.kwargs, "scale": 1.0}
        gm.recompile()

    return broken


# -- checks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a form's checks said: ``broken`` in words, or ``raised`` something that proves nothing.

    Both empty: it passed.
    """

    broken: str = ""
    raised: str = ""


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else "no text"


def check(tests: Any, form: Any, steps: int) -> Found:
    """The tests of test_forms.py that look at this form under rtc, over fewer steps."""
    try:
        return _host_read(tests, form) if form.syncs else _chain(tests, form, steps)
    finally:
        # Dynamo recompiles one function a few times only, and a broken call may leave a guard.
        torch._dynamo.reset()
        if owners.OWNERS:
            gc.collect()


def _host_read(tests: Any, form: Any) -> Found:
    try:
        tests.test_a_host_read_is_named_with_its_line(form.name)
    except AssertionError as e:
        return Found(f"no error or report entry names the line ({first_line(e)})")
    except Exception as e:
        # the test wants rtc's own error: whatever else comes to the user is the failure
        return Found(f"not named: {type(e).__name__}")
    return Found()


def _chain(tests: Any, form: Any, steps: int) -> Found:
    options = rtc.Options(lowering="eager")
    try:
        result = tests.run(form, tests.compile_with(options), check=False, steps=steps)
    except Exception as e:
        return Found(raised=f"{type(e).__name__}: {first_line(e)}")
    with mock.patch.object(tests, "chained", return_value=result):
        try:
            tests.test_matches_eager(form.name)
        except AssertionError:
            d = result.divergence
            size = "" if d.max_abs is None else f" by {d.max_abs:.0e}"
            return Found(f"step {d.step}: {d.where} {d.path} is wrong{size}")
        if form.name in tests.PINNED:
            try:
                tests.test_passes_do_what_is_pinned(form.name)
            except AssertionError as e:
                said = str(e).splitlines()
                return Found(said[0] if said else f"wrong counters, not {dict(form.runtime)}")
    return Found()


def examine(tests: Any, form: Any, mutants: list[Mutant], steps: int, every: bool) -> dict:
    """Which mutants break a form; only the first one unless ``every``."""
    row: dict[str, Any] = {"form": form.name, "broken_by": {}, "not_by": [], "raised": {}}
    alone = check(tests, form, steps)
    if alone.broken or alone.raised:
        row["unbroken_fails"] = alone.broken or alone.raised
        return row
    for m in mutants:
        with m():
            found = check(tests, form, steps)
        if found.broken:
            row["broken_by"][m.name] = found.broken
            if not every:
                break
        elif found.raised:
            row["raised"][m.name] = found.raised
        else:
            row["not_by"].append(m.name)
    return row


def shown(row: dict[str, Any]) -> str:
    if "unbroken_fails" in row:
        return f"{row['form']:<32} FAILS with nothing broken: {row['unbroken_fails']}"
    if not row["broken_by"]:
        return f"{row['form']:<32} NOTHING BROKE IT"
    name, how = next(iter(row["broken_by"].items()))
    more = len(row["broken_by"]) - 1
    return f"{row['form']:<32} {name:<22} {how}" + (f" (and {more} more)" if more else "")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--forms", default="", help="regular expression; only forms it finds")
    parser.add_argument("--mutants", default="", help="the same for mutants")
    parser.add_argument("--steps", type=int, default=30, help="length of each chain")
    parser.add_argument("--all", action="store_true", help="all mutants, not only the first")
    parser.add_argument("--list", action="store_true", help="list the mutants and stop")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "bench" / "results" / "break_forms.json"
    )
    args = parser.parse_args()

    mutants = [m for m in MUTANTS if re.search(args.mutants, m.name)]
    if args.list:
        for m in mutants:
            print(f"{m.name:<22} {m.what}")
        return 0
    tests = load("test_forms")
    forms = [f for f in tests.FORMS if re.search(args.forms, f.name)]
    started, rows = time.perf_counter(), []
    for form in forms:
        rows.append(examine(tests, form, mutants, args.steps, args.all))
        print(shown(rows[-1]), flush=True)
    seconds = time.perf_counter() - started
    left = [r["form"] for r in rows if not r["broken_by"]]
    used = {m.name: [r["form"] for r in rows if m.name in r["broken_by"]] for m in mutants}
    print(f"\n{len(rows)} forms, {args.steps} steps each, {seconds:.0f} s; forms a mutant broke:")
    for m in mutants:
        print(f"  {m.name:<22} {len(used[m.name]):>3}  {m.what}")
    print(f"no mutant broke: {', '.join(left) or 'none'}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    out = {
        "torch": torch.__version__,
        "steps": args.steps,
        "all": args.all,
        "mutants": {m.name: m.what for m in mutants},
        "unbroken": left,
        "forms": rows,
    }
    args.json.write_text(json.dumps(out, indent=1) + "\n")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
