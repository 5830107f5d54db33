"""Row quantizers: x rounded to FP8 with one scale a row, from the row's largest magnitude.

    s = max(amax(|x|, -1), floor) / 448        x8 = to_f8(clamp(x / s, +-448))

in whatever words. What is recognised by its form is small: a cast to float8_e4m3fn, and a maximum
over the last axis somewhere behind its operand. The pointwise work between them is not read but
probed: evaluated on sample rows and compared with the two formulas above, so that clamps before or
after the division, reciprocals, wider dtypes in between and `nan_to_num` all match or do not by
what they compute. A scale rounded to a half type on its way (bf16 amax / 448) matches within that
type's rounding: leaving it out is one intermediate rounding less.

The clamp may be missing: |x| <= amax <= 448 * s but for a rounding or two, and the cast rounds all
below 464 to 448. The floor may be missing, too (torchao has none): it is 448 times the smallest
normal number then, and rows of zeros, which without one are NaN, stay zeros. Where only 1 / s is
kept, that is what is given instead.

Shapes: x and q [.., C], s [.., 1]; reshapes that keep the last axis whole may stand between them,
so leading axes may be grouped differently in x, q and s.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from rtc.passes.analysis.fn import LAYOUT
from rtc.passes.analysis.fp8 import CASTS, FP8, SAME
from rtc.passes.analysis.samples import LIMIT, Foreign, Probe, probing
from rtc.passes.analysis.slots import is_pointwise
from rtc.passes.nodes import Emitter

aten = torch.ops.aten

TOP = 448.0
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_RESHAPES = LAYOUT - {aten.permute.default, aten.transpose.int, aten.t.default}
_RESHAPES |= {aten.expand.default, *SAME}
_ABS = (aten.abs.default, aten.neg.default)
_NORMAL = 2.0**-126
_LEAST = TOP * _NORMAL  # stands for no floor
_OTHER = "the maximum is not of magnitudes"


@dataclass(frozen=True)
class RowQuantizer:
    """x8 = to_f8(clamp(x / s)), s = max(amax(|x|, -1), floor) / 448, one scale a row.

    Other nodes may hold the scale as well, in other shapes: `replace` covers them all.
    """

    x: fx.Node  # [.., C] what is quantized, before casts to a wider dtype and reshapes of the rows
    scale: fx.Node  # [.., 1] float32; 1 / s where nothing holds s
    q: fx.Node  # [.., C] float8_e4m3fn
    floor: float  # smallest amax: s is never below floor / 448
    scales: tuple[fx.Node, ...] = ()  # all float32 nodes that are ``scale``, in any shape
    inverse: bool = False  # ``scale`` is 1 / s


def find(graph: fx.Graph) -> list[RowQuantizer]:
    """All row quantizers of a graph, in order."""
    found = [match(n) for n in graph.nodes if is_fp8_cast(n)]
    return [f for f in found if isinstance(f, RowQuantizer)]


def is_fp8_cast(node: fx.Node) -> bool:
    """Whether a node rounds floating-point numbers to float8_e4m3fn."""
    if node.op != "call_function" or node.target not in CASTS:
        return False
    return node.meta["val"].dtype == FP8 and node.args[0].meta["val"].dtype != FP8


def match(q: fx.Node) -> RowQuantizer | str:
    """The row quantizer that ends in the cast ``q``, or why there is none."""
    if not is_fp8_cast(q):
        return "not a cast to float8_e4m3fn"
    shape = q.meta["val"].shape
    if not shape or any(not isinstance(n, int) for n in (*shape, *q.args[0].meta["val"].shape)):
        return "sizes that change"
    if math.prod(shape) == 0:
        return "empty"
    why = "its scale is not from a maximum over the last axis"
    maxima = list(_row_maxima(q.args[0], shape[-1]))
    for top in maxima:
        for x in reversed(_peeled(top)):
            result = _matched(q, [top, *(m for m in maxima if m is not top)], x)
            if isinstance(result, RowQuantizer):
                return result
            if result != _OTHER or why.startswith("its scale"):
                why = result
    return why


def place(found: RowQuantizer) -> fx.Node:
    """Where to insert what replaces a quantizer: all that x is made of stands before it, all users
    of q and the scale behind it."""
    return min((found.q, *found.scales))


def replace(found: RowQuantizer, q: fx.Node, scale: fx.Node) -> None:
    """Give the users of a quantizer's results ``q`` [M, C] and ``scale`` [M, 1] instead.

    Both must stand before `place`, ``scale`` last. What has no user left stays in the graph.
    """
    graph = found.q.graph
    if found.inverse:
        with graph.inserting_after(scale):
            scale = Emitter(graph, found.q)(aten.reciprocal.default, scale)
    with graph.inserting_after(scale):
        emit = Emitter(graph, found.q)
        for old, new in [(found.q, q), *((s, scale) for s in found.scales)]:
            shape = list(old.meta["val"].shape)
            if list(new.meta["val"].shape) != shape:
                new = emit(aten.reshape.default, new, shape)
            old.replace_all_uses_with(new)


# ---- form --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Maximum:
    node: fx.Node  # one number a row, whatever its shape
    operand: fx.Node  # [.., C]
    absolute: bool  # the reduction takes magnitudes itself


def _row_maxima(start: fx.Node, columns: int) -> Iterator[_Maximum]:
    """Maxima over a last axis of ``columns`` behind pointwise work, the nearest first."""
    queue, seen = [start], {start}
    for n in queue:
        found = _as_maximum(n)
        if found is not None and found.operand.meta["val"].shape[-1] == columns:
            yield found
            continue
        if n.op != "call_function" or not (is_pointwise(n.target) or n.target in LAYOUT | {*SAME}):
            continue
        for a in n.all_input_nodes:
            if a not in seen and len(seen) < LIMIT:
                seen.add(a)
                queue.append(a)


def _as_maximum(n: fx.Node) -> _Maximum | None:
    if n.op != "call_function":
        return None
    if n.target is operator.getitem and n.args[1] == 0 and n.args[0].target is aten.max.dim:
        operand, dims = n.args[0].args[0], [n.args[0].args[1]]
    elif n.target is aten.amax.default:
        operand, dims = n.args[0], n.args[1] if len(n.args) > 1 else n.kwargs.get("dim", [])
    elif n.target is aten.linalg_vector_norm.default:
        operand, dims = n.args[0], n.args[2] if len(n.args) > 2 else n.kwargs.get("dim")
        if (n.args[1] if len(n.args) > 1 else n.kwargs.get("ord", 2)) != math.inf:
            return None
        dims = dims or []
    else:
        return None
    rank = len(operand.meta["val"].shape)
    if rank == 0 or [d % rank for d in dims] != [rank - 1]:
        return None
    return _Maximum(n, operand, n.target is aten.linalg_vector_norm.default)


def _peeled(top: _Maximum) -> list[fx.Node]:
    """What the maximum may be of: its operand, then what that is a magnitude, cast or view of."""
    at, out = top.operand, [top.operand]
    columns = at.meta["val"].shape[-1]
    while at.op == "call_function" and at.target in (*CASTS, *_ABS, *_RESHAPES):
        below, here = at.args[0].meta["val"], at.meta["val"]
        if below.dtype not in _FLOATS or not below.shape or below.shape[-1] != columns:
            break
        wider = torch.promote_types(below.dtype, here.dtype) == here.dtype
        if below.numel() != here.numel() or not wider:
            break
        at = at.args[0]
        out.append(at)
    return out


# ---- probing -----------------------------------------------------------------------------------


def _matched(q: fx.Node, maxima: list[_Maximum], x: fx.Node) -> RowQuantizer | str:
    shape, dtype = x.meta["val"].shape, x.meta["val"].dtype
    if dtype not in _FLOATS:
        return f"it quantizes {dtype}"
    if shape[-1] != q.meta["val"].shape[-1] or x.meta["val"].numel() != q.meta["val"].numel():
        return "what is cast has another shape than what the maximum is of"
    with probing():
        try:
            return _probed(q, maxima, x)
        except Foreign as e:
            return str(e)


def _probed(q: fx.Node, maxima: list[_Maximum], x: fx.Node) -> RowQuantizer | str:
    columns = x.meta["val"].shape[-1]
    rows = x.meta["val"].numel() // columns
    tops: list[fx.Node] = []  # maxima of |x|: written down twice, they are two

    def probe(a: torch.Tensor, e: torch.Tensor) -> Probe:
        p = Probe(rows, columns)
        for top in tops:
            p.give(top, "row", a)
        p.give(x, "x", e)
        return p

    @functools.cache
    def of_maxima(floor: float, bare: bool) -> Probe:
        """Of rows alone, with the maxima of `_maxima`: all candidates for the scale share it."""
        a = _maxima(x.meta["val"].dtype, floor, bare)
        return probe(a, a)

    _, e = _samples(x.meta["val"].dtype, 1.0)
    for m in maxima:
        if m.operand.meta["val"].numel() == rows * columns and _is_magnitude(m, probe(e, e), e):
            tops.append(m.node)
        elif m is maxima[0]:
            return _OTHER
    why = "no float32 scale of the form max(amax, floor) / 448"
    held = [n for n in _row_values(tops) if n.meta["val"].shape[-1:] == (1,)]
    floors = []
    for scale, inverse in [(n, i) for i in (False, True) for n in held]:
        floor = _floor(of_maxima, scale, x.meta["val"].dtype, inverse)
        if not isinstance(floor, str):
            floors.append((floor == _LEAST, inverse, floor, scale))
        elif not inverse:
            why = floor
    # what has no floor last: it may be on its way to get one
    for _, inverse, floor, scale in sorted(floors, key=lambda f: f[:2]):
        a, e = _samples(x.meta["val"].dtype, floor)
        if floor == _LEAST:
            a, e = a[a.double() >= floor], e[a.double() >= floor]
        p = probe(a, e)
        found = p(q.args[0])
        want = (e.double() / _scale(p(scale), inverse)).clamp(-TOP, TOP)
        # 2^-24: FP8's smallest step is 2^-9.
        room = _tolerance(found, x.meta["val"].dtype, 4) * want.abs() + 2.0**-24
        error = (found.double().clamp(-TOP, TOP) - want).abs()
        if not (error <= room).all() or (found.abs() >= 464).any():
            why = why if floor == _LEAST else "what is cast is not x / scale"
            continue
        same = [n for n in _row_values(tops) if _equal(probe(a, a), n, scale)]
        return RowQuantizer(x, scale, q, floor, tuple(same), inverse)
    return why


def _is_magnitude(m: _Maximum, probe: Probe, e: torch.Tensor) -> bool:
    try:
        found = probe(m.operand)
    except Foreign:
        return False
    return torch.equal((found.abs() if m.absolute else found).double(), e.double().abs())


def _equal(probe: Probe, node: fx.Node, scale: fx.Node) -> bool:
    try:
        return torch.equal(probe(node), probe(scale)) and probe.kinds[node] == "row"
    except Foreign:
        return False


def _row_values(tops: list[fx.Node]) -> list[fx.Node]:
    """Float32 values, one a row, that may follow from the maximum alone, in graph order."""
    queue, seen, rows = list(tops), set(tops), tops[0].meta["val"].numel()
    for n in queue:
        for user in n.users:
            if user.op != "call_function" or user in seen or len(seen) > LIMIT:
                continue
            val = user.meta.get("val")
            if not isinstance(val, torch.Tensor) or val.numel() != rows:
                continue
            if is_pointwise(user.target) or user.target in (*LAYOUT, *SAME):
                seen.add(user)
                queue.append(user)
    return sorted(n for n in seen if n.meta["val"].dtype == torch.float32)


def _scale(found: torch.Tensor, inverse: bool) -> torch.Tensor:
    return 1 / found.double() if inverse else found.double()


def _floor(
    probe: Callable[[float, bool], Probe], scale: fx.Node, dtype: torch.dtype, inverse: bool
) -> float | str:
    """``floor`` if ``scale`` (or 1 / it) is max(a, floor) / 448 of the maximum a, else why not."""
    try:
        at_zero = _scale(probe(0.0, True)(scale), inverse).item()
    except Foreign as e:
        return str(e)
    if not 0 <= at_zero < math.inf:
        return "a row of zeros has no scale"
    if 0 < at_zero < _NORMAL:
        return "scales may be too small for float32"
    floor = at_zero * TOP or _LEAST
    a = _maxima(dtype, floor, at_zero == 0)
    found = probe(floor, at_zero == 0)(scale)
    want = a.double().clamp(min=floor) / TOP
    room = _tolerance(found, dtype, 2)
    if not ((_scale(found, inverse) - want).abs() <= room * want).all():
        want = a.double() / TOP + at_zero
        if ((_scale(found, inverse) - want).abs() <= room * want).all():
            return "the scale is amax / 448 plus something: kernels know a least amax only"
        return "the scale is not max(amax, floor) / 448"
    return floor


def _tolerance(found: torch.Tensor, dtype: torch.dtype, ulps: int) -> float:
    """Relative error of results: some ulps of float32, or what is left of a last rounding to the
    half type ``dtype`` where all results are numbers of it."""
    eps = ulps * torch.finfo(torch.float32).eps
    if dtype != torch.float32 and torch.equal(found.double(), found.to(dtype).double()):
        eps += torch.finfo(dtype).eps / 2
    return eps


@functools.lru_cache(maxsize=64)
def _maxima(dtype: torch.dtype, floor: float, bare: bool) -> torch.Tensor:
    """Maxima of rows: one zero, or those of `_samples`; ``bare`` of a floor, those beyond it."""
    if floor == 0:
        return torch.zeros(1, dtype=dtype)
    a, _ = _samples(dtype, floor)
    return a[a.double() >= floor] if bare else a


@functools.lru_cache(maxsize=64)  # every layer asks for the same few
def _samples(dtype: torch.dtype, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima of rows, and an element of each: |e| <= a. Numbers of ``dtype``, on the CPU. Nobody
    writes to them."""
    g = torch.Generator().manual_seed(0)
    info = torch.finfo(dtype)
    largest = min(math.log10(info.max) - 0.1, 30.0)
    near = floor * (1 + torch.arange(-8, 9, dtype=torch.float64) * info.eps)
    wide = floor * torch.logspace(-3, 3, 61, dtype=torch.float64)
    grid = torch.logspace(-30, largest, 601, dtype=torch.float64)
    usual = 10 ** (torch.rand(300, generator=g, dtype=torch.float64) * 10 - 6)
    tiny = torch.tensor([0.0, info.tiny, info.tiny * info.eps, 1.0, TOP, 1.0 / TOP])
    a = torch.cat([near, wide, grid, usual, tiny.double()])
    a = a[a < 10**largest].to(dtype).repeat(4)
    part = torch.rand(a.shape, generator=g, dtype=torch.float64) * 2 - 1
    quarter = a.numel() // 4
    part[:quarter], part[quarter : 2 * quarter] = 1.0, -1.0
    e = (a.double() * part).to(dtype)
    return a, torch.where(e.abs() > a, a, e)


__all__ = ["RowQuantizer", "find", "is_fp8_cast", "match", "place", "replace"]
