"""Models that run side by side, each with the same weights and caches of its own."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import rtc
from rtc.demo.settings import Settings
from rtc.model import Config, build, example_inputs, example_prompt
from rtc.options import Options


@dataclass
class Side:
    """One way to run the model. ``seconds``: of every call; the first one compiles."""

    key: str
    label: str
    model: nn.Module
    call: Callable[..., Tensor]
    synchronize: Callable[[], None]
    seconds: list[float] = field(default_factory=list)

    def step(self, inputs: tuple[Any, ...]) -> Tensor:
        """One chunk, timed."""
        self.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            out = self.call(*inputs)
        self.synchronize()
        self.seconds.append(time.perf_counter() - start)
        return out

    def caches(self) -> dict[str, Tensor]:
        """Cache contents in the program's order."""
        if isinstance(self.call, rtc.Compiled):
            self.call.materialize()
        return dict(self.model.named_buffers())

    def close(self) -> None:
        if isinstance(self.call, rtc.Compiled):
            self.call.close()


def session(settings: Settings, cfg: Config, double: bool = False) -> nn.Module:
    """A model with seeded weights in which a prompt has filled most of the sink.

    ``double``: the same weights and prompt (already rounded), computed with in float64.
    """
    where: dict[str, Any] = {
        "seed": settings.seed,
        "device": settings.device,
        "dtype": settings.torch_dtype,
    }
    model = build(cfg, **where)
    if cfg.sink:
        prompt = example_prompt(cfg, max(1, 3 * cfg.sink // 4), **where)
        with torch.no_grad():
            if double:
                model, prompt = model.double(), prompt.double()
            model.first_pass(prompt)
    return model.double() if double else model


def inputs(settings: Settings, step: int, double: bool = False) -> tuple[Any, ...]:
    """The arguments of one call; ``double``: the same values in float64."""
    noise, cond, step = example_inputs(
        settings.config, step, seed=settings.seed, device=settings.device,
        dtype=settings.torch_dtype,
    )  # fmt: skip
    return (noise.double(), cond.double(), step) if double else (noise, cond, step)


def eager_side(settings: Settings) -> Side:
    model = session(settings, settings.config)
    return Side("eager", "eager", model, model, _sync(settings))


def reference_side(settings: Settings) -> Side:
    """Float64. Where scales are calibrated, both kinds of quantization are held against none."""
    cfg = settings.config
    if settings.options.quantize == "calibrated":
        cfg = replace(cfg, quantize_kv=False)
    model = session(settings, cfg, double=True)
    return Side("reference", "eager in float64", model, model, _sync(settings))


def inductor_settings(settings: Settings) -> dict[str, Any]:
    """torch.compile's best mode; rtc gets the same settings, so that only the passes differ.

    Without CUDA graphs on both sides: rtc's own are a pass.
    """
    return dict(torch._inductor.list_mode_options("max-autotune-no-cudagraphs"))


def stock_side(settings: Settings, inductor: Mapping[str, Any]) -> Side:
    """torch.compile of the whole step; the step index is symbolic, so that it compiles once."""
    model = session(settings, settings.config)
    compiled = torch.compile(model, fullgraph=True, options=dict(inductor))

    def call(*args: Any) -> Tensor:
        with torch.compiler.config.patch(dynamic_sources="L['step']"):  # type: ignore[attr-defined]
            out: Tensor = compiled(*args)
        return out

    return Side("stock", "torch.compile", model, call, _sync(settings))


def rtc_side(
    settings: Settings, options: Options, key: str, label: str, on_phase: Any = None
) -> Side:
    model = session(settings, settings.config)
    compiled = rtc.compile(model, options=options, on_phase=on_phase)
    return Side(key, label, model, compiled, _sync(settings))


def _sync(settings: Settings) -> Callable[[], None]:
    if settings.device.startswith("cuda"):
        return torch.cuda.synchronize
    return lambda: None


def graphs_compiled() -> int:
    """Graphs that Dynamo has captured in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@contextmanager
def code_cache(folder: str) -> Iterator[None]:
    """Inductor keeps its code in ``folder`` and forgets what it holds in memory: compile cold."""
    from torch._inductor.utils import clear_caches

    names = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    before = {n: os.environ.get(n) for n in names}
    os.environ.update(names)
    clear_caches()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def no_collections() -> Iterator[None]:
    """Python's garbage collector would hit one side by chance."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
