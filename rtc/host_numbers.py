"""Numbers that a program keeps in tensors of one element and reads with ``.item()``.

Published code keeps the ends of its caches so (``kv["end"].item()``, ``kv["end"].fill_(end)``): a
tensor where the program wants an int. In the middle of a step that is a host read. Where it reads
an input of the model, the step is traced once more with a :class:`HostNumber` in the tensor's place
while a call runs: an int that the host keeps, and that Dynamo follows. The tensor is read before
the call if it was written since the last one, and written after it.

A HostNumber can be read and written and nothing else. A model that does more with the tensor cannot
be traced with it, and gets the error of the host read.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._subclasses import fake_impls, fake_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rtc.alike import alike
from rtc.inputs import source_name
from rtc.runtime.guard import alone
from rtc.small_ints import MOST, SmallInts

_TWICE = 2  # times that a model may turn out to do more with a tensor, and is traced anew
_READ = torch.ops.aten._local_scalar_dense.default


class NotANumber(Exception):
    """The model does with a tensor what a HostNumber cannot do."""


def _no(what: str) -> Callable[..., Any]:
    def refuse(self: HostNumber, *args: Any, **kwargs: Any) -> Any:
        # tracing ends here, whatever the model catches
        torch._dynamo.graph_break(f"HostNumber: {what}")
        raise NotANumber(f"HostNumber: {what}")

    return refuse


class HostNumber:
    """An int in the place of an int tensor of one element; Dynamo traces its methods."""

    def __init__(self, value: int, dim: int) -> None:
        self.value, self.dim_ = value, dim

    def item(self) -> int:
        return self.value

    def tolist(self) -> Any:
        out: Any = self.value
        for _ in range(self.dim_):
            out = [out]
        return out

    def __int__(self) -> int:
        return self.value

    def fill_(self, value: int) -> HostNumber:
        self.value = _int(value)
        return self

    def zero_(self) -> HostNumber:
        self.value = 0
        return self

    def add_(self, other: int) -> HostNumber:
        self.value = self.value + _int(other)
        return self

    def sub_(self, other: int) -> HostNumber:
        self.value = self.value - _int(other)
        return self

    __iadd__ = add_
    __isub__ = sub_

    # The rest would mean another thing for a tensor, which gives tensors: not even by default.
    def __getattr__(self, name: str) -> Any:
        torch._dynamo.graph_break(f"HostNumber: .{name} of a tensor")
        raise NotANumber(f"HostNumber: .{name} of a tensor")

    __hash__ = object.__hash__
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _no("compared as a tensor")
    __bool__ = __len__ = __iter__ = __contains__ = _no("used as a tensor")
    __getitem__ = __setitem__ = __delitem__ = _no("indexed as a tensor")
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no("computed with")
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _no("computed with")
    __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _no("computed with")
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _no("computed with")
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __divmod__ = _no("computed with")
    __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = _no("computed with")
    __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _no("computed with")
    __neg__ = __pos__ = __abs__ = __invert__ = _no("computed with")
    __index__ = __float__ = __complex__ = __round__ = _no("used as a number")
    __str__ = __format__ = _no("printed")
    __call__ = _no("called")


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        torch._dynamo.graph_break("HostNumber: written with something that is no int")
        raise NotANumber("HostNumber: written with something that is no int")
    return value


@functools.cache
def _types_are_not_asked() -> None:
    """``isinstance(x, Tensor)``, ``type(x)`` and ``torch.is_tensor(x)`` would take another way for
    a HostNumber: tracing ends there."""

    def asks(of: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(of)
        def asked(self: Any, tx: Any, arg: Any, *rest: Any, **kwargs: Any) -> Any:
            held = isinstance(arg, UserDefinedObjectVariable) and isinstance(arg.value, HostNumber)
            if held:
                raise NotANumber("HostNumber: asked for its type")
            return of(self, tx, arg, *rest, **kwargs)

        return asked

    BuiltinVariable.call_isinstance = asks(BuiltinVariable.call_isinstance)  # type: ignore[method-assign]
    BuiltinVariable.call_type = asks(BuiltinVariable.call_type)  # type: ignore[method-assign]
    handlers = TorchInGraphFunctionVariable._get_handlers()
    for question in (torch.is_tensor, torch.overrides.is_tensor_like):
        handlers[question] = asks(handlers[question])
    BuiltinVariable.call_function_handler_cache.clear()  # it holds what was there before


@dataclass
class _Place:
    """Where the program holds such a tensor: ``holder``[``key``], or ``holder``.``key``."""

    source: str  # Dynamo's name of the number
    holder: Any  # code of an expression; None: the call's arguments themselves
    key: Any
    kind: str = "item"  # or "attribute", or "buffer" of a module
    tensor: torch.Tensor | None = None
    version: int | None = None  # of that tensor, when ``known`` was its value
    known: int = 0
    number: HostNumber | None = None  # while a call runs
    name: str = ""  # Dynamo's name of the tensor
    text: str = ""  # of ``holder``

    def find(self, scope: dict[str, Any]) -> Any:
        return scope["L"] if self.holder is None else eval(self.holder, scope)

    def get(self, holder: Any) -> Any:
        return holder[self.key] if self.kind == "item" else getattr(holder, self.key)

    def put(self, holder: Any, value: Any, order: Sequence[str] = ()) -> None:
        """``order``: of the module's buffers, where a tensor comes back."""
        if self.kind == "item":
            holder[self.key] = value
        elif self.kind == "attribute":
            setattr(holder, self.key, value)
        elif isinstance(value, HostNumber):  # only tensors may be buffers
            holder.__dict__[self.key] = value
            del holder._buffers[self.key]
        else:
            now = {**holder._buffers, self.key: value}
            holder._buffers.clear()
            holder._buffers.update({k: now.pop(k) for k in order if k in now} | now)
            holder.__dict__.pop(self.key, None)


