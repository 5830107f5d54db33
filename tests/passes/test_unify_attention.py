"""unify_attention: attention that is written out, or repeats heads, in several people's words.

Fourteen slots, three new ones a step. Without consent to FP8 nothing is touched. With it, the op
that stands in its place has to compute the same: that is held with FP8 left out again, in float64,
and FP8 itself by its own bound.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc
from rtc.testing import assert_pass_counts

from .helpers import Chain

OFF = rtc.Options(lowering="eager", warn=False)
KV = dataclasses.replace(OFF, quantize="calibrated", quantize_kv=True, fp8_attention=True)
BOUND = 6e-2
EXACT = 1e-12


class Model(nn.Module):
    """[B, H, S, D]; ``attend`` says how; ``groups`` heads of keys."""

    heads, groups, batch, slots_first = 4, 4, 1, False

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(12, self.heads * 8)
        self.kv = nn.Linear(12, 2 * self.groups * 8)
        self.o = nn.Linear(self.heads * 8, 12)
        for name in ("k", "v"):
            self.register_buffer(name, torch.randn(self.batch, self.groups, 14, 8))

    def forward(self, x, step):
        x = x.to(self.o.weight.dtype)
        q = self.q(x).unflatten(-1, (self.heads, 8)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.groups, 8)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        for cache, new in ((self.k, k), (self.v, v)):
            cache.copy_(torch.cat([cache[:, :, :2], cache[:, :, 5:], new], 2))
        y = self.attend(q, self.k, self.v)
        return self.o(y.transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        weights = (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1)
        return weights @ v


class Divided(Model):
    def attend(self, q, k, v):
        scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / 3
        return torch.matmul(F.softmax(scores, dim=3), v)


class ScaledBefore(Model):
    batch = 2

    def attend(self, q, k, v):
        return torch.softmax((q * 0.3) @ k.mT, -1) @ v


class Einsum(Model):
    batch = 2

    def attend(self, q, k, v):
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) * 0.25
        return torch.einsum("bhts,bhse->bhte", scores.softmax(-1), v)


class Batched(Model):
    """bmm, batches and heads as one axis."""

    batch = 3

    def attend(self, q, k, v):
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) * 0.5 * 0.7
        return torch.bmm(scores.softmax(2), v).unflatten(0, (3, 4))


class Wide(Model):
    """Scores in another dtype for the softmax."""

    def attend(self, q, k, v):
        scores = (q @ k.transpose(2, 3)).to(torch.float64) * 0.3
        return torch.softmax(scores, -1).to(v.dtype) @ v


class RepeatInterleave(Model):
    groups = 2

    def attend(self, q, k, v):
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v)


class Expanded(Model):
    groups, batch = 2, 2

    def attend(self, q, k, v):
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, 14, 8) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v)


class ExpandedBehind(Model):
    """Repeated with slots in front of the heads."""

    groups = 2

    def attend(self, q, k, v):
        k, v = (t.transpose(1, 2).unsqueeze(3).expand(-1, -1, -1, 2, -1) for t in (k, v))
        k, v = (t.flatten(2, 3).transpose(1, 2) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v)


class OneForAll(Model):
    groups = 1

    def attend(self, q, k, v):
        k, v = (t.expand(-1, 4, -1, -1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v)


class Both(Model):
    groups, batch = 2, 3

    def attend(self, q, k, v):
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        return (q @ k.mT * 0.4).softmax(-1) @ v


FOUND = {
    Model: 1, Divided: 1, ScaledBefore: 1, Einsum: 1, Batched: 1, Wide: 1, RepeatInterleave: 1,
    Expanded: 1, ExpandedBehind: 1, OneForAll: 1, Both: 2,
}  # fmt: skip


def chain(build, options, dtype=torch.float64, steps=20):
    def frames(step):
        g = torch.Generator().manual_seed(step)
        return torch.randn(build.batch, 3, 12, generator=g, dtype=torch.float64).to(dtype), step

    return Chain(lambda: build().to(dtype), options, frames, steps)


@pytest.mark.parametrize("build", FOUND, ids=lambda b: b.__name__)
def test_the_same_attention(build):
    """In float64 there is no attention in FP8: the op alone, over ring caches."""
    options = dataclasses.replace(OFF, fp8_attention=True)
    result = chain(build, options)
    assert_pass_counts(
        result.report, {"unify_attention": FOUND[build], "fp8_attention": 0, "ring_cache": 2}
    )
    assert result.worst < EXACT
    result.check_caches()


@pytest.mark.parametrize("build", FOUND, ids=lambda b: b.__name__)
def test_it_runs_in_fp8(build):
    result = chain(build, KV, torch.float32)
    assert_pass_counts(result.report, {"quantize_kv": 1, "fp8_attention": 1})
    assert 1e-3 < result.worst < BOUND
    result.check_caches()


@pytest.mark.parametrize("build", [Model, RepeatInterleave])
def test_without_consent_nothing_is_touched(build):
    result = chain(build, OFF)
    assert_pass_counts(result.report, {"unify_attention": 0})
    assert result.worst < EXACT


# ---- what is left alone --------------------------------------------------------------------------


class Masked(Model):
    def attend(self, q, k, v):
        mask = torch.arange(14) > torch.tensor([11, 12, 13])[:, None]
        scores = (q @ k.mT).masked_fill(mask, -1e9)
        return scores.softmax(-1) @ v


class Biased(Model):
    def attend(self, q, k, v):
        return (q @ k.mT + torch.linspace(0, 1, 14)).softmax(-1) @ v


class OverQueries(Model):
    def attend(self, q, k, v):
        return (q @ k.mT).softmax(-2) @ v


class OverHeads(Model):
    def attend(self, q, k, v):
        return (q @ k.mT).softmax(1) @ v


class Negative(Model):
    def attend(self, q, k, v):
        return (q @ k.mT * -0.3).softmax(-1) @ v


class Read(Model):
    """The weights' mean is used, too."""

    def attend(self, q, k, v):
        w = (q @ k.mT).softmax(-1)
        return w @ v + w.mean(-1, keepdim=True)


class Temperatures(Model):
    """Heads' scores are scaled by values."""

    def attend(self, q, k, v):
        return (q @ k.mT * torch.linspace(0.2, 1, 4)[:, None, None]).softmax(-1) @ v


class HeadsSwapped(Model):
    """Weights of one head meet the values of another."""

    batch = 4

    def attend(self, q, k, v):
        return (q @ k.mT).softmax(-1).transpose(0, 1) @ v


class Tiled(Model):
    """Head h reads group h % 2: not the way that the op groups heads."""

    groups = 2

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


class ValuesTiled(Model):
    groups = 2

    def attend(self, q, k, v):
        k = k.repeat_interleave(2, dim=1)
        return F.scaled_dot_product_attention(q, k, v.repeat(1, 2, 1, 1))


class ChannelsRepeated(Model):
    def attend(self, q, k, v):
        q, k, v = (t.repeat_interleave(2, dim=3) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)[..., ::2]


LEFT = [
    Masked, Biased, OverQueries, OverHeads, Negative, Read, Temperatures, HeadsSwapped, Tiled,
    ValuesTiled, ChannelsRepeated,
]  # fmt: skip


@pytest.mark.parametrize("build", LEFT, ids=lambda b: b.__name__)
def test_left_alone(build):
    result = chain(build, KV)
    assert_pass_counts(result.report, {"unify_attention": 0})
    assert result.worst < EXACT
    result.check_caches()
