"""What tests of fuse_modulate_quantize share: inputs, tracing, and how close values have to be.

Legend: B batch, T tokens, C channels, K features of the linear in front.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import types

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from rtc.passes import fuse_modulate_quantize as fuse

F8 = torch.float8_e4m3fn
B, T, C, K = 1, 6, 48, 32
OPS = torch.ops.rtc
PLAIN, RESIDUAL = OPS.modulate_quantize.default, OPS.residual_modulate_quantize.default
aten = torch.ops.aten


def quantize(x):
    """x [.., C] dequantized, from one scale a row."""
    rows = x.flatten(0, -2).float()
    scale = (rows.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    q = (rows / scale).clamp(-448, 448).to(F8)
    return q.float() * scale, scale


def given(batch=B, tokens=T, dtype=torch.float32, seed=0):
    """x, z [B, T, K] for the linear, its weight, then a few vectors; sizes of rows differ."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape, mean=0.0):
        return (torch.randn(shape, generator=g) + mean).to(dtype)

    size = torch.logspace(-2, 1, tokens, dtype=torch.float32)[:, None].to(dtype)
    x = (rand(batch, tokens, C) + 0.3) * size
    p = types.SimpleNamespace(
        x=x,
        z=rand(batch, tokens, K) * size,
        w=rand(C, K) * K**-0.5,
        w8=(rand(C, K).float() * 30).to(F8).to(dtype),
        gate=rand(C, mean=0.5),
        scale=rand(C) * 0.3,
        shift=rand(C),
        weight=rand(C, mean=1.0),
        bias=rand(C) * 0.5,
        time=rand(1, 6, C) * 0.5,
    )
    return p


def traced(f, p):
    names = list(vars(p))

    def call(*args):
        return f(types.SimpleNamespace(**dict(zip(names, args, strict=True))))

    with torch.no_grad():
        gm = make_fx(call, tracing_mode="fake")(*vars(p).values())
    for n in gm.graph.nodes:  # in torch's own rms_norm; rtc's tracing makes it functional
        if n.target is aten.add_.Scalar:
            assert len(n.args[0].users) == 1
            n.target = aten.add.Scalar
    return gm


def fused(f, p=None, check=True):
    """The rewritten graph and what the pass says; values compared with the function's."""
    p = p or given()
    gm = traced(f, p)
    out = fuse.run(types.SimpleNamespace(gm=gm))
    gm.graph.lint()
    gm.recompile()
    if check:
        with torch.no_grad():
            want, got = f(p), gm(*vars(p).values())
        for a, b in zip(want, got, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
        close(want, got)
    return gm, out


def close(want, got):
    (value, scale, *rest), (value2, scale2, *rest2) = want, got
    torch.testing.assert_close(scale2, scale, rtol=1e-5, atol=0)
    off = (value - value2).abs()
    step = (value.abs() / 8).clamp(min=2.0**-9 * scale) * 1.001
    assert (off <= step).all()
    assert (off > 1e-5 * value.abs()).float().mean() <= 0.005
    for a, b in zip(rest, rest2, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def count(gm, *targets):
    return [sum(n.target is t for n in gm.graph.nodes) for t in targets]


EPS = 1e-3  # seen in the smallest rows


def ada_layer_norm(p, h):
    return F.layer_norm(h, (C,), eps=EPS) * (1 + p.scale) + p.shift
