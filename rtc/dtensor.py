"""Models whose tensors are DTensors: attention keeps its shape while such a graph is traced.

AOTAutograd turns ops on DTensors into ops on each rank's part. For ``rtc::attention``, which
stands for SDPA in graphs that are rewritten, it must be told how: by batch rows or by heads.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rtc.kernels import attention as _attention  # registers the op

_BATCH, _HEADS = 0, 1


def prepare(gm: fx.GraphModule) -> None:
    """Make ready for tracing a Dynamo graph; does nothing where no input is a wrapper."""
    if any(is_traceable_wrapper_subclass(n.meta.get("example_value")) for n in gm.graph.nodes):
        _teach()


@functools.cache
def _teach() -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.rtc.attention.default)
    def sharding(
        q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None, gqa: bool
    ) -> Any:
        def spread(dim: int | None) -> Any:
            own = Replicate() if dim is None else Shard(dim)
            return [own], [own, own, own, spread_mask(dim), None, None, None]

        def spread_mask(dim: int | None) -> Any:
            if mask is None:
                return None
            at = None if dim is None else dim - len(q.shape) + len(mask.shape)
            if at is None or at < 0 or mask.shape[at] == 1:
                return Replicate()
            return Shard(at)

        ways = [spread(None)]
        if len(q.shape) == 4:
            ways.append(spread(_BATCH))
            if q.shape[_HEADS] == k.shape[_HEADS]:  # else heads might lose the keys they share
                ways.append(spread(_HEADS))
        return ways


_ = _attention
__all__ = ["prepare"]
