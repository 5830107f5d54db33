"""fuse_modulate_quantize: norms, modulations and residuals in several people's words.

Most tests trace a function to ATen, run the pass on that graph and compare its values with the
function's own. Rows are float32, so that only the order of roundings differs: scales within 1e-5,
dequantized values within one step of FP8 and at most one in 200 of them off at all, x_new within
1e-5. A scale, a shift or a gate that is lost or taken twice costs 1e-1 and more.

Legend: B batch, T tokens, C channels, K features of the linear in front.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
import itertools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc
from rtc.model import build, example_inputs
from rtc.passes import fuse_modulate_quantize as fuse
from rtc.passes.analysis import normed
from rtc.testing import assert_pass_counts

from .modulate_helpers import (
    EPS,
    F8,
    PLAIN,
    RESIDUAL,
    B,
    C,
    T,
    ada_layer_norm,
    aten,
    close,
    count,
    fused,
    given,
    quantize,
    traced,
)

# ---- norms, with modulation as they come ---------------------------------------------------------


def affine_layer_norm(p, h):
    return torch.addcmul(p.shift, F.layer_norm(h, (C,), p.weight, p.bias, EPS), p.scale + 1)


def affine_alone(p, h):
    return F.layer_norm(h, (C,), p.weight, p.bias, EPS)


def bare_layer_norm(p, h):
    return F.layer_norm(h, (C,), eps=EPS)


def scale_twice(p, h):
    n = F.layer_norm(h, (C,), eps=EPS)
    return n * p.scale + n + p.shift


def rms_norm(p, h):
    return F.rms_norm(h, (C,), p.weight, EPS) * (1 + p.scale)


def llama_norm(p, h):
    """Wide, then back, the weight last."""
    wide = h.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return p.weight * (wide * torch.rsqrt(variance + EPS)).to(h.dtype)


def rms_by_hand(p, h):
    n = h / torch.sqrt((h * h).sum(-1, keepdim=True) / C + EPS)
    return p.shift + n * (p.scale[None] + 1.0)


def layer_norm_by_hand(p, h):
    mu = h.mean(dim=-1, keepdim=True)
    centred = h - mu
    rstd = 1 / torch.sqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return rstd * centred * p.weight + p.bias


def var_mean_layer_norm(p, h):
    var, mean = torch.var_mean(h, dim=-1, correction=0, keepdim=True)
    n = (h - mean) * (var + EPS).rsqrt()
    return (n * p.weight + p.bias) * (1 + p.scale) + p.shift


def unbiased_false(p, h):
    n = (h - h.mean(-1, keepdim=True)) / (h.var(-1, unbiased=False, keepdim=True) + EPS).sqrt()
    return torch.addcmul(n, n, p.scale) - p.shift


def smoothed(p, h):
    """Two more factors than the op has vectors, one of them divided by, and a sign."""
    n = F.layer_norm(h, (C,), p.weight, p.bias, EPS) * (1 + p.scale) + p.shift
    return -((n / (p.weight.abs() + 0.5) + p.scale) * 0.5 + p.bias)


def chunked(p, h):
    """Modulation of a [1, 6, C] table in parts [1, 1, C]."""
    shift, scale, *_ = p.time.chunk(6, dim=1)
    return F.layer_norm(h, (C,), eps=EPS) * (1 + scale) + shift


def one_number(p, h):
    return 2.0 * F.layer_norm(h, (C,), eps=EPS) * p.scale[0] + 0.25


NORMS = [
    ada_layer_norm, affine_layer_norm, affine_alone, bare_layer_norm, scale_twice, rms_norm,
    llama_norm, rms_by_hand, layer_norm_by_hand, var_mean_layer_norm,
    unbiased_false, smoothed, chunked, one_number,
]  # fmt: skip


@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_norms(norm):
    gm, out = fused(lambda p: quantize(norm(p, p.x)))
    assert (out.matched, out.applied, out.refused) == (1, 1, [])
    assert count(gm, PLAIN, RESIDUAL, aten.native_layer_norm.default, aten.amax.default) == [
        1, 0, 0, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("eps", [EPS, None])
def test_the_fused_rms_norm(eps):
    """One op on a GPU, which the CPU's tracing takes apart: put in by hand."""

    def f(p):
        return aten.rms_norm(p.x, [C], p.weight, eps) * (1 + p.scale), p.bias

    def g(p):
        return quantize(F.layer_norm(p.x, (C,), p.weight) * (1 + p.scale))

    p = given()
    gm = traced(g, p)
    node = next(n for n in gm.graph.nodes if n.target is aten.native_layer_norm.default)
    node.target, node.args = aten._fused_rms_norm.default, (*node.args[:3], eps)
    out = fuse.run(types.SimpleNamespace(gm=gm))
    assert out.applied == 1
    assert count(gm, PLAIN, aten._fused_rms_norm.default) == [1, 0]
    gm.recompile()
    close(quantize(f(p)[0]), gm(*vars(p).values()))


