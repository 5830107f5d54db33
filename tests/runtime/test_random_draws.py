"""Random numbers drawn in a step are those that eager draws: in their order, and unused ones too, or
whatever is drawn after them would be others."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import pytest
import torch
import torch.nn.functional as F

import rtc
from tests.runtime.models import Window, close, pair, runtime, same_caches, x

SIDES = {
    "eager": {"lowering": "eager"},
    "replayed": {"lowering": "eager", "step_graph": "simulate"},
    "no passes": {"lowering": "eager", "ring_cache": False, "hoist_rope": False},
}


class Noisy(Window):
    churn = 0.0

    def forward(self, x, step):
        eps = torch.randn_like(x)  # always drawn, as samplers do
        if self.churn > 0:
            x = x + self.churn * eps
        y = self.attend(x + 0.1 * torch.randn_like(x), self.k, self.v, step)
        return y + torch.rand_like(x) * torch.normal(0.0, 1.0, (1, 1, 6), device=x.device)


class Dropping(Window):
    """Dropout that is on."""

    def forward(self, x, step):
        for _ in range(2):
            x = F.dropout(x, 0.3, training=True)
        return F.dropout(self.attend(x, self.k, self.v, step), 0.2, training=True)


class Deep(Window):
    """Layers that are alike, so that one of them is traced for all."""

    def forward(self, x, step):
        for _ in range(30):
            _unused, used = torch.randn_like(x), torch.randn_like(x)
            x = x + 0.1 * used * self.freq.sum() + 0 * x.sin()
            x = x * x.cos() + x.exp().clamp(max=1.0) * 0.01
        return self.attend(x, self.k, self.v, step)


def same(model, options, steps=range(12)):
    eager, twin, compiled = pair(model, rtc.Options(warn=False, **options))
    found = []
    for m in (eager, compiled):
        torch.manual_seed(7)
        found.append([m(x(step), step).clone() for step in steps] + [torch.rand(3)])
    for a, b in zip(*found, strict=True):
        close(a, b)
    same_caches(eager, twin)
    return compiled


@pytest.mark.parametrize("model", [Noisy, Dropping, Deep])
@pytest.mark.parametrize("side", SIDES)
def test_the_stream_is_eagers(model, side):
    compiled = same(model, SIDES[side])
    if side == "replayed":
        assert runtime(compiled)["replays"] > 0


def test_the_stream_is_eagers_under_inductor():
    same(Noisy, {}, range(6))


def test_layers_that_draw_are_traced_once():
    compiled = same(Deep, SIDES["eager"], range(3))
    assert compiled.report().to_dict()["graphs"][0]["whole"] == ""


def test_a_change_of_the_seed_is_followed():
    eager, _, compiled = pair(Noisy, rtc.Options(warn=False, **SIDES["replayed"]))
    for step in range(8):
        found = []
        for m in (eager, compiled):
            torch.manual_seed(step % 2)
            found.append(m(x(step), step))
        close(*found)
