"""fuse_pre_attention: what is refused, and what only looks like it."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .pre_attention_models import (
    ON,
    Chain,
    D,
    Model,
    T,
    angles,
    frames,
    half_chunk,
    no_norm,
    partial,
)

# ---- what is refused -----------------------------------------------------------------------------


def own_turn_a_head(x, pos):
    """Tables that differ from head to head."""
    ang = angles(pos)[:, None] * (1 + torch.arange(x.shape[-2]))[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()], -1)


NO_ROTATION = "no rotation of pairs"


class OfEachBatch(Model):
    """Positions of the second batch are ahead."""

    def __init__(self):
        def ahead(x, pos):
            parts = [half_chunk(x[i : i + 1], pos + 5 * i) for i in range(2)]
            return torch.cat(parts)

        super().__init__(rope=ahead, batch=2)


REFUSED = {
    "partial": lambda: Model(rope=partial),
    "own_turn_a_head": lambda: Model(rope=own_turn_a_head),
    "own_turn_a_head_as_many": lambda: Model(rope=own_turn_a_head, heads=T, groups=T),
    "of_each_batch": OfEachBatch,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    Chain(REFUSED[name], steps=26).check_refused("no rotation of pairs")


# ---- what only looks like it ---------------------------------------------------------------------
# Each of these was fused into something else; refused or right are both good.


def assert_the_same(make, size=1.0, options=ON):
    chain = Chain(make, options=options, steps=8, inputs=lambda s: frames(s, torch.float32) * size)
    assert max(chain.apart) < 1e-3, chain.apart
    chain.check_caches()


class Hooked(Model):
    """``before`` the norm and ``after`` it something is done to queries, keys and values."""

    def __init__(self, before=None, after=None, **kw):
        super().__init__(**kw)
        same = lambda q, k, v: (q, k, v)  # noqa: E731
        self.before, self.after = before or same, after or same

    def forward(self, x, step):
        q, k, v = (t.unflatten(-1, (-1, D)) for t in self.qkv(x).chunk(3, -1))
        q, k, v = self.before(q, k, v)
        q, k, v = self.after(self.norm_q(q), self.norm_k(k), v)
        pos = self.positions(step)
        k, v = self.write(self.k, k, step), self.write(self.v, v, step)
        q, k, v = (t.transpose(1, 2) for t in (self.rope(q, pos[-T:]), self.rope(k, pos), v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


def clipped(q, k, v):
    return q.clamp(-8, 8), k.clamp(-8, 8), v.clamp(-8, 8)


def cut_off(q, k, v):
    return torch.where(q.abs() > 8, 0.0, q), k, v


def through_e5m2(q, k, v):
    return q.to(torch.float8_e5m2).to(q.dtype), k.to(torch.float8_e5m2).to(k.dtype), v


class LargerOfBoth(nn.Module):
    """The mean square or eps, whichever is larger."""

    def __init__(self, dim):
        super().__init__()
        self.w = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True).clamp(min=1e-6)) * self.w


class EpsOutside(LargerOfBoth):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-5) * self.w


def turned_a_head(x, pos):
    """Heads turn, tokens do not; there are as many of both."""
    ang = angles(torch.arange(x.shape[-2]))
    a, b = x.chunk(2, -1)
    return torch.cat([a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()], -1)


LOOKALIKES = {
    "turned_a_head": (
        {"before": lambda q, k, v: (q, k, v), "rope": turned_a_head, "heads": T, "groups": T},
        1.0,
    ),
    "clipped_before_the_norm": ({"before": clipped}, 40.0),
    "clipped": ({"after": clipped, "norm": no_norm}, 40.0),
    "cut_off": ({"after": cut_off, "norm": no_norm}, 40.0),
    "rounded_before_the_norm": ({"before": through_e5m2}, 1.0),
    "rounded": ({"after": through_e5m2, "norm": no_norm}, 1.0),
    "larger_of_both": ({"norm": LargerOfBoth}, 1e-3),
    "eps_outside": ({"norm": EpsOutside}, 1e-5),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_only_looks_like_it(name):
    form, size = LOOKALIKES[name]
    assert_the_same(lambda: Hooked(**form), size)
