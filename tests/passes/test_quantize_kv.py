"""quantize_kv: an FP8 cache for models that know nothing of FP8, in several people's words.

Fourteen slots, three new ones a step, so a window of fourteen wraps every fifth step; 64 steps.
Caches start out random: a slot that is read from the wrong place is a random row, an error of
about 1. Errors are ``|compiled - eager| / |eager|`` of an output, the worst of all steps: keys,
values and queries are rounded to three bits of mantissa, each about 2.6e-2 of its own size, with
eight channels a head and fourteen slots to average over.

Legend: B batch, H heads, G key heads, S slots, T new slots, D head size, C channels.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc
from rtc.errors import OptionsError
from rtc.testing import assert_pass_counts, assert_refused

from . import helpers

F8 = torch.float8_e4m3fn
STEPS = 64
BOUND = 6e-2
EXACT = 1e-6  # float32, sums in another order
OFF = rtc.Options(lowering="eager", warn=False)
CACHE = dataclasses.replace(OFF, quantize="calibrated", quantize_kv=True)
BOTH = dataclasses.replace(CACHE, fp8_attention=True)


def frames(step, batch=1):
    g = torch.Generator().manual_seed(900 + step)
    return torch.randn(batch, 3, 12, generator=g)


def Chain(build, options, inputs=None, steps=STEPS):
    return helpers.Chain(build, options, inputs or (lambda step: (frames(step), step)), steps)


# ---- models --------------------------------------------------------------------------------------


def heads_first_model():
    """[B, H, S, D], no RoPE, a sink of two slots; heads of unlike size."""

    class HeadsFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(12, 48, bias=False)
            self.out = nn.Linear(16, 12)
            self.register_buffer("size", torch.tensor([1.0, 1e-5]).view(1, 2, 1, 1))
            self.register_buffer("k", torch.randn(1, 2, 14, 8) * self.size)
            self.register_buffer("v", torch.randn(1, 2, 14, 8))

        def forward(self, x, step):
            q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
            for cache, new in ((self.k, k * self.size), (self.v, v)):
                cache[:, :, 2:-3] = cache[:, :, 5:].clone()
                cache[:, :, -3:] = new
            y = F.scaled_dot_product_attention(q / self.size, self.k, self.v)
            return self.out(y.transpose(1, 2).flatten(2))

    return HeadsFirst()


def slots_first_rope_model():
    """[B, S, H, D], raw keys turned at each read, positions from the start again every 7 steps."""

    class SlotsFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.to_q, self.to_k, self.to_v = (nn.Linear(12, 16) for _ in range(3))
            self.to_out = nn.Linear(16, 12)
            self.register_buffer("cache_k", torch.randn(1, 14, 2, 8))
            self.register_buffer("cache_v", torch.randn(1, 14, 2, 8))
            self.register_buffer("theta", torch.tensor([1.0, 0.31, 0.1, 0.017]))

        def turn(self, x, pos):
            angle = torch.outer(pos, self.theta)[:, None]
            even, odd = x[..., 0::2], x[..., 1::2]
            cos, sin = angle.cos(), angle.sin()
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

        def forward(self, x, step):
            q, k, v = (f(x).view(1, 3, 2, 8) for f in (self.to_q, self.to_k, self.to_v))
            for cache, new in ((self.cache_k, k), (self.cache_v, v)):
                cache.copy_(torch.cat([cache[:, :2], cache[:, 5:], new], dim=1))
            pos = torch.cat([torch.arange(2), torch.arange(2, 14) + 3 * (step % 7)]).float()
            q, k = self.turn(q, pos[11:]), self.turn(self.cache_k, pos)
            y = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), self.cache_v.transpose(1, 2)
            )
            return self.to_out(y.transpose(1, 2).reshape(1, 3, 16))

    return SlotsFirst()


def half_turns_model():
    """[B, H, S, D], a ring written by index, halves swapped; positions go on until step 40."""

    class HalfTurns(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(12, 48)
            self.o = nn.Linear(16, 12)
            self.register_buffer("k", torch.randn(1, 2, 12, 8))
            self.register_buffer("v", torch.randn(1, 2, 12, 8))
            freq = torch.tensor([1.0, 0.31, 0.1, 0.017])
            self.register_buffer("freq", torch.cat([freq, freq]))

        @staticmethod
        def swap(x):
            a, b = x.split(4, dim=-1)
            return torch.cat((-b, a), dim=-1)

        def forward(self, x, step):
            q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
            self.k.index_copy_(2, (torch.arange(3) + 3 * step) % 12, k)
            self.v.index_copy_(2, (torch.arange(3) + 3 * step) % 12, v)
            newest = 3 * (step % 40) + 2
            age = (3 * step + 2 - torch.arange(12)) % 12
            angle = (newest - age)[:, None] * self.freq
            keys = self.k * angle.cos() + self.swap(self.k) * angle.sin()
            angle = torch.arange(newest - 2, newest + 1)[:, None] * self.freq
            q = q * angle.cos() + self.swap(q) * angle.sin()
            y = F.scaled_dot_product_attention(q, keys, self.v)
            return self.o(y.transpose(1, 2).flatten(2))

    return HalfTurns()


def gqa_model():
    """Four heads of queries over two of keys, two batches, a scale of the softmax."""

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wk, self.wv = (nn.Linear(12, n * 8) for n in (4, 2, 2))
            self.wo = nn.Linear(32, 12)
            self.register_buffer("ck", torch.randn(2, 2, 14, 8))
            self.register_buffer("cv", torch.randn(2, 2, 14, 8))

        def forward(self, x, step):
            q, k, v = (w(x).view(2, 3, -1, 8).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            for cache, new in ((self.ck, k), (self.cv, v)):
                cache[:, :, :-3] = cache[:, :, 3:].clone()
                cache[:, :, -3:] = new
            y = F.scaled_dot_product_attention(q, self.ck, self.cv, scale=0.3, enable_gqa=True)
            return self.wo(y.transpose(1, 2).flatten(2))

    return Grouped()


def normed_keys_model():
    """[B, S, H, D] in bfloat16; keys are normalised at each read."""

    class NormedKeys(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(12, 48)
            self.o = nn.Linear(16, 12)
            self.norm = nn.RMSNorm(8, eps=1e-6)
            self.register_buffer("k", torch.randn(1, 14, 2, 8))
            self.register_buffer("v", torch.randn(1, 14, 2, 8))
            self.bfloat16()

        def forward(self, x, step):
            q, k, v = self.qkv(x.bfloat16()).view(1, 3, 3, 2, 8).unbind(2)
            for cache, new in ((self.k, k), (self.v, v)):
                cache.copy_(torch.cat([cache[:, 3:], new], dim=1))
            q, k, v = (t.transpose(1, 2) for t in (self.norm(q), self.norm(self.k), self.v))
            y = F.scaled_dot_product_attention(q, k, v)
            return self.o(y.transpose(1, 2).flatten(2)).float()

    return NormedKeys()


def layers_model():
    """Three layers side by side, so that caches stay comparable."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(heads_first_model() for _ in range(3))

        def forward(self, x, step):
            return x + sum(layer(x, step) for layer in self.layers)

    return Layers()


