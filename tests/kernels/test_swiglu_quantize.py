"""rtc::swiglu_quantize and rtc::quantize_rows against float64.

Without a GPU the ops run their plain reference; `test_in_the_interpreter` runs this file once more
in a process where Triton interprets the kernel.
"""

import os
import subprocess
import sys

import pytest
import torch

from rtc.kernels import swiglu_quantize as op

FP8 = torch.float8_e4m3fn
FLOOR = 1e-4
kernel = pytest.mark.skipif(
    not op.INTERPRET and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)
DEVICE = "cpu" if op.INTERPRET or not torch.cuda.is_available() else "cuda"


def make(M, widths, width, dtype, *, device="cpu", gap=0, seed=0):
    """(parts, act, up): column slices of one wide tensor, `gap` columns apart."""
    g = torch.Generator(device).manual_seed(seed)
    sizes = [*widths, *([width, width] if width else [])]
    wide = torch.randn(M, sum(sizes) + gap * len(sizes), generator=g, device=device) * 2
    wide *= torch.exp(torch.randn(M, 1, generator=g, device=device))  # rows of unlike sizes
    wide = wide.to(dtype)
    out, at = [], 0
    for n in sizes:
        out.append(wide[:, at : at + n])
        at += n + gap
    parts = out[: len(widths)]
    return (parts, out[-2], out[-1]) if width else (parts, None, None)


def call(parts, act, up, amax=None, floor=FLOOR):
    if act is None:
        return op.quantize_rows(parts, amax, floor)
    return op.swiglu_quantize(parts, act, up, amax, floor)


def exact(parts, act, up, floor=FLOOR):
    segments = [p.double() for p in parts]
    if act is not None:
        segments.append(act.double() / (1 + torch.exp(-act.double())) * up.double())
    row = torch.cat(segments, -1)
    return row, row.abs().amax(-1, keepdim=True).clamp(min=floor) / 448, segments[-1]


def check(args, out):
    (parts, act, up), (q, s) = args, out
    row, true_s, _ = exact(parts, act, up)
    assert q.dtype == FP8
    assert q.shape == row.shape
    assert q.is_contiguous()
    assert s.dtype == torch.float32
    assert s.shape == (q.shape[0], 1)
    got = q.double() * s.double()
    assert torch.isfinite(got).all()
    # The plain reference rounds silu and the product to their dtype, the kernel does not.
    unit = 2 * torch.finfo((act if act is not None else parts[0]).dtype).eps
    if act is None or op._has_kernel(q):
        unit = 2e-6
    torch.testing.assert_close(s.double(), true_s, rtol=unit + 3e-6, atol=0)
    room = (unit + 1e-6) * row.abs() + 2**-10 * true_s * 1.01
    assert ((got - row).abs() <= 2**-4 * row.abs() + room).all()
    # q is the nearest FP8 number to a value that is off by `unit`, so it is at most twice that
    # farther from the true one than the true one's own nearest. That is of the op's own scale: in
    # the grid of another one, every rounding falls elsewhere.
    nearest = (row / s.double()).clamp(-448, 448).to(FP8).double() * s.double()
    room = 2 * (unit + 1e-6) * row.abs() + 1e-30
    assert ((got - row).abs() <= (nearest - row).abs() + room).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("widths", [[], [24], [24, 7]])
