"""Video models without a cache across chunks: nothing to find, and nothing may change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rtc

pytest.importorskip("diffusers.models.transformers.transformer_helios")
from diffusers import HeliosTransformer3DModel, SkyReelsV2Transformer3DModel

pytestmark = pytest.mark.third_party

SHARED = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
    "out_channels": 4, "text_dim": 16, "freq_dim": 256, "ffn_dim": 32, "num_layers": 2,
    "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads",
}  # fmt: skip
PASSES = 3


def helios() -> Any:
    return HeliosTransformer3DModel(
        **SHARED, rope_dim=(4, 4, 4), has_multi_term_memory_patch=True, guidance_cross_attn=True,
        zero_history_timestep=True, is_amplify_history=False,
    )  # fmt: skip


def skyreels() -> Any:
    model = SkyReelsV2Transformer3DModel(**SHARED, rope_max_seq_len=32)
    model._set_ar_attention(2)  # frames a causal block: a mask, but no cache
    return model


def drive_helios(call: Any, chunks: int = 2) -> list[torch.Tensor]:
    """Three-part history, cut from all latents so far; every chunk denoises three frames."""
    rng = torch.Generator().manual_seed(1)
    sizes, frames = [4, 2, 1], 3
    history, first = torch.zeros(1, 4, sum(sizes), 8, 8), torch.zeros(1, 4, 1, 8, 8)
    text = torch.randn(1, 5, 16, generator=rng)
    index = torch.arange(1 + sum(sizes) + frames).split([1, *sizes, frames])
    outputs = []
    for chunk in range(chunks):
        long, mid, last = history[:, :, -sum(sizes) :].split(sizes, dim=2)
        x = torch.randn(1, 4, frames, 8, 8, generator=rng)
        for t in torch.linspace(999, 0, PASSES + 1)[:-1]:
            velocity = call(
                hidden_states=x, timestep=t.expand(1), encoder_hidden_states=text,
                indices_hidden_states=index[4][None],
                indices_latents_history_short=torch.cat([index[0], index[3]])[None],
                indices_latents_history_mid=index[2][None],
                indices_latents_history_long=index[1][None],
                latents_history_short=torch.cat([first, last], dim=2), latents_history_mid=mid,
                latents_history_long=long, attention_kwargs=None, return_dict=False,
            )[0]  # fmt: skip
            outputs.append(velocity.clone())
            x = x - velocity / PASSES
        history = torch.cat([history, x], dim=2)
        if chunk == 0:
            first = x[:, :, :1].clone()
    return outputs


def drive_skyreels(call: Any, chunks: int = 2) -> list[torch.Tensor]:
    """Diffusion forcing: every frame at a noise level of its own, later ones noisier."""
    rng = torch.Generator().manual_seed(1)
    text, outputs = torch.randn(1, 5, 16, generator=rng), []
    for _ in range(chunks):
        x = torch.randn(1, 4, 4, 8, 8, generator=rng)
        for i in range(PASSES):
            velocity = call(
                hidden_states=x, timestep=torch.tensor([[0, 50, 60, 90]]) + 900 - 300 * i,
                encoder_hidden_states=text, enable_diffusion_forcing=True, attention_kwargs=None,
                return_dict=False,
            )[0]  # fmt: skip
            outputs.append(velocity.clone())
            x = x - velocity / PASSES
    return outputs


MODELS: dict[str, tuple[Callable[[], Any], Callable[..., list[torch.Tensor]]]] = {
    "helios": (helios, drive_helios),
    "skyreels": (skyreels, drive_skyreels),
}


@pytest.mark.parametrize("name", MODELS)
def test_compiles_unchanged(name: str) -> None:
    """Same bits as eager, no cache claimed, no pass with anything to say; stock compiles it too."""
    build, drive = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        eager = drive(model)
        stock = drive(torch.compile(model, backend="aot_eager", fullgraph=True), chunks=1)
    torch._dynamo.reset()
    with rtc.compile(model, options=rtc.Options(lowering="eager")) as compiled:
        ours = drive(compiled)
        report = compiled.report().to_dict()
    assert len(eager) == 2 * PASSES
    assert all(torch.equal(a, b) for a, b in zip(eager[:PASSES], stock, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(eager, ours, strict=True))
    for graph in report["graphs"]:
        assert graph["caches"] == []
        for p in graph["passes"]:
            assert (p["matched"], p["applied"], p["refused"]) == (0, 0, []), p["name"]
    assert report["runtime"]["imports"] == 0
