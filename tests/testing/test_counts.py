"""Pinned pass counts: every change is seen and comes with the reasons."""

import pytest

from rtc.testing import assert_pass_counts, assert_refused, pass_counts


def entry(name, applied, matched=None, refused=(), enabled=True):
    return {
        "name": name,
        "tier": "exact",
        "enabled": enabled,
        "matched": applied if matched is None else matched,
        "applied": applied,
        "refused": list(refused),
        "notes": [],
    }


WHY = {"reason": "a causal mask by slot order", "node": "where_3", "where": "m.py:12 in forward"}
REPORT = {
    "graphs": [
        {"name": "steady", "passes": [entry("hoist_rope", 4), entry("ring_cache", 8)]},
        {"name": "growth", "passes": [entry("hoist_rope", 0, 4, [WHY]), entry("ring_cache", 1)]},
    ]
}


class Report:
    def to_dict(self):
        return REPORT


class Compiled:
    def report(self):
        return Report()


@pytest.mark.parametrize("report", [REPORT, Report(), Compiled()], ids=["dict", "report", "model"])
def test_counts_over_all_graphs_and_of_one(report):
    assert pass_counts(report) == {"hoist_rope": 4, "ring_cache": 9}
    assert_pass_counts(report, {"hoist_rope": 4, "ring_cache": 9})
    assert_pass_counts(report, {"hoist_rope": 8}, field="matched")
    assert_pass_counts(report, {"hoist_rope": 0}, graph="growth")


def test_a_pass_that_stopped_matching_is_seen_with_its_reasons():
    with pytest.raises(AssertionError) as caught:
        assert_pass_counts(REPORT, {"hoist_rope": 8, "ring_cache": 9})
    assert str(caught.value) == (
        "hoist_rope: applied 4, expected 8\n"
        "  refused: a causal mask by slot order (at where_3, m.py:12 in forward)"
    )
    with pytest.raises(AssertionError, match="ring_cache: applied 9, expected 8"):
        assert_pass_counts(REPORT, {"ring_cache": 8})  # one more is a change as well


def test_a_pass_that_is_off_says_so():
    off = {"graphs": [{"name": "g", "passes": [entry("ring_cache", 0, enabled=False)]}]}
    with pytest.raises(AssertionError, match="switched off"):
        assert_pass_counts(off, {"ring_cache": 1})


def test_misspelt_names_never_pass():
    with pytest.raises(ValueError, match="no pass \\['hoistrope'\\]"):
        assert_pass_counts(REPORT, {"hoistrope": 0})
    with pytest.raises(ValueError, match="no graph 'steadi'"):
        assert_pass_counts(REPORT, {"hoist_rope": 4}, graph="steadi")
    with pytest.raises(ValueError, match="field must be"):
        pass_counts(REPORT, "refused")
    with pytest.raises(TypeError, match="not int"):
        pass_counts(3)


def test_refusals():
    assert_refused(REPORT, "hoist_rope", r"causal mask.*m\.py:12")
    with pytest.raises(AssertionError, match="it refused:\n  a causal mask"):
        assert_refused(REPORT, "hoist_rope", "device data")
    with pytest.raises(AssertionError, match="it refused: nothing"):
        assert_refused(REPORT, "ring_cache", "anything")
