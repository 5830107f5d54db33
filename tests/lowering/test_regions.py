"""Graphs cut into regions: the same numbers, alike regions compiled once, writes in place."""

import copy

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import rtc
from rtc import region_ops, regions
from tests.forms.registry import run
from tests.forms.test_forms import BY_NAME, compile_with

aten = torch.ops.aten


# A quarter of the forms here; bench/fuzz_forms.py --regions runs all of them.
FORMS = [n for n in sorted(BY_NAME) if BY_NAME[n].syncs is None][::4]


@pytest.mark.parametrize("name", FORMS)
def test_forms_in_regions(name):
    result = run(BY_NAME[name], compile_with(rtc.Options(lowering="eager", regions="on")))
    assert result.passed, result


def cut(fn, *args):
    """``fn`` traced with functional writes: its graph ends in copy_ of what it returns first."""
    gm = make_fx(fn, tracing_mode="fake")(*args)
    assert region_ops.obstacle(gm) is None
    return regions.cut(gm, lambda g, fakes: lambda a: g(*a))


def test_a_write_happens_in_place_and_is_read_by_heavy_ops():
    def step(cache, idx, rows, w):
        c1 = aten.index_put(cache, [idx], rows * 2)
        out = aten.mm(c1, w) + 1
        aten.copy_(cache, c1)
        return (out,)

    args = torch.randn(6, 4), torch.tensor([1, 3]), torch.randn(2, 4), torch.randn(4, 5)
    program, found = cut(step, *args)
    assert (found.in_place, found.writes) == (1, 1)
    want = args[0].clone()
    want[args[1]] = args[2] * 2
    at = args[0].data_ptr()
    (out,) = program(list(args))
    assert args[0].data_ptr() == at
    assert torch.equal(args[0], want)
    torch.testing.assert_close(out, want @ args[3] + 1)


def test_readers_of_older_contents_come_before_the_write():
    """The read of the old content has a late user: it must not sink below the write."""

    def step(cache, idx, rows, w):
        old = cache.sum(0, keepdim=True) * 3
        c1 = aten.index_put(cache, [idx], rows)
        a = aten.mm(c1, w)
        c2 = aten.index_put(c1, [idx + 1], rows * 2)
        b = aten.mm(c2, w)
        aten.copy_(cache, c2)
        return (a + b, aten.mm(old, w))

    args = torch.randn(6, 4), torch.tensor([1, 3]), torch.randn(2, 4), torch.randn(4, 5)
    want = step(args[0].clone(), *args[1:])
    program, found = cut(step, *args)
    assert found.in_place == 1
    for have, w in zip(program(list(args)), want, strict=True):
        torch.testing.assert_close(have, w)


def test_a_read_of_the_old_content_after_the_write_keeps_the_write_at_the_end():
    def step(cache, idx, rows, w):
        c1 = aten.index_put(cache, [idx], rows)
        a = aten.mm(c1, w)
        b = aten.mm(cache * 1.5, w)  # the old content, after the write in the graph
        aten.copy_(cache, c1)
        return (a, b)

    args = torch.randn(6, 4), torch.tensor([1, 3]), torch.randn(2, 4), torch.randn(4, 5)
    clone = args[0].clone()
    want = step(clone, *args[1:])
    program, found = cut(step, *args)
    assert (found.in_place, found.writes) == (0, 1)
    for have, w in zip(program(list(args)), want, strict=True):
        torch.testing.assert_close(have, w)
    assert torch.equal(args[0], clone)


def test_a_write_seen_in_two_shapes_has_one_input_of_its_memory():
    def step(cache, idx, rows, w):
        flat = aten.view(cache, [6, 4])
        c1 = aten.index_put(flat, [idx], rows + aten.view(cache, [24])[:8].view(2, 4))
        out = aten.mm(c1, w)
        aten.copy_(cache, aten.view(c1, [2, 3, 4]))
        return (out,)

    args = torch.randn(2, 3, 4), torch.tensor([1, 3]), torch.randn(2, 4), torch.randn(4, 5)
    clone = args[0].clone()
    want = step(clone, *args[1:])
    program, _ = cut(step, *args)
    torch.testing.assert_close(program(list(args)), want)
    assert torch.equal(args[0], clone)


