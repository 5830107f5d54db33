"""Who holds the caches: the module, its submodules, the caller; in tensors, dicts or lists."""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Form


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


class Layer(nn.Module):
    """One block of the nested model, with caches of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.q, self.k, self.v, self.o = (nn.Linear(12, 16) for _ in range(4))
        self.o = nn.Linear(16, 12)
        self.register_buffer("k_cache", torch.zeros(1, 2, 14, 8))
        self.register_buffer("v_cache", torch.zeros(1, 2, 14, 8))

    def forward(self, x, cos, sin):
        y = self.norm(x)
        q, k, v = (p(y).view(1, 3, 2, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        self.k_cache[:, :, 2:-3] = self.k_cache[:, :, 5:].clone()
        self.v_cache[:, :, 2:-3] = self.v_cache[:, :, 5:].clone()
        self.k_cache[:, :, -3:] = k
        self.v_cache[:, :, -3:] = v

        def rope(t, cos, sin):
            return t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin

        y = F.scaled_dot_product_attention(
            rope(q, cos[-3:], sin[-3:]), rope(self.k_cache, cos, sin), self.v_cache
        )
        return x + self.o(y.transpose(1, 2).flatten(2))


class Nested(nn.Module):
    """Buffers in the blocks of a stack of two; one table for both."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(12, 5)
        self.double()

    def forward(self, x, step):
        pos = torch.cat([torch.arange(2), torch.arange(2, 14) + (step % 5) * 3]).double()
        ang = pos[:, None] * torch.tensor([1.0, 0.2, 0.05, 0.01]).double()
        cos, sin = ang.cos().repeat(1, 2), ang.sin().repeat(1, 2)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(x)


class Arguments(nn.Module):
    """Two tensors, written in place."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()

    def forward(self, x, k_cache, v_cache, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        k_cache.copy_(torch.cat([k_cache[:, :, 3:], k], 2))
        v_cache.copy_(torch.cat([v_cache[:, :, 3:], v], 2))
        ang = (torch.arange(12).double() + step * 3)[:, None] / torch.tensor(
            [1.0, 4, 16, 64]
        ).double()

        def rope(t, ang):
            a, b = t[..., 0::2], t[..., 1::2]
            return torch.stack(
                [a * ang.cos() - b * ang.sin(), a * ang.sin() + b * ang.cos()], -1
            ).flatten(3)

        y = F.scaled_dot_product_attention(rope(q, ang[-3:]), rope(k_cache, ang), v_cache)
        return self.o(y.transpose(1, 2).flatten(2))


class DictArgument(nn.Module):
    """A dict of tensors; the step comes in a dict too, next to the flag of the sink."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16).double() for _ in range(4))

    def forward(self, x, cache, flags):
        n, sink = x.shape[1], flags["sink"]
        for name, proj in (("k", self.k), ("v", self.v)):
            cache[name][:, sink:-n] = cache[name][:, sink + n :].clone()
            cache[name][:, -n:] = proj(x).view(1, n, 2, 8)
        slots = cache["k"].shape[1]
        ids = torch.cat([torch.arange(sink), torch.arange(sink, slots) + flags["step"] * n])
        turn = torch.polar(
            torch.ones(slots, 4).double(),
            torch.outer(ids.double(), 0.1 ** torch.arange(4).double()),
        ).unsqueeze(1)

        def rope(t, turn):
            return torch.view_as_real(
                torch.view_as_complex(t.unflatten(-1, (4, 2))) * turn
            ).flatten(-2)

        q = rope(self.q(x).view(1, n, 2, 8), turn[-n:])
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), rope(cache["k"], turn).transpose(1, 2), cache["v"].transpose(1, 2)
        )
        return self.o(y.transpose(1, 2).flatten(2))


