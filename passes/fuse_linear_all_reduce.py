"""A row-parallel FP8 linear and the all-reduce of its result as one op, in steady state only.

Before:
    y: bf16[M, N] = linear_fp8(x8, w8, x_s, w_s, None, bf16)      # w8 [N, K]: the rank's columns
    z = all_reduce(y, "sum", group)
    a = wait_tensor(z)
After:
    a: bf16[M, N] = linear_all_reduce(x8, w8, x_s, w_s, bf16, world, group)

Reshapes may stand between them, and the sum may be written over y (``dist.all_reduce(y)``). The op
pushes finished tiles to the other GPUs while it computes the next ones, through a workspace of the
shape's own; a shape without one takes linear_fp8 and the group's all-reduce. So only shapes that
come back get one: those of graphs that move a cache's window along. The first pass, whose length
depends on the prompt, keeps the all-reduce.

Refuses: other reductions; sums that nothing reads; products with a bias (each rank would add it); a
product that has other readers; half-precision results only; products that `fp8_linear` left alone;
sizes that change.
Numerics: exact. Parts are rounded to the result's dtype, as before, and added in the order of
ranks; with two ranks these are the all-reduce's own bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from rtc.kernels import linear_all_reduce as _kernel
from rtc.kernels import linear_all_reduce_norm as _normed  # registers the op
from rtc.passes.analysis.collectives import is_wait
from rtc.passes.base import Context, Outcome, Pass
from rtc.passes.nodes import Emitter, arg_by_name, val
from rtc.passes.plan import Refusal

aten = torch.ops.aten

_LINEAR = torch.ops.rtc.linear_fp8.default
_FUSED = torch.ops.rtc.linear_all_reduce.default
_NORMED = torch.ops.rtc.linear_all_reduce_norm.default
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_DTYPES = (torch.bfloat16, torch.float16)
MOST = 4  # workspaces of a group: a model has one steady shape, or a few


@dataclass(frozen=True)
class Shape:
    """What one workspace serves; ``normed``: sums that go on to a norm, too."""

    group: str
    m: int
    n: int
    dtype: torch.dtype
    normed: bool = False


@dataclass
class _Pair:
    reduce: fx.Node
    wait: fx.Node
    linear: fx.Node
    group: str
    world: int

    @property
    def shape(self) -> Shape:
        m, n = val(self.linear).shape
        return Shape(self.group, m, n, val(self.linear).dtype)


def all_reduces(graph: fx.Graph) -> list[fx.Node]:
    return [
        n for n in graph.nodes
        if isinstance(n.target, torch._ops.OpOverload)
        and n.target._schema.name in ("_c10d_functional::all_reduce", "c10d_functional::all_reduce")
    ]  # fmt: skip


def _read(node: fx.Node) -> _Pair | Refusal:
    waits = [u for u in node.users if is_wait(u)]
    if len(waits) != 1 or len(node.users) != 1:
        return Refusal.at("its result is not waited for once", node)
    if not waits[0].users:
        # a wait without readers stays, for the sake of the other ranks; an op would be dropped
        return Refusal.at("nothing reads the sum", node)
    if any(not isinstance(i, int) for i in val(node).shape):
        return Refusal.at("sizes that change", node)
    op, group = (arg_by_name(node, a) for a in ("reduce_op", "group_name"))
    if op != "sum":
        return Refusal.at(f"a reduction by {op!r}", node)
    if not isinstance(group, str):
        return Refusal.at("its process group has no name in the graph", node)
    at = arg_by_name(node, "input")
    while at.target in _VIEWS and len(at.users) == 1:
        at = at.args[0]
    if at.target is not _LINEAR:
        return Refusal.at("what is summed is no product that fp8_linear took", node)
    if len(at.users) != 1:
        return Refusal.at("the product has other readers", at)
    if arg_by_name(at, "bias") is not None:
        return Refusal.at("a bias, which every rank would add", at)
    if val(at).dtype not in _DTYPES:
        return Refusal.at(f"a result of {val(at).dtype}, not of half precision", at)
    if val(at).numel() != val(node).numel():
        return Refusal.at("only a part of the product is summed", node)
    world = _size(group)
    if isinstance(world, str):
        return Refusal.at(world, node)
    if world < 2:
        return Refusal.at("its group is one rank", node)
    if val(at).is_cuda and torch.cuda.get_device_capability(val(at).device)[0] < 9:
        return Refusal.at("the fused kernel is for Hopper and later", node)
    return _Pair(node, waits[0], at, group, world)


def _size(group: str) -> int | str:
    """Ranks of the group with that name, or why that is not known."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return "torch.distributed is not initialized"
    from torch.distributed import distributed_c10d as c10d

    try:
        pg = c10d._resolve_process_group(group)  # type: ignore[arg-type,attr-defined]
    except (LookupError, RuntimeError, ValueError, TypeError):
        return f"there is no process group named {group!r}"
    return int(pg.size())


