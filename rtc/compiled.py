"""``rtc.compile`` and what it returns."""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit

from rtc.backend import GRAPHS, TOO_MANY, Compiler, Specialize
from rtc.errors import HostSyncError, RtcError, UnsupportedError
from rtc.options import Options
from rtc.report import Report
from rtc.runtime.owners import guard_all, lift_all
from rtc.runtime.session import Session

_MIN, _BELOW = (2, 11), (2, 15)


def compile(
    model: Callable[..., Any], *, options: Options | None = None, on_phase: Any = None
) -> Compiled:
    """Compile ``model`` (a module or a function) for real time; a drop-in with the same signature.

    The whole call is captured as one graph. Python int arguments (a step index) stay symbolic, so
    that they never recompile. ``on_phase(name)`` is told what the compiler is doing.

    Raises UnsupportedError for a torch outside the supported range.
    """
    check_torch()
    return Compiled(model, options or Options(), on_phase)


def check_torch() -> None:
    have = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    if not _MIN <= have < _BELOW:
        raise UnsupportedError(
            f"torch {torch.__version__} is not supported: rtc needs {_MIN[0]}.{_MIN[1]} or newer, "
            f"below {_BELOW[0]}.{_BELOW[1]}"
        )


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


_TOO_MANY_PLAIN = 8
_ENTRIES = 16 * GRAPHS  # of Dynamo: those of models traced before stay with the code
_OWN = {
    "_demoted",
    "_model",
    "_options",
    "_session",
    "_compiler",
    "_call",
    "_signature",
    "_seconds",
}


class Compiled:
    """A compiled model. Call it as you would call the model; attributes are the model's own."""

    def __init__(self, model: Callable[..., Any], options: Options, on_phase: Any = None) -> None:
        self._model, self._options = model, options
        self._session = Session(write_back=options.write_back)
        self._compiler = Compiler(options, self._session, fixed={})
        if on_phase is not None:
            self._compiler.on_phase = on_phase
        self._call = torch.compile(model, backend=self._compiler, fullgraph=True)
        self._demoted = False
        self._signature = _signature(model)
        self._seconds: deque[float] = deque(maxlen=10_000)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        started = self._compiler.called = time.perf_counter()
        session.before_call()
        try:
            with self._compiler.ranks:
                return self._traced(args, kwargs)
        except BackendCompilerFailed as e:
            inner = e.inner_exception
            if isinstance(inner, RtcError):
                raise inner from None
            raise
        finally:
            session.after_call()
            # with other ranks, which may not take that path and would not come to compile, it stays
            alone = self._compiler.ranks.dog is None
            if session.plain_in_a_row >= _TOO_MANY_PLAIN and alone and not self._demoted:
                self._demote()
            elif self._compiler.stale:
                self._trace_again()
            self._seconds.append(time.perf_counter() - started)

    def _demote(self) -> None:
        """Calls keep taking the plain path, op by op: compile that path instead, for good."""
        self._demoted = True
        self._session.note(
            f"{_TOO_MANY_PLAIN} calls in a row took the plain path: from here on the model is "
            "compiled without the cache passes"
        )
        self._session.release_all()
        plain = replace(self._compiler, options=self._options.without_passes(), called=None)
        self._call = torch.compile(self._model, backend=plain, fullgraph=True)

    def _trace_again(self) -> None:
        """Sizes have settled. To Dynamo, this is another backend: the graphs so far are not its."""
        since = len(self._compiler.graphs)
        self._compiler = replace(self._compiler, stale=False, since=since)
        self._call = torch.compile(self._model, backend=self._compiler, fullgraph=True)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compiler = self._compiler
        compiler.static = None
        while True:
            try:
                with _capture(self._signature, args, kwargs, compiler):
                    if torch.is_inference_mode_enabled():
                        return self._call(*args, **kwargs)
                    with torch.no_grad():
                        return self._call(*args, **kwargs)
            except BackendCompilerFailed as e:
                if not isinstance(e.inner_exception, Specialize):
                    raise
            except FailOnRecompileLimitHit:
                raise UnsupportedError(TOO_MANY) from None
            except Exception as e:
                found = host_read(e)
                if found is None:
                    raise
                raise found from None

    def report(self) -> Report:
        """What was decided and done so far, as data (``to_dict()``) and text (``str()``)."""
        return Report(self._compiler.graphs, self._session, self._options, list(self._seconds))

    def materialize(self) -> None:
        """Put every cache that rtc keeps into the program's own order, with current values."""
        self._session.materialize()

    def invalidate(self) -> None:
        """Say that caches, tables or parameters were written in a way that rtc cannot have seen.

        Such are writes to inference tensors, which count no versions, and those of other libraries.
        """
        self._session.invalidate()

    def close(self) -> None:
        """Materialise the caches, and free everything that rtc keeps. Idempotent."""
        if not self._session.closed:
            self._session.close()
            self._compiler.ranks.close()

    def __enter__(self) -> Compiled:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_model":
            raise AttributeError(name)
        value = getattr(self._model, name)
        if getattr(value, "__self__", None) is not self._model or not callable(value):
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            out = value(*args, **kwargs)
            return self if out is self._model else out  # eval(), to(..): not the eager model

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        # as torch.compile's own wrapper does: a cache rebound here is rebound in the model
        if name in _OWN or name in type(self).__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._model, name)

    def __repr__(self) -> str:
        return f"rtc.compile({type(self._model).__name__}, {len(self._compiler.graphs)} graphs)"


def explain(
    model: Callable[..., Any], *args: Any, options: Options | None = None, **kwargs: Any
) -> Report:
    """What :func:`compile` would do with ``model`` on these arguments, and why not more.

    Traces and decides; runs nothing and changes no state.
    """
    check_torch()
    options = options or Options()
    session = Session()
    lift_all()
    compiler = Compiler(options, session, dry=True, fixed={})

    class Stop(Exception):
        pass

    def backend(gm: Any, inputs: Any) -> Any:
        compiler(gm, inputs)

        def stop(*a: Any) -> Any:
            raise Stop

        return stop

    call = torch.compile(model, backend=backend, fullgraph=True)
    try:
        while True:
            try:
                with (
                    torch.no_grad(),
                    _capture(_signature(model), args, kwargs, compiler),
                ):
                    call(*args, **kwargs)
            except BackendCompilerFailed as e:
                if not isinstance(e.inner_exception, Specialize):
                    raise
    except Stop:
        pass
    except BackendCompilerFailed as e:
        if isinstance(e.inner_exception, RtcError):
            raise e.inner_exception from None
        raise
    finally:
        guard_all(session.note)
    return Report(compiler.graphs, session, options, [])


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
    static = compiler.static
    for name in fixed.keys() & ints.keys():
        if len(fixed[name]) < 2:
            fixed[name].add(ints[name])
    names = ",".join(n for n in {*ints, *(static or ())} if len(fixed.get(n, ())) != 1)
    with (
        torch.compiler.config.patch(dynamic_sources=names),  # type: ignore[attr-defined]
        torch._dynamo.config.patch(
            allow_unspec_int_on_nn_module=True,
            automatic_dynamic_shapes=static is None,
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
