"""Compile plain PyTorch models for real time."""

from typing import TYPE_CHECKING, Any

from rtc import _paths

_paths.use_checkout()

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rtc.compiled import Compiled, compile, explain
    from rtc.errors import (
        HostSyncError,
        OptionsError,
        RankLostError,
        RanksDisagreeError,
        RtcError,
        StateError,
        UnsupportedError,
    )
    from rtc.options import Options
    from rtc.report import Report

# Names are imported on first use: the pytest plugin loads in every run of every user and must not
# import torch.
_HOME = {
    **dict.fromkeys(("Compiled", "compile", "explain"), "rtc.compiled"),
    **dict.fromkeys(
        (
            "HostSyncError",
            "OptionsError",
            "RankLostError",
            "RanksDisagreeError",
            "RtcError",
            "StateError",
            "UnsupportedError",
        ),
        "rtc.errors",
    ),
    "Options": "rtc.options",
    "Report": "rtc.report",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module 'rtc' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__all__ = [
    "Compiled",
    "HostSyncError",
    "Options",
    "OptionsError",
    "RankLostError",
    "RanksDisagreeError",
    "Report",
    "RtcError",
    "StateError",
    "UnsupportedError",
    "__version__",
    "compile",
    "explain",
]
