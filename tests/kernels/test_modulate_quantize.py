"""rtc::modulate_quantize and rtc::residual_modulate_quantize against float64.

Without a GPU the ops run their plain reference; `test_in_the_interpreter` runs this file once more
in a process where Triton interprets the kernel.
"""

import os
import subprocess
import sys

import pytest
import torch

from rtc.kernels import modulate_quantize as op

FP8 = torch.float8_e4m3fn
FLOOR = 1e-4
SIZES = [(5, 40), (1, 16), (3, 129), (2, 1)]
kernel = pytest.mark.skipif(
    not op.INTERPRET and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)
DEVICE = "cpu" if op.INTERPRET or not torch.cuda.is_available() else "cuda"


def make(M, C, dtype, *, residual=True, affine=True, device="cpu", pad=0, seed=0, raw=False):
    """Arguments of the residual op up to shift; rows `C + pad` apart.

    raw: an eighth, the delta's row scales, ten times apart, of a delta about 1e5 times as large.
    """
    g = torch.Generator(device).manual_seed(seed)

    def rand(*shape, mean=0.0):
        return (torch.randn(shape, generator=g, device=device) * 0.7 + mean).to(dtype)

    x = (rand(M, C + pad) * 3)[:, :C]
    delta = rand(M, C + pad, mean=0.3)[:, pad:] if residual else None
    gate = rand(1, C, mean=0.2) if residual else None
    weight = rand(C, mean=1.0) if affine else None
    bias = rand(C) if affine else None
    args = [x, delta, gate, weight, bias, rand(C, mean=1.0), rand(C)]
    if not raw:
        return args
    args[1] = delta.float().mul(1e5).to(torch.float32 if dtype == torch.float16 else dtype)
    args[2] = gate.float() * 1.01
    scales = torch.exp(torch.randn((M, 1), generator=g, device=device)) * 1e-5
    return [*args, scales]


def call(args, norm, eps=1e-6, floor=FLOOR):
    if args[1] is None:
        return (None, *op.modulate_quantize(args[0], *args[3:], norm, eps, floor))
    return op.residual_modulate_quantize(*args[:7], norm, eps, floor, *args[7:])


def exact(args, norm, eps=1e-6, floor=FLOOR):
    """x_new, y, s in float64, nothing rounded on the way."""
    args = [None if a is None else a.double() for a in args]
    x, delta, gate, weight, bias, scale, shift = args[:7]
    if len(args) > 7:
        delta = delta * args[7]
    if delta is not None:
        x = x + (delta if gate is None else gate * delta)
    mean = x.mean(-1, keepdim=True) if norm == "layer" else 0.0
    y = (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + eps).sqrt()
    y = (y * weight + bias) if weight is not None else y
    y = y * scale + shift
    return x, y, y.abs().amax(-1, keepdim=True).clamp(min=floor) / 448


def check(args, norm, out, ulps=2.0):
    """ulps: how far a result of x's dtype may be off, in half units of its last place."""
    x_new, q, s = out
    true_x, true_y, true_s = exact(args, norm)
    given = [*args[:7], norm, 1e-6, FLOOR, *args[7:]]
    _, ref_q, ref_s = op.reference(*given)
    # Without a residual nothing is rounded before y.
    unit = torch.finfo(args[0].dtype if x_new is not None else torch.float32).eps / 2
    assert q.dtype == FP8
    assert s.dtype == torch.float32
    assert s.shape == (q.shape[0], 1)
    assert q.is_contiguous()
    got, ref = q.double() * s.double(), ref_q.double() * ref_s.double()
    assert torch.isfinite(got).all()
    if x_new is not None:
        assert x_new.dtype == args[0].dtype
        # Below the normal numbers steps are equal, and a rounding is off by half of one: in f16
        # 2^-25, more than the rest allows where x and gate * delta nearly cancel.
        info = torch.finfo(args[0].dtype)
        room = 3e-7 * (args[0].double().abs() + true_x.abs())
        room += ulps * info.smallest_normal * info.eps / 2
        assert ((x_new.double() - true_x).abs() <= ulps * unit * true_x.abs() + room).all()
    # FP8's own error is 2^-4 of a value or half its smallest step; the rest is x_new's rounding.
    room = 4 * ulps * unit * true_y.abs().amax(-1, keepdim=True) + 1e-5
    assert ((got - true_y).abs() <= 2**-4 * true_y.abs() + 2**-10 * true_s + room).all()
    # (q * s) of a row has its largest value at 448 exactly, so single values swing by FP8 steps.
    assert (got - true_y).norm() <= 1.02 * (ref - true_y).norm() + room.max()
    torch.testing.assert_close(s.double(), true_s, rtol=4 * ulps * unit + 2e-6, atol=1e-7)


def loose(dtype):
    """The interpreter truncates in casts to bf16: errors of a whole unit, and biased."""
    return 4.0 if op.INTERPRET and dtype == torch.bfloat16 else 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("residual", [True, False])
