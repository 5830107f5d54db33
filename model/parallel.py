"""Tensor parallelism: which part of a `DiT` a rank holds, and the sum over ranks.

Attention heads and the SwiGLU's hidden width are split evenly, in rank order. linear1 is split by
its output rows: q, k, v by heads, act and up by hidden width, so a rank's rows are five blocks of
the full weight. linear2 is split by its input columns: the rank's heads, then its hidden width.
Its products are partial sums, added over all ranks: one all-reduce a block and denoising pass.
Caches hold the rank's own heads. Everything else is replicated, and so computed alike everywhere.

Shapes: H heads, D channels of a head, E = H * D model width, F hidden width, W ranks.

In FP8 a row of linear2's weight has one scale, that of the full row, on all ranks. Activations are
quantized with the rank's own scale a token, from its own columns: a scale over all columns would
cost one more all-reduce before each product. So sharded FP8 rounds other than unsharded FP8 does.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from .config import Config


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `world` equal ones. `group` is the name of the process group that adds up.

    Without a group a model can be built and looked at, but not run on more than one rank. Raises
    ValueError where rank and world do not fit.
    """

    rank: int = 0
    world: int = 1
    group: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(
                f"Shard: rank must lie in 0..world-1, got rank={self.rank}, world={self.world}"
            )

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Self:
        """This process's part among those of an initialized group, by default all of them."""
        group = group or dist.group.WORLD
        if group is None:
            raise ValueError("Shard.of: call torch.distributed.init_process_group first")
        return cls(group.rank(), group.size(), group.group_name)

    def check(self, cfg: Config) -> None:
        """ValueError where `world` does not divide what it has to."""
        for name in ("heads", "hidden"):
            size = getattr(cfg, name)
            if size % self.world:
                raise ValueError(
                    f"Shard: {self.world} ranks do not divide {name}={size} evenly; "
                    f"choose a degree that divides {name}, or another {name}"
                )
        for name in ("dim", "hidden"):
            part = getattr(cfg, name) // self.world
            if cfg.fp8_linears and part % 16:
                raise ValueError(
                    f"Shard: fp8_linears needs {name} / world to be a multiple of 16, "
                    f"got {part} with {name}={getattr(cfg, name)} on {self.world} ranks"
                )

    def heads(self, cfg: Config) -> int:
        """H / W, the heads of this rank."""
        return cfg.heads // self.world

    def hidden(self, cfg: Config) -> int:
        """F / W, the SwiGLU's width on this rank."""
        return cfg.hidden // self.world

    def dim(self, cfg: Config) -> int:
        """E / W, the width of this rank's heads."""
        return cfg.dim // self.world

    def outputs(self, cfg: Config) -> Tensor:
        """Output rows of the full linear1 that this rank holds, in its order: int64, ascending."""
        return self._blocks([cfg.dim] * 3 + [cfg.hidden] * 2)

    def inputs(self, cfg: Config) -> Tensor:
        """Input columns of the full linear2 that this rank holds, as `outputs`."""
        return self._blocks([cfg.dim, cfg.hidden])

    def _blocks(self, sizes: list[int]) -> Tensor:
        parts, start = [], 0
        for size in sizes:
            part = size // self.world
            parts.append(torch.arange(part) + start + self.rank * part)
            start += size
        return torch.cat(parts)

    def sum(self, x: Tensor) -> Tensor:
        """x added over all ranks, in x's dtype; x itself where there is one rank."""
        if self.world == 1:
            return x
        if self.group is None:
            raise RuntimeError("this Shard has no process group: make it with Shard.of(group)")
        return collectives.all_reduce(x, "sum", self.group)  # type: ignore[arg-type]


WHOLE = Shard()
"""The one rank of an unsharded model."""
