"""Collectives in graphs: never tried out, dropped, doubled or swapped, whatever else is moved."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import rtc
from rtc import constants, region_ops, regions
from rtc.passes.analysis.collectives import is_collective, is_wait, issued, issues
from rtc.passes.analysis.host import HostInfo, InputInfo, where
from rtc.passes.rewrite import dead_code
from rtc.ranks import Ranks
from rtc.runtime.program import Program

from .conftest import run_ranks

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def traced(fn, *args):
    """A functional graph of `fn`; fake: no collective runs."""
    return make_fx(fn, tracing_mode="fake")(*args)


def summed(x):
    return c10d.wait_tensor.default(c10d.all_reduce.default(x, "sum", "0"))


def x(*shape):
    return torch.ones(shape, dtype=torch.float64)


def order(gm):
    """What a program made from `gm` runs as it is, in its order."""
    ran, op = [], Program.op

    def remember(self, target, args, kwargs, strides=None):
        ran.append((target, strides))
        return op(self, target, args, kwargs, strides)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "op", remember)
        assert region_ops.obstacle(gm) is None
        regions.cut(gm, lambda gm, fakes: gm.forward)
    return ran


def test_what_counts_as_one():
    lib = torch.library.Library("rtc_test_collectives", "FRAGMENT")
    lib.define("fused(Tensor x, int world, str group) -> Tensor")
    lib.define("norm(Tensor x, int group) -> Tensor")
    graph = fx.Graph()
    a = graph.placeholder("a")
    ops = torch.ops.rtc_test_collectives
    for target, args, collective, wait in (
        (c10d.all_reduce.default, (a, "sum", "0"), True, False),
        (c10d.wait_tensor.default, (a,), True, True),
        (ops.fused.default, (a, 2, "0"), True, False),
        (ops.norm.default, (a, 2), False, False),
        (aten.native_group_norm.default, (a, None, None, 1, 2, 3, 4, 1e-5), False, False),
        (aten.mm.default, (a, a), False, False),
    ):
        node = graph.call_function(target, args)
        assert (is_collective(node), is_wait(node)) == (collective, wait), target
        assert issues(node) == (collective and not wait)


def test_regions_keep_the_order_of_collectives():
    """The second one here could run first: its input is there at once. Other ranks may run the
    same graph uncut, and meet them in the program's order."""

    def f(a, b):
        late = summed(torch.mm(torch.mm(torch.mm(a, a), a), a))
        early = summed(b)
        return late + early

    ran = [t for t, _ in order(traced(f, x(4, 4), x(4, 4)))]
    sums = [i for i, t in enumerate(ran) if t is c10d.all_reduce.default]
    products = [i for i, t in enumerate(ran) if t is aten.mm.default]
    assert len(sums) == 2
    assert min(sums) > max(products)


def test_a_result_is_laid_out_after_the_wait():
    """Of a transposed tensor the sum comes out contiguous, and not as traced; before the wait, its
    values are not there to be moved."""
    gm = traced(lambda a, b: torch.mm(summed(torch.mm(a, b).t()), b), x(4, 4), x(4, 4))
    strides = {t: s for t, s in order(gm) if "c10d" in str(t)}
    assert strides[c10d.all_reduce.default] is None
    assert strides[c10d.wait_tensor.default] is not None


def gathered_and_written(a, c, idx):
    both = c10d.all_gather_into_tensor.default(c, 2, "0")
    new = aten.index_put.default(c, [idx], a)
    more = torch.mm(new, new.t())
    both = c10d.wait_tensor.default(both)
    c.copy_(new)
    return both.sum() + more.sum()


def test_memory_is_not_written_while_a_collective_reads_it():
    """From the gather to its wait other ranks read the cache: all writes come after the wait."""
    gm = traced(gathered_and_written, x(2, 4), x(6, 4), torch.tensor([1, 2]))
    early = list(regions.early_writes(copy.deepcopy(gm)).graph.nodes)
    at = {n.target: i for i, n in enumerate(early)}
    assert at[aten.copy_.default] > at[c10d.wait_tensor.default]

    steps, call = [], Program.call

    def remember(self, fn, slots, outputs):
        steps.append(str(getattr(fn, "__self__", fn).code))
        return call(self, fn, slots, outputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "call", remember)
        op = Program.op
        patch.setattr(Program, "op", lambda s, t, *a: steps.append(str(t)) or op(s, t, *a))
        regions.cut(gm, lambda gm, fakes: gm.forward)
    write = [i for i, s in enumerate(steps) if "copy_" in s]
    wait = [i for i, s in enumerate(steps) if "wait_tensor" in s]
    assert write
    assert min(write) > max(wait), steps


def test_collectives_of_weights_are_no_constants():
    def f(weight, a):
        return a * summed(weight * 2) * (weight * 3)

    gm = traced(f, x(4), x(4))
    parts = constants.split(gm, [0])
    assert issued(parts.main.graph) == issued(gm.graph)
    assert issued(parts.constants.graph) == []
    assert len(parts.fakes) == 2  # weight * 2 and weight * 3
    assert constants.split(traced(lambda w, a: a * summed(w), x(4), x(4)), [0]) is None


