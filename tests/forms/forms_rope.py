"""RoPE spellings. Raw keys are cached and every read rotates the whole window, except in the last.

Legend: B batch (1), H heads, S cache slots, T new slots a step, D head size, C channels.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from .registry import Form

KEYS_AND_RINGS = {"hoist_rope": 1, "ring_cache": 2}


def rotate_half_model():
    """Llama's spelling: cos and sin as wide as the head, halves swapped."""

    def rotate_half(x):
        x1 = x[..., : x.shape[-1] // 2]
        x2 = x[..., x.shape[-1] // 2 :]
        return torch.cat((-x2, x1), dim=-1)

    class RotateHalf(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = nn.Linear(10, 16, bias=False)
            self.k_proj = nn.Linear(10, 16, bias=False)
            self.v_proj = nn.Linear(10, 16, bias=False)
            self.o_proj = nn.Linear(16, 10, bias=False)
            inv_freq = 1.0 / (10000.0 ** (torch.arange(0, 8, 2).double() / 8))
            self.register_buffer("inv_freq", inv_freq)
            self.register_buffer("key_cache", torch.zeros(1, 2, 14, 8))
            self.register_buffer("value_cache", torch.zeros(1, 2, 14, 8))

        def forward(self, hidden_states, step):
            q = self.q_proj(hidden_states).view(1, 3, 2, 8).transpose(1, 2)
            k = self.k_proj(hidden_states).view(1, 3, 2, 8).transpose(1, 2)
            v = self.v_proj(hidden_states).view(1, 3, 2, 8).transpose(1, 2)
            for cache, new in ((self.key_cache, k), (self.value_cache, v)):
                cache[:, :, 2:-3] = cache[:, :, 5:].clone()
                cache[:, :, -3:] = new
            window = torch.arange(12) + step * 3
            position_ids = torch.cat([torch.arange(2), window + 2])
            freqs = torch.outer(position_ids.double(), self.inv_freq)
            emb = torch.cat((freqs, freqs), dim=-1)
            cos, sin = emb.cos(), emb.sin()
            keys = self.key_cache * cos + rotate_half(self.key_cache) * sin
            q = q * cos[-3:] + rotate_half(q) * sin[-3:]
            y = F.scaled_dot_product_attention(q, keys, self.value_cache)
            return self.o_proj(y.transpose(1, 2).reshape(1, 3, 16))

    return RotateHalf().double()


def table_gather_model():
    """Hugging Face's older spelling: a long table in a buffer, gathered by position ids."""

    class TableGather(nn.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wk, self.wv = (nn.Linear(8, 16) for _ in range(3))
            self.wo = nn.Linear(16, 8)
            angles = torch.arange(512.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
            self.register_buffer("cos_cached", torch.cat([angles.cos()] * 2, -1), persistent=False)
            self.register_buffer("sin_cached", torch.cat([angles.sin()] * 2, -1), persistent=False)
            self.register_buffer("k", torch.zeros(1, 2, 12, 8))
            self.register_buffer("v", torch.zeros(1, 2, 12, 8))

        def rope(self, x, position_ids):
            cos = self.cos_cached[position_ids].unsqueeze(0).unsqueeze(1)
            sin = self.sin_cached[position_ids].unsqueeze(0).unsqueeze(1)
            a, b = x.chunk(2, dim=-1)
            return (x * cos) + (torch.cat([b.neg(), a], dim=-1) * sin)

        def forward(self, x, step):
            split = lambda t: t.unflatten(-1, (2, 8)).transpose(1, 2)  # noqa: E731
            q, k, v = split(self.wq(x)), split(self.wk(x)), split(self.wv(x))
            self.k.copy_(torch.cat([self.k[:, :, 3:], k], dim=2))
            self.v.copy_(torch.cat([self.v[:, :, 3:], v], dim=2))
            ids = torch.arange(12) + 3 * step
            y = F.scaled_dot_product_attention(
                self.rope(q, ids[9:]), self.rope(self.k, ids), self.v
            )
            return self.wo(y.transpose(1, 2).flatten(2))

    return TableGather().double()


def interleaved_model():
    """GPT-J's spelling: even and odd channels are a pair, restacked."""

    class Interleaved(nn.Module):
        heads, dim, sink, window, new = 2, 8, 3, 9, 3

        def __init__(self):
            super().__init__()
            self.to_qkv = nn.Linear(6, 3 * self.heads * self.dim)
            self.to_out = nn.Linear(self.heads * self.dim, 6)
            slots = self.sink + self.window
            self.register_buffer("ck", torch.zeros(1, self.heads, slots, self.dim))
            self.register_buffer("cv", torch.zeros(1, self.heads, slots, self.dim))

        def angles(self, step):
            theta = torch.tensor([1.0, 0.5, 0.25, 0.125], dtype=torch.float64)
            moving = torch.arange(self.window, dtype=torch.float64) + (self.sink + step * self.new)
            fixed = torch.arange(self.sink, dtype=torch.float64)
            return torch.cat([fixed, moving])[:, None] * theta[None]

        @staticmethod
        def rotate(x, angle):
            even, odd = x[..., 0::2], x[..., 1::2]
            cos, sin = torch.cos(angle), torch.sin(angle)
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

        def forward(self, x, step):
            b, t, _ = x.shape
            q, k, v = self.to_qkv(x).view(b, t, 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
            s, n = self.sink, self.new
            self.ck.copy_(torch.cat([self.ck[:, :, :s], self.ck[:, :, s + n :], k], dim=2))
            self.cv.copy_(torch.cat([self.cv[:, :, :s], self.cv[:, :, s + n :], v], dim=2))
            angle = self.angles(step)
            scores = self.rotate(q, angle[-n:]) @ self.rotate(self.ck, angle).transpose(-2, -1)
            y = torch.softmax(scores / math.sqrt(self.dim), dim=-1) @ self.cv
            return self.to_out(y.transpose(1, 2).reshape(b, t, -1))

    return Interleaved().double()


def empty_like_model():
    """Wan in diffusers: interleaved, written into the halves of an `empty_like`."""

    def apply_rotary_emb(hidden, freqs_cos, freqs_sin):
        x1, x2 = hidden.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = freqs_cos[..., 0::2], freqs_sin[..., 1::2]
        out = torch.empty_like(hidden)
        out[..., 0::2] = x1 * cos - x2 * sin
        out[..., 1::2] = x1 * sin + x2 * cos
        return out.type_as(hidden)

    class EmptyLike(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(6, 16)
            self.o = nn.Linear(16, 6)
            self.register_buffer("cache_k", torch.zeros(1, 12, 2, 8))
            self.register_buffer("cache_v", torch.zeros(1, 12, 2, 8))

        def forward(self, x, step):
            q, k, v = (f(x).unflatten(2, (2, -1)) for f in (self.q, self.k, self.v))
            self.cache_k[:, :-4] = self.cache_k[:, 4:].clone()
            self.cache_v[:, :-4] = self.cache_v[:, 4:].clone()
            self.cache_k[:, -4:] = k
            self.cache_v[:, -4:] = v
            angle = (torch.arange(12).double() + 4 * step).view(1, -1, 1, 1)
            angle = angle * 0.7 ** torch.arange(4).double().repeat_interleave(2)
            cos, sin = angle.cos(), angle.sin()
            roped = apply_rotary_emb(self.cache_k, cos, sin)
            q = apply_rotary_emb(q, cos[:, -4:], sin[:, -4:])
            y = F.scaled_dot_product_attention(
                q.transpose(1, 2), roped.transpose(1, 2), self.cache_v.transpose(1, 2)
            )
            return self.o(y.transpose(1, 2).flatten(2, 3))

    return EmptyLike().double()


def complex64_model():
    """The original Llama release: float32, complex multiply, back to the cache's type."""

    class Complex64(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("wq", "wk", "wv", "wo"):
                setattr(self, name, nn.Linear(16, 16, bias=False).double())
            freqs = 1.0 / (500.0 ** (torch.arange(0, 8, 2)[:4].float() / 8))
            t = torch.arange(512, dtype=torch.float32)
            freqs_cis = torch.polar(torch.ones(512, 4), torch.outer(t, freqs))
            self.register_buffer("freqs_cis", freqs_cis)
            self.register_buffer("cache_k", torch.zeros(1, 12, 2, 8).double())
            self.register_buffer("cache_v", torch.zeros(1, 12, 2, 8).double())

        @staticmethod
        def rotary(x, freqs_cis):
            x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(x_ * freqs_cis[None, :, None, :]).flatten(3).type_as(x)

        def forward(self, x, step):
            xq, xk, xv = (w(x).view(1, 4, 2, 8) for w in (self.wq, self.wk, self.wv))
            self.cache_k.copy_(torch.cat((self.cache_k[:, 4:], xk), dim=1))
            self.cache_v.copy_(torch.cat((self.cache_v[:, 4:], xv), dim=1))
            start = step * 4
            keys = self.rotary(self.cache_k, self.freqs_cis[start : start + 12])
            xq = self.rotary(xq, self.freqs_cis[start + 8 : start + 12])
            scores = torch.matmul(xq.transpose(1, 2), keys.permute(0, 2, 3, 1)) / math.sqrt(8)
            out = torch.matmul(F.softmax(scores, dim=-1), self.cache_v.transpose(1, 2))
            return self.wo(out.transpose(1, 2).contiguous().view(1, 4, -1))

    return Complex64()


def complex128_axes_model():
    """Causal Wan: complex128, three axes concatenated from one table, frames x 2 x 2 tokens."""

    class Complex128Axes(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (
                nn.Linear(24, 24, dtype=torch.float64) for _ in "qkvo"
            )

            def table(dim):
                f = torch.outer(
                    torch.arange(256), 1.0 / torch.pow(100.0, torch.arange(0, dim, 2).div(dim))
                )
                return torch.polar(torch.ones_like(f), f).to(torch.complex128)

            self.register_buffer("freqs", torch.cat([table(4), table(4), table(4)], dim=1))
            self.register_buffer("k_cache", torch.zeros(1, 16, 2, 12, dtype=torch.float64))
            self.register_buffer("v_cache", torch.zeros(1, 16, 2, 12, dtype=torch.float64))

        def rope(self, x, frames, start):
            n, c = x.size(2), x.size(3) // 2
            freqs = self.freqs.split([2, 2, 2], dim=1)
            freqs_i = torch.cat(
                [
                    freqs[0][start : start + frames]
                    .view(frames, 1, 1, -1)
                    .expand(frames, 2, 2, -1),
                    freqs[1][:2].view(1, 2, 1, -1).expand(frames, 2, 2, -1),
                    freqs[2][:2].view(1, 1, 2, -1).expand(frames, 2, 2, -1),
                ],
                dim=-1,
            ).reshape(frames * 4, 1, -1)
            x_i = torch.view_as_complex(x[0].to(torch.float64).reshape(frames * 4, n, c, 2))
            return torch.view_as_real(x_i * freqs_i).flatten(2).unsqueeze(0).type_as(x)

        def forward(self, x, step):
            b, s, n, d = 1, 4, 2, 12
            q = self.q(x).view(b, s, n, d)
            k = self.k(x).view(b, s, n, d)
            v = self.v(x).view(b, s, n, d)
            self.k_cache[:, :12] = self.k_cache[:, 4:16].clone()
            self.v_cache[:, :12] = self.v_cache[:, 4:16].clone()
            self.k_cache[:, 12:16] = k
            self.v_cache[:, 12:16] = v
            roped_query = self.rope(q, 1, step + 3)
            roped_key = self.rope(self.k_cache, 4, step)
            x = F.scaled_dot_product_attention(
                roped_query.transpose(1, 2), roped_key.transpose(1, 2), self.v_cache.transpose(1, 2)
            )
            return self.o(x.transpose(1, 2).flatten(2))

    return Complex128Axes()


def three_axes_half_model():
    """Three axes, each rotating its own third of the head by halves; the sink is one frame."""

    class ThreeAxes(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.ModuleDict({n: nn.Linear(5, 24) for n in ("query", "key", "value")})
            self.back = nn.Linear(24, 5)
            self.register_buffer("keys", torch.zeros(1, 2, 20, 12))
            self.register_buffer("values", torch.zeros(1, 2, 20, 12))

        @staticmethod
        def one_axis(x, pos):
            ang = pos.unsqueeze(-1) * torch.tensor([0.9, 0.2], dtype=x.dtype)
            lo, hi = x.split(2, dim=-1)
            return torch.cat(
                [lo * ang.cos() - hi * ang.sin(), hi * ang.cos() + lo * ang.sin()], dim=-1
            )

        def rotate(self, x, t, h, w):
            parts = x.split(4, dim=-1)
            return torch.cat(
                [self.one_axis(p, a) for p, a in zip(parts, (t, h, w), strict=True)], dim=-1
            )

        def forward(self, x, step):
            q, k, v = (p(x).reshape(1, 4, 2, 12).transpose(1, 2) for p in self.proj.values())
            with torch.no_grad():
                self.keys.copy_(torch.cat([self.keys[:, :, :4], self.keys[:, :, 8:], k], 2))
                self.values.copy_(torch.cat([self.values[:, :, :4], self.values[:, :, 8:], v], 2))
            frame = torch.cat([torch.zeros(1), torch.arange(4) + (step + 1)]).to(x.dtype)
            grid = torch.stack(
                torch.meshgrid(
                    frame, torch.arange(2).to(x.dtype), torch.arange(2).to(x.dtype), indexing="ij"
                )
            ).flatten(1)
            t, h, w = grid.unbind(0)
            y = F.scaled_dot_product_attention(
                self.rotate(q, t[-4:], h[-4:], w[-4:]), self.rotate(self.keys, t, h, w), self.values
            )
            return self.back(y.transpose(1, 2).flatten(2))

    return ThreeAxes().double()


def partial_model():
    """GPT-NeoX: only the first half of each head rotates, the rest passes through."""

    class Partial(nn.Module):
        def __init__(self):
            super().__init__()
            self.query_key_value = nn.Linear(7, 3 * 2 * 12)
            self.dense = nn.Linear(24, 7)
            self.register_buffer("past_k", torch.zeros(1, 2, 15, 12))
            self.register_buffer("past_v", torch.zeros(1, 2, 15, 12))

        def forward(self, x, step):
            qkv = self.query_key_value(x).view(1, 3, 2, 36).permute(0, 2, 1, 3)
            q, k, v = qkv[..., :12], qkv[..., 12:24], qkv[..., 24:]
            self.past_k.copy_(torch.cat((self.past_k[:, :, 3:], k), dim=-2))
            self.past_v.copy_(torch.cat((self.past_v[:, :, 3:], v), dim=-2))
            seq = torch.arange(15, dtype=torch.float64) + step * 3
            freqs = torch.einsum("i,j->ij", seq, torch.tensor([1.0, 0.1, 0.01]).double())
            emb = torch.cat((freqs, freqs), dim=-1)[None, None]
            cos, sin = torch.cos(emb), torch.sin(emb)

            def rot(x, cos, sin):
                turn, keep = x[..., :6], x[..., 6:]
                swapped = torch.cat((-turn[..., 3:], turn[..., :3]), dim=-1)
                return torch.cat((turn * cos + swapped * sin, keep), dim=-1)

            key = rot(self.past_k, cos, sin)
            query = rot(q, cos[:, :, -3:], sin[:, :, -3:])
            attn = torch.softmax(torch.matmul(query, key.transpose(-1, -2)) * 12**-0.5, -1)
            return self.dense(torch.matmul(attn, self.past_v).permute(0, 2, 1, 3).reshape(1, 3, 24))

    return Partial().double()


def matrix_model():
    """Flux: a 2x2 matrix per slot and pair, multiplied out by hand."""

    def rope(pos, dim, theta=100):
        omega = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))
        out = torch.einsum("...n,d->...nd", pos, omega)
        out = torch.stack([out.cos(), -out.sin(), out.sin(), out.cos()], dim=-1)
        return out.reshape(*out.shape[:-1], 2, 2)

    def apply(x, freqs_cis):
        x_ = x.reshape(*x.shape[:-1], -1, 1, 2)
        out = freqs_cis[..., 0] * x_[..., 0] + freqs_cis[..., 1] * x_[..., 1]
        return out.reshape(*x.shape)

    class Matrix(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.proj = nn.Linear(6, 48), nn.Linear(16, 6)
            self.register_buffer("kv_k", torch.zeros(1, 2, 11, 8))
            self.register_buffer("kv_v", torch.zeros(1, 2, 11, 8))

        def forward(self, x, step):
            q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
            self.kv_k[:, :, 2:8] = self.kv_k[:, :, 5:11].clone()
            self.kv_v[:, :, 2:8] = self.kv_v[:, :, 5:11].clone()
            self.kv_k[:, :, 8:] = k
            self.kv_v[:, :, 8:] = v
            ids = torch.cat([torch.arange(2), torch.arange(9) + 3 * step + 2]).double()
            pe = rope(ids[None], 8).unsqueeze(1)
            y = F.scaled_dot_product_attention(
                apply(q, pe[:, :, -3:]), apply(self.kv_k, pe), self.kv_v
            )
            return self.proj(y.transpose(1, 2).reshape(1, 3, 16))

    return Matrix().double()


def at_write_model():
    """Rotated once, when written: nothing to hoist, but the shift is still a copy."""

    class AtWrite(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 48), nn.Linear(16, 6)
            self.register_buffer("k", torch.zeros(1, 2, 12, 8))
            self.register_buffer("v", torch.zeros(1, 2, 12, 8))

        def forward(self, x, step):
            q, k, v = self.a(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
            ang = (torch.arange(3).double() + 3 * step)[:, None] * torch.tensor(
                [1.0, 0.4, 0.2, 0.1]
            )
            c, s = ang.cos().repeat(1, 2), ang.sin().repeat(1, 2)
            q, k = (z * c + torch.cat([-z[..., 4:], z[..., :4]], -1) * s for z in (q, k))
            for cache, new in ((self.k, k), (self.v, v)):
                cache[:, :, :-3] = cache[:, :, 3:].clone()
                cache[:, :, -3:] = new
            y = F.scaled_dot_product_attention(q, self.k, self.v)
            return self.b(y.transpose(1, 2).flatten(2))

    return AtWrite().double()


def noise(tokens, channels):
    return lambda step: ((torch.randn(1, tokens, channels).double(), step), {})


FORMS = [
    Form("rope_half", rotate_half_model, noise(3, 10), expect=KEYS_AND_RINGS),
    Form("rope_table_gather", table_gather_model, noise(3, 8), expect=KEYS_AND_RINGS),
    Form("rope_interleaved", interleaved_model, noise(3, 6), expect=KEYS_AND_RINGS),
    Form("rope_empty_like", empty_like_model, noise(4, 6), expect=KEYS_AND_RINGS),
    Form("rope_complex64", complex64_model, noise(4, 16), expect=KEYS_AND_RINGS),
    Form("rope_complex128_three_axes", complex128_axes_model, noise(4, 24), expect=KEYS_AND_RINGS),
    Form("rope_half_three_axes", three_axes_half_model, noise(4, 5), expect=KEYS_AND_RINGS),
    Form("rope_partial", partial_model, noise(3, 7), expect=KEYS_AND_RINGS),
    Form("rope_matrix", matrix_model, noise(3, 6), expect=KEYS_AND_RINGS),
    Form("rope_at_write", at_write_model, noise(3, 6), expect={"hoist_rope": 0, "ring_cache": 2}),
]
