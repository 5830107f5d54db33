"""How the cache is read: spellings of attention, grouped heads, norms at the read, padding."""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import math

import torch
import torch.nn.functional as F
from torch import einsum, nn

from .registry import Form


def f64(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


class Sdpa(nn.Module):
    """Fused attention with an explicit scale and transposed views."""

    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", f64(1, 14, 2, 8))
        self.register_buffer("v", f64(1, 14, 2, 8))

    def forward(self, x, step):
        q, k, v = self.in_proj(x).unflatten(-1, (3, 2, 8)).unbind(2)
        self.k.copy_(torch.cat([self.k[:, :2], self.k[:, 5:], k], 1))
        self.v.copy_(torch.cat([self.v[:, :2], self.v[:, 5:], v], 1))
        pos = torch.cat([torch.arange(2), torch.arange(2, 14) + 3 * step]).double()
        ang = pos[:, None, None] * torch.tensor([1.0, 0.2, 0.05, 0.01]).double()

        def rope(t, a):
            lo, hi = t.chunk(2, -1)
            return torch.cat([lo * a.cos() - hi * a.sin(), lo * a.sin() + hi * a.cos()], -1)

        y = F.scaled_dot_product_attention(
            query=rope(q, ang[11:]).transpose(1, 2),
            key=rope(self.k, ang).transpose(1, 2),
            value=self.v.transpose(1, 2),
            attn_mask=None,
            dropout_p=0.0,
            is_causal=False,
            scale=0.2,
        )
        return self.out_proj(y.transpose(1, 2).flatten(2))


class MatmulSoftmax(nn.Module):
    """Scores by matmul, scaled after, softmax as a method."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_o = (nn.Linear(16, 16).double() for _ in range(4))
        self.register_buffer("mem_k", f64(1, 2, 12, 8))
        self.register_buffer("mem_v", f64(1, 2, 12, 8))

    def forward(self, x, step):
        def heads(t):
            return t.reshape(1, 3, 2, 8).permute(0, 2, 1, 3)

        self.mem_k.copy_(torch.cat([self.mem_k[:, :, 3:], heads(self.to_k(x))], 2))
        self.mem_v.copy_(torch.cat([self.mem_v[:, :, 3:], heads(self.to_v(x))], 2))
        ang = (
            torch.arange(step, step + 12).double()[:, None]
            * torch.tensor([1.0, 0.5, 0.1, 0.0]).double()
        )
        cos, sin = torch.cat([ang, ang], 1).cos(), torch.cat([ang, ang], 1).sin()
        keys = self.mem_k * cos + torch.roll(self.mem_k, 4, -1) * torch.cat(
            [-sin[:, :4], sin[:, 4:]], 1
        )
        q = heads(self.to_q(x))
        q = q * cos[9:] + torch.roll(q, 4, -1) * torch.cat([-sin[9:, :4], sin[9:, 4:]], 1)
        scores = torch.matmul(q, keys.transpose(2, 3)) * (1 / math.sqrt(8))
        y = torch.matmul(scores.softmax(dim=-1), self.mem_v)
        return self.to_o(y.permute(0, 2, 1, 3).reshape(1, 3, 16))


class Einsum(nn.Module):
    """lucidrains' spelling: einsum on [B, S, H, D] as it lies in memory."""

    def __init__(self):
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.scale = 8**-0.5
        self.register_buffer("mk", f64(1, 11, 2, 8))
        self.register_buffer("mv", f64(1, 11, 2, 8))

    def forward(self, x, step):
        q, k, v = (t.reshape(1, 3, 2, 8) for t in self.to_qkv(x).chunk(3, dim=-1))
        self.mk[:, 2:8] = self.mk[:, 5:].clone()
        self.mv[:, 2:8] = self.mv[:, 5:].clone()
        self.mk[:, 8:] = k
        self.mv[:, 8:] = v
        seq = torch.cat([torch.arange(2), torch.arange(9) + 2 + step * 3]).double()
        freqs = einsum("i , j -> i j", seq, 0.2 ** torch.arange(4).double())
        freqs = torch.stack((freqs, freqs), dim=-1).reshape(11, 1, 8)

        def rotary(t, freqs):
            even, odd = t.reshape(1, -1, 2, 4, 2).unbind(-1)
            return t * freqs.cos() + torch.stack((-odd, even), dim=-1).flatten(-2) * freqs.sin()

        q = rotary(q, freqs[8:]) * self.scale
        sim = einsum("b i h d, b j h d -> b h i j", q, rotary(self.mk, freqs))
        sim = sim - sim.amax(dim=-1, keepdim=True)
        out = einsum("b h i j, b j h d -> b i h d", sim.softmax(dim=-1), self.mv)
        return self.to_out(out.reshape(1, 3, 16))


class SoftmaxByHand(nn.Module):
    """exp, sum, divide; and a soft cap on the scores, as Gemma 2."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", f64(1, 2, 12, 8))
        self.register_buffer("v", f64(1, 2, 12, 8))

    def forward(self, x, step):
        q, k, v = self.a(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k[:, :, :-3] = self.k[:, :, 3:].clone()
        self.k[:, :, -3:] = k
        self.v[:, :, :-3] = self.v[:, :, 3:].clone()
        self.v[:, :, -3:] = v
        s = 5.0 * torch.tanh((q @ self.k.mT) / 5.0)
        w = torch.exp(s - torch.amax(s, -1, True))
        return self.b(((w @ self.v) / w.sum(-1, keepdim=True)).transpose(1, 2).flatten(2))


class GroupedSdpa(nn.Module):
    """One KV head for two query heads, by enable_gqa."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = (nn.Linear(6, n).double() for n in (32, 32, 6))
        self.o = nn.Linear(32, 6).double()
        self.register_buffer("k", f64(1, 2, 13, 8))
        self.register_buffer("v", f64(1, 2, 13, 8))

    def forward(self, x, step):
        q = self.q(x).view(1, 3, 4, 8).transpose(1, 2)
        k, v = self.kv(x).view(1, 3, 2, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, :1], self.k[:, :, 4:], k], dim=2))
        self.v.copy_(torch.cat([self.v[:, :, :1], self.v[:, :, 4:], v], dim=2))
        t = torch.cat([torch.zeros(1), torch.arange(12) + (step * 3 + 1)]).double().view(-1, 1)
        t = t * torch.tensor([1.0, 0.6, 0.3, 0.1], dtype=t.dtype)

        def rope(u, t):
            z = torch.view_as_complex(u.contiguous().view(*u.shape[:-1], 4, 2))
            return torch.view_as_real(z * torch.polar(torch.ones_like(t), t)).flatten(3)

        y = F.scaled_dot_product_attention(
            rope(q, t[-3:]), rope(self.k, t), self.v, enable_gqa=True
        )
        return self.o(y.transpose(1, 2).flatten(2))


