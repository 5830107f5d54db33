"""A row-parallel linear's sum and the norm that reads it as one op: each rank norms its own rows.

Before:
    y: bf16[M, N] = linear_all_reduce(x8, w8, x_s, w_s, bf16, world, group)
    h, q, s = residual_modulate_quantize(r, y, gate, weight, bias, scale, shift, norm, ...)
After:
    h, q, s = linear_all_reduce_norm(x8, w8, x_s, w_s, r, gate, ..., whole, bf16, world, group)

Off unless `Options(fuse_all_reduce_norm=True)`: a row's residual and vectors are those of the rank
that finishes it, which is right only if all ranks have the same (tensor parallelism: everything
but the linears is replicated). Nothing here proves that; the op looks in every call.

``whole``: h is wanted whole, by anything but the residual of another such op. Between those each
rank keeps its own rows of h only, and what the ranks send each other is parts of rows and FP8.
``compare``: the residual is not such an op's h, so that ranks may differ in it.

Refuses: a sum that is read by anything but one fused norm; a residual of another dtype than the
sum's; unscaled sums; rows too wide for one program; another collective, or a write to an operand,
between the two, or on its way meanwhile.
Numerics: exact, but for roundings: parts are rounded before their scales, and their sum not at all
before the residual is added.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from rtc.kernels import linear_all_reduce_norm as _kernel  # registers the op
from rtc.kernels.linear_all_reduce_rows_layout import WIDEST
from rtc.passes.analysis.collectives import is_wait, issues
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.nodes import Emitter, arg_by_name, val
from rtc.passes.plan import Refusal

aten = torch.ops.aten

SUM = torch.ops.rtc.linear_all_reduce.default
TAIL = torch.ops.rtc.residual_modulate_quantize.default
BOTH = torch.ops.rtc.linear_all_reduce_norm.default
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_LINEAR = ("x", "w", "x_scale", "w_scale")
_GROUP = ("dtype", "world", "group")
_NORM = ("gate", "weight", "bias", "scale", "shift", "norm", "eps", "floor")


def run(ctx: Context) -> Outcome:
    return fuse(ctx.gm.graph)


def fuse(graph: fx.Graph) -> Outcome:
    out = Outcome()
    waited_for = [n for n in graph.nodes if issues(n) and any(map(is_wait, n.users))]
    for node in [n for n in graph.nodes if n.target is SUM]:
        out.matched += 1
        tail = _reader(node, waited_for)
        if isinstance(tail, Refusal):
            out.refused.append(tail)
            continue
        _replace(graph, node, tail)
        out.applied += 1
    fused = [n for n in graph.nodes if n.target is BOTH]
    for n in fused:
        n.args = _with(n, whole=not _only_residuals(n), compare=not _goes_on(n))
    if fused:
        part = sum(not arg_by_name(n, "whole") for n in fused)
        out.notes.append(f"{part} of {len(fused)} leave each rank its own rows of the residual")
    return out


def _reader(node: fx.Node, waited_for: list[fx.Node]) -> fx.Node | Refusal:
    """The fused norm that alone reads a sum. waited_for: the graph's collectives with a wait."""
    at = node
    while len(at.users) == 1 and next(iter(at.users)).target in _VIEWS:
        at = next(iter(at.users))
    if len(at.users) != 1 or next(iter(at.users)).target is not TAIL:
        return Refusal.at("its sum is read by something else than one fused norm", node)
    tail = next(iter(at.users))
    once = sum(a is at for a in (*tail.args, *tail.kwargs.values())) == 1
    if not once or arg_by_name(tail, "delta") is not at:
        return Refusal.at("the sum is not the norm's delta alone", node)
    residual, v = arg_by_name(tail, "x"), val(node)
    if val(at).shape != v.shape or val(residual).shape != v.shape:
        return Refusal.at("the norm reads it in another shape", node)
    if val(residual).dtype != v.dtype:
        return Refusal.at(f"a residual of {val(residual).dtype}, a sum of {v.dtype}", node)
    if arg_by_name(tail, "delta_scale") is not None:
        return Refusal.at("the norm scales the sum", node)
    if v.shape[1] > WIDEST:
        return Refusal.at(f"rows of more than {WIDEST} columns", node)
    if any(n < node and any(is_wait(u) and node < u for u in n.users) for n in waited_for):
        return Refusal.at("another collective is on its way meanwhile", node)
    between = node.next
    operands = {_memory(n) for n in node.all_input_nodes}
    while between is not tail:
        if issues(between):
            return Refusal.at("another collective comes between the sum and the norm", node)
        if operands & {_memory(n) for n in _written(between)}:
            return Refusal.at("an operand is written between the sum and the norm", node)
        between = between.next
    return tail


