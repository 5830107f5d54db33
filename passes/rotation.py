"""Is a view's table work one rotation of feature pairs, and by which angles?

Attention sees differences of positions: where all kept slots turn by one common rotation, turning
the queries instead costs nothing per slot. To know that, the work is not recognised by its spelling
but measured: it is run on unit vectors and unit table rows. What comes out is, for the feature
axis,

    out[d] = c[d] * x[d] + s[d] * x[perm[d]],   c = A @ row + c0,   s = B @ row + s0

with perm an involution; then it is checked on random data, heads apart. Anything else (a dense
matrix, per-head tables, table values that enter non-linearly) is not called a rotation.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from rtc.passes.analysis import kinks, shapes
from rtc.passes.analysis.fn import (
    LAYOUT,
    Fn,
    Operand,
    emit,
    off_slots,
    permutation,
    walk,
    with_slots,
)
from rtc.passes.analysis.fp8 import WIDE
from rtc.passes.analysis.layout import Fallback
from rtc.passes.analysis.shapes import NotLocal
from rtc.passes.analysis.tables import FINE, shaped_rows
from rtc.passes.plan import View

aten = torch.ops.aten

BENT = "table rows that do not turn the features of a pair as one rotation"

# What may follow the rotation inside a view: it commutes with turning pairs, up to rounding.
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_FACTORS = (aten.mul.Tensor, aten.div.Tensor)


@dataclass(frozen=True, eq=False)
class Rotation:
    """``at``: the subtree that is rotated; ``inner``: what it rotates. Arrays are float64.

    ``perm`` [D]; ``a``, ``b`` [D, R]; ``c0``, ``s0`` [D], R the width of all table rows side by
    side (complex entries as two).
    """

    at: Fn
    inner: Fn
    perm: np.ndarray
    a: np.ndarray
    b: np.ndarray
    c0: np.ndarray
    s0: np.ndarray

    def turns(self, rows: list[torch.Tensor], *, half: bool = False) -> np.ndarray:
        """[n, D] complex: rotation (and scale) of each feature pair for these table rows.

        half: only the features ``half``, which tell the others.
        """
        flat = np.concatenate([_real(r) for r in rows], axis=1)
        return self._turns(flat, self.half if half else slice(None))

    def _turns(self, flat: np.ndarray, which: Any = slice(None)) -> np.ndarray:
        real = _apply(flat, self._picks[0], self.a, which) + self.c0[which]
        out = np.empty(real.shape, dtype=np.complex128)
        out.real = real
        out.imag = _apply(flat, self._picks[1], self.b, which) + self.s0[which]
        return out

    @functools.cached_property
    def mirrored(self) -> bool:
        """Whether the features of a pair turn as the parts of one complex number: both stretched
        alike, one turned as far as the other is turned back. Only such turns follow each other by
        multiplication."""
        p = self.perm
        alike = np.array_equal(self.a[p], self.a) and np.array_equal(self.c0[p], self.c0)
        back = np.array_equal(self.b[p], -self.b) and np.array_equal(self.s0[p], -self.s0)
        return alike and back

    @property
    def twisted(self) -> bool:
        """Whether they cannot: both read one table entry, and take it otherwise."""
        p = self.perm
        for picks, sign, rest in ((self._picks[0], 1, self.c0), (self._picks[1], -1, self.s0)):
            if picks is None:
                return not self.mirrored
            at, weight = picks
            alike = (weight[p] == sign * weight) & (rest[p] == sign * rest)
            if ((at[p] == at) & ~alike).any():
                return True
        return False

    def straight(self, z: np.ndarray, eps: float) -> bool:
        """Whether pairs turn so in turns [n, D] of all features, by their values."""
        if self.mirrored:
            return True
        one, other = (z[:, at] for at in self._mates)
        if np.array_equal(one.real, other.real) and np.array_equal(one.imag, -other.imag):
            return bool(np.isfinite(one.sum()))
        least = np.minimum(np.abs(one), np.abs(other))
        return bool((np.abs(other - one.conj()) <= 8 * eps * least).all())

    @functools.cached_property
    def _mates(self) -> tuple[Any, Any]:
        """The features of each pair."""
        every = np.arange(len(self.perm))
        one = every[self.perm >= every]
        return _span(one), _span(self.perm[one])

    @functools.cached_property
    def half(self) -> np.ndarray:
        """One feature of each pair, where the other one is known to turn the opposite way."""
        every = np.arange(len(self.perm))
        return every[self.perm >= every] if self.mirrored else every

    def whole(self, turn: np.ndarray) -> np.ndarray:
        """[D] from a turn of the features ``half``."""
        out = np.ones(len(self.perm), dtype=np.complex128)
        out[self.perm[self.half]] = turn.conj()
        out[self.half] = turn
        return out

    @functools.cached_property
    def inverse(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(output, weight) from which each table entry can be read back, or None.

        Outputs are c and then s of every feature. With it, a turn can be put into the table rows.
        """
        if any(p is None for p in self._picks):
            return None
        both = np.concatenate([self.a[self.half], self.b[self.half]])
        if (np.abs(both).max(axis=0) == 0).any():
            return None  # an entry that nothing shows
        src = np.abs(both).argmax(axis=0)
        weight = both[src, np.arange(both.shape[1])]
        # a turned row must be a row: try it on random turns
        gen = np.random.default_rng(0)
        frame = np.exp(1j * gen.standard_normal(len(self.perm)))
        alone = self.perm == np.arange(len(self.perm))
        frame = np.where(alone, 1.0, frame)
        lower = self.perm >= np.arange(len(self.perm))
        frame = np.where(lower, frame, frame[self.perm].conj())
        flat = gen.standard_normal((3, both.shape[1]))
        z = self._turns(flat) * frame
        again = self._turns(self._back(z[:, self.half], src, weight))
        return (src, weight) if np.allclose(again, z, rtol=0, atol=1e-9) else None

    def _back(self, z: np.ndarray, src: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Table entries from turns of the features ``half``."""
        k = len(self.half)
        parts = np.ascontiguousarray(z).view(np.float64)  # c and s side by side
        flat = np.take(parts, np.where(src < k, 2 * src, 2 * (src - k) + 1), axis=1)
        offset = np.concatenate([self.c0[self.half], self.s0[self.half]])[src]
        flat = flat - offset if offset.any() else flat
        return flat / weight if (weight != 1).any() else flat

    def turned_rows(self, rows: list[torch.Tensor], by: np.ndarray) -> list[torch.Tensor]:
        """Table rows that turn by ``by`` [D] complex more; needs ``inverse``. Fallback: no rows
        can."""
        assert self.inverse is not None
        if (by == 1).all() or not len(rows[0]):
            return rows
        turns = self.turns(rows, half=True)
        if not self.straight(turns, max(torch.finfo(r.dtype).eps for r in rows)):
            raise Fallback(BENT)
        flat = self._back(turns * by[self.half], *self.inverse)
        out, at = [], 0
        for r in rows:
            k = r.shape[1] * (2 if r.is_complex() else 1)
            part = torch.from_numpy(np.ascontiguousarray(flat[:, at : at + k]))
            if r.is_complex():
                part = torch.view_as_complex(part.reshape(len(part), -1, 2))
            out.append(part.to(r.dtype))
            at += k
        return out

    @functools.cached_property
    def _picks(self) -> tuple[Any, Any]:
        return _picks(self.a), _picks(self.b)


def _span(at: np.ndarray) -> Any:
    """Columns side by side as a slice, which costs no copy."""
    together = len(at) and (np.diff(at) == 1).all()
    return slice(int(at[0]), int(at[-1]) + 1) if together else at


def _picks(m: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(column, weight) of a matrix with at most one entry a row: tables hold cosines and sines."""
    if (np.count_nonzero(m, axis=1) > 1).any():
        return None
    at = np.abs(m).argmax(axis=1)
    return at, m[np.arange(len(m)), at]


def _apply(
    flat: np.ndarray, picks: tuple[np.ndarray, np.ndarray] | None, m: np.ndarray, which: Any
) -> np.ndarray:
    if picks is None:
        return flat @ m[which].T
    at, weight = picks[0][which], picks[1][which]
    if len(at) and (np.diff(at) == 1).all():  # side by side: gathering would cost a copy
        return flat[:, at[0] : at[-1] + 1] * weight
    return np.take(flat, at, axis=1) * weight


def _real(rows: torch.Tensor) -> np.ndarray:
    if rows.is_complex():
        rows = torch.view_as_real(rows.to(torch.complex128)).flatten(1)
    return rows.to(torch.float64).numpy()


def find(view: View) -> Rotation | None:
    """The rotation in a view's work, or None."""
    at = rotated(view.fn)
    if at is None or len(view.fn.dims) != 1:
        return None
    inner = _inner(at)
    # a constant in the rest (a norm's weight) turns nothing; a table there moves with positions
    tables = [
        o for o in at.operands()
        if o.role == "table" or inner is None or _outside(at, inner, o)
    ]  # fmt: skip
    if (
        inner is None
        or not _linear(at, inner)
        or _rounds(at, inner, *_precision(view.fn))
        or any(
            o.role != "table" or (not o.dtype.is_floating_point and not o.dtype.is_complex)
            for o in tables
        )
    ):
        return None
    if any(not isinstance(o.node.meta["val"], torch.Tensor) for o in tables):
        return None
    if any(torch.finfo(o.dtype).eps > FINE for o in tables):
        return None  # what turns less than its rounding would stay unseen
    try:
        with _disable_current_modes(), torch.no_grad():
            return _measure(at, inner, tables)
    except (RuntimeError, NotLocal):
        return None


def _outside(at: Fn, inner: Fn, o: Operand) -> bool:
    """Whether ``at`` uses an operand elsewhere than in ``inner``."""
    queue = [at]
    while queue:
        f = queue.pop()
        if f.key == inner.key:
            continue
        if any(p.key == o.key for p in f.operands_here()):
            return True
        queue.extend(f.children)
    return False


def score_axis(view: View, use: tuple[fx.Node, fx.Node, Any]) -> int | None:
    """The axis of the use's node that is the view's feature axis, if the use contracts it with a
    query; None where it does something else."""
    node, user, val = use
    axis = _track(view.fn, val.fn, len(view.fn.shape) - 1)
    if axis is None:
        return None
    rank = len(val.fn.shape)
    if user.target is torch.ops.rtc.attention.default:
        ok = user.args[1] is node and node not in (user.args[0], user.args[2]) and axis == rank - 1
        return axis if ok else None
    if user.target in (aten.bmm.default, aten.mm.default) and user.args[0] is not user.args[1]:
        first = user.args[0] is node
        return axis if axis == (rank - 1 if first else rank - 2) else None
    return None


def _track(start: Fn, end: Fn, axis: int) -> int | None:
    """Where ``axis`` of ``start`` is in ``end``, through layout ops, casts, and factors that are
    the same all along the axis; None where it is regrouped or scaled unevenly."""
    chain: list[Fn] = []
    f = end
    while f.key != start.key:
        if f.kind != "op" or f.target not in (*LAYOUT, *_CASTS, *_FACTORS):
            return None
        chain.append(f)
        f = f.children[0]
    for f in reversed(chain):
        child = f.children[0]
        if f.target in _CASTS:
            continue
        if f.target in _FACTORS:
            if len(f.children) != 1 or child.shape != f.shape:
                return None
            if any(_varies(o, axis - len(f.shape)) for o in f.operands_here()):
                return None
            continue
        perm = permutation(f.target, f.args, len(child.shape))
        if perm is not None:
            axis = perm.index(axis)
        elif f.target is aten.expand.default:
            axis += len(f.shape) - len(child.shape)
        else:
            # slot counts of the region's own values: the groups do not depend on them
            try:
                dims = shapes.reshape_dims(child.shape, f.shape, (axis,))
            except NotLocal:
                return None
            if len(dims) != 1 or f.shape[dims[0]] != child.shape[axis]:
                return None
            axis = dims[0]
    return axis


def _varies(o: Operand, axis: int) -> bool:
    """Whether an operand differs along an axis, counted from the end."""
    return o.role != "const" or (len(o.shape) >= -axis and o.shape[axis] != 1)


def rotated(fn: Fn) -> Fn | None:
    """The subtree right above which only casts, scales and layout follow."""
    raw, consent = _precision(fn)
    f = fn
    while f.kind == "op":
        if any(isinstance(a, Operand) and a.role == "table" for a in f.args):
            return f
        with_tables = [c for c in f.children if any(o.role == "table" for o in c.operands())]
        if not with_tables:
            return None
        if len(with_tables) > 1 or not _commutes(f, raw, consent):
            return f
        f = with_tables[0]
    return None


def _precision(fn: Fn) -> tuple[torch.dtype, bool]:
    """The cache's own dtype, and whether the user agreed to other numerics."""
    raw = next(f for f in walk(fn) if f.kind == "raw").dtype
    return raw, any(o.key[0] == "calibrated" for o in fn.operands())


def _rounds(at: Fn, inner: Fn, raw: torch.dtype, consent: bool) -> bool:
    """Whether a value above ``inner`` is rounded to less than the cache's own precision."""
    if consent or not raw.is_floating_point:
        return False
    queue = [at]
    while queue:
        f = queue.pop()
        if f.key == inner.key:
            continue
        wide = f.dtype.is_floating_point or f.dtype.is_complex
        if wide and f.kind != "item" and torch.finfo(f.dtype).eps > torch.finfo(raw).eps:
            return True
        queue.extend(f.children)
    return False


def _linear(at: Fn, inner: Fn) -> bool:
    """Whether every op above ``inner`` is linear in it: samples alone show no clamp beyond them."""
    queue = [at]
    while queue:
        f = queue.pop()
        if f.key == inner.key:
            continue
        cast = f.target in _CASTS and (f.dtype.is_floating_point or f.dtype.is_complex)
        if f.kind == "op" and not (cast or f.target in LAYOUT or kinks.rational(f.target)):
            return False
        if f.kind == "op" and not kinks.linear(f.target, [_has(a, inner) for a in f.args]):
            return False
        queue.extend(f.children)
    return True


def _has(arg: Any, inner: Fn) -> bool:
    parts = arg if isinstance(arg, (list, tuple)) else [arg]
    return any(isinstance(a, Fn) and a.contains(inner) for a in parts)


def _commutes(f: Fn, raw: torch.dtype, consent: bool) -> bool:
    """Whether ``f`` commutes with turning pairs, up to the rounding that raw slots have anyway.

    A cast to less than the cache's own precision rounds by where the pair points: turning before it
    changes numerics, which is only done with consent (quantization by calibrated scales).
    """
    if f.target in _CASTS:
        if not f.dtype.is_floating_point or not raw.is_floating_point:
            return False
        return consent or torch.finfo(f.dtype).eps <= torch.finfo(raw).eps
    if f.target in LAYOUT:
        # the feature axis must stay the last
        return _track(f.children[0], f, len(f.children[0].shape) - 1) == len(f.shape) - 1
    if f.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(f.args[0], Fn):
        by = f.args[1]
        if isinstance(by, Operand):
            return by.role == "const" and (not by.shape or by.shape[-1] == 1)
        return isinstance(by, (int, float))
    return f.target is aten.clamp.default and consent and _keeps_in_range(f)


def _keeps_in_range(f: Fn) -> bool:
    """Whether a clamp only keeps what a calibrated scale was divided out of within FP8's range."""
    while f.kind == "op":
        if f.target is aten.clamp.default:
            low, high = (*f.args[1:3], None, None)[:2]
            if not all(isinstance(x, (int, float)) for x in (low, high)):
                return False
            if low > -448 or high < 448:
                return False
        elif f.target in _FACTORS and any(o.key[0] == "calibrated" for o in f.operands_here()):
            return True
        elif f.target not in _CASTS and f.target not in LAYOUT:
            return False
        f = f.children[0]
    return False


def _inner(at: Fn) -> Fn | None:
    """The largest table-free subtree through which all of raw enters ``at``."""
    queue, seen = [at], set()
    while queue:
        f = queue.pop(0)
        if f.key in seen:
            continue
        seen.add(f.key)
        if f.kind == "item":
            queue.extend(f.children[0].children)  # a tuple is no value to put in
            if at.raw_outside(f):
                continue
        if not any(o.role == "table" for o in f.operands()) and not at.raw_outside(f):
            return _real_parts(f)
        if f.kind != "item":
            queue.extend(f.children)
    return None


def _real_parts(f: Fn) -> Fn:
    """What complex features are made of: a rotation is measured on real ones."""
    while f.dtype.is_complex and f.kind == "op" and len(f.children) == 1:
        if f.target not in (*_CASTS, *LAYOUT, aten.view_as_complex.default):
            break
        f = f.children[0]
    return f


def _measure(at: Fn, inner: Fn, tables: list[Operand]) -> Rotation | None:
    feat = at.shape[-1]
    tail = math.prod(inner.shape[inner.dims[-1] + 1 :])
    if not isinstance(feat, int) or feat in at.dims or feat < 2 or tail % feat:
        return None
    for o in tables:
        # one row for all heads: other axes than the slots' and the features' are 1
        rest = [s for s in off_slots(o.shape, o.axes or ()) if s != -1]
        if math.prod(rest) > 2 * feat:
            return None
    gen = torch.Generator().manual_seed(0)
    widths = [math.prod(s for s in off_slots(o.shape, o.axes or ()) if s != -1) for o in tables]

    def run(u: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
        """[n, heads.., D] -> [n, heads, D]; u [n, *inner features], all float64."""
        n = len(u)
        x = u.reshape(n, *(s for i, s in enumerate(inner.shape) if i not in inner.dims))
        x = x.movedim(0, inner.dims[0]).reshape(with_slots(inner.shape, inner.dims, n))
        values = {
            o.key: _wide(shaped_rows(o, r, torch.device("cpu")))
            for o, r in zip(tables, rows, strict=True)
        }
        out = emit(
            at,
            n,
            _call_wide,
            lambda f: x if f.key == inner.key else None,
            lambda o: values[o.key],
        )
        return out.movedim(at.dims[0], 0).reshape(n, -1, feat).to(torch.float64)

    lead = math.prod(s for i, s in enumerate(inner.shape) if i not in inner.dims) // tail

    def tiled(v: torch.Tensor) -> torch.Tensor:
        """[n, D] -> the same for every head."""
        return v.repeat(1, lead * (tail // feat))

    def draw(n: int) -> list[torch.Tensor]:
        wide = [torch.complex128 if o.dtype.is_complex else torch.float64 for o in tables]
        return [
            torch.randn(n, w, generator=gen, dtype=d).to(o.dtype)
            for o, w, d in zip(tables, widths, wide, strict=True)
        ]

    eye = torch.eye(feat, dtype=torch.float64)
    m = run(tiled(eye), [r.expand(feat, -1) for r in draw(1)])
    if (m != m[:, :1]).any():
        return None  # heads differ
    mat = m[:, 0].T.numpy()  # out x in
    near = np.abs(mat) > 1e-12
    perm = np.arange(feat)
    for d in range(feat):
        others = [int(j) for j in np.nonzero(near[d])[0] if j != d]
        if len(others) > 1:
            return None
        if others:
            perm[d] = others[0]
    if (perm[perm] != np.arange(feat)).any():
        return None
    first = torch.from_numpy((perm >= np.arange(feat)).astype(np.float64))[None]
    total = sum(2 * w if o.dtype.is_complex else w for o, w in zip(tables, widths, strict=True))
    unit = np.concatenate([np.zeros((1, total)), np.eye(total)])
    rows, at_col = [], 0
    for o, w in zip(tables, widths, strict=True):
        k = 2 * w if o.dtype.is_complex else w
        part = torch.from_numpy(unit[:, at_col : at_col + k])
        if o.dtype.is_complex:
            part = torch.view_as_complex(part.reshape(len(part), w, 2).contiguous())
        rows.append(part.to(o.dtype))
        at_col += k
    x1 = run(tiled(first.expand(total + 1, -1)), rows)[:, 0].numpy()
    x2 = run(tiled((1 - first).expand(total + 1, -1)), rows)[:, 0].numpy()
    lower = first[0].numpy() > 0
    c, s = np.where(lower, x1, x2), np.where(lower, x2, x1)
    alone = perm == np.arange(feat)
    s = np.where(alone, 0.0, s)
    rot = Rotation(at, inner, perm, (c[1:] - c[0]).T, (s[1:] - s[0]).T, c[0], s[0])
    if rot.twisted:
        return None
    return rot if _checks(rot, run, draw, feat, lead * tail, gen) else None


def _checks(rot: Rotation, run: Any, draw: Any, feat: int, width: int, gen: Any) -> bool:
    """The formula on random data, and heads stay apart."""
    n = 4
    u, rows = torch.randn(n, width, generator=gen, dtype=torch.float64), draw(n)
    tol = 64 * torch.finfo(torch.float64).eps  # of `run`, whatever dtypes the work itself has
    same = torch.randn(n, feat, generator=gen, dtype=torch.float64)
    got = run(same.repeat(1, width // feat), rows)
    z = rot.turns(rows)
    x = same.numpy()
    want = z.real * x + z.imag * x[:, rot.perm]
    if not np.allclose(got.numpy(), want[:, None], rtol=0, atol=tol * np.abs(want).max()):
        return False
    base = run(u, rows)
    for block in {0, width // feat - 1}:
        moved = u.clone()
        moved[:, block * feat : (block + 1) * feat] += 1.0
        hit = ((run(moved, rows) - base).abs() > tol).any(-1).any(0)
        if int(hit.sum()) != 1:
            return False
    return True


def _widest(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype in WIDE else dtype


def _wide(x: Any) -> Any:
    return x.to(_widest(x.dtype)) if isinstance(x, torch.Tensor) else x


def _call_wide(target: Any, args: Any, kwargs: Any) -> Any:
    """An op on the CPU in float64, casts among floats left out: in the room that a half type's
    roundings need, products of table entries would pass for linear."""
    kwargs = {
        k: torch.device("cpu") if isinstance(v, torch.device) else v for k, v in kwargs.items()
    }
    kwargs.pop("pin_memory", None)
    if target in _CASTS:
        to = kwargs.get("dtype") or (args[1] if len(args) > 1 else args[0].dtype)
        return args[0].to(_widest(to))
    out = target(*args, **kwargs)
    return [_wide(x) for x in out] if isinstance(out, (list, tuple)) else _wide(out)
