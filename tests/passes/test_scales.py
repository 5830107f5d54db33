"""Calibration holds the scales of FP8 casts, and no other whole-cache maximum.

Legend: 12 slots, 3 new a call; float64, so that what is refused equals eager to the last bits.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc
from rtc.testing import assert_pass_counts, assert_refused

F8 = torch.float8_e4m3fn
DOUBLE = torch.float64


def top(k):
    return k.abs().amax((-1, -2), keepdim=True)


def fp8(k):
    s = top(k) / 448 + 1e-9
    return (k / s).clamp(-448, 448).to(F8).to(DOUBLE) * s


def fp8_by_inverse(k):
    s = (top(k) / 448).clamp(min=1e-9).log2().ceil().exp2()
    return (k * s.reciprocal()).to(F8).to(torch.float32).to(DOUBLE).mul(0.5) * s * 2


def over_its_maximum(k):
    return k / (top(k) + 1e-6) * 8


def less_its_maximum(k):
    return k - k.amax((-1, -2), keepdim=True)


def int4(k):
    s = top(k) / 7 + 1e-9
    return (k / s).round().clamp(-7, 7) * s


def fp8_and_more(k):
    """The maximum enters the result as itself, too."""
    most = top(k)
    s = most / 448 + 1e-9
    return (k / s).clamp(-448, 448).to(F8).to(DOUBLE) * s + most


def fp8_of_a_bend(k):
    s = top(k) / 448 + 1e-9
    return (torch.tanh(k / s) * 300).to(F8).to(DOUBLE) * s


def fp8_scaled_by_another(k):
    """What goes back to size is not what was cast."""
    s = top(k) / 448 + 1e-9
    return (k / s).to(F8).to(DOUBLE) * s + (k * 0.5) * s


def scale_in_fp8(k):
    s = (top(k) / 448 + 1e-3).to(F8).to(DOUBLE)
    return (k / s).to(F8).to(DOUBLE) * s


def codes(k, s):
    return (k / s).clamp(-448, 448).to(F8).to(DOUBLE)


def scale_of(k):
    return top(k) / 448 + 1e-9


def never_back(k):
    return codes(k, scale_of(k)) / 100


def another_power_back(k):
    return codes(k, scale_of(k)) * scale_of(k).sqrt()


def codes_enter_otherwise(k):
    q, s = codes(k, scale_of(k)), scale_of(k)
    return q * s + (q.abs() > 200) * 1.0


def clipped(k):
    s = scale_of(k)
    return (k / s).clamp(-100, 100).to(F8).to(DOUBLE) * s


def a_quarter_clipped(k):
    s = scale_of(k) / 4
    return codes(k, s) * s


def integers(k):
    s = top(k) / 7 + 1e-9
    return (k / s).to(torch.int8).to(F8).to(DOUBLE) * s


def subnormal(k):
    s = top(k) / 0.01 + 1e-9
    return codes(k, s) * s


def of_something_else(k):
    s = scale_of(k.flip(-1) * 0.25)
    return codes(k, s) * s


def by_channel(k):
    return k.abs().amax(2, keepdim=True) / 448 + 1e-9


def of_values(k):
    return k.amax((-1, -2), keepdim=True) / 448 + 1e-9


def of_all_values(k):
    return k.max() / 448 + 1e-9


def same(s):
    return s


def first_head(s):
    return s[:, :1]


def mixed(s):
    return (s * s[:, :1]).sqrt()


def crossed(s):
    """Channels in another order."""
    return s.unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2)


def by(scale, there=same, back=same):
    def work(k):
        s = scale(k)
        return codes(k, there(s)) * back(s)

    return work


def heads_last(k):
    """The scale takes part in every move of what it scales, in its own steps."""
    k = k.transpose(1, 2).flatten(2)
    s = k.view(1, 12, 2, 8).abs().amax((1, 3)) / 448 + 1e-9
    q = codes(k.unflatten(2, (2, 8)), s[:, None].unsqueeze(-1)).flatten(2)
    return (q.view(1, 12, 2, 8) * s.view(2, 1)).transpose(1, 2)


def crossed_alike(k):
    s = by_channel(k)
    return crossed(codes(crossed(k), crossed(s)) * crossed(s).expand(1, 2, 1, 8))


def picked_back(k):
    s = k.abs().amax((0, 1, 2, 3), keepdim=True) / 448 + 1e-9
    return codes(k, s) * s[0]


class Model(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.work = work
        self.qkv = nn.Linear(8, 48).double()
        self.register_buffer("k", torch.zeros(1, 2, 12, 8, dtype=DOUBLE))
        self.register_buffer("v", torch.zeros(1, 2, 12, 8, dtype=DOUBLE))

    def forward(self, x, step):
        n = x.shape[1]
        q, k, v = self.qkv(x).view(1, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, n:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, n:], v], 2))
        return F.scaled_dot_product_attention(q, self.keys(step), self.v)

    def keys(self, step):
        return self.work(self.k)


class Dimmed(Model):
    """Keys are scaled by something that changes from call to call."""

    def keys(self, step):
        return super().keys(step) * (1 + 0.3 * torch.sin((torch.arange(1) + step).double()))


class TurnedLater(Model):
    """Cast first, turned by their positions afterwards."""

    def keys(self, step):
        ang = (torch.arange(12) + 3 * step).double()[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.02])
        a, b = super().keys(step).chunk(2, -1)
        return torch.cat([a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()], -1)


def run(work, model=Model):
    torch.manual_seed(0)
    eager = model(work)
    options = rtc.Options(quantize="calibrated", lowering="eager", warn=False)
    compiled = rtc.compile(copy.deepcopy(eager), options=options)
    worst = 0.0
    with torch.no_grad():
        for step in range(14):
            x = torch.randn(1, 3, 8, dtype=DOUBLE) * (1 + 0.5 * (step == 9))
            y = eager(x, step)
            worst = max(worst, ((compiled(x, step) - y).abs().max() / y.abs().max()).item())
    return compiled.report(), worst


@pytest.mark.parametrize(
    "work", [fp8, fp8_by_inverse, by(by_channel), heads_last, crossed_alike, picked_back]
)
def test_scales_of_fp8_are_held(work):
    report, worst = run(work)
    assert_pass_counts(report, {"hoist_quantize": 1})
    assert worst < 0.3


@pytest.mark.parametrize(
    "work",
    [
        over_its_maximum, less_its_maximum, int4, fp8_and_more, fp8_of_a_bend,
        fp8_scaled_by_another, scale_in_fp8, never_back, another_power_back,
        codes_enter_otherwise, clipped, a_quarter_clipped, integers, subnormal, of_something_else,
    ],
)  # fmt: skip
def test_other_maxima_are_not(work):
    report, worst = run(work)
    assert worst < 1e-12
    assert_pass_counts(report, {"hoist_quantize": 0})
    assert_refused(report, "hoist_quantize", "more than the scale of FP8 casts")


@pytest.mark.parametrize(
    ("scale", "there", "back"),
    [
        (scale_of, first_head, first_head), (scale_of, first_head, same),
        (scale_of, same, first_head), (scale_of, mixed, same), (by_channel, crossed, crossed),
        (by_channel, crossed, same), (by_channel, same, crossed),
    ],
)  # fmt: skip
def test_the_maximum_of_other_elements(scale, there, back):
    report, worst = run(by(scale, there, back))
    assert worst < 1e-12
    assert_pass_counts(report, {"hoist_quantize": 0})
    assert_refused(report, "hoist_quantize", "pairs elements with the maximum of others")


@pytest.mark.parametrize("scale", [of_values, of_all_values])
def test_the_maximum_of_values_is_none_of_magnitudes(scale):
    report, worst = run(by(scale))
    assert worst < 1e-12
    assert_pass_counts(report, {"hoist_quantize": 0})
    assert_refused(report, "hoist_quantize", "of the values, not of their magnitudes")


def picked(k):
    """No constant takes part of a held scale: the division stays where it is."""
    s = k.abs().amax((0, 1, 2, 3), keepdim=True)[0] / 448 + 1e-9
    return codes(k, s) * s


def test_held_only_where_a_cast_moves():
    report, worst = run(picked)
    assert worst < 1e-12
    assert_refused(report, "hoist_quantize", "nothing that it scales can move")


def test_what_changes_from_call_to_call_is_no_scale():
    _, worst = run(fp8_by_inverse, Dimmed)
    assert worst < 1e-12  # that scale is a power of two: to hold a larger one changes nothing


def test_position_work_behind_the_cast():
    report, worst = run(fp8_by_inverse, TurnedLater)
    assert worst < 1e-12
    assert_pass_counts(report, {"hoist_quantize": 1, "hoist_rope": 1, "ring_cache": 2})


class ClampedFirst(TurnedLater):
    """The model's own clamp between the turn and the cast: no part of the quantization."""

    def keys(self, step):
        work, self.work = self.work, lambda k: k
        turned = super().keys(step % 3)
        self.work = work
        return work(turned.clamp(-0.3, 0.3))


