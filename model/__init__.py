"""The reference autoregressive video DiT. It knows nothing of the compiler."""

from .build import build, example_inputs, example_prompt
from .config import PRESETS, Config
from .dit import DiT

__all__ = ["PRESETS", "Config", "DiT", "build", "example_inputs", "example_prompt"]
