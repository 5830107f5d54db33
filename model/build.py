"""Build a `DiT` with seeded random weights, and inputs to run it with."""

import torch
from torch import Tensor

from .config import PRESETS, Config
from .dit import DiT
from .linear import Float8Linear

_DRAWN = 2**26
"""Elements of an FP8 weight that are drawn at a time: 256 MiB in float32."""


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
) -> DiT:
    """A DiT in eval mode, zero caches, weights drawn on `device` from `seed`.

    FP8 linears are drawn in float32, some rows at a time, so that the model never takes more than
    its `Config.weight_bytes` and `Config.cache_bytes` plus a few such parts. On the meta device
    nothing is allocated or drawn.
    """
    with torch.device("meta"):  # skips nn.Linear's own initialisation
        model = DiT(resolve(preset)).to(dtype).eval()
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    fp8 = {name: m for name, m in model.named_modules() if isinstance(m, Float8Linear)}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if owner not in fp8:
            _draw(name, parameter, generator)
        elif leaf == "weight":
            _draw_fp8(fp8[owner], generator)
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


def _draw_fp8(linear: Float8Linear, generator: torch.Generator) -> None:
    """As `_draw` draws a linear's weight, in parts of _DRAWN elements."""
    outputs, inputs = linear.weight.shape
    rows = max(1, _DRAWN // inputs)
    for start in range(0, outputs, rows):
        part = torch.empty(min(rows, outputs - start), inputs, device=linear.weight.device)
        linear.set_rows(start, part.normal_(generator=generator).mul_(inputs**-0.5))


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
