"""Checks of rtc::linear_all_reduce that need several GPUs: right, alike, under skew, bounded."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

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

from .ranks import BF16, Operands, Ranks

SMALL = [
    ("movers", Movers()),
    ("movers, all direct", Movers(programs=132, movers=0)),
    ("movers, early", Movers(programs=13, movers=5, early=2, lag=1, direct=0)),
    ("movers, few", Movers(programs=7, movers=3, early=1, batch=3, direct=2, split=2, copies=1)),
    ("movers, wide", Movers(bn=256, warps=8, stages=3, programs=60, direct=0)),
    ("movers, kept", Movers(stages=5, keep=True)),
    ("movers, few, kept", Movers(programs=7, movers=3, early=1, direct=2, split=1, keep=True)),
    ("gluon", Specialized()),
    ("gluon, tall", Specialized(short=0)),
    ("gluon, few", Specialized(programs=7, short=4, bk=64)),
    ("rows", Rows()),
    ("rows, few", Rows(warps=4, per_sm=1, multiprocessors=7, beside=False)),
]


def chunks(n: int, count: int) -> tuple[int, ...]:
    """Of multiples of 16, the first ones larger."""
    width = -(-n // count // 16) * 16
    out = [width] * (n // width)
    return (*out, n - sum(out)) if n > sum(out) else tuple(out)


def everything(ranks: Ranks, replays: int, only: list[str] | None) -> bool:
    """Run all, or those whose names contain one of ``only``; a line each. Whether all passed."""
    torch.manual_seed(0)
    checks: list[tuple[str, Callable[[], str]]] = []
    for name, config in SMALL:
        checks.append((f"values: {name}", lambda c=config: values(ranks, lambda n: c)))
    for raw in (True, False):
        name = "values: copies" + (", raw" if raw else ", row-wise")
        checks.append((name, lambda r=raw: values(ranks, lambda n: Copies(chunks(n, 3), raw=r))))
    n = 1280
    for name, config in [*SMALL, ("copies", Copies(chunks(n, 3)))]:
        checks.append((f"replays: {name}", lambda c=config: skewed(ranks, n, c, replays)))
    for name, config in [c for c in SMALL if isinstance(c[1], Rows)]:
        for n in (1280, 7680):
            named = f"replays: {name}, norm inside, {n} columns"
            checks.append((named, lambda c=config, n=n: skewed(ranks, n, c, replays, norm=True)))
    checks.append(("rows: a residual that differs", lambda: differing(ranks, "residual")))
    checks.append(("rows: a vector that differs", lambda: differing(ranks, "shift")))
    checks.append(("compiled chain", lambda: compiled(ranks)))
    checks.append(("1,000 first-pass lengths", lambda: lengths(ranks, 1000)))
    checks.append(("a peer that never comes: movers", lambda: absent(ranks, Movers())))
    checks.append(("a peer that never comes: rows", lambda: absent(ranks, Rows())))
    checks.append(("a peer that never comes: copies", lambda: absent(ranks, Copies((256, 256)))))
    checks.append(("a peer that never comes: gluon", lambda: absent(ranks, Specialized(short=2))))
    good = True
    if only:
        checks = [c for c in checks if any(o in c[0] for o in only)]
    for name, check in checks:
        wrong, why = ranks.attempt(f"check {name}", check)
        why = why or wrong
        good = good and not why
        ranks.say(f"  {'ok  ' if not why else 'FAIL'} {name}{': ' + why if why else ''}")
    return good


def values(ranks: Ranks, config: Callable[[int], op.Config]) -> str:
    """Odd and real shapes, several calls each, through the op, poisoned outputs."""
    for m, n, k in [(757, 1280, 2048), (757, 7680, 1024), (37, 112, 160), (300, 4112, 208)]:
        c = config(n)
        op.prepare(ranks.group, m, n, BF16, c)
        try:
            for seed in range(5):
                args = ranks.operands(m, n, k, seed)
                poison = torch.full((m, n), float("nan"), dtype=BF16, device=ranks.device)
                del poison  # the caching allocator hands its memory to the result
                y = op.linear_all_reduce(*args, BF16, ranks.world, ranks.group)
                wrong = ranks.verify(y, args)
                if not wrong and not isinstance(c, (Copies, Rows)):
                    wrong = bits(ranks, y, args)
                if wrong:
                    return f"[{m}, {n}, {k}] call {seed}: {wrong}"
            op.check()
        finally:
            torch.cuda.synchronize()
            dist.barrier()
            op.release(ranks.group)
    return ""


def bits(ranks: Ranks, y: torch.Tensor, args: Operands) -> str:
    """The formula with the same product's parts, to the last bit."""
    part = linear_fp8.run("triton", *args, None, BF16, linear_fp8.NARROW)
    same = torch.equal(y, op.reference(ranks.gather(part), BF16))
    return "" if ranks.all(same) else "not the formula's bits"


