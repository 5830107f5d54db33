"""What the passes make of a few tiny models, pinned as text: a graph that changes is seen here.

Queries, keys and values come in as arguments, so that nothing but caches is in the graphs. Nodes
are numbered anew, since names differ between versions of torch. After a change that is meant, run
with EXPECTTEST_ACCEPT=1 and read the difference.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import itertools
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
IGNORED = ("device", "pin_memory", "layout")  # arguments that say nothing either


def op(target) -> str:
    """``index_put`` of ``aten.index_put.default``, ``add`` of ``operator.add``."""
    name = getattr(target, "overloadpacket", target)
    return getattr(name, "__name__", str(name))


def printed(gm: fx.GraphModule, own: dict[str, str]) -> str:
    """One line a node: ``%number: dtype[shape] = op(arguments)``.

    ``own``: placeholders of the user's tensors, with the names that stand for them. They get no
    line: which come first differs between versions.
    """
    known: dict[fx.Node, str] = {}
    lines: list[str] = []
    numbers = itertools.count()

    def arg(a) -> str:
        if isinstance(a, fx.Node):
            return known[a]
        if isinstance(a, (list, tuple)):
            return f"[{', '.join(map(arg, a))}]"
        return "end" if a == torch.iinfo(torch.int64).max else str(a)

    for node in gm.graph.nodes:
        if node.target in SKIPPED:
            known[node] = known[node.args[0]]
        elif node.name in own:
            known[node] = own[node.name]
        elif node.op == "output":
            lines.append(f"return {', '.join(map(arg, node.args[0]))}")
        else:
            known[node] = node.name if node.op == "placeholder" else f"%{next(numbers)}"
            val = node.meta["val"]
            kind = "several"
            if isinstance(val, torch.Tensor):
                kind = f"{SHORT[val.dtype]}[{', '.join(map(str, val.shape))}]"
            given = [arg(a) for a in node.args]
            given += [f"{k}={arg(v)}" for k, v in node.kwargs.items() if k not in IGNORED]
            what = "input" if node.op == "placeholder" else f"{op(node.target)}({', '.join(given)})"
            lines.append(f"{known[node]}: {kind} = {what}")
    return "\n".join(lines)


def rewritten(model: nn.Module, **switches: bool) -> str:
    """The graph of one call after the passes, as text. Nothing is run."""
    texts = []
    original = pipeline.run

    def run(*args, **kwargs):
        result = original(*args, **kwargs)
        names = {i.node.name: re.findall(r"\w+", i.source)[-1] for i in result.inputs}
        texts.append(printed(result.rewritten.gm, names))
        return result

    q, k, v = (torch.zeros(1, 2, 8, dtype=torch.float64) for _ in range(3))
    options = rtc.Options(lowering="eager", **switches)
    with mock.patch.object(pipeline, "run", run):
        rtc.explain(model, q, k, v, 0, options=options)
    return texts[-1]


class Caches(nn.Module):
    """Two caches [batch, slots, features] of one head; two rows come in a call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(1, 6, 8, dtype=torch.float64))
        self.register_buffer("v_cache", torch.zeros(1, 6, 8, dtype=torch.float64))

    def push(self, k, v):
        self.k_cache.copy_(torch.cat([self.k_cache[:, 2:], k], 1))
        self.v_cache.copy_(torch.cat([self.v_cache[:, 2:], v], 1))


def angles(positions):
    return positions.double()[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03]).double()


def halves(x, ang):
    """RoPE as most write it."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()], -1)


def rolled(x, ang):
    """The same in fewer nodes."""
    cos, sin = ang.cos().repeat(1, 2), torch.cat([-ang.sin(), ang.sin()], -1)
    return x * cos + x.roll(4, -1) * sin


class Raw(Caches):
    def forward(self, q, k, v, step):
        self.push(k, v)
        return F.scaled_dot_product_attention(q, self.k_cache, self.v_cache)


class Causal(Caches):
    def forward(self, q, k, v, step):
        self.push(k, v)
        return F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, is_causal=True)


class Rope(Caches):
    def forward(self, q, k, v, step):
        self.push(k, v)
        keys = halves(self.k_cache, angles(torch.arange(6) + 2 * step))
        return F.scaled_dot_product_attention(q, keys, self.v_cache)


class CausalRope(Caches):
    def forward(self, q, k, v, step):
        self.push(k, v)
        keys = rolled(self.k_cache, angles(torch.arange(6) + 2 * step))
        return F.scaled_dot_product_attention(q, keys, self.v_cache, is_causal=True)


class SlowSink(Caches):
    """Positions by slot order from a base that moves by one while the slots move by two."""

    def forward(self, q, k, v, step):
        for cache, new in ((self.k_cache, k), (self.v_cache, v)):
            cache.copy_(torch.cat([cache[:, :1], cache[:, 3:], new], 1))
        positions = torch.cat([torch.arange(1), torch.arange(1, 6) + step])
        keys = rolled(self.k_cache, angles(positions))
        return F.scaled_dot_product_attention(q, keys, self.v_cache)


class OwnRing(Caches):
    """The author wrote a ring already; only the rotation is whole-cache work."""

    def forward(self, q, k, v, step):
        at = torch.arange(2) + 2 * (step % 3)
        self.k_cache.index_copy_(1, at, k)
        self.v_cache.index_copy_(1, at, v)
        slot = torch.arange(6)
        frame = slot // 2 + 3 * ((step - slot // 2) // 3)
        keys = rolled(self.k_cache, angles(frame))
        return F.scaled_dot_product_attention(q, keys, self.v_cache)


class Pins(expecttest.TestCase):
    maxDiff = None

    def test_raw_keys_and_values_become_a_ring(self):
        self.assertExpectedInline(
            rewritten(Raw()),
            """\
