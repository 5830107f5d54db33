"""What a chain check found, as data and as text. No torch here: results travel as JSON."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


def ranges(indices: Iterable[int]) -> str:
    """`[0, 1, 2, 7]` as `0-2, 7`; at most six ranges are spelled out."""
    runs: list[list[int]] = []
    for i in sorted(indices):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    text = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(text[:6]) + (", ..." if len(text) > 6 else "")


@dataclass(frozen=True)
class Divergence:
    """The first place where compiled and eager differ by more than allowed.

    `index` is the worst element, `dim` the dimension along which the fewest indices are wrong
    (a wrong slot shows as few indices of the slot dimension) and `slots` the wrong ones in it.
    `expected` and `got` are the two values there: of eager (of the float64 reference in tolerance
    mode) and of compiled.
    """

    step: int
    where: str  # "output" or "cache"
    path: str
    reason: str  # "values", or what made the values incomparable
    index: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dim: int | None = None
    slots: tuple[int, ...] = ()
    max_abs: float | None = None
    max_rel: float | None = None
    allowed: float | None = None
    expected: float | complex | None = None
    got: float | complex | None = None
    agreed_until: int | None = None  # last step at which outputs (caches) were compared and right
    also: tuple[str, ...] = ()  # other paths that are wrong in this step, by less

    def __str__(self) -> str:
        lines = [f"step {self.step}: {self.where} {self.path}: {self.reason}"]
        if self.max_abs is not None:
            lines.append(
                f"  largest error {self.max_abs:.3e} (relative {self.max_rel:.3e}), allowed there "
                f"{self.allowed:.3e}, at index {list(self.index)} of shape {list(self.shape)}: "
                f"expected {self.expected}, compiled gave {self.got}"
            )
        if self.dim is not None:
            size = self.shape[self.dim]
            lines.append(
                f"  along dim {self.dim}: slot {self.index[self.dim]} is worst; "
                f"{len(self.slots)} of {size} are wrong: {ranges(self.slots)}"
            )
        if self.also:
            shown = ", ".join(self.also[:4]) + (", ..." if len(self.also) > 4 else "")
            lines.append(f"  {len(self.also)} more are wrong, by less: {shown}")
        if self.agreed_until is None:
            lines.append(f"  {self.where}s never agreed before")
        elif self.agreed_until < 0:
            lines.append(
                f"  {self.where}s agreed before the first step and were not compared since"
            )
        else:
            lines.append(f"  {self.where}s last agreed at step {self.agreed_until}")
        return "\n".join(lines)


def _plain(found: Divergence) -> dict[str, Any]:
    out = asdict(found)
    for key in ("expected", "got"):  # JSON knows no complex numbers
        out[key] = str(out[key]) if isinstance(out[key], complex) else out[key]
    return out


@dataclass(frozen=True)
class StepErrors:
    """Largest errors of one step over all outputs and, where they were compared, caches.

    Exact mode: compiled against eager, `abs` in units of the tensor and `rel` over its largest
    value. Tolerance mode: both against the float64 reference, and `eager_*` is eager's own error.
    """

    step: int
    output_abs: float
    output_rel: float
    cache_abs: float | None = None
    cache_rel: float | None = None
    eager_output_abs: float | None = None
    eager_cache_abs: float | None = None


@dataclass(frozen=True)
class ChainResult:
    """Outcome of one chain of `steps` calls; `len(errors)` of them ran. True when it passed."""

    name: str
    mode: str
    steps: int
    every: int
    errors: tuple[StepErrors, ...]
    outputs: int  # tensors compared a step
    caches: int  # tensors compared at a cache check
    divergence: Divergence | None = None
    cache_divergence: Divergence | None = None  # of the caches in a step whose outputs diverged
    seconds: dict[str, float] = field(default_factory=dict)
    report: dict[str, Any] | None = None  # Compiled.report().to_dict() where there is one

    @property
    def passed(self) -> bool:
        return self.divergence is None

    def __bool__(self) -> bool:
        return self.passed

    @property
    def worst(self) -> float:
        """Largest absolute error of the whole chain, outputs and caches."""
        seen = [e.output_abs for e in self.errors]
        seen += [e.cache_abs for e in self.errors if e.cache_abs is not None]
        return max(seen, default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, ready for `json.dumps`."""
        out = asdict(self)
        out.update(passed=self.passed, worst=self.worst, errors=[asdict(e) for e in self.errors])
        if self.divergence is not None:
            out["divergence"] = _plain(self.divergence)
        if self.cache_divergence is not None:
            out["cache_divergence"] = _plain(self.cache_divergence)
        return out

    def __str__(self) -> str:
        head = f"{self.name} ({self.mode}): "
        if self.divergence is not None:
            lines = [f"{head}compiled diverged from eager at {self.divergence}"]
            if self.cache_divergence is not None:
                lines.append(f"and the caches at {self.cache_divergence}")
            return "\n".join(lines)
        return (
            f"{head}{self.steps} steps agree, largest error {self.worst:.3e} "
            f"({self.outputs} outputs, {self.caches} caches)"
        )


class ChainError(AssertionError):
    """Compiled and eager diverged. `result` holds the `ChainResult`."""

    def __init__(self, result: ChainResult) -> None:
        super().__init__(str(result))
        self.result = result