def following(ranks: Ranks, m: int, n: int) -> Norm:
    g = torch.Generator(device=ranks.device).manual_seed(5)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=ranks.device, dtype=BF16)

    vectors = rand(n), None, None, 1 + 0.1 * rand(n), rand(n)
    return Norm(rand(m, n), *vectors, "layer", 1e-6, 1e-4, whole=True)


def skewed(ranks: Ranks, n: int, config: op.Config, replays: int, norm: bool = False) -> str:
    """A graph of three calls (odd: slots change places), replayed with random delays a rank.

    Operands change between replays, outputs are poisoned; every result of every replay is compared
    with the first result for its operands, which is checked by value. norm: of sum, q and s.
    """
    m, k, calls, sets = 757, 512, 3, 5
    space = ranks.space(m, n, config)
    after = following(ranks, m, n)

    def call(args: Operands) -> list[torch.Tensor]:
        if not norm:
            return [op.run(space, *args)]
        new, q, s = rows.launch(space, *args, after)
        assert q is not None
        assert s is not None
        return [new, q, s]

    def verify(made: list[torch.Tensor], args: Operands) -> str:
        if norm:
            return ranks.verify_norm((made[1], made[2]), args, after)
        return ranks.verify(made[0], args)

    pool = [[ranks.operands(m, n, k, 10 * s + c) for c in range(calls)] for s in range(sets)]
    want: list[list[torch.Tensor]] = []
    for args_of_calls in pool:
        made = [call(args) for args in args_of_calls]
        want.append([t for ts in made for t in ts])
        for ts, args in zip(made, args_of_calls, strict=True):
            wrong = verify(ts, args)
            if wrong:
                return wrong
    static = [tuple(t.clone() for t in args) for args in pool[0]]
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = [t for args in static for t in call(args)]
    dist.barrier()
    # All ranks choose the same operands; each its own delays.
    same, own = random.Random(0), random.Random(ranks.rank + 1)
    bad = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for i in range(replays):
        s = same.randrange(sets)
        for here, there in zip(static, pool[s], strict=True):
            for a, b in zip(here, there, strict=True):
                a.view(torch.uint8).copy_(b.view(torch.uint8))
        for y in ys:
            y.view(torch.uint8).fill_(0x7F)  # NaN in FP8, far off in the others
        if own.random() < 0.5:
            torch.cuda._sleep(own.randrange(200_000))  # up to about 0.1 ms
        graph.replay()
        for y, w in zip(ys, want[s], strict=True):
            bad += (y.view(torch.uint8) != w.view(torch.uint8)).sum()
        if i % 256 == 255:  # the host must not run ahead without end
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    space.check()
    count = int(bad.item())
    dist.barrier()
    return "" if ranks.all(count == 0) else f"{count} bytes of this rank differ"