class GroupedRepeat(nn.Module):
    """The same by repeat_interleave, and the repeat comes before the rotation."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(a, b, bias=False).double() for a, b in [(6, 32), (6, 16), (6, 16), (32, 6)]
        )
        self.register_buffer("k", f64(1, 12, 2, 8))
        self.register_buffer("v", f64(1, 12, 2, 8))

    def forward(self, x, step):
        self.k[:, :-4] = self.k[:, 4:].clone()
        self.v[:, :-4] = self.v[:, 4:].clone()
        self.k[:, -4:] = self.wk(x).view(1, 4, 2, 8)
        self.v[:, -4:] = self.wv(x).view(1, 4, 2, 8)
        keys = torch.repeat_interleave(self.k, repeats=2, dim=2)
        values = torch.repeat_interleave(self.v, repeats=2, dim=2)
        ang = (torch.arange(12).double() + step * 4).view(1, 12, 1, 1) / torch.tensor(
            [1, 5, 25, 125]
        ).double()

        def rope(t, ang):
            x1, x2 = t[..., :4], t[..., 4:]
            return torch.cat(
                (x1 * ang.cos() - x2 * ang.sin(), x2 * ang.cos() + x1 * ang.sin()), dim=-1
            )

        q = rope(self.wq(x).view(1, 4, 4, 8), ang[:, -4:]).transpose(1, 2)
        scores = q @ rope(keys, ang).permute(0, 2, 3, 1) / 8**0.5
        y = F.softmax(scores, dim=-1) @ values.transpose(1, 2)
        return self.wo(y.transpose(1, 2).reshape(1, 4, 32))


class GroupedExpand(nn.Module):
    """The same by expand and reshape, as Hugging Face's repeat_kv."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, n).double() for n in (32, 16, 16))
        self.o = nn.Linear(32, 6).double()
        self.register_buffer("past_k", f64(1, 2, 12, 8))
        self.register_buffer("past_v", f64(1, 2, 12, 8))

    def forward(self, x, step):
        k = self.k(x).view(1, 3, 2, 8).transpose(1, 2)
        v = self.v(x).view(1, 3, 2, 8).transpose(1, 2)
        self.past_k.copy_(torch.cat([self.past_k[:, :, 3:], k], 2))
        self.past_v.copy_(torch.cat([self.past_v[:, :, 3:], v], 2))

        def repeat_kv(t, n):
            b, h, s, d = t.shape
            return t[:, :, None, :, :].expand(b, h, n, s, d).reshape(b, h * n, s, d)

        q = self.q(x).view(1, 3, 4, 8).transpose(1, 2)
        w = torch.matmul(q, repeat_kv(self.past_k, 2).transpose(2, 3)) * 8**-0.5
        w = nn.functional.softmax(w, dim=-1, dtype=torch.float64)
        y = torch.matmul(w, repeat_kv(self.past_v, 2)).transpose(1, 2).contiguous()
        return self.o(y.reshape(1, 3, 32))


