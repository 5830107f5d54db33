"""SANA-WM's refiner of diffusers: a raw sink, rotated anew in every call by a table that the caller
makes, and a history that was rotated when it was stored; both are concatenated with the new keys.

The caller owns the window: it concatenates the captured keys to the history and cuts the oldest, so
the cache tensors are new after every block, and the trimmed ones are views.
"""

from typing import Any

import pytest
import torch

import rtc
from rtc.testing import assert_pass_counts

pytest.importorskip("diffusers.models.transformers.transformer_sana_wm_refiner")
from diffusers.models.transformers.transformer_sana_wm_refiner import (
    SanaWMLTX2RefinerTransformer3DModel,
    SanaWMRefinerKVCache,
)

pytestmark = pytest.mark.third_party

LAYERS, PASSES, SIZE = 1, 3, 2
SINK, BLOCK, WINDOW = 1, 2, 4  # frames: the third block meets a history that was cut
TOKENS = SIZE * SIZE  # of a frame


def build() -> Any:
    torch.manual_seed(0)
    model = SanaWMLTX2RefinerTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=32, audio_in_channels=4, audio_out_channels=4,
        audio_num_attention_heads=2, audio_attention_head_dim=8, audio_cross_attention_dim=16,
        num_layers=LAYERS, caption_channels=32, rope_double_precision=False,
    )  # fmt: skip
    return model.double().eval()


class Refiner:
    """The loop of diffusers' refiner pipeline around ``call``; ``outputs`` of every call."""

    def __init__(self, call: Any, model: Any) -> None:
        self.call, self.model = call, model
        self.rng = torch.Generator().manual_seed(1)
        self.text = torch.randn(1, 6, 32, generator=self.rng, dtype=torch.float64)
        self.cache = SanaWMRefinerKVCache(LAYERS)
        self.outputs: list[torch.Tensor] = []
        self.history = 0  # frames in the cache besides the sink
        self.run(self.frames(SINK), range(SINK), "capture_pre_rope", 0.0)
        for layer in self.layers():
            layer.store_sink(*layer.get_captured_pre_rope())

    def layers(self) -> list[Any]:
        return [self.cache.get(i) for i in range(LAYERS)]

    def frames(self, n: int) -> torch.Tensor:
        """[B, tokens, channels]"""
        return torch.randn(1, n * TOKENS, 4, generator=self.rng, dtype=torch.float64)

    def rope(self, positions: range) -> Any:
        return self.model.build_rotary_emb_for_absolute_positions(
            batch_size=1, frame_positions=list(positions), height=SIZE, width=SIZE,
            device=torch.device("cpu"), fps=24.0,
        )  # fmt: skip

    def arguments(
        self, x: torch.Tensor, positions: range, mode: str, sigma: float
    ) -> dict[str, Any]:
        return {
            "hidden_states": x, "encoder_hidden_states": self.text,
            "timestep": torch.full(x.shape[:2], 1000 * sigma),
            "video_rotary_emb": self.rope(positions),
            "encoder_attention_mask": torch.ones(1, 6), "kv_cache": self.cache,
            "kv_cache_mode": mode, "return_dict": False,
        }  # fmt: skip

    def run(self, x: torch.Tensor, positions: range, mode: str, sigma: float) -> torch.Tensor:
        self.outputs.append(self.call(**self.arguments(x, positions, mode, sigma))[0].clone())
        return self.outputs[-1]

    def place_sink(self, start: int) -> None:
        """Right before the history, wherever that has moved to."""
        self.cache.sink_pe = self.rope(range(start - self.history - SINK, start - self.history))

    def block(self, start: int) -> None:
        positions, x = range(start, start + BLOCK), self.frames(BLOCK)
        self.place_sink(start)
        for i in range(PASSES):
            x = x - self.run(x, positions, "inject", 1 - i / PASSES) / PASSES
        self.run(x, positions, "inject_and_capture_post_rope", 0.0)
        keep = (WINDOW - SINK) * TOKENS
        for layer in self.layers():
            new, old = layer.get_captured_post_rope(), layer.get_history()
            if old is not None:
                new = tuple(torch.cat(pair, dim=1) for pair in zip(old, new, strict=True))
            layer.store_history(*(t[:, -keep:] for t in new))
        self.history = min(self.history + BLOCK, WINDOW - SINK)

    def video(self, blocks: int) -> "Refiner":
        for i in range(blocks):
            self.block(SINK + i * BLOCK)
        return self


@pytest.fixture(scope="module")
def videos() -> tuple[Refiner, Refiner, dict[str, Any]]:
    """Four blocks by eager and by rtc, and what rtc reports."""
    model = build()
    with rtc.compile(model, options=rtc.Options(lowering="eager")) as compiled, torch.no_grad():
        eager, ours = Refiner(model, model).video(4), Refiner(compiled, model).video(4)
        return eager, ours, compiled.report().to_dict()


def test_equals_eager_while_the_window_grows_and_after(
    videos: tuple[Refiner, Refiner, dict[str, Any]],
) -> None:
    eager, ours, report = videos
    for a, b in zip(eager.outputs, ours.outputs, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-10)
    for x, y in zip(eager.layers(), ours.layers(), strict=True):
        for a, b in zip(x.get_history(), y.get_history(), strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=1e-10)
    assert report["runtime"]["plain_calls"] == 0


def test_a_history_is_copied_once_a_block(
    videos: tuple[Refiner, Refiner, dict[str, Any]],
) -> None:
    """Not in each of its four calls, though the trimmed one is a view of a longer tensor, and
    though it had other lengths before."""
    frames = [0, BLOCK, WINDOW - SINK, WINDOW - SINK]
    assert videos[2]["runtime"]["refreshed_slots"] == sum(frames) * TOKENS


def test_what_is_decided_for_a_full_window() -> None:
    """The histories stay where they are, and sink and new rows are written beside them. The sinks'
    keys cannot be kept rotated: their table is a tensor argument, known on the device only."""
    model = build()
    with torch.no_grad():
        refiner = Refiner(model, model).video(2)
        start = SINK + 2 * BLOCK
        refiner.place_sink(start)
        x = refiner.frames(BLOCK)
        given = refiner.arguments(x, range(start, start + BLOCK), "inject", 1.0)
        report = rtc.explain(model, options=rtc.Options(lowering="eager"), **given)
    assert_pass_counts(report, {"hoist_rope": 0, "ring_cache": 2 * LAYERS})
    names = {c["name"].rpartition(".")[2] for c in report.to_dict()["graphs"][0]["caches"]}
    assert names == {"history_k", "history_v"}
