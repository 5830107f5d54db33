"""Run one spec: eager and compiled side by side, with a user who meddles between calls."""

import copy
import dataclasses
import itertools
import json
import linecache
import logging
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rtc

from .source import caches, slot_axis, source
from .spec import Spec

TOLERANCE = 1e-9  # of float64 values around 1; a wrong slot shows as 1e-3 or more
# Keys that are rounded to a bfloat16 cache's own precision after RoPE: a fold of positions into the
# queries rounds other values, as far off as eager's.
ROUNDED = 3e-4
_COUNT = itertools.count()


@dataclass
class Outcome:
    """``status``: ok, wrong, crash, refused (an error that rtc raises on purpose), invalid (eager)."""

    status: str
    step: int = -1
    message: str = ""
    worst: float = 0.0
    place: str = ""  # of a crash: function and line of rtc, or of torch
    applied: dict[str, int] = field(default_factory=dict)
    runtime: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        return self.status in ("wrong", "crash")

    @property
    def kind(self) -> tuple[str, str]:
        """Failures of one kind have one cause, most likely."""
        return self.status, self.place


class Wrong(Exception):
    pass


class Invalid(Exception):
    """Eager itself does not run this."""


def build(spec: Spec) -> Callable[[], nn.Module]:
    """The model class of a spec; its source is known to tracebacks."""
    name, text = f"<fuzz {spec.seed}.{next(_COUNT)}>", source(spec)
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict[str, Any] = {"__name__": "fuzz_model"}
    exec(compile(text, name, "exec"), space)
    return space["Model"]


class Side:
    """One model with its caches: in the model, or sets of them that the caller holds."""

    def __init__(self, spec: Spec, model: nn.Module) -> None:
        self.spec, self.model = spec, model
        self.run: Any = model
        self.sets: list[Any] = []
        self.at = 0
        self.held: list[Tensor] = []
        if spec.home in ("args", "dict", "list"):
            g = torch.Generator().manual_seed(spec.seed)
            normal = spec.start == "normal"
            for _ in range(2):
                dtype = getattr(torch, spec.dtype)
                made = {
                    n: (torch.randn(s, generator=g, dtype=torch.float64) * normal).to(dtype)
                    for n, s in caches(spec).items()
                }
                if spec.home == "list":
                    pairs: list[dict[str, Tensor]] = [{} for _ in range(spec.layers)]
                    for n, t in made.items():
                        pairs[int(n[1:])][n[0]] = t
                    self.sets.append(pairs)
                else:
                    self.sets.append(made)

    def arguments(self, x: Tensor, step: int, flag: bool) -> tuple[Any, ...]:
        s = self.spec
        args: list[Any] = [x, step]
        if s.extra_int:
            args.append((step * 7) % 5)
        if s.flag != "none":
            args.append(flag)
        if s.home == "args":
            args += list(self.sets[self.at].values())
        elif self.sets:
            args.append(self.sets[self.at])
        return tuple(args)

    def cell(self, name: str) -> tuple[Any, str]:
        """(container, key) of a cache."""
        s = self.spec
        if s.home == "submodule":
            return self.model.stores[list(caches(s)).index(name)], "cache"  # type: ignore[index,union-attr]
        if s.home == "list":
            return self.sets[self.at][int(name[1:])], name[0]
        return (self.sets[self.at] if self.sets else self.model), name

    def get(self, name: str) -> Tensor:
        box, key = self.cell(name)
        return box[key] if isinstance(box, dict) else getattr(box, key)

    def set(self, name: str, value: Tensor) -> None:
        box, key = self.cell(name)
        if isinstance(box, dict):
            box[key] = value
        elif self.spec.home == "parameter":
            setattr(box, key, nn.Parameter(value, requires_grad=False))
        else:
            setattr(box, key, value)


