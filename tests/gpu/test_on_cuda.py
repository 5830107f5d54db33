"""The reference model on a CUDA device: the same exactness as on the CPU, host and device apart."""

import dataclasses

import pytest
import torch

import rtc
from rtc.model import PRESETS, build, example_inputs
from rtc.testing import check_compile

pytestmark = pytest.mark.gpu

TINY = PRESETS["tiny"]


def chain(cfg, options, *, steps, dtype=torch.float64, **checks):
    def make():
        return build(cfg, device="cuda", dtype=dtype, seed=0)

    def inputs(step):
        return example_inputs(cfg, step, seed=1, device="cuda", dtype=dtype), {}

    return check_compile(make, inputs, steps=steps, options=options, **checks)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_exact_over_position_resets(lowering):
    result = chain(TINY, rtc.Options(lowering=lowering), steps=100, every=33)
    assert result.passed


def test_quantized_with_calibrated_scales_stays_close():
    """FP8 with held scales against FP8 with scales from every call: FP8's own error, no drift."""
    cfg = dataclasses.replace(TINY, quantize_kv=True)
    options = rtc.Options(quantize="calibrated", lowering="eager")
    model = build(cfg, device="cuda", dtype=torch.float32, seed=0)
    plain = build(cfg, device="cuda", dtype=torch.float32, seed=0)
    compiled = rtc.compile(model, options=options)
    for step in range(60):
        args = example_inputs(cfg, step, seed=1, device="cuda", dtype=torch.float32)
        ours, theirs = compiled(*args), plain(*args)
        assert (ours - theirs).norm() <= 0.03 * theirs.norm(), step
    assert compiled.report().counts()["hoist_quantize"] == 8


def test_no_copy_to_the_host_in_a_steady_step():
    """Positions live on the host: a step may not wait for the device."""
    model = build(TINY, device="cuda", dtype=torch.float32, seed=0)
    compiled = rtc.compile(model, options=rtc.Options(lowering="eager"))
    inputs = [
        example_inputs(TINY, step, seed=1, device="cuda", dtype=torch.float32) for step in range(8)
    ]
    for args in inputs[:4]:
        compiled(*args)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for args in inputs[4:5]:
            compiled(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
