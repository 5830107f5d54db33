"""fp8_linear: FP8 matrix products become rtc's op; where it pays, their scales go to the reader.

Functions are traced to ATen on fake tensors and the pass runs on that graph. Both graphs are then
run on the CPU, where `_scaled_mm` is what it means: a float32 product of dequantized operands,
rounded to the result's dtype. Sums have one order, so results differ by one rounding of bfloat16,
2^-8 of a value; another row's scale costs about a whole value.

Legend: M rows, K features in, N (or C) features out.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import types

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rtc.passes import fp8_linear as linear
from rtc.passes import fuse_modulate_quantize as fuse

F8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
M, N, K = 12, 48, 128
OPS, aten = torch.ops.rtc, torch.ops.aten
SCALED, SCALED2 = aten._scaled_mm.default, getattr(aten, "_scaled_mm_v2", None)
INSIDE, RAW = OPS.linear_fp8.default, OPS.linear_fp8_raw.default
RESIDUAL = OPS.residual_modulate_quantize.default


def scaled_mm(x, w, a, b, bias=None, result=None, dtype=None):
    assert result is None
    y = (x.float() @ w.float()) * a * b
    return (y if bias is None else y + bias.float()).to(dtype)


def scaled_mm_v2(x, w, a, ra, sa, b, rb, sb, bias, dtype, contraction=(), fast=False):
    return scaled_mm(x, w, a[0], b[0], bias, None, dtype)


class Reference(fx.Interpreter):
    def call_function(self, target, args, kwargs):
        if target is SCALED:
            names = [a.name for a in SCALED._schema.arguments]
            named = dict(zip(names, args, strict=False)) | kwargs
            return scaled_mm(*(named.get(n) for n in names[:7]))
        if SCALED2 is not None and target is SCALED2.default:
            return scaled_mm_v2(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def given(rows=True, m=M, n=N, k=K, f8=F8, w8=F8, dtype=BF16):
    g = torch.Generator().manual_seed(0)

    def rand(*shape, mean=0.0):
        return torch.randn(shape, generator=g) + mean

    one = torch.tensor
    return {
        "x": (rand(m, k) * 50).to(f8),
        "w": (rand(n, k) * 50).to(w8),
        "a": torch.exp(rand(m, 1)) * 1e-3 if rows else one(2e-3),
        "b": torch.exp(rand(1, n)) * 1e-3 if rows else one(3e-3),
        "bias": rand(n).to(dtype),
        "h": rand(m, n).to(dtype),
        "gate": rand(n, mean=0.5).to(dtype),
        "scale": rand(n).to(dtype) * 0.3,
        "shift": rand(n).to(dtype),
    }


def traced(f, p):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fakes = [mode.from_tensor(t) for t in p.values()]

        def call(*args):
            return f(types.SimpleNamespace(**dict(zip(p, args, strict=True))))

        return make_fx(call)(*fakes)


def rewritten(f, p=None, fused=False, check=True):
    """The rewritten graph and what the pass says; values compared with the traced graph's."""
    p = p or given()
    gm, plain = traced(f, p), traced(f, p)
    if fused:
        assert fuse.run(types.SimpleNamespace(gm=gm)).applied
    out = linear.run(types.SimpleNamespace(gm=gm))
    gm.graph.lint()
    gm.recompile()
    if check:
        want, got = (Reference(g).run(*p.values()) for g in (plain, gm))
        for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (want, got)), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            close(a, b)
    return gm, out


def close(want, got):
    want, got = want.float(), got.float()
    assert ((got - want).abs() <= 2.0**-7 * want.abs() + 2.0**-9 * want.abs().mean()).all()


def count(gm, *targets):
    return [sum(n.target is t for n in gm.graph.nodes) for t in targets]


def mm(p, **kwargs):
    more = {"out_dtype": BF16, "use_fast_accum": True} | kwargs
    return torch._scaled_mm(p.x, p.w.t(), p.a, p.b, **more)


# ---- scales inside -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_scales_inside(rows, bias):
    gm, out = rewritten(lambda p: mm(p, bias=p.bias if bias else None), given(rows))
    assert (out.matched, out.applied, out.refused) == (1, 1, [])
    assert out.notes == ["1 with scales inside, 0 without"]
    assert count(gm, INSIDE, SCALED, aten.t.default) == [1, 0, 0]


