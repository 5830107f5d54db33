"""A few forms with generated code: rounding and fusion differ, slots and positions may not."""

import pytest
import torch

import rtc

from .forms import FORMS
from .registry import run, symbolic

pytestmark = pytest.mark.cpp

BY_NAME = {form.name: form for form in FORMS}
NAMES = [
    "rope_interleaved",
    "rope_complex128_three_axes",
    "layout_2bhsd",
    "write_slice_clone",
    "write_narrow_ring",
    "passes_in_one_call",
    "position_slow_base_sink",
    "position_reset_sink",
    "attention_zero_padded",
    "home_list_of_dicts",
]


@pytest.mark.parametrize("name", NAMES)
def test_matches_eager(name):
    run(BY_NAME[name], lambda model: rtc.compile(model, options=rtc.Options()))


def test_as_a_backend_of_torch_compile():
    form = BY_NAME["rope_half"]
    with symbolic(form):
        run(form, lambda model: torch.compile(model, backend="rtc"))
