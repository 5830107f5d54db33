"""rtc::linear_fp8, linear_fp8_residual and linear_fp8_swiglu against float64.

Without a GPU the ops run their plain reference; `test_in_the_interpreter` runs this file once more
in a process where Triton interprets the kernels.
"""

import os
import subprocess
import sys
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from rtc.kernels import linear_fp8 as op
from rtc.kernels import linear_fp8_swiglu as swiglu
from rtc.kernels import linear_fp8_triton as kernel
from rtc.kernels.linear_fp8_triton import Config

FP8, F64 = torch.float8_e4m3fn, torch.float64
Args = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
INTERPRET = kernel.triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
interpreted = pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter")

PROMOTED = Config(bn=128, warps=8, stages=4, promote=128)
STREAM = Config(stages=4, halves=True, stream=True)
TINY = Config(bm=32, bn=32, bk=32, warps=4)
CONFIGS = [
    TINY,
    Config(bm=16, bn=64, bk=64, group=2, halves=True),
    Config(bm=32, bn=32, bk=32, stream=True),
    Config(bm=16, bn=64, bk=32, group=2, stream=True, halves=True),
    Config(bm=32, bn=32, bk=32, promote=32),
]
# M, N, K: ragged in each; rows of y that a descriptor takes and (N = 101) does not; fewer tiles
# than the 4 CTAs that the interpreter pretends to run; K of one step; a tail of sets of two tiles.
SHAPES = [(37, 104, 160), (37, 101, 64), (5, 16, 320), (70, 130, 16), (37, 72, 320)]


def make(M, N, K, *, rows=True, device="cpu", seed=0, pad=0) -> Args:
    """x, w, x_scale, w_scale; every row its own scale with ``rows``; rows K + pad apart."""
    g = torch.Generator(device=device).manual_seed(seed)

    def rand(*shape):
        return torch.randn(shape, generator=g, device=device)

    x = (rand(M, K + pad) * 2).to(FP8)[:, :K]
    w = (rand(N, K + pad) * 2).to(FP8)[:, :K]
    if not rows:
        return x, w, torch.tensor(0.03, device=device), torch.tensor([0.02], device=device)
    # A factor of about ten between rows: the scale of another row would show.
    return x, w, torch.exp(rand(M, 1) * 0.7) * 0.02, torch.exp(rand(N) * 0.7) * 0.02


def exact(x, w, x_scale, w_scale, bias=None):
    return op.reference(x, w, x_scale, w_scale, bias, F64)


def slack(x, w, x_scale, w_scale):
    """What an element of y may be off before it is rounded.

    In float32: 2^-22 of the sum of the absolute products. On Hopper the tensor cores add 32
    products at a time and keep about 14 bits of the sum, truncated, so that errors add up instead
    of cancelling: 2^-13 a step (and 8 steps for the alignment inside one) of a sum that seldom
    leaves four standard deviations of the products'. For K = 208 that is under 1 % of one, for
    K = 38400 more than half: short sums show a product left out or taken twice.
    """
    if not x.is_cuda:
        total = op.reference(x.double().abs(), w.double().abs(), x_scale, w_scale, None, F64)
        return total * 2.0**-22
    spread = op.reference(x.double() ** 2, w.double() ** 2, x_scale**2, w_scale**2, None, F64)
    return spread.sqrt() * (4 * (x.shape[1] / 32 + 8) * 2.0**-13)


def close(y, want, slack, dtype):
    """Within one rounding to ``dtype`` (the interpreter truncates: a whole unit) and ``slack``."""
    assert y.dtype == dtype
    assert y.shape == want.shape
    assert torch.isfinite(y).all()
    unit = torch.finfo(dtype).eps * (1.0 if INTERPRET else 0.5)
    bound = want.abs() * unit * 1.01 + slack * 1.01 + torch.finfo(dtype).tiny * 2
    over = ((y.double() - want).abs() / bound).amax().item() if y.numel() else 0
    assert over <= 1, f"{over:.2f} times the bound"


