"""What to compile with. Every pass has a switch; off means the plain path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rtc.errors import OptionsError


@dataclass(frozen=True)
class Options:
    """Options of :func:`rtc.compile`.

    hoist_rope, hoist_quantize, ring_cache: the passes (see ``rtc passes``).
    quantize: "exact" refuses what changes numerics; "calibrated" is your consent to per-head scales
        measured once a session in place of a whole-cache maximum computed in every call.
    calibration_margin: factor on the measured maximum; floating-point FP8 loses no precision by it.
    lowering: "inductor" generates code; "eager" runs the rewritten ATen graph op by op (no compiler
        needed, slower; for tests and for looking).
    inductor: ``torch._inductor.config`` entries for this model.
    write_back: keep the user's cache tensors in the program's order after every call, instead of on
        demand. Needed where rtc cannot see the tensors being read (``torch.compile(backend="rtc")``
        sets it).
    warn: print what the user should know once (plain calls, write-backs).
    """

    hoist_rope: bool = True
    hoist_quantize: bool = True
    ring_cache: bool = True
    quantize: str = "exact"
    calibration_margin: float = 2.0
    lowering: str = "inductor"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    write_back: bool = False
    warn: bool = True

    def __post_init__(self) -> None:
        for name in ("hoist_rope", "hoist_quantize", "ring_cache", "write_back", "warn"):
            if not isinstance(getattr(self, name), bool):
                raise OptionsError(
                    f"{name} is a switch: True or False, not {getattr(self, name)!r}"
                )
        if self.quantize not in ("exact", "calibrated"):
            raise OptionsError(f"quantize is 'exact' or 'calibrated', not {self.quantize!r}")
        if self.lowering not in ("inductor", "eager"):
            raise OptionsError(f"lowering is 'inductor' or 'eager', not {self.lowering!r}")
        if not self.calibration_margin >= 1.0:
            raise OptionsError("calibration_margin is a factor of 1.0 or more")
        object.__setattr__(self, "inductor", dict(self.inductor))

    def switches(self) -> dict[str, bool]:
        """Pass name -> enabled."""
        return {n: getattr(self, n) for n in ("hoist_rope", "hoist_quantize", "ring_cache")}

    def to_dict(self) -> dict[str, Any]:
        return {k: (dict(v) if isinstance(v, Mapping) else v) for k, v in asdict(self).items()}
