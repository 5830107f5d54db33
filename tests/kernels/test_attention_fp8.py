"""``rtc::attention_fp8`` against float64, on the CPU, in Triton's interpreter and on a GPU.

Errors are norms relative to the norm of the float64 result. P rounded to e4m3 errs by 2.5e-2 rms
(half a step of 1/8, uniform, over 1.44) and random v average signal and error alike, so a kernel
that rounds P is granted 4e-2; one that does not, what its output dtype costs.
"""

import importlib.util
import math
import os
import subprocess
import sys
import warnings

import pytest
import torch

from rtc.kernels import attention_fp8 as A

HAVE_TRITON = importlib.util.find_spec("triton") is not None
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
ROUNDED_P = 4e-2
DTYPE_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def fp8(*shape, device="cpu"):
    return torch.randn(*shape, device=device).to(A.FP8)


def transposed(v):
    """The same values with the slots at stride 1, the rows 16 bytes apart as tensor maps want."""
    b, g, s, e = v.shape
    storage = v.new_zeros(b, g, e, s + -s % 16)
    storage[..., :s] = v.transpose(2, 3)
    return storage[..., :s].transpose(2, 3)


def inputs(b, h, g, t, s, d, e=None, device="cpu", v_transposed=False, heads_first=False):
    """q, k, v as views of slots-major storages, with every scale different from every other."""
    e = e or d
    if heads_first:
        q, k, v = fp8(b, h, t, d), fp8(b, g, s, d), fp8(b, g, s, e)
    else:
        q, k, v = (fp8(b, n, m, w).transpose(1, 2) for n, m, w in ((t, h, d), (s, g, d), (s, g, e)))
    q, k, v = q.to(device), k.to(device), v.to(device)
    scales = [
        torch.linspace(lo, hi, b * n, device=device).reshape(b, n)
        for lo, hi, n in ((0.5, 1.5, h), (1.2, 0.7, g), (0.3, 2.0, g))
    ]
    return [q, k, transposed(v) if v_transposed else v, *scales]


def expected(*args):
    q, k, v, qs, ks, vs, scale = args
    repeat = q.shape[1] // k.shape[1]
    q = q.double() * qs.double()[..., None, None]
    k = (k.double() * ks.double()[..., None, None]).repeat_interleave(repeat, 1)
    v = (v.double() * vs.double()[..., None, None]).repeat_interleave(repeat, 1)
    return torch.softmax(q @ k.transpose(-1, -2) * scale, -1) @ v


def error(out, want):
    return ((out.double() - want).norm() / want.norm()).item()


def poisoned(b, h, t, e, dtype, device="cpu"):
    return torch.full((b, t, h, e), math.nan, dtype=dtype, device=device).transpose(1, 2)


@pytest.mark.parametrize("dtype", A.OUT_DTYPES)
@pytest.mark.parametrize("v_transposed", [False, True])
def test_reference(dtype, v_transposed):
    x = inputs(2, 4, 2, 37, 75, 64, 128, v_transposed=v_transposed)
    out = torch.ops.rtc.attention_fp8(*x, 0.125, dtype)
    assert out.dtype is dtype
    assert error(out, expected(*x, 0.125)) < DTYPE_ERROR[dtype]


@pytest.mark.parametrize("dtype", A.OUT_DTYPES)
def test_layout_is_tokens_major(dtype):
    x = inputs(2, 4, 2, 5, 9, 64, 128)
    out = torch.ops.rtc.attention_fp8(*x, 0.125, dtype)
    assert out.transpose(1, 2).is_contiguous()
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.rtc.attention_fp8(*map(mode.from_tensor, x), 0.125, dtype)
    assert (fake.shape, fake.stride(), fake.dtype) == (out.shape, out.stride(), out.dtype)


def test_opcheck():
    x = inputs(1, 4, 2, 5, 9, 64)
    before = [y.clone() for y in x]
    # Not test_schema: it compares inputs with allclose, which torch lacks for FP8.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    args = (*x, 0.125, torch.bfloat16)
    torch.library.opcheck(torch.ops.rtc.attention_fp8.default, args, test_utils=checks)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(before, x, strict=True)
    )


