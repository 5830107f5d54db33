"""Layers that are alike are traced once: the joined graph is the one of the whole."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import rtc
from rtc import backend, layers
from rtc.model import PRESETS, build, example_inputs
from rtc.passes.rewrite import copied

pytestmark = pytest.mark.usefixtures("fresh")
PLAIN = rtc.Options(lowering="eager", warn=False)
REPLAY = rtc.Options(lowering="eager", step_graph="simulate", warn=False)
DIM, SLOTS = 8, 6


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(layers, "_LEAST", 0)
    monkeypatch.setattr(layers, "_WORTH", 0.3)


@pytest.fixture
def both(monkeypatch):
    """Every graph is traced in both ways; yields pairs of functional graphs."""
    found = []

    def traced(gm, inputs, inner, aot):
        whole, joined = [], []

        def keep(into):
            def grab(functional, fakes):
                into.append(copied(functional))  # passes change it
                return inner(functional, fakes) if into is joined else functional.forward

            return grab

        aot(copy.deepcopy(gm), list(inputs), keep(whole))
        out = layers_traced(gm, inputs, keep(joined), aot)
        found.append((whole[0], joined[0], out[1]))
        return out

    layers_traced = layers.traced
    monkeypatch.setattr(backend.layers, "traced", traced)
    return found


def ran(gm, seed):
    """Results of a functional graph, and what it leaves in its inputs."""
    g = torch.Generator().manual_seed(seed)

    def real(p):
        val = p.meta["val"]
        if isinstance(val, torch.SymInt):
            return int(val.node.hint)
        out = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)
        return out.copy_(torch.randn(val.shape, generator=g).to(val.dtype))

    inputs = [real(n) for n in gm.graph.nodes if n.op == "placeholder"]
    return list(gm(*inputs)), inputs


def same(whole, joined):
    for (a, mine), (b, its) in [(ran(whole, s), ran(joined, s)) for s in (0, 1)]:
        for x, y in zip((*a, *mine), (*b, *its), strict=True):
            if isinstance(x, torch.Tensor):
                assert x.dtype == y.dtype
                assert x.stride() == y.stride()
                assert torch.equal(x, y)
            else:
                assert x == y


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x, cache, step):
        q, k, v = self.qkv(F.layer_norm(x, (DIM,))).chunk(3, -1)
        n = x.shape[1]
        for c, new in zip(cache, (k, v), strict=True):
            c.copy_(torch.cat([c[:, n:], new], 1))
        turn = torch.cos(torch.arange(SLOTS) * 0.1 + step)[:, None]
        return x + self.o(F.scaled_dot_product_attention(q, cache[0] * turn, cache[1]))


class Deep(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.out = nn.Linear(DIM, DIM)

    def caches(self):
        return [[torch.zeros(1, SLOTS, DIM).double() for _ in "kv"] for _ in self.layers]

    def forward(self, x, caches, step):
        for _ in range(2):  # denoising: each layer's cache is written twice
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, cache, step)
        return self.out(x)


def chain(model, options, calls=6, make=None):
    """Compiled against eager: results, caches, versions of caches."""
    model = model.double()
    twin = copy.deepcopy(model)
    compiled = rtc.compile(model, options=options)
    mine, its = (make or model.caches)(), (make or model.caches)()
    flat = [pytree.tree_leaves(c) for c in (mine, its)]
    with torch.no_grad():
        for step in range(calls):
            x = torch.randn(1, 2, DIM, generator=torch.Generator().manual_seed(step)).double()
            got, want = compiled(x.clone(), mine, step), twin(x.clone(), its, step)
            for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
            for a, b in zip(*flat, strict=True):
                torch.testing.assert_close(a.clone(), b, rtol=1e-12, atol=1e-12)
    return compiled.report().to_dict()["graphs"]


@pytest.mark.parametrize("options", [PLAIN, REPLAY], ids=["plain", "replay"])
def test_a_deep_model(small, both, options):
    (graph,) = chain(Deep(), options)
    (whole, joined, why), *_ = both
    assert not why
    assert not graph["whole"]
    same(whole, joined)
    calls = [
        sorted(str(n.target) for n in gm.graph.nodes if n.op == "call_function" and "val" in n.meta)
        for gm in (whole, joined)
    ]
    assert calls[0] == calls[1]


def test_most_layers_are_not_traced(small, monkeypatch):
    sizes = []
    aot = backend._aot

    def counted(gm, inputs, inner):
        sizes.append(len(gm.graph.nodes))
        return aot(gm, inputs, inner)

    monkeypatch.setattr(backend, "_aot", counted)
    (graph,) = chain(Deep(12), PLAIN, calls=2)
    assert not graph["whole"]
    assert sum(sizes) < graph["nodes"] / 3


@pytest.mark.parametrize("preset", ["tiny", "tiny-fp8"])
def test_the_reference_model(small, both, preset):
    cfg = dataclasses.replace(PRESETS[preset], layers=3)
    model = build(cfg, dtype=torch.float32, seed=0)
    compiled = rtc.compile(model, options=PLAIN)
    compiled(*example_inputs(cfg, 3, seed=1, dtype=torch.float32))
    whole, joined, why = both[0]
    assert not why
    if preset == "tiny":
        same(whole, joined)


class Unbound(Deep):
    """Caches cut from stacks before the layers: views of what they write."""

    def caches(self):
        return [torch.zeros(len(self.layers), 1, SLOTS, DIM).double() for _ in "kv"]

    def forward(self, x, caches, step):
        return super().forward(x, list(zip(*(c.unbind(0) for c in caches), strict=True)), step)


class InPlace(Deep):
    """The residual stream is one tensor that every layer writes."""

    def forward(self, x, caches, step):
        h = x * 1.0
        for layer, cache in zip(self.layers, caches, strict=True):
            h += layer(h, cache, step)
        return h


class Behind(Deep):
    """An early view of a cache is read after a later layer wrote it."""

    def forward(self, x, caches, step):
        first = caches[0][0][:, 1:]
        for layer in self.layers:
            x = layer(x, caches[0], step)
        return x + first.sum()


class Shared(Deep):
    """Two layers' caches are one memory."""

    def caches(self):
        stack = torch.zeros(2 * SLOTS, 1, SLOTS, DIM).double()
        return [[stack[2 * i], stack[2 * i + 1]] for i in range(len(self.layers))]


