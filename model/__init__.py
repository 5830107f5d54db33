"""The reference autoregressive video DiT. It knows nothing of the compiler."""

from .build import build, example_inputs, example_prompt
from .config import PRESETS, Config
from .dit import DiT
from .linear import Float8Linear

__all__ = ["PRESETS", "Config", "DiT", "Float8Linear", "build", "example_inputs", "example_prompt"]
