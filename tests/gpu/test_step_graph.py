"""Steps replayed from a CUDA graph: captured in the third call, right whatever the user does."""

import pytest
import torch

import rtc
from rtc.model import PRESETS, build, example_inputs

pytestmark = pytest.mark.gpu

TINY = PRESETS["tiny"]


def pair(**options):
    models = [build(TINY, device="cuda", dtype=torch.float64, seed=0) for _ in range(2)]
    return models[0], models[1], rtc.compile(models[1], options=rtc.Options(**options))


def inputs(step):
    return example_inputs(TINY, step, seed=1, device="cuda", dtype=torch.float64)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_one_graph_serves_every_step(lowering):
    eager, _, compiled = pair(lowering=lowering)
    for step in range(90):
        close(compiled(*inputs(step)), eager(*inputs(step)))
    assert compiled.report().to_dict()["runtime"]["replays"] == 88


def test_earlier_outputs_stay():
    _, _, compiled = pair(lowering="eager")
    kept = [compiled(*inputs(step)) for step in range(8)]
    copies = [k.clone() for k in kept]
    compiled(*inputs(8))
    for a, b in zip(kept, copies, strict=True):
        assert torch.equal(a, b)


def test_writes_swaps_and_looks_in_between():
    eager, model, compiled = pair(lowering="eager")
    for step in range(40):
        close(compiled(*inputs(step)), eager(*inputs(step)))
        names = [n for n, _ in model.named_buffers()]
        if step == 10:
            for m in (eager, model):
                m.get_buffer(names[0]).mul_(0.5)
        if step == 20:
            for m in (eager, model):
                owner, _, name = names[-1].rpartition(".")
                setattr(m.get_submodule(owner), name, m.get_buffer(names[-1]).clone() + 0.1)
        if step % 15 == 14:
            for n in names:
                close(model.get_buffer(n).clone(), eager.get_buffer(n))


def test_a_steady_step_does_not_wait_for_the_device():
    _, _, compiled = pair(lowering="eager")
    for step in range(4):
        compiled(*inputs(step))
    args = [inputs(step) for step in range(4, 60)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for a in args:
            compiled(*a)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_switched_off():
    _, _, compiled = pair(lowering="eager", step_graph="off")
    for step in range(5):
        compiled(*inputs(step))
    assert compiled.report().to_dict()["runtime"]["replays"] == 0


class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = build(TINY, device="cuda", dtype=torch.float64, seed=0)

    def forward(self, x, *rest):
        _unused = torch.randn_like(x)
        y = self.model(x + 0.1 * torch.randn_like(x), *rest)
        return y * torch.rand_like(y)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_random_draws_are_eagers(lowering):
    """Replayed steps go on in the generator's stream, and unused draws count."""
    compiled = rtc.compile(Noisy(), options=rtc.Options(lowering=lowering))
    found = []
    for m in (Noisy(), compiled):
        torch.manual_seed(7)
        found.append([m(*inputs(step)).clone() for step in range(20)])
        found[-1].append(torch.rand(3, device="cuda"))
    for a, b in zip(*found, strict=True):
        close(a.detach(), b)
    assert compiled.report().to_dict()["runtime"]["replays"] > 10
