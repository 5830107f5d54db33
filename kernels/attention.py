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

import torch
import torch.nn.functional as F

__all__ = ["attention"]


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