rtc_index_0_0_0: i64[2] = input
%0: f64[1, 6, 8] = index_put(k_cache, [None, rtc_index_0_0_0], k)
%1: f64[1, 6, 8] = index_put(v_cache, [None, rtc_index_0_0_0], v)
%2: f64[1, 2, 8] = attention(q, %0, %1, None, False, None, False)
%3: f64[1, 6, 8] = copy_(k_cache, %0)
%4: f64[1, 6, 8] = copy_(v_cache, %1)
return %2""",
        )

    def test_rope_moves_to_the_fresh_rows(self):
        self.assertExpectedInline(
            rewritten(Rope()),
            """\
rtc_view_0_0: f64[1, 6, 8] = input
rtc_index_0_0_0: i64[2] = input
rtc_table_0_0_0_0_0: f64[2, 4] = input
rtc_table_0_0_0_0_1: f64[2, 4] = input
%0: f64[1, 6, 8] = index_put(k_cache, [None, rtc_index_0_0_0], k)
%1: several = split(k, 4, -1)
%2: f64[1, 2, 4] = getitem(%1, 0)
%3: f64[1, 2, 4] = mul(%2, rtc_table_0_0_0_0_0)
%4: f64[1, 2, 4] = getitem(%1, 1)
%5: f64[1, 2, 4] = mul(%4, rtc_table_0_0_0_0_1)
%6: f64[1, 2, 4] = sub(%3, %5)
%7: f64[1, 2, 4] = mul(%4, rtc_table_0_0_0_0_0)
%8: f64[1, 2, 4] = mul(%2, rtc_table_0_0_0_0_1)
%9: f64[1, 2, 4] = add(%7, %8)
%10: f64[1, 2, 8] = cat([%6, %9], -1)
%11: f64[1, 6, 8] = index_put(rtc_view_0_0, [None, rtc_index_0_0_0], %10)
%12: f64[1, 6, 8] = index_put(v_cache, [None, rtc_index_0_0_0], v)
%13: f64[1, 2, 8] = attention(q, %11, %12, None, False, None, False)
%14: f64[1, 6, 8] = copy_(k_cache, %0)
%15: f64[1, 6, 8] = copy_(v_cache, %12)
%16: f64[1, 6, 8] = copy_(rtc_view_0_0, %11)
return %13""",
        )

    def test_positions_that_turn_fold_into_the_query(self):
        self.assertExpectedInline(
            rewritten(SlowSink()),
            """\
rtc_view_0_0: f64[1, 6, 8] = input
rtc_index_0_0_0: i64[2] = input
rtc_table_0_0_0_0_0: f64[2, 8] = input
rtc_table_0_0_0_0_1: f64[2, 8] = input
rtc_fold_0_0_0: f64[8] = input
rtc_fold_0_0_1: f64[8] = input
rtc_perm_0_0: i64[8] = input
%0: f64[1, 6, 8] = index_put(k_cache, [None, rtc_index_0_0_0], k)
%1: f64[1, 2, 8] = mul(k, rtc_table_0_0_0_0_0)
%2: f64[1, 2, 8] = roll(k, [4], [-1])
%3: f64[1, 2, 8] = mul(%2, rtc_table_0_0_0_0_1)
%4: f64[1, 2, 8] = add(%1, %3)
%5: f64[1, 6, 8] = index_put(rtc_view_0_0, [None, rtc_index_0_0_0], %4)
%6: f64[1, 2, 8] = index_select(q, 2, rtc_perm_0_0)
%7: f64[1, 2, 8] = mul(q, rtc_fold_0_0_0)
%8: f64[1, 2, 8] = mul(%6, rtc_fold_0_0_1)
%9: f64[1, 2, 8] = add(%7, %8)
%10: f64[1, 6, 8] = index_put(v_cache, [None, rtc_index_0_0_0], v)
%11: f64[1, 2, 8] = attention(%9, %5, %10, None, False, None, False)
%12: f64[1, 6, 8] = copy_(k_cache, %0)
%13: f64[1, 6, 8] = copy_(v_cache, %10)
%14: f64[1, 6, 8] = copy_(rtc_view_0_0, %5)
return %11""",
        )

    def test_a_ring_of_the_author_keeps_a_view(self):
        self.assertExpectedInline(
            rewritten(OwnRing()),
            """\
