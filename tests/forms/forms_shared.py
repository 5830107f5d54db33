"""Caches that are not the compiler's alone: shared, looked at from outside, or read by the host in
the middle of a step. Refuse and say why, or get it right.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Form


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


class TwoModules(nn.Module):
    """Two layers share one pair of caches: the second shifts what the first has just written."""

    class Layer(nn.Module):
        def __init__(self, k, v):
            super().__init__()
            self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
            self.register_buffer("k", k)
            self.register_buffer("v", v)

        def forward(self, x):
            q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
            self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
            self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
            y = F.scaled_dot_product_attention(q, self.k, self.v)
            return x + self.o(y.transpose(1, 2).flatten(2))

    def __init__(self):
        super().__init__()
        k, v = zeros(1, 2, 12, 8), zeros(1, 2, 12, 8)
        self.first, self.second = self.Layer(k, v), self.Layer(k, v)

    def forward(self, x, step):
        return self.second(self.first(x))


class ViewOfCache(nn.Module):
    """Two buffers are views of one tensor and overlap: a window, and the newest half of it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        whole = zeros(2, 1, 2, 12, 8)
        self.register_buffer("k", whole[0])
        self.register_buffer("v", whole[1])
        self.register_buffer("newest", whole[0, :, :, 6:])

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k[:, :, :-3] = self.k[:, :, 3:].clone()
        self.k[:, :, -3:] = k
        self.v[:, :, :-3] = self.v[:, :, 3:].clone()
        self.v[:, :, -3:] = v
        y = F.scaled_dot_product_attention(q, self.k, self.v) + self.newest.mean(2, keepdim=True)
        return self.o(y.transpose(1, 2).flatten(2))


class ViewOutside(nn.Module):
    """The user keeps a view of the cache, which the model never sees, and looks at it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))
        self.watched = [self.k[:, :, -3:], self.v[0]]

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k[:, :, :-3] = self.k[:, :, 3:].clone()
        self.k[:, :, -3:] = k
        self.v[:, :, :-3] = self.v[:, :, 3:].clone()
        self.v[:, :, -3:] = v
        y = F.scaled_dot_product_attention(q, self.k, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class ItemIndex(nn.Module):
    """Self-Forcing's end index: a tensor, read by the host in every call."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))
        self.register_buffer("end_index", torch.zeros((), dtype=torch.int64))

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        end = self.end_index.item()
        self.k[:, :, end : end + 3] = k
        self.v[:, :, end : end + 3] = v
        self.end_index.add_(3).remainder_(12)
        y = F.scaled_dot_product_attention(q, self.k, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class ItemScale(nn.Module):
    """A scale watched by the host between two passes, the line that cost 110 ms a step."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", zeros(1, 2, 12, 8))
        self.register_buffer("v", zeros(1, 2, 12, 8))

    def forward(self, x, step):
        for _ in range(2):
            q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
            self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
            self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
            y = F.scaled_dot_product_attention(q, self.k, self.v)
            peak = self.k.abs().amax().item()
            x = x + self.o(y.transpose(1, 2).flatten(2)) / (1.0 + peak)
        return x


def noise(*shape):
    return lambda step: ((torch.randn(*shape).double(), step), {})


def watched(model):
    return {"k": model.k, "v": model.v, "watched": list(model.watched)}


SHARED = r"(?i)alias|share|view"
READ_BY_HOST = r"(?i)item|host|sync"

FORMS = [
    Form(
        "shared_by_two_modules",
        TwoModules,
        noise(1, 3, 6),
        notes="one tensor, two names: Dynamo makes it one input, so rtc may also get it right",
    ),
    Form(
        "shared_view_of_cache",
        ViewOfCache,
        noise(1, 3, 6),
        refuses={"ring_cache": SHARED},
        expect={"ring_cache": 0, "hoist_rope": 0},
    ),
    Form(
        "shared_view_outside",
        ViewOutside,
        noise(1, 3, 6),
        caches=watched,
        notes="a view nobody can see in the graph; test_held_views.py looks at it alone",
    ),
    Form("host_reads_index", ItemIndex, noise(1, 3, 6), syncs=READ_BY_HOST),
    Form("host_reads_scale", ItemScale, noise(1, 3, 6), syncs=READ_BY_HOST),
]
