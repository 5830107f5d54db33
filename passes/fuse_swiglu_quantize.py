"""Run SwiGLU, the concatenation around it and the quantizer of its rows as one kernel.

Before:
    y: bf16[.., F] = silu(act) * up                       # in any spelling, casts in between
    x: bf16[.., E + F] = cat([part, y], -1)               # up to two parts, or no cat at all
    s: f32[M, 1] = max(amax(abs(x), -1), floor) / 448     # analysis/quantizer.py, any spelling
    q: f8[M, E + F] = to_f8(clamp(x / s, -448, 448))
After:
    q, s = rtc::swiglu_quantize([part'], act', up', None, floor)      # primes: 2-D views

Refuses: other activations; a product that is not the last part; values that something else than the
quantizer reads too; float64; more than two parts; segments wider than a program's registers.
Numerics: exact (silu, the product and the row are not rounded to bf16 before they are quantized, as
Inductor's fusions do not; the scale follows from the unrounded row).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from rtc.kernels import swiglu_quantize as _kernel  # registers the op
from rtc.passes.analysis import kinks, quantizer
from rtc.passes.analysis.effects import dead_code
from rtc.passes.analysis.fn import LAYOUT
from rtc.passes.analysis.fp8 import CASTS, SAME
from rtc.passes.analysis.quantizer import RowQuantizer
from rtc.passes.analysis.samples import Foreign, Probe, is_number, probing
from rtc.passes.analysis.slots import is_pointwise
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.nodes import Emitter, val
from rtc.passes.plan import Refusal

aten = torch.ops.aten

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 32768  # columns of a segment that a program holds in registers
_CUTS = 400  # ways to cut a product off from its operands that are looked at
_STEPS = 40  # pointwise steps behind a product among which an activation is looked for
_CURVES = {
    aten.silu.default,
    aten.sigmoid.default,
    aten.gelu.default,
    aten.relu.default,
    aten.tanh.default,
    aten.erf.default,
    aten.exp.default,
    aten.hardswish.default,
    aten.softplus.default,
}


@dataclass
class _Gate:
    """product = silu(act) * up"""

    product: fx.Node
    act: fx.Node
    up: fx.Node


@dataclass
class _Row:
    """What a quantizer's x is made of. ``chain``: from x to the cat and the product, both too."""

    gate: _Gate
    parts: list[fx.Node]
    chain: set[fx.Node] = field(default_factory=set)


# ---- the gated product -------------------------------------------------------------------------


def _keeps_rows(n: fx.Node) -> bool:
    """A reshape, cast or copy that leaves the last axis whole and rows in order."""
    if n.op != "call_function" or n.target not in {*LAYOUT, *SAME, *CASTS}:
        return False
    if n.target in (aten.permute.default, aten.transpose.int, aten.t.default):
        return False
    below, here = val(n.args[0]), val(n)
    if below.dtype not in _FLOATS or here.dtype not in _FLOATS:
        return False
    return below.numel() == here.numel() and below.shape[-1:] == here.shape[-1:]


def _opened(n: fx.Node, *, kinked: bool = False) -> list[fx.Node] | None:
    """What a node of the product is computed from, or None where the product ends.

    kinked: through ops as well of which samples would not tell what they do."""
    if n.op != "call_function" or not isinstance(n.meta.get("val"), torch.Tensor):
        return None
    if _keeps_rows(n):
        return [n.args[0]]  # type: ignore[list-item]
    if not is_pointwise(n.target) or not val(n).dtype.is_floating_point:
        return None
    if not (kinked or kinks.exponential(n.target)):
        return None
    return [a for a in n.all_input_nodes if not is_number(a)]


def _gate(product: fx.Node) -> _Gate | str | None:
    """The nearest act and up of which ``product`` is the gated product. None: it is no product of
    an activation at all; a reason: of another one."""
    if not _has_curve(product):
        return None
    start = frozenset([product])
    queue, seen = [start], {start}
    for cut in queue:
        nodes = sorted(cut, key=lambda n: n.name)
        if len(nodes) == 2:
            for a, u in (nodes, nodes[::-1]):
                if _is_gated(product, a, u):
                    return _Gate(product, _bare(a), _bare(u))
        for n in nodes:
            below = _opened(n)
            if below is None:
                continue
            new = (cut - {n}) | frozenset(below)
            if new and new not in seen and len(new) <= 4 and len(seen) < _CUTS:
                seen.add(new)
                queue.append(new)
    return "not silu(act) * up"


def _has_curve(product: fx.Node) -> bool:
    """Whether an activation, or a part of one, is among the last pointwise steps to it."""
    queue, seen = [product], {product}
    for n in queue:
        if n.target in _CURVES:
            return True
        for below in _opened(n, kinked=True) or ():
            if below not in seen and len(seen) < _STEPS:
                seen.add(below)
                queue.append(below)
    return False


