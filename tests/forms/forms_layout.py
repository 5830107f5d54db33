"""Where the slot dimension lies: five layouts, one of them with K and V in one tensor.

All take positions from the step (slot order with a moving base: a kept slot keeps its position).
"""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import torch
from torch import nn
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention, softmax

from .registry import Form


class HeadsFirst(nn.Module):
    """[B, H, S, D], K and V apart."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16).double() for _ in range(4))
        self.register_buffer("keys", torch.zeros(1, 2, 12, 8).double())
        self.register_buffer("values", torch.zeros(1, 2, 12, 8).double())

    def rope(self, x, pos):
        ang = pos[:, None] * torch.tensor([1.0, 0.6, 0.3, 0.1]).double()
        u, w = x[..., :4], x[..., 4:]
        return torch.cat([u * ang.cos() - w * ang.sin(), w * ang.cos() + u * ang.sin()], dim=3)

    def forward(self, x, step):
        heads = [f(x).view(1, 4, 2, 8).transpose(1, 2) for f in (self.q, self.k, self.v)]
        self.keys[:, :, :-4] = self.keys[:, :, 4:].clone()
        self.keys[:, :, -4:] = heads[1]
        self.values[:, :, :-4] = self.values[:, :, 4:].clone()
        self.values[:, :, -4:] = heads[2]
        pos = torch.arange(12).double() + step * 4
        y = scaled_dot_product_attention(
            self.rope(heads[0], pos[8:]), self.rope(self.keys, pos), self.values
        )
        return self.o(y.transpose(1, 2).reshape(1, 4, 16))


class SlotsFirst(nn.Module):
    """[B, S, H, D], transposed for the attention only."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(9, 48).double()
        self.proj = nn.Linear(16, 9).double()
        self.k_mem = nn.Buffer(torch.zeros(1, 11, 2, 8).double())
        self.v_mem = nn.Buffer(torch.zeros(1, 11, 2, 8).double())

    def forward(self, x, step):
        q, k, v = (t.view(1, 3, 2, 8) for t in self.qkv(x).chunk(3, dim=-1))
        for mem, new in [(self.k_mem, k), (self.v_mem, v)]:
            mem.copy_(torch.cat([mem[:, :2], mem[:, 5:], new], dim=1))
        slot = torch.arange(11)
        pos = torch.where(slot < 2, slot, slot + step * 3).double()
        ang = torch.einsum("s,f->sf", pos, 10 ** -torch.arange(4).double())
        c, s = ang.cos()[None, :, None], ang.sin()[None, :, None]

        def turn(z, c, s):
            r, i = z.unflatten(-1, (4, 2)).unbind(-1)
            return torch.stack((r * c - i * s, r * s + i * c), -1).flatten(-2)

        kk = turn(self.k_mem, c, s).transpose(1, 2)
        qq = turn(q, c[:, 8:], s[:, 8:]).transpose(1, 2)
        y = scaled_dot_product_attention(qq, kk, self.v_mem.transpose(1, 2))
        return self.proj(y.transpose(1, 2).flatten(-2))


class NoBatch(nn.Module):
    """[S, H, D]: no batch dimension anywhere, attention by broadcasting."""

    def __init__(self):
        super().__init__()
        self.w = nn.ParameterDict({n: torch.randn(16, 6).double() / 3 for n in "qkv"})
        self.w_out = nn.Parameter(torch.randn(6, 16).double() / 4)
        self.register_buffer("K", torch.zeros(15, 2, 8).double())
        self.register_buffer("V", torch.zeros(15, 2, 8).double())
        self.register_buffer("theta", 0.5 ** torch.arange(4).double())

    def forward(self, x, step):
        q, k, v = (linear(x, self.w[n]).view(3, 2, 8) for n in "qkv")
        self.K.copy_(torch.cat([self.K[3:], k]))
        self.V.copy_(torch.cat([self.V[3:], v]))
        turn = torch.polar(
            torch.ones(15, 1, 4).double(),
            ((torch.arange(15) + step * 3)[:, None] * self.theta).unsqueeze(1),
        )
        kc = torch.view_as_complex(self.K.view(15, 2, 4, 2)) * turn
        qc = torch.view_as_complex(q.view(3, 2, 4, 2)) * turn[12:]
        scores = torch.view_as_real(qc).flatten(2).transpose(0, 1) @ (
            torch.view_as_real(kc).flatten(2).permute(1, 2, 0)
        )
        y = softmax(scores / 8**0.5, dim=-1) @ self.V.transpose(0, 1)
        return linear(y.transpose(0, 1).reshape(3, 16), self.w_out)


