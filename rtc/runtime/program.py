"""A straight-line program over slots: compiled regions and single ops, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map


@dataclass(frozen=True)
class Slot:
    """Place of a value while the program runs."""

    number: int


class Program:
    """Calls in order; a value is let go after its last use. Call it with a list, as a boxed fn."""

    _boxed_call = True

    def __init__(self, inputs: int) -> None:
        self.size = inputs
        self.steps: list[Callable[[list[Any]], None]] = []
        self.uses: list[list[int]] = []  # slots that a step reads
        self.makes: list[list[int]] = []
        self.constants: dict[int, Any] = {}
        self.out: Any = None
        self._free: list[tuple[int, ...]] = []

    def _new(self) -> Slot:
        self.size += 1
        return Slot(self.size - 1)

    def constant(self, value: Any) -> Slot:
        slot = self._new()
        self.constants[slot.number] = value
        return slot

    def op(self, target: Callable[..., Any], args: Any, kwargs: Any, strides: Any = None) -> Slot:
        """One op; ``strides``: what its result must have, as code compiled for it expects."""
        out = self._new()
        at = out.number

        def step(env: list[Any]) -> None:
            a, k = _filled(args, env), {n: _filled(v, env) for n, v in kwargs.items()}
            y = target(*a, **k)
            env[at] = y if strides is None or y.stride() == strides else _laid_out(y, strides)

        self._add(step, [s.number for s in tree_iter((args, kwargs)) if isinstance(s, Slot)], [at])
        return out

    def call(
        self, fn: Callable[[list[Any]], Any], slots: Sequence[Slot], outputs: int
    ) -> list[Slot]:
        """A compiled region: ``fn(list of inputs)`` gives a sequence of ``outputs`` values."""
        ins = [s.number for s in slots]
        outs = [self._new() for _ in range(outputs)]
        numbers = [o.number for o in outs]

        def step(env: list[Any]) -> None:
            for at, y in zip(numbers, fn([env[i] for i in ins]), strict=True):
                env[at] = y

        self._add(step, ins, numbers)
        return outs

    def _add(self, step: Callable[[list[Any]], None], uses: list[int], makes: list[int]) -> None:
        self.steps.append(step)
        self.uses.append(uses)
        self.makes.append(makes)

    def finish(self, out: Any) -> None:
        """``out``: a structure of slots. Works out when each value may be let go."""
        self.out = out
        kept = {s.number for s in tree_iter(out) if isinstance(s, Slot)} | set(self.constants)
        last: dict[int, int] = {}
        for i, (uses, makes) in enumerate(zip(self.uses, self.makes, strict=True)):
            for s in (*uses, *makes):
                last[s] = i
        free: list[list[int]] = [[] for _ in self.steps]
        for s, i in last.items():
            if s not in kept:
                free[i].append(s)
        self._free = [tuple(f) for f in free]

    def __call__(self, args: list[Any]) -> Any:
        env: list[Any] = [*args, *([None] * (self.size - len(args)))]
        for number, value in self.constants.items():
            env[number] = value
        for step, free in zip(self.steps, self._free, strict=True):
            step(env)
            for s in free:
                env[s] = None
        return tree_map(lambda s: env[s.number] if isinstance(s, Slot) else s, self.out)


def _filled(x: Any, env: list[Any]) -> Any:
    if isinstance(x, Slot):
        return env[x.number]
    if isinstance(x, (list, tuple)):
        return [_filled(y, env) for y in x]
    return x


def _laid_out(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    y = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    return y.copy_(x)
