"""How new rows get into the cache and old ones out of it.

Where there is RoPE, a kept slot keeps its position, so the read can move to write time.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Form


class CatCopy(nn.Module):
    """One `copy_` of a cat; the sink stays."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", torch.zeros(1, 2, 11, 8).double())
        self.register_buffer("v", torch.zeros(1, 2, 11, 8).double())

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k.copy_(torch.cat([self.k[:, :, :2], self.k[:, :, 5:], k], dim=2))
        self.v.copy_(torch.cat([self.v[:, :, :2], self.v[:, :, 5:], v], dim=2))
        y = F.scaled_dot_product_attention(q, self.k, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class SliceClone(nn.Module):
    """The spelling of most public models: shift a clone of a slice, then write the end."""

    sink = 2

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, dtype=torch.float64) for _ in range(4))
        self.register_buffer("cache_k", torch.zeros(1, 14, 2, 8, dtype=torch.float64))
        self.register_buffer("cache_v", torch.zeros(1, 14, 2, 8, dtype=torch.float64))

    def forward(self, x, step):
        n = x.shape[1]
        k, v = self.k(x).view(1, n, 2, 8), self.v(x).view(1, n, 2, 8)
        keep = self.cache_k.shape[1] - self.sink - n
        for cache, new in ((self.cache_k, k), (self.cache_v, v)):
            cache[:, self.sink : self.sink + keep] = cache[:, -keep:].clone()
            cache[:, -n:] = new
        y = F.scaled_dot_product_attention(
            self.q(x).view(1, n, 2, 8).transpose(1, 2),
            self.cache_k.transpose(1, 2),
            self.cache_v.transpose(1, 2),
        )
        return self.o(y.transpose(1, 2).flatten(2))


