"""FP8 linears against a dequantized float64 reference, alone and in the model."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rtc.model import PRESETS, Float8Linear, build, example_inputs, example_prompt
from rtc.model import build as build_function
from rtc.model.linear import FP8, quantize_rows

FP8_TINY = PRESETS["tiny-fp8"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# Relative error of a result that is rounded to the dtype once, after a float32 sum of 48 products.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 4e-3}


def filled(inputs=48, outputs=32, seed=0):
    """A layer, and the wide weight that it was given, whose rows differ in size by 10^4."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(outputs, inputs, generator=generator)
    wide *= torch.logspace(-2, 2, outputs)[:, None]
    layer = Float8Linear(inputs, outputs)
    layer.set_rows(0, wide[:20])
    layer.set_rows(20, wide[20:])
    return layer, wide


def dequantized(x):
    """x [M, K] rounded to FP8 row by row, as the layer does it; in float64."""
    x8, scale = quantize_rows(x)
    return x8.double() * scale.double()


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (2, 5), (3,), (2, 1, 4)])
def test_forward_is_the_product_of_the_dequantized_operands(dtype, shape):
    layer, wide = filled()
    x = torch.randn(*shape, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = layer(x)
    assert y.shape == (*shape, 32)
    assert y.dtype == dtype
    exact = dequantized(x.flatten(0, -2)) @ dequantized(wide).T
    assert relative(y.flatten(0, -2), exact) < ROUNDING[dtype]


def test_the_layer_is_near_the_wide_product():
    layer, wide = filled()
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(2))
    y, wanted = layer(x), x.double() @ wide.double().T
    for row in range(32):  # every row has a scale of its own, so the smallest are near too
        assert 1e-4 < relative(y[:, row], wanted[:, row]) < 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_has_its_own_scale(dtype):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    x = x * torch.tensor([1.0, 1e-4, 0.0, 1e4], dtype=dtype)[:, None]
    x8, scale = quantize_rows(x)
    assert x8.dtype == FP8
    assert scale.dtype == torch.promote_types(dtype, torch.float32)
    assert x8.float().abs().amax(-1).tolist() == [448, 448, 0, 448]
    back, amax = x8.double() * scale.double(), x.double().abs().amax(-1, keepdim=True)
    # e4m3 keeps 3 mantissa bits (half a step: 1 / 16), and steps of 2^-9 below 2^-6 of 448.
    assert ((back - x.double()).abs() <= x.double().abs() / 16 + amax / 448 * 2**-9).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 37, 757])
def test_bfloat16_on_a_gpu_is_the_same_product(rows):
    """`use_fast_accum` keeps about 14 bits of a sum."""
    layer, wide = filled(inputs=512, outputs=384)
    x = torch.randn(1, rows, 512, generator=torch.Generator().manual_seed(4)).bfloat16()
    y = layer.cuda()(x.cuda()).cpu()
    exact = dequantized(x[0]) @ dequantized(wide).T
    assert y.shape == (1, rows, 384)
    for column in range(0, 384, 29):  # output rows differ in size by 10^4
        assert relative(y[0, :, column], exact[:, column]) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_build_and_step_on_a_gpu(dtype):
    model = build(FP8_TINY, device="cuda", dtype=dtype)
    wide = build(FP8_TINY, dtype=torch.float64)
    wide.load_state_dict({name: p.cpu() for name, p in model.state_dict().items()})
    for step in range(4):
        noise, cond, _ = example_inputs(FP8_TINY, step, dtype=dtype)
        y = model(noise.cuda(), cond.cuda(), step).cpu()
        assert relative(y, wide(noise.double(), cond.double(), step)) < 0.15


def test_casting_the_model_leaves_fp8_weights_alone():
    layer, _ = filled()
    before = layer.weight.clone(), layer.weight_scale.clone()
    for dtype in (torch.bfloat16, torch.float64):
        layer.to(dtype)
        assert layer.weight.dtype == FP8
        assert torch.equal(layer.weight.float(), before[0].float())
        assert torch.equal(layer.weight_scale, before[1])
    layer.to("meta")
    assert layer.weight.device.type == layer.weight_scale.device.type == "meta"