@pytest.mark.parametrize("width", [40, 129])
def test_swiglu(dtype, widths, width):
    for M, gap in ((5, 0), (1, 3)):
        args = make(M, widths, width, dtype, gap=gap)
        check(args, call(*args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("widths", [[40], [24, 7], [1], [16, 16]])
def test_rows(dtype, widths):
    args = make(5, widths, 0, dtype, gap=3)
    check(args, call(*args))


@pytest.mark.parametrize("widths", [[], [24], [24, 7], [7, 24]])
@pytest.mark.parametrize("width", [0, 40])
def test_known_amax(widths, width):
    if not widths and not width:
        return
    args = make(5, widths, width, torch.float32)
    last = exact(*args)[2].abs().amax(-1, keepdim=True).float()
    check(args, call(*args, amax=last))
    # It is trusted: ten times of it in the second row is ten times the scale there.
    row, true_s, _ = exact(*args)
    last[1] = 10 * row[1].abs().max()
    q, s = call(*args, amax=last)
    assert s[1].item() == pytest.approx(10 * true_s[1].item(), rel=1e-5)
    torch.testing.assert_close(s[2:].double(), true_s[2:], rtol=1e-5, atol=0)
    # And values beyond it stand at the edge, not at NaN.
    q, s = call(*args, amax=last * 0.01)
    assert torch.isfinite(q.float()).all()
    assert q.float().abs().max() <= 448


@pytest.mark.parametrize("width", [0, 40])
def test_known_amax_leaves_the_other_parts_to_be_searched(width):
    for widths in ([24, 7], [7, 24], [24]):
        if len(widths) + bool(width) < 2:
            continue
        for largest in range(len(widths) - (not width)):
            parts, act, up = make(5, widths, width, torch.float32)
            parts[largest] = parts[largest] * 300
            args = (parts, act, up)
            last = exact(*args)[2].abs().amax(-1, keepdim=True).float()
            check(args, call(*args, amax=last))


def test_mixed_dtypes():
    parts, act, up = make(4, [24], 40, torch.bfloat16)
    args = ([parts[0].float()], act, up.float())
    check(args, call(*args))


def test_large_gates_neither_overflow_nor_vanish():
    parts, act, up = make(3, [8], 16, torch.float32)
    act = act.clone()
    act[:, 0], act[:, 1], act[:, 2] = 200.0, -200.0, -1e30
    check((parts, act, up), call(parts, act, up))


def test_the_floor_holds_for_rows_of_zeros():
    parts, act, up = (
        make(3, [8], 16, torch.float32)[0],
        torch.zeros(3, 16),
        torch.zeros(3, 16),
    )
    parts = [parts[0] * torch.tensor([[1.0], [0.0], [1.0]])]
    q, s = call(parts, act, up, floor=0.01)
    assert s[1].item() == pytest.approx(0.01 / 448)
    assert not q[1].float().any()
    assert (s[[0, 2]] > 0.01 / 448).all()


@kernel
@pytest.mark.parametrize("config", [op.Config(4), op.Config(1, 2, 1)])
def test_every_output_is_written(config):
    args = make(5, [24, 7], 40, torch.float32, device=DEVICE)
    q = torch.full((5, 71), 0x7F, dtype=torch.uint8, device=DEVICE).view(FP8)
    s = torch.full((5, 1), float("nan"), device=DEVICE)
    op.launch(*args, amax=None, floor=FLOOR, out=(q, s), config=config)
    check(args, (q, s))


@pytest.mark.parametrize("width", [0, 40])
def test_opcheck_and_fake_strides(width):
    parts, act, up = make(4, [24, 8], width, torch.float32, gap=4)
    if width:
        torch.library.opcheck(op.swiglu_quantize, (parts, act, up, None, FLOOR))
    else:
        torch.library.opcheck(op.quantize_rows, (parts, torch.ones(4, 1), FLOOR))
    with torch._subclasses.FakeTensorMode() as mode:
        f = [None if a is None else mode.from_tensor(a) for a in (act, up)]
        fake = call([mode.from_tensor(p) for p in parts], *f)
    for a, b in zip(call(parts, act, up), fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_chained_under_compile():
    weight = torch.randn(64, 104)

    def block(wide):
        q, s = op.swiglu_quantize([wide[:, :24]], wide[:, 24:64], wide[:, 64:], None, FLOOR)
        wide = (q.float() * s) @ weight
        q2, s2 = op.quantize_rows([wide[:, :40], wide[:, 40:]], None, FLOOR)
        return q.float() * s, q2.float() * s2

    wide = torch.randn(5, 104)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(wide), block(wide), strict=True):
        assert torch.equal(a, b)


def test_refuses():
    parts, act, up = make(4, [24], 40, torch.float32)
    for change, message in [
        ({"parts": [*parts, *parts, *parts]}, "at most two"),
        ({"up": up[:, :-1]}, "one shape"),
        ({"parts": [parts[0][:3]]}, "unit column stride"),
        ({"parts": [torch.ones(24, 4).t()]}, "unit column stride"),
        ({"amax": torch.ones(3, 1)}, "amax must be"),
        ({"floor": 0.0}, "floor must be"),
    ]:
        args = {"parts": parts, "act": act, "up": up, "amax": None, "floor": FLOOR} | change
        with pytest.raises(ValueError, match=message):
            op.swiglu_quantize(*args.values())
    with pytest.raises(ValueError, match="at most two"):
        op.quantize_rows([], None, FLOOR)
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("M", "widths", "width"),
    [
        (757, [7680], 30720),
        (757, [3840], 15360),
        (5, [24, 7], 40),
        (3, [], 129),
        (9, [2560], 10240),
    ],
)
def test_gpu_sizes(M, widths, width, dtype):
    args = make(M, widths, width, dtype, device="cuda")
    check(args, call(*args))
    rows = ([*widths, width][-2:], 0)
    args = make(M, *rows, dtype, device="cuda", gap=8)
    check(args, call(*args))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [(8, 1, 0), (16, 1, 0), (16, 2, 1), (32, 2, 1)])
def test_gpu_configs(config):
    args = make(200, [7680], 30720, torch.bfloat16, device="cuda")
    q = torch.full((200, 38400), 0x7F, dtype=torch.uint8, device="cuda").view(FP8)
    s = torch.full((200, 1), float("nan"), device="cuda")
    op.launch(*args, amax=None, floor=FLOOR, out=(q, s), config=op.Config(*config))
    check(args, (q, s))


@pytest.mark.gpu
def test_gpu_known_amax():
    args = make(757, [7680], 30720, torch.bfloat16, device="cuda")
    last = exact(*args)[2].abs().amax(-1, keepdim=True).float()
    check(args, call(*args, amax=last))