@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_norms_behind_a_residual(norm):
    def f(p):
        h = p.x + p.gate * F.linear(p.z, p.w)
        return *quantize(norm(p, h)), h

    gm, out = fused(f)
    assert (out.matched, out.applied, out.refused) == (1, 1, [])
    assert count(gm, PLAIN, RESIDUAL) == [0, 1]
    assert out.notes == ["1 of 1 with the residual in front"]


# ---- residuals -----------------------------------------------------------------------------------


def delta_first(p):
    return F.linear(p.z, p.w) * p.gate + p.x


def with_addcmul(p):
    return torch.addcmul(p.x, p.gate, F.linear(p.z, p.w))


def with_addcmul_and_value(p):
    return torch.addcmul(p.x, F.linear(p.z, p.w), p.gate[None, None], value=0.5)


def no_gate(p):
    return p.x + F.linear(p.z, p.w, p.bias)


def alpha(p):
    return torch.add(p.x, F.linear(p.z, p.w), alpha=0.25)


def two_gates(p):
    return p.x + p.gate * (p.weight * F.linear(p.z, p.w)) * 2.0


def both_are_products(p):
    """The gated one is the delta."""
    return p.gate * F.linear(p.z, p.w) + F.linear(p.z.flip(-1), p.w)


def gate_of_a_table(p):
    return p.x + F.linear(p.z, p.w) * p.time[:, 2:3]


def flat(p):
    """Computed as [M, C]."""
    y = p.z.flatten(0, 1) @ p.w.t()
    return (p.x.view(-1, C) + p.gate * y).view(B, T, C)


def dequantized(p):
    """An FP8 linear's product and its scales, a row and a column each."""
    q, s = quantize(p.z)
    y = (q / s) @ p.w8.t() * s * (p.gate.abs()[None] / 448)
    return p.x + (y + p.bias).unflatten(0, (B, T))


RESIDUALS = [
    delta_first, with_addcmul, with_addcmul_and_value, no_gate, alpha, two_gates,
    both_are_products, gate_of_a_table, flat, dequantized,
]  # fmt: skip


@pytest.mark.parametrize("residual", RESIDUALS, ids=lambda f: f.__name__)
def test_residuals(residual):
    """The sum is used twice more: as the next residual and as an output."""

    def f(p):
        h = residual(p)
        return *quantize(ada_layer_norm(p, h)), h, h.sum(-1)

    gm, out = fused(f)
    assert out.applied == 1
    assert count(gm, PLAIN, RESIDUAL) == [0, 1]


def test_blocks_in_a_row():
    """Each residual is what the one before left."""

    def f(p):
        h = p.x
        for i in range(3):
            value, _ = quantize(ada_layer_norm(p, h))
            h = h + p.time[0, i] * F.linear(F.silu(value.view(B, T, C)), p.w @ p.w.t())
        return *quantize(affine_alone(p, h)), h

    gm, out = fused(f)
    assert out.applied == 4
    assert count(gm, PLAIN, RESIDUAL, aten.add.Tensor) == [1, 3, 3]  # 1 + scale is left, thrice
    news = [n for n in gm.graph.nodes if n.target is RESIDUAL]
    for before, after in itertools.pairwise(news):
        assert normed.base(after.args[0]).args == (before, 0)


def test_vectors_made_after_the_sum():
    def f(p):
        h = p.x + p.gate * F.linear(p.z, p.w)
        again = h * 2
        shift, scale = F.linear(F.silu(p.shift), torch.eye(2 * C, C)).chunk(2)
        return *quantize(F.layer_norm(h, (C,)) * (1 + scale) + shift), again

    gm, _ = fused(f)
    assert count(gm, PLAIN, RESIDUAL) == [0, 1]


def test_vectors_that_depend_on_the_sum():
    """No op can make the sum then: the norm alone is fused."""

    def f(p):
        h = p.x + p.gate * F.linear(p.z, p.w)
        return *quantize(F.layer_norm(h, (C,)) * (1 + h.mean((0, 1)))), h

    gm, out = fused(f)
    assert out.notes == ["0 of 1 with the residual in front"]
    assert count(gm, PLAIN, RESIDUAL) == [1, 0]


