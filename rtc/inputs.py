"""Inputs of a traced graph: Dynamo's names for them, and what they are."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext
from torch._library.fake_class_registry import FakeScriptObject
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rtc.passes.analysis.host import InputInfo

_CONSTANT = ("CONSTANT_MATCH", "EQUALS_MATCH")


def named(node: fx.Node) -> tuple[str, Any, bool]:
    """(Dynamo's name of an input, its value, whether it hangs on a module)."""
    arg = node.meta.get("grapharg")
    src = getattr(arg, "source", None)
    if src is None:
        return node.name, None, False
    name = source_name(src)
    kind = src.guard_source() if callable(src.guard_source) else src.guard_source
    module = kind.is_unspecialized_nn_module() or kind.is_specialized_nn_module()
    return name, node.meta.get("example_value"), module


def source_name(source: Any) -> str:
    """How Dynamo calls a place in the user's program: ``L['cache'][0]['k']``."""
    return source.name if isinstance(source.name, str) else source.name()


def shared_ints() -> dict[str, int]:
    """Ints of globals that the trace at hand has as constants, under guards: by Dynamo's names."""
    found: dict[str, int] = {}
    context = TracingContext.try_get()
    if context is None or context.global_context is None:
        return found
    scope = getattr(InstructionTranslator.current_tx().output, "global_scope", {})
    for guard in context.guards_context.dynamo_guards:
        name = guard.name if isinstance(guard.name, str) else guard.name()
        if not name.startswith("G[") or guard.create_fn_name() not in _CONSTANT:
            continue
        try:
            value = eval(name, {"G": scope})
        except Exception:
            continue
        if type(value) is int:
            found[name] = value
    return found


def traced_code() -> types.CodeType | None:
    """Of the function whose trace is at hand."""
    context = TracingContext.try_get()
    if context is None or context.global_context is None:
        return None
    return InstructionTranslator.current_tx().output.root_tx.f_code


def guarded_tensors() -> list[torch.Tensor]:
    """Tensors that Dynamo will look at in every call of the trace at hand, inputs of it or not."""
    context = TracingContext.try_get()
    if context is None or context.global_context is None:
        return []
    output = InstructionTranslator.current_tx().output
    scope = {"L": getattr(output, "local_scope", {}), "G": getattr(output, "global_scope", {})}
    found = []
    for guard in context.guards_context.dynamo_guards:
        if guard.create_fn_name() != "TENSOR_MATCH":
            continue
        try:
            value = eval(guard.name if isinstance(guard.name, str) else guard.name(), scope)
        except Exception:
            continue
        if isinstance(value, torch.Tensor):
            found.append(value)
    return found


def parts(name: str, value: Any, module: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """AOT's inputs for one of Dynamo's: a wrapper (DTensor) comes in as what it holds, then those
    of its sizes that change from call to call."""
    if not is_traceable_wrapper_subclass(value):
        yield name, value, module
        return
    for part in value.__tensor_flatten__()[0]:
        yield from parts(f"{name}.{part}", getattr(value, part), module)
    for size in (*value.size(), *value.stride()):
        if isinstance(size, torch.SymInt):
            yield f"{name}.size()", size, module


def described(gm: fx.GraphModule, sources: list[Any]) -> list[InputInfo]:
    """A graph's inputs: where the user's program holds them, and what the graph does with them."""
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    known = len(nodes) == len(sources)
    mutated = {n.args[0] for n in gm.graph.nodes if n.op == "call_function" and _writes_input(n)}
    out = []
    for i, n in enumerate(nodes):
        name, _, module = sources[i] if known else (n.name, None, False)
        val = n.meta["val"]
        is_int = not isinstance(val, (torch.Tensor, FakeScriptObject))
        parameter = "_parameters" in name or isinstance(val, torch.nn.Parameter)
        attribute = module or "_parameters" in name or "_buffers" in name or name.startswith("G[")
        attribute = attribute or ("L['self']" in name or "__closure__" in name)
        out.append(InputInfo(i, n, name, is_int, n in mutated, attribute, parameter))
    return out


def _writes_input(n: fx.Node) -> bool:
    t = n.target
    return (
        isinstance(t, torch._ops.OpOverload)
        and t._schema.is_mutable
        and bool(n.args)
        and isinstance(n.args[0], fx.Node)
        and n.args[0].op == "placeholder"
    )


__all__ = ["described", "guarded_tensors", "named", "parts", "shared_ints", "source_name"]