def test_dtypes():
    for dtype in (BF16, torch.float32):
        gm, _ = rewritten(lambda p: mm(p, out_dtype=dtype), given(rows=False))  # noqa: B023
        assert count(gm, INSIDE) == [1]


@pytest.mark.parametrize("turn", [lambda w: w.transpose(0, 1), lambda w: w.T, lambda w: w.mT])
def test_weights_turned_in_other_words(turn):
    def f(p):
        return torch._scaled_mm(p.x, turn(p.w), p.a, p.b, out_dtype=BF16, use_fast_accum=True)

    gm, out = rewritten(f)
    assert out.applied == 1
    assert count(gm, INSIDE) == [1]


def test_a_weight_stored_column_major():
    p = given()
    p["w"] = p["w"].t()
    gm, out = rewritten(
        lambda p: torch._scaled_mm(p.x, p.w, p.a, p.b, out_dtype=BF16, use_fast_accum=True), p
    )
    assert out.applied == 1
    assert count(gm, INSIDE, aten.t.default) == [1, 1]


@pytest.mark.skipif(SCALED2 is None, reason="this torch has no _scaled_mm_v2")
@pytest.mark.parametrize("rows", [True, False])
def test_v2(rows):
    kind = int(rows)

    def f(p):
        w = p.w.t()
        return aten._scaled_mm_v2(
            p.x, w, [p.a], [kind], [0], [p.b], [kind], [0], p.bias, BF16, [], True
        )

    gm, out = rewritten(f, given(rows))
    assert out.applied == 1
    assert count(gm, INSIDE) == [1]


# ---- scales left to the reader -------------------------------------------------------------------


def quantize(x):
    scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return (x.float() / scale).clamp(-448, 448).to(F8), scale


def block(p, y):
    """The residual after a linear, and the next norm."""
    h = p.h + p.gate * y
    q, s = quantize(F.layer_norm(h, (h.shape[-1],)) * (1 + p.scale) + p.shift)
    return q.float() * s, s, h


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(linear, "_arch", lambda node: (9, 0))


