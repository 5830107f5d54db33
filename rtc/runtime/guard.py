"""A cache in ring order must not be read as if it were in order.

While rtc owns a cache, its tensor object is given the class ``RingCache``: any torch function that
touches it first puts the slots back into the program's order, then runs as usual. Between calls the
user sees current values, whatever they do with the tensor. (Assigning ``__class__`` to a tensor is
how torch's own lazy parameters turn into real ones.)
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_STATES: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}

# Asking for these tells nothing about the values.
_METADATA = {
    torch.Tensor.shape.__get__,
    torch.Tensor.dtype.__get__,
    torch.Tensor.device.__get__,
    torch.Tensor.layout.__get__,
    torch.Tensor.ndim.__get__,
    torch.Tensor.requires_grad.__get__,
    torch.Tensor.is_leaf.__get__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.stride,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_inference,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor._version.__get__,
}


class RingCache(torch.Tensor):
    """A cache tensor whose slots lie in ring order; see the module's docstring."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
        tree = torch.utils._pytree.tree_leaves((args, kwargs))
        for t in tree:
            if type(t) is RingCache:
                restore(t)
        return func(*args, **kwargs)


def possible(t: torch.Tensor) -> bool:
    """Whether the tensor object can be guarded: a plain tensor whose memory nobody else holds."""
    if type(t) is RingCache:
        return True
    return type(t) is torch.Tensor and t._base is None


def put(t: torch.Tensor, state: Any) -> None:
    _STATES[id(t)] = (weakref.ref(t), state)
    t.__class__ = RingCache


def lift(t: torch.Tensor) -> None:
    """Make it a plain tensor again, values as they lie."""
    if type(t) is RingCache:
        t.__class__ = torch.Tensor
        _STATES.pop(id(t), None)


def restore(t: torch.Tensor) -> None:
    """Put the slots back in order; the whole cohort follows."""
    ref, state = _STATES[id(t)]
    assert ref() is t
    for r in state.refs:
        other = r()
        if other is not None:
            lift(other)
    state.materialize()
    state.touched_outside()