rtc_view_0_0: f64[1, 6, 8] = input
rtc_index_0_0_0: i64[2] = input
rtc_table_0_0_0_0_0: f64[2, 8] = input
rtc_table_0_0_0_0_1: f64[2, 8] = input
%0: f64[1, 6, 8] = index_put(k_cache, [None, rtc_index_0_0_0], k)
%1: f64[1, 2, 8] = mul(k, rtc_table_0_0_0_0_0)
%2: f64[1, 2, 8] = roll(k, [4], [-1])
%3: f64[1, 2, 8] = mul(%2, rtc_table_0_0_0_0_1)
%4: f64[1, 2, 8] = add(%1, %3)
%5: f64[1, 6, 8] = index_put(rtc_view_0_0, [None, rtc_index_0_0_0], %4)
%6: f64[1, 6, 8] = index_put(v_cache, [None, rtc_index_0_0_0], v)
%7: f64[1, 2, 8] = attention(q, %5, %6, None, False, None, False)
%8: f64[1, 6, 8] = copy_(k_cache, %0)
%9: f64[1, 6, 8] = copy_(v_cache, %6)
%10: f64[1, 6, 8] = copy_(rtc_view_0_0, %5)
return %7""",
        )

    def test_a_causal_mask_keeps_the_order_and_the_hoist(self):
        self.assertExpectedInline(
            rewritten(CausalRope()),
            """\
rtc_view_0_0: f64[1, 6, 8] = input
rtc_table_0_0_0_0_0: f64[2, 8] = input
rtc_table_0_0_0_0_1: f64[2, 8] = input
rtc_index_0_0: i64[6] = input
rtc_index_0: i64[6] = input
rtc_view_0_1: f64[1, 6, 8] = input
%0: f64[1, 2, 8] = mul(k, rtc_table_0_0_0_0_0)
%1: f64[1, 2, 8] = roll(k, [4], [-1])
%2: f64[1, 2, 8] = mul(%1, rtc_table_0_0_0_0_1)
%3: f64[1, 2, 8] = add(%0, %2)
%4: f64[1, 8, 8] = cat([rtc_view_0_0, %3], 1)
%5: f64[1, 6, 8] = index_select(%4, 1, rtc_index_0_0)
%6: f64[1, 8, 8] = cat([rtc_view_0_1, v], 1)
%7: f64[1, 6, 8] = index_select(%6, 1, rtc_index_0_0)
%8: f64[1, 2, 8] = attention(q, %5, %7, None, True, None, False)
%9: f64[1, 8, 8] = cat([k_cache, k], 1)
%10: f64[1, 6, 8] = index_select(%9, 1, rtc_index_0)
%11: f64[1, 6, 8] = copy_(k_cache, %10)
%12: f64[1, 8, 8] = cat([v_cache, v], 1)
%13: f64[1, 6, 8] = index_select(%12, 1, rtc_index_0)
%14: f64[1, 6, 8] = copy_(v_cache, %13)
%15: f64[1, 6, 8] = copy_(rtc_view_0_0, %5)
%16: f64[1, 6, 8] = copy_(rtc_view_0_1, %7)
return %8""",
        )

    def test_a_causal_mask_over_raw_slots_leaves_the_graph_alone(self):
        self.assertExpectedInline(
            rewritten(Causal()),
            """\
%0: f64[1, 4, 8] = slice(k_cache, 1, 2, end)
%1: f64[1, 6, 8] = cat([%0, k], 1)
%2: f64[1, 6, 8] = copy(k_cache, %1)
%3: f64[1, 4, 8] = slice(v_cache, 1, 2, end)
%4: f64[1, 6, 8] = cat([%3, v], 1)
%5: f64[1, 6, 8] = copy(v_cache, %4)
%6: f64[1, 2, 8] = attention(q, %2, %5, None, True, None, False)
%7: f64[1, 6, 8] = copy_(k_cache, %2)
%8: f64[1, 6, 8] = copy_(v_cache, %5)
return %6""",
        )
