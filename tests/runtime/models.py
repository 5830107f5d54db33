"""Small models with caches, and what the tests of the runtime do with them.

Slots are the third axis: two of the sink, twelve of the window, three new ones a step. Keys are cached
raw and rotated at each read, so that rtc keeps a view of them, and both caches become rings.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import copy

import torch
import torch.nn.functional as F
from torch import nn

import rtc

EAGER = rtc.Options(lowering="eager", warn=False)
SHAPE = (1, 2, 14, 8)


def zeros():
    return torch.zeros(*SHAPE, dtype=torch.float64)


def rope(x, pos, freq):
    ang = pos[:, None] * freq
    cos, sin = ang.cos(), ang.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Writes and attends; the caches are given."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("freq", torch.tensor([1.0, 0.31, 0.1, 0.017]).double())

    def attend(self, x, k_cache, v_cache, step):
        n, slots = x.shape[1], k_cache.shape[2]
        q, k, v = self.qkv(x).view(1, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[:, :, 2:-n] = cache[:, :, 2 + n :].clone()
            cache[:, :, -n:] = new
        pos = torch.cat([torch.arange(2), torch.arange(2, slots) + 3 * step]).to(x.dtype)
        y = F.scaled_dot_product_attention(
            rope(q, pos[-n:], self.freq), rope(k_cache, pos, self.freq), v_cache
        )
        return self.o(y.transpose(1, 2).flatten(2))


class Window(Attention):
    """Caches in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k", zeros())
        self.register_buffer("v", zeros())

    def forward(self, x, step):
        return self.attend(x, self.k, self.v, step)


class Given(Attention):
    """Caches as arguments."""

    def forward(self, x, k, v, step):
        return self.attend(x, k, v, step)


class InDict(Attention):
    """Caches and ints in nested containers, by keyword."""

    def forward(self, x, *, state):
        return self.attend(x, state["kv"][0], state["kv"][1], state["at"]["step"])


def x(step, n=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(1000 + step)
    return torch.randn(1, n, 6, generator=g, dtype=torch.float64).to(dtype)


def pair(model=Window, options=EAGER):
    """(eager model, its copy, that copy compiled)."""
    torch.manual_seed(0)
    eager = model()
    twin = copy.deepcopy(eager)
    return eager, twin, rtc.compile(twin, options=options)


def close(a, b, tolerance=1e-12):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    torch.testing.assert_close(b.detach(), a.detach(), rtol=tolerance, atol=tolerance)


def chain(eager, compiled, steps, tolerance=1e-12):
    """The same calls on both; the outputs must agree in each."""
    for step in steps:
        close(eager(x(step), step), compiled(x(step), step), tolerance)


def same_caches(eager, twin):
    close(eager.k, twin.k)
    close(eager.v, twin.v)


def graphs(compiled):
    return len(compiled.report().to_dict()["graphs"])


def runtime(compiled):
    return compiled.report().to_dict()["runtime"]
