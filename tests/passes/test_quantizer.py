"""analysis/quantizer: row quantizers in many people's words, and what only looks like one."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import re

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rtc.kernels import swiglu_quantize  # noqa: F401, registers the op
from rtc.passes.analysis import quantizer

F8 = torch.float8_e4m3fn
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32]


def traced(f, shape=(1, 6, 8), dtype=torch.bfloat16):
    return make_fx(f, tracing_mode="fake")(torch.randn(shape).to(dtype))


def matched(f, **kwargs):
    gm = traced(f, **kwargs)
    (cast,) = [n for n in gm.graph.nodes if quantizer.is_fp8_cast(n)]
    return gm, quantizer.match(cast)


def amax(x):
    return x.abs().amax(-1, keepdim=True)


def rounded(x, s):
    return (x.float() / s).clamp(-448, 448).to(F8), s


# ---- spellings: f(x) -> (q, s), and its floor ---------------------------------------------------


def clamped_scale(x):
    return rounded(x, (amax(x).float() / 448).clamp(min=1e-12))


def clamped_maximum(x):
    return rounded(x, amax(x.float()).clamp(min=1e-12) / 448)


def times_reciprocal_constant(x):
    s = x.abs().max(-1, keepdim=True)[0].float().clamp(min=1e-4) * (1 / 448)
    return (x * (1 / s)).clamp(-448, 448).to(F8), s


def reciprocal_scale_in_float64(x):
    r = (448 / amax(x).double().clamp(min=1e-12)).float()
    return (x.float() * r).clamp(min=-448).clamp(max=448).to(F8), r.reciprocal()


def no_clamp(x):
    s = torch.maximum(amax(x).float(), torch.tensor(1e-5)) / 448
    return (x / s).to(F8), s


def norm(x):
    s = torch.linalg.vector_norm(x.float(), float("inf"), -1, keepdim=True).clamp(min=1e-6) / 448
    return rounded(x, s)


def nan_to_num(x):
    s = torch.where(amax(x).float() < 1e-3, 1e-3, amax(x).float()) / 448
    return torch.nan_to_num(x.float() / s).clamp(-448, 448).to(F8), s


def rows_flattened_for_the_scale(x):
    h = x.reshape(-1, x.shape[-1])
    s = (h.abs().amax(-1).float() / 448).clamp(min=1e-12)
    return (x.float() / s.view(*x.shape[:-1], 1)).clamp(-448, 448).to(F8), s[:, None]


def expanded_scale(x):
    s = amax(x).float().clamp(min=1e-12) / 448
    return (x.float() / s.expand(x.shape)).clamp(-448, 448).to(F8), s


def of_magnitudes(x):
    """x itself is abs(..): the maximum's own abs is not the one to look below."""
    return clamped_scale(x.abs())


def no_floor(x):
    return rounded(x, amax(x).float() / 448)


def torchao_rows(x):
    """As torchao's primitives have it: the scale is rounded to x's dtype."""
    top = x.view(x.shape).abs().amax([x.dim() - 1], keepdim=True)
    s = (top / torch.finfo(F8).max).reshape(*x.shape[:-1], 1).to(torch.float32)
    return (x.to(torch.float32) / s).clamp(-448, 448).to(F8), s.unsqueeze(-1).view(-1, 1)


def reciprocal_kept(x):
    r = 448 / amax(x).float().clamp(min=1e-6)
    return (x.float() * r).clamp(-448, 448).to(F8), r


def reciprocal_of_no_floor(x):
    r = 448 / x.abs().max(dim=-1, keepdim=True).values.float()
    return (x.float() * r).clamp(-448, 448).to(F8), r


LEAST = 448 * 2.0**-126  # stands for no floor
SPELLINGS = [
    (clamped_scale, 448e-12),
    (clamped_maximum, 1e-12),
    (times_reciprocal_constant, 1e-4),
    (reciprocal_scale_in_float64, 1e-12),
    (no_clamp, 1e-5),
    (norm, 1e-6),
    (nan_to_num, 1e-3),
    (rows_flattened_for_the_scale, 448e-12),
    (expanded_scale, 1e-12),
    (of_magnitudes, 448e-12),
    (no_floor, LEAST),
    (torchao_rows, LEAST),
    (reciprocal_kept, 1e-6),
    (reciprocal_of_no_floor, LEAST),
]
INVERSE = (reciprocal_kept, reciprocal_of_no_floor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("f", "floor"), SPELLINGS, ids=[f.__name__ for f, _ in SPELLINGS])
def test_spellings(f, floor, dtype):
    if f is torchao_rows and dtype == torch.float16:
        pytest.skip("its scale has few bits in float16, or none")
    _, found = matched(f, dtype=dtype)
    assert isinstance(found, quantizer.RowQuantizer), found
    assert found.floor == pytest.approx(floor, rel=1e-6)
    assert found.x.op == "placeholder" or f is of_magnitudes
    assert found.x.meta["val"].dtype == dtype
    assert found.scale.meta["val"].dtype == torch.float32
    assert found.scale.meta["val"].shape[-1] == 1


def test_a_scale_rounded_to_bfloat16():
    def f(x):
        s = (amax(x).clamp(min=1e-4) / 448).float()
        return rounded(x, s)

    _, found = matched(f)
    assert isinstance(found, quantizer.RowQuantizer), found
    assert found.floor == pytest.approx(1e-4, rel=2**-8)


