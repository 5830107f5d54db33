"""One call of what torch.compile made of a model: traced as often as it takes."""

from __future__ import annotations

import gc
import inspect
import linecache
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit
from torch._dynamo.types import FrameAction, FrameExecStrategy  # type: ignore[attr-defined]
from torch.nn.modules import module as _module

from rtc.backend import GRAPHS, TOO_MANY, Compiler, Specialize
from rtc.errors import HostSyncError, RtcError, UnsupportedError
from rtc.host_numbers import HostNumber, NotANumber

_DEEP = 200  # modules of a model
_COMPILE = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)


class _Functions(dict[Any, None]):
    """A set of functions. torch 2.11 writes its configuration down as JSON, and sorts sets."""

    def items(self) -> Any:
        return {}.items()


# What a model says in a call is left out: a replayed step would not say it again either.
_LOGGING = _Functions.fromkeys([print, warnings.warn])
_LOGGING |= dict.fromkeys(
    getattr(of, name)
    for of in (logging, logging.Logger)
    for name in ("debug", "info", "warning", "warn", "error", "exception", "critical", "log")
    if hasattr(of, name)
)
_ENTRIES = 16 * GRAPHS  # of Dynamo: those of models traced before stay with the code

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')
_READS = re.compile(r"\.(item|tolist|nonzero)\(|(?<![.\w])(int|bool|float)\(")


def host_read(error: Exception) -> HostSyncError | None:
    """The clear error for a trace that failed since it needs device data on the host, or None."""
    text = str(error)
    if not re.search(r"[Dd]ata-dependent|Could not guard|[Uu]nbacked|\bu0\b|SymI", text):
        return None
    frames = _FRAME.findall(text.split("from user code", 1)[-1]) if "from user code" in text else []
    if not frames:
        return None
    file, line, name = frames[-1]
    at = int(line)
    # the read may stand above the line that could not do without its value
    code = linecache.getline(file, at).strip()
    above = takewhile(
        lambda n: not linecache.getline(file, n).lstrip().startswith("def "),
        range(at, max(at - 30, 0), -1),
    )
    if not code.startswith(("if ", "elif ", "while ", "assert ")):
        at = next((n for n in above if _READS.search(linecache.getline(file, n))), at)
    return HostSyncError(
        f"{file}:{at} in {name}: this line needs device data on the host in the middle of the "
        f"step ({linecache.getline(file, at).strip()}). Keep the value as a Python int outside the "
        "tensors (a step counter, say), or select with torch.where on the device."
    )


def global_hooks() -> tuple[int, ...]:
    """The hooks that are called in every module's call, by their numbers."""
    return (*_module._global_forward_pre_hooks, *_module._global_forward_hooks)


