"""Let `rtc.passes`, `rtc.model`, `rtc.kernels` and `rtc.graphs` resolve in a source checkout.

The four folders install inside `rtc`, but in a checkout they lie beside it. A Python started in the
repository root imports ./rtc before anything that is installed, whatever is installed; from there
the four must come from the same checkout: not from nowhere (no install, or a wheel), and not from
another checkout (an editable install of it). Appending the root to `rtc.__path__` would do that
too, but would also make `rtc.tests`, and `rtc.rtc` as a second copy of `rtc`.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

FOLDERS = ("passes", "model", "kernels", "graphs")


class CheckoutFinder(MetaPathFinder):
    """Finds exactly the names `rtc.<folder>`; their submodules follow from their own `__path__`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        package, _, folder = fullname.partition(".")
        if package != "rtc" or folder not in FOLDERS:
            return None
        return PathFinder.find_spec(fullname, [str(self.root)])


def use_checkout() -> None:
    """Add the finder if this `rtc` lies in a checkout; do nothing if it is installed."""
    package = Path(__file__).resolve().parent
    root = package.parent
    if any((package / folder).exists() for folder in FOLDERS):
        return
    if not all((root / folder / "__init__.py").is_file() for folder in FOLDERS):
        return
    if not any(isinstance(finder, CheckoutFinder) for finder in sys.meta_path):
        # First, so that it wins over the finder of an editable install of another checkout.
        sys.meta_path.insert(0, CheckoutFinder(root))
