"""A linear layer in FP8: one scale a token, one scale an output row, in plain PyTorch.

    y = (x8 @ w8^T) * s_x * s_w        x8 = x / s_x,  s_x = amax |x| of the token / 448

Shapes: M tokens of all batch rows, K features in, N features out.

On a CUDA GPU, with bfloat16 activations, the product is `torch._scaled_mm` with row-wise scales.
Elsewhere it is a plain matmul of the same FP8 values with the same scales: `torch._scaled_mm` has
no row-wise scales on the CPU in torch 2.11, never computes in float64, and takes row-wise scales
on Hopper for bfloat16 results only.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] as FP8 and a scale a row [M, 1], in float32 (float64 of float64): x = x8 * scale."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = (x.abs().amax(-1, keepdim=True).to(wide) / FP8_MAX).clamp(min=1e-12)
    return (x.to(wide) / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


class Float8Linear(nn.Module):
    """x [..., K] to [..., N] in x's dtype; no bias.

    `weight` is FP8 [N, K], `weight_scale` float32 [1, N]. Both keep their dtypes whatever the
    module is cast to; `set_rows` fills them. K and N must be multiples of 16 on a GPU.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=FP8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        scale = torch.empty(1, out_features, dtype=torch.float32)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x8, scale = quantize_rows(x.flatten(0, -2))
        if x.is_cuda and x.dtype == torch.bfloat16:
            y = torch._scaled_mm(
                x8,
                self.weight.t(),
                scale_a=scale,
                scale_b=self.weight_scale,
                out_dtype=x.dtype,
                use_fast_accum=True,
            )
        else:
            product = x8.to(scale.dtype) @ self.weight.t().to(scale.dtype)
            y = (product * scale * self.weight_scale).to(x.dtype)
        return y.unflatten(0, x.shape[:-1])

    def set_rows(self, start: int, rows: Tensor, columns: Tensor | None = None) -> None:
        """Store rows [n, K] of a weight in any wider dtype from output row `start` on.

        With `columns` (int64 [K]) rows are those of a wider weight, of which this one holds these
        columns; scales are those of the wider rows.
        """
        end = start + len(rows)
        weight, scale = quantize_rows(rows.float())
        if columns is not None:  # as bytes: indexing FP8 is not implemented everywhere
            weight = weight.view(torch.uint8)[:, columns].view(FP8)
        self.weight[start:end].copy_(weight)
        self.weight_scale[0, start:end].copy_(scale[:, 0])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.to(device)` moves; `.to(dtype)` of the whole model must not widen FP8 weights."""

        def kept(t: Tensor) -> Tensor:
            new = fn(t)
            return new if new.dtype == t.dtype else t.to(new.device)

        return super()._apply(kept, recurse)
