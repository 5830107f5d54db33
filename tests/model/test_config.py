"""The presets' arithmetic against the published figures, and configs that must not pass."""

from dataclasses import replace

import pytest
import torch

from rtc.model import PRESETS, build

TINY, HUGE = PRESETS["tiny"], PRESETS["57b"]


def test_57b_reproduces_the_published_arithmetic():
    assert HUGE.tokens == 757
    assert HUGE.slots == 5788
    assert HUGE.calls == 240
    assert HUGE.reset_period == 42 == 6 * HUGE.window
    assert HUGE.linear_params == 16 * 7680**2 * 60 == 56_623_104_000
    assert HUGE.flops_per_step / 1e12 == pytest.approx(375, abs=0.5)
    # 2.24 PFLOP/s for one chunk of 166.7 ms
    assert HUGE.flops_per_step / 166.7e-3 / 1e15 == pytest.approx(2.24, abs=0.02)
    assert HUGE.cache_bytes(1) == 2 * 240 * 5788 * 7680


def test_57b_fits_one_gpu_in_bfloat16():
    assert HUGE.weight_bytes(2) == pytest.approx(57.1e9, rel=1e-2)
    assert HUGE.cache_bytes(2) == pytest.approx(42.7e9, rel=1e-2)
    assert HUGE.weight_bytes(2) + HUGE.cache_bytes(2) < 100e9 < 139 * 2**30


@pytest.mark.parametrize("name", PRESETS)
def test_counts_agree_with_the_module(name):
    cfg = PRESETS[name]
    model = build(cfg, device="meta", dtype=torch.bfloat16)
    linears = [
        p for n, p in model.named_parameters() if n.endswith(("linear1.weight", "linear2.weight"))
    ]
    assert sum(p.numel() for p in linears) == cfg.linear_params
    assert sum(p.numel() for p in model.parameters()) == cfg.params
    assert sum(p.nbytes for p in model.parameters()) == cfg.weight_bytes(2)
    caches = list(model.buffers())
    assert len(caches) == 2 * cfg.calls
    assert {c.shape for c in caches} == {(cfg.batch, cfg.slots, cfg.heads, cfg.head_dim)}
    assert sum(c.nbytes for c in caches) == cfg.cache_bytes(2)


@pytest.mark.parametrize("name", ["cpu", "cpu-fp8", "deep"])
def test_small_presets_keep_the_ratio_of_cache_to_new_slots(name):
    cfg = PRESETS[name]
    assert cfg.slots / cfg.tokens == pytest.approx(5788 / 757, abs=0.01)
    assert cfg.reset_period % cfg.window == 0


def test_deep_is_as_deep_as_57b():
    assert PRESETS["deep"].layers == HUGE.layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got layers=0"),
        ({"reset_period": -1}, "reset_period must be at least 1, got reset_period=-1"),
        ({"sink": -1}, "sink must not be negative, got sink=-1"),
        ({"dim": 33}, r"dim must be heads \* head_dim, got dim=33, heads=2, head_dim=16"),
        ({"rope_axes": (16, 0)}, r"three even channel counts \(t, h, w\), got rope_axes=\(16, 0\)"),
        ({"rope_axes": (6, 5, 5)}, "three even channel counts"),
        ({"rope_axes": (8, 4, 2)}, "must add up to head_dim"),
        ({"out_channels": 7}, "in_channels must be at least out_channels, got in_channels=6"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1"),
    ],
)
def test_wrong_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown preset 'huge', choose one of tiny, cpu"):
        build("huge")
