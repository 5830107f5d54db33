"""A language model of transformers: not what rtc is for, so it must be right or refused clearly."""

from typing import Any

import pytest
import torch

import rtc
from rtc.testing import assert_refused

pytest.importorskip("transformers")
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

pytestmark = pytest.mark.third_party

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def make_cache(kind: str) -> Any:
    if kind == "static":
        return StaticCache(config=CONFIG, max_cache_len=32)
    return DynamicCache(config=CONFIG)


def decode(call: Any, model: Any, kind: str, steps: int) -> tuple[list[torch.Tensor], Any]:
    """Logits of greedy decoding after an eager prefill, and the cache."""
    cache = make_cache(kind)
    token = torch.arange(5)[None] * 7 % 64
    with torch.no_grad():
        logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
    found = []
    for _ in range(steps):
        token = logits[:, -1:].argmax(-1)
        logits = call(input_ids=token, past_key_values=cache, use_cache=True).logits
        found.append(logits.clone())
    return found, cache


def compiled_and_eager(kind: str, steps: int) -> tuple[Any, Any, Any]:
    """(logits, cache) of both, and the report."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).double().eval()
    with torch.no_grad():
        eager = decode(model, model, kind, steps)
    with rtc.compile(model, options=rtc.Options(lowering="eager")) as compiled:
        return decode(compiled, model, kind, steps), eager, compiled.report()


@pytest.mark.parametrize(("kind", "steps"), [("static", 20), ("dynamic", 2)])
def test_equals_eager(kind: str, steps: int) -> None:
    (ours, mine), (eager, theirs), report = compiled_and_eager(kind, steps)
    for a, b in zip(eager, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-10)
    for x, y in zip(theirs.layers, mine.layers, strict=True):
        torch.testing.assert_close(y.keys, x.keys, rtol=0, atol=1e-10)
        torch.testing.assert_close(y.values, x.values, rtol=0, atol=1e-10)
    assert sum(report.counts().values()) == 0
    if kind == "static":
        assert_refused(report, "ring_cache", r"layers\[0\]\.keys: .*cache_utils\.py:\d+ in update")
        assert len(report.to_dict()["graphs"]) == 1


def test_the_refusal_names_the_counter() -> None:
    """StaticCache counts its tokens in a tensor: the host does not know where rows are written."""
    _, _, report = compiled_and_eager("static", 1)
    assert_refused(report, "ring_cache", r"cumulative_length, known on the device only")
