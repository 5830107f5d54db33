"""``path/to/file.py:factory`` or ``package.module:factory``: the user's model.

``factory()`` returns ``model, args`` or ``model, args, kwargs``: a module or a function, and the
arguments of one steady call. It may return the model alone where the same file has a function
``example_inputs()`` that returns ``args`` or ``args, kwargs``. ``args`` is a tuple. Under
``rtc run`` a factory may take ``rank`` and ``world``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rtc.errors import RtcError

_FORMS = "TARGET is path/to/file.py:factory or package.module:factory"


class TargetError(RtcError, ValueError):
    """A target that cannot be used: what, where, what to do."""


@dataclass(frozen=True)
class Target:
    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load(target: str, offered: Mapping[str, Any] | None = None) -> Target:
    """Import the target's module and call its factory. TargetError where anything is amiss.

    ``offered``: keyword arguments for a factory that has parameters of these names.
    """
    home, sep, name = target.rpartition(":")
    if not sep or not home or not name.isidentifier():
        raise TargetError(f"{target!r} names no factory: {_FORMS}")
    module = _from_file(home) if home.endswith(".py") or "/" in home else _by_name(home)
    factory = getattr(module, name, None)
    if factory is None:
        near = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        defined = [k for k in near if getattr(vars(module)[k], "__module__", "") == module.__name__]
        has = f"it defines {', '.join(defined[:6])}" if defined else "it defines no function"
        raise TargetError(f"{home} has no {name!r}: {has}")
    if not callable(factory):
        raise TargetError(f"{target} is a {type(factory).__name__}, not a function to call")
    try:
        made = factory(**_accepted(factory, offered or {}))
    except Exception as e:
        raise TargetError(f"{target}() raised {_short(e)}{_line(e, module)}") from e
    return _unpack(target, made, module)


def _accepted(factory: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    try:
        has = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}
    return {k: v for k, v in offered.items() if k in has}


def _from_file(path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        raise TargetError(f"no file {path!r}: {_FORMS}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path!r} is not a Python file: {_FORMS}")
    module = importlib.util.module_from_spec(spec)
    # the file's neighbours are importable, as in `python file.py`
    sys.path.insert(0, str(file.parent))
    # only a free name: a file called torch.py must not replace torch
    sys.modules.setdefault(file.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise TargetError(f"importing {path} raised {_short(e)}{_line(e, module)}") from e
    return module


def _by_name(name: str) -> ModuleType:
    if "" not in sys.path:  # the console script has its own folder there, `python -m` the current
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except Exception as e:
        missing = isinstance(e, ModuleNotFoundError) and (e.name or "").startswith(
            name.split(".")[0]
        )
        hint = f" ({_FORMS})" if missing else ""
        raise TargetError(f"importing {name} raised {_short(e)}{hint}") from e


def _unpack(target: str, made: Any, module: ModuleType) -> Target:
    parts = list(made) if isinstance(made, (tuple, list)) else [made]
    if len(parts) == 1:
        inputs = getattr(module, "example_inputs", None)
        if inputs is None:
            raise TargetError(
                f"{target}() returned a {type(parts[0]).__name__} without arguments: return "
                "`model, args`, or define example_inputs() beside it"
            )
        try:
            given = inputs()
        except Exception as e:
            raise TargetError(
                f"example_inputs() of {target} raised {_short(e)}{_line(e, module)}"
            ) from e
        both = isinstance(given, (tuple, list)) and len(given) == 2
        both = both and isinstance(given[0], (tuple, list)) and isinstance(given[1], dict)
        parts += list(given) if both else [given]
    model, *rest = parts
    if not callable(model):
        raise TargetError(f"{target}() returned a {type(model).__name__} as model: not callable")
    args, kwargs = (rest[0] if rest else ()), (rest[1] if len(rest) > 1 else {})
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict) or len(rest) > 2:
        raise TargetError(
            f"{target}() must return `model, args` or `model, args, kwargs` with a tuple of args "
            f"and a dict of kwargs, not {', '.join(type(p).__name__ for p in parts)}"
        )
    return Target(model, tuple(args), dict(kwargs))


def capture_problem(e: BaseException) -> str:
    """One line from an error of Dynamo's: what, its explanation, and the user's own source line."""
    lines = [x.strip() for x in str(e).splitlines() if x.strip()]
    text = f"{type(e).__name__}: {lines[0]}" if lines else type(e).__name__
    why = next((x for x in lines if x.startswith("Explanation:")), None)
    if why is not None:
        text += f". {why.removeprefix('Explanation:').strip()}"
    torch_home = str(Path(torch.__file__).parent)
    frames = [x for x in lines if x.startswith('File "') and torch_home not in x]
    return f"{text} ({frames[-1]})" if frames else text


def _short(e: BaseException) -> str:
    text = str(e).strip().splitlines()
    return f"{type(e).__name__}: {text[0]}" if text else type(e).__name__


def _line(e: BaseException, module: ModuleType) -> str:
    """The last line of the target's own file in the traceback."""
    if isinstance(e, SyntaxError) and e.lineno:
        return f" (line {e.lineno})"
    found, tb = "", e.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code.co_filename == getattr(module, "__file__", None):
            found = f" (line {tb.tb_lineno})"
        tb = tb.tb_next
    return found