@pytest.mark.parametrize("dtype", DTYPES)
def test_build_is_deterministic_and_quantizes_the_draw_of_nn_linear(dtype):
    one, two = (build(FP8_TINY, dtype=dtype) for _ in range(2))
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(a.double(), b.double()), name
    assert not torch.equal(
        one.blocks[0].linear1.weight.double(),
        build(FP8_TINY, dtype=dtype, seed=1).blocks[0].linear1.weight.double(),
    )
    assert sum(p.nbytes for p in one.parameters()) == FP8_TINY.weight_bytes(dtype.itemsize)
    if dtype == torch.float32:  # drawn in one part: the very numbers of "tiny"
        for a, b in zip(one.blocks, build("tiny").blocks, strict=True):
            for linear in ("linear1", "linear2"):
                x8, scale = quantize_rows(getattr(b, linear).weight)
                assert torch.equal(getattr(a, linear).weight.float(), x8.float())
                assert torch.equal(getattr(a, linear).weight_scale[0], scale[:, 0])


def test_weights_drawn_in_parts_are_complete(monkeypatch):
    monkeypatch.setitem(build_function.__globals__, "_DRAWN", 5 * FP8_TINY.dim)
    for block in build(FP8_TINY).blocks:
        for linear in (block.linear1, block.linear2):
            rows = linear.weight.float() * linear.weight_scale.T
            spread = rows.std(-1) * linear.weight.shape[1] ** 0.5  # of a row; 1 on average
            assert ((spread > 0.5) & (spread < 1.5)).all()
            assert len(rows.unique(dim=0)) == len(rows)


class Reference(torch.nn.Module):
    """A Float8Linear written out in float64: both operands rounded to FP8, then widened."""

    def __init__(self, layer):
        super().__init__()
        self.weight = layer.weight.double() * layer.weight_scale.double().T

    def forward(self, x):
        return F.linear(dequantized(x.flatten(0, -2)).unflatten(0, x.shape[:-1]), self.weight)


def test_model_in_float64_against_the_dequantized_reference():
    cfg, dtype = FP8_TINY, torch.float64
    model, reference = build(cfg, dtype=dtype), build(cfg, dtype=dtype)
    for block in reference.blocks:
        block.linear1, block.linear2 = Reference(block.linear1), Reference(block.linear2)
    prompt = example_prompt(cfg, 3, dtype=dtype)
    model.first_pass(prompt)
    reference.first_pass(prompt)
    for step in range(2 * cfg.reset_period):
        args = example_inputs(cfg, step, dtype=dtype)
        torch.testing.assert_close(model(*args), reference(*args), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_models_run_and_stay_near_float64(dtype):
    """Same weights in float64. A rounding to FP8 may fall the other way: 1/16 of a value."""
    cfg = FP8_TINY
    model, wide = build(cfg, dtype=dtype), build(cfg, dtype=torch.float64)
    wide.load_state_dict(model.state_dict())
    prompt = example_prompt(cfg, 3, dtype=dtype)
    model.first_pass(prompt)
    wide.first_pass(prompt.double())
    for step in range(8):
        noise, cond, _ = example_inputs(cfg, step, dtype=dtype)
        y = model(noise, cond, step)
        assert y.dtype == dtype
        assert relative(y, wide(noise.double(), cond.double(), step)) < 0.15


def test_fp8_linears_are_near_and_not_the_same():
    raw = replace(FP8_TINY, fp8_linears=False)
    a, b = build(raw), build(FP8_TINY)
    for step in range(4):
        args = example_inputs(raw, step)
        assert 1e-3 < relative(b(*args), a(*args).double()) < 0.3


def test_sizes_that_a_gpu_cannot_multiply_are_refused():
    with pytest.raises(
        ValueError, match=r"dim and hidden to be multiples of 16, got dim=32, .*=72"
    ):
        replace(FP8_TINY, hidden=72)
