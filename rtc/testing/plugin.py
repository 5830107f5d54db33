"""pytest plugin (entry point `pytest11`): loaded in every pytest run, so it imports nothing heavy.

`rtc_chain`            fixture: `check_chain`, and `rtc_chain.compile` is `check_compile`. Results
                       are collected, and `@pytest.mark.rtc_chain(...)` gives default arguments
`--rtc-report PATH`    writes all results of the run as JSON, also under pytest-xdist
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_RESULTS = pytest.StashKey[list[dict[str, Any]]]()
_WORKER_KEY = "rtc_chain_results"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rtc")
    group.addoption(
        "--rtc-report",
        metavar="PATH",
        default=None,
        help="write the results of the rtc_chain fixture to PATH as JSON",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RESULTS] = []
    config.addinivalue_line(
        "markers",
        "rtc_chain(**arguments): default arguments (steps, every, mode, ...) of the rtc_chain "
        "fixture for this test, class or module",
    )


class RtcChain:
    """`check_chain` with this test's defaults; every result goes into the report."""

    def __init__(
        self, test: str, defaults: dict[str, Any], record: Callable[[dict[str, Any]], None]
    ) -> None:
        self._test, self._defaults, self._record = test, defaults, record

    def __call__(self, eager: Any, compiled: Any, inputs: Any, **arguments: Any) -> Any:
        from .chain import check_chain

        return self._run(check_chain, (eager, compiled, inputs), arguments)

    def compile(self, build: Any, inputs: Any, **arguments: Any) -> Any:
        from .chain import check_compile

        return self._run(check_compile, (build, inputs), arguments)

    def _run(self, run: Callable[..., Any], args: tuple[Any, ...], own: dict[str, Any]) -> Any:
        from .result import ChainError

        arguments = {**self._defaults, **own}
        check = arguments.pop("check", True)
        result = run(*args, **arguments, check=False)
        self._record({"test": self._test, **result.to_dict()})
        if check and not result:
            raise ChainError(result)
        return result


@pytest.fixture
def rtc_chain(request: pytest.FixtureRequest) -> RtcChain:
    """Holds a compiled model against eager over chained steps; see `rtc.testing.check_chain`."""
    defaults: dict[str, Any] = {}
    for mark in reversed(list(request.node.iter_markers("rtc_chain"))):  # the closest one wins
        defaults.update(mark.kwargs)
    return RtcChain(request.node.nodeid, defaults, request.config.stash[_RESULTS].append)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """pytest-xdist: a worker is done, and its results come to the main process."""
    found = getattr(node, "workeroutput", {}).get(_WORKER_KEY, [])
    node.config.stash[_RESULTS].extend(found)


def pytest_sessionfinish(session: pytest.Session) -> None:
    results = session.config.stash[_RESULTS]
    worker = getattr(session.config, "workeroutput", None)
    if worker is not None:
        worker[_WORKER_KEY] = results
        return
    path = session.config.getoption("--rtc-report")
    if path is None:
        return
    failed = [r["test"] for r in results if not r["passed"]]
    out = {"passed": not failed, "failed": failed, "results": results}
    Path(path).write_text(json.dumps(out, indent=1) + "\n")