class ListOfDicts(nn.Module):
    """kv_cache[layer]["k"], as most public models; two layers, three axes of positions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 72).double() for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(24, 6).double() for _ in range(2))

    def forward(self, x, *, kv_cache, step):
        f = torch.arange(4).double()[:, None] + step  # four frames of 2 x 2 tokens
        w = torch.tensor([1.0, 0.1]).double()
        rows = torch.tensor([0.0, 0.0, 1.0, 1.0]).double()[:, None] * w
        cols = torch.tensor([0.0, 1.0, 0.0, 1.0]).double()[:, None] * w
        ang = torch.cat(
            [
                (f * w)[:, None].expand(4, 4, 2),
                rows[None].expand(4, 4, 2),
                cols[None].expand(4, 4, 2),
            ],
            dim=-1,
        ).reshape(16, 1, 6)
        turn = torch.complex(ang.cos(), ang.sin())

        def rope(t, turn):
            t = torch.view_as_complex(t.to(torch.float64).reshape(*t.shape[:-1], 6, 2))
            return torch.view_as_real(t * turn).flatten(-2).transpose(1, 2)

        for layer, out, kv in zip(self.layers, self.outs, kv_cache, strict=True):
            q, k, v = layer(x).view(1, 4, 3, 2, 12).unbind(2)
            kv["k"][:, :12] = kv["k"][:, 4:].clone()
            kv["v"][:, :12] = kv["v"][:, 4:].clone()
            kv["k"][:, 12:] = k
            kv["v"][:, 12:] = v
            y = F.scaled_dot_product_attention(
                rope(q, turn[12:]), rope(kv["k"], turn), kv["v"].transpose(1, 2)
            )
            x = x + out(y.transpose(1, 2).flatten(2))
        return x


class ListOfPairs(nn.Module):
    """past_key_values as a list of (k, v) pairs."""

    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleList(nn.Linear(8, 24).double() for _ in range(2))

    def forward(self, x, past_key_values, step):
        for attn, (pk, pv) in zip(self.attn, past_key_values, strict=True):
            q, k, v = attn(x).chunk(3, dim=-1)
            pk.copy_(torch.cat([pk[:, 3:], k], dim=1))
            pv.copy_(torch.cat([pv[:, 3:], v], dim=1))
            y = torch.softmax(q @ pk.transpose(1, 2) / 8**0.5, dim=-1) @ pv
            x = x + y
        return x


def function(x, weights, caches, step):
    """No module at all: weights and caches are arguments."""
    q, k, v = (x @ weights["qkv"]).view(3, 3, 2, 8).unbind(1)
    caches[0].copy_(torch.cat([caches[0][:1], caches[0][4:], k]))
    caches[1].copy_(torch.cat([caches[1][:1], caches[1][4:], v]))
    pos = torch.cat([torch.zeros(1), torch.arange(9) + (step * 3 + 1)]).double().view(10, 1, 1)
    ang = pos * torch.tensor([1.0, 0.5, 0.1, 0.02], dtype=torch.float64)
    c, s = torch.cos(ang), torch.sin(ang)

    def rope(t, c, s):
        a, b = t[..., :4], t[..., 4:]
        return torch.cat([a * c - b * s, b * c + a * s], dim=-1).transpose(0, 1)

    y = F.scaled_dot_product_attention(
        rope(q, c[7:], s[7:])[None], rope(caches[0], c, s)[None], caches[1].transpose(0, 1)[None]
    )
    return y[0].transpose(0, 1).reshape(3, 16) @ weights["o"]


class ReboundDict(nn.Module):
    """The dict gets new tensors in every step: nothing is written in place."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()

    def forward(self, x, cache, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        cache["k"] = torch.cat([cache["k"][:, :, :2], cache["k"][:, :, 5:], k], dim=2)
        cache["v"] = torch.cat([cache["v"][:, :, :2], cache["v"][:, :, 5:], v], dim=2)
        y = F.scaled_dot_product_attention(q, cache["k"], cache["v"])
        return self.o(y.transpose(1, 2).flatten(2))


class ReboundBuffer(nn.Module):
    """self.k = cat(...): the buffer is another tensor after every call."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k = torch.cat([self.k[:, :, 3:], k], dim=2)
        self.v = torch.cat([self.v[:, :, 3:], v], dim=2)
        ang = (torch.arange(12).double() + step * 3)[:, None] * 0.5 ** torch.arange(4).double()
        a, b = self.k.chunk(2, -1)
        keys = torch.cat([a * ang.cos() - b * ang.sin(), a * ang.sin() + b * ang.cos()], -1)
        return self.o(F.scaled_dot_product_attention(q, keys, self.v).transpose(1, 2).flatten(2))


class FrameDeque(nn.Module):
    """A Python list of frames, popped and appended to: the window never moves in memory."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()

    def forward(self, x, frames, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        frames.pop(0)
        frames.append((k.contiguous(), v.contiguous()))
        keys, values = (torch.cat(part, dim=2) for part in zip(*frames, strict=True))
        y = F.scaled_dot_product_attention(q, keys, values)
        return self.o(y.transpose(1, 2).flatten(2))


def x(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def weights():
    g = torch.Generator().manual_seed(0)
    shapes = {"qkv": (6, 48), "o": (16, 6)}
    return {n: torch.randn(*s, generator=g, dtype=torch.float64) / 3 for n, s in shapes.items()}


BOTH = {"hoist_rope": 1, "ring_cache": 2}
TWO_LAYERS = {"hoist_rope": 2, "ring_cache": 4}

FORMS = [
    Form(
        "home_submodules",
        Nested,
        lambda step: ((x(1, 3, 12), step), {}),
        expect=TWO_LAYERS,
        notes="the second layer attends with what the first computed; a reset every 5 steps",
    ),
    Form(
        "home_arguments",
        Arguments,
        lambda step, kv: ((x(1, 3, 6), *kv, step), {}),
        state=lambda: (zeros(1, 2, 12, 8), zeros(1, 2, 12, 8)),
        expect=BOTH,
    ),
    Form(
        "home_dict",
        DictArgument,
        lambda step, kv: ((x(1, 3, 16), kv, {"step": step, "sink": 2}), {}),
        state=lambda: {"k": zeros(1, 11, 2, 8), "v": zeros(1, 11, 2, 8)},
        expect=BOTH,
        dynamic="L['flags']['step']",
    ),
    Form(
        "home_list_of_dicts",
        ListOfDicts,
        lambda step, kv: ((x(1, 4, 6),), {"kv_cache": kv, "step": step}),
        state=lambda: [{"k": zeros(1, 16, 2, 12), "v": zeros(1, 16, 2, 12)} for _ in range(2)],
        expect=TWO_LAYERS,
    ),
    Form(
        "home_list_of_pairs",
        ListOfPairs,
        lambda step, kv: ((x(1, 3, 8), kv, step), {}),
        state=lambda: [(zeros(1, 12, 8), zeros(1, 12, 8)) for _ in range(2)],
        expect={"ring_cache": 4},
        notes="one head, [B, S, D]",
    ),
    Form(
        "home_function",
        lambda: function,
        lambda step, kv: ((x(3, 6), weights(), kv, step), {}),
        state=lambda: [zeros(10, 2, 8), zeros(10, 2, 8)],
        expect=BOTH,
        notes="the weights are new tensors in every call",
    ),
    Form(
        "home_rebound_dict",
        ReboundDict,
        lambda step, kv: ((x(1, 3, 6), kv, step), {}),
        state=lambda: {"k": zeros(1, 2, 11, 8), "v": zeros(1, 2, 11, 8)},
        notes="no write in the graph: the new cache is an output; may take the plain path",
    ),
    Form(
        "home_rebound_buffer",
        ReboundBuffer,
        lambda step: ((x(1, 3, 6), step), {}),
        notes="as home_rebound_dict",
    ),
    Form(
        "home_frame_deque",
        FrameDeque,
        lambda step, kv: ((x(1, 3, 6), kv, step), {}),
        state=lambda: [(zeros(1, 2, 3, 8), zeros(1, 2, 3, 8)) for _ in range(4)],
        notes="each frame stays where it was made: there is no copy to remove",
    ),
]
