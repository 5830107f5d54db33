"""What a CI needs to hold a compiled autoregressive model against eager.

`check_chain` runs two models side by side over many steps and compares outputs and cache contents;
`check_compile` does so for one factory; `assert_pass_counts` notices a pass that stopped matching.
The names are imported on first use, because pytest loads `rtc.testing.plugin` in every run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chain import check_chain, check_compile
    from .counts import assert_pass_counts, assert_refused, pass_counts
    from .result import ChainError, ChainResult, Divergence, StepErrors

_HOME = {
    "check_chain": "chain",
    "check_compile": "chain",
    "assert_pass_counts": "counts",
    "assert_refused": "counts",
    "pass_counts": "counts",
    "ChainError": "result",
    "ChainResult": "result",
    "Divergence": "result",
    "StepErrors": "result",
}

__all__ = [
    "ChainError",
    "ChainResult",
    "Divergence",
    "StepErrors",
    "assert_pass_counts",
    "assert_refused",
    "check_chain",
    "check_compile",
    "pass_counts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
