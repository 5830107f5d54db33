"""Fake values of new nodes: known ones are reused, and never for a call that only looks alike."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from rtc.passes.nodes import Emitter

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16


def graph_of(mode, *vals):
    """A graph with one input for each of ``vals``, and what emits ops into it."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(vals))]
    for n, v in zip(nodes, vals, strict=True):
        n.meta["val"] = v
    return Emitter(graph), nodes


def facts(v):
    if isinstance(v, (tuple, list)):
        return [facts(x) for x in v]
    where = v.device, v.storage_offset()
    return type(v), tuple(v.shape), v.stride(), v.dtype, *where, v.is_inference()


X = {
    "plain": lambda: torch.empty(4, 6),
    "transposed": lambda: torch.empty(6, 4).t(),
    "fewer rows": lambda: torch.empty(3, 6),
    "other sizes": lambda: torch.empty(6, 4),
    "sizes and strides the other way round": lambda: torch.empty_strided((6, 1), (4, 6)),
    "further in": lambda: torch.empty(5, 6)[1:],
    "bfloat16": lambda: torch.empty(4, 6, dtype=BF16),
    "integers": lambda: torch.empty(4, 6, dtype=torch.int64),
    "elsewhere": lambda: torch.empty(4, 6, device="meta"),
    "complex": lambda: torch.empty(4, 6, dtype=torch.complex64),
    "negative": lambda: torch._neg_view(torch.empty(4, 6)),
}
OPS = {
    "a copy in the same order": lambda e, x: e(aten.clone.default, x),
    "a copy in order": lambda e, x: e(aten.clone.default, x, memory_format=torch.contiguous_format),
    "negated": lambda e, x: e(aten.neg.default, x),
    "whether zero": lambda e, x: e(aten.logical_not.default, x),
    "to float16": lambda e, x: e(aten._to_copy.default, x, dtype=torch.float16),
    "to float64": lambda e, x: e(aten._to_copy.default, x, dtype=torch.float64),
    "plus an int": lambda e, x: e(aten.add.Tensor, x, 1),
    "plus a float": lambda e, x: e(aten.add.Tensor, x, 1.0),
    "plus a bool": lambda e, x: e(aten.add.Tensor, x, True),
    "rows": lambda e, x: e(aten.slice.Tensor, x, 0, 1, 3),
    "columns": lambda e, x: e(aten.slice.Tensor, x, 1, 1, 3),
    "several": lambda e, x: e(aten.split.Tensor, x, 2, -1),
    "joined": lambda e, x: e(aten.cat.default, [x, x], 1),
    "a sum": lambda e, x: e(aten.sum.dim_IntList, x, [0]),
    "a sum, kept": lambda e, x: e(aten.sum.dim_IntList, x, [0], True),
}


def test_values_are_torch_s_own():
    mode = FakeTensorMode()
    with mode:
        vals = {name: make() for name, make in X.items()}
    emit, nodes = graph_of(mode, *vals.values())
    for _ in range(2):
        for x in nodes:
            for name, op in OPS.items():
                n = op(emit, x)
                args, kwargs = fx.map_arg((n.args, n.kwargs), lambda a: a.meta["val"])
                with mode, torch.no_grad():
                    want = n.target(*args, **kwargs)
                assert facts(n.meta["val"]) == facts(want), (x, name)


def test_known_values_are_reused():
    mode = FakeTensorMode()
    with mode:
        a, b, c = torch.empty(4, 6), torch.empty(4, 6), torch.empty(4, 6, dtype=torch.complex64)
    emit, (x, y, z) = graph_of(mode, a, b, c)
    for name, op in OPS.items():
        if name in ("rows", "columns", "several"):
            continue  # views
        assert op(emit, x).meta["val"] is op(emit, y).meta["val"]
        assert op(emit, z).meta["val"] is not op(emit, z).meta["val"]  # what torch alone knows
    with FakeTensorMode() as other:
        d = torch.empty(4, 6)
    emit, (w,) = graph_of(other, d)
    assert OPS["negated"](emit, w).meta["val"].fake_mode is other


VIEWS = {
    "reshape": lambda e, x: e(aten.reshape.default, x, [6, 4]),
    "slice": lambda e, x: e(aten.slice.Tensor, x, 0, 1, 3),
    "pieces": lambda e, x: e(aten.split.Tensor, x, 2),
    "permute": lambda e, x: e(aten.permute.default, x, [1, 0]),
    "unsafe view": lambda e, x: e(aten._unsafe_view.default, x, [24]),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_of_its_own_tensor(view):
    """Two caches of one shape: a compiler takes values in one memory for aliases of each other."""
    mode = FakeTensorMode()
    with mode:
        emit, tensors = graph_of(mode, torch.empty(4, 6), torch.empty(4, 6))
    for x in tensors:
        made = VIEWS[view](emit, x).meta["val"]
        for v in made if isinstance(made, (list, tuple)) else [made]:
            assert v.untyped_storage()._cdata == x.meta["val"].untyped_storage()._cdata


def test_sizes_that_change_are_never_taken_for_others():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    a, b = (mode.from_tensor(torch.empty(n, 4), static_shapes=False) for n in (5, 7))
    rows = a.shape[0], b.shape[0]
    assert str(rows[0]) != str(rows[1])
    emit, (x, y, n, m) = graph_of(mode, a, b, *rows)
    for _ in range(2):
        for node, size, want in ((x, n, rows[0]), (y, m, rows[1])):
            same, made = emit(aten.neg.default, node), emit(aten.full.default, [size], 1.0)
            assert str(same.meta["val"].shape[0]) == str(made.meta["val"].shape[0]) == str(want)


def test_a_write_hands_on_what_it_wrote():
    mode = FakeTensorMode()
    with mode:
        a, b = torch.empty(4), torch.empty(4)
    emit, (x, y) = graph_of(mode, a, b)
    assert emit(aten.copy_.default, x, y).meta["val"] is a
    assert emit(aten.copy_.default, y, x).meta["val"] is b


@pytest.mark.parametrize("how", ["inference", "no_grad"])
def test_inference_tensors_stay_what_they_are(how):
    mode = FakeTensorMode()
    with torch.inference_mode(how == "inference"), mode:
        a = torch.empty(4, 6)
    with torch.inference_mode(), mode:
        b = torch.empty(4, 6)
    emit, (x, y) = graph_of(mode, a, b)
    for n, like in ((x, a), (y, b)):
        n = emit(aten.view.default, n, [24])
        assert n.meta["val"].is_inference() == like.is_inference()