class Caller:
    """Calls of one model."""

    def __init__(self, model: Callable[..., Any], compiler: Compiler) -> None:
        self.model, self.compiler = model, compiler
        self.signature = _signature(model)
        module = isinstance(model, torch.nn.Module)
        # collections while tracing cost more than the one that follows
        self.deep = module and len(list(model.modules())) > _DEEP  # type: ignore[attr-defined]
        forward = model.forward if module else model  # type: ignore[attr-defined]
        functions = (forward, inspect.unwrap(forward))
        self.codes = {f.__code__ for f in functions if hasattr(f, "__code__")}
        compiler.codes = self.codes

    def __call__(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``call(*args, **kwargs)``, without gradients.

        Traces again with constants where sizes of caches ask for it, and with numbers on the host
        where tensors of one element are read. Raises HostSyncError for other reads, and what the
        compiler raised.
        """
        numbers = self.compiler.numbers
        learned: list[str] = []
        first: HostSyncError | None = None
        while True:
            traced = len(self.compiler.graphs)
            if traced == self.compiler.since and self.deep:
                self.compiler.quiet.start(large=True)  # Dynamo will trace
            try:
                with numbers.tracing():
                    out = self._with_numbers(call, args, kwargs)
                if learned:
                    like = f" and {len(numbers.taken)} like them" if numbers.taken else ""
                    self.compiler.session.note(
                        "the model reads them on the host, which keeps them as numbers: "
                        + ", ".join(learned)
                        + like
                    )
                return out
            except FailOnRecompileLimitHit:
                raise UnsupportedError(TOO_MANY) from None
            except Exception as e:
                inner: Exception | None = (
                    e.inner_exception if isinstance(e, BackendCompilerFailed) else e
                )
                if isinstance(inner, Specialize):
                    continue
                ran = len(self.compiler.graphs) > traced and not isinstance(e, NotANumber)
                read = inner if isinstance(inner, HostSyncError) else None if ran else host_read(e)
                if read is not None:
                    first = first or read.with_traceback(None)
                    if new := numbers.learn(self._scope(args, kwargs)[0]):
                        learned += new
                        continue
                    if self.compiler.static is None:
                        # a tensor made from sizes: it can be followed where they are numbers
                        self.compiler.static = self._ints(args, kwargs)
                        continue
                if read is None and isinstance(inner, RtcError):
                    raise inner from None
                named = learned or "HostNumber" in str(e)
                if named and not ran and numbers.doubt():
                    continue
                if learned and not ran:
                    numbers.forget(learned)
                    assert first is not None
                    raise (read or first) from (None if read else e)
                if read is not None:
                    raise read from None
                if numbers.places and not ran and "HostNumber" in str(e):
                    numbers.forget(list(numbers.places))  # the model does more with one now
                    continue
                raise
            finally:
                inner = read = None  # they know this frame, and would keep the caches alive with it
                self.compiler.quiet.end()
                if self.deep and len(self.compiler.graphs) > traced:
                    gc.collect()  # what tracing left may hold caches, which would not be alone

    def _with_numbers(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        numbers = self.compiler.numbers
        scope, bound = self._scope(args, kwargs) if numbers.places else ({}, None)
        if bound is None:
            return self._once(call, args, kwargs)

        def with_them(given: dict[int, HostNumber]) -> Any:
            # as they came, not by the signature: a wrapper may look at them otherwise
            mine = tuple(given.get(id(x), x) for x in args)
            return self._once(call, mine, {k: given.get(id(x), x) for k, x in kwargs.items()})

        return numbers.call(scope, with_them)

    def _once(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        for code in self.codes:  # torch.compile may have given them up: graph breaks in a loop
            set_code_exec_strategy(code, _COMPILE)
        with _capture(self.signature, args, kwargs, self.compiler):
            if torch.is_inference_mode_enabled():
                return call(*args, **kwargs)
            with torch.no_grad():
                return call(*args, **kwargs)

    def _ints(self, args: Any, kwargs: Any) -> tuple[str, ...]:
        ints = _int_sources(self.signature, args, kwargs)
        return (
            *ints,
            *(f"{place.source}.value" for place in self.compiler.numbers.places.values()),
        )

    def _scope(self, args: Any, kwargs: Any) -> tuple[dict[str, Any], Any]:
        """What Dynamo's names of inputs are expressions over, and the call's arguments."""
        try:
            bound = self.signature.bind(*args, **kwargs) if self.signature else None
        except TypeError:
            bound = None  # the call itself will raise with the user's own message
        if bound is None:
            return {"L": {}, "G": {}}, None
        names, forward = bound.arguments, self.model
        if isinstance(forward, torch.nn.Module):
            forward = forward.forward
        if inspect.ismethod(forward):
            names["self"] = forward.__self__  # no parameter of that name: it is not passed on
        forward = inspect.unwrap(forward)
        return {"L": names, "G": getattr(forward, "__globals__", {})}, bound


def _signature(model: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    except (TypeError, ValueError):
        return None


@contextmanager
def _capture(
    signature: inspect.Signature | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    compiler: Compiler,
) -> Iterator[None]:
    """Dynamo settings for one call: ints stay symbolic, failures are loud.

    ``compiler.fixed``: ints taken as constants, with the values seen: one that changed is symbolic
    again.
    """
    ints, fixed = _int_sources(signature, args, kwargs), compiler.fixed or {}
    ints |= compiler.numbers.values()
    static = compiler.static
    for name in fixed.keys() & ints.keys():
        if len(fixed[name]) < 2:
            fixed[name].add(ints[name])
    names = ",".join(
        n for n in {*ints, *(static or ()), *compiler.moving} if len(fixed.get(n, ())) != 1
    )
    with (
        torch.compiler.config.patch(dynamic_sources=names),  # type: ignore[attr-defined]
        torch._dynamo.config.patch(
            allow_unspec_int_on_nn_module=True,
            automatic_dynamic_shapes=static is None,
            ignore_logging_functions=_LOGGING,
            skip_nnmodule_hook_guards=False,  # a hook that comes or goes is another model
            fail_on_recompile_limit_hit=True,
            # a growth phase has a shape for every length before the window is full
            recompile_limit=_ENTRIES,
            accumulated_recompile_limit=_ENTRIES,
        ),
    ):
        yield


def _int_sources(
    signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, int]:
    """Dynamo's names of all Python ints among the arguments, with their values."""
    if signature is None:
        return {}
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return {}  # the call itself will raise with the user's own message
    out: dict[str, int] = {}

    def walk(name: str, value: Any, depth: int) -> None:
        if isinstance(value, bool) or depth > 4:
            return
        if isinstance(value, int):
            out[name] = value
        elif isinstance(value, dict):
            for k, v in value.items():
                walk(f"{name}[{k!r}]", v, depth + 1)
        elif isinstance(value, (list, tuple)):
            for i, v in enumerate(value):
                walk(f"{name}[{i}]", v, depth + 1)

    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            for k, v in value.items():
                walk(f"L['{name}']['{k}']", v, 0)
                walk(f"L['{k}']", v, 0)
        else:
            walk(f"L['{name}']", value, 0)
    return out