def _place(source: Any) -> _Place | None:
    base = getattr(source, "base", None)
    if base is None:
        local = getattr(source, "local_name", None)
        return None if local is None else _Place(f"L[{local!r}]", None, local)
    key = getattr(source, "member", getattr(source, "index", None))
    if type(key) not in (int, str):
        return None
    kind = "attribute" if hasattr(source, "member") else "item"
    if getattr(base, "member", None) == "_buffers":
        base, kind = base.base, "buffer"
    return _named(source_name(base), key, kind)


def _named(holder: str, key: Any, kind: str) -> _Place:
    name = f"{holder}[{key!r}]" if kind == "item" else f"{holder}.{key}"
    return _Place(name, compile(holder, "<source>", "eval"), key, kind, text=holder)


def _fits(t: Any) -> bool:
    """An int tensor of one element with memory of its own: no other tensor shows what it holds."""
    return (
        isinstance(t, torch.Tensor)
        and t.dtype in (torch.int32, torch.int64)
        and t.numel() == 1
        and t.layout is torch.strided
        and not is_traceable_wrapper_subclass(t)
        and t._base is None
        and t.untyped_storage().nbytes() == t.element_size()
        and alone(t)
    )


def _version(t: torch.Tensor) -> int | None:
    return None if t.is_inference() else t._version


