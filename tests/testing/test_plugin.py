"""The pytest plugin: fixture, marker, JSON report; and it costs nothing at import."""

import json
import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import pytest, torch

def inputs(step):
    return (torch.randn(2, dtype=torch.float64),), {}

def add(x): return x + 1
def bad(x): return x + 2

@pytest.mark.rtc_chain(steps=7)
class TestIt:
    def test_good(self, rtc_chain):
        assert len(rtc_chain(add, add, inputs, name="good").errors) == 7

    @pytest.mark.rtc_chain(steps=3)
    def test_bad(self, rtc_chain):
        rtc_chain(add, bad, inputs)

def test_compile(rtc_chain):
    assert rtc_chain.compile(lambda: add, inputs, compile=lambda f: f, steps=2)
    assert not rtc_chain(add, bad, inputs, steps=2, check=False)
"""


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(test_it=SUITE)
    return pytester


def plugin_args(config):
    """The plugin comes in by its entry point; without an installation, by name."""
    installed = config.pluginmanager.list_plugin_distinfo()
    found = any(plugin.__name__ == "rtc.testing.plugin" for plugin, _ in installed)
    return [] if found else ["-p", "rtc.testing.plugin"]


@pytest.mark.parametrize("workers", [0, 2], ids=["in one process", "under xdist"])
def test_report(suite, request, workers):
    args = plugin_args(request.config)
    if workers:
        pytest.importorskip("xdist")
        args += ["-n", str(workers)]
    result = suite.runpytest_subprocess(*args, "--strict-markers", "--rtc-report", "out.json")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["*ChainError: add (exact): compiled diverged from eager at step 0*"]
    )
    out = json.loads((suite.path / "out.json").read_text())
    assert out["passed"] is False
    assert sorted(out["failed"]) == ["test_it.py::TestIt::test_bad", "test_it.py::test_compile"]
    assert len(out["results"]) == 4
    by_name = {r["name"]: r for r in out["results"]}
    assert (by_name["good"]["steps"], len(by_name["good"]["errors"])) == (7, 7)
    bad = next(r for r in out["results"] if r["test"].endswith("test_bad"))
    assert bad["steps"] == 3  # the closest marker wins
    assert bad["divergence"]["got"] == pytest.approx(bad["divergence"]["expected"] + 1)


def test_no_report_without_the_option(suite, request):
    suite.runpytest_subprocess(*plugin_args(request.config), "-k", "good").assert_outcomes(
        passed=1, deselected=2
    )
    assert not list(suite.path.glob("*.json"))


def test_the_plugin_imports_no_torch():
    code = "import sys, rtc.testing.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_resolve():
    import rtc.testing as t

    assert all(getattr(t, name).__name__ == name for name in t.__all__)
    assert set(t.__all__) <= set(dir(t))
    with pytest.raises(AttributeError, match="nothing"):
        _ = t.nothing
