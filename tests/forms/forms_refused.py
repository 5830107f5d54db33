"""Forms where a pass must refuse (or take special care), say why, and leave the numbers right: the
order of slots matters (no ring), or the read is not slot-local work that stays valid (no hoist).
"""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Form


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


class Causal(nn.Module):
    """is_causal over all slots: query i sees the first i + 1 slots, whatever they hold."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        y = F.scaled_dot_product_attention(q, self.k, self.v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Triangle(nn.Module):
    """A triangular mask, aligned to the newest slots."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16).double() for _ in range(4))
        self.register_buffer("ck", zeros(1, 12, 2, 8))
        self.register_buffer("cv", zeros(1, 12, 2, 8))

    def forward(self, x, step):
        self.ck[:, :-3] = self.ck[:, 3:].clone()
        self.cv[:, :-3] = self.cv[:, 3:].clone()
        self.ck[:, -3:] = self.k(x).view(1, 3, 2, 8)
        self.cv[:, -3:] = self.v(x).view(1, 3, 2, 8)
        q = self.q(x).view(1, 3, 2, 8).transpose(1, 2)
        allowed = torch.ones(3, 12, dtype=torch.bool).tril(diagonal=9)
        scores = q @ self.ck.permute(0, 2, 3, 1) * 8**-0.5
        scores = scores.masked_fill(~allowed, float("-inf"))
        y = scores.softmax(-1) @ self.cv.transpose(1, 2)
        return self.o(y.transpose(1, 2).flatten(2))


class Alibi(nn.Module):
    """A distance bias by slot order, one slope a head."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        distance = (torch.arange(12)[None] - torch.arange(9, 12)[:, None]).abs().double()
        bias = -distance * torch.tensor([0.5, 0.25]).double().view(1, 2, 1, 1)
        y = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=bias)
        return self.o(y.transpose(1, 2).flatten(2))


class LocalBand(nn.Module):
    """Each query sees the four slots before its own: the mask is cut from a larger buffer."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))
        i = torch.arange(16)
        self.register_buffer("band", ((i[:, None] - i) >= 0) & ((i[:, None] - i) < 5))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k[:, :, :-3] = self.k[:, :, 3:].clone()
        self.k[:, :, -3:] = k
        self.v[:, :, :-3] = self.v[:, :, 3:].clone()
        self.v[:, :, -3:] = v
        y = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=self.band[9:12, :12])
        return self.o(y.transpose(1, 2).flatten(2))


class CumsumOfRaw(nn.Module):
    """A second reader of the raw keys accumulates them over slots; the first rotates them."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        ang = (torch.arange(12).double() + step * 3)[:, None] * 0.4 ** torch.arange(4).double()
        lo, hi = self.k.chunk(2, -1)
        keys = torch.cat([lo * ang.cos() - hi * ang.sin(), hi * ang.cos() + lo * ang.sin()], -1)
        y = F.scaled_dot_product_attention(q, keys, self.v)
        trend = self.k.mean(dim=1, keepdim=True).cumsum(dim=2)[:, :, -3:]
        return self.o((y + 0.1 * trend).transpose(1, 2).flatten(2))


class ConvOfRaw(nn.Module):
    """A depthwise convolution runs over the slots of the raw values."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.conv = nn.Conv1d(16, 16, 3, padding=1, groups=16).double()
        self.register_buffer("k", zeros(1, 12, 2, 8))
        self.register_buffer("v", zeros(1, 12, 2, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).unbind(2)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:, :-3] = cache[:, 3:].clone()
            cache[:, -3:] = new
        smooth = self.conv(self.v.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, (2, 8))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, self.k, smooth)))
        return self.o(y.transpose(1, 2).flatten(2))


class NewestOfRaw(nn.Module):
    """The newest keys, read back from the end of the cache, are an output of their own."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        y = F.scaled_dot_product_attention(q, self.k, self.v)
        return self.o(y.transpose(1, 2).flatten(2)), self.k[:, :, 4:8] - self.k[:, :, 8:]


class CacheReturned(nn.Module):
    """The cache itself is an output."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        y = F.scaled_dot_product_attention(q, self.k, self.v)
        return {"x": self.o(y.transpose(1, 2).flatten(2)), "past": (self.k, self.v)}