class Pair:
    """Eager and compiled; every action is done to both."""

    def __init__(self, spec: Spec, options: rtc.Options) -> None:
        self.spec = spec
        switches = {
            "": {},
            "no_ring": {"ring_cache": False},
            "write_back": {"write_back": True},
            "nothing": {"ring_cache": False, "hoist_rope": False, "hoist_quantize": False},
        }
        self.options = dataclasses.replace(options, **switches[spec.options])
        torch.manual_seed(spec.seed)
        try:
            model = build(spec)()
        except Exception as e:
            raise Invalid(f"{type(e).__name__}: {e}") from e
        self.eager, self.other = Side(spec, model), Side(spec, copy.deepcopy(model))
        self.made: list[rtc.Compiled] = []  # all of them, for the report
        self.compiled: list[rtc.Compiled] = []
        self.open()
        self.random = random.Random(spec.seed + 1)
        self.snapshot: dict[str, Tensor] | None = None
        self.worst = 0.0
        self.tolerance = ROUNDED if _rounds_after_rope(spec) else TOLERANCE
        self.last: Tensor | None = None

    def open(self) -> None:
        """Compile the model at hand, in place of what was compiled before."""
        self.compiled = [rtc.compile(self.other.model, options=self.options)]
        self.made += self.compiled
        self.other.run = self.compiled[0]

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.eager, self.other

    # -- calls and looks -----------------------------------------------------------------------

    def x(self, t: int, n: int) -> Tensor:
        g = torch.Generator().manual_seed(self.spec.seed * 1000 + t)
        x = torch.randn(self.spec.batch, n, 6, generator=g, dtype=torch.float64)
        if self.spec.feedback and self.last is not None and self.last.shape == x.shape:
            x = 0.7 * x + 0.3 * self.last
        return x

    def call(
        self, t: int, step: int, *, n: int = 0, context: Any = nullcontext, run: Any = None
    ) -> None:
        s = self.spec
        flag = t % 3 == 0
        outs = []
        with torch.no_grad(), nullcontext() if context is torch.enable_grad else context():
            x = self.x(t, n or s.new)
            try:
                outs.append(self.eager.model(*self.eager.arguments(x.clone(), step, flag)))
            except Exception as e:
                raise Invalid(f"{type(e).__name__}: {e}") from e
        if not bool(outs[0].isfinite().all()):
            raise Invalid("not finite")
        with torch.no_grad(), context():
            args = self.other.arguments(x.clone(), step, flag)
            outs.append((run or self.other.run)(*args))
        self.compare("output", *outs)
        self.last = outs[0].detach().clone()

    def compare(self, what: str, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Wrong(f"{what}: {b.dtype}{tuple(b.shape)} instead of {a.dtype}{tuple(a.shape)}")
        a, b = a.double(), b.detach().double()
        error = float((a - b).abs().max() / (1 + a.abs().max()))
        self.worst = max(self.worst, error)
        if not error <= self.tolerance:
            raise Wrong(f"{what} is off by {error:.2e}")

    def look(self) -> None:
        for name in caches(self.spec):
            self.compare(f"cache {name}", self.eager.get(name), self.other.get(name))
        for a, b in zip(self.eager.held, self.other.held, strict=True):
            self.compare("a held view", a, b)

    # -- actions -------------------------------------------------------------------------------

    def act(self, name: str, t: int, step: int) -> None:
        with torch.no_grad():
            getattr(self, f"do_{name}")(t, step)

    def each(self) -> Iterator[tuple[Side, str]]:
        for name in caches(self.spec):
            for side in self.sides:
                yield side, name

    def one(self) -> str:
        return self.random.choice(list(caches(self.spec)))

    def do_read(self, t: int, step: int) -> None:
        self.look()

    def do_peek(self, t: int, step: int) -> None:
        name = self.one()
        self.compare(f"cache {name}", *(side.get(name)[0].cumsum(-1) for side in self.sides))

    def do_zero(self, t: int, step: int) -> None:
        for side, name in self.each():
            side.get(name).zero_()

    def do_part(self, t: int, step: int) -> None:
        name = self.one()
        shape = caches(self.spec)[name]
        axis = slot_axis(self.spec, name)
        g = torch.Generator().manual_seed(t)
        value = torch.randn(shape, generator=g, dtype=torch.float64).narrow(axis, 0, 2)
        for side in self.sides:
            side.get(name).narrow(axis, 1, 2).copy_(value)

    def do_copy_row(self, t: int, step: int) -> None:
        name = self.one()
        axis = slot_axis(self.spec, name)
        for side in self.sides:
            c = side.get(name)
            c.narrow(axis, 0, 1).copy_(c.narrow(axis, c.shape[axis] - 1, 1))

    def do_swap(self, t: int, step: int) -> None:
        name = self.one()
        for side in self.sides:
            side.set(name, side.get(name) * 0.9 + 0.1)

    def do_swap_all(self, t: int, step: int) -> None:
        for name, shape in caches(self.spec).items():
            g = torch.Generator().manual_seed(t)
            value = torch.randn(shape, generator=g, dtype=torch.float64)
            for side in self.sides:
                side.set(name, value.to(side.get(name).dtype, copy=True))

    def do_load(self, t: int, step: int) -> None:
        """Go back to an earlier state_dict, or remember this one."""
        if self.snapshot is None:
            self.snapshot = {k: v.clone() for k, v in self.eager.model.state_dict().items()}
        else:
            for side in self.sides:
                side.model.load_state_dict(self.snapshot)

    def do_materialize(self, t: int, step: int) -> None:
        for c in self.compiled:
            c.materialize()

    def do_invalidate(self, t: int, step: int) -> None:
        """Written where nobody can see it, and said so."""
        name = self.one()
        for side in self.sides:
            side.get(name).data.mul_(0.5)
        for c in self.compiled:
            c.invalidate()

    def do_eager(self, t: int, step: int) -> None:
        self.call(t + 500, step, run=self.other.model)

    def do_twin(self, t: int, step: int, options: rtc.Options | None = None) -> None:
        """A second compiled model on the same weights and caches takes turns with the first."""
        if len(self.compiled) == 1:
            self.compiled.append(rtc.compile(self.other.model, options=options or self.options))
            self.made.append(self.compiled[1])
        turn = 1 - self.compiled.index(self.other.run)
        self.other.run = self.compiled[turn]

    def do_twin_plain(self, t: int, step: int) -> None:
        self.do_twin(t, step, rtc.Options(lowering="eager", ring_cache=False, warn=False))

    def do_deepcopy(self, t: int, step: int) -> None:
        for side in self.sides:
            side.model, side.sets = copy.deepcopy((side.model, side.sets))
            side.run, side.held = side.model, []
        self.open()

    def do_inference(self, t: int, step: int) -> None:
        self.call(t + 500, step, context=torch.inference_mode)

    def do_grad(self, t: int, step: int) -> None:
        self.call(t + 500, step, context=torch.enable_grad)

    def do_hold(self, t: int, step: int) -> None:
        name = self.one()
        axis = slot_axis(self.spec, name)
        for side in self.sides:
            side.held = [] if side.held else [side.get(name).narrow(axis, 0, 3)]

    def do_const(self, t: int, step: int) -> None:
        for side in self.sides:
            for name in ("freq", "gain", "mix", "slot"):
                getattr(side.model, name).mul_(1.03)

    def do_const_swap(self, t: int, step: int) -> None:
        for side in self.sides:
            for name in ("freq", "head"):
                setattr(side.model, name, getattr(side.model, name) * 1.05)

    def do_explain(self, t: int, step: int) -> None:
        x = self.x(t, self.spec.new)
        rtc.explain(self.other.model, *self.other.arguments(x, step, True), options=self.options)

    def do_fail(self, t: int, step: int) -> None:
        """A call with the wrong number of features dies."""
        x = torch.zeros(self.spec.batch, self.spec.new, 5, dtype=torch.float64)
        for side in self.sides:
            try:
                side.run(*side.arguments(x, step, True))
            except Exception:
                continue
            raise Wrong("a call with a wrong input did not fail")

    def do_session(self, t: int, step: int) -> None:
        for side in self.sides:
            side.at = (side.at + 1) % max(1, len(side.sets))

    def do_reopen(self, t: int, step: int) -> None:
        for c in self.compiled:
            c.close()
        self.look()
        self.open()

    def do_data(self, t: int, step: int) -> None:
        """Written past the version counter."""
        name = self.one()
        for side in self.sides:
            side.get(name).data.mul_(0.5)

    def do_numpy(self, t: int, step: int) -> None:
        name = self.one()
        if self.spec.dtype != "bfloat16":
            for side in self.sides:
                side.get(name).detach().numpy()[...] *= 0.5

    def do_held_write(self, t: int, step: int) -> None:
        for side in self.sides:
            for view in side.held:
                view.mul_(0.5)

    def do_odd_read(self, t: int, step: int) -> None:
        """Reads that ask no torch function."""
        name = self.one()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.compare(f"cache {name}", *(torch.tensor(side.get(name)) for side in self.sides))

    def do_copy_compiled(self, t: int, step: int) -> None:
        """The compiled model itself is copied, with the caches of the caller."""
        for side in self.sides:
            side.model, side.run, side.sets = copy.deepcopy((side.model, side.run, side.sets))
            side.held = []
        self.compiled = [self.other.run]
        self.made += self.compiled

    def do_report(self, t: int, step: int) -> None:
        json.dumps(self.other.run.report().to_dict())

    def do_shape(self, t: int, step: int) -> None:
        """A call with another number of new rows."""
        s = self.spec
        plain = s.write in (("shift", "cat"), ("shift", "clone")) and s.write_v is None
        if (
            plain
            and s.stage in ("before", "after", "clone")
            and "BFTHD" not in (s.layout, s.layout_v)
        ):
            self.call(t + 500, step, n=s.new + 1)


def _rounds_after_rope(spec: Spec) -> bool:
    ops = spec.key_ops
    return spec.dtype == "bfloat16" and "rope" in ops and "bf16" in ops[ops.index("rope") :]


def _place(e: BaseException) -> str:
    """The innermost function of rtc on the way to an error, and its type."""
    frames = traceback.extract_tb((getattr(e, "inner_exception", None) or e).__traceback__)
    ours = [f for f in frames if "/rtc/" in f.filename or "/passes/" in f.filename]
    where = ours[-1] if ours else frames[-1]
    kind = type(getattr(e, "inner_exception", None) or e).__name__
    text = re.sub(r"\d+", "#", str(getattr(e, "inner_exception", None) or e))[:40]
    return f"{kind} in {Path(where.filename).name} {where.name}: {text}"


def ints(spec: Spec, steps: int) -> list[int]:
    """The step argument of every call."""
    r, out, at = random.Random(spec.seed + 2), [], 0
    for t in range(steps):
        at = {
            "up": t,
            "jumps": at + r.choice((1, 1, 1, 5, 12)),
            "repeats": t // 3,
            "back": t % 9,
            "walk": max(0, at + r.choice((-2, -1, 0, 1, 1, 2))),
            "constant": 3,
            "large": 1000 + 3 * t,
        }[spec.ints]
        out.append(at)
    return out


def run(spec: Spec, options: rtc.Options | None = None, steps: int = 40) -> Outcome:
    """Chain ``spec`` for ``steps`` calls. Raises nothing but KeyboardInterrupt."""
    options = options or rtc.Options(lowering="eager", warn=False)
    torch._dynamo.reset()
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # do_fail
    out, t, pair = Outcome("ok"), -1, None
    actions = dict(spec.actions)
    try:
        pair = Pair(spec, options)
        for t, step in enumerate(ints(spec, steps)):
            pair.call(t, step)
            if t in actions:
                pair.act(actions[t], t, step)
        pair.look()
        pair.do_reopen(steps, steps)
    except Wrong as e:
        out.status, out.message = "wrong", str(e)
    except Invalid as e:
        out.status, out.message = "invalid", str(e)
    except rtc.RtcError as e:
        out.status, out.message = "refused", f"{type(e).__name__}: {e}"
    except Exception as e:
        out.status = "crash"
        out.message = f"{type(e).__name__}: {e}".split("\n\nSet TORCHDYNAMO_VERBOSE")[0]
        out.place = _place(e)
    out.step = t
    if pair is not None:
        out.worst = pair.worst
        for c in pair.made:
            report = c.report()
            for name, n in report.counts().items():
                out.applied[name] = out.applied.get(name, 0) + n
            for name, n in report.to_dict()["runtime"].items():
                if isinstance(n, int):
                    out.runtime[name] = out.runtime.get(name, 0) + n
                elif name == "notes":
                    out.notes += n
    return out