class RollAside(nn.Module):
    """Roll into a new tensor, fill its end, assign the window back."""

    def __init__(self):
        super().__init__()
        self.w_in, self.w_out = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", torch.zeros(1, 2, 13, 8).double())
        self.register_buffer("v", torch.zeros(1, 2, 13, 8).double())
        self.register_buffer("freq", 0.3 ** torch.arange(4).double())

    def push(self, cache, new):
        window = torch.roll(cache[:, :, 1:], -4, 2)
        window[:, :, -4:] = new
        cache[:, :, 1:] = window

    def rope(self, x, pos):
        ang = pos.double()[:, None] * self.freq
        a, b = x.chunk(2, -1)
        return torch.cat([a * ang.cos() - b * ang.sin(), a * ang.sin() + b * ang.cos()], -1)

    def forward(self, x, step):
        q, k, v = self.w_in(x).view(1, 4, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.push(self.k, k)
        self.push(self.v, v)
        pos = torch.cat([torch.arange(1), torch.arange(12) + 4 * step])
        y = F.scaled_dot_product_attention(self.rope(q, pos[9:]), self.rope(self.k, pos), self.v)
        return self.w_out(y.transpose(1, 2).flatten(2))


class RollWhole(nn.Module):
    """Roll the whole cache onto itself, then overwrite the last slots."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(6, 16).double() for _ in range(3)])
        self.last = nn.Linear(16, 6).double()
        self.register_buffer("k", torch.zeros(1, 2, 12, 8).double())
        self.register_buffer("v", torch.zeros(1, 2, 12, 8).double())

    def forward(self, x, step):
        q, k, v = (m(x).view(1, 3, 2, 8).transpose(1, 2) for m in self.net)
        self.k[:] = self.k.roll(shifts=-3, dims=2)
        self.v[:] = self.v.roll(shifts=-3, dims=2)
        self.k[:, :, 9:].copy_(k)
        self.v[:, :, 9:].copy_(v)
        return self.last(
            F.scaled_dot_product_attention(q, self.k, self.v).transpose(1, 2).flatten(2)
        )


class IndexCopy(nn.Module):
    """The author wrote a ring already: index_copy_ at a position from the step."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8).double() for _ in range(4))
        self.register_buffer("ring_k", torch.zeros(1, 2, 17, 4).double())
        self.register_buffer("ring_v", torch.zeros(1, 2, 17, 4).double())

    def forward(self, x, step):
        q, k, v = (f(x).view(1, 3, 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        where = torch.arange(3) + 2 + (step % 5) * 3
        self.ring_k.index_copy_(2, where, k)
        self.ring_v.index_copy_(2, where, v)
        y = F.scaled_dot_product_attention(q, self.ring_k, self.ring_v)
        return self.o(y.transpose(1, 2).flatten(2))


class IndexPut(nn.Module):
    """A ring by advanced indexing; its period is no multiple of the chunk, so one may wrap."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", torch.zeros(1, 2, 11, 8).double())
        self.register_buffer("v", torch.zeros(1, 2, 11, 8).double())

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        rows = (torch.arange(3) + step * 3) % 10 + 1
        self.k[:, :, rows] = k
        self.v[:, :, rows] = v
        y = F.scaled_dot_product_attention(q, self.k, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class NarrowRing(nn.Module):
    """A ring by narrow().copy_(); the absolute position of each slot is worked out at the read."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", torch.zeros(1, 2, 14, 8).double())
        self.register_buffer("v", torch.zeros(1, 2, 14, 8).double())

    def forward(self, x, step):
        q, k, v = self.a(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        frame = step % 4
        self.k.narrow(2, 2 + frame * 3, 3).copy_(k)
        self.v.narrow(2, 2 + frame * 3, 3).copy_(v)
        slot_frame = torch.arange(4)
        written = step - (frame - slot_frame) % 4  # the step that wrote each frame of the ring
        pos = (written[:, None] * 3 + torch.arange(3)).flatten()
        pos = torch.cat([torch.arange(2), pos + 2]).double()
        ang = pos[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03]).double()
        here = (torch.arange(3).double() + (step * 3 + 2))[:, None] * torch.tensor(
            [1.0, 0.3, 0.1, 0.03]
        ).double()

        def turn(z, g):
            z1, z2 = z[..., ::2], z[..., 1::2]
            return torch.stack(
                [z1 * g.cos() - z2 * g.sin(), z1 * g.sin() + z2 * g.cos()], -1
            ).flatten(-2)

        y = F.scaled_dot_product_attention(turn(q, here), turn(self.k, ang), self.v)
        return self.b(y.transpose(1, 2).flatten(2))


class BlockByBlock(nn.Module):
    """Frames move one by one in place, oldest first: a copy reads what the next one overwrites."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16).double() for _ in range(4))
        self.register_buffer("kc", torch.zeros(1, 14, 2, 8).double())
        self.register_buffer("vc", torch.zeros(1, 14, 2, 8).double())

    def forward(self, x, step):
        k, v = self.k(x).view(1, 3, 2, 8), self.v(x).view(1, 3, 2, 8)
        for cache, new in ((self.kc, k), (self.vc, v)):
            for i in range(3):
                cache[:, 2 + 3 * i : 5 + 3 * i].copy_(cache[:, 5 + 3 * i : 8 + 3 * i])
            cache[:, 11:].copy_(new)
        w = (torch.arange(14).double() + torch.where(torch.arange(14) < 2, 0, 3 * step)) / 7
        w = w.view(1, 14, 1, 1) * torch.tensor([8.0, 4.0, 2.0, 1.0]).double()

        def rope(t, w):
            return torch.view_as_real(
                torch.view_as_complex(t.reshape(*t.shape[:3], 4, 2)) * torch.exp(1j * w)
            ).flatten(3)

        y = F.scaled_dot_product_attention(
            rope(self.q(x).view(1, 3, 2, 8), w[:, 11:]).transpose(1, 2),
            rope(self.kc, w).transpose(1, 2),
            self.vc.transpose(1, 2),
        )
        return self.o(y.transpose(1, 2).flatten(2))


class FrameList(nn.Module):
    """A tensor per frame; contents move along the list, the read is a cat."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        for i in range(4):
            self.register_buffer(f"k{i}", torch.zeros(1, 2, 3, 8).double())
            self.register_buffer(f"v{i}", torch.zeros(1, 2, 3, 8).double())

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        ks = [self.k0, self.k1, self.k2, self.k3]
        vs = [self.v0, self.v1, self.v2, self.v3]
        for frames, new in ((ks, k), (vs, v)):
            for older, newer in pairwise(frames):
                older.copy_(newer)
            frames[-1].copy_(new)
        y = F.scaled_dot_product_attention(q, torch.cat(ks, dim=2), torch.cat(vs, dim=2))
        return self.o(y.transpose(1, 2).flatten(2))


class FrameStack(nn.Module):
    """[frames, tokens, H, D] rebuilt by stacking views, with a frame axis of its own."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("frames_k", torch.zeros(4, 3, 2, 8).double())
        self.register_buffer("frames_v", torch.zeros(4, 3, 2, 8).double())

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(3, 3, 2, 8).unbind(1)
        self.frames_k.copy_(torch.stack([*self.frames_k.unbind(0)[1:], k]))
        self.frames_v.copy_(torch.stack([*self.frames_v.unbind(0)[1:], v]))
        t = (torch.arange(4) + step).double()[:, None, None, None]
        ang = t * torch.tensor([1.0, 0.7, 0.3, 0.1]).double()
        k1, k2 = self.frames_k.chunk(2, -1)
        keys = torch.cat([k1 * ang.cos() - k2 * ang.sin(), k1 * ang.sin() + k2 * ang.cos()], -1)
        q1, q2 = q.chunk(2, -1)
        c, s = ang[3].cos(), ang[3].sin()
        q = torch.cat([q1 * c - q2 * s, q1 * s + q2 * c], -1)
        y = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            keys.flatten(0, 1).transpose(0, 1),
            self.frames_v.flatten(0, 1).transpose(0, 1),
        )
        return self.o(y.transpose(0, 1).reshape(3, 16))


def noise(*shape):
    return lambda step: ((torch.randn(*shape).double(), step), {})


RINGS, BOTH = {"ring_cache": 2}, {"hoist_rope": 1, "ring_cache": 2}

FORMS = [
    Form("write_cat_copy", CatCopy, noise(1, 3, 6), expect=RINGS),
    Form("write_slice_clone", SliceClone, noise(1, 3, 16), expect=RINGS),
    Form("write_roll_aside", RollAside, noise(1, 4, 6), expect=BOTH),
    Form("write_roll_whole", RollWhole, noise(1, 3, 6), expect=RINGS),
    Form(
        "write_index_copy",
        IndexCopy,
        noise(1, 3, 8),
        notes="a ring already: no copying to save, and nothing may break",
    ),
    Form("write_index_put", IndexPut, noise(1, 3, 6), notes="a chunk may wrap in its middle"),
    Form("write_narrow_ring", NarrowRing, noise(1, 3, 6), expect={"hoist_rope": 1}),
    Form("write_block_by_block", BlockByBlock, noise(1, 3, 16), expect=BOTH),
    Form("write_frame_list", FrameList, noise(1, 3, 6), notes="a cache in four tensors"),
    Form("write_frame_stack", FrameStack, noise(3, 6), expect=BOTH, notes="a slot is a frame"),
]
