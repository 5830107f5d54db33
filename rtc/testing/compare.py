"""Compare two pytrees of tensors leaf by leaf and say where they differ most."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .result import Divergence


@dataclass(frozen=True)
class Bounds:
    """What is allowed. Exact: |compiled - eager| <= atol + rtol * |eager|, element by element.

    Tolerance: the largest |compiled - reference| of a tensor may be `factor` times the largest
    |eager - reference| that tensor has shown so far in the chain, plus `floor` roundings (eps of
    the dtype times the tensor's largest value): eager may be right by luck in a single step. Where
    eager is off by more than half the tensor's largest value, nothing can be concluded.
    """

    mode: str = "exact"
    rtol: float = 1e-10
    atol: float = 1e-10
    factor: float = 2.0
    floor: float = 4.0

    def __post_init__(self) -> None:
        if self.mode not in ("exact", "tolerance"):
            raise ValueError(f"mode must be 'exact' or 'tolerance', not {self.mode!r}")
        if min(self.rtol, self.atol, self.floor) < 0 or self.factor < 1:
            raise ValueError("rtol, atol, floor must be >= 0 and factor >= 1")


def flatten(tree: Any, name: str) -> dict[str, Any]:
    """Leaves by path: `output[0]['x'].y`. Mappings, sequences and dataclasses are entered."""
    if isinstance(tree, Mapping):
        items = [(f"[{k!r}]", v) for k, v in tree.items()]
    elif isinstance(tree, (list, tuple)):
        items = [(f"[{i}]", v) for i, v in enumerate(tree)]
    elif is_dataclass(tree) and not isinstance(tree, type):
        items = [(f".{f.name}", getattr(tree, f.name)) for f in fields(tree)]
    else:
        return {name: tree}
    return {p: leaf for key, sub in items for p, leaf in flatten(sub, name + key).items()}


@dataclass(frozen=True)
class Errors:
    """Errors of one tensor or the largest of many; `bad` is None where all is within bounds."""

    abs: float = 0.0
    rel: float = 0.0
    eager_abs: float | None = None
    bad: Divergence | None = None


INF = float("inf")


def widen(x: Any) -> Any:
    """Floating and complex tensors in double precision; anything else as it is."""
    if isinstance(x, Tensor) and x.is_complex():
        return x.detach().to(torch.complex128)
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().to(torch.float64)
    return x


def _mismatch(eager: Any, compiled: Any) -> str | None:
    """Why two leaves cannot be compared by value, or None."""
    if not isinstance(eager, Tensor) or not isinstance(compiled, Tensor):
        if isinstance(eager, Tensor) or isinstance(compiled, Tensor):
            return f"eager gave a {type(eager).__name__}, compiled a {type(compiled).__name__}"
        same = eager is compiled or eager == compiled
        return None if same else f"eager gave {eager!r}, compiled {compiled!r}"
    for what in ("shape", "dtype", "device"):
        a, b = getattr(eager, what), getattr(compiled, what)
        if a != b:
            return f"{what} of eager is {a}, of compiled {b}"
    return None


def _wrong_along(wrong: Tensor, dim: int) -> list[int]:
    """Indices of `dim` under which any element is wrong."""
    others = [d for d in range(wrong.dim()) if d != dim]
    profile = wrong.any(dim=others) if others else wrong
    return [int(i) for i in profile.nonzero().flatten()]


def _locate(wrong: Tensor, size: Tensor) -> dict[str, Any]:
    """Worst index; the dimension with the smallest share of wrong indices, and those indices."""
    flat = int(torch.where(wrong, size, torch.full_like(size, -1.0)).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), wrong.shape))
    along = {d: _wrong_along(wrong, d) for d in range(wrong.dim()) if wrong.shape[d] > 1}
    dim = min(along, key=lambda d: (len(along[d]) / wrong.shape[d], -wrong.shape[d]), default=None)
    slots = () if dim is None else tuple(along[dim])
    return {"index": index, "shape": tuple(wrong.shape), "dim": dim, "slots": slots}


class Comparer:
    """Compares step after step; remembers when things last agreed and eager's own error so far."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.agreed: dict[str, int] = {}
        self.yardstick: dict[str, float] = {}

    def trees(
        self, step: int, where: str, eager: Any, compiled: Any, reference: Any = None
    ) -> tuple[Errors, int]:
        """The largest errors over all leaves with the worst divergence, and the leaf count."""
        ours, theirs = flatten(eager, where), flatten(compiled, where)
        refs = {} if reference is None else flatten(reference, where)
        if ours.keys() != theirs.keys():
            extra = sorted(theirs.keys() - ours.keys())
            missing = sorted(ours.keys() - theirs.keys())
            reason = f"structure differs: compiled lacks {missing} and adds {extra}"
            found = Divergence(step, where, where, reason, agreed_until=self.agreed.get(where))
            return Errors(INF, INF, bad=found), len(ours)
        errors = [self._leaf(step, where, p, x, theirs[p], refs.get(p)) for p, x in ours.items()]
        eager_abs = [e.eager_abs for e in errors if e.eager_abs is not None]
        wrong = [e for e in errors if e.bad is not None]
        worst = max(wrong, key=lambda e: e.abs).bad if wrong else None
        if worst is None:
            self.agreed[where] = step
        elif len(wrong) > 1:
            others = tuple(e.bad.path for e in wrong if e.bad is not None and e.bad is not worst)
            worst = replace(worst, also=others)
        total = Errors(
            max((e.abs for e in errors), default=0.0),
            max((e.rel for e in errors), default=0.0),
            max(eager_abs, default=None),
            worst,
        )
        return total, len(ours)

    def _leaf(
        self, step: int, where: str, path: str, eager: Any, compiled: Any, reference: Any
    ) -> Errors:
        def failed(reason: str, **details: Any) -> Divergence:
            agreed = self.agreed.get(where)
            return Divergence(step, where, path, reason, agreed_until=agreed, **details)

        reason = _mismatch(eager, compiled)
        if reason is not None:
            return Errors(INF, INF, bad=failed(reason))
        if not isinstance(eager, Tensor) or not eager.numel():
            return Errors()
        base = widen(eager if reference is None else reference)
        if base.dtype not in (torch.float64, torch.complex128):  # integers, bools
            base = base.double()
            diff = (widen(compiled).double() - base).abs()
            allowed, eager_abs = torch.zeros_like(diff), None
        elif not bool(torch.isfinite(base).all()):
            return Errors(INF, INF, bad=failed("eager itself gave values that are not finite"))
        else:
            diff = (widen(compiled) - base).abs()
            allowed, eager_abs = self._allowed(path, eager, base, diff)
        wrong = ~(diff <= allowed)  # so that NaN is wrong
        size = torch.where(torch.isnan(diff), torch.full_like(diff, INF), diff)
        worst = float(size.max())
        rel = worst / max(float(base.abs().max()), torch.finfo(torch.float64).tiny)
        if not bool(wrong.any()):
            return Errors(worst, rel, eager_abs)
        place = _locate(wrong, size)
        index = place["index"]
        found = failed(
            "values differ",
            max_abs=float(size[index]),
            max_rel=rel,
            allowed=float(allowed[index]),
            expected=base[index].item(),
            got=compiled[index].item(),
            **place,
        )
        return Errors(worst, rel, eager_abs, found)

    def _allowed(
        self, path: str, eager: Tensor, base: Tensor, diff: Tensor
    ) -> tuple[Tensor, float | None]:
        """Allowed error per element, and eager's own error where that is the yardstick."""
        b = self.bounds
        if b.mode == "exact":
            if eager.dtype not in (torch.float64, torch.complex128) and bool(diff.any()):
                raise ValueError(
                    f"exact mode compares float64, but {path} is {eager.dtype} and differs: use "
                    "model.double(), or mode='tolerance', which measures against eager's own error"
                )
            return b.atol + b.rtol * base.abs(), None
        eager_abs = float((widen(eager) - base).abs().max())
        if eager_abs > 0.5 * float(base.abs().max()):
            raise ValueError(
                f"{path}: eager in {eager.dtype} is off by {eager_abs:.3g} from float64, where the "
                f"largest value is {float(base.abs().max()):.3g}: a comparison would mean nothing"
            )
        self.yardstick[path] = max(self.yardstick.get(path, 0.0), eager_abs)
        tiny = b.floor * torch.finfo(eager.dtype).eps * float(base.abs().max())
        return torch.full_like(diff, b.factor * self.yardstick[path] + tiny), eager_abs
