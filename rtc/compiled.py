"""``rtc.compile`` and what it returns."""

from __future__ import annotations

import functools
import time
import types
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule

from rtc.backend import Compiler
from rtc.capture import Caller, global_hooks
from rtc.errors import UnsupportedError
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

    Raises UnsupportedError for a torch outside the supported range, and for a model of which a part
    is compiled already.
    """
    check_torch()
    _check_own_compile(model)
    inside = _compiled_parts(model)
    if inside:
        raise UnsupportedError(
            f"{inside[0]} is compiled by rtc already: compile the whole model or that part of it"
        )
    made = CompiledModule if isinstance(model, torch.nn.Module) else Compiled
    return made(model, options or Options(), on_phase)


def _check_own_compile(model: Any) -> None:
    """``model.compile()`` puts another compiler in front of the model's calls."""
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise UnsupportedError(
            f"{type(model).__name__}.compile() was called: its calls would go to another compiler "
            "while caches lie in ring order. Give rtc.compile a model that was not compiled"
        )


def _compiled_parts(model: Any) -> list[str]:
    if isinstance(model, Compiled):
        return ["the model"]
    if not isinstance(model, torch.nn.Module):
        return []
    return [
        f"{name}.{child}".lstrip(".")
        for name, module in model.named_modules()
        for child, part in module._modules.items()
        if isinstance(part, Compiled)
    ]


def _by(backend: Any, model: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, fullgraph=True)


def _bare(call: Callable[..., Any]) -> Callable[..., Any]:
    """Without the module that torch.compile puts around one: hooks of all modules would be called
    for that, too."""
    return call.forward if isinstance(call, OptimizedModule) else call


def check_torch() -> None:
    have = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    if not _MIN <= have < _BELOW:
        raise UnsupportedError(
            f"torch {torch.__version__} is not supported: rtc needs {_MIN[0]}.{_MIN[1]} or newer, "
            f"below {_BELOW[0]}.{_BELOW[1]}"
        )


_TOO_MANY_PLAIN = 8
_UNDONE, _TOO_MANY_UNDONE = 64, 20  # calls that are looked back upon, and how many may undo
_OWN = {
    "_demoted",
    "_undone",
    "_model",
    "_options",
    "_session",
    "_compiler",
    "_call",
    "_caller",
    "_hooks",
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
        self._call = _by(self._compiler, model)
        self._demoted = False
        self._hooks = global_hooks()
        self._undone: deque[bool] = deque(maxlen=_UNDONE)
        self._caller = Caller(model, self._compiler)
        self._seconds: deque[float] = deque(maxlen=10_000)

    @torch._dynamo.disable  # another torch.compile may meet it
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session, compiler = self._session, self._compiler
        _check_own_compile(self._model)
        if self._hooks != global_hooks():
            self._other_hooks()
            compiler = self._compiler
        started = compiler.called = time.perf_counter()
        compiler.settling.calls += 1
        session.before_call((args, kwargs))
        try:
            with self._compiler.ranks:
                self._caller.compiler.static = None
                return self._caller(_bare(self._call), args, kwargs)
        finally:
            session.after_call()
            # with other ranks, which may not take that path and would not come to compile, it stays
            alone = compiler.ranks.dog is None
            self._undone.append(session.undone)
            if session.plain_in_a_row >= _TOO_MANY_PLAIN and alone and not self._demoted:
                self._demote(f"{_TOO_MANY_PLAIN} calls in a row took the plain path")
            elif sum(self._undone) > _TOO_MANY_UNDONE and alone and not self._demoted:
                self._demote("graphs that take turns over a cache undo what the others make of it")
            elif alone and not self._demoted and (compiler.stale or compiler.settling.due):
                self._trace_again()
            self._seconds.append(time.perf_counter() - started)

    def _demote(self, why: str) -> None:
        """Compile without the cache passes, for good."""
        self._demoted = True
        self._session.note(f"{why}: from here on the model is compiled without the cache passes")
        self._session.release_all()
        options = self._options.without_passes()
        plain = replace(self._compiler, options=options, called=None, patient=False)
        self._caller.compiler = plain
        self._call = _by(plain, self._model)

    def _trace_again(self) -> None:
        """Something is known that was not when the graphs so far were traced: sizes have settled,
        or a cache is kept in a ring. To Dynamo, this is another backend, and they are not its."""
        since = len(self._compiler.graphs)
        patient = self._compiler.patient and not self._compiler.settling.over
        self._compiler = replace(self._compiler, stale=False, since=since, patient=patient)
        self._caller.compiler = self._compiler
        self._call = _by(self._compiler, self._model)

    def _other_hooks(self) -> None:
        """Hooks of all modules come and go, which Dynamo does not look for."""
        self._hooks = global_hooks()
        if not self._demoted:
            self._trace_again()
        else:
            self._caller.compiler = plain = replace(self._caller.compiler)
            self._call = _by(plain, self._model)

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
        self._compiler.numbers.unseen()

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
        def method(self: Compiled, *args: Any, **kwargs: Any) -> Any:
            out = value(*args, **kwargs)
            return self if out is self._model else out  # eval(), to(..): not the eager model

        return types.MethodType(method, self)

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


class CompiledModule(Compiled, torch.nn.Module):
    """A compiled module, which may be a child of another: ``pipeline.generator = rtc.compile(..)``.

    What is not of :class:`Compiled` is asked of the model, methods of Module as well: they may be
    the model's own, and what they walk is the model.
    """

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN or name in _METHODS or (name.startswith("__") and name.endswith("__")):
            return object.__getattribute__(self, name)
        return Compiled.__getattr__(self, name)


_METHODS = frozenset(name for name in vars(Compiled) if not name.startswith("__"))


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

    call = _by(backend, model)
    try:
        Caller(model, compiler)(_bare(call), args, kwargs)
    except Stop:
        pass
    finally:
        guard_all(session.note)
    return Report(compiler.graphs, session, options, [])
