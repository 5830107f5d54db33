"""Ops that are the work of a step: products, attention, and all that other libraries define."""

from __future__ import annotations

import operator

import torch
from torch import fx

_PRODUCTS = """mm addmm bmm baddbmm _scaled_mm _scaled_mm_v2 _int_mm linear convolution matmul
    scaled_dot_product_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
    _grouped_mm _scaled_grouped_mm _weight_int8pack_mm _weight_int4pack_mm""".split()


def is_heavy(n: fx.Node) -> bool:
    if n.target is operator.getitem:
        return isinstance(n.args[0], fx.Node) and is_heavy(n.args[0])
    t = n.target
    if not isinstance(t, torch._ops.OpOverload):
        return False
    return t.namespace not in ("aten", "prims") or t._opname in _PRODUCTS


__all__ = ["is_heavy"]
