"""A model that torchao quantized: its own spelling of row quantizers and products, fused.

Its scales have no floor and are rounded to bfloat16, which the kernels leave out: outputs differ
from eager's by single FP8 roundings, 2^-4 of one of 64 values each.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc
from rtc.testing import assert_pass_counts

pytestmark = pytest.mark.third_party
BOUND = 4e-3
COUNTS = {"fuse_swiglu_quantize": 1, "fuse_modulate_quantize": 3, "fp8_linear": 5, "ring_cache": 2}


class Block(nn.Module):
    """Adaptive layer norm, attention over a window, SwiGLU of two linears."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)
        self.gate, self.up = (nn.Linear(64, 128, bias=False) for _ in range(2))
        self.down = nn.Linear(128, 64, bias=False)
        self.table = nn.Parameter(torch.randn(6, 64) / 10)
        self.register_buffer("k", torch.randn(1, 48, 4, 16))
        self.register_buffer("v", torch.randn(1, 48, 4, 16))

    def forward(self, x, step):
        shift, scale, gate, shift2, scale2, gate2 = self.table.unbind(0)
        y = F.layer_norm(x, (64,)) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, 4, 16)).unbind(2)
        for cache, new in ((self.k, k), (self.v, v)):
            cache.copy_(torch.cat([cache[:, 16:], new], 1))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, self.k, self.v)))
        x = x + gate * self.o(y.transpose(1, 2).flatten(2))
        y = F.layer_norm(x, (64,)) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.silu(self.gate(y)) * self.up(y))


def quantized(monkeypatch):
    """The block with float8 rows; torchao asks for a GPU, its arithmetic does not."""
    pytest.importorskip("torchao")
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        PerRow,
        quant_api,
        quantize_,
    )

    if not hasattr(quant_api, "_check_hardware_support"):
        pytest.skip("another torchao: it cannot be told to quantize on this machine")
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda *args, **kwargs: None)
    model = Block().bfloat16().eval().requires_grad_(False)
    quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    return model


def test_rows_and_products_of_torchao(monkeypatch):
    torch._dynamo.reset()
    eager = quantized(monkeypatch)
    compiled = rtc.compile(
        copy.deepcopy(eager), options=rtc.Options(lowering="eager", kernels="on", warn=False)
    )
    with torch.no_grad():
        for step in range(8):
            x = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
            want, have = eager(x, step), compiled(x, step)
            assert 0 < (have - want).float().norm() < BOUND * want.float().norm(), step
    assert_pass_counts(compiled.report(), COUNTS)