class Given(Deep):
    """Results that are inputs, views of inputs, ints, nothing, or twice the same."""

    def forward(self, x, caches, step):
        y = super().forward(x, caches, step)
        return y, step + 1, None, x[:, :1], y, caches[0][0]


class Cast(Deep):
    def forward(self, x, caches, step):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            return super().forward(x, caches, step)


class Kept(Deep):
    """Every layer leaves something that is read at the end."""

    def forward(self, x, caches, step):
        seen = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, step)
            seen.append(x[:, :1])
        return torch.cat(seen, 1), x


class Stepping(Deep):
    """Ints that are worked out before the layers, and sizes that follow from them."""

    def forward(self, x, caches, step):
        last = min(step, SLOTS - 1) + 1
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, step * 2 + 1) + cache[1][:, :last].mean()
        return x, last


class Dropping(Deep):
    def forward(self, x, caches, step):
        for layer, cache in zip(self.layers, caches, strict=True):
            x = F.dropout(layer(x, cache, step), 0.0)
        return x


class Turned(Deep):
    """What every layer writes in place lies transposed, and is read by strides."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.randn(DIM, DIM).double().t())
        self.register_buffer("at", torch.tensor([1, 3]))

    def forward(self, x, caches, step):
        for layer, cache in zip(self.layers, caches, strict=True):
            h = self.seen.t().contiguous().as_strided((2, DIM), (DIM, 1))
            x = layer(x, cache, step) + h
            self.seen.index_copy_(0, self.at, x[0])
        return x


class Unlike(Deep):
    """A layer of another kind among them."""

    def __init__(self):
        super().__init__(7)
        self.layers[3].qkv = nn.Sequential(nn.Linear(DIM, 3 * DIM), nn.Tanh())


APART = "another name|other inputs|in another layer"
WHOLE = {
    Unbound: APART,
    InPlace: APART,
    Shared: APART + "|lies in memory",
    Behind: APART,
    Turned: "lies in memory",
}
WHOLE |= {Given: "result", Cast: "autocast"}


@pytest.mark.parametrize(
    "kind",
    [Unbound, InPlace, Behind, Shared, Given, Cast, Kept, Stepping, Dropping, Turned, Unlike],
)
def test_right_or_traced_as_a_whole(small, kind):
    graphs = chain(kind(), PLAIN, calls=5)
    for g in graphs:
        if kind in WHOLE:
            assert re.search(WHOLE[kind], g["whole"]), g["whole"]
        elif kind is not Unlike:
            assert not g["whole"]


def test_a_small_model_is_traced_as_a_whole():
    assert chain(Deep(), PLAIN, calls=1)[0]["whole"] == "it is small"


def test_the_report_says_why(small, monkeypatch):
    monkeypatch.setattr("rtc.report._DEEP", 10)
    compiled = rtc.compile(InPlace().double(), options=PLAIN)
    with torch.no_grad():
        compiled(torch.zeros(1, 2, DIM).double(), Deep().caches(), 0)
    assert "traced one by one: h is written in another layer" in str(compiled.report())
