"""fuse_linear_all_reduce: an FP8 product and the sum of it over ranks become one op, or why not.

One process plays rank 0 of 2 in a group of torch's "fake" backend, whose all-reduce leaves its
input as it is. The fused op is made to do the same, so that values before and after are the same
products, to the bit; what real ranks add up is in tests/distributed.

Legend: M rows, K features in, N features out.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from rtc import exchanges
from rtc.errors import UnsupportedError
from rtc.kernels import linear_all_reduce as kernel
from rtc.kernels.linear_fp8 import linear_fp8
from rtc.passes import fp8_linear
from rtc.passes import fuse_linear_all_reduce as fuse
from rtc.passes.analysis.collectives import issued, met
from rtc.passes.base import Outcome

M, N, K = 4, 16, 32
F8, BF16, F16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
FUSED, LINEAR = torch.ops.rtc.linear_all_reduce.default, torch.ops.rtc.linear_fp8.default
OFF = {"fuse_all_reduce_norm": (fuse.PASS, False, Outcome())}
c10d, aten = torch.ops._c10d_functional, torch.ops.aten


@pytest.fixture(autouse=True, scope="module")
def ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _as_the_fake_group_sums(monkeypatch):
    def product(x, w, x_scale, w_scale, dtype, world, group):
        return linear_fp8(x, w, x_scale, w_scale, None, dtype)

    monkeypatch.setattr(kernel, "unfused", product)


def given(m=M, n=N, k=K):
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, k, generator=g).mul(50).to(F8) for s in (m, n))
    return x, w, torch.rand(m, 1, generator=g), torch.rand(1, n, generator=g)


def product(x, w, a, b, bias=None, dtype=BF16):
    return torch._scaled_mm(x, w.t(), a, b, bias=bias, out_dtype=dtype, use_fast_accum=True)


def total(y, op="sum", group=None):
    return functional.all_reduce(y, op, group or dist.group.WORLD)


def traced(f, args, mode="fake"):
    gm = make_fx(f, tracing_mode=mode)(*args)
    fp8_linear.rewrite(gm.graph)
    return gm


def run(f, *, steady=True, args=None, mode="fake"):
    """The graph after the pass, and its outcome; values are those of the graph before it."""
    args = args or given()
    gm = traced(f, args, mode)
    gm.recompile()
    before, want = met(gm.graph), gm(*args)
    out = fuse.fuse(gm.graph, steady)
    gm.graph.lint()
    gm.recompile()
    assert met(gm.graph) == before
    got = gm(*args)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (want, got)), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert torch.equal(a, b)
    return gm, out


def count(gm, *targets):
    return [sum(n.target is t for n in gm.graph.nodes) for t in targets]


# -- what becomes one op ---------------------------------------------------------------------------


def plain(x, w, a, b):
    return total(product(x, w, a, b)) + 1


def one_scale(x, w, a, b):
    return total(product(x, w, a[0, 0], b[0, 0])) + 1


def half(x, w, a, b):
    return total(product(x, w, a[0, 0], b[0, 0], dtype=F16)) + 1


def in_tokens(x, w, a, b):
    return total(product(x, w, a, b).view(1, M // 2, 2, N).reshape(M // 2, 2, N)) * 2


def flat(x, w, a, b):
    return total(product(x, w, a, b).flatten()).sin()


def read_often(x, w, a, b):
    y = total(product(x, w, a, b))
    return y, y.t(), y.view(2, -1) + 1


def waited_for_again(x, w, a, b):
    return c10d.wait_tensor(total(product(x, w, a, b))) + 1


def in_place(x, w, a, b):
    """As dist.all_reduce(y) comes out of AOTAutograd."""
    y = product(x, w, a, b)
    return aten.copy(y, total(y)) + 1


@pytest.mark.parametrize(
    "f", [plain, one_scale, half, in_tokens, flat, read_often, in_place], ids=lambda f: f.__name__
)
def test_product_and_sum_are_one_op(f):
    gm, out = run(f)
    assert (out.matched, out.applied, out.refused) == (1, 1, [])
    assert count(gm, FUSED, LINEAR, c10d.all_reduce.default, c10d.wait_tensor.default) == [
        1, 0, 0, 0,
    ]  # fmt: skip
    node = next(n for n in gm.graph.nodes if n.target is FUSED)
    assert node.args[5:] == (2, dist.group.WORLD.group_name)
    assert fuse.shapes(gm.graph) == [
        fuse.Shape(dist.group.WORLD.group_name, M, N, node.meta["val"].dtype)
    ]
    assert out.notes == [f"[{M}, {N}] over the ranks of group {node.args[6]!r}"]


def test_a_second_wait_stays():
    gm, out = run(waited_for_again)
    assert out.applied == 1
    assert count(gm, FUSED, c10d.wait_tensor.default) == [1, 1]


def test_two_products_that_are_the_same_are_summed_twice():
    gm, out = run(lambda *p: total(product(*p)) + total(product(*p)))
    assert (out.matched, out.applied) == (2, 2)
    assert count(gm, FUSED) == [2]
    assert len(fuse.shapes(gm.graph)) == 1


def test_a_sum_of_a_sum():
    gm, out = run(lambda *p: total(total(product(*p))) + 1)
    assert (out.matched, out.applied) == (2, 1)
    assert count(gm, FUSED, c10d.all_reduce.default) == [1, 1]


def test_the_sum_stays_in_its_place_among_others():
    """Other ranks may run this graph without the pass: the same exchanges, in the same order."""

    def f(x, w, a, b):
        y = product(x, w, a, b)
        first = total(a, "max")
        middle = total(y)
        last = total(b, "min")
        return middle + 1, first + 1, last + 1

    gm, out = run(f)
    assert out.applied == 1
    names = [n.target for n in gm.graph.nodes if n.target in (FUSED, c10d.all_reduce.default)]
    assert names == [c10d.all_reduce.default, FUSED, c10d.all_reduce.default]


# -- what does not ---------------------------------------------------------------------------------

READ = "the product has other readers"
NONE = "what is summed is no product that fp8_linear took"


def parts(f):
    return lambda *p: f(product(*p))


def twice_waited(*p):
    z = c10d.all_reduce(product(*p), "sum", dist.group.WORLD.group_name)
    return c10d.wait_tensor(z) + c10d.wait_tensor(z)


def seen_before_the_wait(*p):
    z = c10d.all_reduce(product(*p), "sum", dist.group.WORLD.group_name)
    return c10d.wait_tensor(z.view(2, -1)) + 1


def unread(x, w, a, b):
    total(product(x, w, a, b))
    return a + 1


REFUSED = {
    "max": (parts(lambda y: total(y, "max") + 1), "a reduction by 'max'"),
    "avg": (parts(lambda y: total(y, "avg") + 1), "a reduction by 'avg'"),
    "read": (parts(lambda y: total(y) + y), READ),
    "returned": (parts(lambda y: (total(y), y)), READ),
    "read in a view": (parts(lambda y: (total(y.view(2, -1)) + 1, y.view(-1) + 1)), READ),
    "view read": (parts(lambda y: (lambda v: total(v) + v)(y.view(2, -1))), NONE),
    "cut": (parts(lambda y: total(y[:2]) + 1), NONE),
    "turned": (parts(lambda y: total(y.t()) + 1), NONE),
    "other bits": (parts(lambda y: total(y.view(F16)) + 1), NONE),
    "padded": (parts(lambda y: total(torch.nn.functional.pad(y, (0, 1))) + 1), NONE),
    "spread": (parts(lambda y: total(y.expand(2, -1, -1)) + 1), NONE),
    "cast": (parts(lambda y: total(y.float()) + 1), NONE),
    "scaled": (parts(lambda y: total(y * 2) + 1), NONE),
    "float32": (
        lambda *p: total(product(*p, dtype=torch.float32)) + 1,
        "a result of torch.float32, not of half precision",
    ),
    "bias": (
        lambda *p: total(product(*p, bias=torch.ones(N, dtype=BF16))) + 1,
        "a bias, which every rank would add",
    ),
    "two waits": (twice_waited, "its result is not waited for once"),
    "no wait": (seen_before_the_wait, "its result is not waited for once"),
    "written over a part": (parts(lambda y: aten.copy(y, total(y[:1])) + 1), NONE),
    "written elsewhere": (parts(lambda y: (aten.copy(y.float(), total(y)) + 1, y.sin())), READ),
    "dead": (unread, "nothing reads the sum"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    f, reason = REFUSED[name]
    gm, out = run(f)
    assert (out.matched, out.applied, out.notes) == (1, 0, [])
    assert [r.reason for r in out.refused] == [reason]
    assert count(gm, FUSED, c10d.all_reduce.default) == [0, 1]


def test_two_reductions_of_one_product():
    gm, out = run(parts(lambda y: total(y) + total(y)))
    assert [r.reason for r in out.refused] == [READ, READ]
    assert count(gm, LINEAR, c10d.all_reduce.default) == [1, 2]


def test_other_collectives_are_no_sums():
    def f(*p):
        group = dist.group.WORLD.group_name
        y = c10d.wait_tensor(c10d.reduce_scatter_tensor(product(*p), "sum", 2, group))
        return c10d.wait_tensor(c10d.all_gather_into_tensor(y, 2, group)) + 1

    gm = traced(f, given())
    assert fuse.fuse(gm.graph, True) == Outcome()

    def g(*p):
        y = functional.all_reduce_coalesced([product(*p)], "sum", dist.group.WORLD)
        return y[0] + 1

    gm = traced(g, given())
    assert fuse.fuse(gm.graph, True) == Outcome()


def test_sizes_that_change():
    gm, out = run(one_scale, mode="symbolic")
    assert [r.reason for r in out.refused] == ["sizes that change"]
    assert count(gm, FUSED) == [0]


def test_groups(monkeypatch):
    alone = dist.new_group([0])
    gm, out = run(parts(lambda y: total(y, group=alone) + 1))
    assert [r.reason for r in out.refused] == ["its group is one rank"]

    gm = traced(plain, given())
    node = next(n for n in gm.graph.nodes if n.target is c10d.all_reduce.default)
    node.update_arg(2, "no such group")
    out = fuse.fuse(gm.graph, True)
    assert [r.reason for r in out.refused] == ["there is no process group named 'no such group'"]

    gm = traced(plain, given())
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    out = fuse.fuse(gm.graph, True)
    assert [r.reason for r in out.refused] == ["torch.distributed is not initialized"]


def test_two_groups_of_one_size_have_workspaces_of_their_own():
    other = dist.new_group([0, 1])
    gm, out = run(lambda *p: total(product(*p)) + total(product(*p), group=other))
    assert out.applied == 2
    assert [s.group for s in fuse.shapes(gm.graph)] == [
        dist.group.WORLD.group_name, other.group_name,
    ]  # fmt: skip


def test_where_no_window_moves_only_shapes_that_have_a_workspace(monkeypatch):
    _, out = run(plain, steady=False)
    why = "no cache's window moves along here: its token count may not come back"
    assert [r.reason for r in out.refused] == [why]

    have = (dist.group.WORLD.group_name, M, N, BF16)
    monkeypatch.setattr(kernel, "prepared", lambda *key: key == have)
    _, out = run(lambda *p: total(product(*p)) + total(product(*p)[:2]).sum(), steady=False)
    assert (out.matched, out.applied) == (2, 1)
    _, out = run(half, steady=False)
    assert [r.reason for r in out.refused] == [why]


def test_so_many_shapes():
    def f(x, w, a, b):
        return tuple(
            total(product(x, w[:n].clone(), a, b[:, :n].clone())) + 1
            for n in (16, 32, 48, 64, 80, 16)
        )

    _, out = run(f, args=given(n=80))
    assert (out.matched, out.applied) == (6, 5)
    assert [r.reason for r in out.refused] == [f"more than {fuse.MOST} shapes in one graph"]


# -- the other graphs of a compile -----------------------------------------------------------------


def test_other_graphs_exchange_the_same():
    """The plain graph has products that no pass has touched, the rewritten one the fused op."""
    other = make_fx(lambda *p: total(product(*p)) + total(p[2], "max"), tracing_mode="fake")(
        *given()
    )
    gm = traced(lambda *p: total(product(*p)) + total(p[2], "max"), given())
    assert fuse.fuse(gm.graph, True).applied == 1
    assert issued(other.graph) != issued(gm.graph)
    exchanges.alike([other, None], gm, OFF)
    assert issued(other.graph) == issued(gm.graph)
    assert count(other, FUSED) == [1]


@pytest.mark.parametrize(
    "f",
    [
        lambda *p: (lambda y: total(y) + y)(product(*p)),  # read elsewhere
        lambda *p: total(product(*p, dtype=F16)),  # as much, of another type
        lambda *p: total(product(*p)) + total(p[2]),  # one more
    ],
)
def test_graphs_that_cannot_are_told(f):
    x, w, a, b = given()
    args = x, w, a[0, 0], b[0, 0]
    gm = traced(lambda *p: total(product(*p)) + 1, args)
    assert fuse.fuse(gm.graph, True).applied == 1
    other = make_fx(f, tracing_mode="fake")(*args)
    with pytest.raises(UnsupportedError, match="fuse_linear_all_reduce"):
        exchanges.alike([other], gm, OFF)


def test_undone():
    gm, out = run(in_tokens)
    before, want = copy.deepcopy(met(gm.graph)), gm(*given())
    exchanges.undo(gm, {**OFF, "fuse_linear_all_reduce": (fuse.PASS, True, out)}, "because")
    gm.graph.lint()
    assert (out.matched, out.applied, out.notes) == (1, 0, [])
    assert [r.reason for r in out.refused] == ["because"]
    assert count(gm, FUSED, LINEAR, c10d.all_reduce.default, c10d.wait_tensor.default) == [
        0, 1, 1, 1,
    ]  # fmt: skip
    assert met(gm.graph) == before
    assert torch.equal(gm(*given()), want)


def test_what_inductor_would_move_about():
    gm, _ = run(lambda *p: total(product(*p)) + total(product(*p), "max"))
    assert exchanges.unordered(gm) == [str(FUSED)]
    assert exchanges.unordered(fx.GraphModule({}, fx.Graph())) == []


# -- workspaces ------------------------------------------------------------------------------------


def test_workspaces_of_a_group_are_few_and_on_all_ranks_or_none(monkeypatch):
    made = {}
    monkeypatch.setattr(kernel, "_SPACES", made)
    monkeypatch.setattr(kernel, "prepare", lambda *key, normed: made.setdefault(key, 1))
    others = [None]
    monkeypatch.setattr(exchanges, "_said", lambda group, why: [why, *others])

    def shape(m):
        return fuse.Shape("g", m, N, BF16)

    others[:] = ["rank 1 is out of memory"]
    assert exchanges._without(shape(1)) == "rank 1 is out of memory"
    assert not made
    others[:] = [None]
    for m in range(fuse.MOST):
        assert exchanges._without(shape(m)) is None
    assert exchanges._without(shape(0)) is None, "a known one"
    assert "must not grow" in exchanges._without(shape(99))
    assert len(made) == fuse.MOST

    def fails(*key, normed):
        raise RuntimeError("no peer access")

    made.clear()
    monkeypatch.setattr(kernel, "prepare", fails)
    assert exchanges._without(shape(1)) == "no peer access"