def run(ctx: Context) -> Outcome:
    """Fuse where the graph is a steady one: it moves a window along."""
    steady = any(c.order != "plain" for c in ctx.plan.cohorts)
    return fuse(ctx.gm.graph, steady)


def fuse(graph: fx.Graph, steady: bool) -> Outcome:
    """Fuse all pairs of a steady graph; of another only those whose shape has a workspace.

    Ranks run the graphs of one compile mixed (one may take the plain path): all of them must make
    the same exchanges.
    """
    out = Outcome()
    _in_place(graph)
    shapes: dict[Shape, None] = {}
    for node in all_reduces(graph):
        out.matched += 1
        found = _read(node)
        if isinstance(found, Refusal):
            out.refused.append(found)
            continue
        s = found.shape
        if not steady and not _kernel.prepared(s.group, s.m, s.n, s.dtype):
            why = "no cache's window moves along here: its token count may not come back"
            out.refused.append(Refusal.at(why, node))
            continue
        if s not in shapes and len(shapes) >= MOST:
            out.refused.append(Refusal.at(f"more than {MOST} shapes in one graph", node))
            continue
        shapes[s] = None
        _replace(graph, found)
        out.applied += 1
    for s in shapes:
        out.notes.append(f"[{s.m}, {s.n}] over the ranks of group {s.group!r}")
    return out


def _in_place(graph: fx.Graph) -> None:
    """``dist.all_reduce(y)``, which comes as a copy of the sum over all of y, becomes the sum."""
    for node in all_reduces(graph):
        for wait in [u for u in node.users if is_wait(u)]:
            for copy in [u for u in wait.users if u.target is aten.copy.default]:
                old, v = copy.args[0], val(wait)
                if copy.args[1] is not wait or not isinstance(old, fx.Node):
                    continue
                like = val(old)
                if (like.shape, like.dtype, like.stride()) == (v.shape, v.dtype, v.stride()):
                    copy.replace_all_uses_with(wait)
                    graph.erase_node(copy)


def _replace(graph: fx.Graph, found: _Pair) -> None:
    linear, wait = found.linear, found.wait
    with graph.inserting_before(found.reduce):
        emit = Emitter(graph, linear)
        x, w, xs, ws = (arg_by_name(linear, a) for a in ("x", "w", "x_scale", "w_scale"))
        new = emit(_FUSED, x, w, xs, ws, val(linear).dtype, found.world, found.group)
        if tuple(val(wait).shape) != tuple(val(new).shape):
            new = emit(aten.reshape.default, new, list(val(wait).shape))
    wait.replace_all_uses_with(new)
    at = wait
    for _ in range(64):  # the chain down to the product has no other readers
        below = at.args[0]
        graph.erase_node(at)
        if at is linear or not isinstance(below, fx.Node) or below.users:
            break
        at = below
        if at is linear:
            graph.erase_node(at)
            break


def shapes(graph: fx.Graph) -> list[Shape]:
    """What workspaces a graph wants, in its order, which is that of all ranks."""
    found: dict[Shape, bool] = {}
    for n in graph.nodes:
        if n.target in (_FUSED, _NORMED):
            v = val(n)[0] if n.target is _NORMED else val(n)
            rows, columns = v.shape
            s = Shape(arg_by_name(n, "group"), rows, columns, v.dtype)
            found[s] = found.get(s, False) or n.target is _NORMED
    return [replace(s, normed=normed) for s, normed in found.items()]


PASS = Pass(
    "fuse_linear_all_reduce",
    "exact",
    run,
    "row-parallel FP8 linear + all-reduce -> one op, in steady state",
    stage="graph",
    own_kernels=True,
)

del _normed
