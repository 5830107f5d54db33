"""``rtc::attention_fp8``: attention over FP8 queries, keys and values, with scales per head.

    out[b, h, t] = softmax_s(softmax_scale * qs ks * q[b, h, t] . k[b, g, s]) v[b, g, s] * vs
    qs = q_scale[b, h], ks = k_scale[b, g], vs = v_scale[b, g], g = h // (H // G)

Shapes: q [B, H, T, D], k [B, G, S, D], v [B, G, S, E], H a multiple of G; q_scale [B, H],
k_scale and v_scale [B, G]; out [B, H, T, E]. Dtypes: q, k, v float8_e4m3fn; scales float32, not
negative (real value = FP8 value * scale); out bfloat16, float16 or float32.
Layout: q, k, v are read where they lie, with any strides that keep the last axis at stride 1 (v may
have its slots at stride 1 instead: stored transposed); nothing of k and v is copied by the kernels.
out lies in memory as a contiguous [B, T, H, E], so that ``transpose(1, 2).flatten(2)`` is a view.
Bytes: k and v once, S G (D + E) a batch: 89 MB at S = 5,788, G = 60, D = E = 128; FLOP: 4 T S D H.
Numerics: P is rounded to FP8 before the second product: 2.5e-2 of the norm where v is random.

Backends: ``fa3`` (FlashAttention-3, PyPI fa3-fwd: Hopper, one query scale a key head, bfloat16 out,
slots-major v), ``triton`` (attention_fp8_triton.py) and ``sdpa`` (any device; dequantizes first).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F

__all__ = ["attention_fp8", "backends", "run"]

FP8 = torch.float8_e4m3fn
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Choice:
    """A backend for one shape. ``num_splits``: into how many runs of slots fa3 cuts the keys."""

    backend: str
    num_splits: int = 1

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS or self.num_splits < 1:
            raise ValueError(f"no such choice: {self}")


# ---- sdpa: the reference ----------------------------------------------------------------------


def _sdpa(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    softmax_scale: float,
    choice: Choice,
) -> None:
    """The formula in plain torch. Scales meet q and out only, so k and v stay exact in bfloat16."""
    dtype = torch.bfloat16 if out.dtype is torch.bfloat16 else torch.float32
    repeat = q.shape[1] // k.shape[1]
    qk_scale = q_scale * k_scale.repeat_interleave(repeat, 1)
    y = F.scaled_dot_product_attention(
        (q.float() * qk_scale[:, :, None, None]).to(dtype),
        k.to(dtype),
        v.to(dtype),
        scale=softmax_scale,
        enable_gqa=repeat > 1,
    )
    out.copy_(y.float() * v_scale.repeat_interleave(repeat, 1)[:, :, None, None])


def _sdpa_on(device: torch.device) -> str | None:
    return None


def _sdpa_takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.dtype) -> str | None:
    return None


# ---- fa3: FlashAttention-3 of PyPI's fa3-fwd --------------------------------------------------


@functools.cache
def _load_fa3() -> str | None:
    """Import the library, which registers its operator. A reason, or None."""
    if importlib.util.find_spec("fa3_fwd_interface") is None:
        return "not installed (pip install fa3-fwd)"
    try:
        importlib.import_module("fa3_fwd_interface")
        torch.ops.fa3_fwd.fwd  # noqa: B018
    except Exception as error:  # a binary of another CUDA or torch fails in many ways
        return f"installed, but does not load: {type(error).__name__}: {error}"
    return None


@functools.cache
def _fa3_on(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.cuda is None:
        return "needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "needs compute capability 9.x (Hopper)"
    return _load_fa3()


def _fa3_takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.dtype) -> str | None:
    if q.shape[1] != k.shape[1]:
        return "one query scale a key head: needs H == G"
    if out is not torch.bfloat16:
        return f"writes bfloat16, not {out}"
    if q.shape[-1] not in (64, 128) or v.shape[-1] != q.shape[-1]:
        return "head sizes are 64 or 128, the same for keys and values"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(-1) != 1:
            return f"{name} needs a last axis of stride 1"
        pitches = [st for n, st in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
        if x.data_ptr() % 16 or any(st % 16 for st in pitches):
            return f"{name} must start and step by multiples of 16 bytes"
    return None


def _fa3(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    softmax_scale: float,
    choice: Choice,
) -> None:
    torch.ops.fa3_fwd.fwd(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        out=out.transpose(1, 2),
        q_descale=q_scale,
        k_descale=k_scale,
        v_descale=v_scale,
        softmax_scale=softmax_scale,
        num_splits=choice.num_splits,
    )


# ---- triton: our kernel -----------------------------------------------------------------------


def _kernel() -> ModuleType:
    """Imported late: triton is optional."""
    from rtc.kernels import attention_fp8_triton

    return attention_fp8_triton


@functools.cache
def _triton_on(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "not installed (pip install triton)"
    if device.type == "cuda":
        if torch.version.cuda is None:
            return "needs an NVIDIA GPU"
        if torch.cuda.get_device_capability(device) < (8, 9):
            return "needs compute capability 8.9 (FP8 tensor cores)"
    elif device.type != "cpu":
        return "needs an NVIDIA GPU"
    else:
        return _kernel().interpreted()
    return None


def _triton_takes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.dtype
) -> str | None:
    return _kernel().refuse(q, k, v)


def _triton(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    softmax_scale: float,
    choice: Choice,
) -> None:
    kernel = _kernel()
    (_, h, t, d), s = q.shape, k.shape[2]
    cfg = kernel.config_for(_arch(q.device), h, t, s, d, kernel.v_is_transposed(v))
    kernel.launch(out, q, k, v, q_scale, k_scale, v_scale, softmax_scale, cfg)


# ---- which one --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backend:
    """``on``: why not on this device; ``takes``: why not these tensors; ``call``: write ``out``."""

    on: Callable[[torch.device], str | None]
    takes: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], str | None]
    call: Callable[..., None]


# In the order in which shapes outside the table try them.
BACKENDS = {
    "fa3": Backend(_fa3_on, _fa3_takes, _fa3),
    "triton": Backend(_triton_on, _triton_takes, _triton),
    "sdpa": Backend(_sdpa_on, _sdpa_takes, _sdpa),
}

# Key: (arch, H, G, T, S, D). The fastest backend that was measured (bench/bench_attention.py).
_TABLE: dict[tuple[str, int, int, int, int, int], Choice] = {
    ("sm_90", 60, 60, 757, 5788, 128): Choice("fa3", num_splits=1),
    ("sm_90", 30, 30, 757, 5788, 128): Choice("fa3", num_splits=1),
    ("sm_90", 20, 20, 757, 5788, 128): Choice("fa3", num_splits=1),
}


@functools.cache
def _arch(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def backends(device: torch.device | str) -> dict[str, str | None]:
    """Every backend, with the reason why it does not run on this device, or None."""
    device = torch.device(device)
    return {name: b.on(device) for name, b in BACKENDS.items()}


@functools.cache
def _warn_without_fa3(reason: str, used: str) -> None:
    warnings.warn(
        f"rtc::attention_fp8: FlashAttention-3 is {reason}; `pip install fa3-fwd` gives the faster"
        f" kernel on Hopper. Using {used!r} instead.",
        stacklevel=2,
    )


def _choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_dtype: torch.dtype) -> Choice:
    """The measured backend of this shape, else the first that takes the tensors."""
    (_, h, t, d), (_, g, s, _) = q.shape, k.shape
    tuned = _TABLE.get((_arch(q.device), h, g, t, s, d))
    order = [Choice(name) for name in BACKENDS]
    if q.device.type == "cpu":  # Triton's interpreter is for tests, through run()
        order = [Choice("sdpa")]
    for choice in [tuned, *order] if tuned else order:
        if _refusal(choice.backend, q, k, v, out_dtype) is None:
            break
    if choice.backend != "fa3" and _arch(q.device) == "sm_90":
        wanted = _fa3_takes(q, k, v, out_dtype) is None and (tuned or order[0]).backend == "fa3"
        if wanted and (reason := _load_fa3()) is not None:
            _warn_without_fa3(reason, choice.backend)
    return choice


def _refusal(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_dtype: torch.dtype
) -> str | None:
    backend = BACKENDS[name]
    return backend.on(q.device) or backend.takes(q, k, v, out_dtype)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out_dtype: torch.dtype,
) -> None:
    if any(x.dtype is not FP8 or x.dim() != 4 for x in (q, k, v)):
        raise ValueError("attention_fp8: q, k and v are float8_e4m3fn of four axes [B, H, T, D]")
    (b, h, _, d), (kb, g, s, kd) = q.shape, k.shape
    if kb != b or kd != d or h % g or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"attention_fp8: shapes do not fit: q {list(q.shape)}, k {list(k.shape)},"
            f" v {list(v.shape)}; H must be a multiple of k's heads"
        )
    if s == 0:
        raise ValueError("attention_fp8: there are no keys")
    for name, x, n in zip(("q_scale", "k_scale", "v_scale"), scales, (h, g, g), strict=True):
        if x.dtype is not torch.float32 or x.shape != (b, n):
            raise ValueError(
                f"attention_fp8: {name} is float32 [{b}, {n}], got {x.dtype} {list(x.shape)}"
            )
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"attention_fp8: out_dtype is one of {OUT_DTYPES}, got {out_dtype}")


def _empty(q: torch.Tensor, v: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    b, h, t, _ = q.shape
    return q.new_empty((b, t, h, v.shape[-1]), dtype=out_dtype).transpose(1, 2)


def run(
    backend: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    softmax_scale: float,
    out_dtype: torch.dtype,
    *,
    num_splits: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op with a backend of your choice, for tests and benches; ValueError where it refuses.

    ``out``: where to write, [B, H, T, E] over a contiguous [B, T, H, E].
    """
    _check(q, k, v, (q_scale, k_scale, v_scale), out_dtype)
    reason = _refusal(backend, q, k, v, out_dtype)
    if reason is not None:
        raise ValueError(f"attention_fp8: backend {backend!r}: {reason}")
    out = _empty(q, v, out_dtype) if out is None else out
    choice = Choice(backend, num_splits)
    BACKENDS[backend].call(out, q, k, v, q_scale, k_scale, v_scale, softmax_scale, choice)
    return out


@torch.library.custom_op("rtc::attention_fp8", mutates_args=())
def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    softmax_scale: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    _check(q, k, v, (q_scale, k_scale, v_scale), out_dtype)
    out = _empty(q, v, out_dtype)
    if out.numel():
        choice = _choose(q, k, v, out_dtype)
        call = BACKENDS[choice.backend].call
        call(out, q, k, v, q_scale, k_scale, v_scale, softmax_scale, choice)
    return out


@attention_fp8.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    softmax_scale: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    _check(q, k, v, (q_scale, k_scale, v_scale), out_dtype)
    return _empty(q, v, out_dtype)