class KeyNorm(nn.Module):
    """Raw keys are cached; RMSNorm with a weight and then RoPE at each read."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.norm_q = nn.RMSNorm(8, eps=1e-6, dtype=torch.float64)
        self.norm_k = nn.RMSNorm(8, eps=1e-6, dtype=torch.float64)
        with torch.no_grad():
            self.norm_k.weight.uniform_(0.5, 1.5)
        self.register_buffer("k", f64(1, 2, 14, 8))
        self.register_buffer("v", f64(1, 2, 14, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:, :, 2:-3] = cache[:, :, 5:].clone()
            cache[:, :, -3:] = new
        base = (step % 6) * 3
        pos = torch.cat([torch.arange(2), base + torch.arange(2, 14)]).double()
        ang = torch.outer(pos, torch.tensor([1.0, 0.4, 0.1, 0.02]).double())

        def rope(t, ang):
            e, o = t[..., 0::2], t[..., 1::2]
            return torch.stack(
                (e * ang.cos() - o * ang.sin(), o * ang.cos() + e * ang.sin()), -1
            ).flatten(-2)

        y = F.scaled_dot_product_attention(
            rope(self.norm_q(q), ang[-3:]), rope(self.norm_k(self.k), ang), self.v
        )
        return self.o(y.transpose(1, 2).flatten(2))


class KeyNormByHand(nn.Module):
    """A norm over all heads together (as Wan), spelled out, no RoPE; values are scaled per head."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16).double() for _ in range(4))
        self.gain = nn.Parameter(torch.rand(16).double() + 0.5)
        self.head_scale = nn.Parameter(torch.rand(2, 1).double() + 0.5)
        self.register_buffer("ck", f64(1, 12, 16))
        self.register_buffer("cv", f64(1, 12, 2, 8))

    def forward(self, x, step):
        self.ck.copy_(torch.cat([self.ck[:, 3:], self.k(x)], 1))
        self.cv.copy_(torch.cat([self.cv[:, 3:], self.v(x).view(1, 3, 2, 8)], 1))
        k = self.ck * torch.rsqrt(self.ck.pow(2).mean(dim=-1, keepdim=True) + 1e-5) * self.gain
        k = k.view(1, 12, 2, 8).transpose(1, 2)
        v = (self.cv * self.head_scale).transpose(1, 2)
        y = F.scaled_dot_product_attention(self.q(x).view(1, 3, 2, 8).transpose(1, 2), k, v)
        return self.o(y.transpose(1, 2).flatten(2))


