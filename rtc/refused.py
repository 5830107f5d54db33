"""What Dynamo's graph must not do: read device data on the host, write where it would be lost."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from rtc.errors import HostSyncError, UnsupportedError
from rtc.inputs import named
from rtc.passes.analysis.host import where
from rtc.passes.analysis.symbols import spelled

LOSES = tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 14)
_IN_PLACE = {f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")} | {
    "setitem"
}


def host_reads(gm: fx.GraphModule) -> None:
    """Raises HostSyncError. Reads of what is known since the trace are taken out."""
    for node in reversed(gm.graph.nodes):
        if _python_number(node):
            continue
        if node.op == "call_method" and node.target in ("item", "tolist", "__bool__", "__int__"):
            if type(node.meta.get("example_value")) in (int, float, bool) and not node.users:
                gm.graph.erase_node(node)  # of a tensor made from numbers: known since the trace
                continue
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt) and not free_unbacked_symbols(value):
                # likewise, of numbers that change
                made = spelled(gm.graph, node, value, "example_value")
                if made is not None:
                    node.replace_all_uses_with(made)
                    gm.graph.erase_node(node)
                    continue
            raise HostSyncError(
                f"{where(node) or node.name}: .{node.target}() reads device data on the host in "
                "the middle of the step, which stops the host from running ahead. Keep the value "
                "as a Python int outside the tensors (a step counter, say), or on the device."
            )


def lost_writes(gm: fx.GraphModule) -> None:
    """Raises UnsupportedError: torch.compile takes a float64 CPU tensor without axes for a Python
    number, and loses what is written to it (2.11 to 2.13)."""
    if not LOSES:
        return
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        method = node.op == "call_method" and name.endswith("_") and not name.startswith("__")
        function = node.op == "call_function" and (
            name in _IN_PLACE
            or (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)
        )
        written = [*node.args[:1]] if method or function else []
        written += [x for x in (node.kwargs.get("out"),) if isinstance(x, fx.Node)]
        for x in written:
            held = x.meta.get("example_value") if isinstance(x, fx.Node) else None
            if not isinstance(held, torch.Tensor) or x.op != "placeholder":
                continue
            if held.dim() == 0 and held.dtype == torch.float64 and held.device.type == "cpu":
                raise UnsupportedError(
                    f"{where(node) or node.name}: writes to {named(x)[0]}, a float64 tensor "
                    "without axes on the CPU, which torch.compile would lose. Give it one axis, or "
                    "keep it in another dtype or on the GPU."
                )


def _python_number(node: fx.Node) -> bool:
    """``.item()`` of a Python float argument, which Dynamo passes as a tensor: no device read."""
    src = node.args[0] if node.args else None
    if not isinstance(src, fx.Node) or src.op != "placeholder":
        return False
    return bool(getattr(src.meta.get("grapharg"), "pass_arg_as_tensor", False))


__all__ = ["host_reads", "lost_writes"]
