"""fuse_pre_attention: norm, RoPE, FP8 and cache writes in many people's words, in one kernel.

Three new slots a step in windows of twelve to fourteen, 64 steps. Caches start out random: a slot
that is read from the wrong place is a random row, an error of about 1. Errors are norm-wise:
against the same options without the pass, and against eager (that is FP8 itself: queries, keys and
values are rounded to three bits of mantissa, with eight channels a head to average over). In
float32 the pass changes next to nothing. In bfloat16 it leaves out the rounding between RoPE and
FP8: one value in twenty or so goes to the next FP8 number, as far as FP8's rounding itself.

Legend: B batch, H heads, G key heads, S slots, T new slots, D head size, P pairs of it.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
import dataclasses

import pytest
import torch
from torch import nn

import rtc
from rtc.model import build, example_inputs
from rtc.testing import assert_pass_counts

from .pre_attention_models import (
    NORMS,
    OFF,
    ON,
    OWN,
    ROPES,
    STEPS,
    WORST,
    Chain,
    D,
    H,
    LessOne,
    Model,
    OfAllHeads,
    T,
    far,
    frames,
    interleaved_stack,
)

# ---- what is fused -------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", ROPES)
def test_ropes(rope):
    """Positions start again after 23 steps; then keys are turned by folding, or made anew."""
    chain = Chain(lambda: Model(rope=ROPES[rope]))
    chain.check()
    runtime = chain.report["runtime"]
    assert rope == "no_rope" or runtime["folds"] >= 2 or runtime["refreshed_slots"] > 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm, dtype):
    Chain(lambda: Model(norm=NORMS[norm]), dtype, steps=26).check()


def test_a_norm_of_all_heads_stays_outside():
    Chain(lambda: Model(norm=OfAllHeads), steps=26).check()


def test_another_eps_for_keys():
    def make():
        model = Model()
        model.norm_k.eps = 1e-2
        return model

    Chain(make, steps=26).check()


def test_queries_without_a_norm():
    def make():
        model = Model(rope=interleaved_stack)
        model.norm_q = nn.Identity()
        return model

    Chain(make, steps=26).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fp8_of_the_model_s_own(dtype):
    Chain(lambda: Model(own=True, norm=LessOne), dtype, OWN).check()


@pytest.mark.parametrize("form", [{}, {"drift": True, "rope": interleaved_stack, "norm": LessOne}])
def test_replayed(form):
    options = dataclasses.replace(ON, step_graph="simulate")
    chain = Chain(lambda: Model(**form), options=options)
    chain.check()
    assert chain.report["runtime"]["replays"] > STEPS // 2


def test_rows_that_others_read():
    """Fresh keys, before and after RoPE, and queries are returned as well."""

    class Read(Model):
        def forward(self, x, step):
            y = super().forward(x, step)
            k = self.norm_k(self.qkv(x)[..., H * D : 2 * H * D].unflatten(-1, (-1, D)))
            turned = self.rope(k, self.positions(step)[-T:])
            return torch.cat([y.flatten(), k.flatten() / 99, turned.flatten() / 99])

    chain = Chain(Read, steps=26)
    chain.check()


class Layers(nn.Module):
    """Three layers, one behind another."""

    def __init__(self, **kw):
        super().__init__()
        self.layers = nn.ModuleList(Model(**kw) for _ in range(3))

    def forward(self, x, step):
        for layer in self.layers:
            x = x + layer(x, step) / 4
        return x


@pytest.mark.parametrize("graph", ["auto", "simulate"])
def test_layers_and_weights_that_change(graph):
    """Norm weights of all layers are written between two steps: what was made of them is made anew.
    Inputs of later layers have FP8's errors: only caches of the first one are as eager's."""
    torch._dynamo.reset()
    options = dataclasses.replace(ON, step_graph=graph)
    eager = Layers(norm=LessOne).eval().requires_grad_(False)
    twins = [copy.deepcopy(eager) for _ in range(2)]
    runs = [
        rtc.compile(twins[0], options=options),
        rtc.compile(twins[1], options=dataclasses.replace(options, passes=OFF)),
    ]
    with torch.no_grad():
        for step in range(30):
            if step == 13:
                for model in (eager, *twins):
                    for name, p in model.named_parameters():
                        if "norm" in name:
                            p.mul_(1.4).add_(0.2)
            x = frames(step, torch.float32)
            want, (have, off) = eager(x, step), (f(x, step) for f in runs)
            assert far(have, want) < WORST, step
            assert far(have, off) < 1e-3, step
    assert_pass_counts(runs[0].report(), {"fuse_pre_attention": 3})
    for run in runs:
        run.materialize()
    for a, b in zip(twins[0].buffers(), twins[1].buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for a, b in zip(twins[0].layers[0].buffers(), eager.layers[0].buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_reference_model():
    torch._dynamo.reset()
    eager = build("tiny")
    twin, other = copy.deepcopy(eager), copy.deepcopy(eager)
    compiled = rtc.compile(twin, options=ON)
    without = rtc.compile(other, options=dataclasses.replace(ON, passes=OFF))
    with torch.no_grad():
        for step in range(8):
            noise, cond = example_inputs(eager.cfg, step=step)[:2]
            want, have, off = (f(noise, cond, step) for f in (eager, compiled, without))
            assert far(have, want) < WORST
            assert far(have, off) < 1e-3
    assert_pass_counts(compiled.report(), {"fp8_attention": 4, "fuse_pre_attention": 4})
    (regions,) = (g["regions"] for g in compiled.report().to_dict()["graphs"])
    assert regions["in_place"] == regions["writes"]


# ---- values that grow ----------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["auto", "simulate"])
def test_values_beyond_the_scale_are_clamped_and_counted(graph):
    """Inputs a hundred times as large from step 10 on. Keys are normed; values are not."""

    def inputs(step):
        return frames(step, torch.float32) * (100 if step >= 10 else 1)

    options = dataclasses.replace(ON, step_graph=graph)
    chain = Chain(Model, options=options, steps=20, inputs=inputs)  # finite, or Chain stops
    assert_pass_counts(chain.report, {"fuse_pre_attention": 1})
    assert max(chain.errors[:10]) < WORST
    assert max(chain.apart) < 1e-3
    count = chain.report["runtime"]["saturated_values"]
    assert count == chain.off["runtime"]["saturated_values"] > 300
    chain.check_caches()
