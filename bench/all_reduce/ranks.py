"""What the ranks of one run share: the group, operands, and a watchdog that no hang outlives."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rtc.kernels import linear_all_reduce as op
from rtc.kernels import linear_fp8
from rtc.kernels import modulate_quantize as tail
from rtc.kernels.linear_all_reduce_rows_layout import Rows, RowsLayout
from rtc.kernels.linear_all_reduce_space import Layout, Space

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Watchdog:
    """End the process, with all threads' stacks, if it lives longer than ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.stage, self.start, self.seconds = "start", time.monotonic(), seconds
        threading.Thread(target=self._watch, daemon=True).start()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def _watch(self) -> None:
        time.sleep(self.seconds)
        print(f"watchdog: {self.seconds:.0f} s are over, in: {self.stage}", flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(3)


@dataclass
class Ranks:
    """This process among the group's."""

    device: torch.device
    watchdog: Watchdog
    rank: int = field(init=False)
    world: int = field(init=False)
    group: str = field(init=False)

    def __post_init__(self) -> None:
        assert dist.group.WORLD is not None
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.group = dist.group.WORLD.group_name

    @classmethod
    def start(cls, seconds: float) -> Ranks:
        watchdog = Watchdog(seconds)
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return cls(device, watchdog)

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def stage(self, name: str) -> None:
        self.watchdog.stage = name

    def all(self, good: bool) -> bool:
        """Whether it is so on all ranks."""
        flag = torch.tensor([int(good)], device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag.item())

    def attempt(self, name: str, what: Callable[[], Any]) -> tuple[Any, str | None]:
        """``what()``, or why it failed on any rank, in one line; ranks go on together."""
        self.stage(name)
        result, why = None, None
        try:
            result = what()
            torch.cuda.synchronize()
        except Exception as e:
            why = f"rank {self.rank}: {type(e).__name__}: {e}".replace("\n", " ")[:300]
        whys: list[str | None] = [None] * self.world
        dist.all_gather_object(whys, why)
        return result, next((w for w in whys if w), None)

    def space(self, m: int, n: int, config: op.Config) -> Space:
        """A workspace of its own, beside those of ``prepare``: a benchmark holds many at once."""
        kind = RowsLayout if isinstance(config, Rows) else Layout
        layout = kind(self.world, m, n, config.marks(m, n), BF16)
        return Space.allocate(dist.group.WORLD, layout, config, self.device)

    def gather(self, t: torch.Tensor) -> list[torch.Tensor]:
        out = [torch.empty_like(t) for _ in range(self.world)]
        dist.all_gather(out, t.contiguous())
        return out

    def operands(self, m: int, n: int, k: int, seed: int) -> Operands:
        """Other values on each rank; every row of x and w has its own scale."""
        g = torch.Generator(device=self.device).manual_seed(1000 * seed + self.rank)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g, device=self.device)

        w = torch.empty((n, k), dtype=FP8, device=self.device)
        for rows in torch.arange(n).split(2048):
            w[rows[0] : rows[-1] + 1] = (rand(len(rows), k) * 2).to(FP8)
        x = (rand(m, k) * 2).to(FP8)
        xs = torch.exp(rand(m, 1) * 0.7) * 0.02
        ws = torch.exp(rand(n) * 0.7) * 0.02
        return x, w, xs, ws

    def verify_norm(self, got: tuple[torch.Tensor, torch.Tensor], args: Operands, norm: Any) -> str:
        """q and s against a sum in float64; "" or what is wrong. The same on all ranks."""
        q, s = got
        parts = self.gather(linear_fp8.linear_fp8(*args, None, torch.float32))
        total = torch.stack([p.double() for p in parts]).sum(0)
        new = (norm.residual.double() + norm.gate.double() * total).to(BF16)
        given = (norm.weight, norm.bias, norm.scale, norm.shift, norm.norm, norm.eps, norm.floor)
        _, q64, s64 = tail.reference(new, None, None, *given)
        want = q64.double() * s64.double()
        error = ((q.double() * s.double() - want).norm() / want.norm()).item()
        wrong = "" if error < 2e-2 else f"error {error:.1e}"  # FP8 steps here and there; NaN: wrong
        bits = (q.view(torch.uint8), s)
        if not all(torch.equal(b, other) for b in bits for other in self.gather(b)):
            wrong += " ranks differ"
        return "" if self.all(not wrong) else wrong or "another rank is wrong"

    def verify(self, y: torch.Tensor, args: Operands) -> str:
        """Compare with parts summed in float64; "" or what is wrong. The same on all ranks."""
        parts = self.gather(linear_fp8.linear_fp8(*args, None, torch.float32))
        exact = torch.stack([p.double() for p in parts])
        want, size = exact.sum(0), exact.abs().sum(0)
        # Each part and the sum are rounded once, by at most 2^-8 of it. float32 parts come from
        # another kernel, and tensor cores truncate: 2^-13 of a standard deviation each 32 products.
        k = args[0].shape[1]
        spread = exact.square().mean().sqrt() * (4 * (k / 32 + 8) * 2.0**-13)
        bound = (want.abs() + size) * 2.0**-8 * 1.01 + spread
        off = ((y.double() - want).abs() / bound).amax().item()
        wrong = "" if off <= 1 else f"{off:.1f} times the bound"  # NaN: wrong
        if not all(torch.equal(y, other) for other in self.gather(y)):
            wrong += " ranks differ"
        return "" if self.all(not wrong) else wrong or "another rank is wrong"