# name -> (build, attentions, float32's bytes over the views', inputs)
BATCHES = lambda step: (frames(step, 2), step)  # noqa: E731
MODELS = {
    "heads_first": (heads_first_model, 1, 4, None),
    "slots_first_rope": (slots_first_rope_model, 1, 4, None),
    "half_turns": (half_turns_model, 1, 4, None),
    "gqa": (gqa_model, 1, 4, BATCHES),
    "normed_keys": (normed_keys_model, 1, 2, None),
    "layers": (layers_model, 3, 4, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_fp8_cache_that_attention_reads_as_stored(name):
    build, attentions, ratio, inputs = MODELS[name]
    chain = Chain(build, BOTH, inputs)
    assert_pass_counts(
        chain.report,
        {
            "quantize_kv": attentions, "hoist_quantize": 2 * attentions,
            "ring_cache": 2 * attentions, "fp8_attention": attentions,
        },
    )  # fmt: skip
    assert 1e-3 < chain.worst < BOUND  # it did round
    caches = [c for g in chain.report["graphs"] for c in g["caches"]]
    assert [c["view_bytes"] * ratio for c in caches] == [c["bytes"] for c in caches]
    assert chain.report["runtime"]["plain_calls"] == 0
    # queries of a later layer may outgrow those of the first call, which met an empty cache
    assert chain.report["runtime"]["saturated_values"] <= 8
    chain.check_caches()


@pytest.mark.parametrize("name", MODELS)
def test_an_fp8_cache_alone(name):
    """Without fp8_attention the rounded values are kept wide."""
    build, attentions, _, inputs = MODELS[name]
    chain = Chain(build, CACHE, inputs)
    assert_pass_counts(chain.report, {"quantize_kv": attentions, "fp8_attention": 0})
    assert 1e-3 < chain.worst < BOUND
    chain.check_caches()


@pytest.mark.parametrize("name", MODELS)
def test_without_consent_nothing_changes(name):
    build, _, _, inputs = MODELS[name]
    bound = 2e-2 if name == "normed_keys" else EXACT  # bfloat16: two roundings of 4e-3 and a sum
    for options in (OFF, dataclasses.replace(OFF, quantize="calibrated", fp8_attention=True)):
        chain = Chain(build, options, inputs)
        assert_pass_counts(chain.report, {"quantize_kv": 0, "fp8_attention": 0})
        assert chain.worst < bound
        chain.check_caches()


@pytest.mark.parametrize("name", ["heads_first", "slots_first_rope", "layers"])
def test_replayed_in_regions(name):
    build, attentions, _, inputs = MODELS[name]
    options = dataclasses.replace(BOTH, regions="on", step_graph="simulate")
    chain = Chain(build, options, inputs)
    assert_pass_counts(chain.report, {"fp8_attention": attentions})
    assert chain.report["runtime"]["replays"] > STEPS // 2
    assert chain.worst < BOUND
    chain.check_caches()


def test_it_needs_the_consent_to_calibrated_scales():
    with pytest.raises(OptionsError, match="calibrated"):
        rtc.Options(quantize_kv=True)
    with pytest.raises(OptionsError, match="quantize_kv is a switch"):
        rtc.Options(quantize_kv=1, quantize="calibrated")


def test_values_beyond_the_calibrated_scale_are_counted():
    """From step 20 on keys are ten times as large: clamped, so wrong, but not in silence."""

    def inputs(step):
        return frames(step) * (10 if step >= 20 else 1), step

    chain = Chain(heads_first_model, BOTH, inputs)
    assert max(chain.errors[:20]) < BOUND
    assert chain.report["runtime"]["saturated_values"] > 100
    chain.check_caches()


def test_a_session_that_starts_empty():
    """Zeros calibrate nothing; the first rows do."""

    def build():
        model = heads_first_model()
        model.k.zero_()
        model.v.zero_()
        return model

    chain = Chain(build, BOTH)
    assert_pass_counts(chain.report, {"fp8_attention": 1})
    assert chain.worst < BOUND
    chain.check_caches()


def test_caches_written_from_outside():
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = slots_first_rope_model()
    twin = copy.deepcopy(eager)
    compiled = rtc.compile(twin, options=BOTH)
    for step in range(STEPS):
        for m in (eager, twin):
            if step % 11 == 5:
                m.cache_k[:, 3:6] = 0.7
                m.cache_v.mul_(0.9)
        want, have = eager(frames(step), step), compiled(frames(step), step)
        assert (have - want).norm() < BOUND * want.norm(), step
    compiled.materialize()
    torch.testing.assert_close(twin.cache_k, eager.cache_k, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(twin.cache_v, eager.cache_v, rtol=1e-6, atol=1e-6)


# ---- what is left alone, or left wide ------------------------------------------------------------


class Variant(nn.Module):
    """[B, H, S, D]; ``attend`` uses the caches."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(12, 48, bias=False)
        self.o = nn.Linear(16, 12)
        self.register_buffer("k", torch.randn(1, 2, 14, 8))
        self.register_buffer("v", torch.randn(1, 2, 14, 8))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:, :, 2:-3] = cache[:, :, 5:].clone()
            cache[:, :, -3:] = new
        y = self.attend(q, self.k, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class Repeated(Variant):
    """Heads repeated with work on top: only SDPA could do that on what is stored."""

    def attend(self, q, k, v):
        q, k, v = q.repeat(1, 2, 1, 1), k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(q, k * 1.5, v * 0.5)[:, 1:3]


class InFp8(Variant):
    def attend(self, q, k, v):
        k, v = ((t / 0.01).to(F8).float() * 0.01 for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v)


class FreshValues(Variant):
    """The values are made in this call, from the keys' number of slots."""

    def attend(self, q, k, v):
        fresh = torch.outer(torch.arange(14.0), q[0, 0, 0]).expand(1, 2, 14, 8) / 14
        return F.scaled_dot_product_attention(q, k, fresh) + v.mean(2, keepdim=True)


class Masked(Variant):
    def attend(self, q, k, v):
        mask = torch.arange(14) < torch.tensor([12, 13, 14])[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Causal(Variant):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Masked, "nothing would read FP8: masked or causal"),
        (Causal, "nothing would read FP8: masked or causal"),
        (Repeated, "enable_gqa"),
        (InFp8, "FP8 already"),
        (FreshValues, "do not both come out of a cache"),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_left_alone(build, reason):
    chain = Chain(build, CACHE)
    assert_pass_counts(chain.report, {"quantize_kv": 0})
    assert_refused(chain.report, "quantize_kv", reason)
    assert chain.worst < EXACT
    chain.check_caches()


# Two attentions over one pair of caches are left out: counting saturated values in several views of
# a cache makes a graph that uses a sum before it is made (KeyError while it is copied).


class Summed(Variant):
    """The values' mean beside the attention: that stays exact, the attention does not."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v) + v.mean(2, keepdim=True)


def test_others_use_the_same_values():
    chain = Chain(Summed, BOTH)
    assert_pass_counts(chain.report, {"quantize_kv": 1, "fp8_attention": 1})
    assert chain.worst < BOUND
    chain.check_caches()