def close_norm(y, want, K):
    """The same over all elements: a step's truncation each, and one rounding."""
    error = ((y.double() - want).norm() / want.norm()).item()
    assert error < 4e-3 + K / 32 * 2.0**-13


def swiglu_exact(args, act, up, width):
    h = exact(*args)
    y = F.silu(h[:, act : act + width]) * h[:, up : up + width]
    keep = torch.ones(h.shape[1], dtype=torch.bool, device=h.device)
    keep[act : act + width] = keep[up : up + width] = False
    return h[:, keep], y, keep


def check_swiglu(args, act, up, width, dtype, out):
    rest, y, amax = out
    want_rest, want_y, keep = swiglu_exact(args, act, up, width)
    room = slack(*args)
    close(rest, want_rest, room[:, keep], dtype)
    h = exact(*args).abs()
    (a, b), (da, db) = ([t[:, n : n + width] for n in (act, up)] for t in (h, room))
    # |d silu| <= 1.1, |silu(a)| <= |a|; float32 exp and division on top.
    close(y, want_y, 1.1 * da * (b + db) + a * db + want_y.abs() * 2.0**-20, dtype)
    assert torch.equal(amax, y.float().abs().amax(1, keepdim=True))


@pytest.fixture
def poisoned(monkeypatch):
    """new_empty returns NaN: an element nobody wrote shows. (new_zeros stays.)"""
    plain = torch.Tensor.new_empty

    def new_empty(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


@interpreted
class TestKernels:
    @pytest.mark.parametrize("config", CONFIGS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_linear(self, shape, config, poisoned):
        args = make(*shape)
        for dtype in DTYPES:
            y = op.run("triton", *args, None, dtype, config)
            close(y, exact(*args), slack(*args), dtype)
            assert y.is_contiguous()

    @pytest.mark.parametrize("config", CONFIGS[:3])
    def test_scales_bias_and_strides(self, config, poisoned):
        x, w, xs, ws = make(37, 104, 96, pad=16)
        _, _, x1, w1 = make(1, 1, 16, rows=False)
        bias = torch.randn(104, dtype=torch.bfloat16)
        for a, b in product((xs, x1), (ws, ws[None], w1)):
            args = (x, w, a, b)
            y = op.run("triton", *args, bias, torch.float32, config)
            close(y, exact(*args, bias), slack(*args) + bias.double().abs() * 2**-22, torch.float32)

    @pytest.mark.parametrize("config", CONFIGS)
    def test_residual(self, config, poisoned):
        args = make(37, 104, 160)
        for dtype in DTYPES:
            gate, residual = torch.randn(104), torch.randn(37, 112)[:, 4:108].to(dtype)
            out = op.run_residual("triton", *args, gate, residual, config)
            want = residual.double() + gate.double() * exact(*args)
            size = slack(*args) * gate.double().abs() + residual.double().abs() * 2**-22
            close(out, want, size, dtype)
            assert out.dtype == dtype

    @pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], CONFIGS[4]])
    @pytest.mark.parametrize(
        ("N", "act", "up", "width"),
        [
            (192, 64, 128, 64),  # q, k, v, then both branches, as in the model
            (192, 128, 64, 64),
            (104, 8, 60, 40),  # ragged runs in front, between and behind
            (101, 53, 3, 41),  # rows that no descriptor stores
            (80, 0, 40, 40),  # no rest
        ],
    )
    def test_swiglu(self, N, act, up, width, config, poisoned):
        args = make(37, N, 96)
        for dtype in DTYPES:
            out = swiglu.run("triton", *args, act, up, width, dtype, config)
            check_swiglu(args, act, up, width, dtype, out)

    def test_ops_in_a_compiled_chain(self, monkeypatch):
        monkeypatch.setattr(op, "_choose", lambda *args: ("triton", TINY))
        monkeypatch.setattr(op, "_choose_residual", lambda *args: ("triton", TINY))
        monkeypatch.setattr(swiglu, "_choose", lambda *args: ("triton", TINY))
        compare_chain("cpu")


