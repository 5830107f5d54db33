"""fuse_swiglu_quantize: gated products in front of FP8 linears, in several people's words.

A model keeps a window of nine slots and pushes three a step, so that what a step computes shows in
the next ones. On the CPU the op runs its plain reference, which rounds as eager's most usual words
do: in float32, |compiled - eager| / |eager| is a few roundings. In bfloat16, other words round silu
otherwise, and FP8 roundings fall to the other side: 2^-4 of one of C values each, 2e-2 of an output
at C = 32. A wrong part, activation or scale costs 1e-1 and more in either.

Legend: B batch, T new tokens, S slots, E channels, F hidden width, C = E + F, H heads, D head size.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc
from rtc.kernels import swiglu_quantize as op
from rtc.testing import assert_pass_counts, assert_refused
from rtc.testing.counts import pass_counts

F8 = torch.float8_e4m3fn
NAME = "fuse_swiglu_quantize"
STEPS = 8
BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
ON = rtc.Options(lowering="eager", warn=False, kernels="on", passes={"fp8_linear": False})
OFF = rtc.Options(lowering="eager", warn=False, kernels="on", passes={NAME: False})
E, HIDDEN, HEADS = 8, 24, 2


def quantize(x):
    s = (x.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1e-9)
    return (x.float() / s).clamp(-448, 448).to(F8), s


def quantize_by_reciprocal(x):
    r = 448 / x.float().abs().amax(-1, keepdim=True).clamp(min=1e-9)
    return (x.float() * r).clamp(-448, 448).to(F8), 1 / r


class Gated(nn.Module):
    """linear2([attention, gate(act, up)]); subclasses say how."""

    width = E + HIDDEN

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(E, E + 2 * HIDDEN)
        self.register_buffer("w8", torch.randn(E, self.width).to(F8))
        self.register_buffer("k", torch.randn(1, 9, HEADS, E // HEADS))

    def forward(self, x):
        return self.row(self.wide(x))

    def attention(self, h):
        """h [B, T, E] is query, new key and new value; [B, T, E]."""
        h = h.unflatten(-1, (HEADS, E // HEADS))
        self.k.copy_(torch.cat([self.k[:, 3:], h], 1))
        q, k = h.transpose(1, 2), self.k.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)

    def row(self, wide):
        h, act, up = wide.split([E, HIDDEN, HIDDEN], -1)
        return self.linear2(torch.cat([self.attention(h), self.gate(act, up)], -1))

    def gate(self, act, up):
        return F.silu(act) * up

    def linear2(self, x):
        q, s = self.quantize(x.flatten(0, -2))
        y = (q.float() @ self.w8.float().t()) * s
        return y.to(x.dtype).unflatten(0, x.shape[:-1])

    def quantize(self, x):
        return quantize(x)


class Chain:
    """A model and its compiled twin; ``worst`` error of an output, ``calls`` of the op."""

    def __init__(self, build, options=ON, dtype=torch.float32, steps=STEPS):
        torch._dynamo.reset()
        torch.manual_seed(0)
        eager = build()
        eager.wide.to(dtype)
        eager.k = eager.k.to(dtype)
        compiled = rtc.compile(copy.deepcopy(eager), options=options)
        self.worst, self.calls = 0.0, 0
        reference = op.reference

        def counted(*args):
            self.calls += 1
            return reference(*args)

        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(op, "reference", counted)
            for step in range(steps):
                x = torch.randn(1, 3, E, generator=torch.Generator().manual_seed(step)).to(dtype)
                want, have = eager(x), compiled(x)
                assert have.dtype == want.dtype == dtype
                error = ((have - want).float().norm() / want.float().norm()).item()
                self.worst = max(self.worst, error if error == error else float("inf"))
        self.report = compiled.report().to_dict()
        assert_pass_counts(self.report, {"ring_cache": 1})


# ---- spellings ----------------------------------------------------------------------------------


class Sigmoid(Gated):
    def gate(self, act, up):
        return up * (act * torch.sigmoid(act))


class Written(Gated):
    def gate(self, act, up):
        return act * up / (1 + torch.exp(-act))


class Wider(Gated):
    def gate(self, act, up):
        return (F.silu(act.float()) * up.float()).to(act.dtype)


class GateFirst(Gated):
    """chunk, up in front of act; the quantizer multiplies by a reciprocal."""

    def row(self, wide):
        up, act = wide[..., E:].chunk(2, dim=-1)
        part = self.attention(wide[..., :E])
        return self.linear2(torch.cat((part, up * F.silu(act)), dim=2))

    def quantize(self, x):
        return quantize_by_reciprocal(x)


class Alone(Gated):
    """No concatenation; two linears of their own."""

    width = HIDDEN

    def __init__(self):
        super().__init__()
        self.wide = nn.ModuleList([nn.Linear(E, HIDDEN), nn.Linear(E, HIDDEN, bias=False)])

    def forward(self, x):
        h = self.attention(x)
        return self.linear2(self.gate(self.wide[0](h), self.wide[1](h)))


class TwoParts(Gated):
    """An attention's output and a slice in front."""

    width = 2 * E + HIDDEN

    def row(self, wide):
        h = wide.narrow(-1, 0, E)
        act, up = wide.narrow(-1, E, HIDDEN), wide.narrow(-1, E + HIDDEN, HIDDEN)
        return self.linear2(torch.cat([self.attention(h), h, F.silu(act) * up], -1))


