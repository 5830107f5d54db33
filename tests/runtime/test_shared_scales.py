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


class Normed(Model):
    """Keys are normed when read: the largest of them goes with the norm's weight."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)

    def rope(self, x, positions):
        return self.norm(x)


def far(got, want):
    return float((got - want).abs().max() / want.abs().max())


def test_scales_go_with_the_weights_behind_the_cache():
    model = Normed()
    eager = copy.deepcopy(model)
    options = rtc.Options(quantize="calibrated", lowering="eager", warn=False)
    compiled = rtc.compile(model, options=options)
    with torch.no_grad():
        for step in range(16):
            if step in (6, 11):  # LoRA comes, and goes
                for m in (model, eager):
                    m.norm.weight.mul_(8 if step == 6 else 1 / 8)
            x = torch.randn(1, N, 32)
            assert far(compiled(x, step), eager(x, step)) < 0.1, step
    assert compiled.report().to_dict()["runtime"]["saturated_values"] == 0


def test_two_models_with_other_weights_over_one_cache():
    """Dynamo has the same names for the weights of both."""
    first, second = Normed(), Normed()
    with torch.no_grad():
        second.norm.weight.mul_(8)
    second.k, second.v = first.k, first.v
    eager = copy.deepcopy([first, second])
    options = rtc.Options(quantize="calibrated", lowering="eager", warn=False)
    both = [rtc.compile(m, options=options) for m in (first, second)]
    with torch.no_grad():
        for step in range(12):
            x = torch.randn(1, N, 32)
            assert far(both[step % 2](x, step), eager[step % 2](x, step)) < 0.1, step