def compare_chain(device, M=37, d=32):
    """linear1 with SwiGLU, quantized rows, linear2 with the residual, twice; compiled and eager."""
    _, w1, _, s1 = make(M, 11 * d, d, device=device)
    _, w2, _, s2 = make(M, d, 7 * d, device=device, seed=1)
    gate = torch.randn(d, device=device)
    torch_ops = torch.ops.rtc

    def quantize(t, amax):
        scale = amax.clamp(min=1e-6) / 448
        return (t.float() / scale).to(FP8), scale

    def block(h):
        x, xs = quantize(h, h.float().abs().amax(1, keepdim=True))
        rest, y, amax = torch_ops.linear_fp8_swiglu(
            x, w1, xs, s1, 3 * d, 7 * d, 4 * d, torch.bfloat16
        )
        amax = torch.maximum(amax, rest.float().abs().amax(1, keepdim=True))
        z, zs = quantize(torch.cat([rest, y], dim=1), amax)
        h = torch_ops.linear_fp8_residual(z, w2, zs, s2, gate, h)
        return h + torch_ops.linear_fp8(z, w2, zs, s2, None, torch.bfloat16)

    def twice(h):
        return block(block(h))

    h = torch.randn(M, d, device=device).bfloat16()
    want = twice(h)
    got = torch.compile(twice, fullgraph=True, backend="aot_eager")(h)
    assert torch.isfinite(want).all()
    assert torch.equal(got, want)
    assert not torch.equal(want, h)