def test_sizes(dtype, norm, residual):
    for M, C in SIZES:
        if C == 1 and norm == "layer":  # a row minus its mean is noise over eps
            continue
        args = make(M, C, dtype, residual=residual, affine=C != 16)
        check(args, norm, call(args, norm), loose(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_delta_without_its_scales(dtype, norm):
    """The gate in f32 whatever x is; every row of the delta has a scale of its own."""
    for M, C in SIZES[:3]:
        args = make(M, C, dtype, raw=True, pad=5)
        check(args, norm, call(args, norm), loose(dtype))
        args[2] = None
        check(args, norm, call(args, norm), loose(dtype))


def test_strided_rows_and_no_gate():
    args = make(4, 40, torch.float32, pad=9)
    args[2] = None
    assert args[0].stride() == (49, 1)
    check(args, "rms", call(args, "rms"))


def test_mixed_dtypes():
    args = make(4, 40, torch.bfloat16)
    args[5:] = [a.float() * 1.01 for a in args[5:]]
    args[1] = args[1].float() * 1.01
    check(args, "layer", call(args, "layer"), loose(torch.bfloat16))


def test_the_floor_holds_for_quiet_rows():
    args = make(3, 40, torch.float32, residual=False, affine=False)
    args[6] = torch.zeros_like(args[6])
    args[0][1] = 0.0  # normed, still zero
    _, q, s = call(args, "layer", floor=0.5)
    assert s[1].item() == pytest.approx(0.5 / 448)
    assert not q[1].float().any()
    assert s[0].item() > 0.5 / 448


@kernel
def test_every_output_is_written():
    args = make(5, 40, torch.float16, device=DEVICE)
    q = torch.full((5, 40), 0x7F, dtype=torch.uint8, device=DEVICE).view(FP8)
    x_new = torch.full((5, 40), float("nan"), dtype=torch.float16, device=DEVICE)
    s = torch.full((5, 1), float("nan"), device=DEVICE)
    op.launch(*args, norm="layer", eps=1e-6, floor=FLOOR, out=(x_new, q, s))
    check(args, "layer", (x_new, q, s))


@pytest.mark.parametrize(("residual", "raw"), [(True, False), (True, True), (False, False)])
def test_opcheck_and_fake_strides(residual, raw):
    args = make(4, 40, torch.float32, residual=residual, pad=8, raw=raw)
    tail = ("layer", 1e-6, FLOOR)
    if residual:
        torch.library.opcheck(op.residual_modulate_quantize, (*args[:7], *tail, *args[7:]))
    else:
        torch.library.opcheck(op.modulate_quantize, (args[0], *args[3:], *tail))
    with torch._subclasses.FakeTensorMode() as mode:
        fake = call([None if a is None else mode.from_tensor(a) for a in args], "layer")
    for a, b in zip(call(args, "layer"), fake, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_two_blocks_chained_under_compile():
    args = make(4, 40, torch.float32)

    def block(x):
        x, q, s = op.residual_modulate_quantize(x, *args[1:], "rms", 1e-6, FLOOR)
        x, q2, s2 = op.residual_modulate_quantize(x, *args[1:], "layer", 1e-6, FLOOR)
        return x, q.float() * s, q2.float() * s2

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(args[0]), block(args[0]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.ones(40)}, "x must be"),
        ({0: torch.ones(40, 4).t()}, "x must be"),
        ({1: torch.ones(4, 39)}, "delta must be"),
        ({5: torch.ones(39)}, "scale must be"),
        ({"norm": "batch"}, "norm must be"),
        ({"floor": 0.0}, "floor must be"),
        ({"delta_scale": torch.ones(40, 1)}, "delta_scale must be"),
        ({"delta_scale": torch.ones(4, 1).bfloat16()}, "delta_scale must be"),
    ],
)
def test_refuses(change, message):
    args = make(4, 40, torch.float32)
    change = dict(change)
    tail = [change.pop("norm", "rms"), 1e-6, change.pop("floor", FLOOR)]
    tail.append(change.pop("delta_scale", None))
    for i, value in change.items():
        args[i] = value
    with pytest.raises(ValueError, match=message):
        op.residual_modulate_quantize(*args, *tail)


def test_config_refuses_odd_warps():
    with pytest.raises(ValueError, match="power of two"):
        op.Config(warps=3)


@pytest.mark.skipif(op.INTERPRET, reason="is the inner run")
@pytest.mark.skipif(op.triton is None, reason="needs triton")
def test_in_the_interpreter():
    cmd = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    cmd += ["-m", "not gpu"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(cmd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("M", "C"), [(757, 7680), (5, 40), (3, 129), (7, 4096), (2, 10000)])
def test_gpu_sizes(M, C, dtype):
    for norm in ("layer", "rms"):
        for residual in (True, False):
            args = make(M, C, dtype, residual=residual, device="cuda")
            check(args, norm, call(args, norm))
        args = make(M, C, dtype, device="cuda", raw=True)
        check(args, norm, call(args, norm))


@pytest.mark.gpu
@pytest.mark.parametrize("raw", [True, False])
def test_gpu_warps_and_strides(raw):
    # More rows than programs, so that those that loop do loop.
    args = make(333, 7680, torch.bfloat16, device="cuda", pad=13, raw=raw)
    tail = {"delta_scale": args[7]} if raw else {}
    for config in ((4,), (8,), (16,), (16, 2, 1), (8, 1, 2), (16, 1, 1)):
        out = (torch.empty(333, 7680, dtype=torch.bfloat16, device="cuda"), *op._empty(args[0]))
        tail["config"] = op.Config(*config)
        op.launch(*args[:7], norm="layer", eps=1e-6, floor=FLOOR, out=out, **tail)
        check(args, "layer", out)


@pytest.mark.gpu
def test_gpu_replays_from_a_graph():
    args = make(64, 7680, torch.bfloat16, device="cuda")
    call(args, "rms")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(args, "rms")
    args[0].copy_(make(64, 7680, torch.bfloat16, device="cuda", seed=1)[0])
    graph.replay()
    check(args, "rms", out)
