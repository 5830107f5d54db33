"""``rtc::pre_attention_new``: ``rtc::pre_attention`` for functional graphs: nothing is written.

    q8, k8', v8', saturated'[, k_raw', v_raw'] = pre_attention_new(q, k, v, ..., k8, v8, ...)

Primes are new tensors: copies of the caches with the rows at ``slots`` replaced. A compiler that
knows that the older contents are read no more calls ``write`` instead, which writes the caches in
place; ``IN_PLACE`` tells it how. Caches of bytes are FP8 values. ``axis`` and ``raw_axis``: where
the slots are in k8, v8 and in k_raw, v_raw (1: [B, S, G, D], 2: [B, G, S, D]); the rest, ``turned``
too, as in pre_attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rtc.kernels.pre_attention import FP8, pre_attention

__all__ = ["IN_PLACE", "pre_attention_new", "write"]

_CACHES = (13, 14, 15, 16)  # arguments: k8, v8, k_raw, v_raw


@torch.library.custom_op("rtc::pre_attention_new", mutates_args=())
def pre_attention_new(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    q_weight: torch.Tensor | None, k_weight: torch.Tensor | None,
    q_cos: torch.Tensor, q_sin: torch.Tensor, k_cos: torch.Tensor, k_sin: torch.Tensor,
    q_inv_scale: torch.Tensor, k_inv_scale: torch.Tensor, v_inv_scale: torch.Tensor,
    slots: torch.Tensor, k8: torch.Tensor, v8: torch.Tensor,
    k_raw: torch.Tensor | None, v_raw: torch.Tensor | None, saturated: torch.Tensor,
    axis: int, raw_axis: int, rope: str, eps: float, turned: bool,
) -> list[torch.Tensor]:  # fmt: skip
    new = [None if x is None else x.clone() for x in (k8, v8, k_raw, v_raw, saturated)]
    q8 = write(
        q, k, v, q_weight, k_weight, q_cos, q_sin, k_cos, k_sin, q_inv_scale, k_inv_scale,
        v_inv_scale, slots, *new, axis, raw_axis, rope, eps, turned,
    )  # fmt: skip
    return [x for x in (q8, new[0], new[1], new[4], *new[2:4]) if x is not None]


@pre_attention_new.register_fake
def _(q: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    k8, v8, k_raw, v_raw, saturated = args[12:17]
    out = [q.new_empty(q.shape, dtype=FP8), k8, v8, saturated, k_raw, v_raw]
    return [out[0], *(torch.empty_like(x) for x in out[1:] if x is not None)]


def write(*args: Any) -> torch.Tensor:
    """The arguments of pre_attention_new; writes k8, v8, k_raw, v_raw and saturated, returns q8."""
    *given, axis, raw_axis, rope, eps, turned = args
    for i in _CACHES:
        x, at = given[i], axis if i < 15 else raw_axis
        if x is not None:
            x = x.view(FP8) if x.dtype == torch.uint8 else x
            given[i] = x if at == 1 else x.transpose(1, 2)
    return pre_attention(*given, rope, eps, turned)


IN_PLACE: dict[Any, tuple[Callable[..., torch.Tensor], dict[int, int]]] = {
    # output -> the argument that it is a new version of; what remains of the outputs is the first
    torch.ops.rtc.pre_attention_new.default: (write, {1: 13, 2: 14, 3: 17, 4: 15, 5: 16}),
}