class TestOps:
    @pytest.mark.parametrize("rows", [True, False])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_reference(self, dtype, rows):
        args = make(37, 104, 160, rows=rows)
        bias = torch.randn(104)
        y = op.linear_fp8(*args, bias, dtype)
        close(y, exact(*args, bias), slack(*args) + bias.abs() * 2**-22, dtype)
        out = swiglu.linear_fp8_swiglu(*args, 60, 8, 40, dtype)
        check_swiglu(args, 60, 8, 40, dtype, out)
        gate, residual = torch.randn(104), torch.randn(37, 104).to(dtype)
        out = op.linear_fp8_residual(*args, gate, residual)
        want = residual.double() + gate.double() * exact(*args)
        close(out, want, slack(*args) * gate.abs() + residual.abs() * 2**-22, dtype)

    def test_raw(self):
        x, w, _, _ = make(37, 104, 160, pad=16)
        one = torch.ones(1)
        for dtype in (torch.bfloat16, torch.float32):
            y = op.linear_fp8_raw(x, w, dtype)
            close(y, exact(x, w, one, one), slack(x, w, one, one), dtype)
            assert y.is_contiguous()
        with pytest.raises(ValueError, match="need bfloat16 or float32, not"):
            op.linear_fp8_raw(x, w, torch.float16)

    def test_pays_raw(self):
        hopper = (9, 0)
        assert op.pays_raw(757, 7680, 38400, hopper)
        assert op.pays_raw(757, 7680, 12800, hopper)
        assert op.pays_raw(301, 5120, 13824, hopper)
        assert not op.pays_raw(757, 84480, 7680, hopper)
        assert not op.pays_raw(757, 7680, 7680, hopper)
        assert not op.pays_raw(757, 7680, 38400, (8, 9))

    def test_every_row_has_its_scale(self):
        x, w, xs, ws = make(6, 8, 16)
        other = xs.clone()
        other[3] *= 2
        a = op.linear_fp8(x, w, xs, ws, None, torch.float32)
        b = op.linear_fp8(x, w, other, ws, None, torch.float32)
        same = torch.arange(6) != 3
        assert torch.equal(a[same], b[same])
        assert torch.equal(2 * a[3], b[3])

    def test_opcheck(self):
        args = make(5, 48, 16)
        gate, residual = torch.randn(48), torch.randn(5, 96).bfloat16()[:, ::2]
        for call, more in [
            (op.linear_fp8, (None, torch.bfloat16)),
            (op.linear_fp8, (torch.randn(48), torch.float32)),
            (op.linear_fp8_residual, (gate, residual)),
            (swiglu.linear_fp8_swiglu, (4, 20, 16, torch.float16)),
        ]:
            # test_schema compares inputs by arithmetic that FP8 has not; so by bytes, below.
            tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
            torch.library.opcheck(call, (*args, *more), test_utils=tests)
            given = [t for t in (*args, *more) if isinstance(t, torch.Tensor)]
            before = [t.clone().view(torch.uint8) for t in map(torch.Tensor.contiguous, given)]
            out = call(*args, *more)
            for t, bytes_ in zip(given, before, strict=True):
                assert torch.equal(t.contiguous().view(torch.uint8), bytes_)
            storages = [t.untyped_storage().data_ptr() for t in given]
            for t in out if isinstance(out, tuple) else (out,):
                assert t.untyped_storage().data_ptr() not in storages

    def test_opcheck_raw(self):
        x, w, _, _ = make(5, 48, 16)
        tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        torch.library.opcheck(op.linear_fp8_raw, (x, w, torch.bfloat16), test_utils=tests)

    def test_fake_strides(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        args = make(5, 48, 16, pad=16)
        more = (torch.randn(48), torch.randn(48, 5).t())
        calls = [
            lambda a, m: op.linear_fp8(*a, None, torch.bfloat16),
            lambda a, m: op.linear_fp8_residual(*a, *m),
            lambda a, m: op.linear_fp8_raw(*a[:2], torch.bfloat16),
            lambda a, m: swiglu.linear_fp8_swiglu(*a, 4, 20, 16, torch.float16),
        ]
        mode = FakeTensorMode()
        fake, fake_more = ([mode.from_tensor(t) for t in ts] for ts in (args, more))
        for call in calls:
            real = call(args, more)
            with mode:
                made = call(fake, fake_more)
            pair = (t if isinstance(t, tuple) else (t,) for t in (real, made))
            for r, f in zip(*pair, strict=True):
                assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)

    def test_compiled_chain(self):
        compare_chain("cpu")

    def test_shared_memory_of_wide_results(self):
        """227 KB: stages of (bm + bn) * bk bytes, and the tile of the result."""
        assert kernel.fitted(kernel.WIDE, 2) == kernel.WIDE
        assert kernel.fitted(STREAM, 2) == STREAM
        assert kernel.fitted(kernel.WIDE, 4) == Config(halves=True)
        assert kernel.fitted(STREAM, 4) == Config(stages=3, halves=True, stream=True)
        assert kernel.fitted(Config(stages=4), 2, halves=True) == Config(stages=4)

    def test_errors(self):
        x, w, xs, ws = make(5, 48, 16)
        with pytest.raises(ValueError, match="x and w must be"):
            op.linear_fp8(x.float(), w, xs, ws, None, torch.bfloat16)
        with pytest.raises(ValueError, match="w_scale has 47 elements; 1 or 48 needed"):
            op.linear_fp8(x, w, xs, ws[1:], None, torch.bfloat16)
        with pytest.raises(ValueError, match="overlap"):
            swiglu.linear_fp8_swiglu(x, w, xs, ws, 4, 19, 16, torch.bfloat16)
        with pytest.raises(ValueError, match="not all among the 48"):
            swiglu.linear_fp8_swiglu(x, w, xs, ws, 4, 33, 16, torch.bfloat16)
        with pytest.raises(ValueError, match="specialize takes 4 warps"):
            Config(specialize=True)
        with pytest.raises(ValueError, match="bn = 96 must be a power of two"):
            Config(bn=96)


