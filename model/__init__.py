"""The reference autoregressive video DiT. It knows nothing of the compiler."""

from .build import build, example_inputs, example_prompt
from .config import PRESETS, Config
from .dit import DiT
from .linear import Float8Linear
from .parallel import Shard

__all__ = [
    "PRESETS",
    "Config",
    "DiT",
    "Float8Linear",
    "Shard",
    "build",
    "example_inputs",
    "example_prompt",
]
