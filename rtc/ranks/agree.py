"""Ranks that disagree are told so, before a collective hangs or adds up what does not belong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rtc.errors import RankLostError, RanksDisagreeError
from rtc.ranks import facts as known
from rtc.ranks.facts import Facts
from rtc.ranks.store import Party, exchange, is_gone

# Agreements that each group of this process has come to: equal on all its ranks.
_COUNT: Counter[str] = Counter()

_NOTHING = "nothing"


def agree(
    party: Party, facts: Facts, seconds: float, failure: Callable[[], str | None] = lambda: None
) -> None:
    """Return once every rank of the group has said the same facts.

    ``failure()``: what is known by now of a rank that failed. Raises RanksDisagreeError, or
    RankLostError for ranks that said nothing within ``seconds``.
    """
    _COUNT[party.key] += 1
    key = f"{party.key}/agree/{_COUNT[party.key]}"
    try:
        said = exchange(key, facts, party.ranks, seconds, stop=lambda: failure() is not None)
    except Exception as e:
        if not is_gone(e):
            raise
        raise RankLostError(
            f"the store of the process group is gone ({_line(e)}): rank 0, or the launcher that "
            "hosts it, has ended. Start all ranks again."
        ) from e
    lost = failure()
    if lost is not None:
        raise RankLostError(lost)
    missing = [r for r in party.ranks if r not in said]
    if missing:
        came = ranks_text([r for r in party.ranks if r in said])
        raise RankLostError(
            f"{ranks_text(missing)} did not come to compile this model within {seconds:g} s (or "
            f"gave up), while {came} did. Every rank must call the compiled model, in the same "
            "order and with the same shapes; where ranks take longer to load, raise "
            "rtc.Options(rank_timeout_s=...)."
        )
    text = difference({r: said[r] for r in party.ranks})
    if text is not None:
        raise RanksDisagreeError(text)


def difference(said: Mapping[int, Facts]) -> str | None:
    """The first field in which ranks differ: who, what, both values, what to do; or None."""
    sections = list(dict.fromkeys(k for f in said.values() for k in f))
    # ranks whose options differ may compare different sections: the options come first
    for section in sections:
        values = {r: f.get(section) for r, f in said.items()}
        if _same(values.values()):
            continue
        path, values = _first(section, values)
        by_value: dict[str, list[int]] = {}
        for r, v in values.items():
            by_value.setdefault(v if v is _NOTHING else json.dumps(v), []).append(r)
        found = "; ".join(f"{v} on {ranks_text(rs)}" for v, rs in by_value.items())
        advice = known.ADVICE.get(section, "")
        if section in known.UNEVEN:
            advice += known.EVEN
        return f"the ranks disagree on {path}: {found}. {advice}"
    return None


def _same(values: Any) -> bool:
    first, *others = values
    return all(v == first for v in others)


def _first(path: str, values: dict[int, Any]) -> tuple[str, dict[int, Any]]:
    """Down to the first entry of dictionaries or lists in which the values differ."""
    if all(isinstance(v, dict) for v in values.values()):
        for name in dict.fromkeys(k for v in values.values() for k in v):
            inner = {r: v.get(name, _NOTHING) for r, v in values.items()}
            if not _same(inner.values()):
                return _first(f"{path}.{name}", inner)
        # the same entries in another order
        return _first(f"{path}, their order", {r: list(v) for r, v in values.items()})
    if all(isinstance(v, list) for v in values.values()):
        for i in range(max(len(v) for v in values.values())):
            inner = {r: v[i] if i < len(v) else _NOTHING for r, v in values.items()}
            if not _same(inner.values()):
                return _first(f"{path}[{i}]", inner)
    return path, values


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def _line(e: BaseException) -> str:
    text = str(e).strip().splitlines()
    return text[0] if text else type(e).__name__
