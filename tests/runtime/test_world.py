"""What a step depends on besides its arguments: memory that was exchanged, ops of other libraries that
look at the world, assertions on values, modes inside of the model."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc
from rtc.runtime.state import Stamp
from tests.runtime.models import SHAPE, Window, close, pair, rope, runtime, same_caches, x

SIDES = {
    "eager": {"lowering": "eager"},
    "replayed": {"lowering": "eager", "step_graph": "simulate"},
    "regions": {"lowering": "eager", "regions": "on"},
}
sides = pytest.mark.parametrize("side", SIDES)


def options(side):
    return rtc.Options(warn=False, **SIDES[side])


# -- a parameter's memory --------------------------------------------------------------------------


class Scaled(Window):
    """Keys and frames are scaled by a parameter; rtc keeps what follows from it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8).double() + 0.5)

    def forward(self, x, step):
        y = self.attend(x, self.k, self.v, step) * self.scale.exp().sum()
        pos = torch.arange(SHAPE[2], dtype=x.dtype) + step
        q = rope(self.v[:, :, -1:], pos[-1:], self.freq)
        return y + F.scaled_dot_product_attention(
            q, rope(self.k * self.scale, pos, self.freq), self.v
        ).sum((1, 2, 3), keepdim=True).squeeze(1)


@sides
def test_other_memory_at_the_same_address(side):
    """``.data =`` counts no version, and freed memory is the next that is given out."""
    eager, twin, compiled = pair(Scaled, options(side))
    memory = np.ones(8)
    for step in range(12):
        if step % 3 == 1:
            for m in (eager, twin):
                memory[:] = 0.3 + 0.1 * step
                m.scale.data = torch.from_numpy(memory)  # another storage each time
        close(eager(x(step), step), compiled(x(step), step))
    same_caches(eager, twin)


@torch.no_grad()
def test_copies_let_go_of_memory_once():
    eager, _, compiled = pair(Scaled, options("replayed"))
    for step in range(4):
        close(eager(x(step), step), compiled(x(step), step))
    stamp = Stamp(eager.scale, 0)
    for other in (copy.deepcopy(stamp), copy.copy(stamp)):
        assert other.rest[2] is stamp.rest[2]
    for _ in range(2):  # torch would end the process, sooner or later
        twin, again = copy.deepcopy((eager, compiled))
        for step in range(4, 8):
            close(twin(x(step), step), again(x(step), step))
        del twin, again
        gc.collect()


# -- ops of other libraries ------------------------------------------------------------------------

WORLD = {"steer": 0.0, "calls": 0}


def _look():
    WORLD["calls"] += 1
    return WORLD["steer"]


@torch.library.custom_op("world::steer", mutates_args=())
def steer(step: int) -> torch.Tensor:
    return torch.full((1,), _look(), dtype=torch.float64)


@torch.library.custom_op("world::origin", mutates_args=())
def origin() -> torch.Tensor:
    return torch.full((1,), _look(), dtype=torch.float64)


@torch.library.custom_op("world::merged", mutates_args=())
def merged(w: torch.Tensor) -> torch.Tensor:
    return w * (1 + _look())


steer.register_fake(lambda step: torch.empty(1, dtype=torch.float64))
origin.register_fake(lambda: torch.empty(1, dtype=torch.float64))
merged.register_fake(torch.empty_like)


class Steered(Window):
    kind = ""

    def forward(self, x, step):
        k, pos = self.k, torch.arange(SHAPE[2], dtype=x.dtype) + step
        first, rest = torch.zeros(2, dtype=x.dtype), SHAPE[2] - 2
        if self.kind == "positions":
            pos = pos + torch.cat([first, origin().expand(rest)])
        if self.kind == "positions of the step":
            pos = pos + torch.cat([first, steer(step).expand(rest)])
        if self.kind == "factor":
            k = k * (1 + origin())
        if self.kind == "input":
            x = x + steer(step)
        y = self.attend(x, self.k, self.v, step)
        if self.kind == "weight":
            y = F.linear(y, merged(self.o.weight[:, :6]))
        q = rope(self.v[:, :, -1:], pos[-1:], self.freq)
        out = F.scaled_dot_product_attention(q, rope(k, pos, self.freq), self.v)
        return y + out.sum((1, 2, 3), keepdim=True).squeeze(1)


