"""Calls that hand on their very input in eager, and that AOTAutograd takes for a copy.

A dropout that is off (``model.eval()``) gives back the tensor it was given; traced, a write to that
tensor later in the call would not be seen through it. torch.compile 2.11 to 2.13 computes so.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

_DROPOUTS = (
    torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
    F.feature_alpha_dropout,
)  # fmt: skip


def take_out(gm: fx.GraphModule) -> None:
    """Changes Dynamo's graph in place."""
    for n in list(gm.graph.nodes):
        if n.op != "call_function" or n.target not in _DROPOUTS:
            continue
        given = {**dict(zip(("input", "p", "training"), n.args, strict=False)), **n.kwargs}
        x = given.get("input")
        if given.get("training", given.get("train")) is False and isinstance(x, fx.Node):
            n.replace_all_uses_with(x)
            gm.graph.erase_node(n)


__all__ = ["take_out"]
