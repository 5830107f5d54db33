"""fuse_pre_attention: where turns stand, what shape caches have, who writes them how often."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from rtc.testing import assert_pass_counts

from .pre_attention_models import (
    BOUND,
    ON,
    STEPS,
    TURNS,
    WORST,
    Chain,
    D,
    H,
    Model,
    Spelled,
    T,
    far,
    half_chunk,
    half_function,
    in_dtypes,
    interleaved_double,
    interleaved_polar,
    interleaved_stack,
    one_by_one,
)


def turned_back(x, pos):
    return half_chunk(x, -pos)


def stretched(x, pos):
    """A turn that scales too, by position."""
    return half_function(x, pos) * (1 + 0.1 * torch.log1p(pos.float()))[:, None, None].to(x.dtype)


def mixed_pairs(x, pos):
    """Heads change places."""
    return half_chunk(x, pos).flip(-2)


def shifted(x, pos):
    return half_chunk(x, pos) + 0.25


FORMS = {
    "ring": {"ring": True},
    "ring_interleaved": {"ring": True, "rope": interleaved_polar},
    "drift": {"drift": True},
    "gqa": {"groups": 2, "norm": Spelled},
    "queries_turn_back": {"q_rope": turned_back},
    "stretched": {"rope": stretched},
    "one_head": {"heads": 1, "groups": 1},
    "heads_in_front": {"heads_first": True, "groups": 2},
    "batches": {"batch": 2},
    "batches_grouped": {"batch": 3, "groups": 2, "rope": interleaved_stack},
    "turned": {"turned": True},
    "turned_otherwise": {"turned": True, "q_rope": interleaved_stack},
    "turned_ring": {"turned": True, "ring": True, "rope": interleaved_double, "norm": Spelled},
    "turned_one_by_one": {"turned": True, "rope": one_by_one, "batch": 2},
    "turned_heads_in_front": {"turned": True, "heads_first": True, "batch": 2},
}


@pytest.mark.parametrize(
    ("form", "dtype"), in_dtypes(FORMS, "ring gqa stretched turned_otherwise turned_one_by_one")
)
def test_forms(form, dtype):
    chain = Chain(lambda: Model(**FORMS[form]), dtype, steps=STEPS if form == "drift" else 26)
    chain.check()
    if form == "drift" and dtype == torch.float32:
        assert chain.report["runtime"]["folds"] > STEPS // 2


class InAnotherShape(Model):
    """Caches in a shape that is none of the kernel's: [B, S, H * D], [S, B, H, D] or, of keys and
    values in one, [B, S, 2, H, D]. Their writes stay outside."""

    def __init__(self, kind, **kw):
        super().__init__(**kw)
        self.kind = kind
        for name in ("k", "v"):
            x = getattr(self, name)
            x = x.flatten(2) if kind == "flat" else x.transpose(0, 1).contiguous()
            setattr(self, name, x)
        if kind == "both":
            self.register_buffer("kv", torch.randn(1, 14, 2, H, D))

    def write(self, cache, new, step):
        if self.kind == "flat":
            new = new.flatten(2)
            cache.copy_(torch.cat([cache[:, :2], cache[:, 2 + T :], new], 1))
            return cache.view(1, 14, H, D)
        if self.kind == "slots":
            new = new.transpose(0, 1)
            cache.copy_(torch.cat([cache[:2], cache[2 + T :], new]))
            return cache.transpose(0, 1)
        if cache is self.k:
            self.fresh = new
            return None
        old, new = self.kv, torch.stack([self.fresh, new], 2)
        old.copy_(torch.cat([old[:, :2], old[:, 2 + T :], new], 1))
        return old.unbind(2)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["flat", "slots", "both"])
def test_caches_in_another_shape(kind, turned):
    Chain(lambda: InAnotherShape(kind, turned=turned), steps=26).check()


def test_keys_are_turned_before_and_behind_the_cache():
    """Twice: the cache holds the keys turned once."""

    class Twice(Model):
        def write(self, cache, new, step):
            new = half_chunk(new, torch.arange(T)) if cache is self.k else new
            return super().write(cache, new, step)

    Chain(Twice, steps=26).check()


@pytest.mark.parametrize("q_rope", [interleaved_stack, mixed_pairs, shifted])
def test_queries_turned_in_another_way(q_rope):
    """In float32 keys are folded: queries turn into their frame, and that is the rotation fused,
    behind the model's own. In bfloat16 nothing is folded, and there is none."""
    Chain(lambda: Model(q_rope=q_rope), steps=26).check()
    chain = Chain(lambda: Model(q_rope=q_rope), torch.bfloat16, steps=26)
    chain.check_refused(", keys by half")


class Denoised(Model):
    """Three passes a call over one pair of caches: each writes its rows over those of the last."""

    def forward(self, x, step):
        axis, at = (2 if self.heads_first else 1), torch.arange(T) + self.slots - T
        for cache in (self.k, self.v):
            cache.copy_(cache.roll(-T, axis))
        pos = torch.arange(self.slots) + T * (step % TURNS)
        for _ in range(3):
            q, k, v = (t.unflatten(-1, (-1, D)) for t in self.qkv(x).chunk(3, -1))
            q, k = self.norm_q(q), self.norm_k(k)
            for cache, new in ((self.k, self.rope(k, pos[-T:])), (self.v, v)):
                new = new.transpose(1, 2) if self.heads_first else new
                cache.index_copy_(axis, at, new)
            q = self.rope(q, pos[-T:]).transpose(1, 2)
            k, v = (c if self.heads_first else c.transpose(1, 2) for c in (self.k, self.v))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x


@pytest.mark.parametrize("form", [{}, {"heads_first": True, "rope": interleaved_double}])
@pytest.mark.parametrize("graph", ["auto", "simulate"])
def test_denoising_passes_that_write_over_each_other(form, graph):
    """Rows of later passes have FP8's errors: caches are held against the run without."""
    options = dataclasses.replace(ON, step_graph=graph)
    chain = Chain(lambda: Denoised(**form), options=options, steps=26)
    assert_pass_counts(chain.report, {"fp8_attention": 3, "fuse_pre_attention": 3})
    assert max(chain.errors) < WORST
    assert max(chain.apart) < 1e-3
    for report in chain.report["graphs"]:
        assert report["regions"]["in_place"] == report["regions"]["writes"] > 0
    chain.compiled.materialize()
    chain.without.materialize()
    for a, b in zip(chain.twin.buffers(), chain.other.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for a, b in zip(chain.twin.buffers(), chain.eager.buffers(), strict=True):
        assert far(a, b) < BOUND