def no_product(p):
    return p.x + p.gate * p.x.flip(0, 1)


def gate_per_token(p):
    return p.x + p.x[..., :1] * F.silu(F.linear(p.z, p.w))


def three_terms(p):
    return (p.x - F.linear(p.z, p.w)) * 1.5


@pytest.mark.parametrize("residual", [no_product, gate_per_token, three_terms])
def test_other_sums_stay(residual):
    gm, out = fused(lambda p: quantize(ada_layer_norm(p, residual(p))))
    assert out.applied == 1
    assert count(gm, PLAIN, RESIDUAL) == [1, 0]


# ---- several users -------------------------------------------------------------------------------


def test_the_row_is_used_in_full_too():
    def f(p):
        h = p.x + p.gate * F.linear(p.z, p.w)
        y = ada_layer_norm(p, h)
        return *quantize(y), y, h

    gm, _ = fused(f)
    assert count(gm, RESIDUAL, aten.native_layer_norm.default) == [1, 1]


def test_one_row_quantized_twice():
    def f(p):
        h = p.x + p.gate * F.linear(p.z, p.w)
        y = ada_layer_norm(p, h)
        (a, s), (b, t) = quantize(y), quantize(y)
        return a, s, b, t

    gm, out = fused(f)
    assert out.applied == 2
    assert count(gm, PLAIN, RESIDUAL) == [0, 1]


def test_two_modulations_of_one_sum():
    def f(p):
        h = p.x + p.gate * F.linear(p.z, p.w)
        a, s = quantize(ada_layer_norm(p, h))
        b, t = quantize(affine_alone(p, h))
        return a, s, b.sum(-1) * 1e-3, t, h

    gm, out = fused(f)
    assert out.applied == 2
    assert count(gm, PLAIN, RESIDUAL) == [1, 1]


# ---- half types ----------------------------------------------------------------------------------


def wan(p):
    """A bf16 stream, gates and modulation in float32, the norm in float32."""
    e = (p.time.float() + p.scale.float()).chunk(6, dim=1)
    h = (p.x.float() + F.linear(p.z, p.w) * e[2]).type_as(p.x)
    y = F.layer_norm(h.float(), (C,), eps=EPS).type_as(h) * (1 + e[1]) + e[0]
    return *quantize(y.to(h.dtype)), h


def half(p):
    h = p.x + p.gate * F.linear(p.z, p.w)
    return *quantize(ada_layer_norm(p, h)), h


def half_llama(p):
    h = F.linear(p.z, p.w) + p.x
    return *quantize(llama_norm(p, h)), h


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("f", [wan, half, half_llama], ids=lambda f: f.__name__)
def test_half_types_are_no_farther_from_float64_than_eager(f, dtype):
    p = given(tokens=64, dtype=dtype)
    gm, out = fused(f, p, check=False)
    assert out.applied == 1
    assert count(gm, PLAIN, RESIDUAL) == [0, 1]
    eager, ours = f(p), gm(*vars(p).values())
    exact = f(types.SimpleNamespace(**{k: v.float() for k, v in vars(p).items()}))

    def error(out, i):
        return ((out[i].float() - exact[i]).norm(dim=-1) / exact[i].norm(dim=-1)).mean()

    assert ours[2].dtype == dtype
    for i in (0, 1, 2):
        assert error(ours, i) <= 1.02 * error(eager, i), i
    assert error(eager, 2) > 0


# ---- compiled ------------------------------------------------------------------------------------


