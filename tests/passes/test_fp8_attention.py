"""fp8_attention: models that keep FP8 keys and values, in several people's words.

Fourteen slots, three new ones a step, so a window of fourteen wraps every fifth step; 64 steps.
Caches start out random: a slot that is read from the wrong place is a random row, an error of
about 1. Errors are ``|compiled - eager| / |eager|`` of an output, the worst of all steps. FP8 has
three bits of mantissa: rounding queries costs up to 3e-2 of the output at eight channels a head;
a wrong head's scale costs 1e-1 and more.

Over 600 lines: the models are its body, each a spelling of a few lines that only its test reads.

Legend: B batch, H heads, G key heads, S slots, T new slots, D head size, C channels.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc
from rtc.testing import assert_pass_counts, assert_refused

from . import helpers

F8 = torch.float8_e4m3fn
STEPS = 64
FP8_BOUND = 3.5e-2  # scales are the model's own: queries are rounded, nothing else
CALIBRATED_BOUND = 6e-2  # a scale measured once rounds keys and values elsewhere than eager's
EXACT = 1e-6  # float32, sums in another order
OFF = rtc.Options(lowering="eager", warn=False)
ON = rtc.Options(lowering="eager", warn=False, fp8_attention=True)
CALIBRATED = rtc.Options(lowering="eager", warn=False, fp8_attention=True, quantize="calibrated")


def frames(step, batch=1):
    g = torch.Generator().manual_seed(500 + step)
    return torch.randn(batch, 3, 12, generator=g)


def Chain(build, options, inputs=None, steps=STEPS):
    return helpers.Chain(build, options, inputs or (lambda step: (frames(step), step)), steps)


# ---- models --------------------------------------------------------------------------------------


def fake_quant_model():
    """[B, H, S, D]; one fixed scale a head in a buffer, multiplied back; a sink of two slots."""

    class FakeQuant(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(12, 48, bias=False)
            self.out = nn.Linear(16, 12)
            self.register_buffer("k_cache", torch.randn(1, 2, 14, 8))
            self.register_buffer("v_cache", torch.randn(1, 2, 14, 8))
            self.register_buffer("k_scale", torch.tensor([0.007, 0.02]).view(1, 2, 1, 1))
            self.register_buffer("v_scale", torch.tensor([0.015, 0.006]).view(1, 2, 1, 1))

        @staticmethod
        def fake_quant(x, scale):
            q = torch.clamp(x / scale, -448.0, 448.0).to(torch.float8_e4m3fn)
            return q.to(x.dtype) * scale

        def forward(self, x, step):
            q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
            for cache, new in ((self.k_cache, k), (self.v_cache, v)):
                cache[:, :, 2:-3] = cache[:, :, 5:].clone()
                cache[:, :, -3:] = new
            keys = self.fake_quant(self.k_cache, self.k_scale)
            values = self.fake_quant(self.v_cache, self.v_scale)
            y = F.scaled_dot_product_attention(q, keys, values)
            return self.out(y.transpose(1, 2).flatten(2))

    return FakeQuant()


def inverse_scale_model():
    """[B, S, H, D], a ring written by index; divides by 1 / scale, with a factor beside it."""

    class InverseScale(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(12, 16) for _ in range(3))
            self.o = nn.Linear(16, 12)
            self.register_buffer("cache_k", torch.randn(1, 14, 2, 8))
            self.register_buffer("cache_v", torch.randn(1, 14, 2, 8))
            self.register_buffer("inv", torch.tensor([[70.0], [25.0]]))

        def forward(self, hidden, step):
            at = (torch.arange(3) + 3 * step) % 14
            q, k, v = (f(hidden).unflatten(-1, (2, 8)) for f in (self.q, self.k, self.v))
            self.cache_k.index_copy_(1, at, k)
            self.cache_v.index_copy_(1, at, v)
            k8 = (self.cache_k * self.inv).type(F8)
            v8 = (self.cache_v * (2 * self.inv)).type(F8)
            k, v = k8.float() / self.inv, v8.float() / self.inv / 2
            y = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=0.25
            )
            return self.o(y.transpose(1, 2).reshape(1, 3, 16))

    return InverseScale()


def per_tensor_model():
    """[B, H, S, D], the window made anew by cat; one number for all heads, the scale first."""

    class PerTensor(nn.Module):
        scale = 0.015625

        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(12, 48)
            self.back = nn.Linear(16, 12)
            self.register_buffer("k", torch.randn(1, 2, 14, 8))
            self.register_buffer("v", torch.randn(1, 2, 14, 8))

        def half(self, x):
            return self.scale * x.div(self.scale).to(dtype=F8, copy=True).to(torch.float32)

        def forward(self, x, step):
            q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.proj(x).chunk(3, -1))
            self.k.copy_(torch.cat([self.k[:, :, 3:], k], dim=2))
            self.v.copy_(torch.cat([self.v[:, :, 3:], v], dim=2))
            y = F.scaled_dot_product_attention(q, self.half(self.k), self.half(self.v))
            return self.back(y.transpose(1, 2).flatten(-2))

    return PerTensor()


def gqa_model():
    """Four heads of queries over two of keys; two batches with scales of their own."""

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wk, self.wv = (nn.Linear(12, n * 8) for n in (4, 2, 2))
            self.wo = nn.Linear(32, 12)
            self.register_buffer("ck", torch.randn(2, 2, 14, 8))
            self.register_buffer("cv", torch.randn(2, 2, 14, 8))
            self.register_buffer("s", torch.tensor([0.012, 0.02, 0.015, 0.04]).view(2, 2, 1, 1))

        def forward(self, x, step):
            q, k, v = (w(x).view(2, 3, -1, 8).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            for cache, new in ((self.ck, k), (self.cv, v)):
                cache[:, :, :-3] = cache[:, :, 3:].clone()
                cache[:, :, -3:] = new
            k, v = ((c / self.s).to(F8).to(torch.float32).mul(self.s) for c in (self.ck, self.cv))
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return self.wo(y.transpose(1, 2).flatten(2))

    return Grouped()


def fp8_cache_model():
    """[B, S, H, D]; the caches are FP8 themselves, made wide and scaled at each read."""

    class Fp8Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(12, 48)
            self.o = nn.Linear(16, 12)
            self.register_buffer("k8", (30 * torch.randn(1, 14, 2, 8)).to(F8))
            self.register_buffer("v8", (30 * torch.randn(1, 14, 2, 8)).to(F8))
            self.register_buffer("ks", torch.tensor([0.03, 0.011]).view(2, 1))
            self.register_buffer("vs", torch.tensor([0.009, 0.05]).view(2, 1))

        def forward(self, x, step):
            q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).unbind(2)
            for cache, new, s in ((self.k8, k, self.ks), (self.v8, v, self.vs)):
                cache.copy_(torch.cat([cache[:, 3:], (new / s).to(F8)], dim=1))
            k, v = self.k8.float() * self.ks, self.v8.float() * self.vs
            q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v)
            return self.o(y.permute(0, 2, 1, 3).reshape(1, 3, 16))

    return Fp8Cache()


class Rope(nn.Module):
    """[B, S, H, D]; raw keys turned at each read, positions from the start again every 7 steps."""

    calibrated = False

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(12, 48, bias=False)
        self.o = nn.Linear(16, 12)
        self.register_buffer("k", torch.randn(1, 14, 2, 8))
        self.register_buffer("v", torch.randn(1, 14, 2, 8))
        self.register_buffer("freq", torch.tensor([1.0, 0.31, 0.1, 0.017]))

    def turn(self, x, pos):
        angle = pos[:, None, None] * self.freq
        cos, sin = angle.cos(), angle.sin()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def quantize(self, x):
        top = x.abs().amax(dim=(1, 3), keepdim=True) if self.calibrated else 5.0
        scale = top / torch.finfo(F8).max
        return (x / scale).clamp(-448, 448).to(F8).to(x.dtype) * scale

    def push(self, cache, new):
        cache[:, 2:-3] = cache[:, 5:].clone()
        cache[:, -3:] = new

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).unbind(2)
        self.push(self.k, k)
        self.push(self.v, v)
        pos = torch.cat([torch.arange(2), torch.arange(2, 14) + 3 * (step % 7)]).float()
        q, k = self.turn(q, pos[-3:]), self.turn(self.k, pos)
        k, v = self.quantize(k), self.quantize(self.v)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.o(y.transpose(1, 2).flatten(2))


class CalibratedRope(Rope):
    """The same with a maximum over the whole cache in every call."""

    calibrated = True


def layers_model():
    """Three layers side by side (caches stay comparable), keys and values stacked; the last one
    reads the values of the one before."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.ModuleList(nn.Linear(12, 48) for _ in range(3))
            self.o = nn.ModuleList(nn.Linear(16, 12) for _ in range(3))
            for i in range(3):
                self.register_buffer(f"kv{i}", torch.randn(2, 1, 2, 14, 8))
                scale = torch.tensor([0.012, 0.02]) * 1.7**i
                self.register_buffer(f"scale{i}", scale.view(2, 1, 1))

        def forward(self, x, step):
            out = x
            for i in range(3):
                cache, s = getattr(self, f"kv{i}"), getattr(self, f"scale{i}")
                q, k, v = self.qkv[i](x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
                for c, new in ((cache[0], k), (cache[1], v)):
                    c[:, :, :-3] = c[:, :, 3:].clone()
                    c[:, :, -3:] = new
                k, v = cache[0], cache[1] if i < 2 else self.kv1[1]
                k, v = (k / s).to(F8).float() * s, (v / s).to(F8).float() * s
                y = F.scaled_dot_product_attention(q, k, v)
                out = out + self.o[i](y.transpose(1, 2).flatten(2))
            return out

    return Layers()


def frames_model():
    """[B, frames, tokens, H, D]: frames and tokens are made one axis behind the scales."""

    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(12, 48, bias=False)
            self.o = nn.Linear(16, 12)
            self.register_buffer("k", torch.randn(1, 5, 3, 2, 8))
            self.register_buffer("v", torch.randn(1, 5, 3, 2, 8))
            self.register_buffer("s", torch.tensor([[0.008], [0.02]]))

        def read(self, cache, new):
            cache.copy_(torch.cat([cache[:, 1:], new.unsqueeze(1)], 1))
            wide = (cache / self.s).clamp(-448, 448).to(F8).float() * self.s
            return wide.flatten(1, 2).transpose(1, 2)

        def forward(self, x, step):
            q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).unbind(2)
            y = F.scaled_dot_product_attention(
                q.transpose(1, 2), self.read(self.k, k), self.read(self.v, v)
            )
            return self.o(y.transpose(1, 2).flatten(2))

    return Frames()