def compiled(ranks: Ranks) -> str:
    """Chained calls in one graph of torch.compile: every call's result survives the next call."""
    m, n, k = 96, 512, 512
    sets = [ranks.operands(m, n, k, s) for s in range(3)]
    op.prepare(ranks.group, m, n, BF16, Movers(programs=8, movers=4))

    def chain() -> list[torch.Tensor]:
        ys = []
        for args in sets:
            ys.append(torch.ops.rtc.linear_all_reduce(*args, BF16, ranks.world, ranks.group))
        return [*ys, ys[0] + ys[1], ys[1] * ys[2]]

    try:
        want = chain()
        got = torch.compile(chain, fullgraph=True)()
        same = all(torch.equal(a, b) for a, b in zip(want[:3], got[:3], strict=True))
        near = all(
            torch.allclose(a, b, 2**-7, 1e-3) for a, b in zip(want[3:], got[3:], strict=True)
        )
        wrong = [ranks.verify(y, args) for y, args in zip(got[:3], sets, strict=True)]
        return "".join(wrong) if ranks.all(same and near) else f"compiled differs {same} {near}"
    finally:
        torch.cuda.synchronize()
        dist.barrier()
        op.release(ranks.group)


def lengths(ranks: Ranks, count: int) -> str:
    """Token counts without a workspace: values now and then, and not a byte more memory."""
    n, k, longest = 512, 256, count + 8
    args = ranks.operands(longest, n, k, 0)

    def call(m: int) -> torch.Tensor:
        x, w, xs, ws = args
        return op.linear_all_reduce(x[:m], w, xs[:m], ws, BF16, ranks.world, ranks.group)

    for m in (longest, 1, longest // 2):
        call(m)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), op.reserved()
    free = torch.cuda.mem_get_info()[0]
    for m in range(1, count + 1):
        y = call(m)
        if m % 97 == 0:
            wrong = ranks.verify(y, (args[0][:m], args[1], args[2][:m], args[3]))
            if wrong:
                return f"{m} tokens: {wrong}"
    del y
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), op.reserved()
    grown = [b - a for a, b in zip(before, after, strict=True)]
    lost = free - torch.cuda.mem_get_info()[0]
    # The checks' own float64 tensors may make the allocator reserve more; the op's may not.
    return "" if grown[0] == 0 and grown[2] == 0 and lost <= 64 << 20 else f"{grown}, {lost} bytes"


def differing(ranks: Ranks, what: str) -> str:
    """A rank has another residual (its second row) or vector: NaN, and the reason, on all ranks."""
    m, n, k = 757, 1280, 512
    space = ranks.space(m, n, Rows())
    args, after = ranks.operands(m, n, k, 0), following(ranks, m, n)
    wrong = "" if rows.launch(space, *args, after)[1].float().isfinite().all() else "NaN at first"
    if ranks.rank == ranks.world - 1:
        other = getattr(after, what).clone()
        other[1] = -other[1] if other.dim() == 2 else 9.0
        other[2:50] *= 2  # of a vector, one value alone may be within roundings
        after = dataclasses.replace(after, **{what: other})
    _, q, s = rows.launch(space, *args, after)
    assert q is not None
    if not (q.float() * s)[1].isnan().all():
        wrong += " a row that ranks have otherwise is not NaN"
    torch.cuda.synchronize()
    dist.barrier()
    if not (rows.launch(space, *args, after)[0]).isnan().all():
        wrong += " the next call is not NaN"
    try:
        space.check()
        wrong += " no error was reported"
    except RuntimeError as e:
        wrong += "" if "different" in str(e) else f" {e}"
    torch.cuda.synchronize()
    dist.barrier()
    return "" if ranks.all(not wrong) else wrong or "another rank is wrong"


def absent(ranks: Ranks, config: op.Config) -> str:
    """Rank 0 calls alone: it must come back, say so, and return nothing that looks right."""
    m, n, k = 128, 512, 256
    args = ranks.operands(m, n, k, 0)
    space = ranks.space(m, n, config)
    space.limit = 2000
    wrong = ""
    if ranks.rank == 0:
        for _ in range(3):
            y = op.run(space, *args)
        if not y.isnan().all():
            wrong = "a result without the peer's part is not NaN"
        try:
            space.check()
            wrong += " no error was reported"
        except RuntimeError:
            pass
    torch.cuda.synchronize()
    dist.barrier()
    return "" if ranks.all(not wrong) else wrong or "rank 0 is wrong"