class Stacked(nn.Module):
    """[2, B, H, S, D]: one tensor, one shift for both, written half by half."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 72, dtype=torch.double)
        self.out = nn.Linear(24, 6, dtype=torch.double)
        self.register_buffer("kv", torch.zeros(2, 1, 2, 13, 12, dtype=torch.double))

    def forward(self, x, step):
        q, k, v = self.inp(x).reshape(1, 4, 3, 2, 12).permute(2, 0, 3, 1, 4)
        self.kv[:, :, :, 1:-4] = self.kv[:, :, :, 5:].clone()
        self.kv[0, :, :, -4:] = k
        self.kv[1, :, :, -4:] = v
        t = torch.cat(
            [torch.zeros(1, dtype=torch.double), torch.arange(12).double() + (1 + 4 * step)]
        )
        f = t.unsqueeze(1) / torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], dtype=torch.double)
        cos, sin = torch.cat((f, f), 1).cos(), torch.cat((f, f), 1).sin()
        keys, values = self.kv[0], self.kv[1]
        keys = keys * cos + torch.cat((-keys[..., 6:], keys[..., :6]), -1) * sin
        q = q * cos[-4:] + torch.cat((-q[..., 6:], q[..., :6]), -1) * sin[-4:]
        y = scaled_dot_product_attention(q, keys, values)
        return self.out(y.transpose(1, 2).reshape(1, 4, 24))


class StackedLayers(nn.Module):
    """Keys of all ten layers in one tensor, values in another, [layers, B, S, H, D]."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(16, 48).double() for _ in range(10))
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(10, 1, 10, 2, 8, dtype=torch.float64))

    def forward(self, x, step):
        ang = (torch.arange(10).double() + step % 7)[:, None] * 0.1 ** torch.arange(4).double()
        cos, sin = ang.cos()[:, None].repeat(1, 1, 2), ang.sin()[:, None].repeat(1, 1, 2)

        def rope(t, c, s):
            return t * c + torch.cat((-t[..., 4:], t[..., :4]), -1) * s

        for i, layer in enumerate(self.qkv):
            q, k, v = layer(layer_norm(x, (16,))).view(1, -1, 3, 2, 8).unbind(2)
            for cache, new in ((self.k[i], k), (self.v[i], v)):
                cache[:, :-2] = cache[:, 2:].clone()
                cache[:, -2:] = new
            q, keys = rope(q, cos[-2:], sin[-2:]), rope(self.k[i], cos, sin)
            y = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, keys, self.v[i])))
            x = x + y.transpose(1, 2).flatten(2)
        return x


class StackedCatOnce(nn.Module):
    """[2, B, H, S, D] again, written in one statement and taken apart by unbind."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_kv = nn.Linear(6, 16).double(), nn.Linear(6, 32).double()
        self.to_out = nn.Linear(16, 6).double()
        self.register_buffer("memory", torch.zeros(2, 1, 2, 9, 8).double())

    def forward(self, x, step):
        q = self.to_q(x).view(1, 3, 2, 8).transpose(1, 2)
        kv = self.to_kv(x).view(1, 3, 2, 2, 8).permute(2, 0, 3, 1, 4)
        self.memory.copy_(torch.cat((self.memory[..., 3:, :], kv), dim=-2))
        k, v = self.memory.unbind(0)
        phase = (torch.arange(9).double() + 3 * step).outer(
            torch.tensor([1.0, 0.2, 0.04, 0.008]).double()
        )
        spin = torch.complex(phase.cos(), phase.sin())
        k = torch.view_as_real(torch.view_as_complex(k.unflatten(-1, (-1, 2)).contiguous()) * spin)
        q = torch.view_as_real(
            torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous()) * spin[6:]
        )
        y = scaled_dot_product_attention(q.flatten(3), k.flatten(3), v)
        return self.to_out(y.transpose(1, 2).flatten(2))


class HeadsTogether(nn.Module):
    """[B, S, H * D]: heads are split after the read."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(5, 16).double() for _ in range(3))
        self.wo = nn.Linear(16, 5).double()
        self.register_buffer("cache_k", torch.zeros(1, 14, 16).double())
        self.register_buffer("cache_v", torch.zeros(1, 14, 16).double())

    def forward(self, x, step):
        k, v = self.wk(x), self.wv(x)
        self.cache_k[:, 2:11] = self.cache_k[:, 5:].clone()
        self.cache_v[:, 2:11] = self.cache_v[:, 5:].clone()
        self.cache_k[:, 11:] = k
        self.cache_v[:, 11:] = v
        pos = torch.cat([torch.arange(2), torch.arange(2, 14) + 3 * step]).double()
        ang = pos[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1]).double()

        def rope(z, ang):
            z = z.view(1, -1, 2, 8).transpose(1, 2)
            a, b = z.chunk(2, -1)
            return z * torch.cos(ang).tile(2) + torch.cat([-b, a], -1) * torch.sin(ang).tile(2)

        values = self.cache_v.view(1, 14, 2, 8).transpose(1, 2)
        y = scaled_dot_product_attention(
            rope(self.wq(x), ang[11:]), rope(self.cache_k, ang), values
        )
        return self.wo(y.transpose(1, 2).reshape(1, 3, 16))


def noise(*shape):
    return lambda step: ((torch.randn(*shape).double(), step), {})


FORMS = [
    Form(
        "layout_bhsd",
        HeadsFirst,
        noise(1, 4, 16),
        expect={"hoist_rope": 1, "ring_cache": 2},
    ),
    Form(
        "layout_bshd",
        SlotsFirst,
        noise(1, 3, 9),
        expect={"hoist_rope": 1, "ring_cache": 2},
    ),
    Form(
        "layout_shd",
        NoBatch,
        noise(3, 6),
        expect={"hoist_rope": 1, "ring_cache": 2},
    ),
    Form(
        "layout_2bhsd",
        Stacked,
        noise(1, 4, 6),
        expect={"hoist_rope": 1, "ring_cache": 2},
        notes="K and V are halves of one cache; only the K half is rotated",
    ),
    Form(
        "layout_layers_bshd",
        StackedLayers,
        noise(1, 2, 16),
        expect={"hoist_rope": 10, "ring_cache": 20},
        notes="all layers' caches are parts of one",
    ),
    Form(
        "layout_2bhsd_cat_unbind",
        StackedCatOnce,
        noise(1, 3, 6),
        expect={"hoist_rope": 1, "ring_cache": 1},
    ),
    Form(
        "layout_bs_hd",
        HeadsTogether,
        noise(1, 3, 5),
        expect={"hoist_rope": 1, "ring_cache": 2},
    ),
]
