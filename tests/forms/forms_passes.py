"""When the cache is written: before or after the read, and how often in a frame's denoising passes.

A kept slot keeps its position, so the read can move to write time.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Form


class CloneCommit(nn.Module):
    """Works on a clone (as for a rejected sample) and commits it at the very end."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 24).double() for _ in range(4))
        self.o = nn.Linear(24, 12).double()
        self.register_buffer("past_key", torch.zeros(1, 2, 14, 12).double())
        self.register_buffer("past_value", torch.zeros(1, 2, 14, 12).double())

    def forward(self, x, step):
        key, value = self.past_key.clone(), self.past_value.clone()
        key[:, :, 2:-3] = self.past_key[:, :, 5:]
        value[:, :, 2:-3] = self.past_value[:, :, 5:]
        key[:, :, -3:] = self.k(x).view(1, 3, 2, 12).transpose(1, 2)
        value[:, :, -3:] = self.v(x).view(1, 3, 2, 12).transpose(1, 2)
        q = self.q(x).view(1, 3, 2, 12).transpose(1, 2)
        ids = torch.arange(14).double()
        ids = ids + (ids >= 2) * (3 * step)
        ang = ids[:, None] * 0.5 ** torch.arange(6).double()
        roped = key * ang.cos().repeat(1, 2) + (
            torch.cat((-key[..., 6:], key[..., :6]), -1) * ang.sin().repeat(1, 2)
        )
        q = q * ang[-3:].cos().repeat(1, 2) + (
            torch.cat((-q[..., 6:], q[..., :6]), -1) * ang[-3:].sin().repeat(1, 2)
        )
        out = self.o(F.scaled_dot_product_attention(q, roped, value).transpose(1, 2).flatten(2))
        self.past_key.copy_(key)
        self.past_value.copy_(value)
        return out


