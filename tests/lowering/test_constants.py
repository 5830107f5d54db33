"""What follows from parameters alone is made once, and again when a parameter changes."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import rtc
from rtc.constants import split
from rtc.model import PRESETS, build, example_inputs
from rtc.runtime.constants import WithConstants

aten = torch.ops.aten


def traced(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args)


def step(x, w, gate):
    scale = 1 + gate.unbind(0)[1]
    wave = torch.mm(torch.arange(4, dtype=torch.float32)[None], w)
    return (x * scale + wave + gate.unbind(0)[0],)


def args():
    return torch.randn(3, 4), torch.randn(4, 4), torch.randn(2, 4)


def test_main_takes_what_was_made():
    given = args()
    parts = split(traced(step, *given), [1, 2])
    assert parts is not None
    assert parts.where == [1, 2]
    assert len(parts.fakes) == 2  # the sum and the product; the views stay where they are read
    made = parts.constants(*given[1:])
    torch.testing.assert_close(parts.main(*given, *made), step(*given))


def test_nothing_to_split_off():
    assert split(traced(lambda x, w: (x @ w,), *args()[:2]), [1]) is None


def test_made_again_only_if_a_parameter_changed():
    given = list(args())
    parts = split(traced(step, *given), [1, 2])
    run = WithConstants(lambda a: parts.main(*a), lambda a: parts.constants(*a), parts.where)
    for _ in range(3):
        torch.testing.assert_close(run(list(given)), step(*given))
    assert run.made == 1
    where = [t.data_ptr() for t in run.held]
    given[1].mul_(2)  # in place
    torch.testing.assert_close(run(list(given)), step(*given))
    given[2] = given[2].clone() + 1  # another tensor
    torch.testing.assert_close(run(list(given)), step(*given))
    assert run.made == 3
    assert where == [t.data_ptr() for t in run.held]


def test_interrupted_while_they_are_made():
    """Two sessions take turns: what was made half for one is not taken for the other's."""
    stop = []

    def make(given):
        yield given[0] * 2
        if stop:
            stop.clear()
            raise KeyboardInterrupt
        yield given[0] * 3

    run = WithConstants(lambda a: list(a[1:]), lambda a: Lazily(make(a)), [0])
    a, b = torch.ones(2), torch.full((2,), 5.0)
    run([a])
    stop.append(True)
    with pytest.raises(KeyboardInterrupt):
        run([b])
    assert [x.tolist() for x in run([a])] == [[2.0, 2.0], [3.0, 3.0]]


class Lazily(list):  # type: ignore[type-arg]
    """Made while they are copied, one after the other."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def __iter__(self):
        return self.made


def test_what_is_vouched_for_is_not_looked_at_the_rest_is():
    """A replay runs nothing that would look again: two sessions have scales of their own."""
    given = list(args())
    parts = split(traced(step, *given), [1, 2])
    run = WithConstants(lambda a: parts.main(*a), lambda a: parts.constants(*a), parts.where)
    one, two = object(), object()

    def made(mark, *more):
        run.refresh(given[:2], more, [mark])
        for have, want in zip(run.held, parts.constants(given[1], *more), strict=True):
            torch.testing.assert_close(have, want)
        return run.made

    scale = given[2] * 3
    assert [made(one, given[2]), made(one, given[2]), made(two, scale), made(two, scale)] == [
        1, 1, 2, 2
    ]  # fmt: skip
    assert made(one, given[2]) == 3
    given[1].mul_(2)
    assert made(one, given[2]) == 4
    run(list(given))
    assert made(one, given[2]) == 4


def test_inference_tensors_are_read_in_every_call():
    with torch.inference_mode():
        given = list(args())
    with torch.no_grad():
        parts = split(traced(step, *args()), [1, 2])
        run = WithConstants(lambda a: parts.main(*a), lambda a: parts.constants(*a), parts.where)
        run(list(given))
        with torch.inference_mode():
            given[1].mul_(2)
        torch.testing.assert_close(run(list(given)), step(*given))


@pytest.mark.parametrize("step_graph", ["off", "simulate"])
def test_a_model_whose_weights_change_in_mid_session(step_graph):
    cfg = PRESETS["tiny"]
    eager, model = (build(cfg, dtype=torch.float64, seed=0) for _ in range(2))
    options = rtc.Options(lowering="eager", regions="on", step_graph=step_graph)
    compiled = rtc.compile(model, options=options)
    for s in range(12):
        if s == 6:
            for m in (eager, model):
                m.blocks[1].modulation.mul_(1.5)
                m.time_in.weight.data = m.time_in.weight.data * 0.5
        x = example_inputs(cfg, s, seed=1, dtype=torch.float64)
        torch.testing.assert_close(compiled(*x), eager(*x), rtol=0, atol=1e-10)
    assert compiled.report().to_dict()["graphs"][0]["regions"]["constants"] > 4