@pytest.mark.parametrize("which", [3, 4, 5])
def test_every_head_has_its_own_scales(which):
    x = inputs(1, 4, 2, 7, 20, 64)
    before = torch.ops.rtc.attention_fp8(*x, 0.125, torch.float32)
    x[which] = x[which].clone()
    x[which][0, 1] *= 3
    after = torch.ops.rtc.attention_fp8(*x, 0.125, torch.float32)
    changed = [not torch.equal(before[0, h], after[0, h]) for h in range(4)]
    assert changed == ([False, True, False, False] if which == 3 else [False, False, True, True])


def test_chained_under_compile():
    def f(q, k, v, qs, ks, vs):
        y = torch.ops.rtc.attention_fp8(q, k, v, qs, ks, vs, 0.125, torch.bfloat16)
        y = y.transpose(1, 2).flatten(2).unflatten(2, (4, 64)).transpose(1, 2)
        again = (y * 2).to(A.FP8)
        return torch.ops.rtc.attention_fp8(again, k, v, qs, ks, vs, 0.25, torch.float32).flatten(2)

    x = inputs(1, 4, 2, 13, 21, 64)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*x), f(*x))


def test_errors():
    q, k, v, *scales = inputs(1, 4, 2, 5, 9, 64)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        A.run("sdpa", q.float(), k, v, *scales, 1.0, torch.bfloat16)
    with pytest.raises(ValueError, match="multiple"):
        A.run("sdpa", q[:, :3], k, v, *scales, 1.0, torch.bfloat16)
    with pytest.raises(ValueError, match=r"q_scale is float32 \[1, 4\]"):
        A.run("sdpa", q, k, v, scales[1], *scales[1:], 1.0, torch.bfloat16)
    with pytest.raises(ValueError, match="out_dtype"):
        A.run("sdpa", q, k, v, *scales, 1.0, torch.float64)
    with pytest.raises(ValueError, match="'fa3': needs an NVIDIA GPU"):
        A.run("fa3", q, k, v, *scales, 1.0, torch.bfloat16)


def test_fa3_refuses():
    q, k, v, *_ = inputs(1, 4, 4, 5, 16, 64)
    bf16 = torch.bfloat16
    assert A._fa3_takes(q, k, v, bf16) is None
    assert "bfloat16" in A._fa3_takes(q, k, v, torch.float16)
    assert "H == G" in A._fa3_takes(q, k[:, :2], v[:, :2], bf16)
    assert "stride 1" in A._fa3_takes(q, k, transposed(v), bf16)
    assert "head sizes" in A._fa3_takes(q, k, v[..., :32], bf16)
    odd = fp8(1, 16, 264)[..., :256].unflatten(2, (4, 64)).transpose(1, 2)
    assert "16 bytes" in A._fa3_takes(q, odd, v, bf16)
    assert A.backends("cpu")["sdpa"] is None
    assert A.backends("cpu")["fa3"] == "needs an NVIDIA GPU"


def test_missing_fa3_is_said_once(monkeypatch):
    monkeypatch.setattr(A, "_arch", lambda device: "sm_90")
    monkeypatch.setattr(A, "_load_fa3", lambda: "not installed")
    A._warn_without_fa3.cache_clear()
    q, k, v, *_ = (x.to("meta") for x in inputs(1, 4, 4, 5, 16, 64))
    with pytest.warns(UserWarning, match=r"pip install fa3-fwd.*'sdpa'"):
        assert A._choose(q, k, v, torch.bfloat16).backend == "sdpa"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        A._choose(q, k, v, torch.bfloat16)
        A._warn_without_fa3.cache_clear()
        A._choose(q, k[:, :2], v[:, :2], torch.bfloat16)  # fa3 would have refused: nothing to say


# ---- Triton -----------------------------------------------------------------------------------


def powers_of_two(b, h, g, t, s, d, v_transposed=False):
    """Scores are integers from -6 to 0 in base 2, so every p is exact in FP8."""
    q, k = torch.zeros(b, h, t, d), torch.zeros(b, g, s, d)
    q.scatter_(3, torch.randint(0, d, (b, h, t, 1)), 1.0)
    k -= torch.randint(0, 7, k.shape)
    v = fp8(b, g, s, d)
    ones = [torch.ones(b, n) for n in (h, g)]
    v_scale = torch.linspace(0.5, 2, b * g).reshape(b, g)
    v = transposed(v) if v_transposed else v
    return [q.to(A.FP8), k.to(A.FP8), v, *ones, v_scale], math.log(2)


