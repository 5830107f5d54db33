"""The ways to run a step that bench_step.py compares; each is called as the model is."""

import functools
import gc
from typing import Any, Protocol

import torch
from torch import Tensor

import rtc
from rtc.model import Config, DiT
from rtc.model.dit import Block
from rtc.model.rope import slot_positions


class Side(Protocol):
    def __call__(self, noise: Tensor, cond: Tensor, step: int) -> Tensor: ...

    def facts(self) -> dict[str, Any]:
        """What else is worth writing down, after the last call."""

    def close(self) -> None:
        """Leave the model as it was; `free` gives the memory back."""


class Eager:
    def __init__(self, model: DiT) -> None:
        self.model = model

    def __call__(self, noise: Tensor, cond: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            return self.model(noise, cond, step)

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class StockWhole:
    """torch.compile of the whole model, the step index symbolic."""

    def __init__(self, model: DiT, mode: str | None) -> None:
        self.call = torch.compile(model, fullgraph=True, mode=mode)
        self.graphs = _graphs()

    def __call__(self, noise: Tensor, cond: Tensor, step: int) -> Tensor:
        settings: Any = torch.compiler.config
        with torch.no_grad(), settings.patch(dynamic_sources="L['step']"):
            return self.call(noise, cond, step).clone()

    def facts(self) -> dict[str, Any]:
        return {"graphs": _graphs() - self.graphs}

    def close(self) -> None:
        del self.call


class StockBlocks:
    """torch.compile of one block, shared by all blocks and passes; on CUDA one graph of the step.

    What is left eager (embeddings, head, positions) is a few kernels a pass. The first call
    compiles and runs without a graph. The second captures all passes, with the RoPE tables as
    inputs that are filled before each replay, since a graph would keep one step's.
    """

    def __init__(self, model: DiT, mode: str | None) -> None:
        self.model, self.cfg = model, model.cfg
        self.graphs = _graphs()
        compiled = torch.compile(Block.forward, fullgraph=True, mode=mode)
        for block in model.blocks:
            block.__dict__["forward"] = functools.partial(compiled, block)
        self.calls = 0
        self.graph: Any = None
        self.inputs: tuple[Tensor, ...] = ()
        self.output: Any = None

    def __call__(self, noise: Tensor, cond: Tensor, step: int) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            if self.calls == 1 or not noise.is_cuda:
                return self.model(noise, cond, step)
            fresh = (noise, cond, *self._tables(step, noise.device))
            if self.graph is None:
                self._capture(tuple(x.clone() for x in fresh))
            for static, new in zip(self.inputs, fresh, strict=True):
                static.copy_(new)
            self.graph.replay()
            return self.output.clone()

    def _tables(self, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return DiT.rope(self.model, slot_positions(self.cfg, step, device))

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = inputs
        noise, cond, *tables = inputs
        self.graph = torch.cuda.CUDAGraph()
        self.model.__dict__["rope"] = lambda positions: tuple(tables)
        try:
            with torch.cuda.graph(self.graph):
                self.output = self.model(noise, cond, 0)
        finally:
            del self.model.__dict__["rope"]

    def facts(self) -> dict[str, Any]:
        return {"graphs": _graphs() - self.graphs}

    def close(self) -> None:
        for block in self.model.blocks:
            del block.__dict__["forward"]
        self.graph = self.output = None
        self.inputs = ()


class Rtc:
    def __init__(self, model: DiT, options: dict[str, Any]) -> None:
        self.call = rtc.compile(model, options=rtc.Options(**options))

    def __call__(self, noise: Tensor, cond: Tensor, step: int) -> Tensor:
        return self.call(noise, cond, step)

    def facts(self) -> dict[str, Any]:
        report = self.call.report()
        data = report.to_dict()
        return {
            "graphs": len(data["graphs"]),
            "work": [g["work"] for g in data["graphs"]],
            "runtime": {k: v for k, v in data["runtime"].items() if k != "step_seconds"},
            "report": str(report),
        }

    def close(self) -> None:
        self.call.close()
        del self.call


def stock_kind(cfg: Config, wanted: str) -> str:
    """ "whole" or "blocks": one graph of very many layers takes Inductor too long."""
    if wanted == "auto":
        return "blocks" if cfg.calls > 40 else "whole"
    return wanted


def stock(model: DiT, kind: str, mode: str) -> Side:
    side = StockBlocks if kind == "blocks" else StockWhole
    return side(model, None if mode == "default" else mode)


def free(device: str) -> None:
    """Forget all compiled code and graphs, and give cached memory back."""
    torch._dynamo.reset()
    gc.collect()
    if device.startswith("cuda"):
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _graphs() -> int:
    """Graphs that Dynamo has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
