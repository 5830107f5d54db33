"""A step captured once and replayed: static inputs, one copy of host values a call, teardown.

Knows callables and tensors, no passes. On the CPU nothing can be captured: there a replay runs the
callable again on the same static inputs, which is how it is tested without a GPU.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WARM_UP = 2  # calls before capture: kernels are compiled, tuned and loaded there
_ALIGN = 16  # bytes, as Triton's vector loads want
_DEPTH = 4  # host buffers in flight


class CaptureError(RuntimeError):
    """The step could not be captured; it runs without a graph from now on."""


class Staging:
    """Small host tensors in one device buffer: ``device`` are views of it, of fixed addresses.

    One transfer a call, from a pinned buffer that is not written again before it was read.
    """

    def __init__(
        self, specs: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device
    ) -> None:
        offsets, size = [], 0
        for shape, dtype in specs:
            offsets.append(size)
            n = torch.Size(shape).numel() * dtype.itemsize
            size += -(-n // _ALIGN) * _ALIGN
        self.cuda = device.type == "cuda"
        self._buffer = torch.zeros(max(size, 1), dtype=torch.uint8, device=device)
        self._hosts = [
            torch.zeros(max(size, 1), dtype=torch.uint8, pin_memory=self.cuda)
            for _ in range(_DEPTH if self.cuda else 1)
        ]
        self._events = [torch.cuda.Event() for _ in self._hosts] if self.cuda else []
        self._turn = 0
        self._filled: list[torch.Tensor] | None = None  # what the next host buffer holds already
        self.device = _views(self._buffer, specs, offsets)
        self._views = [_views(h, specs, offsets) for h in self._hosts]

    def fill(self, values: Sequence[torch.Tensor]) -> None:
        """Copy the coming call's values to the host's side, so that ``put`` only sends them.

        Until then the tensors must stay as they are.
        """
        i = (self._turn + 1) % len(self._hosts)
        if self.cuda:
            self._events[i].synchronize()  # calls ago: does not wait in practice
        self._filled = None
        for view, value in zip(self._views[i], values, strict=True):
            view.copy_(value)
        self._filled = [*values]

    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Send one call's values; returns before they have arrived (stream order holds)."""
        have, self._filled = self._filled, None
        if have is None or not all(map(operator.is_, have, values)):
            self.fill(values)
            self._filled = None
        i = self._turn = (self._turn + 1) % len(self._hosts)
        self._buffer.copy_(self._hosts[i], non_blocking=True)
        if self.cuda:
            self._events[i].record()


def _views(
    buffer: torch.Tensor, specs: Sequence[tuple[Sequence[int], torch.dtype]],
    offsets: Sequence[int],
) -> list[torch.Tensor]:  # fmt: skip
    out = []
    for (shape, dtype), at in zip(specs, offsets, strict=True):
        n = torch.Size(shape).numel() * dtype.itemsize
        out.append(buffer[at : at + n].view(dtype).view(tuple(shape)))
    return out


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _solid(x: torch.Tensor) -> torch.Tensor:
    """An expanded tensor without its repetitions, which cannot be written."""
    for d in range(x.dim()):
        if x.stride(d) == 0 and x.shape[d] > 1:
            x = x.narrow(d, 0, 1)
    return x


@dataclass
class _Graph:
    graph: Any
    outputs: Any


class StepGraph:
    """Replays ``run(args)`` for arguments at fixed addresses.

    ``fixed`` are tensors used where they are (weights, caches, views): :meth:`moved` tells whether
    one lies elsewhere now, and the step must be captured anew. ``copied`` are the call's own
    tensors, copied into static ones. Outputs are clones: the next replay overwrites its own.
    """

    def __init__(self, run: Callable[[list[Any]], Any]) -> None:
        self.run = run
        self.calls = 0
        self._graph: _Graph | None = None
        self._static: list[torch.Tensor] = []
        self._addresses: list[int] = []

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def moved(self, fixed: Sequence[torch.Tensor]) -> bool:
        return bool(self._addresses) and self._addresses != _addresses(fixed)

    def fits(self, copied: Sequence[torch.Tensor]) -> bool:
        return not self._static or all(
            s.shape == t.shape and s.dtype == t.dtype and s.stride() == t.stride()
            for s, t in zip(self._static, copied, strict=True)
        )

    def __call__(
        self, fixed: Sequence[torch.Tensor], copied: Sequence[torch.Tensor],
        arrange: Callable[[Sequence[torch.Tensor]], list[Any]],
    ) -> Any:  # fmt: skip
        """``arrange(static)`` puts static inputs in place of ``copied`` into the argument list."""
        if not self._static:
            with torch.inference_mode(False):  # kept for calls in any mode
                self._static = [
                    torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
                    for t in copied
                ]
            self._addresses = _addresses(fixed)
        for s, t in zip(self._static, copied, strict=True):
            _solid(s).copy_(_solid(t))
        self.calls += 1
        if self._graph is None and self.calls > WARM_UP:
            self._graph = self._capture(arrange(self._static))
        if self._graph is None:
            return _cloned(self.run(arrange(self._static)), self._static)
        self._graph.graph.replay()
        return _cloned(self._graph.outputs, None)

    def _capture(self, args: list[Any]) -> _Graph:
        holder = _Graph(None, None)

        def run() -> None:
            holder.outputs = self.run(list(args))

        cuda = any(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
        holder.graph = captured(run, cuda)
        return holder


def captured(run: Callable[[], None], cuda: bool) -> Any:
    """``run``'s device work, recorded and not run: ``.replay()`` runs it.

    Kernels must have been loaded before. Without ``cuda`` a replay calls ``run``. CaptureError says
    what went wrong.
    """
    if not cuda:
        return _Rerun(run)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    except Exception as e:
        raise CaptureError(f"{type(e).__name__}: {e}") from e
    return graph


class _Rerun:
    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


def _cloned(out: Any, static: Sequence[torch.Tensor] | None) -> Any:
    """Outputs of the caller's own; ``static``: clone only what may be one of these.

    Outputs that share memory share it still.
    """
    leaves, spec = torch.utils._pytree.tree_flatten(out)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    memory = [x.untyped_storage().data_ptr() for x in tensors]
    known = None if static is None else {s.untyped_storage().data_ptr() for s in static}
    times = Counter(memory)
    whole: dict[int, torch.UntypedStorage] = {}

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        mine = x.untyped_storage().data_ptr()
        if known is not None and mine not in known:
            return x
        if times[mine] == 1 or not mine:
            return x.clone()
        if mine not in whole:
            whole[mine] = x.untyped_storage().clone()
        new = torch.empty(0, dtype=x.dtype, device=x.device)
        new.set_(whole[mine], x.storage_offset(), x.shape, x.stride())
        new = new.conj() if x.is_conj() else new
        return torch._neg_view(new) if x.is_neg() else new

    return torch.utils._pytree.tree_unflatten([one(x) for x in leaves], spec)


__all__ = ["WARM_UP", "CaptureError", "Staging", "StepGraph", "captured"]
