"""A sharded model is the unsharded one: weights, caches and outputs, whatever the degree."""

from dataclasses import replace

import pytest
import torch

from rtc.model import PRESETS, Float8Linear, Shard, build, example_inputs, example_prompt
from rtc.model.linear import quantize_rows
from tests.distributed.conftest import run_ranks

# Heads and hidden width that 2, 3 and 6 divide, and 16 divides what is left.
SIX = replace(PRESETS["tiny"], dim=96, heads=6, hidden=96)
FIVE = replace(SIX, dim=160, heads=10, hidden=160)
SIX_FP8 = replace(SIX, quantize_kv=True, fp8_linears=True)


def parts(cfg, world, **kw):
    """The models of all ranks, with no process group: to look at, not to run."""
    return [build(cfg, shard=Shard(r, world), **kw) for r in range(world)]


def rows(linears, cfg, sizes, get):
    """Rows of all ranks' linear1 in the order of the full one: [q, k, v, act, up] of each rank."""
    world = len(linears)
    split = [get(linear).split([n // world for n in sizes]) for linear in linears]
    return torch.cat([piece for pieces in zip(*split, strict=True) for piece in pieces])


def bits(x):
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


@pytest.mark.parametrize(
    ("cfg", "world"),
    [(SIX, 2), (SIX, 3), (SIX, 6), (FIVE, 5), (SIX_FP8, 2), (SIX_FP8, 3), (SIX_FP8, 6)],
    ids=lambda x: x if isinstance(x, int) else "fp8" if x.fp8_linears else str(x.heads),
)
def test_weights_are_parts_of_the_full_ones(cfg, world, monkeypatch):
    # 10 rows of linear1 at a time: parts that begin and end anywhere in a rank's rows
    monkeypatch.setitem(build.__globals__, "_DRAWN", 10 * cfg.dim)
    full, ranks = build(cfg), parts(cfg, world)
    outputs, inputs = [cfg.dim] * 3 + [cfg.hidden] * 2, [cfg.dim, cfg.hidden]
    for i, block in enumerate(full.blocks):
        ones, twos = ([getattr(m.blocks[i], n) for m in ranks] for n in ("linear1", "linear2"))
        assert ones[0].weight.shape == (sum(outputs) // world, cfg.dim)
        assert twos[0].weight.shape == (cfg.dim, sum(inputs) // world)
        whole = rows(ones, cfg, outputs, lambda m: bits(m.weight))
        assert torch.equal(whole, bits(block.linear1.weight))
        whole = rows(twos, cfg, inputs, lambda m: bits(m.weight).T).T
        assert torch.equal(whole, bits(block.linear2.weight))
        if cfg.fp8_linears:
            whole = rows(ones, cfg, outputs, lambda m: m.weight_scale[0])
            assert torch.equal(whole, block.linear1.weight_scale[0])
            for linear in twos:  # the full rows' scales, on every rank
                assert torch.equal(linear.weight_scale, block.linear2.weight_scale)
    for model in ranks:
        for name, parameter in model.named_parameters():
            if ".linear" not in name:
                assert torch.equal(parameter, full.get_parameter(name)), name
        for cache in model.buffers():
            assert cache.shape == (1, cfg.slots, cfg.heads // world, cfg.head_dim)


def test_no_full_weight_comes_into_being(monkeypatch):
    largest, empty = [0], torch.empty

    def remember(*args, **kwargs):
        out = empty(*args, **kwargs)
        if out.device.type != "meta":
            largest[0] = max(largest[0], out.numel())
        return out

    monkeypatch.setitem(build.__globals__, "_DRAWN", 10 * SIX.dim)
    monkeypatch.setattr(torch, "empty", remember)
    build(SIX, shard=Shard(1, 3))
    assert largest[0] == 10 * SIX.dim


@pytest.mark.parametrize(
    ("cfg", "shard", "match"),
    [
        (SIX, (0, 4), r"4 ranks do not divide heads=6"),
        (replace(SIX, hidden=100), (0, 3), r"3 ranks do not divide hidden=100"),
        (replace(SIX_FP8, hidden=48), (0, 2), r"hidden / world to be a multiple of 16, got 24"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(cfg, shard, match):
    with pytest.raises(ValueError, match=match):
        build(cfg, device="meta", shard=Shard(*shard))


@pytest.mark.parametrize("world", [2, 3, 4, 5, 6])
def test_every_degree_of_the_published_size(world):
    cfg = PRESETS["57b"]
    model = build(cfg, device="meta", dtype=torch.bfloat16, shard=Shard(1, world))
    split = sum(p.nbytes for n, p in model.named_parameters() if n.endswith("linear1.weight"))
    split += sum(p.nbytes for n, p in model.named_parameters() if n.endswith("linear2.weight"))
    assert split * world == cfg.linear_params
    assert sum(c.nbytes for c in model.buffers()) * world == cfg.cache_bytes(2)


def test_ranks_and_groups_that_are_none_are_refused():
    for rank, world in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=r"rank must lie in 0..world-1"):
            Shard(rank, world)
    with pytest.raises(ValueError, match="init_process_group"):
        Shard.of()
    with pytest.raises(RuntimeError, match="no process group"):
        build(SIX, shard=Shard(0, 2))(*example_inputs(SIX, 0))


def test_one_rank_of_one_is_the_unsharded_model():
    one, full = build(SIX, shard=Shard(0, 1)), build(SIX)
    for step in range(2):
        assert torch.equal(one(*example_inputs(SIX, step)), full(*example_inputs(SIX, step)))


def test_fp8_partial_products_by_hand():
    """linear2 of each rank: own token scales, the full rows' weight scales; summed, near linear2
    of the unsharded model by what FP8 rounds (e4m3 keeps 3 mantissa bits)."""
    full, ranks = build(SIX_FP8), parts(SIX_FP8, 3)
    x = torch.randn(1, 7, SIX.dim + SIX.hidden, generator=torch.Generator().manual_seed(0))
    whole, total = full.blocks[0].linear2, 0
    weight = whole.weight.double() * whole.weight_scale.T
    for model in ranks:
        columns = model.shard.inputs(SIX)
        linear = model.blocks[0].linear2
        x8, scale = quantize_rows(x[0, :, columns])
        want = (x8.double() * scale) @ weight[:, columns].T
        got = linear(x[..., columns])[0]
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        total = total + want
    exact = x[0].double() @ weight.T
    error, size = (total - exact).abs().max(), exact.abs().max()
    assert error < 0.05 * size
    assert isinstance(whole, Float8Linear)


# -- on ranks --------------------------------------------------------------------------------------


def chain(cfg, steps, shard=None):
    """Outputs of a session's steps, and the caches in the end."""
    kw = {"dtype": torch.float64}
    model = build(cfg, **kw) if shard is None else build(cfg, shard=shard, **kw)
    model(*example_inputs(cfg, 0, **kw))
    model.first_pass(example_prompt(cfg, 3, **kw))
    outputs = [model(*example_inputs(cfg, step, **kw)) for step in range(steps)]
    return torch.stack(outputs), [c.clone() for c in model.buffers()]


def compare(cases, steps):
    """Largest differences of outputs and caches from the unsharded model, a case."""
    shard, found = Shard.of(), []
    for cfg in cases:
        outputs, caches = chain(cfg, steps, shard)
        want, whole = chain(cfg, steps)
        assert type(outputs) is torch.Tensor
        mine = [c.chunk(shard.world, dim=2)[shard.rank] for c in whole]
        apart = max(float((a - b).abs().max()) for a, b in zip(caches, mine, strict=True))
        assert all(c.count_nonzero() > 0.9 * c[:, 2:].numel() for c in caches)
        found.append((float((outputs - want).abs().max()), apart, outputs))
    return found


CASES = (SIX, replace(SIX, quantize_kv=True), replace(SIX, batch=2), SIX_FP8)


@pytest.mark.parametrize("world", [2, 3])
def test_sharded_is_unsharded(world):
    """In float64, over steps that wrap the window and reset positions, after a first pass."""
    steps = SIX.reset_period + 2
    ranks = run_ranks(compare, world, CASES, steps)
    for case, results in zip(CASES, zip(*ranks, strict=True), strict=True):
        for outputs, caches, latent in results:
            # FP8 activations have a scale of each rank's own, so they round differently
            assert outputs <= (0.2 if case.fp8_linears else 1e-10), case
            assert caches <= (0.5 if case.fp8_linears else 1e-10), case
            torch.testing.assert_close(latent, results[0][2], rtol=0, atol=1e-12)
        assert not case.fp8_linears or results[0][0] > 1e-6
