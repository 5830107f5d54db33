"""Rotary position embedding over three axes: frame t, latent row h, latent column w.

Shapes: N slots or tokens, B batch, H heads, D head channels.

Positions go by slot order. The sink lies at t = 0, whatever the step; the window's frame f
(0 = oldest) lies at t = 1 + step % reset_period + f. As the window moves by one frame a step,
a kept slot keeps its absolute position, until a reset makes all of them jump back.
"""

import torch
from torch import Tensor

from .config import Config


def slot_positions(cfg: Config, step: int, device: torch.device | None = None) -> Tensor:
    """Positions (t, h, w) of every slot of a cache in step `step`: int64 [S, 3].

    `step` stays symbolic under torch.compile: it enters by arithmetic only.
    """
    sink = torch.arange(cfg.sink, device=device)
    window = torch.arange(cfg.window * cfg.tokens, device=device)
    t = torch.cat([torch.zeros_like(sink), 1 + step % cfg.reset_period + window // cfg.tokens])
    # Conditioning tokens come after the grid, so they lie on the rows below it.
    token = torch.cat([sink, window % cfg.tokens])
    return torch.stack([t, token // cfg.grid_w, token % cfg.grid_w], dim=-1)


def rope_tables(
    positions: Tensor, axes: tuple[int, int, int], theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [N, D] for positions [N, 3], in the dtype that `apply_rope` computes in.

    Angles are formed in float64, as positions grow while the session lasts.
    """
    angles = []
    for axis, channels in enumerate(axes):
        exponent = torch.arange(0, channels, 2, device=positions.device, dtype=torch.float64)
        frequency = theta ** (-exponent / channels)
        angles.append(positions[:, axis, None] * frequency)
    angle = torch.cat(angles, dim=-1)  # [N, D / 2]
    angle = torch.cat([angle, angle], dim=-1)
    wide = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(wide), angle.sin().to(wide)


def apply_rope(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the channel pairs (i, i + D / 2) of x [B, N, H, D] by its slots' angles [N, D]."""
    cos, sin = (table[:, None, :] for table in tables)  # [N, 1, D]
    wide = x.to(cos.dtype)
    low, high = wide.chunk(2, dim=-1)
    rotated = torch.cat([-high, low], dim=-1)
    return (wide * cos + rotated * sin).to(x.dtype)