def flat_model():
    """[B, S, H * D]: heads are told apart when the values are read, two batches of unlike size."""

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(12, 48, bias=False)
            self.o = nn.Linear(16, 12)
            self.register_buffer("k", torch.randn(2, 14, 16))
            self.register_buffer("v", torch.randn(2, 14, 16))
            self.register_buffer("s", torch.tensor([[0.008, 0.02], [0.03, 0.012]]))

        def read(self, cache, new):
            cache.copy_(torch.cat([cache[:, 3:], new], 1))
            s = self.s[:, None, :, None]
            wide = cache.view(2, 14, 2, 8) / s
            return (wide.to(F8).float() * s).permute(0, 2, 1, 3)

        def forward(self, x, step):
            q, k, v = self.qkv(x).chunk(3, -1)
            q = q.view(2, 3, 2, 8).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, self.read(self.k, k), self.read(self.v, v))
            return self.o(y.transpose(1, 2).flatten(2))

    return Flat()


# name -> (build, options, bound, attentions, inputs)
BATCHES = lambda step: (frames(step, 2), step)  # noqa: E731
MODELS = {
    "fake_quant": (fake_quant_model, ON, FP8_BOUND, 1, None),
    "inverse_scale": (inverse_scale_model, ON, FP8_BOUND, 1, None),
    "per_tensor": (per_tensor_model, ON, FP8_BOUND, 1, None),
    "gqa": (gqa_model, ON, FP8_BOUND, 1, BATCHES),
    "fp8_cache": (fp8_cache_model, ON, FP8_BOUND, 1, None),
    "rope": (Rope, ON, FP8_BOUND, 1, None),
    "calibrated_rope": (CalibratedRope, CALIBRATED, CALIBRATED_BOUND, 1, None),
    "frames": (frames_model, ON, FP8_BOUND, 1, None),
    "flat": (flat_model, ON, FP8_BOUND, 1, BATCHES),
    "layers": (layers_model, ON, FP8_BOUND, 3, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_attention_reads_fp8_as_it_is_stored(name):
    build, options, bound, attentions, inputs = MODELS[name]
    chain = Chain(build, options, inputs)
    assert_pass_counts(chain.report, {"fp8_attention": attentions, "quantize_kv": 0})
    assert 1e-4 < chain.worst < bound  # it did round
    chain.check_caches()


@pytest.mark.parametrize("name", MODELS)
def test_without_consent_nothing_changes(name):
    build, options, _, _, inputs = MODELS[name]
    if options is CALIBRATED:
        pytest.skip("the consent to calibrated scales changes numerics by itself")
    chain = Chain(build, OFF, inputs)
    assert_pass_counts(chain.report, {"fp8_attention": 0, "quantize_kv": 0})
    assert chain.worst < EXACT
    chain.check_caches()


@pytest.mark.parametrize("name", ["fake_quant", "gqa", "rope", "layers"])
def test_replayed_in_regions(name):
    build, _, bound, attentions, inputs = MODELS[name]
    options = rtc.Options(
        lowering="eager", warn=False, fp8_attention=True, regions="on", step_graph="simulate"
    )
    chain = Chain(build, options, inputs)
    assert_pass_counts(chain.report, {"fp8_attention": attentions})
    assert chain.report["runtime"]["replays"] > STEPS // 2
    assert chain.worst < bound
    chain.check_caches()


def test_fp8_views_take_a_quarter_of_float32():
    on, off = (Chain(fake_quant_model, o, steps=8) for o in (ON, OFF))
    assert on.view_bytes() == [2 * 14 * 8] * 2
    assert [b / 4 for b in off.view_bytes()] == on.view_bytes()
    assert on.report["runtime"]["state_bytes"] == sum(on.view_bytes())


def test_both_numbers_of_calibrated_models_are_close_without_fp8_attention():
    """What fp8_attention adds to the calibration alone is the queries' rounding."""
    alone = rtc.Options(lowering="eager", warn=False, quantize="calibrated")
    chain = Chain(CalibratedRope, alone)
    assert_pass_counts(chain.report, {"fp8_attention": 0, "hoist_quantize": 2})
    assert chain.worst < CALIBRATED_BOUND


def test_caches_written_from_outside_and_scales_changed():
    """FP8 views follow what the user writes into a cache, and a scale that changes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = fake_quant_model()
    twin = copy.deepcopy(eager)
    compiled = rtc.compile(twin, options=ON)
    for step in range(STEPS):
        for m in (eager, twin):
            if step % 11 == 5:
                m.k_cache[:, :, 3:6] = 1.5
                m.v_cache.mul_(1.2)
            if step == 30:
                m.k_scale.mul_(2)
            if step == 50:
                m.v_scale = m.v_scale * 0.7
        want, have = eager(frames(step), step), compiled(frames(step), step)
        assert (have - want).norm() < FP8_BOUND * want.norm(), step
    compiled.materialize()
    torch.testing.assert_close(twin.k_cache, eager.k_cache, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(twin.v_cache, eager.v_cache, rtol=1e-6, atol=1e-6)


# ---- what is left alone --------------------------------------------------------------------------


class Variant(nn.Module):
    """[B, H, S, D]; ``read`` makes keys or values of a cache, ``attend`` uses them."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(12, 48, bias=False)
        self.o = nn.Linear(16, 12)
        self.register_buffer("k", torch.randn(1, 2, 14, 8))
        self.register_buffer("v", torch.randn(1, 2, 14, 8))
        self.register_buffer("s", torch.tensor([0.01, 0.02]).view(1, 2, 1, 1))

    def read(self, x):
        return (x / self.s).to(F8).float() * self.s

    read_values = read

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:, :, 2:-3] = cache[:, :, 5:].clone()
            cache[:, :, -3:] = new
        y = self.attend(q, self.read(self.k), self.read_values(self.v))
        return self.o(y.transpose(1, 2).flatten(2))


class Masked(Variant):
    def attend(self, q, k, v):
        mask = torch.arange(14) < torch.tensor([12, 13, 14])[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Causal(Variant):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class PerChannel(Variant):
    def read(self, x):
        s = torch.linspace(0.012, 0.03, 8)
        return (x / s).to(F8).float() * s

    read_values = read


class PerChannelOfHead(Variant):
    """One scale for each channel of each head: the same shape's worth as keys, slots apart."""

    def read(self, x):
        s = self.s * torch.linspace(0.5, 2, 8)
        return (x / s).to(F8).float() * s

    read_values = read


class PerSlot(Variant):
    def read(self, x):
        s = torch.linspace(0.005, 0.03, 14)[:, None]
        return (x / s).to(F8).float() * s

    read_values = read


class KeysOnly(Variant):
    def read_values(self, x):
        return x


class ValuesOnly(Variant):
    def read(self, x):
        return x


class E5M2(Variant):
    def read(self, x):
        return (x / self.s).to(torch.float8_e5m2).float() * self.s

    read_values = read


class Offset(Variant):
    """An asymmetric quantization: a zero point beside the scale."""

    def read(self, x):
        return (x / self.s - 3).to(F8).float() * self.s + 3 * self.s

    read_values = read


class Squared(Variant):
    def read(self, x):
        y = super().read(x)
        return y * y


class Repeated(Variant):
    """Heads are repeated, with work on top."""

    def attend(self, q, k, v):
        q, k, v = q.repeat(1, 2, 1, 1), k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(q, k * 1.5, v * 0.5)[:, 1:3]


class HeadsInHalves(Variant):
    """Four heads of four channels, of two with a scale each."""

    def attend(self, q, k, v):
        q, k, v = (t.transpose(1, 2).reshape(1, -1, 4, 4).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(1, 3, 2, 8).transpose(1, 2)


class HeadsSwapped(Variant):
    """Heads change places between the stored values and the attention."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k.flip(1), v.flip(1))


class FreshInFull(Variant):
    """The newest rows meet the attention without having been FP8."""

    def attend(self, q, k, v):
        k = torch.cat([k[:, :, :-3], self.k[:, :, -3:]], 2)
        v = torch.cat([v[:, :, :-3], self.v[:, :, -3:]], 2)
        return F.scaled_dot_product_attention(q, k, v)


LEFT_ALONE = {
    Masked: "masked or causal",
    Causal: "masked or causal",
    PerChannel: ".",
    PerChannelOfHead: ".",
    PerSlot: "differs within a head",
    KeysOnly: ".",
    ValuesOnly: ".",
    E5M2: ".",
    Offset: ".",
    Squared: ".",
    Repeated: "float32, not float8",
    HeadsInHalves: "breaks up batches or heads",
    HeadsSwapped: ".",
    FreshInFull: ".",
}


@pytest.mark.parametrize("build", LEFT_ALONE, ids=lambda b: b.__name__)
def test_left_alone(build):
    chain = Chain(build, ON)
    assert_pass_counts(chain.report, {"fp8_attention": 0})
    assert_refused(chain.report, "fp8_attention", LEFT_ALONE[build])
    assert chain.worst < EXACT
    chain.check_caches()


# ---- FP8 values that others use too --------------------------------------------------------------


class MaskedToo(Variant):
    """A second attention with a mask over the same keys and values: one in FP8, one as it was."""

    def attend(self, q, k, v):
        mask = torch.arange(14) < torch.tensor([12, 13, 14])[:, None]
        y = F.scaled_dot_product_attention(q, k, v)
        return y + F.scaled_dot_product_attention(q.flip(2), k, v, attn_mask=mask)


class Twice(Variant):
    """Two attentions over the same caches, the second one over keys as values too."""

    def attend(self, q, k, v):
        y = F.scaled_dot_product_attention(q, k, v)
        return y + F.scaled_dot_product_attention(q.flip(2), v, k, scale=0.2)


class Summed(Variant):
    """The mean of the dequantized values beside the attention."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v) + v.mean(2, keepdim=True)


class Returned(Variant):
    """The dequantized keys and values are returned as well."""

    def forward(self, x, step):
        y = super().forward(x, step)
        return y, self.read(self.k), self.read(self.v)[:, :, -5:].clone()


@pytest.mark.parametrize("build", [MaskedToo, Twice, Summed, Returned], ids=lambda b: b.__name__)
def test_others_use_the_same_values(build):
    chain = Chain(build, ON)
    assert_pass_counts(chain.report, {"fp8_attention": 2 if build is Twice else 1})
    assert chain.worst < FP8_BOUND
    chain.check_caches()


def test_returned_values_are_exact():
    """Only the attention is in FP8: values that are returned beside it are not touched."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Returned()
    compiled = rtc.compile(copy.deepcopy(eager), options=ON)
    for step in range(STEPS):
        want, have = eager(frames(step), step), compiled(frames(step), step)
        for a, b in zip(want[1:], have[1:], strict=True):
            torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)