class PassesInOneCall(nn.Module):
    """The whole denoising loop in one forward: pass 0 shifts, each pass overwrites the end."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", torch.zeros(1, 2, 14, 8).double())
        self.register_buffer("v", torch.zeros(1, 2, 14, 8).double())
        self.register_buffer("w", torch.tensor([1.0, 0.5, 0.2, 0.1]).double())

    def attend(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k[:, :, -3:] = k
        self.v[:, :, -3:] = v
        ang = (
            (torch.cat([torch.arange(2), torch.arange(12) + (2 + 3 * step)]).double()[:, None])
            * self.w
        )
        cos, sin = ang.cos(), ang.sin()
        keys = torch.cat(
            [
                self.k[..., :4] * cos - self.k[..., 4:] * sin,
                self.k[..., 4:] * cos + self.k[..., :4] * sin,
            ],
            dim=-1,
        )
        cos, sin = cos[-3:], sin[-3:]
        q = torch.cat(
            [q[..., :4] * cos - q[..., 4:] * sin, q[..., 4:] * cos + q[..., :4] * sin], -1
        )
        y = F.scaled_dot_product_attention(q, keys, self.v)
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, noise, step):
        for cache in (self.k, self.v):
            cache[:, :, 2:-3] = cache[:, :, 5:].clone()
        x = noise
        for t in (1.0, 0.6):
            x = x - t * self.attend(x, step)
        self.attend(x, step)  # once more, clean, for the frames to come
        return x


class PassesOnAClone(nn.Module):
    """The loop runs on a shifted clone; only the last, clean pass is committed."""

    def __init__(self):
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", torch.zeros(1, 12, 2, 8).double())
        self.register_buffer("v", torch.zeros(1, 12, 2, 8).double())

    def forward(self, x, step):
        k, v = torch.empty_like(self.k), torch.empty_like(self.v)
        k[:, :-3], v[:, :-3] = self.k[:, 3:], self.v[:, 3:]
        for _ in range(2):
            q, k[:, -3:], v[:, -3:] = self.to_qkv(x).view(1, 3, 3, 2, 8).unbind(2)
            y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)))
            x = x + self.to_out(y.transpose(1, 2).flatten(2))
        self.k.copy_(k)
        self.v.copy_(v)
        return x


class PassPerCall(nn.Module):
    """One call a denoising pass. A Python bool says whether the frame is new (then it shifts)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", torch.zeros(1, 2, 14, 8).double())
        self.register_buffer("v", torch.zeros(1, 2, 14, 8).double())

    def forward(self, x, frame, *, first_pass):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        if first_pass:
            self.k.copy_(torch.cat([self.k[:, :, :2], self.k[:, :, 5:], self.k[:, :, -3:]], 2))
            self.v.copy_(torch.cat([self.v[:, :, :2], self.v[:, :, 5:], self.v[:, :, -3:]], 2))
        self.k[:, :, -3:] = k
        self.v[:, :, -3:] = v
        pos = torch.arange(14) + torch.tensor([0] * 2 + [1] * 12) * (frame * 3)
        ang = pos.double().unsqueeze(-1) * torch.tensor([0.9, 0.5, 0.1, 0.02]).double()

        def rope(x, ang):
            a, b = x.unflatten(-1, (2, 4)).unbind(-2)
            return torch.stack(
                (a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()), -2
            ).flatten(-2)

        y = F.scaled_dot_product_attention(rope(q, ang[-3:]), rope(self.k, ang), self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class CachePerPass(nn.Module):
    """Each pass has caches of its own, all in one forward: a list of buffers by pass."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        for p in range(2):
            self.register_buffer(f"kv_{p}_k", torch.zeros(1, 2, 12, 8).double())
            self.register_buffer(f"kv_{p}_v", torch.zeros(1, 2, 12, 8).double())

    def one_pass(self, x, p, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        ck, cv = getattr(self, f"kv_{p}_k"), getattr(self, f"kv_{p}_v")
        ck.copy_(torch.cat([ck[:, :, 3:], k], 2))
        cv.copy_(torch.cat([cv[:, :, 3:], v], 2))
        m = (
            torch.arange(12)
            .double()
            .add(3 * step)
            .unsqueeze(1)
            .mul(0.4 ** torch.arange(4).double())
        )
        m = torch.polar(torch.ones_like(m), m)
        ck = torch.view_as_real(torch.view_as_complex(ck.view(1, 2, 12, 4, 2)) * m).flatten(3)
        q = torch.view_as_real(
            torch.view_as_complex(q.contiguous().view(1, 2, 3, 4, 2)) * m[9:]
        ).flatten(3)
        y = F.scaled_dot_product_attention(q, ck, cv)
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x, step):
        for p, sigma in enumerate((0.8, 0.3)):
            x = x - sigma * self.one_pass(x, p, step)
        return x


class PassIndex(nn.Module):
    """One call a pass with the pass as an int, which picks the caches from two lists."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8).double() for _ in range(4))
        self.ks = nn.ParameterList([torch.zeros(1, 12, 2, 4).double() for _ in range(2)])
        self.vs = nn.ParameterList([torch.zeros(1, 12, 2, 4).double() for _ in range(2)])
        self.requires_grad_(False)

    def forward(self, x, frame, *, i):
        ck, cv = self.ks[i], self.vs[i]
        ck[:, :-3] = ck[:, 3:].clone()
        cv[:, :-3] = cv[:, 3:].clone()
        ck[:, -3:] = self.k(x).view(1, 3, 2, 4)
        cv[:, -3:] = self.v(x).view(1, 3, 2, 4)
        pos = (torch.arange(12) + frame * 3).view(12, 1, 1).double()
        ang = torch.cat([pos, pos / 5], -1)

        def rope(t, ang):
            a, b = t.tensor_split(2, dim=-1)
            return torch.cat([a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()], -1)

        q, k = rope(self.q(x).view(1, 3, 2, 4), ang[9:]), rope(ck, ang)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, cv)))
        return self.o(y.transpose(1, 2).flatten(2)) + i