def kernel_and_configs():
    from rtc.kernels import attention_fp8_triton as K

    return K, {
        "plain": K.Config(16, 32, tma=False, permute=False),
        "permute": K.Config(16, 32, tma=False),
        "tma": K.Config(16, 32, permute=False),
        "tma permute": K.Config(16, 64),
        "f16": K.Config(16, 32, pv="f16"),
        "split": K.Config(16, 32, split=1),
        "split small": K.Config(16, 32, split=3),
    }


CONFIGS = ["plain", "permute", "tma", "tma permute", "f16", "split", "split small"]


@pytest.mark.skipif(not HAVE_TRITON or INTERPRET, reason="needs triton; runs the class below")
def test_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    cmd = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    cmd.append(f"{__file__}::TestInterpreted")
    done = subprocess.run(cmd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.skipif(not HAVE_TRITON or not INTERPRET, reason="run by test_interpreter")
class TestInterpreted:
    @pytest.fixture(autouse=True)
    def _loop_bounds(self, monkeypatch):
        """Triton 3.6's interpreter calls int() on arrays of one element: numpy 2.4 refuses."""
        from triton.runtime import interpreter

        patch = interpreter._patch_lang_tensor

        def patched(tensor, scope):
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)

    @pytest.mark.parametrize("config", CONFIGS)
    @pytest.mark.parametrize("v_transposed", [False, True])
    def test_exact_p(self, config, v_transposed):
        kernel, configs = kernel_and_configs()
        # 5 whole tiles of 32 keys and 11 keys; split small: shares of 3 tiles, pieces of 1, 2, 3.
        x, scale = powers_of_two(1, 2, 1, 21, 171, 64, v_transposed)
        out = poisoned(1, 2, 21, 64, torch.float32)
        kernel.launch(out, *x, scale, configs[config])
        assert error(out, expected(*x, scale)) < 1e-5

    @pytest.mark.parametrize(
        ("shape", "kw"),
        [
            ((1, 4, 2, 37, 75, 64, 128), {}),
            ((2, 2, 2, 5, 64, 64), {"v_transposed": True}),
            ((2, 2, 1, 17, 20, 64), {"heads_first": True}),
            ((1, 2, 2, 16, 128, 128, 64), {"heads_first": True, "v_transposed": True}),
        ],
    )
    def test_random(self, shape, kw):
        kernel, configs = kernel_and_configs()
        x = inputs(*shape, **kw)
        want = expected(*x, 0.125)
        b, h, _, t, _, d, *rest = shape
        # The interpreter rounds to FP8 wrongly where the mantissa overflows: 0.12 instead of 4e-2.
        for config, limit in (("f16", 1e-3), ("tma permute", 0.12), ("split", 0.12)):
            out = poisoned(b, h, t, rest[0] if rest else d, torch.float32)
            kernel.launch(out, *x, 0.125, configs[config])
            assert error(out, want) < limit, config

    @pytest.mark.parametrize("config", ["tma permute", "split small"])
    @pytest.mark.parametrize("scale", [0.0, math.log(2)])
    def test_keys_that_do_not_exist_do_not_count(self, config, scale):
        """Scores far below those of a key of zeros; and a scale at which all keys count alike."""
        kernel, configs = kernel_and_configs()
        x, _ = powers_of_two(1, 2, 1, 21, 171, 64)
        x[0] = torch.full_like(x[0].float(), 4.0).to(A.FP8)
        out = poisoned(1, 2, 21, 64, torch.float32)
        kernel.launch(out, *x, scale, configs[config])
        assert error(out, expected(*x, scale)) < 1e-5

    def test_run(self):
        x = inputs(1, 2, 2, 5, 33, 64)
        out = A.run("triton", *x, 0.125, torch.bfloat16)
        assert error(out, expected(*x, 0.125)) < 0.12
        assert out.transpose(1, 2).is_contiguous()


# ---- GPU --------------------------------------------------------------------------------------


