"""passes/entries: which sources of fresh rows need no rows of a table."""

# mypy: no-check-untyped-defs, allow-untyped-defs

from types import SimpleNamespace as Some

from rtc.passes import entries


def test_a_source_skips_a_table_only_where_it_does_in_every_view_of_the_class(monkeypatch):
    """Two views read two tables; source 0 joins before both, 1 between them, 2 after both, and 3
    between them in one view and after both in the other. Another class has no say."""
    cos, sin = Some(key="cos"), Some(key="sin")
    passed = {
        ("k", 0): {"cos", "sin"}, ("k", 1): {"sin"}, ("k", 2): set(), ("k", 3): {"sin"},
        ("v", 0): {"cos", "sin"}, ("v", 1): {"sin"}, ("v", 2): set(), ("v", 3): set(),
        ("k", 4): None, ("v", 4): set(),  # has no entry at all: not known to skip
        ("other", 0): set(),
    }  # fmt: skip
    caches = [Some(sources={k: k for k in range(5)}), Some(sources={k: k for k in range(5)})]
    views = [
        Some(klass=klass, cache=cache, fn=fn, tables=lambda read: [cos, sin] if read else [])
        for klass, cache, fn in (("A", 0, "k"), ("A", 1, "v"), ("B", 0, "other"))
    ]
    monkeypatch.setattr(entries, "_passed", lambda source, fn: passed.get((fn, source)))
    monkeypatch.setattr(entries, "TableReader", lambda host, o, later: (o.key, later))
    monkeypatch.setattr(entries, "ClassTables", list)
    cohort = Some(caches=caches, views=views)
    want = [("cos", frozenset({1, 2, 3})), ("sin", frozenset({2}))]
    for view in views[:2]:
        assert entries.tables(None, cohort, view, "read") == want
        assert entries.tables(None, cohort, view, None) == []