class HostNumbers:
    """Those of one compiled model."""

    def __init__(self) -> None:
        self.places: dict[str, _Place] = {}
        self.misused: Counter[str] = Counter()  # how often a source was more than a number
        self.taken: set[str] = set()  # places that were not read, but are like one that was
        self.takes = True
        self._reads: dict[str, Any] = {}  # sources of inputs that a trace read

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Notes which inputs are read, and follows tensors that a model makes from numbers."""
        self._reads = {}
        read = fake_impls.op_implementations_dict[_READ]
        limit = fake_tensor.CONSTANT_NUMEL_LIMIT

        followed: dict[Any, SmallInts] = {}

        def noted(mode: Any, func: Any, arg: Any) -> Any:
            translator = _translator()
            if translator is None:
                return read(mode, func, arg)
            env = getattr(mode, "shape_env", None)
            for tracked in getattr(env, "tracked_fakes", None) or ():
                if tracked.fake is arg:
                    self._reads.setdefault(source_name(tracked.source), tracked.source)
            graph = translator.output.graph
            node = next(iter(reversed(graph.nodes)), None)  # what is being traced, if it is a read
            if node is not None and node.target == "item" and "example_value" not in node.meta:
                value = followed.setdefault(graph, SmallInts(graph)).read(node.args[0])
                if value is not None:
                    return value
            return read(mode, func, arg)

        fake_impls.op_implementations_dict[_READ] = noted
        fake_tensor.CONSTANT_NUMEL_LIMIT = MOST
        try:
            yield
        finally:
            fake_impls.op_implementations_dict[_READ] = read
            fake_tensor.CONSTANT_NUMEL_LIMIT = limit

    @staticmethod
    @contextmanager
    def traced() -> Iterator[None]:
        """The model is traced: its graph is dealt with as ever."""
        limit, fake_tensor.CONSTANT_NUMEL_LIMIT = fake_tensor.CONSTANT_NUMEL_LIMIT, 1
        try:
            yield
        finally:
            fake_tensor.CONSTANT_NUMEL_LIMIT = limit

    def learn(self, scope: dict[str, Any]) -> list[str]:
        """Sources, read by the trace that has just failed, whose tensors are numbers from now on;
        none where a tensor that was read cannot be one."""
        reads, self._reads = self._reads, {}
        found = {}
        for name, source in reads.items():
            place = _place(source)
            if place is None or name in self.places or self.misused[name] > _TWICE:
                return []
            try:
                holder = place.find(scope)
                t = place.get(holder)
            except (LookupError, AttributeError, TypeError, NameError):
                return []
            if isinstance(t, (int, float)):
                continue  # Dynamo's own way with a float
            if isinstance(holder, tuple) or not _fits(t):
                return []
            place.name = name
            found[name] = place
        if found:
            _types_are_not_asked()
        self.places.update(found)
        if self.takes:
            for place in found.values():
                self._take_alike(place, scope)
        return list(found)

    def _take_alike(self, place: _Place, scope: dict[str, Any]) -> None:
        """What one layer reads, the others will: else each costs a trace, of all layers before."""
        for text, key in alike(place.text, place.key, scope) if place.text else ():
            other = _named(text, key, place.kind)
            if any(p.source == other.source for p in self.places.values()):
                continue
            try:
                holder = other.find(scope)
                t = other.get(holder)
            except Exception:
                continue
            if isinstance(holder, tuple) or not _fits(t):
                continue
            other.name = other.source
            self.taken.add(other.source)
            self.places[other.source] = other

    def doubt(self) -> bool:
        """Give up what was only taken to be a number, for good; whether there was any."""
        self.takes = False
        had = [self.places.pop(name) for name in self.taken if name in self.places]
        self.taken.clear()
        return bool(had)

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            del self.places[name]
            self.misused[name] += 1

    def unseen(self) -> None:
        """Tensors may have been written without a count: read them again."""
        for place in self.places.values():
            place.tensor = None

    def also(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise NotANumber if a graph takes memory as a tensor that is a number in this call."""
        held = {
            p.tensor.data_ptr()
            for p in self.places.values()
            if p.number is not None and p.tensor is not None
        }
        if held and any(t.data_ptr() in held for t in tensors):
            raise NotANumber("HostNumber: the tensor comes in by another way, too")

    def values(self) -> dict[str, int]:
        """Dynamo's names of the numbers that are in place, and their values."""
        held = [(p.source, p.number) for p in self.places.values() if p.number is not None]
        return {f"{source}.value": number.value for source, number in held}

    def call(self, scope: dict[str, Any], call: Callable[[dict[int, HostNumber]], Any]) -> Any:
        """``call(numbers)`` with numbers where the tensors are, and its result with tensors.

        ``scope``: ``L`` the arguments by name, and ``G`` the globals. ``numbers``: by the id of the
        tensor, those that are arguments themselves.
        """
        numbers: dict[int, tuple[HostNumber, torch.Tensor, int]] = {}
        swapped: list[tuple[_Place, Any, list[str]]] = []
        given: dict[int, HostNumber] = {}
        try:
            for place in self.places.values():
                try:
                    holder = place.find(scope)
                    t = place.get(holder)
                except (LookupError, AttributeError, TypeError):
                    continue  # it is not there in this call
                known = numbers.get(id(t))
                if known is None:
                    if not _fits(t):
                        continue
                    number = self._read(place, t)
                    numbers[id(t)] = known = number, t, number.value
                # until the call has ended, nothing is known of what is in the tensor
                place.number, place.tensor, place.version = known[0], t, None
                swapped.append((place, holder, list(getattr(holder, "_buffers", ()))))
                if place.holder is None:
                    given[id(t)] = known[0]
                else:
                    place.put(holder, known[0])
            out = call(given)
        finally:
            try:
                self._back(swapped, numbers)
            except BaseException:  # Ctrl-C: a number left in the program's hands is no tensor
                self._back(swapped, numbers)
                raise
        try:
            return _tensors(out, {id(n): t for n, t, _ in numbers.values()}) if numbers else out
        finally:
            for number, _, _ in numbers.values():
                vars(number).clear()  # wherever else the model put it: to use it is an error

    @staticmethod
    def _back(
        swapped: list[tuple[_Place, Any, list[str]]],
        numbers: dict[int, tuple[HostNumber, torch.Tensor, int]],
    ) -> None:
        """Tensors where numbers are, with their values; twice does no harm."""
        tensors = {id(n): t for n, t, _ in numbers.values()}
        for place, holder, order in swapped:
            place.number = None
            if place.holder is None:
                continue
            try:
                found = place.get(holder)
            except (LookupError, AttributeError):
                continue
            if isinstance(found, HostNumber) and id(found) in tensors:
                place.put(holder, tensors[id(found)], order)
        with torch.no_grad():
            for number, t, before in numbers.values():
                if number.value != before:
                    t.fill_(number.value)
        for place, _, _ in swapped:
            number, t, _ = numbers[id(place.tensor)]
            place.version, place.known = _version(t), number.value

    @staticmethod
    def _read(place: _Place, t: torch.Tensor) -> HostNumber:
        known = place.tensor is t and place.version is not None and place.version == t._version
        return HostNumber(place.known if known else int(t.item()), t.dim())


def _translator() -> Any:
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:
        return None


def _tensors(out: Any, known: dict[int, torch.Tensor]) -> Any:
    """``out`` with tensors for numbers; lists and dicts stay the same objects."""
    if isinstance(out, HostNumber):
        return known[id(out)]
    if isinstance(out, (list, dict)):
        for key, x in out.items() if isinstance(out, dict) else enumerate(out):
            new = _tensors(x, known)
            if new is not x:
                out[key] = new
    elif isinstance(out, tuple):
        items = [_tensors(x, known) for x in out]
        if any(a is not b for a, b in zip(items, out, strict=True)):
            return type(out)(*items) if hasattr(out, "_fields") else type(out)(items)
    return out


__all__ = ["HostNumber", "HostNumbers", "NotANumber"]
