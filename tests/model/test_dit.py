"""What one step means: caches, positions, the quantized variant, the first pass, tracing."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rtc.model import PRESETS, build, example_inputs, example_prompt
from rtc.model.dit import quantize_round_trip
from rtc.model.rope import apply_rope

TINY = PRESETS["tiny"]
FP8 = replace(TINY, quantize_kv=True)
LINEARS = PRESETS["tiny-fp8"]


def started(cfg, **kw):
    """A float64 model after its first pass."""
    model = build(cfg, dtype=torch.float64, **kw)
    if cfg.sink:
        model.first_pass(example_prompt(cfg, 3, dtype=torch.float64))
    return model


def inputs(cfg, step):
    return example_inputs(cfg, step, dtype=torch.float64)


def contents(model):
    return [c.clone() for c in model.buffers()]


@pytest.mark.parametrize("cfg", [TINY, FP8, LINEARS], ids=["raw", "fp8", "linears"])
def test_120_chained_steps_are_finite_and_deterministic(cfg):
    one, two = started(cfg), started(cfg)
    for step in range(120):
        latent = one(*inputs(cfg, step))
        assert torch.equal(latent, two(*inputs(cfg, step)))
        assert latent.shape == (1, cfg.tokens, cfg.out_channels)
        assert 0.1 < latent.std() < 10
    for a, b in zip(one.buffers(), two.buffers(), strict=True):
        assert torch.equal(a, b)
        # V has no norm, so its size shows whether activations stay sane.
        assert 0.1 < a[:, cfg.sink :].std() < 10


def test_other_seeds_give_other_weights_and_inputs():
    one, two = started(TINY), started(TINY, seed=1)
    assert not torch.allclose(one(*inputs(TINY, 0)), two(*inputs(TINY, 0)))
    noise, cond, step = inputs(TINY, 3)
    assert step == 3
    other_noise, other_cond, _ = example_inputs(TINY, 3, seed=1, dtype=torch.float64)
    assert not torch.equal(noise, other_noise)
    assert not torch.equal(cond, other_cond)
    assert not torch.equal(noise, inputs(TINY, 4)[0])


def test_no_parameter_is_left_at_zero():
    for name, parameter in build("tiny").named_parameters():
        assert parameter.count_nonzero() == parameter.numel(), name


def test_a_step_moves_every_window_by_one_frame():
    model, new, sink = started(TINY), TINY.tokens, TINY.sink
    for step in range(TINY.window + 2):
        before = contents(model)
        model(*inputs(TINY, step))
        for old, now in zip(before, model.buffers(), strict=True):
            assert torch.equal(now[:, :sink], old[:, :sink])
            assert torch.equal(now[:, sink:-new], old[:, sink + new :])
            assert now[:, -new:].count_nonzero() == now[:, -new:].numel()
    caches = contents(model)
    for i, one in enumerate(caches):  # 8 caches, all different
        assert not any(torch.equal(one, other) for other in caches[i + 1 :])


def test_first_call_by_hand():
    """Layer 0 of pass 0, written out: the new frame is read, rotated at its own positions."""
    cfg, step = replace(TINY, layers=1, passes=1), 4
    model = started(cfg)
    for warm in range(step):
        model(*inputs(cfg, warm))
    seen: dict[str, torch.Tensor] = {}
    block = model.blocks[0]
    block.linear1.register_forward_hook(lambda _, args, out: seen.update(projected=out))
    block.linear2.register_forward_hook(lambda _, args, out: seen.update(joined=args[0]))
    model(*inputs(cfg, step))

    def heads(y):
        return y.unflatten(-1, (cfg.heads, cfg.head_dim))

    q, k, v, act, up = seen["projected"].split([32, 32, 32, 64, 64], dim=-1)
    cache = model.caches[0][0]
    torch.testing.assert_close(cache.k[:, -cfg.tokens :], block.norm_k(heads(k)))
    torch.testing.assert_close(cache.v[:, -cfg.tokens :], heads(v))
    t = [0] * cfg.sink + [1 + step + f for f in range(cfg.window) for _ in range(cfg.tokens)]
    n = [*range(cfg.sink), *(list(range(cfg.tokens)) * cfg.window)]
    positions = torch.tensor([t, [i // 3 for i in n], [i % 3 for i in n]]).T
    cos, sin = model.rope(positions)
    keys = apply_rope(cache.k, (cos, sin))
    queries = apply_rope(block.norm_q(heads(q)), (cos[-cfg.tokens :], sin[-cfg.tokens :]))
    weights = torch.einsum("bqhd,bkhd->bhqk", queries, keys) / math.sqrt(cfg.head_dim)
    attention = torch.einsum("bhqk,bkhd->bqhd", weights.softmax(-1), cache.v).flatten(2)
    torch.testing.assert_close(seen["joined"], torch.cat([attention, F.silu(act) * up], dim=-1))


def test_only_the_distance_to_the_sink_makes_the_step_count():
    """All positions of the window move alike, so without a sink a step's number is unseen."""
    for cfg, same in ((replace(TINY, sink=0), True), (TINY, False)):
        latents = []
        for start in (0, 3, TINY.reset_period):
            model = started(cfg)
            noise, cond, _ = inputs(cfg, 0)
            latents.append(model(noise, cond, start))
        assert torch.allclose(latents[0], latents[1], atol=1e-12, rtol=0) is same
        torch.testing.assert_close(latents[0], latents[2])  # the base is back at 0


