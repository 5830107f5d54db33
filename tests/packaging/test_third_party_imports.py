"""The repository root on sys.path must not disturb other packages.

transformers imports a package named `kernels` if it finds one, and in a Python started in the
repository root it finds ours.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

IMPORT_THEM = """
import diffusers, transformers
from diffusers import WanTransformer3DModel
from transformers import LlamaForCausalLM
from transformers.utils import is_kernels_available
import importlib.metadata
if is_kernels_available():
    importlib.metadata.version("kernels")  # the real one: ours has no such metadata
"""

# All our modules that import on this machine, so that all operators are registered.
IMPORT_OURS = """
import importlib, pkgutil
import rtc, rtc.passes, rtc.model, rtc.graphs, rtc.kernels
for module in pkgutil.walk_packages(rtc.kernels.__path__, "rtc.kernels."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # triton and CUDA libraries
        assert not error.name.startswith("rtc"), error
"""


def run_in_root(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.third_party
@pytest.mark.parametrize(
    "code",
    [IMPORT_THEM, IMPORT_OURS + IMPORT_THEM, IMPORT_THEM + IMPORT_OURS],
    ids=["alone", "after_rtc", "before_rtc"],
)
def test_diffusers_and_transformers_import_in_the_repository_root(code: str) -> None:
    for package in ("diffusers", "transformers"):
        pytest.importorskip(package)
    run_in_root(code)


def test_the_folder_kernels_has_no_side_effects_as_a_top_level_package() -> None:
    run_in_root("""
import sys
import kernels
loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", "rtc", "triton"}
assert not loaded, f"kernels/__init__.py imports {sorted(loaded)}"
""")
