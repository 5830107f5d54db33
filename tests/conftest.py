"""Settings of every test: no network, few threads, fixed seeds, no code compiled earlier."""

import os
import random
import shutil
import sys
import tempfile

# Set before torch and huggingface_hub are imported: both read the environment at import time.
# Anything a test needs from a hub it must make itself.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")

# Before anything imports the standard library's distutils: Inductor imports setuptools later, which
# refuses to take distutils over once it is loaded.
import setuptools  # noqa: F401  isort: skip

import numpy as np
import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_configure(config: pytest.Config) -> None:
    """Give Inductor an empty cache for this run, unless the user chose a folder.

    Its default is one folder per user, where a graph compiled before an edit can hide the edit.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="rtc-tests-inductor-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        config.add_cleanup(lambda: _remove_cache(folder))


def _remove_cache(folder: str) -> None:
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA GPU")
    no_compiler = pytest.mark.skip(reason="needs a C++ compiler")
    have_gpu = torch.cuda.is_available()
    have_compiler = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
    for item in items:
        if not have_gpu and item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
        if not have_compiler and item.get_closest_marker("cpp"):
            item.add_marker(no_compiler)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Forget compiled code after each test.

    Dynamo recompiles one function at most eight times in a process and then runs it eagerly. The
    tests share a few small models, so without this the ninth test of a model would test nothing.
    """
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