def close_blocks(f, p):
    """Each of both graphs against the block in float32: q's own rounding is 2^-4 of a value."""
    gm, out = rewritten(f, p, fused=True, check=False)
    plain = traced(f, p)
    wide = {k: v.float() if v.dtype == BF16 else v for k, v in p.items()}
    exact = block(
        types.SimpleNamespace(**wide), p["x"].float() @ p["w"].float().t() * p["a"] * p["b"]
    )
    want, got = (Reference(g).run(*p.values()) for g in (plain, gm))
    for e, a, b in zip(exact, want, got, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        error = [((t.float() - e).norm(dim=-1) / e.norm(dim=-1)).mean() for t in (a, b)]
        assert error[1] <= 1.1 * error[0] + 1e-6
        assert error[1] < 0.03
    return gm, out


@pytest.mark.usefixtures("hopper")
class TestReader:
    def test_raw(self):
        gm, out = close_blocks(lambda p: block(p, mm(p)), given())
        assert out.notes == ["0 with scales inside, 1 without"]
        assert count(gm, RAW, INSIDE, RESIDUAL, SCALED) == [1, 0, 1, 0]
        node = next(n for n in gm.graph.nodes if n.target is RESIDUAL)
        assert node.args[2].meta["val"].dtype == torch.float32
        assert node.args[10].meta["val"].shape == (M, 1)

    def test_without_a_gate_and_through_views(self):
        def f(p):
            y = mm(p).view(1, M, N)
            h = (p.h[None] + y).squeeze(0)
            q, s = quantize(F.layer_norm(h, (N,)) * p.scale + p.shift)
            return q.float() * s, s, h

        p = given()
        gm = traced(f, p)
        assert fuse.run(types.SimpleNamespace(gm=gm)).applied == 1
        linear.run(types.SimpleNamespace(gm=gm))
        gm.recompile()
        assert count(gm, RAW, RESIDUAL) == [1, 1]
        wide = types.SimpleNamespace(
            **{k: v.float() if v.dtype == BF16 else v for k, v in p.items()}
        )
        h = wide.h + p["x"].float() @ p["w"].float().t() * p["a"] * p["b"]
        got = Reference(gm).run(*p.values())
        assert (got[2].float() - h).norm() < 2.0**-8 * h.norm()

    def test_one_scale_each_stays_inside(self):
        gm, _ = rewritten(lambda p: block(p, mm(p))[2], given(rows=False), check=False)
        assert count(gm, RAW, INSIDE) == [0, 1]

    def test_two_readers(self):
        def f(p):
            y = mm(p)
            return *block(p, y), y

        gm, out = rewritten(f, fused=True, check=False)
        assert out.notes == ["1 with scales inside, 0 without"]
        assert count(gm, RAW, INSIDE, RESIDUAL) == [0, 1, 1]

    def test_as_the_residual_it_keeps_its_scales(self):
        """Not the delta, but what a second product is added to."""

        def f(p):
            y, z = mm(p), torch._scaled_mm(p.x, p.w.t(), p.a * 2, p.b, bias=p.bias,
                                           out_dtype=BF16, use_fast_accum=True)  # fmt: skip
            h = y + p.gate * z
            q, s = quantize(F.layer_norm(h, (N,)) + p.shift)
            return q.float() * s, s, h

        gm, _ = rewritten(f, fused=True, check=False)
        assert count(gm, RAW, INSIDE, RESIDUAL) == [0, 2, 1]  # the delta has a bias

    def test_where_it_does_not_pay(self):
        gm, _ = rewritten(lambda p: block(p, mm(p)), given(k=64), fused=True, check=False)
        assert count(gm, RAW, INSIDE, RESIDUAL) == [0, 1, 1]


def test_without_a_gpu_scales_stay_inside():
    gm, _ = rewritten(lambda p: block(p, mm(p)), fused=True, check=False)
    assert count(gm, RAW, INSIDE, RESIDUAL) == [0, 1, 1]


# ---- refusals ------------------------------------------------------------------------------------


def test_slow_accumulation_stays():
    gm, out = rewritten(lambda p: mm(p, use_fast_accum=False))
    assert "full precision" in out.refused[0].reason
    assert count(gm, SCALED, INSIDE) == [1, 0]


def placeholder(gm, i):
    return [n for n in gm.graph.nodes if n.op == "placeholder"][i]


def test_other_operands_and_scales():
    for i, make, reason in [
        (0, lambda t: t.to(torch.float8_e5m2), "operands of torch.float8_e5m2"),
        (1, lambda t: t.to(torch.float8_e5m2), "operands"),
        (2, lambda t: t.expand(M, K // 32).contiguous(), "block-wise"),
        (3, lambda t: t.to(torch.bfloat16), "block-wise"),
        (3, lambda t: t[:, :1], "block-wise"),
    ]:
        gm = traced(mm, given())
        node = placeholder(gm, i)
        mode = node.meta["val"].fake_mode
        with mode:
            node.meta["val"] = make(node.meta["val"])
            for user in node.users:
                if user.target is aten.t.default:
                    user.meta["val"] = node.meta["val"].t()
        out = linear.run(types.SimpleNamespace(gm=gm))
        assert (out.matched, out.applied) == (1, 0)
        assert reason in out.refused[0].reason
        assert count(gm, SCALED, INSIDE) == [1, 0]


def test_a_scale_of_the_result():
    gm = traced(mm, given())
    node = next(n for n in gm.graph.nodes if n.target is SCALED)
    node.args = (*node.args[:4], None, placeholder(gm, 2))
    out = linear.run(types.SimpleNamespace(gm=gm))
    assert "its result has a scale" in out.refused[0].reason


def test_a_result_in_fp8():
    gm = traced(mm, given())
    node = next(n for n in gm.graph.nodes if n.target is SCALED)
    with node.meta["val"].fake_mode:
        node.meta["val"] = node.meta["val"].to(F8)
    out = linear.run(types.SimpleNamespace(gm=gm))
    assert "a result of torch.float8_e4m3fn" in out.refused[0].reason