def _memory(node: fx.Node) -> fx.Node:
    """The node whose memory a view looks at."""
    while node.args and isinstance(node.args[0], fx.Node):
        if isinstance(node.target, torch._ops.OpOverload):
            returns = node.target._schema.returns
            if not returns or returns[0].alias_info is None:
                break
        elif node.target is not operator.getitem:
            break
        node = node.args[0]
    return node


def _written(node: fx.Node) -> list[fx.Node]:
    """What an op writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found: list[object] = []
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = arg_by_name(node, argument.name)
            found += given if isinstance(given, (list, tuple)) else [given]
    return [n for n in found if isinstance(n, fx.Node)]


def _replace(graph: fx.Graph, node: fx.Node, tail: fx.Node) -> None:
    with graph.inserting_before(tail):
        emit = Emitter(graph, tail)
        new = emit(
            BOTH,
            *(arg_by_name(node, a) for a in _LINEAR),
            arg_by_name(tail, "x"),
            *(arg_by_name(tail, a) for a in _NORM),
            True,
            True,
            *(arg_by_name(node, a) for a in _GROUP),
        )
    at = arg_by_name(tail, "delta")
    tail.replace_all_uses_with(new)
    graph.erase_node(tail)
    while at is not node:
        at, dead = at.args[0], at
        graph.erase_node(dead)
    graph.erase_node(node)


def _with(node: fx.Node, **changed: bool) -> tuple[object, ...]:
    names = [a.name for a in BOTH._schema.arguments]
    return tuple(changed[a] if a in changed else arg_by_name(node, a) for a in names)


def _goes_on(node: fx.Node) -> bool:
    """Whether its residual is the h of such an op over the same ranks: each row is one rank's."""
    at = arg_by_name(node, "residual")
    while at.target in _VIEWS:
        at = at.args[0]
    if at.target is not operator.getitem or at.args[1] != 0 or at.args[0].target is not BOTH:
        return False
    same = [arg_by_name(n, a) for n in (node, at.args[0]) for a in _GROUP]
    return same[: len(_GROUP)] == same[len(_GROUP) :] and val(at).shape == val(node)[0].shape


def _only_residuals(node: fx.Node) -> bool:
    """Whether nobody reads h but as the residual of ops that finish the same rows of it."""
    m, n = val(node)[0].shape
    same = [arg_by_name(node, a) for a in _GROUP]
    queue = [u for u in node.users if u.target is operator.getitem and u.args[1] == 0]
    if any(u.target is not operator.getitem for u in node.users):
        return False
    read = False
    while queue:
        at = queue.pop()
        for u in at.users:
            if u.target in _VIEWS:
                queue.append(u)
                continue
            as_residual = u.target is BOTH and arg_by_name(u, "residual") is at
            once = sum(arg is at for arg in u.args) == 1
            if not (as_residual and once and tuple(val(at).shape) == (m, n)):
                return False
            if [arg_by_name(u, a) for a in _GROUP] != same:
                return False
            read = True
    return read


def split(graph: fx.Graph) -> None:
    """The two ops again, everywhere."""
    for node in [n for n in graph.nodes if n.target is BOTH]:
        with graph.inserting_before(node):
            emit = Emitter(graph, node)
            y = emit(SUM, *(arg_by_name(node, a) for a in (*_LINEAR, *_GROUP)))
            residual, gate, *rest = (arg_by_name(node, a) for a in ("residual", *_NORM))
            new = emit(TAIL, residual, y, gate, *rest)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


PASS = Pass(
    "fuse_all_reduce_norm",
    "exact",
    run,
    "linear + all-reduce + norm -> one op, each rank finishing its own rows",
    stage="graph",
    own_kernels=True,
)

del _kernel
