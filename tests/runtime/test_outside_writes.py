"""Somebody else writes a cache between two calls: the next call works with what was written."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
from contextlib import nullcontext

import pytest
import torch

import rtc

from .models import EAGER, SHAPE, Window, chain, close, pair, same_caches, x

SEVEN = torch.randn(1, 2, 7, 8, generator=torch.Generator().manual_seed(7)).double()
ALL = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(8)).double()


def new_session(model):
    model.k.zero_()
    model.v.zero_()


def one_of_two(model):
    model.k.zero_()


def a_part(model):
    model.k[:, :, 3:10] = SEVEN


def a_row_copied_along(model):
    model.v[:, :, 0].copy_(model.v[:, :, -1])


def foreach(model):
    torch._foreach_mul_([model.k, model.v], 0.5)


def out_argument(model):
    torch.add(model.k.clone(), 1.0, out=model.k)


def load_state_dict(model):
    state = {name: t.clone() for name, t in model.state_dict().items()}
    model.load_state_dict({**state, "k": ALL, "v": ALL * 2})


def one_swapped(model):
    model.k = ALL.clone()


def both_swapped(model):
    model.k, model.v = ALL.clone(), ALL * 0.5


def data(model):
    model.k.data.mul_(0.5)


def data_assigned(model):
    model.k.data = ALL.clone()


def detached(model):
    model.k.detach().mul_(0.5)


def numpy_array(model):
    model.k.numpy()[:] *= 0.5


def storage(model):
    other = torch.empty(0, dtype=torch.float64).set_(model.k.untyped_storage())
    other.view(SHAPE).mul_(0.5)


def dlpack(model):
    torch.from_dlpack(model.k).mul_(0.5)


def in_inference_mode(model):
    with torch.inference_mode():
        model.k.zero_()


def to_float_and_back(model):
    model.to(torch.float32).to(torch.float64)


def initialised(model):
    torch.nn.init.ones_(model.k)


def called_eagerly(model):
    model(x(50), 50)


def compiled_by_torch(model):
    torch.compile(lambda t: t.mul_(0.5), backend="eager")(model.k)


def constants(model):
    model.freq.mul_(1.1)
    model.qkv.weight.data.mul_(0.9)


def constants_swapped(model):
    model.freq = model.freq * 1.1


WRITES = [
    new_session, one_of_two, a_part, a_row_copied_along, foreach, out_argument, load_state_dict,
    one_swapped, both_swapped, data, data_assigned, detached, numpy_array, storage, dlpack,
    in_inference_mode, to_float_and_back, initialised, called_eagerly,
    compiled_by_torch, constants, constants_swapped,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__)
def test_is_noticed(write):
    """In ring order, right after rtc put the slots in order, and twice in a row."""
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    write(eager), write(model)
    chain(eager, compiled, range(7, 10))
    compiled.materialize()
    write(eager), write(model)
    chain(eager, compiled, range(10, 15))
    same_caches(eager, model)


HOLDS = {
    "a view": lambda t: t[:, :, 2:9],
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "numpy": lambda t: t.numpy(),
    "dlpack": lambda t: torch.from_dlpack(t),
}


@pytest.mark.parametrize("early", [True, False], ids=["held before", "held between"])
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference tensors"])
@pytest.mark.parametrize("hold", HOLDS)
def test_through_an_alias_that_is_held(hold, inference, early):
    if inference and hold in ("dlpack",):
        pytest.skip("an inference tensor cannot be exported")
    with torch.inference_mode() if inference else nullcontext():
        eager, model, compiled = pair()
        if inference:
            for m in (eager, model):
                m.k, m.v = m.k.clone(), m.v.clone()
        if early:
            held = [HOLDS[hold](m.k) for m in (eager, model)]
        chain(eager, compiled, range(7))
        if not early:
            held = [HOLDS[hold](m.k) for m in (eager, model)]
            chain(eager, compiled, range(7, 9))
        for alias in held:
            alias[:] *= 0.5
        chain(eager, compiled, range(9, 12))
        for alias in held:
            alias[:] *= 0.5
        same_caches(eager, model)
        chain(eager, compiled, range(12, 20))
        same_caches(eager, model)


@pytest.mark.parametrize("write", [new_session, a_part, both_swapped], ids=lambda w: w.__name__)
@pytest.mark.parametrize("options", [{"write_back": True}, {"ring_cache": False}], ids=str)
def test_on_inference_tensors(write, options):
    """They have no version counter."""
    with torch.inference_mode():
        eager, model, compiled = pair(options=rtc.Options(lowering="eager", warn=False, **options))
        for m in (eager, model):
            m.k, m.v = m.k.clone(), m.v.clone()
        chain(eager, compiled, range(7))
        write(eager), write(model)
        chain(eager, compiled, range(7, 14))
        same_caches(eager, model)


def test_another_storage_under_a_ring_is_not_ignored():
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    model.k.set_(ALL.clone())
    try:
        model.k.clone()
        chain(eager, compiled, [7])
    except (rtc.StateError, AssertionError):
        return  # refused, or taken: the caches of the two models differ now
    pytest.fail("the new storage was ignored")


def test_invalidate_says_so_where_nobody_could_see():
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    compiled.invalidate()
    for m in (eager, model):
        m.k.data.zero_()
    compiled.invalidate()
    chain(eager, compiled, range(7, 14))
    same_caches(eager, model)


def test_a_table_that_takes_the_place_of_another_in_memory():
    """A freed constant's id, and its version, may come back."""
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    values = [0.9, 0.4, 0.2, 0.1]
    for first in range(7, 70, 7):
        old = id(model.freq)
        model.freq = None
        made = [torch.tensor(values, dtype=torch.float64) for _ in range(200)]
        made.sort(key=lambda t: id(t) != old)
        model.freq, values = made[0], [0.7 * v + 0.1 for v in values]
        eager.freq = made[0].clone()
        del made
        chain(eager, compiled, range(first, first + 7))