class Twice(Gated):
    """Two linears quantize the same row, each for itself."""

    def linear2(self, x):
        return super().linear2(x) + super().linear2(x)


class Strided(Gated):
    """act and up lie with their columns apart: they need a copy, and get one."""

    def row(self, wide):
        act, up = wide[..., E:].unflatten(-1, (HIDDEN, 2)).unbind(-1)
        part = self.attention(wide[..., :E])
        return self.linear2(torch.cat([part, F.silu(act) * up], -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "model", [Gated, Sigmoid, Written, Wider, GateFirst, Alone, TwoParts, Twice, Strided]
)
def test_spellings(model, dtype):
    chain = Chain(model, dtype=dtype)
    assert_pass_counts(chain.report, {NAME: 1})
    assert_pass_counts(chain.report, {NAME: 1}, field="matched")
    assert chain.calls == STEPS
    assert chain.worst < BOUND[dtype]


def test_its_switch():
    chain = Chain(Gated, OFF)
    assert_pass_counts(chain.report, {NAME: 0})
    assert chain.worst < 1e-6


# ---- refusals ----------------------------------------------------------------------------------


class Gelu(Gated):
    def gate(self, act, up):
        return F.gelu(act) * up


class QuickGelu(Gated):
    def gate(self, act, up):
        return act * torch.sigmoid(1.702 * act) * up


class Limited(Gated):
    def gate(self, act, up):
        return F.silu(act).clamp(max=7.0) * up


class LimitedFarOut(Gated):
    """Beyond what samples reach."""

    def gate(self, act, up):
        return (F.silu(act) * up).clamp(-1e6, 1e6)


class SoftCap(Gated):
    def gate(self, act, up):
        return 1e6 * torch.tanh(F.silu(act) * up / 1e6)


class Shifted(Gated):
    """Of silu(a) * u, where a and u are pointwise work themselves: that stays outside."""

    def gate(self, act, up):
        return F.silu(act.clamp(max=7.0)) * (up + 1e-2)


class Rounded(Gated):
    """The product is rounded to FP8 once more on its own: not a rounding to leave out."""

    def gate(self, act, up):
        return (F.silu(act) * up).to(F8).to(act.dtype)


class NoGate(Gated):
    def gate(self, act, up):
        return F.silu(act)


class NotLast(Gated):
    def row(self, wide):
        h, act, up = wide.split([E, HIDDEN, HIDDEN], -1)
        return self.linear2(torch.cat([F.silu(act) * up, self.attention(h)], -1))


class ReadTwice(Gated):
    def row(self, wide):
        h, act, up = wide.split([E, HIDDEN, HIDDEN], -1)
        y = F.silu(act) * up
        return self.linear2(torch.cat([self.attention(h), y], -1)) + y.mean()


class RowReadTwice(Gated):
    def linear2(self, x):
        return super().linear2(x) + x.abs().amax(-1, keepdim=True)


class ThreeParts(Gated):
    width = 2 * E + 8 + HIDDEN

    def row(self, wide):
        h, act, up = wide.split([E, HIDDEN, HIDDEN], -1)
        return self.linear2(torch.cat([self.attention(h), up[..., :8], h, F.silu(act) * up], -1))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Gelu, "not silu"),
        (QuickGelu, "not silu"),
        (Limited, "not silu"),
        (LimitedFarOut, "not silu"),
        (SoftCap, "not silu"),
        (Shifted, None),
        (Rounded, "not silu"),
        (NoGate, "not silu"),
        (NotLast, "not the last part"),
        (ReadTwice, "something else"),
        (RowReadTwice, "something else"),
        (ThreeParts, "more than two parts"),
    ],
)
def test_refusals(model, why):
    chain = Chain(model, steps=3)
    assert_pass_counts(chain.report, {NAME: why is None})
    assert chain.worst < (1e-6 if why else BOUND[torch.float32])
    if why:
        assert_refused(chain.report, NAME, why)
        assert_refused(chain.report, NAME, r"test_fuse_swiglu_quantize.py:\d+")


@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "float32 of bf16"])
@pytest.mark.parametrize("factor", [0.985, 1.015])
@pytest.mark.parametrize("inside", [False, True])
def test_a_factor_that_roundings_could_hide(factor, inside, wide):
    class Scaled(Gated):
        def gate(self, act, up):
            a, u = (act.float(), up.float()) if wide else (act, up)
            y = F.silu(a) * (u * factor) if inside else F.silu(a) * u * factor
            return y.to(act.dtype)

    chain = Chain(Scaled, dtype=torch.bfloat16, steps=2)
    assert_pass_counts(chain.report, {NAME: inside})
    assert chain.worst < (BOUND[torch.bfloat16] if inside else 1e-6)


def test_other_quantizers_are_none_of_its_business():
    class Norm(Gated):
        def gate(self, act, up):
            return act * up

    chain = Chain(Norm, steps=2)
    assert pass_counts(chain.report, "matched")[NAME] == 0


def test_the_reference_model():
    from rtc.model import build, example_inputs

    torch._dynamo.reset()
    model = build("tiny-fp8", dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    compiled = rtc.compile(model, options=ON)
    plain = rtc.compile(twin, options=OFF)
    for step in range(3):
        inputs = example_inputs("tiny-fp8", step, dtype=torch.bfloat16)
        have, want = compiled(*inputs), plain(*inputs)
        assert (have - want).norm() <= 2e-2 * want.norm()
    assert_pass_counts(compiled, {NAME: 4})  # one a block
