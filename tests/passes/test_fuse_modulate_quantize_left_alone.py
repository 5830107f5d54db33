"""fuse_modulate_quantize: what is refused, and norms that are none."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import pytest
import torch
import torch.nn.functional as F

from .modulate_helpers import (
    EPS,
    PLAIN,
    RESIDUAL,
    C,
    T,
    ada_layer_norm,
    count,
    fused,
    given,
    quantize,
)

# ---- what is left alone --------------------------------------------------------------------------


def per_token(p, h):
    return F.layer_norm(h, (C,)) * (1 + p.x) + p.shift


def per_token_shift(p, h):
    return F.layer_norm(h, (C,)) * (1 + p.scale) + p.x


def masked_rows(p, h):
    return F.layer_norm(h, (C,)) * (p.z[..., :1] > 0).float()


def whole_norm(p, h):
    return F.layer_norm(h, (T, C)) * (1 + p.scale)


def two_norms(p, h):
    return F.layer_norm(h, (C,), eps=1e-6) + F.layer_norm(h, (C,), eps=1e-2)


def squared(p, h):
    n = F.layer_norm(h, (C,))
    return n * n


REFUSED = {
    per_token: "from row to row",
    per_token_shift: "from row to row",
    masked_rows: "from row to row",
    whole_norm: "more than the last axis",
    two_norms: "two norms",
    squared: "from row to row",
}


@pytest.mark.parametrize("norm", REFUSED, ids=lambda f: f.__name__)
def test_refused(norm):
    gm, out = fused(lambda p: quantize(norm(p, p.x)))
    assert (out.matched, out.applied) == (1, 0)
    assert REFUSED[norm] in out.refused[0].reason
    assert count(gm, PLAIN, RESIDUAL) == [0, 0]


def test_modulation_that_differs_between_batches():
    def f(p):
        return quantize(F.layer_norm(p.x, (C,)) * (1 + p.x[:, :1]))

    gm, out = fused(f, given(batch=2))
    assert "from row to row" in out.refused[0].reason
    assert count(gm, PLAIN, RESIDUAL) == [0, 0]


def l2(p, h):
    return F.normalize(h, dim=-1) * C**0.5


def clamped(p, h):
    return h * (h.square().mean(-1, keepdim=True).clamp(min=0.5)).rsqrt() * p.weight


def eps_outside(p, h):
    return (h - h.mean(-1, keepdim=True)) / (h.std(-1, correction=0, keepdim=True) + 1e-2)


def sample_variance(p, h):
    return (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True) + EPS).sqrt()


def per_head(p, h):
    return F.rms_norm(h.unflatten(-1, (4, C // 4)), (C // 4,)).flatten(-2)


def over_tokens(p, h):
    n = (h - h.mean(1, keepdim=True)) * (h.var(1, correction=0, keepdim=True) + EPS).rsqrt()
    return n


def another_row(p, h):
    return h * torch.rsqrt(h.roll(1, 1).square().mean(-1, keepdim=True) + EPS)


def half_centred(p, h):
    return (h - 0.9 * h.mean(-1, keepdim=True)) * (
        h.var(-1, correction=0, keepdim=True) + 1
    ).rsqrt()


@pytest.mark.parametrize(
    "norm",
    [l2, clamped, eps_outside, sample_variance, per_head, over_tokens, another_row, half_centred],
    ids=lambda f: f.__name__,
)
def test_other_norms_are_no_norms(norm):
    gm, out = fused(lambda p: quantize(norm(p, p.x)))
    assert (out.matched, out.applied) == (0, 0)
    assert count(gm, PLAIN, RESIDUAL) == [0, 0]


def test_one_row():
    """With one row a vector and a row have one shape."""
    gm, out = fused(
        lambda p: quantize(ada_layer_norm(p, p.x + p.gate * F.linear(p.z, p.w))), given(tokens=1)
    )
    assert out.applied == 1
    gm, out = fused(lambda p: quantize(F.layer_norm(p.x, (C,)) * p.x), given(tokens=1))
    assert count(gm, PLAIN, RESIDUAL) == [1, 0]
