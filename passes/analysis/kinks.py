"""Ops of which a few samples tell everything: without kinks, so that no sample can miss one.

Some matchers try a piece of a graph out on samples and compare with a formula. Where the piece is
rational (or made of the few functions named here), agreeing on random samples means agreeing
everywhere. A clamp, a threshold or a ``where`` beyond all samples would not be seen, and a soft cap
(``tanh``) hardly: pieces with any other op than these are not tried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_RATIONAL = {
    "mul", "add", "sub", "rsub", "div", "neg", "reciprocal", "square", "addcmul", "addcdiv",
    "_conj", "conj_physical", "real", "imag", "complex", "view_as_complex", "view_as_real",
    "_conj_physical", "resolve_conj", "resolve_neg", "_neg_view",
}  # fmt: skip
_ROOTS = {"sqrt", "rsqrt"}
_EXPONENTIALS = {"exp", "exp2", "sigmoid", "silu"}
# They move numbers about, and compute none.
_MOVES = {
    "cat", "stack", "select", "slice", "split", "split_with_sizes", "chunk", "unbind", "narrow",
    "tensor_split", "index_select", "index", "gather", "take_along_dim", "flip", "roll", "clone",
    "repeat", "unfold", "slice_scatter", "select_scatter", "copy", "constant_pad_nd", "zeros_like",
    "ones_like", "new_zeros", "empty_like", "lift_fresh_copy", "contiguous", "getitem",
}  # fmt: skip


def _name(target: Any) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return str(target.__name__)
    # div(rounding_mode=..) is a floor
    return target._opname if "mode" not in target._overloadname else f"{target}"


def rational(target: Any) -> bool:
    """Whether it computes sums, products and quotients of its inputs, or moves them about."""
    return _name(target) in _RATIONAL | _MOVES


def linear(target: Any, inside: Sequence[bool]) -> bool:
    """Whether a rational op is linear in its arguments ``inside``, which depend on a value."""
    name = _name(target)
    if name in ("mul", "div"):
        return sum(inside) <= 1 and not (name == "div" and any(inside[1:]))
    return not any(inside) or name not in ("reciprocal", "square", "addcmul", "addcdiv")


def algebraic(target: Any, args: Any = ()) -> bool:
    """The same, and roots; powers by a number that is a multiple of a half."""
    if _name(target) == "pow":
        by = args[1] if len(args) > 1 else None
        return isinstance(by, (int, float)) and float(2 * by).is_integer()
    return rational(target) or _name(target) in _ROOTS


def exponential(target: Any) -> bool:
    """Rational ones, and what a sigmoid is made of."""
    return rational(target) or _name(target) in _EXPONENTIALS


__all__ = ["algebraic", "exponential", "linear", "rational"]
