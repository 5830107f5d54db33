"""What the passes make of a few tiny models, pinned as text: a graph that changes is seen here.

Queries, keys and values come in as arguments, so that nothing but caches is in the graphs. Nodes
are numbered anew, since names differ between versions of torch. After a change that is meant, run
with EXPECTTEST_ACCEPT=1 and read the difference.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import re
from unittest import mock

import expecttest
import torch
import torch.nn.functional as F
from torch import fx, nn

import rtc
from rtc.passes import pipeline

SHORT = {torch.float64: "f64", torch.int64: "i64", torch.float32: "f32", torch.bool: "b8"}
# Some versions of torch leave these where others do not; they say nothing about the passes.
SKIPPED = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def printed(gm: fx.GraphModule, names: dict[str, str]) -> str:
    """One line a node: ``%number: dtype[shape] = op(arguments)``.

    ``names``: names of placeholders in the user's words; rtc's own are told as they are.
    """
    numbers: dict[fx.Node, str] = {}
    lines = []

    def arg(a) -> str:
        if isinstance(a, fx.Node):
            return numbers[a]
        if isinstance(a, (list, tuple)):
            return f"[{', '.join(map(arg, a))}]"
        return "end" if a == torch.iinfo(torch.int64).max else str(a)

    for node in gm.graph.nodes:
        if node.target in SKIPPED:
            numbers[node] = numbers[node.args[0]]
            continue
        if node.op == "output":
            lines.append(f"return {', '.join(map(arg, node.args[0]))}")
            continue
        val, number = node.meta["val"], f"%{len(numbers)}"
        kind = f"{SHORT[val.dtype]}{list(val.shape)}" if isinstance(val, torch.Tensor) else "int"
        if node.op == "placeholder":
            what = names.get(node.name, node.name)
        else:
            given = [*map(arg, node.args)]
            given += [f"{k}={arg(v)}" for k, v in node.kwargs.items() if k not in IGNORED]
            what = f"{str(node.target).split('.')[-2]}({', '.join(given)})"
        numbers[node] = number
        lines.append(f"{number}: {kind} = {what}")
    return "\n".join(lines)


IGNORED = ("device", "pin_memory", "layout")


def rewritten(model: nn.Module, **switches: bool) -> str:
    """The graph of one call after the passes, as text. Nothing is run."""
    texts = []
    original = pipeline.run

    def run(*args, **kwargs):
        result = original(*args, **kwargs)
        names = {i.node.name: re.findall(r"\w+", i.source)[-1] for i in result.inputs}
        texts.append(printed(result.rewritten.gm, names))
        return result

    new = torch.zeros(1, 2, 8, dtype=torch.float64)
    options = rtc.Options(lowering="eager", **switches)
    with mock.patch.object(pipeline, "run", run):
        rtc.explain(model, new, new, new, 0, options=options)
    return texts[-1]


class Caches(nn.Module):
    """Two caches [batch, slots, features] of one head; two rows come in a call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(1, 6, 8, dtype=torch.float64))
        self.register_buffer("v_cache", torch.zeros(1, 6, 8, dtype=torch.float64))

    def push(self, k, v, sink=0):
        for cache, new in ((self.k_cache, k), (self.v_cache, v)):
            cache.copy_(torch.cat([cache[:, :sink], cache[:, sink + 2 :], new], 1))


def turned(x, positions):
    ang = positions.double()[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03]).double()
    a, b = x.chunk(2, -1)
    return torch.cat([a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()], -1)


class Raw(Caches):
    def forward(self, q, k, v, step):
        self.push(k, v)
        return F.scaled_dot_product_attention(q, self.k_cache, self.v_cache)


class Causal(Caches):
    def forward(self, q, k, v, step):
        self.push(k, v)
        return F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, is_causal=True)


class Rope(Caches):
    causal = False

    def forward(self, q, k, v, step):
        self.push(k, v)
        keys = turned(self.k_cache, torch.arange(6) + 2 * step)
        return F.scaled_dot_product_attention(q, keys, self.v_cache, is_causal=self.causal)


class CausalRope(Rope):
    causal = True


class SlowSink(Caches):
    """Positions by slot order from a base that moves by one while the slots move by two."""

    def forward(self, q, k, v, step):
        self.push(k, v, sink=1)
        keys = turned(self.k_cache, torch.cat([torch.arange(1), torch.arange(1, 6) + step]))
        return F.scaled_dot_product_attention(q, keys, self.v_cache)


class OwnRing(Caches):
    """The author wrote a ring already; only the rotation is whole-cache work."""

    def forward(self, q, k, v, step):
        at = torch.arange(2) + 2 * (step % 3)
        self.k_cache.index_copy_(1, at, k)
        self.v_cache.index_copy_(1, at, v)
        slot = torch.arange(6)
        frame = slot // 2 + 3 * ((step - slot // 2) // 3)
        return F.scaled_dot_product_attention(q, turned(self.k_cache, frame), self.v_cache)


class Pins(expecttest.TestCase):
    maxDiff = None

    def test_raw_keys_and_values_become_a_ring(self):
        self.assertExpectedInline(rewritten(Raw()), """""")

    def test_rope_moves_to_the_fresh_rows(self):
        self.assertExpectedInline(rewritten(Rope()), """""")

    def test_positions_that_turn_fold_into_the_query(self):
        self.assertExpectedInline(rewritten(SlowSink()), """""")

    def test_a_ring_of_the_author_keeps_a_view(self):
        self.assertExpectedInline(rewritten(OwnRing()), """""")

    def test_a_causal_mask_keeps_the_order_and_the_hoist(self):
        self.assertExpectedInline(rewritten(CausalRope()), """""")

    def test_a_causal_mask_over_raw_slots_leaves_the_graph_alone(self):
        self.assertExpectedInline(rewritten(Causal()), """""")