class ZeroPadded(nn.Module):
    """Keys are padded with zeros to a multiple of 8, without a mask: they enter the softmax."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", f64(1, 13, 2, 8))
        self.register_buffer("v", f64(1, 13, 2, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).unbind(2)
        self.k[:, 1:10] = self.k[:, 4:].clone()
        self.v[:, 1:10] = self.v[:, 4:].clone()
        self.k[:, 10:], self.v[:, 10:] = k, v
        pos = torch.cat([torch.zeros(1), torch.arange(12) + (1 + step * 3)]).double()
        ang = pos.view(13, 1, 1) * torch.tensor([0.8, 0.4, 0.2, 0.1]).double()

        def rope(t, ang):
            t = torch.view_as_complex(t.reshape(*t.shape[:-1], 4, 2))
            return torch.view_as_real(t * torch.exp(1j * ang)).flatten(-2)

        pad = -13 % 8
        keys = F.pad(rope(self.k, ang), (0, 0, 0, 0, 0, pad))
        values = torch.cat([self.v, self.v.new_zeros(1, pad, 2, 8)], dim=1)
        y = F.scaled_dot_product_attention(
            rope(q, ang[10:]).transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        )
        return self.o(y.transpose(1, 2).flatten(2))


class TextAndCache(nn.Module):
    """Prompt keys stand before the cached ones in one softmax, neither cached nor rotated."""

    def __init__(self):
        super().__init__()
        self.qkv, self.text, self.o = (
            nn.Linear(a, b).double() for a, b in [(6, 48), (5, 32), (16, 6)]
        )
        self.register_buffer("k", f64(1, 2, 12, 8))
        self.register_buffer("v", f64(1, 2, 12, 8))

    def forward(self, x, text, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        tk, tv = self.text(text).view(1, 4, 2, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        ang = (torch.arange(12).double() + step * 3)[:, None] * 0.3 ** torch.arange(4).double()
        cos, sin = ang.cos().tile(2), ang.sin().tile(2)
        keys = self.k * cos + torch.cat([-self.k[..., 4:], self.k[..., :4]], -1) * sin
        y = F.scaled_dot_product_attention(q, torch.cat([tk, keys], 2), torch.cat([tv, self.v], 2))
        return self.o(y.transpose(1, 2).flatten(2))


class SlotMask(nn.Module):
    """A fixed mask hides one sink slot from attention: it belongs to the slot, not to the order."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", f64(1, 2, 14, 8))
        self.register_buffer("v", f64(1, 2, 14, 8))
        self.register_buffer("visible", torch.arange(14) != 1)

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, :2], self.k[:, :, 5:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, :2], self.v[:, :, 5:], v], 2))
        y = F.scaled_dot_product_attention(
            q, self.k, self.v, attn_mask=self.visible[None, None, None]
        )
        return self.o(y.transpose(1, 2).flatten(2))


class MeanOfRaw(nn.Module):
    """A second reader of the raw cache, a mean over slots: it does not care about their order."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", f64(1, 2, 12, 8))
        self.register_buffer("v", f64(1, 2, 12, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        ang = (torch.arange(12).double() + step)[:, None] * torch.tensor(
            [1.0, 0.3, 0.1, 0.0]
        ).double()
        lo, hi = self.k.chunk(2, -1)
        keys = torch.cat([lo * ang.cos() - hi * ang.sin(), hi * ang.cos() + lo * ang.sin()], -1)
        y = F.scaled_dot_product_attention(q, keys, self.v) + self.k.mean(dim=2, keepdim=True)
        return self.o(y.transpose(1, 2).flatten(2))


def noise(*shape):
    return lambda step: ((torch.randn(*shape).double(), step), {})


def with_text(step):
    return (torch.randn(1, 3, 6).double(), torch.randn(1, 4, 5).double(), step), {}


RINGS, BOTH = {"ring_cache": 2}, {"hoist_rope": 1, "ring_cache": 2}

FORMS = [
    Form("attention_sdpa", Sdpa, noise(1, 3, 6), expect=BOTH),
    Form("attention_matmul_softmax", MatmulSoftmax, noise(1, 3, 16), expect=BOTH),
    Form("attention_einsum", Einsum, noise(1, 3, 6), expect=BOTH),
    Form("attention_softmax_by_hand", SoftmaxByHand, noise(1, 3, 6), expect=RINGS),
    Form("attention_gqa_flag", GroupedSdpa, noise(1, 3, 6), expect=BOTH),
    Form("attention_gqa_repeat_interleave", GroupedRepeat, noise(1, 4, 6), expect=BOTH),
    Form("attention_gqa_expand", GroupedExpand, noise(1, 3, 6), expect=RINGS),
    Form("attention_key_norm", KeyNorm, noise(1, 3, 6), expect=BOTH),
    Form(
        "attention_key_norm_by_hand",
        KeyNormByHand,
        noise(1, 3, 16),
        expect=RINGS,
        notes="slot-local work on both caches without RoPE",
    ),
    Form("attention_zero_padded", ZeroPadded, noise(1, 3, 6), expect=BOTH),
    Form("attention_text_and_cache", TextAndCache, with_text, expect=BOTH),
    Form("attention_slot_mask", SlotMask, noise(1, 3, 6), notes="permute the mask, or refuse"),
    Form("attention_mean_of_raw", MeanOfRaw, noise(1, 3, 6), notes="base and view both needed"),
]