class CommitLast(nn.Module):
    """One call a pass: noisy ones read cat([cache, new]), and only the clean one writes."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16).double() for _ in range(4))
        self.register_buffer("k_cache", torch.zeros(1, 2, 9, 8).double())
        self.register_buffer("v_cache", torch.zeros(1, 2, 9, 8).double())

    def forward(self, x, frame, *, commit):
        q, k, v = (p(x).view(1, 3, 2, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        keys = torch.cat([self.k_cache, k], dim=2)
        values = torch.cat([self.v_cache, v], dim=2)
        theta = (torch.arange(12).double() + frame * 3)[:, None] / torch.tensor(
            [1.0, 3, 9, 27]
        ).double()

        def rope(t, theta):
            e, o = t[..., 0::2], t[..., 1::2]
            return torch.stack(
                [e * theta.cos() - o * theta.sin(), o * theta.cos() + e * theta.sin()], -1
            ).flatten(3)

        y = F.scaled_dot_product_attention(rope(q, theta[9:]), rope(keys, theta), values)
        if commit:
            self.k_cache.copy_(keys[:, :, 3:])
            self.v_cache.copy_(values[:, :, 3:])
        return self.o(y.transpose(1, 2).flatten(2))


class ReadThenWrite(nn.Module):
    """Attention over cat([cache, new]); the cache is shifted afterwards."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", torch.zeros(1, 2, 11, 8).double())
        self.register_buffer("v", torch.zeros(1, 2, 11, 8).double())

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        pos = torch.arange(14).double()
        pos[2:] += step * 3
        ang = pos[:, None] * torch.tensor([1.0, 0.25, 0.06, 0.01]).double()
        c, s = ang.cos().repeat_interleave(2, 1), ang.sin().repeat_interleave(2, 1)

        def rope(t, c, s):
            swapped = torch.stack([-t[..., 1::2], t[..., ::2]], dim=-1).reshape(t.shape)
            return t * c + swapped * s

        keys = rope(torch.cat([self.k, k], dim=2), c, s)
        y = F.scaled_dot_product_attention(
            rope(q, c[11:], s[11:]), keys, torch.cat([self.v, v], dim=2)
        )
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:, :, 2:-3] = cache[:, :, 5:].clone()
            cache[:, :, -3:] = new
        return self.o(y.transpose(1, 2).flatten(2))


class Growth(nn.Module):
    """Fills the window slot by slot and attends only to what is filled; then it shifts."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", torch.zeros(1, 2, 12, 8).double())
        self.register_buffer("v", torch.zeros(1, 2, 12, 8).double())

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        if step >= 4:
            filled = 12
            self.k[:, :, :-3] = self.k[:, :, 3:].clone()
            self.v[:, :, :-3] = self.v[:, :, 3:].clone()
        else:
            filled = (step + 1) * 3
        self.k[:, :, filled - 3 : filled] = k
        self.v[:, :, filled - 3 : filled] = v
        y = F.scaled_dot_product_attention(q, self.k[:, :, :filled], self.v[:, :, :filled])
        return self.o(y.transpose(1, 2).flatten(2))


def noise(*shape):
    return lambda step: ((torch.randn(*shape).double(), step), {})


def per_pass(flag, on):
    """Two calls a frame: the frame index and a bool that is true in pass `on`."""

    def inputs(call):
        frame, denoising_pass = divmod(call, 2)
        return (torch.randn(1, 3, 16 if flag == "commit" else 6).double(), frame), {
            flag: denoising_pass == on
        }

    return inputs


def indexed(call):
    frame, i = divmod(call, 2)
    return (torch.randn(1, 3, 8).double(), frame), {"i": i}


RINGS, BOTH = {"ring_cache": 2}, {"hoist_rope": 1, "ring_cache": 2}

FORMS = [
    Form("passes_clone_commit", CloneCommit, noise(1, 3, 12), expect=BOTH),
    Form("passes_in_one_call", PassesInOneCall, noise(1, 3, 6), expect=BOTH),
    Form("passes_on_a_clone", PassesOnAClone, noise(1, 3, 6), expect=RINGS),
    Form(
        "passes_per_call",
        PassPerCall,
        per_pass("first_pass", 0),
        dynamic="L['frame']",
        graphs=2,
        notes="two graphs write the same caches; the second does not move the window",
    ),
    Form(
        "passes_own_caches", CachePerPass, noise(1, 3, 6), expect={"hoist_rope": 2, "ring_cache": 4}
    ),
    Form(
        "passes_index",
        PassIndex,
        indexed,
        caches=lambda model: {"k": list(model.ks), "v": list(model.vs)},
        dynamic="L['frame']",
        graphs=2,
        notes="the caches are parameters that need no gradient",
    ),
    Form(
        "passes_commit_last",
        CommitLast,
        per_pass("commit", 1),
        dynamic="L['frame']",
        graphs=2,
        notes="the graph of the noisy pass writes nothing and reads cat([cache, new])",
    ),
    Form("passes_write_after_read", ReadThenWrite, noise(1, 3, 6), expect=BOTH),
    Form(
        "passes_growth",
        Growth,
        noise(1, 3, 6),
        graphs=None,
        notes="the growth phase has shapes of its own, then the steady graph takes over",
    ),
]
