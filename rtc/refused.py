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
_VIEWS = ("detach", "view", "view_as", "reshape", "squeeze", "expand", "unsqueeze", "flatten")


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
    number, and loses some writes to it (2.11 to 2.13): those of `n.mul_(2)`, not of `n *= 2`."""
    if not LOSES:
        return
    for node in gm.graph.nodes:
        for x in _written(node):
            held = _root(x)
            value = held.meta.get("example_value")
            if held.op != "placeholder" or not isinstance(value, torch.Tensor):
                continue
            if value.dim() == 0 and value.dtype == torch.float64 and value.device.type == "cpu":
                raise UnsupportedError(
                    f"{where(node) or node.name}: writes to {named(held)[0]}, a float64 tensor "
                    "without axes on the CPU, which torch.compile may lose. Give it one axis, or "
                    "keep it in another dtype or on the GPU."
                )


def _written(node: fx.Node) -> list[fx.Node]:
    """What a node of Dynamo's graph writes in place, by its name where there is no schema."""
    name = getattr(node.target, "__name__", str(node.target))
    found: list[fx.Node] = []
    schema = getattr(node.target, "_schema", None)
    named_so = name.endswith("_") and not name.endswith("__")
    calls = node.op in ("call_method", "call_function")
    if calls and (named_so or name in _IN_PLACE or (schema is not None and schema.is_mutable)):
        fx.node.map_arg(node.args[:1], found.append)
    fx.node.map_arg(node.kwargs.get("out"), found.append)
    return found


def _root(node: fx.Node) -> fx.Node:
    """The tensor behind views of it."""
    while node.op == "call_method" and node.target in _VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _python_number(node: fx.Node) -> bool:
    """``.item()`` of a Python float argument, which Dynamo passes as a tensor: no device read."""
    src = node.args[0] if node.args else None
    if not isinstance(src, fx.Node) or src.op != "placeholder":
        return False
    return bool(getattr(src.meta.get("grapharg"), "pass_arg_as_tensor", False))


__all__ = ["host_reads", "lost_writes"]