@sides
@pytest.mark.parametrize(
    "kind", ["positions", "positions of the step", "factor", "input", "weight"]
)
def test_an_op_that_looks_at_the_world(kind, side):
    """It is asked once in each call, in its place."""
    eager, twin, compiled = pair(Steered, options(side))
    eager.kind = twin.kind = kind
    for step in range(14):
        WORLD["steer"] = [0.0, 0.0, 0.5, 2.0, 2.0, 1.0, 0.0][step % 7]
        close(eager(x(step), step), compiled(x(step), step))
        WORLD["calls"] = 0
        again = 14 + step
        close(eager(x(again), again), compiled(x(again), again))
        assert WORLD["calls"] == 2
    same_caches(eager, twin)


@pytest.mark.parametrize(("kind", "captured"), [("positions", False), ("weight", True)])
def test_a_tensor_from_nothing_is_not_captured(kind, captured):
    """A CUDA graph would keep what the op gave when it was captured."""
    _, twin, compiled = pair(Steered, options("replayed"))
    twin.kind = kind
    for step in range(14):
        compiled(x(step), step)
    assert (runtime(compiled)["replays"] > 0) == captured
    notes = [n for g in compiled.report().to_dict()["graphs"] for n in g["notes"]]
    assert any("world.origin" in n and "from nothing" in n for n in notes) != captured


class Late(Window):
    def forward(self, x, step):
        y = self.attend(x, self.k, self.v, step)
        return y * merged(y.sum()) + origin()


@sides
def test_such_ops_keep_their_order(side, monkeypatch):
    """Each look at the world changes it."""
    eager, twin, compiled = pair(Late, options(side))
    ticks = iter(range(10_000))
    monkeypatch.setitem(globals(), "_look", lambda: float(next(ticks)))
    found = []
    for m in (eager, compiled):
        ticks = iter(range(10_000))
        found.append([m(x(step), step) for step in range(8)])
    for a, b in zip(*found, strict=True):
        close(a, b)


# -- assertions ------------------------------------------------------------------------------------


class Checked(Window):
    def forward(self, x, kind, step):
        return self.attend(x + F.one_hot(kind, 6), self.k, self.v, step)


class Ended(Window):
    def forward(self, x, step):
        torch._check(step < 9, lambda: "the film is over")
        return self.attend(x, self.k, self.v, step)


@sides
def test_checks_of_ints_are_guards(side):
    """They are no work of the device: steps are replayed."""
    eager, twin, compiled = pair(Ended, options(side))
    for step in range(9):
        close(eager(x(step), step), compiled(x(step), step))
    with pytest.raises(Exception, match="film is over"):
        compiled(x(9), 9)
    same_caches(eager, twin)
    assert (runtime(compiled)["replays"] > 0) == (side == "replayed")


def torch_keeps_assertions():
    """2.11 does not."""
    try:
        torch.compile(lambda kind: F.one_hot(kind, 6), backend="aot_eager")(torch.tensor([6]))
    except RuntimeError:
        return True
    return False


@sides
def test_assertions_on_values_stay(side):
    if not torch_keeps_assertions():
        pytest.skip("torch.compile leaves them out itself")
    eager, twin, compiled = pair(Checked, options(side))
    for step in range(10):
        kind = torch.tensor([step % 6, 1, 6 if step == 7 else 2])
        found = []
        for m in (eager, compiled):
            try:
                found.append(m(x(step), kind, step))
            except RuntimeError:
                found.append(None)
        assert (found[0] is None) == (found[1] is None) == (step == 7)
        if step != 7:
            close(*found)
    same_caches(eager, twin)


# -- modes -----------------------------------------------------------------------------------------


class Decorated(Window):
    @torch.inference_mode()
    def forward(self, x, step):
        return self.attend(x, self.k, self.v, step)


class PartlyInside(Window):
    def forward(self, x, step):
        with torch.inference_mode():
            new = x.sin() * 2
            self.k[:, :, :1] += 0.01
        with torch.inference_mode(False):
            new = new + x
        return self.attend(new, self.k, self.v, step)


@pytest.mark.parametrize("model", [Decorated, PartlyInside])
@pytest.mark.parametrize(
    ("mode", "side"),
    [
        (torch.enable_grad, "eager"),
        (torch.no_grad, "replayed"),
        (torch.inference_mode, "replayed"),
        (torch.inference_mode, "regions"),
    ],
)
def test_inference_mode_inside(model, mode, side):
    """torch.compile fails there."""
    eager, twin, compiled = pair(model, options(side))
    for step in range(10):
        with mode():
            found = eager(x(step), step), compiled(x(step), step)
        close(*found)
    same_caches(eager, twin)
