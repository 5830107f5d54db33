"""AnyFlow-FAR of diffusers: raw keys in the cache, RoPE over all of them in every denoising call.

The pipeline's loop: some denoising calls a chunk, which only read the caches (the new keys are
concatenated, then everything is rotated and padded), then one cache step, which encodes all chunks
so far anew and stores them. Chunks older than the last two move into a second, compressed cache.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import rtc

pytest.importorskip("diffusers.models.transformers.transformer_anyflow_far")
from diffusers import AnyFlowFARTransformer3DModel

pytestmark = pytest.mark.third_party

PARTITION = [2, 2, 2, 2]  # latent frames of each chunk
PASSES = 25  # denoising calls a chunk
SIZE = 8  # height and width of the latents: 16 tokens a frame, 4 in the compressed cache
TOKENS = (SIZE // 2) ** 2
LAYERS = 2


def build() -> Any:
    torch.manual_seed(0)
    model = AnyFlowFARTransformer3DModel(
        patch_size=(1, 2, 2), compressed_patch_size=(1, 4, 4), full_chunk_limit=3,
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=256, ffn_dim=32, num_layers=LAYERS, cross_attn_norm=True, rope_max_seq_len=32,
        gate_value=0.25, deltatime_type="r",
    )  # fmt: skip
    return model.double().eval()


def empty_caches(model: Any) -> dict[int, dict[str, torch.Tensor]]:
    """[2, B, H, slots, D] for full and for compressed chunks, as the pipeline allocates them."""
    config, longest = model.config, max(PARTITION)
    full = config.full_chunk_limit * longest * TOKENS
    compressed = (len(PARTITION) - config.full_chunk_limit + 1) * longest * (SIZE // 4) ** 2
    heads, dim = config.num_attention_heads, config.attention_head_dim
    return {
        layer: {
            "full_cache": torch.zeros(2, 1, heads, full, dim, dtype=model.dtype),
            "compressed_cache": torch.zeros(2, 1, heads, compressed, dim, dtype=model.dtype),
        }
        for layer in range(config.num_layers)
    }


@dataclass
class Generation:
    """One video: ``outputs`` of every denoising call, and the ``caches`` after each cache step."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    caches: list[torch.Tensor] = field(default_factory=list)


def generate(
    call: Any, model: Any, seed: int, *, passes: int = PASSES, replace: bool = False,
    edit: tuple[int, int] | None = None,
) -> Generation:  # fmt: skip
    """The loop of diffusers' AnyFlowFARPipeline around ``call``.

    replace   the caller swaps every cache tensor for a copy after each cache step
    edit      (chunk, pass) before which the caller writes into a cache
    """
    rng = torch.Generator().manual_seed(seed)
    caches, flag = empty_caches(model), {"num_cached_chunks": 0, "is_cache_step": False}
    text = torch.randn(1, 5, 16, generator=rng, dtype=model.dtype)
    clean: list[torch.Tensor] = []  # latents of the chunks so far
    found, times = Generation(), torch.linspace(1000, 0, passes + 1).tolist()

    def run(latents: torch.Tensor, chunk: int, t: float, r: float, mask: Any = None) -> Any:
        frames = latents.shape[1]
        extra = {} if mask is None else {"attention_mask": mask}
        return call(
            hidden_states=latents, chunk_partition=PARTITION[: chunk + 1],
            timestep=torch.full((1, frames), t), r_timestep=torch.full((1, frames), r),
            encoder_hidden_states=text, attention_kwargs=None, return_dict=False,
            kv_cache=caches, kv_cache_flag=copy.deepcopy(flag), **extra,
        )[0]  # fmt: skip

    for chunk, frames in enumerate(PARTITION):
        x = torch.randn(1, frames, 4, SIZE, SIZE, generator=rng, dtype=model.dtype)
        for i in range(passes):
            if edit == (chunk, i):
                caches[0]["full_cache"][0, :, :, :TOKENS].mul_(-0.5)
            velocity = run(x, chunk, times[i], times[i + 1])
            found.outputs.append(velocity.clone())
            x = x - velocity / passes
        clean.append(x)
        if chunk == len(PARTITION) - 1:
            break
        flag["is_cache_step"] = True
        mask = model.build_attention_mask(
            chunk_partition=PARTITION[: chunk + 1], height=SIZE, width=SIZE, mode="cache"
        )
        run(torch.cat(clean, dim=1), chunk, 0.0, 0.0, mask)
        flag["num_cached_chunks"] += 1
        flag["is_cache_step"] = False
        found.caches += [t.clone() for layer in caches.values() for t in layer.values()]
        if replace:
            caches = {i: {k: t.clone() for k, t in c.items()} for i, c in caches.items()}
    return found


