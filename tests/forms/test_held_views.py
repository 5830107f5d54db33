"""Whoever looks at a cache between calls sees current values, or an error that says why not.

A user may hold more than the tensor itself: a view, an alias without history, an array on the same
memory. None of them passes through the tensor object that rtc can watch.
"""

import pytest
import torch

import rtc
from rtc.testing import check_compile

from .forms import FORMS
from .registry import Form

FORM: Form = next(form for form in FORMS if form.name == "write_slice_clone")

HOLDS = {
    "itself": lambda model: [model.cache_k, model.cache_v],
    "views": lambda model: [model.cache_k[:, -3:], model.cache_v[0]],
    "detach": lambda model: [model.cache_k.detach(), model.cache_v.detach()],
    "data": lambda model: [model.cache_k.data, model.cache_v.data],
    "numpy": lambda model: [torch.from_numpy(c.numpy()) for c in (model.cache_k, model.cache_v)],
    "state_dict": lambda model: [model.state_dict()[name] for name in ("cache_k", "cache_v")],
}


class Holder:
    """Takes hold of the caches at one look and then never asks the model again."""

    def __init__(self, hold, first_look: int) -> None:
        self.hold, self.first_look = hold, first_look
        self.looks: dict[int, int] = {}
        self.held: dict[int, list[torch.Tensor]] = {}

    def __call__(self, model) -> list[torch.Tensor]:
        look = self.looks[id(model)] = self.looks.get(id(model), -1) + 1
        if look == self.first_look:
            self.held[id(model)] = self.hold(model)
        return self.held.get(id(model), [])


@pytest.mark.parametrize("first_look", [0, 5], ids=["before the first call", "between calls"])
@pytest.mark.parametrize("hold", HOLDS)
def test_never_stale(hold, first_look):
    options = rtc.Options(lowering="eager", warn=False)
    try:
        result = check_compile(
            FORM.build,
            FORM.inputs,
            steps=20,
            options=options,
            caches=Holder(HOLDS[hold], first_look),
            every=1,
            materialize=False,
        )
    except rtc.StateError:
        return  # said so
    assert result.caches == 2


@pytest.mark.parametrize("name", ["shared_view_outside"])
def test_a_form_with_a_view_of_its_own(name):
    form = next(form for form in FORMS if form.name == name)
    try:
        check_compile(
            form.build,
            form.inputs,
            steps=20,
            options=rtc.Options(lowering="eager", warn=False),
            caches=lambda model: list(model.watched),
            every=1,
            materialize=False,
        )
    except rtc.StateError:
        return