def test_alike_layers_are_compiled_once():
    def step(x, *ws):
        for w in ws:
            x = x + torch.relu(aten.mm(torch.tanh(x), w))
        return (x,)

    ws = [torch.randn(4, 4) for _ in range(9)]
    x = torch.randn(3, 4)
    program, found = cut(step, x, *ws)
    assert (found.heavy, found.regions, found.unique) == (9, 10, 3)
    torch.testing.assert_close(program([x, *ws]), step(x, *ws))


def test_regions_that_differ_in_a_constant_or_a_dtype_are_not_alike():
    def step(x, w):
        a = aten.mm(x * 2, w)
        b = aten.mm(a * 3, w)
        c = aten.mm(b.to(torch.float16).to(torch.float32) * 3, w)
        return (c,)

    x, w = torch.randn(3, 4), torch.randn(4, 4)
    program, found = cut(step, x, w)
    assert found.unique == 3
    torch.testing.assert_close(program([x, w]), step(x, w))


def test_what_cannot_be_cut_says_why():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.randn(2)
    y = graph.call_function(aten.add_.Tensor, (x, x))
    y.meta["val"] = torch.randn(2)
    graph.output((y,))
    why = region_ops.obstacle(fx.GraphModule(torch.nn.Module(), graph))
    assert why == f"{y.name} writes in place"


@pytest.mark.cpp
def test_deep_models_compile_a_block_once():
    """Layers of a model, code generated: as many regions as in one layer, the model's numbers."""
    from rtc.model import PRESETS, build, example_inputs
    from rtc.testing import check_compile

    cfg = PRESETS["tiny"]
    result = check_compile(
        lambda: build(cfg, dtype=torch.float64, seed=0),
        lambda s: (example_inputs(cfg, s, seed=1, dtype=torch.float64), {}),
        steps=30, options=rtc.Options(regions="on"), every=7,
    )  # fmt: skip
    assert result.passed, result


def test_caches_of_a_plain_call_are_stored_one_after_the_other():
    """Run op by op, a functional graph would hold the new contents of all caches at its end."""

    def step(a, b, x):
        a1 = torch.cat([a[2:], x])
        b1 = torch.cat([b[2:], a1[:2]])
        out = b1.sum() + a[0].sum()
        aten.copy_(a, a1)
        aten.copy_(b, b1)
        return (out,)

    args = torch.randn(6, 4), torch.randn(6, 4), torch.randn(2, 4)
    gm = make_fx(step, tracing_mode="fake")(*args)
    want = [x.clone() for x in args]
    out = step(*want)
    regions.early_writes(gm)
    names = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert names.index(aten.copy_.default) < len(names) - 2
    torch.testing.assert_close(gm(*args), out, rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(args, want, strict=True))


def test_a_buffer_that_is_counted_up():
    """``self.n += 1`` makes the graph hand out what it wrote."""

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros((), dtype=torch.long))
            self.register_buffer("k", torch.zeros(1, 6, 4).double())

        def forward(self, x):
            self.k.copy_(torch.cat([self.k[:, 1:], x], 1))
            y = (x @ self.k.mT * (1 + self.n)).softmax(-1) @ self.k
            self.n += 1
            return y

    model = Counted()
    options = rtc.Options(lowering="eager", regions="on", step_graph="simulate", warn=False)
    compiled = rtc.compile(copy.deepcopy(model), options=options)
    with torch.no_grad():
        for _ in range(8):
            x = torch.randn(1, 1, 4).double()
            torch.testing.assert_close(compiled(x), model(x))
    assert compiled.n == model.n == 8
