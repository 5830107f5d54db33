"""Tensors that hang on a call's arguments."""

from __future__ import annotations

import math
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

MOST = 10_000  # things looked at in the arguments of every call: a tokenizer has a million
_LEAVES = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.Size)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_NOT_WALKED = (torch.nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


def tensors(values: Any, most: float = math.inf) -> Iterator[torch.Tensor]:
    """In lists, tuples, dicts and objects, however deep; not in modules, which hold a model.

    ``most``: things looked at, after which it ends; containers of more are passed by.
    """
    stack, seen, count = [values], set[int](), 0
    while stack:
        x = stack.pop()
        count += 1
        if count > most:
            return
        kind = type(x)  # a proxy's __class__ may raise
        if issubclass(kind, torch.Tensor):
            yield x
            continue
        if issubclass(kind, _LEAVES) or id(x) in seen:
            continue
        seen.add(id(x))
        if issubclass(kind, (dict, *_SEQUENCES)) and len(x) > most:
            continue
        if issubclass(kind, dict):
            stack.extend(dict.values(x))
        elif issubclass(kind, _SEQUENCES):
            stack.extend(x)
        if kind not in (dict, *_SEQUENCES) and not issubclass(kind, _NOT_WALKED):
            stack.extend(_held(x))


def _held(x: Any) -> list[Any]:
    """Attributes, without asking the object's own ``__getattr__``."""
    held: list[Any] = []
    names = [
        name
        for cls in type(x).__mro__
        for slots in (cls.__dict__.get("__slots__", ()),)
        for name in ((slots,) if isinstance(slots, str) else slots)
    ]
    for name in ("__dict__", *names):
        try:
            found = object.__getattribute__(x, name)
        except Exception:
            continue
        held += found.values() if name == "__dict__" else [found]
    return held


__all__ = ["MOST", "tensors"]
