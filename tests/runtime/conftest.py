"""Fixtures that the runtime's tests share."""

import gc

import pytest
import torch

from rtc.runtime.graph import GraphRuntime


@pytest.fixture
def graph_runtimes(monkeypatch):
    """All runtimes that are made during the test."""
    made, init = [], GraphRuntime.__init__

    def remember(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(GraphRuntime, "__init__", remember)
    return made


@pytest.fixture
def fresh():
    """Nothing that other tests have compiled."""
    torch._dynamo.reset()
    gc.collect()
    yield
    torch._dynamo.reset()
