"""Calls that do nothing in eager, and that AOTAutograd gets wrong.

A dropout that is off (``model.eval()``) gives back the tensor it was given; traced, a write to that
tensor later in the call would not be seen through it. torch.compile 2.11 to 2.13 computes so.

``torch.inference_mode()`` inside of the model (a decorator of ``forward``, say) computes what
``no_grad`` does, and AOTAutograd fails where such a tensor is written to a cache. Results are plain
tensors then.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx
from torch.autograd import grad_mode

_DROPOUTS = (
    torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
    F.feature_alpha_dropout,
)  # fmt: skip


_MODES = (grad_mode._exit_inference_mode, grad_mode._enter_inference_mode)


def take_out(gm: fx.GraphModule) -> None:
    """Changes Dynamo's graph in place."""
    for n in reversed(gm.graph.nodes):
        if n.op == "call_function" and n.target in _MODES:
            gm.graph.erase_node(n)
            continue
        if n.op != "call_function" or n.target not in _DROPOUTS:
            continue
        given = {**dict(zip(("input", "p", "training"), n.args, strict=False)), **n.kwargs}
        x = given.get("input")
        if given.get("training", given.get("train")) is False and isinstance(x, fx.Node):
            n.replace_all_uses_with(x)
            gm.graph.erase_node(n)


__all__ = ["take_out"]
