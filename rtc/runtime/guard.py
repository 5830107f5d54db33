"""A cache in ring order must not be read as if it were in order, nor written unseen.

While rtc owns a cache, its tensor object is given the class ``RingCache``: any torch function that
touches it first puts the slots back into the program's order, then runs as usual. Between calls the
user sees current values, whatever they do with the tensor. (Assigning ``__class__`` to a tensor is
how torch's own lazy parameters turn into real ones.)
"""

from __future__ import annotations

import copy
from typing import Any

import torch

_GETTERS: Any = torch.Tensor  # the class's own attributes, as __torch_function__ names them

# These hand out memory: later reads and writes of it pass by the tensor object and its version.
_EXPORTS = {
    torch.Tensor.data_ptr,
    torch.Tensor.__dlpack__,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.share_memory_,
}
# A write through the result is not counted, but the result's life shows in the storage's use count.
_UNCOUNTED = {_GETTERS.data.__get__, _GETTERS.data.__set__}

# Asking for these tells nothing about the values.
_METADATA = {
    _GETTERS.shape.__get__,
    _GETTERS.dtype.__get__,
    _GETTERS.device.__get__,
    _GETTERS.layout.__get__,
    _GETTERS.ndim.__get__,
    _GETTERS.requires_grad.__get__,
    _GETTERS.is_leaf.__get__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.stride,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_inference,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    _GETTERS._version.__get__,
}


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    for t in torch.utils._pytree.tree_leaves((args, kwargs)):
        if type(t) in _PLAIN:
            restore(t, exported=func in _EXPORTS, uncounted=func in _UNCOUNTED)
    return func(*args, **kwargs)


class RingCache(torch.Tensor):
    """A cache tensor whose slots lie in ring order; see the module's docstring."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class RingParameter(torch.nn.Parameter):
    """The same for a cache that is a parameter.

    Parameter's own methods for copying look at the class, and ask no torch function.
    """

    def __deepcopy__(self, memo: Any) -> Any:
        restore(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        restore(self)
        return self.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


_GUARDED: dict[type, type] = {torch.Tensor: RingCache, torch.nn.Parameter: RingParameter}
_PLAIN = {guarded: plain for plain, guarded in _GUARDED.items()}


def alone(t: torch.Tensor) -> bool:
    """Whether no other tensor (view, detached alias, NumPy array) holds the memory."""
    if t._base is not None:
        return False
    storage = t.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= _ALONE


def _alone() -> int:
    t = torch.zeros(1)
    storage = t.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


_ALONE = _alone()


def possible(t: torch.Tensor) -> bool:
    """Whether nobody can look at the values but through this tensor object."""
    lift(t)
    return type(t) in _GUARDED and alone(t)


def put(t: torch.Tensor) -> None:
    """Guard the tensor object."""
    if type(t) in _GUARDED:
        t.__class__ = _GUARDED[type(t)]


def lift(t: torch.Tensor) -> None:
    """Make it a plain tensor again, values as they lie."""
    if type(t) in _PLAIN:
        t.__class__ = _PLAIN[type(t)]


def restore(t: torch.Tensor, *, exported: bool = False, uncounted: bool = False) -> None:
    """Put the slots back in order; all caches that move with it follow."""
    from rtc.runtime.owners import owners

    lift(t)
    for state in owners(t):
        for other in state.tensors():
            lift(other)
        state.materialize()
        state.touched_outside(exported, uncounted)