def replayed(call, out, times=3):
    """``call`` captured in a CUDA graph; the output is poisoned before every replay."""
    call()  # compiles, loads
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    for _ in range(times):
        out.fill_(math.nan)
        graph.replay()
    torch.cuda.synchronize()
    return out


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("v_transposed", [False, True])
    @pytest.mark.parametrize(
        "shape",
        [
            (1, 2, 2, 37, 75, 64),
            (2, 4, 2, 129, 300, 128),
            (2, 3, 3, 65, 1025, 128),
            (1, 1, 1, 1, 1, 64),
            (1, 3, 3, 757, 489 + 757, 128),
            (1, 4, 4, 757, 5788, 128),
        ],
    )
    @pytest.mark.parametrize("backend", ["fa3", "triton", "sdpa"])
    def test_backend(self, backend, shape, v_transposed):
        x = inputs(*shape, device="cuda", v_transposed=v_transposed)
        reason = A._refusal(backend, x[0], x[1], x[2], torch.bfloat16)
        if reason is not None:
            pytest.skip(reason)
        b, h, _, t, _, d = shape
        scale = d**-0.5
        out = poisoned(b, h, t, d, torch.bfloat16, "cuda")
        replayed(lambda: A.run(backend, *x, scale, torch.bfloat16, out=out), out)
        limit = DTYPE_ERROR[torch.bfloat16] if backend == "sdpa" else ROUNDED_P
        assert error(out, expected(*x, scale)) < limit

    @pytest.mark.parametrize("splits", [2, 3])
    def test_fa3_splits(self, splits):
        x = inputs(1, 3, 3, 150, 1025, 128, device="cuda")
        reason = A._refusal("fa3", x[0], x[1], x[2], torch.bfloat16)
        if reason is not None:
            pytest.skip(reason)
        out = poisoned(1, 3, 150, 128, torch.bfloat16, "cuda")
        args = (*x, 128**-0.5, torch.bfloat16)
        replayed(lambda: A.run("fa3", *args, num_splits=splits, out=out), out)
        assert error(out, expected(*x, 128**-0.5)) < ROUNDED_P

    @pytest.mark.parametrize(
        ("v_transposed", "heads_first"), [(False, False), (True, False), (True, True)]
    )
    @pytest.mark.parametrize(
        "change",
        [
            {},
            {"permute": False},
            {"tma": False},
            {"tma": False, "permute": False},
            {"poly": True},
            {"num_stages": 2, "maxnreg": 168},
            {"block_n": 64},
            {"block_m": 128, "num_warps": 8},
            {"pv": "f16"},
            {"split": 2},
            {"split": 3, "block_n": 64, "tma": False},
            {"split": 1, "block_m": 128, "num_warps": 8},
        ],
        ids=str,
    )
    def test_triton_config(self, change, v_transposed, heads_first):
        if A.backends("cuda")["triton"] is not None:
            pytest.skip(A.backends("cuda")["triton"])
        K, _ = kernel_and_configs()
        x = inputs(
            2,
            4,
            2,
            150,
            700,
            128,
            device="cuda",
            v_transposed=v_transposed,
            heads_first=heads_first,
        )
        out = poisoned(2, 4, 150, 128, torch.bfloat16, "cuda")
        cfg = K.Config(**change)
        replayed(lambda: K.launch(out, *x, 0.088, cfg), out)
        limit = DTYPE_ERROR[torch.bfloat16] if cfg.pv == "f16" else ROUNDED_P
        assert error(out, expected(*x, 0.088)) < limit
        # Powers of two make P exact: an order of keys that is wrong anywhere shows at full scale.
        x, scale = powers_of_two(1, 2, 1, 150, 700, 128, v_transposed)
        x = [y.cuda() if y is not x[2] or not v_transposed else transposed(y.cuda()) for y in x]
        out = poisoned(1, 2, 150, 128, torch.float32, "cuda")
        replayed(lambda: K.launch(out, *x, scale, cfg), out)
        assert error(out, expected(*x, scale)) < 3e-3  # poly: 6e-4; FP8 accumulation: 14 bits

    def test_op_in_a_graph(self):
        x = inputs(1, 4, 4, 150, 700, 128, device="cuda")
        static = torch.ops.rtc.attention_fp8(*x, 0.088, torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = torch.ops.rtc.attention_fp8(*x, 0.088, torch.bfloat16)
        x[0].view(torch.uint8).copy_(fp8(1, 4, 150, 128, device="cuda").view(torch.uint8))
        x[3].mul_(0.5)
        static.fill_(math.nan)
        graph.replay()
        assert error(static, expected(*x, 0.088)) < ROUNDED_P
