"""Compile plain PyTorch models for real time."""

from rtc import _paths

_paths.use_checkout()

__version__ = "0.1.0"

from rtc.compiled import Compiled, compile, explain  # noqa: E402
from rtc.errors import (  # noqa: E402
    HostSyncError,
    OptionsError,
    RtcError,
    StateError,
    UnsupportedError,
)
from rtc.options import Options  # noqa: E402
from rtc.report import Report  # noqa: E402

__all__ = [
    "Compiled",
    "HostSyncError",
    "Options",
    "OptionsError",
    "Report",
    "RtcError",
    "StateError",
    "UnsupportedError",
    "__version__",
    "compile",
    "explain",
]
