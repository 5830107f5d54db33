"""Build a `DiT` with seeded random weights, and inputs to run it with."""

import torch
from torch import Tensor

from .config import PRESETS, Config
from .dit import DiT


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

    On the meta device nothing is allocated or drawn.
    """
    with torch.device("meta"):  # skips nn.Linear's own initialisation
        model = DiT(resolve(preset)).to(dtype).eval()
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        _draw(name, parameter, generator)
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
