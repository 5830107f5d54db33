"""A cache in ring order must not be read as if it were in order, nor written unseen.

While rtc owns a cache, its tensor object is a ``RingCache``: whatever touches it first puts the
slots back into the program's order, then runs as usual. Between calls the user sees current values,
whatever they do with the tensor. Two nets catch the touch:

* ``__torch_function__`` sees what Python code calls, before it runs;
* ``__torch_dispatch__`` sees what gets past that (``torch.tensor(t)``, ``torch.jit``, C++
  extensions): the object's TensorImpl is swapped for one with the Python dispatch key, on the
  same storage and version counter, and swapped back when the guard is lifted. Where the swap is not
  possible (something in C++ holds the tensor), the first net stands alone.

Memory that was handed out (DLPack, NumPy, ``data_ptr``) passes by both: from then on the cache
is kept in order and its views are made anew. Not seen is ``torch.utils.dlpack.to_dlpack(cache)``,
which asks nobody: call ``compiled.materialize()`` first. ``torch.func.grad`` refuses the tensor.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch

from rtc.runtime.reach import tensors

_GETTERS: Any = torch.Tensor  # the class's own attributes, as __torch_function__ names them

# These hand out memory: later reads and writes of it pass by the tensor object and its version.
_EXPORTS = {
    torch.Tensor.data_ptr,
    torch.Tensor.__dlpack__,
    torch.Tensor.__dlpack_device__,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.share_memory_,
    _GETTERS.__cuda_array_interface__.__get__,
}
# A write through the result is not counted, though nobody may hold the memory afterwards.
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
    touched = [t for t in tensors((args, kwargs)) if type(t) in _PLAIN]
    for t in touched:
        restore(t, exported=func in _EXPORTS, uncounted=func in _UNCOUNTED)
    try:
        return func(*args, **kwargs)
    finally:
        for t in touched:
            if not alone(t):  # a write through the result (``t.detach().numpy()``) is not counted
                touch(t, uncounted=True)
            watch_again(t)  # in order now, and still watched: the next touch may hand memory out


def _dispatch_below(func: Any, args: Any, kwargs: Any) -> Any:
    for t in tensors((args, kwargs)):
        if type(t) in _PLAIN:
            restore(t, uncounted=True)
    args, kwargs = torch.utils._pytree.tree_map(_bare, (args, kwargs))
    return func(*args, **kwargs)


def _bare(a: Any) -> Any:
    """An alias that C++ made of a guarded tensor keeps the dispatch key: take it off."""
    if type(a) not in _PLAIN:
        return a
    with torch._C._DisableTorchDispatch():
        return torch.Tensor._make_subclass(torch.Tensor, a)


class RingCache(torch.Tensor):
    """A cache tensor whose slots lie in ring order; see the module's docstring."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch_below(func, args, kwargs or {})


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

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch_below(func, args, kwargs or {})


_GUARDED: dict[type, type] = {torch.Tensor: RingCache, torch.nn.Parameter: RingParameter}
_PLAIN = {guarded: plain for plain, guarded in _GUARDED.items()}


def _holders(t: torch.Tensor) -> tuple[int, int]:
    """(uses of the memory, Python references to the tensor it is a view of)."""
    base: Any = t._base
    refs = 0 if base is None else sys.getrefcount(base)
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata), refs


def _cut() -> torch.Tensor:
    return torch.zeros(2)[:1]


_ALONE = {False: _holders(torch.zeros(1)), True: _holders(_cut())}


def alone(t: torch.Tensor) -> bool:
    """Whether nobody else (view, detached alias, NumPy array, DLPack capsule) holds the memory.

    The longer tensor that ``t`` was cut from does not count if nobody else can reach it. Memory
    that torch did not allocate (NumPy's, a buffer's, a file's) or that other processes see has an
    owner who may look.
    """
    held: Any = t
    if held._use_count() > 1:
        return False
    if not t.untyped_storage().resizable() or (t.device.type == "cpu" and t.is_shared()):
        return False
    uses, refs = _holders(t)
    most_uses, most_refs = _ALONE[refs > 0]
    return uses <= most_uses and refs <= most_refs


def possible(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether nobody can look at the values but through these tensor objects, now lifted."""
    lift(*tensors)
    return all(type(t) in _GUARDED and alone(t) for t in tensors)


def guarded(t: torch.Tensor) -> bool:
    return type(t) in _PLAIN


# id of a guarded tensor -> the tensor object that holds its own TensorImpl meanwhile
_PARKED: dict[int, torch.Tensor] = {}


# Both take many at once: a model of 60 layers has 480 caches, guarded and lifted in every call.


def put(*tensors: torch.Tensor) -> None:
    """Guard the tensor objects."""
    swap, shell = torch._C._swap_tensor_impl, torch.Tensor._make_subclass
    for t in tensors:
        plain = type(t)
        ring = _GUARDED.get(plain)
        if ring is None:
            continue
        try:
            other: Any = shell(ring, t)
            swap(t, other)
            other.__class__ = plain
            _PARKED[id(t)] = other
        except (RuntimeError, TypeError):
            pass  # something in C++ holds the tensor: the class alone guards it
        t.__class__ = ring


def lift(*tensors: torch.Tensor) -> None:
    """Make them plain tensors again, values as they lie."""
    swap, parked = torch._C._swap_tensor_impl, _PARKED.pop
    for t in tensors:
        ring = type(t)
        plain = _PLAIN.get(ring)
        if plain is None:
            continue
        other = parked(id(t), None)
        if other is not None:
            swap(t, other)
            other.__class__ = ring
        t.__class__ = plain


def forget(ident: int) -> None:
    """A guarded tensor died: let go of its memory."""
    _PARKED.pop(ident, None)


def watch_again(t: torch.Tensor) -> None:
    """Guard a cache once more after a look at it, if rtc still keeps it."""
    from rtc.runtime.owners import owners

    if owners(t) and all(st.watched for st in owners(t)):
        put(t)


def restore(t: torch.Tensor, *, exported: bool = False, uncounted: bool = False) -> None:
    """Put the slots back in order; all caches that move with it follow."""
    from rtc.runtime.owners import TURN, owners

    with TURN:
        lift(t)
        for state in owners(t):
            lift(*state.tensors())
            state.materialize(between=True)
        touch(t, exported=exported, uncounted=uncounted)


def touch(t: torch.Tensor, *, exported: bool = False, uncounted: bool = False) -> None:
    """Note that something outside rtc had the cache in hand."""
    from rtc.runtime.owners import owners

    for state in owners(t):
        state.touched_outside(exported, uncounted)
