"""What the demo runs, checked before anything is built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from rtc.demo.machine import available_bytes
from rtc.errors import OptionsError
from rtc.model import PRESETS, Config
from rtc.options import Options
from rtc.show.facts import bytes_text

COPIES = 4  # models alive at once: eager, torch.compile, rtc, and one with passes off


def without(options: Options, off: Iterable[str]) -> Options:
    """``options`` with the passes ``off`` switched off."""
    fields = Options.__dataclass_fields__
    own = {name: False for name in off if name in fields}
    others = {name: False for name in off if name not in fields}
    return replace(options, passes={**options.passes, **others}, **own)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Settings:
    """``chunks``: steps to stream. ``threads``: None for as many as there are free cores.

    ``quick``: neither passes switched off nor warm compiles.

    Raises OptionsError (a ValueError) for what this machine cannot run.
    """

    preset: str = "cpu"
    chunks: int = 100
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    threads: int | None = None
    quick: bool = False
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise OptionsError(f"unknown preset {self.preset!r}: one of {', '.join(PRESETS)}")
        if self.chunks < 4:
            raise OptionsError(f"--chunks {self.chunks}: at least 4, the first two are not timed")
        if self.threads is not None and self.threads < 1:
            raise OptionsError(f"--threads {self.threads}: at least 1")
        try:
            kind = torch.device(self.device).type
        except RuntimeError:
            raise OptionsError(f"--device {self.device!r}: cpu or cuda") from None
        if kind not in ("cpu", "cuda"):
            raise OptionsError(f"--device {self.device!r}: cpu or cuda")
        if kind == "cuda" and not torch.cuda.is_available():
            raise OptionsError("--device cuda: torch sees no CUDA GPU here; use --device cpu")
        need, have = self.needed_bytes, available_bytes(self.device)
        if have is not None and need > have:
            raise OptionsError(
                f"preset {self.preset} in {self.dtype} needs about {bytes_text(need)} for "
                f"{COPIES} copies and a float64 reference; {bytes_text(have)} are free: "
                "choose a smaller preset"
            )

    @property
    def config(self) -> Config:
        return PRESETS[self.preset]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def needed_bytes(self) -> int:
        """Weights and caches of all copies, twice the caches for views."""
        size = self.torch_dtype.itemsize
        one = self.config.weight_bytes(size) + 2 * self.config.cache_bytes(size)
        reference = 0 if self.dtype == "float64" else 8 * self.config.params
        reference += 0 if self.dtype == "float64" else self.config.cache_bytes(8)
        return COPIES * one + reference

    @property
    def resets(self) -> list[int]:
        """Chunks at which the positions jump back."""
        return list(range(self.config.reset_period, self.chunks, self.config.reset_period))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "options": self.options.to_dict(), "config": asdict(self.config)}