class Streaming(nn.Module):
    """Two blocks over a window of keys and values; attention, then MLP, each with its norm."""

    def __init__(self, rms=False):
        super().__init__()
        self.rms = rms
        self.qkv = nn.ParameterList(nn.Parameter(torch.randn(3 * C, C) * C**-0.5) for _ in "ab")
        self.up = nn.ParameterList(nn.Parameter(torch.randn(64, C) * C**-0.5) for _ in "ab")
        self.down = nn.ParameterList(nn.Parameter(torch.randn(C, 64) * 0.125) for _ in "ab")
        self.table = nn.Parameter(torch.randn(2, 6, C) * 0.5)
        for i in range(2):
            self.register_buffer(f"k{i}", torch.randn(1, 12, C))
            self.register_buffer(f"v{i}", torch.randn(1, 12, C))

    def fp8(self, x, w):
        value, _ = quantize(x)
        top = w.abs().amax(1, keepdim=True) / 448
        return F.linear(value, (w / top).to(F8).float() * top).view(*x.shape[:-1], -1)

    def norm(self, x):
        if self.rms:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return F.layer_norm(x, (C,))

    def forward(self, x, step):
        for i in range(2):
            shift, scale, gate, shift2, scale2, gate2 = self.table[i]
            q, k, v = self.fp8(self.norm(x) * (1 + scale) + shift, self.qkv[i]).chunk(3, -1)
            for name, new in ((f"k{i}", k), (f"v{i}", v)):
                cache = getattr(self, name)
                cache.copy_(torch.cat([cache[:, 3:], new], 1))
            keys, values = (getattr(self, n)[:, None] for n in (f"k{i}", f"v{i}"))
            y = F.scaled_dot_product_attention(q[:, None], keys, values)[:, 0]
            x = torch.addcmul(x, gate, F.linear(y, self.qkv[i][:C]))
            y = self.fp8(self.norm(x) * (1 + scale2) + shift2, self.up[i])
            x = x + gate2 * F.linear(F.gelu(y), self.down[i])
        return x


ON = rtc.Options(lowering="eager", kernels="on", warn=False)
OFF = rtc.Options(
    lowering="eager", kernels="on", warn=False, passes={"fuse_modulate_quantize": False}
)


def chain(model, options, inputs, steps):
    """The worst error of an output, |compiled - eager| / |eager|, and the report."""
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    compiled = rtc.compile(twin, options=options)
    worst = 0.0
    with torch.no_grad():
        for step in range(steps):
            want, have = model(*inputs(step)), compiled(*inputs(step))
            error = ((have - want).norm() / want.norm()).item()
            worst = max(worst, error if error == error else float("inf"))
    return worst, compiled.report().to_dict()


def frames(step):
    return torch.randn(1, 3, C, generator=torch.Generator().manual_seed(step)), step


@pytest.mark.parametrize("rms", [False, True])
def test_compiled_chain(rms):
    """A value near the middle of two FP8 steps may fall to the other side: 1e-2 of one element."""
    torch.manual_seed(0)
    worst, report = chain(Streaming(rms), ON, frames, 24)
    assert_pass_counts(report, {"fuse_modulate_quantize": 4})
    assert worst < 5e-3
    torch.manual_seed(0)
    _, report = chain(Streaming(rms), OFF, frames, 2)
    assert_pass_counts(report, {"fuse_modulate_quantize": 0})


def test_the_reference_model():
    inputs = lambda step: example_inputs("tiny-fp8", step)  # noqa: E731
    worst, report = chain(build("tiny-fp8"), ON, inputs, 12)
    assert_pass_counts(report, {"fuse_modulate_quantize": 4})
    notes = [p["notes"] for g in report["graphs"] for p in g["passes"] if p["notes"]]
    assert ["4 of 4 with the residual in front"] in notes
    assert worst < 5e-3


# ---- what samples would not show -----------------------------------------------------------------


def _rms_by(statistic):
    def rows(p, h):
        y = h * torch.rsqrt(statistic(h) + EPS)
        return y * (1 + p.scale) + p.shift

    return rows


@pytest.mark.parametrize(
    "statistic",
    [
        lambda h: h.pow(2).clamp(max=65504.0).mean(-1, keepdim=True),
        lambda h: h.clamp(-1e3, 1e3).pow(2).mean(-1, keepdim=True),
        lambda h: h.pow(2).mean(-1, keepdim=True).clamp(max=1e6),
        lambda h: torch.where(h.abs() > 1e4, 1e8, h * h).mean(-1, keepdim=True),
        lambda h: (1e8 * torch.tanh(h * h / 1e8)).mean(-1, keepdim=True),
        lambda h: h.pow(2).mean(-1, keepdim=True).to(F8).float(),
    ],
    ids=["squares", "rows", "mean", "where", "soft", "fp8"],
)
def test_a_norm_that_is_bent_beyond_all_samples(statistic):
    gm, _ = fused(lambda p: quantize(_rms_by(statistic)(p, p.x)))
    assert count(gm, PLAIN) == [0]


def test_the_same_norm_unbent():
    gm, _ = fused(lambda p: quantize(_rms_by(lambda h: h.pow(2).mean(-1, keepdim=True))(p, p.x)))
    assert count(gm, PLAIN) == [1]
