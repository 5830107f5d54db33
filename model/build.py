"""Build a `DiT` with seeded random weights, and inputs to run it with."""

import torch
from torch import Tensor, nn

from .config import PRESETS, Config
from .dit import Block, DiT
from .linear import Float8Linear
from .parallel import WHOLE, Shard

_DRAWN = 2**26
"""Elements of a linear's weight that are drawn at a time: 256 MiB in float32."""


def resolve(preset: str | Config) -> Config:
    """The config of a preset's name; a config is returned as it is. ValueError if unknown."""
    if isinstance(preset, Config):
        return preset
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}, choose one of {', '.join(PRESETS)}")
    return PRESETS[preset]


def build(
    preset: str | Config,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shard: Shard = WHOLE,
) -> DiT:
    """A DiT in eval mode, zero caches, weights drawn on `device` from `seed`.

    Linears are drawn some full rows at a time, of which a `shard` keeps its own: every rank's
    weights are parts of the same full ones, and the model never takes more than its own weights
    and caches (`Config.weight_bytes` and `Config.cache_bytes` of an unsharded one) plus a few such
    parts. FP8 linears are drawn in float32. On the meta device nothing is allocated or drawn.
    Raises ValueError for an unknown preset, or a shard that does not divide it.
    """
    with torch.device("meta"):  # skips nn.Linear's own initialisation
        model = DiT(resolve(preset), shard).to(dtype).eval()
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    linears = {
        f"{name}.{leaf}": linear
        for name, block in model.named_modules()
        if isinstance(block, Block)
        for leaf, linear in (("linear1", block.linear1), ("linear2", block.linear2))
    }
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if owner not in linears:
            _draw(name, parameter, generator)
        elif leaf == "weight":
            _draw_linear(owner, linears[owner], model, generator)
    model.reset_session()
    return model


def _draw(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Weights that keep activations near unit size, and no branch of the model at zero."""
    parameter.normal_(generator=generator)
    if ".norm_" in name:
        parameter.mul_(0.1).add_(1.0)
    elif name.endswith(("modulation", "time_out.weight", "cond_slots")):
        fan_in = parameter.shape[1] if name.endswith("weight") else 1
        parameter.mul_(0.5 * fan_in**-0.5)
    else:
        parameter.mul_(parameter.shape[1] ** -0.5)


def _draw_linear(name: str, linear: nn.Module, model: DiT, generator: torch.Generator) -> None:
    """As `_draw` draws it, in parts of _DRAWN elements of the full weight; keeps the shard's."""
    cfg, shard, fp8 = model.cfg, model.shard, isinstance(linear, Float8Linear)
    weight = linear.weight
    assert isinstance(weight, Tensor)
    if name.endswith("linear1"):
        outputs, inputs = 3 * cfg.dim + 2 * cfg.hidden, cfg.dim
        kept, columns = shard.outputs(cfg), None
    else:
        outputs, inputs = cfg.dim, cfg.dim + cfg.hidden
        kept = torch.arange(outputs)
        columns = shard.inputs(cfg).to(weight.device) if shard.world > 1 else None
    rows = max(1, _DRAWN // inputs)
    for start in range(0, outputs, rows):
        count = min(rows, outputs - start)
        part = torch.empty(
            count, inputs, device=weight.device, dtype=torch.float32 if fp8 else weight.dtype
        )
        part.normal_(generator=generator).mul_(inputs**-0.5)
        first, end = (
            int(n) for n in torch.searchsorted(kept, torch.tensor([start, start + count]))
        )
        if end - first < count:
            part = part[(kept[first:end] - start).to(part.device)]
        if isinstance(linear, Float8Linear):
            linear.set_rows(first, part, columns)
        else:
            weight[first:end].copy_(part if columns is None else part[:, columns])


def example_inputs(
    preset: str | Config,
    step: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, int]:
    """(noise [B, T, C_in], cond [B, cond_dim], step), the arguments of `DiT.forward`.

    Drawn on the CPU in float64 from (seed, step) alone, so equal on every device.
    """
    cfg = resolve(preset)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    noise = _randn((cfg.batch, cfg.tokens, cfg.in_channels), generator).to(device, dtype)
    cond = _randn((cfg.batch, cfg.cond_dim), generator).to(device, dtype)
    return noise, cond, step


def example_prompt(
    preset: str | Config,
    length: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A prompt [B, length, cond_dim] for `DiT.first_pass`."""
    cfg = resolve(preset)
    generator = torch.Generator().manual_seed(seed)
    return _randn((cfg.batch, length, cfg.cond_dim), generator).to(device, dtype)


def _randn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