def test_a_clamp_of_the_model_s_own_is_not_folded_through():
    report, worst = run(fp8_by_inverse, ClampedFirst)
    assert worst < 1e-5
    assert report.to_dict()["runtime"]["folds"] == 0


class ClampedBehindTheScale(TurnedLater):
    """A clamp behind the division, with bounds beyond FP8's, but both on one side."""

    def keys(self, step):
        work, self.work = self.work, lambda k: k
        turned = super().keys(step % 3)
        self.work = work
        s = (top(turned) / 448).clamp(min=1e-9).log2().ceil().exp2()
        return (turned / s).clamp(448, 1000).to(F8).to(DOUBLE) * s


def test_bounds_on_one_side_are_no_range():
    report, worst = run(fp8, ClampedBehindTheScale)
    assert worst < 1e-12
    assert report.to_dict()["runtime"]["folds"] == 0
    assert_refused(report, "hoist_quantize", "more than the scale of FP8 casts")


def zero_scale(k):
    """Of small maxima: in whole steps."""
    s = (top(k) * 50).floor() / (50 * 448)
    return codes(k, s) * s


def test_a_scale_that_may_be_zero():
    report, worst = run(zero_scale)
    assert worst < 1e-12
    assert_pass_counts(report, {"hoist_quantize": 0})
