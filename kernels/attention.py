"""``rtc::attention``: scaled dot product attention as one opaque node.

    out[b, h, t, :] = softmax(scale * q[b, h, t] . k[b, h', s] + mask) v[b, h', s]

Traced SDPA shows as a different op on every device, or decomposed. The compiler puts this op in its
place while it rewrites, so that passes see one node with named operands on every device, and lowers
it back to ``torch.nn.functional.scaled_dot_product_attention`` afterwards.

Shapes: q [B, H, T, D], k [B, G, S, D], v [B, G, S, E], out [B, H, T, E]; G = H, or divides H with
``enable_gqa``. Dtypes and masks: as torch's.
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
    return out.contiguous()


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
    return q.new_empty((*q.shape[:-1], v.shape[-1]))
