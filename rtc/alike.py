"""Places that are like one another but for a number: ``L['caches'][3]['end']`` of every layer.

Works on Dynamo's names of places, which are expressions, and on what they lead to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_NUMBERED = re.compile(r"\[('?)(\d+)\1\]")  # of a list, or of a module's children
_MOST = 1024  # items of one container


def alike(holder: str, key: Any, scope: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(holder, key) of the places that differ from ``holder``[``key``] in one number.

    ``key`` itself counts where it is the number: a list of tensors.
    """
    for m in _NUMBERED.finditer(holder):
        before, quote, after = holder[: m.start()], m[1], holder[m.end() :]
        for k in _others(before, scope, int(m[2]), bool(quote)):
            yield f"{before}[{quote}{k}{quote}]{after}", key
    if type(key) is int:
        for k in _others(holder, scope, key, False):
            yield holder, k


def _others(name: str, scope: dict[str, Any], number: int, digits: bool) -> list[int]:
    """The other numbers by which a container has items; ``digits``: they are strings there."""
    try:
        found = eval(name, scope)
    except Exception:  # a property of the user's may raise anything
        return []
    if digits:
        if not isinstance(found, dict):
            return []
        keys = [int(k) for k in found if isinstance(k, str) and k.isdigit() and str(int(k)) == k]
    elif isinstance(found, dict):
        keys = [k for k in found if type(k) is int and k >= 0]
    elif isinstance(found, (list, tuple)):
        keys = list(range(len(found)))
    else:
        return []
    return [k for k in keys if k != number][:_MOST]


__all__ = ["alike"]
