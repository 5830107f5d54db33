"""What bench_linear_all_reduce.py compares: products, unfused sums, and the fused designs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from rtc.kernels import linear_all_reduce as op
from rtc.kernels import linear_all_reduce_rows as rows
from rtc.kernels import linear_fp8
from rtc.kernels.linear_all_reduce_copies import Copies
from rtc.kernels.linear_all_reduce_gluon import Specialized
from rtc.kernels.linear_all_reduce_movers import Movers
from rtc.kernels.linear_all_reduce_rows import Norm
from rtc.kernels.linear_all_reduce_rows_layout import Rows
from rtc.kernels.linear_all_reduce_space import Layout, Space
from rtc.kernels.modulate_quantize import residual_modulate_quantize

from .check import chunks, following
from .ranks import BF16, Operands, Ranks

Call = Callable[[Operands], Any]


@dataclass
class Candidate:
    """``make`` allocates, collectively. raw: no row scales.

    kind: product, unfused, fused, or alone: a fused kernel without peers.
    """

    name: str
    kind: str
    make: Callable[[], Call]
    config: Any = None
    raw: bool = False
    finish: Callable[[], None] | None = None
    call: Call | None = None
    norm: Norm | None = None  # what follows it, whose q and s it returns

    def described(self) -> dict[str, Any]:
        c = self.config
        config = c and {"design": type(c).__name__, **asdict(c)}
        return {"kind": self.kind, "raw": self.raw, "config": config}


def product(backend: str) -> Call:
    one = torch.ones((), device="cuda")  # outside of graphs: there it would be a kernel each call

    def call(args: Operands) -> torch.Tensor:
        x, w, xs, ws = args
        if backend == "raw, halves":
            half = -(-x.shape[0] // 2)
            parts = [
                torch._scaled_mm(p, w.t(), one, one, out_dtype=BF16, use_fast_accum=True)
                for p in (x[:half], x[half:])
            ]
            return parts[0]
        if backend == "raw":
            return torch._scaled_mm(x, w.t(), one, one, out_dtype=BF16, use_fast_accum=True)
        return linear_fp8.run(backend, x, w, xs, ws, None, BF16, linear_fp8.NARROW)

    return call


def reduced(first: Call) -> Call:
    def call(args: Operands) -> torch.Tensor:
        y = first(args)
        dist.all_reduce(y)
        return y

    return call


def two_shot(ranks: Ranks, m: int, n: int, backend: str) -> Call:
    """torch's symmetric-memory kernel in place on a shared buffer, then a copy of the result."""
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty((m, n), dtype=BF16, device=ranks.device)
    symmetric.rendezvous(buffer, ranks.group)
    one = torch.ones((), device=ranks.device)

    def call(args: Operands) -> torch.Tensor:
        x, w, xs, ws = args
        a, b = (one, one) if backend == "raw" else (xs, ws[None])
        torch._scaled_mm(x, w.t(), a, b, out_dtype=BF16, use_fast_accum=True, out=buffer)
        torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", ranks.group)
        return buffer

    return call


def fused(ranks: Ranks, m: int, n: int, name: str, config: op.Config) -> Candidate:
    spaces = []

    def make() -> Call:
        spaces.append(ranks.space(m, n, config))
        return lambda args: op.run(spaces[0], *args)

    return Candidate(name, "fused", make, config, finish=lambda: spaces[0].check())


def alone(ranks: Ranks, m: int, n: int, name: str, config: op.Config) -> Candidate:
    def make() -> Call:
        layout = Layout(1, m, n, config.marks(m, n), BF16)
        buffer = torch.zeros(layout.bytes, dtype=torch.uint8, device=ranks.device)
        space = Space(layout, 0, [buffer], config)
        return lambda args: op.run(space, *args)

    return Candidate(name, "alone", make, config)


def candidates(ranks: Ranks, m: int, n: int, sweep: bool, baselines: bool) -> list[Candidate]:
    """``baselines``: all of them, not only cuBLAS without and with NCCL."""
    out = [
        Candidate("cublas, no row scales", "product", lambda: product("raw"), raw=True),
        Candidate(
            "cublas, in two halves of rows", "product", lambda: product("raw, halves"), raw=True
        ),
        Candidate("cublas row-wise", "product", lambda: product("cublas")),
        Candidate("triton", "product", lambda: product("triton")),
        Candidate("raw + nccl", "unfused", lambda: reduced(product("raw")), raw=True),
        Candidate("cublas + nccl", "unfused", lambda: reduced(product("cublas"))),
        Candidate("triton + nccl", "unfused", lambda: reduced(product("triton"))),
        Candidate("raw + two-shot", "unfused", lambda: two_shot(ranks, m, n, "raw"), raw=True),
        Candidate("cublas + two-shot", "unfused", lambda: two_shot(ranks, m, n, "cublas")),
    ]
    if not baselines:
        out = [c for c in out if "triton" not in c.name and "two-shot" not in c.name]
    base = op.default(m, n, torch.cuda.get_device_properties(ranks.device).multi_processor_count)
    out += [fused(ranks, m, n, name, c) for name, c in by_rows(sweep)]
    out += [fused(ranks, m, n, name, c) for name, c in movers(base, sweep)]
    out += [fused(ranks, m, n, name, c) for name, c in copied(n, sweep)]
    for name, c in specialized(ranks, m, n, sweep):
        out += [fused(ranks, m, n, name, c), alone(ranks, m, n, name + ", alone", c)]
    return out


