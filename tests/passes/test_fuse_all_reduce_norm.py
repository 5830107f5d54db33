"""fuse_all_reduce_norm: which sums and norms become one op, who needs all rows, and undoing it.

Graphs only: rank 0 of 2 in a group of torch's "fake" backend. What ranks exchange, and values, are
in tests/distributed/test_fused_sum.py and tests/kernels/test_linear_all_reduce_norm.py.

Legend: M rows, N features out, K in.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from rtc import exchanges
from rtc.errors import UnsupportedError
from rtc.kernels import linear_all_reduce as kernel
from rtc.passes import fuse_all_reduce_norm as fuse
from rtc.passes import fuse_linear_all_reduce
from rtc.passes.analysis.collectives import met
from rtc.passes.base import Outcome
from rtc.passes.nodes import arg_by_name

M, N, K = 4, 16, 32
F8, BF16 = torch.float8_e4m3fn, torch.bfloat16
rtc, c10d = torch.ops.rtc, torch.ops._c10d_functional


@pytest.fixture(autouse=True, scope="module")
def ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def group():
    return dist.group.WORLD.group_name


def given():
    x, w = torch.zeros(M, K).to(F8), torch.zeros(N, K).to(F8)
    return x, w, torch.ones(M, 1), torch.ones(N), torch.zeros(M, N, dtype=BF16), torch.ones(N)


def total(x, w, xs, ws):
    return rtc.linear_all_reduce(x, w, xs, ws, BF16, 2, group())


def tail(r, y, v, delta_scale=None):
    return rtc.residual_modulate_quantize(r, y, v, None, None, v, v, "rms", 1e-5, 1e-4, delta_scale)


def again(q, s, w):
    """The next linear's x, of q's columns twice."""
    return torch.cat([q.view(torch.uint8)] * 2, 1).view(F8), w, s


def traced(f):
    def six(x, w, xs, ws, r, v):
        return f(x, w, xs, ws, r, v)

    return make_fx(six, tracing_mode="fake")(*given())


def run(f):
    gm = traced(f)
    before = met(gm.graph)
    out = fuse.fuse(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert met(gm.graph) == before
    return gm, out, [arg_by_name(n, "whole") for n in gm.graph.nodes if n.target is fuse.BOTH]


def chain(x, w, xs, ws, r, v, end=lambda h, q, s: h + q.float() * s, between=lambda h: h):
    h, q, s = tail(r, total(x, w, xs, ws), v)
    x, w, xs = again(q, s, w)
    h, q, s = tail(between(h), total(x, w, xs, ws).view(1, M, N).view(M, N), v)
    return end(h, q, s)


def test_a_chain_keeps_own_rows():
    gm, out, whole = run(chain)
    assert (out.matched, out.applied, out.refused) == (2, 2, [])
    assert whole == [False, True]
    assert out.notes == ["1 of 2 leave each rank its own rows of the residual"]
    (shape,) = fuse_linear_all_reduce.shapes(gm.graph)
    assert shape == fuse_linear_all_reduce.Shape(group(), M, N, BF16, normed=True)


def reshaped(h):
    return h.view(1, M, N).reshape(M, N)


def turned_over(h):
    return h.view(N, M).t().contiguous().view(M, N)


def half(h):
    return h.view(2, -1)[:1].expand(2, -1).reshape(M, N)


@pytest.mark.parametrize(
    ("between", "whole"), [(reshaped, False), (turned_over, True), (half, True), (torch.neg, True)]
)
def test_who_reads_the_rows(between, whole):
    _, _, got = run(lambda *args: chain(*args, between=between))
    assert got == [whole, True]


@pytest.mark.parametrize(
    ("between", "compare"),
    [(reshaped, False), (turned_over, True), (half, True), (torch.neg, True)],
)
def test_whose_residual_is_compared_between_ranks(between, compare):
    """The first comes from nobody knows where; another op's rows are one rank's each."""
    gm, _, _ = run(lambda *args: chain(*args, between=between))
    got = [arg_by_name(n, "compare") for n in gm.graph.nodes if n.target is fuse.BOTH]
    assert got == [True, compare]


def test_rows_that_are_read_twice():
    """As the next residual, and by something else: as its gate's maker, an output, another norm."""

    def output(x, w, xs, ws, r, v):
        h, q, s = tail(r, total(x, w, xs, ws), v)
        x, w, xs = again(q, s, w)
        return h, tail(h, total(x, w, xs, ws), v)

    def vector(x, w, xs, ws, r, v):
        h, q, s = tail(r, total(x, w, xs, ws), v)
        x, w, xs = again(q, s, w)
        return tail(h, total(x, w, xs, ws), h[0].float() + v)

    def alone(x, w, xs, ws, r, v):
        h, q, s = tail(r, total(x, w, xs, ws), v)
        return q, s, rtc.modulate_quantize(h, None, None, v, v, "rms", 1e-5, 1e-4)

    for f in (output, vector, alone):
        assert run(f)[2][0] is True