class DevicePositions(nn.Module):
    """Positions come in as a tensor."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))

    def forward(self, x, positions):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        ang = positions[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03]).double()

        def rope(t, ang):
            a, b = t.chunk(2, -1)
            return torch.cat([a * ang.cos() - b * ang.sin(), a * ang.sin() + b * ang.cos()], -1)

        y = F.scaled_dot_product_attention(rope(q, ang[-3:]), rope(self.k, ang), self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class DeviceCounter(nn.Module):
    """The step is a tensor that the model counts up itself."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))
        self.register_buffer("end_index", torch.zeros((), dtype=torch.int64))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        rows = (self.end_index + torch.arange(3)) % 12
        self.k.index_copy_(2, rows, k)
        self.v.index_copy_(2, rows, v)
        self.end_index += 3
        ang = (torch.arange(12) + self.end_index).double()[:, None] * 0.3 ** torch.arange(
            4
        ).double()
        a, b = self.k.chunk(2, -1)
        keys = torch.cat([a * ang.cos() - b * ang.sin(), a * ang.sin() + b * ang.cos()], -1)
        y = F.scaled_dot_product_attention(q, keys, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class Decay(nn.Module):
    """Keys fade by slot order: k * 0.9 ** age. No rotation, so differences do not cancel."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        age = torch.arange(11, -1, -1).double()
        keys = self.k * (0.9**age)[:, None]
        y = F.scaled_dot_product_attention(q, keys, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class DecayedRotation(nn.Module):
    """xPos: the rotation also scales by position, so it is none."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 14, 8))
        self.register_buffer("v", zeros(1, 2, 14, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:, :, 2:-3] = cache[:, :, 5:].clone()
            cache[:, :, -3:] = new
        pos = torch.arange(14).double()[:, None]
        ang = pos * torch.tensor([1.0, 0.3, 0.1, 0.03]).double()
        size = torch.tensor([0.99, 0.98, 0.97, 0.96]).double() ** (pos / 4)
        cos, sin = (ang.cos() / size).repeat(1, 2), (ang.sin() / size).repeat(1, 2)
        keys = self.k * cos + torch.cat([-self.k[..., 4:], self.k[..., :4]], -1) * sin
        y = F.scaled_dot_product_attention(q, keys, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class WholeCacheAmax(nn.Module):
    """Fake quantization, its scale from the whole cache: a new row may change every old one."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        scale = self.k.abs().amax().clamp(min=1e-12) / 448.0
        keys = (self.k / scale).round() * scale
        y = F.scaled_dot_product_attention(q, keys, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class SpreadOfKeys(nn.Module):
    """Each channel is divided by its spread over all slots: not slot-local, but without order."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        keys = self.k / (self.k.pow(2).mean(dim=2, keepdim=True).sqrt() + 0.1)
        y = F.scaled_dot_product_attention(q, keys, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class ConditionedKeys(nn.Module):
    """Every read scales the keys by what this step's input says: no value to keep."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.gate = nn.Linear(6, 8).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        ang = (torch.arange(12).double() + step * 3)[:, None] * 0.4 ** torch.arange(4).double()
        keys = self.k * (1 + self.gate(x.mean(dim=1)).tanh()).view(1, 1, 1, 8)
        a, b = keys.chunk(2, -1)
        keys = torch.cat([a * ang.cos() - b * ang.sin(), a * ang.sin() + b * ang.cos()], -1)
        y = F.scaled_dot_product_attention(q, keys, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class MovingSink(nn.Module):
    """The sink is a running mean: a slot is no copy of an old slot or a new row."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:, :, :3].mul_(0.9).add_(cache[:, :, 3:6], alpha=0.1)
            cache[:, :, 3:-3] = cache[:, :, 6:].clone()
            cache[:, :, -3:] = new
        y = F.scaled_dot_product_attention(q, self.k, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


def noise(*shape):
    return lambda step: ((torch.randn(*shape).double(), step), {})


def order(name, model, why, inputs=None):
    return Form(name, model, inputs or noise(1, 3, 6), refuses={"ring_cache": why})


def masked(name, model, inputs=None):
    return Form(
        name,
        model,
        inputs or noise(1, 3, 6),
        expect={"ring_cache": 2},
        notes="by slot order: the mask or bias has to turn with the ring, else refuse",
    )


# The reasons name the culprit in the words of these patterns.
BY_ORDER = r"(?i)causal"
SECOND_READER = r"(?i)order|cumsum|conv|read|slice|escape|output"

FORMS = [
    order("refused_is_causal", Causal, BY_ORDER),
    masked("masked_triangular_mask", Triangle, noise(1, 3, 16)),
    masked("masked_alibi", Alibi),
    masked("masked_local_band", LocalBand),
    order("refused_cumsum_of_raw", CumsumOfRaw, SECOND_READER),
    order("refused_conv_of_raw", ConvOfRaw, SECOND_READER),
    order("refused_slice_of_raw", NewestOfRaw, SECOND_READER),
    Form(
        "returned_cache",
        CacheReturned,
        noise(1, 3, 6),
        notes="put in order for every call, or refuse: an output is never in ring order",
    ),
    Form(
        "refused_device_positions",
        DevicePositions,
        lambda step: ((torch.randn(1, 3, 6).double(), torch.arange(12).double() + step * 3), {}),
        refuses={"hoist_rope": r"(?i)device|tensor|position"},
    ),
    Form(
        "refused_device_counter",
        DeviceCounter,
        noise(1, 3, 6),
        refuses={"hoist_rope": r"(?i)device|tensor|position"},
    ),
    Form(
        "refused_decay",
        Decay,
        noise(1, 3, 6),
        runtime={"folds": 0},
        notes="no rotation: a kept view is made anew from raw keys, or none is kept",
    ),
    Form(
        "refused_decayed_rotation",
        DecayedRotation,
        noise(1, 3, 6),
        runtime={"folds": 0},
        notes="as refused_decay",
    ),
    Form(
        "refused_whole_cache_amax",
        WholeCacheAmax,
        noise(1, 3, 6),
        refuses={"hoist_quantize": r"(?i)amax|whole|consent|numerics"},
        expect={"hoist_quantize": 0},
    ),
    Form(
        "refused_spread_of_keys",
        SpreadOfKeys,
        noise(1, 3, 6),
        expect={"hoist_rope": 0},
        notes="a ring is still right: the spread over slots knows no order",
    ),
    Form("refused_conditioned_keys", ConditionedKeys, noise(1, 3, 6), expect={"hoist_rope": 0}),
    Form(
        "refused_moving_sink",
        MovingSink,
        noise(1, 3, 6),
        refuses={"ring_cache": r"(?i)copy|slot|write"},
        expect={"ring_cache": 0},
    ),
]
