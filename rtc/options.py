"""What to compile with. Every pass has a switch; off means the plain path."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rtc.errors import OptionsError

_SWITCHES = (
    "quantize_kv", "hoist_quantize", "hoist_rope", "ring_cache", "fp8_attention",
    "fuse_all_reduce_norm",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Options of :func:`rtc.compile`.

    hoist_rope, hoist_quantize, ring_cache: the passes (see ``rtc passes``).
    fp8_attention: your consent to attention in FP8 (queries and probabilities are rounded too)
        where a model, or quantize_kv, keeps FP8 keys and values.
    fuse_all_reduce_norm: each rank norms some of the rows behind a row-parallel linear for all: 1 %
        of a step. Everything but the linears must be the same on all ranks; every call looks, and
        rows that differ by an eighth of their norm end as NaN and ExchangeError (on the CPU as
        ValueError).
    quantize_kv: your consent to an FP8 cache for a model that has none; needs "calibrated" below.
    passes: switches of further passes by name, for passes that were added to the pipeline.
    quantize: "exact" refuses what changes numerics; "calibrated" is your consent to per-head scales
        measured once a session in place of a whole-cache maximum computed in every call.
    calibration_margin: factor on the measured maximum; floating-point FP8 loses no precision by it.
    lowering: "inductor" generates code; "eager" runs the rewritten ATen graph op by op (no compiler
        needed, slower; for tests and for looking).
    kernels: let passes put in rtc's own kernels ("on"), or leave all to the compiler ("off");
        "auto" does so on a GPU that Triton runs on.
    regions: compile parts of a graph that are alike once ("on"), or the graph as a whole ("off");
        "auto" cuts up graphs on a GPU; on a CPU it makes compiling faster and steps slower.
    inductor: ``torch._inductor.config`` entries for this model.
    write_back: keep the user's cache tensors in the program's order after every call, instead of on
        demand. Needed where rtc cannot see the tensors being read (``torch.compile(backend="rtc")``
        sets it).
    step_graph: replay steps from a CUDA graph: captured once per session in its third call. "auto"
        does so on a GPU; "off" never; "simulate" goes the same way without capturing (for tests).
    rank_timeout_s: on several ranks, seconds after which one that does not come to compile, or
        shows no sign of life, is taken for lost: the others end with an error instead of waiting.
    rank_check: what ranks must have in common before they run collectives together: "all", or
        "collectives" where their shards differ on purpose (uneven sizes, a bias on one rank).
    warn: print what the user should know once (plain calls, write-backs).
    """

    hoist_rope: bool = True
    hoist_quantize: bool = True
    ring_cache: bool = True
    fp8_attention: bool = False
    fuse_all_reduce_norm: bool = False
    quantize_kv: bool = False
    passes: Mapping[str, bool] = field(default_factory=dict)
    quantize: str = "exact"
    calibration_margin: float = 2.0
    lowering: str = "inductor"
    kernels: str = "auto"
    regions: str = "auto"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    write_back: bool = False
    step_graph: str = "auto"
    rank_timeout_s: float = 60.0
    rank_check: str = "all"
    warn: bool = True

    def __post_init__(self) -> None:
        for name in (*_SWITCHES, "write_back", "warn"):
            if not isinstance(getattr(self, name), bool):
                raise OptionsError(
                    f"{name} is a switch: True or False, not {getattr(self, name)!r}"
                )
        if self.quantize not in ("exact", "calibrated"):
            raise OptionsError(f"quantize is 'exact' or 'calibrated', not {self.quantize!r}")
        if self.lowering not in ("inductor", "eager"):
            raise OptionsError(f"lowering is 'inductor' or 'eager', not {self.lowering!r}")
        if self.kernels not in ("auto", "on", "off"):
            raise OptionsError(f"kernels is 'auto', 'on' or 'off', not {self.kernels!r}")
        if self.regions not in ("auto", "on", "off"):
            raise OptionsError(f"regions is 'auto', 'on' or 'off', not {self.regions!r}")
        if self.step_graph not in ("auto", "off", "simulate"):
            raise OptionsError(
                f"step_graph is 'auto', 'off' or 'simulate', not {self.step_graph!r}"
            )
        if self.rank_check not in ("all", "collectives"):
            raise OptionsError(f"rank_check is 'all' or 'collectives', not {self.rank_check!r}")
        if not 0 < self.rank_timeout_s < math.inf:
            raise OptionsError(f"rank_timeout_s is a number of seconds, not {self.rank_timeout_s}")
        if self.quantize_kv and self.quantize != "calibrated":
            raise OptionsError(
                "quantize_kv keeps its scales for a session: say quantize='calibrated' as well"
            )
        if not self.calibration_margin >= 1.0:
            raise OptionsError("calibration_margin is a factor of 1.0 or more")
        object.__setattr__(self, "inductor", dict(self.inductor))
        object.__setattr__(self, "passes", dict(self.passes))
        if self.passes:
            from rtc.passes import names

            unknown = sorted(set(self.passes) - set(names()))
            if unknown:
                raise OptionsError(f"no pass is called {', '.join(unknown)}: there are {names()}")

    def switches(self) -> dict[str, bool]:
        """Pass name -> enabled."""
        own = {n: getattr(self, n) for n in _SWITCHES}
        return {**own, **self.passes}

    def without_passes(self) -> Options:
        """The same with every pass switched off."""
        from rtc.passes import names

        others = {n: False for n in names() if n not in _SWITCHES}
        off = dict.fromkeys(_SWITCHES, False)
        return replace(self, passes=others, **off)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        return {k: (dict(v) if isinstance(v, Mapping) else v) for k, v in asdict(self).items()}