@dataclass
class Case:
    eager: Generation
    compiled: Generation
    report: dict[str, Any]  # after this generation


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    """Three videos through one compiled model: compiling is what costs time here."""
    kinds: dict[str, dict[str, Any]] = {
        "steady": {"seed": 1},
        "replaced": {"seed": 2, "passes": 4, "replace": True},
        "edited": {"seed": 3, "passes": 4, "edit": (2, 2)},
    }
    model, found = build(), {}
    with rtc.compile(model, options=rtc.Options(lowering="eager")) as compiled, torch.no_grad():
        for kind, how in kinds.items():
            eager = generate(model, model, **how)
            ours = generate(compiled, model, **how)
            found[kind] = Case(eager, ours, compiled.report().to_dict())
    return found


# The model rounds its hidden states to float32 at every norm, so that a last bit elsewhere may show
# up as 1e-7. It does not: hoisting runs the same operations on the same values.
@pytest.mark.parametrize("kind", ["steady", "replaced", "edited"])
def test_outputs_and_caches_equal_eager(cases: dict[str, Case], kind: str) -> None:
    case = cases[kind]
    pairs = [
        *zip(case.eager.outputs, case.compiled.outputs, strict=True),
        *zip(case.eager.caches, case.compiled.caches, strict=True),
    ]
    for eager, compiled in pairs:
        torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-10)
    if kind == "steady":
        assert len(case.eager.outputs) >= 100


def test_the_edit_matters(cases: dict[str, Case]) -> None:
    """Else a compiled model that misses it would pass."""
    model, at = build(), 2 * 4 + 2  # chunk and pass of the edit, at 4 passes a chunk
    with torch.no_grad():
        untouched = generate(model, model, 3, passes=4).outputs
    edited = cases["edited"].eager.outputs
    assert all(torch.equal(a, b) for a, b in zip(untouched[:at], edited[:at], strict=True))
    assert (untouched[at] - edited[at]).abs().max() > 1e-4


def test_a_graph_for_each_shape_and_no_more(cases: dict[str, Case]) -> None:
    """One for the denoising calls of a chunk, one for its cache step; new tensors need none."""
    for case in cases.values():
        assert len(case.report["graphs"]) == 2 * len(PARTITION) - 1
        assert case.report["runtime"]["plain_calls"] == 0


def test_rope_of_the_cached_slots_is_hoisted(cases: dict[str, Case]) -> None:
    """Keys (RoPE and padding) and values (padding) of both layers, wherever chunks are cached."""
    graphs = cases["steady"].report["graphs"]
    applied = [next(p["applied"] for p in g["passes"] if p["name"] == "hoist_rope") for g in graphs]
    denoising, caching = applied[0::2], applied[1::2]
    assert denoising == [0, 2 * LAYERS, 2 * LAYERS, 2 * LAYERS]
    assert caching == [0, 0, 0]


def test_the_larger_of_two_caches_in_one_read_is_kept(cases: dict[str, Case]) -> None:
    """The compressed chunks count as new rows to it, and are rotated in every call."""
    names = [c["name"] for c in cases["steady"].report["graphs"][-1]["caches"]]
    assert len(names) == 2 * LAYERS
    assert all("full_cache" in name for name in names)


def test_a_cached_slot_is_rotated_once_a_chunk(cases: dict[str, Case]) -> None:
    """Not in each of its 25 calls; once more after the caller has written into the cache."""
    cached = [0, 2 * TOKENS, 4 * TOKENS, 4 * TOKENS]  # slots of the full cache that a chunk reads
    once = 2 * sum(cached)  # keys and values; layers share the bookkeeping
    refreshed = [cases[k].report["runtime"]["refreshed_slots"] for k in cases]
    assert refreshed[0] == once
    assert refreshed[1] - refreshed[0] == once
    assert refreshed[2] - refreshed[1] == once + 2 * cached[2]
