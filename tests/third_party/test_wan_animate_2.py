"""Wan-Animate-2 of diffusers: grid sizes as tensors, read on the host in the middle of the call.

The whole call is one graph or none: rtc raises, names the line, and leaves model and cache alone.
"""

from typing import Any

import pytest
import torch

import rtc

pytest.importorskip("diffusers.models.transformers.transformer_wan_animate_2")
from diffusers.models.transformers.transformer_wan_animate_2 import (
    WanAnimate2KVCache,
    WanAnimate2Transformer3DModel,
)

pytestmark = pytest.mark.third_party

LAYERS = 2


def build() -> Any:
    torch.manual_seed(0)
    model = WanAnimate2Transformer3DModel(
        patch_size=(1, 2, 2), text_len=16, in_dim=36, dim=128, ffn_dim=256, freq_dim=64,
        text_dim=32, out_dim=16, num_heads=4, num_layers=LAYERS, cross_attn_norm=True,
        use_img_emb=True,
    )  # fmt: skip
    return model.eval()


def arguments(cache: Any, mode: str, frames: int) -> dict[str, Any]:
    """Latents of 4 x 4, so 4 tokens a frame; the reference has 3 frames, the video 9 images."""
    rng = torch.Generator().manual_seed(1)
    grid = torch.tensor([[3, 2, 2]])
    of_mode: dict[str, Any] = {"offset_grid_sizes": grid}
    if mode == "cached":
        of_mode = {"reference_grid_sizes": grid, "origin_len": 9, "origin_area": [32, 32]}
    return {
        "hidden_states": [torch.randn(16, frames, 4, 4, generator=rng)],
        "condition_latents": [torch.randn(20, frames, 4, 4, generator=rng)],
        "encoder_hidden_states": [torch.randn(7, 32, generator=rng)],
        "encoder_hidden_states_image": torch.randn(1, 257, 1280, generator=rng),
        "timestep": torch.tensor([500.0]), "seq_len": 4 * frames, "kv_cache": cache,
        "kv_cache_mode": mode, "return_dict": False, **of_mode,
    }  # fmt: skip


@pytest.mark.parametrize(("mode", "frames"), [("extract", 3), ("cached", 4)])
def test_host_reads_are_refused_with_their_line(mode: str, frames: int) -> None:
    model, cache = build(), WanAnimate2KVCache(LAYERS)
    with torch.no_grad():
        if mode == "cached":
            model(**arguments(cache, "extract", 3))
        kept = [(layer.key, layer.value) for layer in cache.layer_caches]
        with rtc.compile(model, options=rtc.Options(lowering="eager")) as compiled:
            with pytest.raises(RuntimeError, match=r"transformer_wan_animate_2\.py\W*(line )?\d+"):
                compiled(**arguments(cache, mode, frames))
            assert compiled.report().to_dict()["runtime"]["imports"] == 0
        for layer, (key, value) in zip(cache.layer_caches, kept, strict=True):
            assert layer.key is key
            assert layer.value is value
