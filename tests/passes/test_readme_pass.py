"""The pass of passes/README.md, taken from the page as it stands, works as the page says."""

import re
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import rtc
from rtc.passes import pipeline
from rtc.testing import assert_pass_counts, check_compile

README = Path(__file__).parents[2] / "passes" / "README.md"


class Ones(nn.Module):
    """A cached mean, with multiplications by one in it."""

    def __init__(self) -> None:
        super().__init__()
        self.k: torch.Tensor
        self.register_buffer("k", torch.zeros(1, 9, 2, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.k.copy_(torch.cat([self.k[:, 3:], x * 1.0], 1))
        q, k = x.transpose(1, 2), self.k.transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q * 1, k, k) * (1.0 + step)


def inputs(step: int):
    return (torch.randn(1, 3, 2, 4, dtype=torch.float64), step), {}


@pytest.fixture
def documented(monkeypatch):
    found = re.search(r"```python\n(\"\"\"Remove.*?)```", README.read_text(), re.S)
    assert found is not None
    code = found.group(1)
    module = types.ModuleType("drop_multiply_by_one")
    exec(compile(code, str(README), "exec"), module.__dict__)
    monkeypatch.setattr(pipeline, "PIPELINE", (*pipeline.PIPELINE, module.PASS))
    return code


def test_it_is_short(documented):
    assert len(documented.splitlines()) < 100


def test_it_applies_and_is_counted(documented):
    result = check_compile(Ones, inputs, steps=20, options=rtc.Options(lowering="eager"))
    assert_pass_counts(result.report, {"drop_multiply_by_one": 2, "ring_cache": 1})


def test_its_switch(documented):
    options = rtc.Options(lowering="eager", passes={"drop_multiply_by_one": False})
    result = check_compile(Ones, inputs, steps=20, options=options)
    assert_pass_counts(result.report, {"drop_multiply_by_one": 0})


def test_unknown_switch():
    with pytest.raises(rtc.OptionsError, match="no pass is called nope"):
        rtc.Options(passes={"nope": True})