def test_the_host_evaluates_none():
    gm = traced(lambda w, a: a * (summed(w) + 1), x(4), x(4))
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    infos = {
        n: InputInfo(i, n, n.name, attribute=i == 0, parameter=i == 0) for i, n in enumerate(places)
    }
    host = HostInfo(gm.graph, infos, lambda name: getattr(gm, name))
    assert host.on_host(places[0])
    for n in gm.graph.nodes:
        if is_collective(n) or any(is_collective(a) for a in n.all_input_nodes):
            assert not host.on_host(n), n
            assert host.why_data(n) == "all_reduce"


def test_unused_ones_stay():
    def f(a):
        summed(a * 2)
        return a + 1

    gm = traced(f, x(4))
    assert len(issued(gm.graph)) == 1
    dead_code(gm.graph)
    assert len(issued(gm.graph)) == 1
    ran = [t for t, _ in order(gm)]
    assert ran.count(c10d.all_reduce.default) == ran.count(c10d.wait_tensor.default) == 1


def test_a_refusal_names_the_users_line():
    """Not the one in torch that issues a collective."""
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = (
        '  File "/home/me/video.py", line 7, in forward\n    y = all_reduce(y, "sum", group)\n'
        f'  File "{functional.__file__}", line 179, in all_reduce\n    tensor = ...\n'
    )
    assert where(node) == "/home/me/video.py:7 in forward"


# -- on ranks --------------------------------------------------------------------------------------


class Model(nn.Module):
    """A cache of rows; sums over ranks of a late value, an early one, a weight and (unused) one
    more; a transposed sum. All ranks differ in their weights."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.a, self.b = (nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(8, dtype=torch.float64), requires_grad=False)
        self.register_buffer("rows", torch.zeros(1, 2, 12, 8, dtype=torch.float64))

    def forward(self, x, step: int):
        self.rows.copy_(torch.cat([self.rows[:, :, 3:], x], dim=2))
        cos = torch.cos(torch.arange(12, dtype=torch.float64) + 3 * step)[:, None]
        late = nn.functional.scaled_dot_product_attention(x, self.rows * cos, self.rows)
        late = functional.all_reduce(self.a(self.b(late)), "sum", dist.group.WORLD)
        early = functional.all_reduce(x.mT * 2, "max", dist.group.WORLD)
        functional.all_reduce(x * 3, "sum", dist.group.WORLD)
        bias = functional.all_reduce(self.bias, "sum", dist.group.WORLD)
        return late + early.mT @ early @ x + bias


WAYS = ({"regions": "on"}, None, {}, {"regions": "on", "write_back": True})


def run_each_its_way():
    """Ranks that take different paths through the calls, and write to a weight on their own."""
    rank = dist.get_rank()
    Ranks.join = lambda *a: []  # that would find the ranks' options to differ
    eager, model = Model(rank), Model(rank)
    way = WAYS[rank]
    other = (
        model if way is None else rtc.compile(model, options=rtc.Options(lowering="eager", **way))
    )
    apart = 0.0
    with torch.no_grad():
        for step in range(12):
            if step == 5 and rank == 0:  # on one rank only: a constant of it is made again there
                for m in (eager, model):
                    m.bias.add_(1)
            if step == 8 and rank == 2:  # and the caches of one rank are looked at
                other.rows.sum()
            given = torch.randn(1, 2, 3, 8, dtype=torch.float64)
            want = eager(given, step)
            apart = max(apart, float((other(given, step) - want).abs().max()))
    apart = max(apart, float((other.rows - eager.rows).abs().max()))
    return apart, None if way is None else other.report().counts()


def test_ranks_on_different_paths_meet():
    for apart, counts in run_ranks(run_each_its_way, 4, timeout=60):
        assert apart <= 1e-10
        assert counts is None or counts["hoist_rope"] == counts["ring_cache"] == 1


def table_from_others():
    rank = dist.get_rank()

    class Table(Model):
        def forward(self, x, step: int):
            self.rows.copy_(torch.cat([self.rows[:, :, 3:], x], dim=2))
            table = functional.all_reduce(self.bias, "sum", dist.group.WORLD)
            keys = self.rows * (torch.arange(12)[:, None] * table + step).cos()
            return nn.functional.scaled_dot_product_attention(x, keys, self.rows)

    eager, model = Table(rank), Table(rank)
    # one rank alone asks what would be done: nobody is there to meet
    plan = rtc.explain(model, torch.ones(1, 2, 3, 8, dtype=torch.float64), 0) if rank else None
    compiled = rtc.compile(model, options=rtc.Options(lowering="eager"))
    apart = 0.0
    with torch.no_grad():
        for step in range(8):
            given = torch.randn(1, 2, 3, 8, dtype=torch.float64)
            given = functional.all_reduce(given, "sum", dist.group.WORLD)
            assert type(given) is functional.AsyncCollectiveTensor  # it may be on its way still
            got, want = compiled(given, step), eager(given, step)
            apart = max(apart, float((got - want).abs().max()))
    return apart, str(plan or compiled.report())


def test_a_table_that_others_share_is_device_data():
    for apart, report in run_ranks(table_from_others, 2, timeout=60):
        assert apart <= 1e-10
        assert "depends on all_reduce, known on the device only" in report