GPU_CONFIGS = [
    kernel.WIDE,
    kernel.SMALL,
    STREAM,
    PROMOTED,
    Config(stages=4, halves=True, flatten=True),
    Config(bn=128, warps=4, stages=3, ctas=2, halves=True),
]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRET, reason="needs compiled kernels")
class TestGPU:
    @pytest.fixture(autouse=True)
    def _hopper(self):
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("needs a Hopper GPU")
        pytest.importorskip("triton")

    # Few variants for each configuration: Triton compiles each for more than a second.
    @pytest.mark.parametrize("config", GPU_CONFIGS)
    def test_linear(self, config, poisoned):
        args = make(300, 4104, 1040, device="cuda")
        y = op.run("triton", *args, None, torch.bfloat16, config)
        close(y, exact(*args), slack(*args), torch.bfloat16)

    def test_odd_sizes_dtypes_and_bias(self, poisoned):
        shapes = [(37, 104, 160), (757, 1001, 208), (1, 16, 16)]
        for shape, dtype in zip(shapes, DTYPES, strict=True):
            args = make(*shape, device="cuda")
            y = op.linear_fp8(*args, None, dtype)
            close(y, exact(*args), slack(*args), dtype)
        args = make(37, 104, 160, rows=False, device="cuda")
        bias = torch.randn(104, device="cuda")
        y = op.linear_fp8(*args, bias, torch.bfloat16)
        close(y, exact(*args, bias), slack(*args) + bias.abs() * 2**-22, torch.bfloat16)

    @pytest.mark.parametrize("config", [kernel.WIDE, STREAM, GPU_CONFIGS[-1]])
    def test_residual(self, config, poisoned):
        args = make(757, 1000, 208, device="cuda")
        gate = torch.randn(1000, device="cuda")
        residual = torch.randn(757, 1000, device="cuda").bfloat16()
        out = op.run_residual("triton", *args, gate, residual, config)
        want = residual.double() + gate.double() * exact(*args)
        size = slack(*args) * gate.abs() + residual.abs() * 2**-22
        close(out, want, size, torch.bfloat16)

    @pytest.mark.parametrize(
        ("N", "act", "up", "width"),
        [(2816, 768, 1792, 1024), (1500, 920, 70, 580), (1001, 3, 500, 401), (512, 0, 256, 256)],
    )
    def test_swiglu(self, N, act, up, width, poisoned):
        args = make(757, N, 208, device="cuda")
        for dtype in (torch.bfloat16, torch.float32)[: 1 + (N == 2816)]:
            out = swiglu.run("triton", *args, act, up, width, dtype)
            check_swiglu(args, act, up, width, dtype, out)

    @pytest.mark.parametrize("config", [PROMOTED, *GPU_CONFIGS[-2:]])
    def test_swiglu_configs(self, config, poisoned):
        args = make(757, 2816, 208, device="cuda")
        out = swiglu.run("triton", *args, 768, 1792, 1024, torch.bfloat16, config)
        check_swiglu(args, 768, 1792, 1024, torch.bfloat16, out)

    @pytest.mark.parametrize("rows", [True, False])
    def test_cublas(self, rows):
        args = make(757, 1008, 208, rows=rows, device="cuda")
        y = op.run("cublas", *args, None, torch.bfloat16)
        close(y, exact(*args), slack(*args), torch.bfloat16)

    def test_raw(self, poisoned):
        """Also captured before any eager call has made the one that it scales with."""
        one = torch.ones(1, device="cuda")
        for shape in [(757, 7680, 38400), (757, 1008, 2080), (37, 101, 160)]:
            x, w, _, _ = make(*shape, device="cuda")
            want, room = exact(x, w, one, one), slack(x, w, one, one)
            for dtype in (torch.bfloat16, torch.float32):
                close(op.linear_fp8_raw(x, w, dtype), want, room, dtype)
            op._ONES.clear()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = op.linear_fp8_raw(x, w, torch.bfloat16)
            assert not op._ONES
            y.fill_(float("nan"))
            graph.replay()
            close(y, want, room, torch.bfloat16)

    @pytest.mark.parametrize("rows", [True, False])
    @pytest.mark.parametrize(("N", "K"), [(42240, 7680), (7680, 38400), (7680, 19200)])
    def test_real_shapes(self, N, K, rows, poisoned):
        args = make(757, N, K, rows=rows, device="cuda")
        y, want = op.linear_fp8(*args, None, torch.bfloat16), exact(*args)
        close(y, want, slack(*args), torch.bfloat16)
        close_norm(y, want, K)

    def test_real_residual_and_swiglu(self, poisoned):
        args = make(757, 7680, 38400, device="cuda")
        gate, residual = torch.randn(7680, device="cuda"), torch.randn(757, 7680, device="cuda")
        for config in (kernel.WIDE, STREAM):
            out = op.run_residual("triton", *args, gate, residual.bfloat16(), config)
            want = residual.bfloat16().double() + gate.double() * exact(*args)
            size = slack(*args) * gate.abs() + residual.abs() * 2**-22
            close(out, want, size, torch.bfloat16)
        del args
        args = make(757, 42240, 7680, device="cuda")
        out = swiglu.linear_fp8_swiglu(*args, 11520, 26880, 15360, torch.bfloat16)
        check_swiglu(args, 11520, 26880, 15360, torch.bfloat16, out)

    def test_compiled_chain(self):
        compare_chain("cuda", M=757, d=256)

    def test_stream_adds_in_a_fixed_order(self):
        args = make(757, 7680, 7680, device="cuda")
        want = op.run("triton", *args, None, torch.float32, STREAM)
        close(want, exact(*args), slack(*args), torch.float32)
        for _ in range(100):
            assert torch.equal(op.run("triton", *args, None, torch.float32, STREAM), want)

    def test_graph_replays(self):
        """Inputs change between replays; the outputs are poisoned; replays equal eager calls."""
        args = make(757, 2816, 2048, device="cuda")
        gate = torch.randn(2816, device="cuda")
        residual = torch.randn(757, 2816, device="cuda").bfloat16()
        calls = [
            lambda: op.linear_fp8(*args, None, torch.bfloat16),
            lambda: op.run("triton", *args, None, torch.bfloat16, STREAM),
            lambda: op.run_residual("triton", *args, gate, residual, STREAM),
            lambda: swiglu.linear_fp8_swiglu(*args, 768, 1792, 1024, torch.bfloat16)[1],
            lambda: swiglu.linear_fp8_swiglu(*args, 768, 1792, 1024, torch.bfloat16)[2],
        ]
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [call() for call in calls]
        for seed in range(20):
            x, _, xs, _ = make(757, 16, 2048, device="cuda", seed=seed)
            args[0].copy_(x)
            args[2].copy_(xs)
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            for out, call in zip(outs, calls, strict=True):
                assert torch.equal(out, call())

    def test_accumulation_at_k_38400(self, capsys):
        """Fast accumulation, promotion each 128 and cut sums; run with -s to read the errors."""
        args = make(757, 256, 38400, device="cuda")
        want = exact(*args)
        configs = {"fast": kernel.NARROW, "promoted": PROMOTED, "stream": STREAM}
        results = {"cublas": op.run("cublas", *args)}
        for name, config in configs.items():
            results[name] = op.run("triton", *args, None, torch.float32, config)
        error = {}
        for name, y in results.items():
            d = y.double() - want
            error[name] = (d.norm() / want.norm()).item()
            with capsys.disabled():
                print(f"\n{name:14} K=38400: off by {error[name]:.2e} of the norm", end="")
        rounded = (want.bfloat16().double() - want).norm() / want.norm()
        with capsys.disabled():
            print(f"\n{'bf16 rounding':14} {rounded.item():.2e}")
        assert error["promoted"] < 2e-3
        assert error["promoted"] <= error["fast"]
        assert error["stream"] <= 1.1 * error["fast"]
        assert error["fast"] < 0.15
        assert error["cublas"] < 0.15


@pytest.mark.skipif(INTERPRET, reason="is the inner run")
@pytest.mark.skipif(kernel.triton is None, reason="needs triton")
def test_in_the_interpreter():
    cmd = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    cmd += ["-k", "TestKernels"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(cmd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout, done.stdout[-3000:]
