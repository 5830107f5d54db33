"""``rtc::attention``: scaled dot product attention as one opaque node.

    out[b, h, t, :] = softmax(scale * q[b, h, t] . k[b, h', s] + mask) v[b, h', s]

Traced SDPA shows as a different op on every device, or decomposed. The compiler puts this op in its
place while it rewrites, so that passes see one node with named operands on every device, and lowers
it back to ``torch.nn.functional.scaled_dot_product_attention`` afterwards.

Shapes: q [B, H, T, D], k [B, G, S, D], v [B, G, S, E], out [B, H, T, E]; G = H, or divides H with
``enable_gqa``. Dtypes and masks: as torch's. In memory, out is [B, T, H, E]: that is what fast
kernels write, and what callers turn it into next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["attention"]

# What a call of F.scaled_dot_product_attention becomes before it is traced: under autocast its
# operands are cast, as torch casts those of the function itself. ``rtc::attention`` casts nothing.
_LIB = torch.library.Library("rtc", "FRAGMENT")
_LIB.define(
    "sdpa(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float? scale, "
    "bool enable_gqa) -> Tensor"
)


@torch.library.custom_op("rtc::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    like = _empty(q, v)
    return out if out.stride() == like.stride() else like.copy_(out)


def _empty(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    shape = (*q.shape[:-1], v.shape[-1])
    if q.dim() != 4:
        return q.new_empty(shape)
    return q.new_empty((shape[0], shape[2], shape[1], shape[3])).transpose(1, 2)


@attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    return _empty(q, v)


def _sdpa(*args: Any) -> torch.Tensor:
    return torch.ops.rtc.attention.default(*args)


def _autocast(kind: str) -> Callable[..., torch.Tensor]:
    """As ATen's autocast_mode.h does it: floating tensors of that device, but for float64."""
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}"))

    def cast(*args: Any) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(key):
            to = torch.get_autocast_dtype(kind)
            eligible = [
                isinstance(a, torch.Tensor)
                and a.device.type == kind
                and a.is_floating_point()
                and a.dtype is not torch.float64
                for a in args
            ]
            given = [a.to(to) if e else a for a, e in zip(args, eligible, strict=True)]
            return torch.ops.rtc.sdpa.default(*given)

    return cast


_LIB.impl("sdpa", _sdpa, "CompositeImplicitAutograd")
for _kind in ("cpu", "cuda"):
    _LIB.impl("sdpa", _autocast(_kind), f"Autocast{_kind.upper()}")
