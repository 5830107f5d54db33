"""A causal video transformer in another style than the reference model's: plain linears under the
names that people give them, attention and MLP one after the other, one cache a layer in
[B, H, S, D], RoPE on interleaved pairs. Nothing in it knows of ranks: heads are what the linears
give.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import torch
import torch.nn.functional as F
from torch import nn

DIM, HEAD, LAYERS, NEW, SLOTS, SINK = 48, 8, 2, 4, 22, 2


def turned(x, cos, sin):
    """x [B, H, N, D], pairs (2i, 2i + 1) turned by angles [N, D / 2]."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(DIM, DIM, bias=False, dtype=torch.float64))
        self.norm = nn.RMSNorm(HEAD, dtype=torch.float64)  # of the cached keys, at every read
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, SLOTS, HEAD, dtype=torch.float64))

    def forward(self, x, cos, sin):
        new = (w(x).unflatten(-1, (-1, HEAD)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (y.transpose(1, 2) for y in new)
        for cache, new in ((self.keys, k), (self.values, v)):
            cache[:, :, SINK:-NEW] = cache[:, :, SINK + NEW :].clone()
            cache[:, :, -NEW:] = new
        q, keys = turned(q, cos[-NEW:], sin[-NEW:]), turned(self.norm(self.keys), cos, sin)
        out = F.scaled_dot_product_attention(q, keys, self.values)
        return self.wo(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, 2 * DIM, bias=False, dtype=torch.float64)
        self.up = nn.Linear(DIM, 2 * DIM, bias=False, dtype=torch.float64)
        self.down = nn.Linear(2 * DIM, DIM, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.attention, self.mlp = Attention(heads), Mlp()
        self.norm1 = nn.RMSNorm(DIM, dtype=torch.float64)
        self.norm2 = nn.RMSNorm(DIM, dtype=torch.float64)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Video(nn.Module):
    """x [1, NEW, DIM] to the same; positions go back every 5th step.

    ``world``: caches hold the heads of one of so many ranks.
    """

    def __init__(self, world=1):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(DIM // HEAD // world) for _ in range(LAYERS))
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.data.uniform_(0.5, 1.5)
        self.requires_grad_(False)

    def forward(self, x, step: int):
        slots = torch.arange(SLOTS - SINK)
        positions = torch.cat([torch.arange(SINK), SINK + step % 5 * NEW + slots])
        angles = positions[:, None] * 100.0 ** (-torch.arange(HEAD // 2, dtype=torch.float64) / 4)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def noise(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(1, NEW, DIM, dtype=torch.float64, generator=generator)


def parallelized(mesh):
    """The same model over the ranks of a mesh, the way torch documents it."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {f"attention.{n}": ColwiseParallel() for n in ("wq", "wk", "wv")}
    plan |= {f"mlp.{n}": ColwiseParallel() for n in ("gate", "up")}
    plan |= {"attention.wo": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    model = Video(mesh.size())
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


class Spread(nn.Module):
    """Everything a DTensor: caches, keys and queries by heads, the output a sum over ranks.

    x [1, H / world, NEW, HEAD]: this rank's heads.
    """

    def __init__(self, mesh):
        super().__init__()
        from torch.distributed.tensor import Shard, distribute_tensor

        torch.manual_seed(4)
        self.mesh, heads = mesh, 2 * mesh.size()
        for name in ("keys", "values"):
            cache = torch.zeros(1, heads, SLOTS, HEAD, dtype=torch.float64)
            self.register_buffer(name, distribute_tensor(cache, mesh, [Shard(1)]))
        weight = torch.randn(heads * HEAD, heads * HEAD, dtype=torch.float64)
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(1)]), requires_grad=False)

    def forward(self, x, step: int):
        from torch.distributed.tensor import DTensor, Replicate, Shard

        x = DTensor.from_local(x, self.mesh, [Shard(1)])
        for cache, new in ((self.keys, x), (self.values, x * 2)):
            kept = cache[:, :, SINK + NEW :]
            cache.copy_(torch.cat([cache[:, :, :SINK], kept, new], dim=2))
        scale = (torch.arange(SLOTS, dtype=torch.float64) + NEW * step).cos()[:, None]
        scale = DTensor.from_local(scale, self.mesh, [Replicate()])
        # the one kind of attention for which DTensor has a rule on the CPU
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = F.scaled_dot_product_attention(x, self.keys * scale, self.values)
        out = out.transpose(1, 2).flatten(2) @ self.weight.T
        return out.redistribute(self.mesh, [Replicate()]).to_local()
