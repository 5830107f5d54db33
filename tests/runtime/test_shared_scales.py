"""Two graphs over one FP8 cache: each reads codes by the scale that made them, and clamps its
queries by their own sizes."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc

HEADS, WIDTH, SLOTS, N = 2, 16, 20, 4
FP8 = torch.float8_e4m3fn


pytestmark = pytest.mark.usefixtures("fresh")


class Model(nn.Module):
    """Roped when read, quantized by a scale a head; ``mode`` is a flag of the call."""

    tops = (448.0, 448.0)
    sizes = ((1.0,), (1.0,))  # of the queries of each attention, by mode

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.qkv, self.o = nn.Linear(32, 3 * HEADS * WIDTH), nn.Linear(HEADS * WIDTH, 32)
        self.register_buffer("k", torch.zeros(1, SLOTS, HEADS, WIDTH))
        self.register_buffer("v", torch.zeros(1, SLOTS, HEADS, WIDTH))

    def rope(self, x, positions):
        angle = positions.float()[:, None] * 0.5 ** torch.arange(WIDTH // 2)
        cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def codes(self, x, top):
        scale = (x.abs().amax((1, 3), keepdim=True) / top).clamp(min=1e-9)
        return (x / scale).clamp(-448, 448).to(FP8).float() * scale

    def forward(self, x, step, mode=0):
        q, k, v = self.qkv(x).view(1, N, 3, HEADS, WIDTH).unbind(2)
        self.k.copy_(torch.cat([self.k[:, N:], F.rms_norm(k, (WIDTH,))], 1))
        self.v.copy_(torch.cat([self.v[:, N:], v], 1))
        positions = torch.arange(SLOTS) + step
        top = self.tops[mode]
        keys = self.codes(self.rope(self.k, positions), top).transpose(1, 2)
        values = self.codes(self.v, top).transpose(1, 2)
        q = self.rope(F.rms_norm(q, (WIDTH,)), positions[-N:]).transpose(1, 2)
        y = sum(F.scaled_dot_product_attention(q * by, keys, values) for by in self.sizes[mode])
        return self.o(y.transpose(1, 2).flatten(2))


class OtherScale(Model):
    tops = (448.0, 112.0)


class OtherQueries(Model):
    sizes = ((0.02,), (1.2,))


class OtherOrder(Model):
    sizes = ((0.02, 1.2), (1.2, 0.02))


class OneMore(Model):
    sizes = ((0.5,), (0.5, 1.2))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", [Model, OtherScale, OtherQueries, OtherOrder, OneMore])
def test_a_graph_uses_scales_of_its_own(kind, first):
    model = kind()
    options = rtc.Options(
        lowering="eager", step_graph="simulate", quantize="calibrated", fp8_attention=True,
        warn=False,
    )  # fmt: skip
    compiled = rtc.compile(copy.deepcopy(model), options=options)
    torch.manual_seed(0)
    with torch.no_grad():
        for step in range(24):
            x, mode = torch.randn(1, N, 32), (step % 5 // 3 + first) % 2
            want = model(x, step, mode)
            assert (compiled(x, step, mode) - want).norm() < 0.1 * want.norm()
    assert compiled.report().to_dict()["runtime"]["plain_calls"] == 0
