"""Errors that rtc raises. Each says what was wrong, where in the user's code, and what to do."""

from __future__ import annotations


class RtcError(Exception):
    """Base of all errors that rtc raises on purpose."""


class OptionsError(RtcError, ValueError):
    """Options that contradict each other or the model."""


class UnsupportedError(RtcError):
    """This torch, device, dtype or construct is not supported."""


class StateError(RtcError, RuntimeError):
    """A cache that rtc keeps was freed, aliased or written in a way that cannot be made good."""


class HostSyncError(RtcError, RuntimeError):
    """The model reads device data on the host in the middle of a step."""


class RanksDisagreeError(RtcError, RuntimeError):
    """Ranks of one process group are about to run different programs together."""


class RankLostError(RtcError, RuntimeError):
    """A rank failed, was killed, or never came: what this rank waits for will not happen."""
