"""A cache in ring order must not be read as if it were in order.

While rtc owns a cache, its tensor object is given the class ``RingCache``: any torch function that
touches it first puts the slots back into the program's order, then runs as usual. Between calls the
user sees current values, whatever they do with the tensor. (Assigning ``__class__`` to a tensor is
how torch's own lazy parameters turn into real ones.)
"""

from __future__ import annotations

from typing import Any

import torch


# These hand out memory that later reads of the tensor object do not go through.
_EXPORTS = {
    torch.Tensor.data_ptr,
    torch.Tensor.__dlpack__,
    torch.Tensor.numpy,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.share_memory_,
}

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
                restore(t, exported=func in _EXPORTS)
        return func(*args, **kwargs)


def possible(t: torch.Tensor) -> bool:
    """Whether nobody can look at the values but through this tensor object.

    A view of the cache, taken before rtc owned it or while it was in order, shares its storage.
    """
    if type(t) is RingCache:
        lift(t)
    if type(t) is not torch.Tensor or t._base is not None:
        return False
    storage = t.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= _ALONE


def _alone() -> int:
    t = torch.zeros(1)
    storage = t.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


_ALONE = _alone()


def put(t: torch.Tensor) -> None:
    t.__class__ = RingCache


def lift(t: torch.Tensor) -> None:
    """Make it a plain tensor again, values as they lie."""
    if type(t) is RingCache:
        t.__class__ = torch.Tensor


def restore(t: torch.Tensor, exported: bool = False) -> None:
    """Put the slots back in order; all caches that move with it follow."""
    from rtc.runtime.session import owners

    lift(t)
    for state in owners(t):
        for other in state.tensors():
            lift(other)
        state.materialize()
        state.touched_outside(exported)
