"""nested_stacks on functional graphs as they are: old versions of rows, parts of parts."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rtc.passes.analysis.host import InputInfo
from rtc.passes.nested_stacks import flatten

aten = torch.ops.aten
L, K, N = 3, 2, 4


def select(x, i):
    return aten.select.int(x, 0, i)


def put(x, part, i):
    return aten.select_scatter.default(x, part, 0, i)


def read(c):
    """The tensor and what depends on each of its parts."""
    rows = [select(c, i) for i in range(L)]
    return c, sum((1 + i) * (select(r, 0) - 2 * select(r, 1)) for i, r in enumerate(rows))


def plain(c, a, b):
    c1 = put(c, put(select(c, 1), a, 0), 1)
    return put(c1, put(select(c1, 1), b, 1), 1), select(select(c1, 1), 0)


def twice_in_a_row(c, a, b):
    return read(put(c, put(put(select(c, 2), a, 0), b, 1), 2))


def other_part(c, a, b):
    row = select(c, 0)
    return read(put(c, put(row, select(row, 0), 1), 0))


def other_layer(c, a, b):
    c1 = put(c, put(select(c, 0), a, 1), 0)
    return put(c1, put(select(c1, 2), select(select(c1, 0), 1), 0), 2), select(select(c1, 0), 1)


def whole_row_of_an_old_version(c, a, b):
    """All of its parts are new: what it was taken from does not matter."""
    row = put(put(select(c, 0), a, 0), b, 1)
    c1 = put(c, put(select(c, 0), b, 0), 0)
    return read(put(c1, row, 0))


def read_from_the_row(c, a, b):
    row = put(select(c, 1), a, 0)
    return put(c, row, 1), select(row, 0) + select(row, 1)


def half_row_of_an_old_version(c, a, b):
    """Its other part is what was there before the first write."""
    old = put(select(c, 0), b, 1)
    c1 = put(c, put(select(c, 0), a, 0), 0)
    return read(put(c1, old, 0))


def row_of_another_layer(c, a, b):
    return read(put(c, put(select(c, 0), a, 0), 1))


def row_as_a_whole(c, a, b):
    c1 = put(c, put(select(c, 0), a, 0), 0)
    return c1, select(select(c1, 0), 1).sum() + select(c, 1).sum()


def row_written_as_a_whole(c, a, b):
    return put(c, torch.stack([a, b]), 1), select(select(c, 1), 0)


def read_as_a_whole(c, a, b):
    c1 = put(c, put(select(c, 0), a, 0), 0)
    return c1, select(select(c1, 0), 1).sum() + c.sum()


def another_axis(c, a, b):
    c1 = put(c, put(select(c, 0), a, 0), 0)
    return c1, aten.select.int(select(c1, 0), 1, 0)


TAKEN = [
    plain, twice_in_a_row, other_part, other_layer, whole_row_of_an_old_version, read_from_the_row,
]  # fmt: skip
LEFT = [
    half_row_of_an_old_version, row_of_another_layer, row_as_a_whole, row_written_as_a_whole,
    read_as_a_whole, another_axis,
]  # fmt: skip


def traced(fn):
    def program(c, a, b):
        new, out = fn(c, a, b)
        c.copy_(new)
        return out

    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(L, K, 2, N), torch.empty(2, N), torch.empty(2, N)]
        return make_fx(program)(*fakes)


def flattened(gm, most=64):
    return flatten(gm, InputInfo(0, next(iter(gm.graph.nodes)), "c", mutated=True), most)


@pytest.mark.parametrize("fn", TAKEN, ids=lambda f: f.__name__)
def test_the_same_values_through_parts(fn):
    gm = traced(fn)
    found = flattened(gm)
    assert found is not None
    gm.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or "copy_" in n.name)
    first = next(iter(gm.graph.nodes))
    assert not first.users, "the tensor itself is still read"
    c, a, b = torch.randn(L, K, 2, N), torch.randn(2, N), torch.randn(2, N)
    want_c = c.clone()
    new, want = fn(want_c, a, b)
    flat = c.clone().flatten(0, 1)
    got = fx.Interpreter(gm).run(c, a, b, flat)
    assert torch.equal(got, want)
    assert torch.equal(flat.unflatten(0, (L, K)), new)
    for n in gm.graph.nodes:
        if n.target in (aten.select.int, aten.select_scatter.default):
            assert n.args[0].meta["val"].shape[0] == L * K


@pytest.mark.parametrize("fn", LEFT, ids=lambda f: f.__name__)
def test_what_is_no_use_of_single_parts_is_left_as_it_is(fn):
    gm = traced(fn)
    before = gm.graph.python_code("self").src
    assert flattened(gm) is None
    assert gm.graph.python_code("self").src == before


def test_too_many_parts():
    assert flattened(traced(plain), most=L * K - 1) is None
