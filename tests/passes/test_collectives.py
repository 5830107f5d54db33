"""What moves ops about leaves collectives in their order, and memory alone that one still reads."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx

import rtc
from rtc import regions
from rtc.backend import Compiler
from rtc.exchanges import unordered
from rtc.passes import fuse_modulate_quantize as modulate
from rtc.passes.analysis.collectives import issued, met
from rtc.runtime.program import Program

C = 32
F8 = torch.float8_e4m3fn
aten, c10d = torch.ops.aten, torch.ops._c10d_functional
OPS = torch.ops.rtc


def total(x, op="sum", group="0"):
    return c10d.wait_tensor(c10d.all_reduce(x, op, group))


def traced(fn, *args):
    """A functional graph of `fn`; fake: no collective runs."""
    return make_fx(fn, tracing_mode="fake")(*args)


def x(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_what_is_met_tells_sums_apart():
    """Of one shape, but another reduction, group, order: ranks must not take one for the other."""

    def graph(*sums):
        return traced(lambda a: [total(a, *s) for s in sums], x(4, 8)).graph

    kinds = [graph(("sum",)), graph(("max",)), graph(("sum", "1"))]
    kinds += [graph(("sum",), ("max",)), graph(("max",), ("sum",)), graph()]
    kinds += [traced(lambda a: total(a), y).graph for y in (x(4, 9), x(4, 8).double())]
    for say in (issued, met):
        said = [say(g) for g in kinds]
        assert all(said.count(s) == 1 for s in said), said
        assert say(graph(("sum",))) == said[0]
    flat = traced(lambda a: total(a.flatten()).view(a.shape), x(4, 8)).graph
    assert met(flat) == met(kinds[0])
    assert issued(flat) != issued(kinds[0])


def test_what_is_met_is_the_same_in_one_op():
    args = (x(4, 8).to(F8), x(6, 8).to(F8), torch.ones(()), torch.ones(()))
    bf16 = torch.bfloat16
    one = traced(lambda *p: OPS.linear_all_reduce.default(*p, bf16, 2, "g"), *args).graph
    two = traced(lambda *p: total(OPS.linear_fp8.default(*p, None, bf16), group="g"), *args).graph
    assert met(one) == met(two)
    assert issued(one) != issued(two)
    for other in ("max", "sum"):
        group = "g" if other == "max" else "h"
        three = traced(
            lambda *p, o=other, g=group: total(OPS.linear_fp8.default(*p, None, bf16), o, g), *args
        )
        assert met(three.graph) != met(one)


# -- norms that wait for a vector ------------------------------------------------------------------


def quantize(y):
    y = y.flatten(0, -2).float()
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (y / scale).to(F8), scale


def summed_vector(h, w, r, other, vector):
    """The scale comes from other ranks, and is asked for after something else is."""
    top = r + total(h @ w)
    other = total(other, "max")
    scale = total(vector)
    return *quantize(F.layer_norm(top, (C,)) * (1 + scale)), top, other


def late_vector(h, w, r, other, vector):
    """As late, but of no rank's but one's own."""
    top = r + total(h @ w)
    other = total(other, "max")
    return *quantize(F.layer_norm(top, (C,)) * (1 + vector.sin())), top, other


@pytest.mark.parametrize(("f", "residual"), [(summed_vector, 0), (late_vector, 1)])
def test_no_collective_is_drawn_before_another(f, residual):
    gm = traced(f, x(8, C), x(C, C), x(8, C), x(C), x(C))
    before = met(gm.graph)
    out = modulate.run(types.SimpleNamespace(gm=gm))
    gm.graph.lint()
    assert out.applied == 1
    assert met(gm.graph) == before
    fused = [n for n in gm.graph.nodes if n.target is OPS.residual_modulate_quantize.default]
    assert len(fused) == residual


# -- regions ---------------------------------------------------------------------------------------


def seen_and_waited_for(a, c, idx):
    """A view of what comes in stands before the wait: nothing is read there."""
    all_of_it = c10d.all_reduce.default(c, "sum", "0").view(4, 6)
    new = aten.index_put.default(c, [idx], a)
    more = new @ new.t()
    all_of_it = c10d.wait_tensor.default(all_of_it)
    out = all_of_it.sum() + more.sum()
    c.copy_(new)
    return out


def waited_for_in_place(a, c, idx):
    """A wait hands on the memory that it was given: no collective, the cache itself here."""
    old = c10d.wait_tensor.default(c)
    new = aten.index_put.default(c, [idx], a)
    more = new @ new.t()
    out = (old @ more.relu()[:4, :4]).sum() + more.sum()
    c.copy_(new)
    return out


@pytest.mark.parametrize("f", [seen_and_waited_for, waited_for_in_place], ids=lambda f: f.__name__)
def test_writes_come_after(f):
    """What reads the old content comes first, in a graph run op by op and in one that is cut."""
    gm = traced(f, x(2, 4), x(6, 4), torch.tensor([1, 2]))
    early = list(regions.early_writes(copy.deepcopy(gm)).graph.nodes)
    write = next(i for i, n in enumerate(early) if n.target is aten.copy_.default)
    last = c10d.wait_tensor.default if f is seen_and_waited_for else aten.mm.default
    assert write > max(i for i, n in enumerate(early) if n.target is last)

    steps, op, call = [], Program.op, Program.call

    def seen(self, target, *args):
        steps.append(str(target))
        return op(self, target, *args)

    def called(self, fn, slots, outputs):
        steps.append(fn.code)
        return call(self, fn, slots, outputs)

    def compiled(gm, fakes):
        fn = make_boxed_func(gm.forward)
        fn.code = gm.code
        return fn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "op", seen)
        patch.setattr(Program, "call", called)
        regions.cut(gm, compiled)
    write = min(i for i, s in enumerate(steps) if "copy_" in s)
    assert write > max(i for i, s in enumerate(steps) if str(last) in s), steps


def test_a_pending_result_is_not_laid_out():
    """Of a transposed tensor the sum comes out contiguous, not as traced: only a wait may copy."""
    strides = {}

    def seen(self, target, args, kwargs, laid=None):
        strides[target] = laid
        return self._new()

    def f(a):
        y = c10d.all_reduce.default(a.t(), "sum", "0")
        return c10d.wait_tensor.default(y.unsqueeze(0)) @ a

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "op", seen)
        regions.cut(traced(f, x(4, 4)), lambda gm, fakes: make_boxed_func(gm.forward))
    assert strides[c10d.all_reduce.default] is None
    assert strides[c10d.wait_tensor.default] is not None


# -- collectives that Inductor does not know -------------------------------------------------------


@torch.library.custom_op("rtc_test::total", mutates_args=())
def own_total(x: torch.Tensor, group: str) -> torch.Tensor:
    return x * 2


@own_total.register_fake
def _(x, group):
    return torch.empty_like(x)


class Window(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, 2, 12, 8, dtype=torch.float64))

    def forward(self, x, step: int):
        self.rows.copy_(torch.cat([self.rows[:, :, 3:], x], dim=2))
        keys = self.rows * (torch.arange(12, dtype=torch.float64)[:, None] + 3 * step).cos()
        y = torch.nn.functional.scaled_dot_product_attention(x, keys, self.rows)
        return torch.ops.rtc_test.total(y, "0")


@pytest.mark.parametrize("cut", ["off", "on"])
def test_other_libraries_keep_their_place(cut, monkeypatch):
    """As a whole, Inductor is given no graph in which it would move one past another."""
    given = []

    def lower_one(self, gm, fakes):
        given.append(gm)
        return make_boxed_func(gm.forward)

    monkeypatch.setattr(Compiler, "_lower_one", lower_one)
    eager, model = Window(), Window()
    compiled = rtc.compile(model, options=rtc.Options(lowering="inductor", regions=cut))
    with torch.no_grad():
        for step in range(6):
            a = torch.randn(1, 2, 3, 8, dtype=torch.float64)
            torch.testing.assert_close(compiled(a, step), eager(a, step), rtol=0, atol=1e-10)
    notes = compiled.report().to_dict()["graphs"][0]["notes"]
    assert any("would not keep rtc_test.total.default in its place" in n for n in notes) == (
        cut == "off"
    )
    assert bool(given) == (cut == "on")
    assert not any(unordered(gm) for gm in given)
    compiled.close()