def test_the_formula_is_what_the_graph_computes():
    """Of every spelling: the scale within 2 ulp, q but for ties."""
    x = torch.randn(1, 64, 40, generator=torch.Generator().manual_seed(1)) * 3
    x[:, 3] = 0
    x[:, 4] *= 1e-6
    for f, floor in SPELLINGS:
        if floor == LEAST:
            x[:, 3] = 1  # a row of zeros would be NaN
        q, s = f(x)
        s = 1 / s if f in INVERSE else s
        of = x.abs() if f is of_magnitudes else x
        want = of.double().abs().amax(-1, keepdim=True).clamp(min=floor) / 448
        torch.testing.assert_close(s.double().view(want.shape), want, rtol=3e-7, atol=0)
        same = q.double() == (of / want).clamp(-448, 448).to(F8).double()
        assert same.double().mean() > 0.999


# ---- not row quantizers -------------------------------------------------------------------------


def maximum_not_of_magnitudes(x):
    return rounded(x, x.amax(-1, keepdim=True).float().clamp(min=1e-6) / 448)


def bounded_above(x):
    return rounded(x, amax(x).float().clamp(min=1e-6, max=1200.0) / 448)


def another_top(x):
    return rounded(x, amax(x).float().clamp(min=1e-6) / 440)


def powers_of_two(x):
    s = amax(x).float().clamp(min=1e-6) / 448
    return rounded(x, torch.exp2(torch.ceil(torch.log2(s))))


def narrow_clamp(x):
    s = amax(x).float().clamp(min=1e-6) / 448
    return (x.float() / s).clamp(-440, 440).to(F8), s


def one_scale_for_all(x):
    return rounded(x, x.abs().amax().float().clamp(min=1e-6) / 448)


def added_floor(x):
    return rounded(x, (amax(x).float() + 1e-3) / 448)


def another_tensor(x):
    return rounded(x.sigmoid() * 3, amax(x).float().clamp(min=1e-6) / 448)


def groups_of_four(x):
    h = x.view(*x.shape[:-1], 2, 4)
    s = h.abs().amax((-1, -2)).float().clamp(min=1e-6) / 448
    return rounded(x, s.unsqueeze(-1))


def subnormal(x):
    return rounded(x, amax(x).float().clamp(min=1e-37) / 448)


def along_columns(x):
    """[M] against [M, M]: the scales lie along the columns."""
    s = x.abs().amax(-1).float().clamp(min=1e-6) / 448
    return rounded(x, s)[0], s[:, None]


def another_scale_kept(x):
    r = 440 / amax(x).float().clamp(min=1e-6)
    return (x.float() * r).clamp(-448, 448).to(F8), r


def eps_under_the_scale(x):
    return rounded(x, amax(x).float() / 448 + 1e-6)


WRONG = [
    (maximum_not_of_magnitudes, "not of magnitudes"),
    (bounded_above, "not max"),
    (another_top, "not max"),
    (powers_of_two, "not max|not x / scale"),
    (narrow_clamp, "not x / scale"),
    (one_scale_for_all, "over the last axis"),
    (added_floor, "plus something"),
    (another_tensor, "not x / scale"),
    (groups_of_four, "over the last axis"),
    (subnormal, "too small for float32"),
    (along_columns, "mixes rows"),
    (another_scale_kept, "not max"),
    (eps_under_the_scale, "plus something"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("f", "why"), WRONG, ids=[f.__name__ for f, _ in WRONG])
def test_refusals(f, why, dtype):
    _, found = matched(f, shape=(8, 8), dtype=dtype)
    assert isinstance(found, str)
    assert re.search(why, found), found


def test_float64():
    _, found = matched(lambda x: rounded(x, (amax(x) / 448).clamp(min=1e-12)), dtype=torch.float64)
    assert isinstance(found, str)


def test_a_normalization_before_it_is_not_its_maximum():
    def f(x):
        y = x.float() / amax(x.float())
        return clamped_maximum(y)

    gm, found = matched(f)
    assert isinstance(found, quantizer.RowQuantizer), found
    assert found.x.target is torch.ops.aten.div.Tensor
    assert len(quantizer.find(gm.graph)) == 1


@pytest.mark.parametrize("f", [f for f, _ in SPELLINGS])
def test_replace_leaves_nothing_of_it(f):
    gm, found = matched(f, dtype=torch.float32)
    x = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(2))
    want = gm(x)
    with gm.graph.inserting_before(quantizer.place(found)):
        emit = quantizer.Emitter(gm.graph)
        flat = emit(torch.ops.aten.reshape.default, found.x, [6, 8])
        both = emit(torch.ops.rtc.quantize_rows.default, [flat], None, found.floor)
        q, s = (emit(quantizer.operator.getitem, both, i) for i in (0, 1))
    quantizer.replace(found, q, s)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    assert not any(n.target is torch.ops.aten.amax.default for n in gm.graph.nodes)
    assert not any(quantizer.is_fp8_cast(n) for n in gm.graph.nodes)
    got = gm(x)
    assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in want]
    torch.testing.assert_close(got[1], want[1], rtol=3e-7, atol=0)
    torch.testing.assert_close(got[0].float(), want[0].float(), rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_stay_as_they_were_made(dtype):
    for f in (clamped_scale, nan_to_num, no_floor):
        matched(f, dtype=dtype)
    for kept, made in zip(
        quantizer._samples(dtype, 1.0), quantizer._samples.__wrapped__(dtype, 1.0), strict=True
    ):
        assert torch.equal(kept, made)