def test_a_table_without_a_version_counter():
    with torch.inference_mode():
        eager, model, compiled = pair()
        for m in (eager, model):
            m.freq = m.freq.clone()
        chain(eager, compiled, range(7))
        for m in (eager, model):
            m.freq.mul_(1.3)
        compiled.invalidate()  # this much may be asked of the user
        chain(eager, compiled, range(7, 14))


def test_an_attribute_set_on_the_compiled_model_is_the_model_s():
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    for m in (eager, compiled):
        m.k, m.v = ALL.clone(), ALL.clone()
    assert compiled.k is model.k
    chain(eager, compiled, range(7, 14))
    same_caches(eager, model)


@pytest.mark.parametrize("second", [EAGER, rtc.Options(lowering="eager", ring_cache=False)])
def test_two_compiled_models_share_the_caches(second):
    """They take turns in any order; the caches can be looked at after each."""
    eager, model, first = pair()
    other = rtc.compile(model, options=second)
    for step, run in enumerate([first, other, first, first, other, other, first, other] * 2):
        chain(eager, run, [step])
        if step % 3 == 0:
            same_caches(eager, model)
    first.close()
    same_caches(eager, model)
    chain(eager, other, range(16, 24))
    same_caches(eager, model)


def test_a_copy_of_the_model_goes_its_own_way():
    eager, model, compiled = pair()
    chain(eager, compiled, range(7))
    eager2, model2 = copy.deepcopy(eager), copy.deepcopy(model)
    compiled2 = rtc.compile(model2, options=EAGER)
    for step in range(7, 20):
        chain(eager, compiled, [step])
        close(eager2(x(-step), step), compiled2(x(-step), step))
    same_caches(eager, model)
    same_caches(eager2, model2)


def test_a_copy_of_the_compiled_model_goes_its_own_way():
    eager, model, compiled = pair(Window)
    chain(eager, compiled, range(7))
    eager2, compiled2 = copy.deepcopy(eager), copy.deepcopy(compiled)
    for step in range(7, 20):
        chain(eager, compiled, [step])
        close(eager2(x(-step), step), compiled2(x(-step), step))
    same_caches(eager, model)
    same_caches(eager2, compiled2)