def followed(ranks: Ranks, m: int, n: int, sweep: bool, baselines: bool) -> list[Candidate]:
    """The sum up to the next product's FP8 operand: each candidate, then the norm's kernel."""
    norm = replace(following(ranks, m, n), whole=False)

    def then(make: Callable[[], Call]) -> Callable[[], Call]:
        def made() -> Call:
            first = make()

            def call(args: Operands) -> Any:
                n = norm
                _, q, s = residual_modulate_quantize(
                    n.residual, first(args), n.gate, None, None, n.scale, n.shift, n.norm, n.eps,
                    n.floor,
                )  # fmt: skip
                return q, s

            return call

        return made

    out = candidates(ranks, m, n, sweep, baselines)
    out = [c for c in out if "halves" not in c.name]
    for c in out:
        c.make, c.norm = then(c.make), norm

    def whole(name: str, config: Rows) -> Candidate:
        spaces = []

        def make() -> Call:
            spaces.append(ranks.space(m, n, config))
            # As between two such ops: the residual is one rank's, row by row.
            steady = replace(norm, compare=False)
            return lambda args: rows.launch(spaces[0], *args, steady)[1:]

        return Candidate(f"{name}, norm inside", "fused", make, config,
                         finish=lambda: spaces[0].check(), norm=norm)  # fmt: skip

    out += [whole(name, c) for name, c in by_rows(True)]
    return out


def by_rows(sweep: bool) -> Iterator[tuple[str, Rows]]:
    yield "rows", Rows()
    if sweep:
        yield "rows, 8 warps x3", Rows(8, 3)
        yield "rows, 8 warps x2", Rows(8, 2)
        yield "rows, plain launch", Rows(cooperative=False)
        yield "rows, one after the other", Rows(beside=False)


def movers(base: Movers, sweep: bool) -> Iterator[tuple[str, Movers]]:
    yield "movers", base
    yield "movers, push late tiles too", replace(base, direct=0)
    yield "movers, early 1", replace(base, early=1)
    yield "movers, early 2", replace(base, early=2, batch=1)
    yield "no movers, all direct", replace(base, movers=0, direct=99)
    if not sweep:
        return
    yield "movers, batch 1", replace(base, batch=1)
    yield "movers, batch 4", replace(base, batch=4)
    yield "movers, direct 2", replace(base, direct=2)
    yield "movers, copies 1", replace(base, copies=1)
    yield "movers, copies 4", replace(base, copies=4)
    yield "movers, split 1", replace(base, split=1)
    yield "movers, split 2", replace(base, split=2)
    yield "movers, split 8", replace(base, split=8)
    yield "movers, 8 movers", replace(base, movers=min(8, base.movers))
    yield "movers, 3 stages", replace(base, stages=3)
    yield "movers, 5 stages", replace(base, stages=5)
    yield "movers, 8 warps", replace(base, warps=8)
    yield "movers, group 6", replace(base, group=6)
    wide = replace(base, bn=256, warps=8, stages=3)
    yield "movers, wide", replace(wide, programs=90, movers=12)
    yield "movers, wide, 120", replace(wide, programs=120, movers=12)
    yield "no movers, 132", replace(base, programs=132, movers=0)
    deep = replace(base, stages=5)
    yield "movers, 5 stages, split 1", replace(deep, split=1)
    yield "movers, 5 stages, split 2", replace(deep, split=2)
    yield "movers, 5 stages, kept", replace(deep, keep=True)
    yield "movers, 5 stages, kept, split 1", replace(deep, keep=True, split=1)
    yield "movers, 5 stages, kept, early 1", replace(deep, keep=True, early=1)
    yield "movers, 6 stages, split 1", replace(base, stages=6, split=1)
    yield "movers, 12 stages of 64, split 1", replace(base, stages=12, bk=64, split=1)


def specialized(ranks: Ranks, m: int, n: int, sweep: bool) -> Iterator[tuple[str, Specialized]]:
    count = torch.cuda.get_device_properties(ranks.device).multi_processor_count
    base = Specialized.fitting(m, n, count)
    yield "gluon", base
    yield "gluon, 64 of K", replace(base, bk=64)
    if sweep:
        yield "gluon, all short", replace(base, short=-(-n // 128))
        yield "gluon, all tall", replace(base, short=0)


def copied(n: int, sweep: bool) -> Iterator[tuple[str, Copies]]:
    yield "copies 3", Copies(chunks(n, 3))
    yield "copies 2", Copies(chunks(n, 2))
    uneven = [n * 2 // 5 // 256 * 256, n // 3 // 256 * 256]
    yield "copies 3, falling", Copies((*uneven, n - sum(uneven)))
    yield "copies 1", Copies((n,))
    if not sweep:
        return
    yield "copies 4", Copies(chunks(n, 4))
    yield "copies 6", Copies(chunks(n, 6))
    yield "copies 3, row-wise", Copies(chunks(n, 3), raw=False)
    half = n * 2 // 3 // 256 * 256
    yield "copies 2, falling", Copies((half, n - half))
    yield "copies 3, 1 CTA", Copies(chunks(n, 3), ctas=1)
    yield "copies 3, 8 rows", Copies(chunks(n, 3), rows=8)
    yield "copies 3, 4 warps", Copies(chunks(n, 3), warps=4, ctas=4)
