"""What a form is, and how one is run against eager.

A form is a small float64 model in the spelling of one imagined author, with the inputs of a step
and what the compiler should make of it. The models share no code on purpose: a common helper would
make all graphs alike. The files forms_*.py list them; test_forms.py runs every one.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rtc.testing import ChainResult, check_compile


@dataclass(frozen=True)
class Form:
    """One spelling.

    build      makes the model; torch is seeded before
    inputs     step -> (args, kwargs), or (step, state) -> (args, kwargs) where there is `state`
    state      makes the caches that the caller holds, where the model does not hold them
    caches     model -> pytree of caches; by default its buffers, or `state`
    expect     pass -> how often it applies, summed over the graphs: in caches, so a K and a V cache
               that become rings count 2, and rotating keys moved to write time counts 1 a layer
    refuses    pass -> regular expression that one of its reasons must match
    runtime    counter of the report's "runtime" -> its value after the chain
    graphs     how many graphs the chain needs; None where it is not the point
    syncs      regular expression for the error or report line of a host read in the step
    """

    name: str
    build: Callable[[], Any]
    inputs: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    state: Callable[[], Any] | None = None
    caches: Callable[[Any], Any] | None = None
    expect: Mapping[str, int] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    runtime: Mapping[str, int] = field(default_factory=dict)
    graphs: int | None = 1
    syncs: str | None = None
    notes: str = ""
    steps: int = 120
    dynamic: str = "L['step']"

    def __post_init__(self) -> None:
        both = self.expect.keys() & self.refuses.keys()
        if any(self.expect[name] for name in both):
            raise ValueError(f"{self.name}: {sorted(both)} cannot apply and refuse at once")


def run(form: Form, compile: Callable[[Any], Any], **checks: Any) -> ChainResult:
    """Chain the form under `compile` against eager. Raises `rtc.testing.ChainError`.

    The caches are compared every 17 steps: no multiple of a window or of a reset period, so that
    each phase of a ring is looked at, and seldom enough to leave the steady state alone between.
    """
    arguments = {"steps": form.steps, "every": 17, **checks}
    return check_compile(
        form.build,
        form.inputs,
        compile=compile,
        state=form.state,
        caches=form.caches,
        name=form.name,
        **arguments,
    )


@contextlib.contextmanager
def symbolic(form: Form) -> Iterator[None]:
    """The step, a Python int, is a symbol from the first call on."""
    with torch.compiler.config.patch(dynamic_sources=form.dynamic):  # type: ignore[attr-defined]
        yield
