"""What ranks that run one model together must have in common, as plain data.

The sections stand in the order in which they are compared: what is likely the cause comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rtc.names import source_name
from rtc.options import Options
from rtc.passes.analysis.collectives import issues
from rtc.passes.analysis.host import InputInfo

Facts = dict[str, Any]

# What a collective's group is called in the schemas of torch's operators and of rtc's own.
_GROUP = ("group_name", "group", "process_group")
# Fields of Options in which ranks may differ: who prints.
_FREE = ("warn",)

# Section -> what to do about a difference. Versions stand under their own names.
ADVICE = {
    "rtc": "Install the same version everywhere.",
    "torch": "Install the same version everywhere.",
    "triton": "Install the same version everywhere.",
    "devices": "Run all ranks on the same kind of device.",
    "options": "Give every rank the same rtc.Options.",
    "group": "Use the same process groups on every rank.",
    "numbers": "Call the model with the same numbers on every rank.",
    "arguments": "Call the model with tensors of the same shapes and types on every rank.",
    "parameters": "Build the same model on every rank, with shards of the same shapes.",
    "collectives": "Every rank must run the same collectives in the same order.",
    "operations": "Build the same model on every rank, in the same mode.",
    "collectives after the passes": "The passes decided differently on the ranks: compare their "
    "compiled.report(), and switch off the pass in which they differ.",
}
# Uneven shards, or a bias that one rank adds, differ in these on purpose.
UNEVEN = ("arguments", "parameters", "operations")
EVEN = (
    " Where the shards are meant to differ, rtc.Options(rank_check='collectives') compares only "
    "what the ranks send each other."
)


def groups(gm: fx.GraphModule) -> list[Any]:
    """The process groups (or their names) of a graph's collectives, in order of appearance."""
    out: list[Any] = []
    for _, group in collectives(gm):
        if group not in out:
            out.append(group)
    return out


def collectives(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Any]]:
    """(node, group) of every operator that issues a collective, in the order of the graph."""
    for part in gm.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                group = _group(node) if issues(node) else None
                if group is not None:
                    yield node, group


def _group(node: fx.Node) -> Any:
    for i, a in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if a.name in _GROUP:
            group = node.args[i] if i < len(node.args) else node.kwargs.get(a.name)
            if isinstance(group, fx.Node):  # an attribute or an input of the graph
                held = getattr(group.graph.owning_module, str(group.target), None)
                group = group.meta.get("val") if held is None else held
            group = getattr(group, "real_obj", group)
            return group
    return None


def of_compile(
    options: Options,
    inputs: Sequence[InputInfo],
    sample: Mapping[fx.Node, int],
    traced: fx.GraphModule,
    rewritten: fx.GraphModule,
) -> Facts:
    """Facts of one graph that is about to be lowered. ``sample``: int inputs -> their values."""
    from rtc import __version__

    vals = [(i, i.node.meta["val"]) for i in inputs]
    tensors = [(i, v) for i, v in vals if isinstance(v, torch.Tensor)]
    own = {k: v for k, v in options.to_dict().items() if k not in _FREE}
    numbers = {source_name(i.source): sample.get(i.node) for i in inputs if i.is_int}
    facts: Facts = {
        "rtc": __version__,
        "torch": torch.__version__,
        "triton": _triton(),
        "devices": sorted({_device(v.device) for _, v in tensors}),
        "options": own,
        "numbers": {k: v for k, v in numbers.items() if "()" not in k},  # not sizes
        "arguments": {
            source_name(i.source): describe(v)
            for i, v in tensors
            if not (i.parameter or i.attribute)
        },
        "parameters": {
            source_name(i.source): describe(v) for i, v in tensors if i.parameter or i.attribute
        },
        "collectives": _sent(traced),
        "operations": [
            f"{_name(n.target)} -> {describe(n.meta.get('val'))}"
            for n in traced.graph.nodes
            if n.op == "call_function"
        ],
        "collectives after the passes": _sent(rewritten),
    }
    if options.rank_check == "collectives":
        facts = {k: v for k, v in facts.items() if k not in UNEVEN}
    return facts


def _sent(gm: fx.GraphModule) -> list[str]:
    """One line a collective. Groups by number: ranks may know one group by different names."""
    order = groups(gm)
    out = []
    for node, group in collectives(gm):
        # rtc's own ops compute what they send: from K features, which may differ
        own = node.target.namespace == "rtc"  # type: ignore[union-attr]
        sent = [node] if own else node.all_input_nodes
        sizes = ", ".join(describe(a.meta.get("val")) for a in sent)
        plain = [str(a) for a in node.args if isinstance(a, (str, int, torch.dtype)) and a != group]
        words = [sizes, *plain, f"group {order.index(group)}"]
        out.append(f"{_name(node.target)}({', '.join(words)})")
    return out


def describe(val: Any) -> str:
    """``float32[2, 8]``; sizes that are symbolic show the value that they have in this call."""
    if isinstance(val, torch.Tensor):
        sizes = ", ".join(str(_value(n)) for n in val.shape)
        return f"{str(val.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(val, (tuple, list)):
        return f"({', '.join(describe(v) for v in val)})"
    return str(_value(val))


def _value(n: Any) -> Any:
    if not isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return n
    hint = getattr(n.node, "hint", None)
    return "?" if hint is None else hint


def _name(target: Any) -> str:
    return str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda, capability {major}.{minor}"


def _triton() -> str | None:
    from importlib import metadata

    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None