@probing()
def _is_gated(product: fx.Node, act: fx.Node, up: fx.Node) -> bool:
    """Whether product = silu(act) * up, by its values on samples."""
    shape, (a, u) = val(product).shape, (val(act), val(up))
    if any(v.shape[-1:] != shape[-1:] or v.numel() != val(product).numel() for v in (a, u)):
        return False
    if any(v.dtype not in _FLOATS for v in (a, u)):
        return False
    g = torch.Generator().manual_seed(0)
    gates = torch.cat([torch.linspace(-60, 60, 481), torch.tensor([-200.0, 200.0, 0.0])])
    gates = gates.repeat(2)
    ups = torch.randn(gates.shape, generator=g) * 3
    ups[len(ups) // 2 :] *= 1e6  # where higher powers would show
    probe = Probe(math.prod(shape[:-1]), shape[-1], exact=True)
    probe.give(act, "x", gates)
    probe.give(up, "x", ups)
    try:
        found = probe(product)
    except Foreign:
        return False
    gates, ups = probe.values[act], probe.values[up]
    want = gates / (1 + torch.exp(-gates)) * ups
    # constants may be float32's; far out, silu is zero beside anything
    room = 2e-6 * want.abs() + 1e-34 * (1 + ups.abs())
    return bool(((found - want).abs() <= room).all())


def _bare(n: fx.Node) -> fx.Node:
    """Below casts to a wider dtype and reshapes of the rows."""
    while _keeps_rows(n):
        below = n.args[0]
        wider = torch.promote_types(val(below).dtype, val(n).dtype) == val(n).dtype
        if val(below).dtype not in _FLOATS or not wider:
            break
        n = below
    return n


# ---- the row -----------------------------------------------------------------------------------


def _row(x: fx.Node) -> _Row | Refusal | None:
    chain = {x}
    n = x
    while _keeps_rows(n):
        n = n.args[0]
        chain.add(n)
    parts: list[fx.Node] = []
    if n.target is aten.cat.default:
        parts, axis = list(n.args[0]), n.args[1] if len(n.args) > 1 else 0
        rank = len(val(n).shape)
        if int(axis) % rank != rank - 1:
            return None
        parts = [p for p in parts if val(p).numel()] or parts
        n = parts.pop()
        chain.add(n)
    gate = _gate(n)
    if isinstance(gate, str):
        return Refusal.at(gate, n)
    if gate is None:
        if any(_gate(p) is not None for p in parts):
            return Refusal.at("the gated product is not the last part", x)
        return None
    row = _Row(gate, [_bare(p) for p in parts], chain)
    tensors = [*row.parts, gate.act, gate.up]
    if len(parts) > 2:
        return Refusal.at("more than two parts before the gated product", x)
    odd = next((t for t in tensors if val(t).dtype not in _FLOATS), None)
    if odd is not None:
        return Refusal.at(f"it quantizes {val(odd).dtype}", odd)
    if max(val(t).shape[-1] for t in tensors) > _WIDEST:
        return Refusal.at(f"more than {_WIDEST} columns in a segment", x)
    return row


def _leak(found: list[RowQuantizer], row: _Row) -> fx.Node | None:
    """A node between the product and the quantizers' results that something else reads."""
    x = found[0].x
    results = {n for f in found for n in (f.q, *f.scales)}
    inside, stack = set(row.chain), list(results)
    while stack:
        n = stack.pop()
        if n not in inside:
            inside.add(n)
            stack.extend(a for a in n.all_input_nodes if a is not x)
    return next((n for n in inside - results if not set(n.users) <= inside), None)


# ---- the rewrite -------------------------------------------------------------------------------


def run(ctx: Context) -> Outcome:
    out = Outcome()
    graph = ctx.gm.graph
    groups: dict[tuple[fx.Node, float], list[RowQuantizer]] = {}
    for f in quantizer.find(graph):
        groups.setdefault((f.x, f.floor), []).append(f)
    for (x, floor), found in groups.items():
        row = _row(x)
        if row is None:
            continue
        out.matched += 1
        if isinstance(row, Refusal):
            out.refused.append(row)
            continue
        other = _leak([f for k, fs in groups.items() if k[0] is x for f in fs], row)
        if other is not None:
            out.refused.append(Refusal.at("something else than the quantizer reads it", other))
            continue
        _replace(graph, found, row, floor)
        out.applied += 1
    dead_code(graph)
    return out


def _replace(graph: fx.Graph, found: list[RowQuantizer], row: _Row, floor: float) -> None:
    with graph.inserting_before(min(map(quantizer.place, found))):
        emit = Emitter(graph, row.gate.product)
        both = emit(
            torch.ops.rtc.swiglu_quantize.default,
            [_flat(emit, p) for p in row.parts],
            _flat(emit, row.gate.act),
            _flat(emit, row.gate.up),
            None,
            floor,
        )
        q, s = (emit(operator.getitem, both, i) for i in (0, 1))
    for f in found:
        quantizer.replace(f, q, s)


def _flat(emit: Emitter, n: fx.Node) -> fx.Node:
    """As [M, columns] with unit column stride: a view where there is one."""
    v = val(n)
    if v.dim() != 2:
        n = emit(aten.reshape.default, n, [v.numel() // v.shape[-1], v.shape[-1]])
    if val(n).stride(1) != 1 and val(n).shape[1] > 1:
        n = emit(aten.clone.default, n, memory_format=torch.contiguous_format)
    return n


PASS = Pass(
    "fuse_swiglu_quantize",
    "exact",
    run,
    "SwiGLU, concatenation and the FP8 quantizer of the rows in one kernel",
    stage="graph",
    own_kernels=True,
)

del _kernel