def test_given_channels_and_conditioning_are_read():
    noise, cond, step = inputs(TINY, 0)
    latent = started(TINY)(noise, cond, step)
    given = noise.clone()
    given[..., TINY.out_channels :] += 1
    assert not torch.allclose(started(TINY)(given, cond, step), latent)
    assert not torch.allclose(started(TINY)(noise, cond + 1, step), latent)


def test_round_trip_uses_one_scale_a_head():
    x = torch.randn(2, 7, 3, 16, generator=torch.Generator().manual_seed(0))
    x = x * torch.tensor([1.0, 1e-3, 0.0])[:, None]
    y = quantize_round_trip(x)
    amax = x.abs().amax(dim=(1, 3), keepdim=True)
    # e4m3 keeps 3 mantissa bits (half a step: 1 / 16), and steps of 2^-9 below 2^-6 of 448.
    assert ((y - x).abs() <= x.abs() / 16 + amax / 448 * 2**-10 * 1.001).all()
    torch.testing.assert_close(y.abs().amax(dim=(1, 3), keepdim=True), amax)
    assert not y[:, :, 2].any()
    x[0, 0, 0, 0] = 100.0  # another head and another batch row must not notice
    assert torch.equal(quantize_round_trip(x)[1], y[1])
    assert torch.equal(quantize_round_trip(x)[:, :, 1:], y[:, :, 1:])


def test_quantized_variant_is_near_and_caches_raw_keys():
    raw, fp8 = started(replace(TINY, layers=1)), started(replace(FP8, layers=1))
    for step in range(4):
        a, b = raw(*inputs(TINY, step)), fp8(*inputs(FP8, step))
        assert 0 < (a - b).abs().max() < 0.1
    first_raw, first_fp8 = raw.caches[0][0], fp8.caches[0][0]
    assert torch.equal(first_raw.k, first_fp8.k)  # before any attention: not quantized in place


@pytest.mark.parametrize("cfg", [TINY, LINEARS], ids=["raw", "linears"])
@pytest.mark.parametrize("length", [1, 3, TINY.sink])
def test_first_pass_fills_the_sink_only(length, cfg):
    model = build(cfg, dtype=torch.float64)
    model(*inputs(TINY, 0))
    before = contents(model)
    model.first_pass(example_prompt(TINY, length, dtype=torch.float64))
    for old, now in zip(before, model.buffers(), strict=True):
        assert now[:, :length].count_nonzero() == now[:, :length].numel()
        assert not now[:, length : TINY.sink].any()
        assert torch.equal(now[:, TINY.sink :], old[:, TINY.sink :])
    model.reset_session()
    assert not any(c.any() for c in model.buffers())


@pytest.mark.parametrize("length", [0, TINY.sink + 1])
def test_first_pass_refuses_other_lengths(length):
    with pytest.raises(ValueError, match=rf"1 to 5 \(sink\) tokens, this one {length}"):
        build(TINY).first_pass(example_prompt(TINY, length))


def test_wrong_input_shapes_are_refused():
    noise, cond, step = example_inputs(TINY, 0)
    model = build(TINY)
    with pytest.raises(ValueError, match=r"noise must have shape \[1, 8, 6\], got \[1, 7, 6\]"):
        model(noise[:, :7], cond, step)
    with pytest.raises(ValueError, match=r"cond must have shape \[1, 12\], got \[2, 12\]"):
        model(noise, cond.repeat(2, 1), step)


@pytest.mark.parametrize("cfg", [TINY, FP8, LINEARS], ids=["raw", "fp8", "linears"])
def test_traces_as_one_graph_for_every_step(cfg):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    eager, traced = started(cfg), started(cfg)
    compiled = torch.compile(traced, backend=backend, fullgraph=True)
    settings: Any = torch.compiler.config
    with torch.no_grad(), settings.patch(dynamic_sources="L['step']"):
        for step in range(2 * 42 + 20):
            args = inputs(cfg, step)
            assert torch.equal(eager(*args), compiled(*args))
    assert len(graphs) == 1
    for a, b in zip(eager.buffers(), traced.buffers(), strict=True):
        assert torch.equal(a, b)
    torch._dynamo.reset()