def test_rows_that_others_finish():
    """The next op cuts the rows otherwise, or between other ranks."""

    def narrower(x, w, xs, ws, r, v):
        h = tail(r, total(x, w, xs, ws), v)[0]
        x = torch.cat([x.view(torch.uint8)] * 2).view(F8)
        return tail(h.view(2 * M, -1), total(x, w[: N // 2], xs.repeat(2, 1), ws[: N // 2]), v[:8])

    other = dist.new_group([0, 1]).group_name

    def elsewhere(x, w, xs, ws, r, v):
        h, q, s = tail(r, total(x, w, xs, ws), v)
        x, w, xs = again(q, s, w)
        return tail(h, rtc.linear_all_reduce(x, w, xs, ws, BF16, 2, other), v)

    for f in (narrower, elsewhere):
        assert run(f)[2] == [True, True]


def test_refused():
    def read(x, w, xs, ws, r, v):
        y = total(x, w, xs, ws)
        return tail(r, y, v), y

    def as_residual(x, w, xs, ws, r, v):
        return tail(total(x, w, xs, ws), r, v)

    def twice(x, w, xs, ws, r, v):
        y = total(x, w, xs, ws)
        return tail(y, y, v)

    def wide(x, w, xs, ws, r, v):
        return tail(r.float(), total(x, w, xs, ws), v)

    def scaled(x, w, xs, ws, r, v):
        return tail(r, total(x, w, xs, ws), v, xs)

    def shaped(x, w, xs, ws, r, v):
        return tail(r.view(M // 2, -1), total(x, w, xs, ws).view(M // 2, -1), v.repeat(2))

    def piece(x, w, xs, ws, r, v):
        """An operand is a piece of what is written."""
        first = (ws.clone() * 2).split(N // 2)[0]
        y = rtc.linear_all_reduce(x, w[: N // 2], xs, first, BF16, 2, group())
        first.add_(1)
        return tail(r[:, : N // 2].contiguous(), y, v[: N // 2])

    def flying(x, w, xs, ws, r, v):
        other = c10d.all_reduce(v * 2, "sum", group())
        h = tail(r, total(x, w, xs, ws), v)[0]
        return h + c10d.wait_tensor(other).sum()

    def crossed(x, w, xs, ws, r, v):
        y = total(x, w, xs, ws)
        other = total(x, w, xs, ws) * 2
        return tail(r, y, v), other

    reasons = {
        read: "its sum is read by something else than one fused norm",
        as_residual: "the sum is not the norm's delta alone",
        twice: "the sum is not the norm's delta alone",
        wide: "a residual of torch.float32, a sum of torch.bfloat16",
        scaled: "the norm scales the sum",
        shaped: "the norm reads it in another shape",
        piece: "an operand is written between the sum and the norm",
        flying: "another collective is on its way meanwhile",
        crossed: "another collective comes between the sum and the norm",
    }
    for f, reason in reasons.items():
        gm, out, whole = run(f)
        assert out.refused[0].reason == reason, f.__name__
        assert whole == []
        gm.graph.lint()


def test_an_operand_written_in_between():
    """Into a view of it."""

    def f(x, w, xs, ws, r, v):
        y = total(x, w, xs, ws)
        ws.view(2, -1).add_(1)
        return tail(r, y, v)

    _, out, _ = run(f)
    assert [r.reason for r in out.refused] == ["an operand is written between the sum and the norm"]


def test_split():
    gm, _, _ = run(chain)
    fuse.split(gm.graph)
    gm.graph.lint()
    count = [sum(n.target is t for n in gm.graph.nodes) for t in (fuse.SUM, fuse.TAIL, fuse.BOTH)]
    assert count == [2, 2, 0]
    assert fuse.fuse(gm.graph).applied == 2


def test_undone():
    gm, out, _ = run(chain)
    sums = Outcome(2, 2)
    names = {"fuse_linear_all_reduce": sums, "fuse_all_reduce_norm": out}
    exchanges.undo(gm, {n: (fuse.PASS, True, o) for n, o in names.items()}, "because")
    gm.graph.lint()
    assert [(o.applied, [r.reason for r in o.refused]) for o in (sums, out)] == 2 * [
        (0, ["because", "because"])
    ]
    assert not any(n.target in (fuse.SUM, fuse.BOTH) for n in gm.graph.nodes)


def test_all_graphs_of_a_compile_or_none(monkeypatch):
    """The plain graph has another reader of the sum: all sum for all rows, then."""

    def other(x, w, xs, ws, r, v):
        h, q, s = tail(r, total(x, w, xs, ws), v)
        x, w, xs = again(q, s, w)
        y = total(x, w, xs, ws)
        h, q, s = tail(h, y, v)
        return h + q.float() * s + y * 0

    def graphs(f):
        rewritten, plain = run(chain)[0], traced(f)
        done = Outcome(2, 2)
        outcomes[:] = [{"fuse_all_reduce_norm": (fuse.PASS, True, done)}, done]
        exchanges.alike([None, plain], rewritten, outcomes[0])
        assert done.applied == (2 if f is chain else 0)
        return rewritten, plain

    outcomes = []
    others = [None]
    monkeypatch.setattr(exchanges, "_said", lambda group, what: [what, others[0] or what])
    for f, fused in ((chain, 2), (other, 0)):
        for gm in graphs(f):
            assert sum(n.target is fuse.BOTH for n in gm.graph.nodes) == fused

    others[0] = "something else"
    with pytest.raises(UnsupportedError, match="ranks found different norms"):
        graphs(chain)
    others[0] = None

    # without their workspace on a GPU as well
    monkeypatch.setattr(exchanges, "_on_gpu", lambda gm: True)
    for there, fused in ((True, 2), (False, 0)):
        monkeypatch.setattr(kernel, "by_rows", lambda *key, there=there: there)
        both = graphs(chain)
        exchanges.settle([None, both[1]], both[0], outcomes[0])
        assert outcomes[1].applied == fused
        for gm in both:
            assert sum(n.target is fuse.BOTH for n in gm.graph.nodes) == fused


@pytest.mark.parametrize(("word", "text"), [(1, "waited in vain"), (2, "different residuals")])
def test_the_alarm_says_what_went_wrong(monkeypatch, word, text):
    gm, _, _ = run(chain)
    words = [torch.zeros(1, dtype=torch.int32)]
    monkeypatch.setattr(kernel, "error_words", lambda keys: words)
    monkeypatch.setattr(torch, "zeros", lambda n, pin_memory, **k: torch.full((n,), 0, **k))
    alarm = exchanges.Alarm(gm)
    alarm.look()
    words[0].fill_(word)
    alarm.look()  # its copy is on its way
    with pytest.raises(exchanges.ExchangeError, match=text):
        alarm.look()
