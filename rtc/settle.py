"""Sizes that follow from changing ints, and have stopped changing: a window that is full.

Code that fills a window by numbers (``cache[:, end - n : end] = k``, ``cache[:, max(0, end - w) :
end]``) has symbolic sizes for ever, though from some call on they are always the same. A graph's
:class:`Sizes` are watched from call to call; once they stay while the ints go on, the model is
traced again, and a graph whose sizes are the settled ones holds them as constants, under guards.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.printers import PythonPrinter

from rtc.passes.analysis.effects import dead_code

_STAYED = 2  # times in a row that the ints went on and the sizes stayed: they have settled
_PATIENCE = 64  # calls that graphs whose sizes have settled wait for the others
# Code generation takes as long as some hundred calls op by op, and most graphs of a window that
# fills are never called again.
_WAIT = 128
_SCOPE = {"math": math, "torch": torch}


def _expr(x: Any) -> sympy.Expr | None:
    """The expression of a symbolic int; None for a number."""
    if not isinstance(x, torch.SymInt):
        return None
    expr: sympy.Expr = x.node.expr
    return None if expr.is_number else expr


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]


def _guard(x: torch.SymInt, value: int, *, is_it: bool) -> None:
    """Asking is what guards: no assert, which ``python -O`` would leave out."""
    if bool(x == value) != is_it:
        raise RuntimeError(f"size {x} is not what it was when the graph was traced")


class Sizes:
    """The symbolic sizes and strides of a graph's tensors, each once, in order of appearance."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        found: dict[sympy.Expr, torch.SymInt] = {}
        for node in gm.graph.nodes:
            for t in _tensors(node):
                for x in (*t.shape, *t.stride()):
                    expr = _expr(x)
                    if expr is not None:
                        found.setdefault(expr, x)
        self.known: dict[sympy.Expr, int] = {}
        self.symbolic = list(found.values())
        # what the trace was made with; None where a size is the data's, not an int's
        hints = [x.node.hint for x in self.symbolic]
        self.hints = None if None in hints else tuple(map(int, hints))
        if self.hints is not None:
            self.known = dict(zip(found, self.hints, strict=True))

    def __bool__(self) -> bool:
        return bool(self.known)

    def differ_from(self, others: Sequence[tuple[int, ...]]) -> None:
        """Guard that a call's sizes are none of ``others``: those have graphs of their own."""
        assert self.hints is not None
        for other in others:
            if len(other) == len(self.hints):
                for x, mine, its in zip(self.symbolic, self.hints, other, strict=True):
                    if mine != its:
                        _guard(x, its, is_it=False)
                        break

    def fix(self) -> None:
        """Guard that a call's sizes are those of the trace, and hold them as constants."""
        assert self.hints is not None
        for x, held in zip(self.symbolic, self.hints, strict=True):
            _guard(x, held, is_it=True)
        for node in list(self.gm.graph.nodes):
            val = node.meta.get("val")
            value: int | None = (
                self.known.get(_expr(val)) if isinstance(val, torch.SymInt) else None
            )
            if value is None:
                node.meta["val"] = tree_map(self._constant, val)
                node.args = fx.node.map_aggregate(node.args, self._number)
                node.kwargs = fx.node.map_aggregate(node.kwargs, self._number)
            elif node.op == "placeholder":
                for user in list(node.users):
                    user.replace_input_with(node, value)
            else:
                node.replace_all_uses_with(value)
                self.gm.graph.erase_node(node)
        dead_code(self.gm.graph)
        self.gm.recompile()

    def _number(self, x: Any) -> Any:
        return self.known.get(_expr(x), x) if isinstance(x, torch.SymInt) else x

    def _constant(self, x: Any) -> Any:
        """``x`` with constant sizes. Where in its memory it begins may still change."""
        if not isinstance(x, torch.Tensor):
            return x
        if not any(isinstance(s, torch.SymInt) for s in (*x.shape, *x.stride())):
            return x
        shape, stride = ([int(self._number(s)) for s in y] for y in (x.shape, x.stride()))
        with x.fake_mode:  # type: ignore[attr-defined]
            return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)


class Watch:
    """Looks in every call of a graph whether its sizes have settled, and says so once."""

    def __init__(self, sizes: Sizes, places: Sequence[fx.Node], settling: Settling) -> None:
        self.settling = settling
        exprs = [_expr(x) for x in sizes.symbolic]
        names: dict[sympy.Symbol, int] = {}
        for i, n in enumerate(places):
            val = n.meta["val"]
            if isinstance(_expr(val), sympy.Symbol):
                names.setdefault(_expr(val), i)
        wanted = set().union(*(e.free_symbols for e in exprs if e is not None))
        self.ints: list[int] | None = None
        if None not in exprs and wanted <= names.keys():
            symbols = sorted(wanted, key=str)
            self.ints = [names[s] for s in symbols]
            body = ", ".join(PythonPrinter().doprint(e) for e in exprs)
            args = ", ".join(map(str, symbols))
            self.sizes = eval(f"lambda {args}: ({body},)", dict(_SCOPE))
        self.every = [i for i, n in enumerate(places) if isinstance(n.meta["val"], torch.SymInt)]
        self.waits = False  # whether the graph runs op by op meanwhile
        self.last: tuple[Any, Any] | None = None
        self.stayed = 0
        self.steps = 0  # calls with other ints than the one before
        self.at = 0  # the number of the last of them, among the model's calls

    def see(self, args: Sequence[Any]) -> None:
        self.settling.waited += self.waits
        if self.ints is None:
            return
        now = operator.itemgetter(*self.every)(args)
        if self.last is not None and now == self.last[0]:
            return  # the same step again
        sizes = self.sizes(*(args[i] for i in self.ints))
        same = self.last is not None and sizes == self.last[1]
        self.last, self.stayed = (now, sizes), self.stayed + 1 if same else 0
        before, self.at = self.at, self.settling.calls
        self.steps += 1
        if self.stayed >= _STAYED:
            self.ints = None
            self.settling.tell(sizes, self.at - before)

    @property
    def hopeful(self) -> bool:
        """Whether a few calls more may settle its sizes."""
        return self.ints is not None and (self.stayed > 0 or self.steps <= 1)


class Settling:
    """When the model is to be traced again: once for all of its graphs, if they take turns."""

    def __init__(self, add: Callable[[tuple[int, ...]], bool]) -> None:
        self.add = add  # keeps sizes that have settled; whether they are new
        self.calls = 0
        self.watches: list[Watch] = []
        self.waited = 0  # calls that ran op by op, as sizes might settle
        self.since: int | None = None  # the call in which the first sizes settled
        self.period = 1  # calls from one step to the next of the graph that settled last
        self.next = 0  # the call that is its turn again

    def tell(self, sizes: tuple[int, ...], period: int) -> None:
        if self.add(sizes) and self.since is None:
            self.since = self.calls
        self.period, self.next = period, self.calls + period

    @property
    def over(self) -> bool:
        """Whether graphs whose sizes still change are called so often that they should be fast."""
        return self.waited >= _WAIT

    @property
    def due(self) -> bool:
        """Whether to trace again after this call: the graph that settled last is the next then, as
        it is the one that moves on, and what it makes of the caches is known to those after it."""
        if self.over:
            return True
        if self.since is None:
            return False
        if self.calls - self.since >= _PATIENCE:
            return True
        late = self.calls - self.period
        if any(w.hopeful and w.at >= late for w in self.watches):
            return False
        return self.calls + 1 >= self.next
