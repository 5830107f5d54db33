"""Tensors that hang on a call's arguments."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

_LEAVES = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.Size)
_NOT_WALKED = (torch.nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)
_MOST = 100_000  # things looked at


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """In lists, tuples, dicts and objects, however deep; not in modules, which hold a model."""
    stack, seen, count = [values], set[int](), 0
    while stack:
        x = stack.pop()
        if isinstance(x, torch.Tensor):
            yield x
            continue
        if isinstance(x, _LEAVES):
            continue
        count += 1
        if count > _MOST:
            return
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, dict):
            stack.extend(x.values())
        elif isinstance(x, (list, tuple, set, frozenset, deque)):
            stack.extend(x)
        if not isinstance(x, _NOT_WALKED) and type(x) not in (dict, list, tuple):
            stack.extend(_held(x))


def _held(x: Any) -> list[Any]:
    held = [*getattr(x, "__dict__", {}).values()]
    for cls in type(x).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                held.append(object.__getattribute__(x, name))
            except AttributeError:
                continue
    return held


__all__ = ["tensors"]
