"""rtc::linear_all_reduce_norm: its kernel in Triton's interpreter, ranks of one process in turns.

Over Gloo: tests/distributed/test_fused_sum.py. On GPUs: bench/all_reduce/check.py.
"""

import dataclasses
import os
import subprocess
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from rtc.kernels import linear_all_reduce_digests as digests
from rtc.kernels import linear_all_reduce_norm as op
from rtc.kernels import linear_all_reduce_rows as rows
from rtc.kernels import linear_fp8, modulate_quantize
from rtc.kernels.linear_all_reduce_rows import COLLECT, FINISH, PUBLISH, Norm
from rtc.kernels.linear_all_reduce_rows_layout import Rows, RowsLayout
from rtc.kernels.linear_all_reduce_space import CONTROL, ERROR, OTHERS, Space

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
INTERPRET = rows.triton is not None and os.environ.get("TRITON_INTERPRET") == "1"

in_interpreter = pytest.mark.skipif(not INTERPRET, reason="in a process with TRITON_INTERPRET=1")


def make(m, n, k, seed, by_row=True):
    """x, w, x_scale, w_scale of one rank; scales far apart, so that another row's shows."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(shape, generator=g)

    x, w = (rand(m, k) * 2).to(FP8), (rand(n, k) * 2).to(FP8)
    if not by_row:
        return x, w, torch.tensor(0.03), torch.tensor([0.02])
    return x, w, torch.exp(rand(m, 1) * 0.7) * 0.02, torch.exp(rand(n) * 0.7) * 0.02


def following(m, n, seed, norm="layer", whole=False, full=True):
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(shape, generator=g)

    wide = rand(m, n + 16).to(BF16)
    gate, weight, bias = (rand(n), 1 + rand(n), rand(n)) if full else (None, None, None)
    scale, shift = 1 + rand(n) * 0.3, rand(n)
    return Norm(wide[:, :n], gate, weight, bias, scale, shift, norm, 1e-5, 1e-4, whole)


def ranks(m, n, world, config=None, limit=3):
    """Spaces of ranks in one process; what is yet to come is poisoned, as fresh memory may be."""
    config = config or Rows(per_sm=1, multiprocessors=3)
    layout = RowsLayout(world, m, n, config.marks(m, n), BF16)
    peers = [torch.zeros(layout.bytes, dtype=torch.uint8) for _ in range(world)]
    for p in peers:
        p[layout.scales :] = 0xFF
    spaces = [Space(layout, r, peers, config) for r in range(world)]
    for s in spaces:
        s.limit = limit
    return spaces


def outs(spaces, norm):
    made = [rows.empty(s, s.one, norm) for s in spaces]
    for out in made:
        out[0].fill_(7.0)
        if norm is not None:
            out[2].fill_(7.0)
    return made


def products(spaces, args, norms=None):
    """By the reference: cuBLAS is not here."""
    for i, (s, (x, w, xs, ws)) in enumerate(zip(spaces, args, strict=True)):
        rows.send_scales(s, xs, ws)
        if norms is not None:
            n = norms[i]
            digests.send(s, n.residual if n.compare else None, n.vectors)
        for r, there in enumerate(s.peers):
            own = s.layout.rows(r)
            part = linear_fp8.reference(x[own.start : own.stop], w, torch.ones(1), torch.ones(1))
            s.layout.part(there, s.rank, len(own)).copy_(part)


def call(spaces, args, norm):
    """norm: that of all ranks, or a list."""
    norms = norm if isinstance(norm, list) else [norm] * len(spaces)
    products(spaces, args, None if norms[0] is None else norms)
    made = outs(spaces, norms[0])
    for stage in (PUBLISH, FINISH, COLLECT):
        for s, n, out in zip(spaces, norms, made, strict=True):
            rows.finish(s, n, out, stage)
    return made


def total(args):
    """Parts rounded before their scales, as the kernel takes them; float64."""
    one = torch.ones(1)
    return sum(
        linear_fp8.reference(x, w, one, one).to(BF16).double()
        * xs.double()
        * ws.double().view(1, -1)
        for x, w, xs, ws in args
    )


def off(got, want):
    far = (got.double() - want.double()).norm()
    return (far / want.double().norm()).item() if want.numel() else far.item()


def check(made, args, norm, world):
    want = total(args)
    if norm is None:
        for new, _, _ in made:
            assert off(new, want) < 4e-3  # a rounding to bf16, here a truncation
            assert torch.equal(new, made[0][0])
        return
    x = norm.residual.double() + (1 if norm.gate is None else norm.gate.double()) * want
    given = (norm.weight, norm.bias, norm.scale, norm.shift, norm.norm, norm.eps, norm.floor)
    m = x.shape[0]
    for rank, (new, q, s) in enumerate(made):
        mine = op.own_rows(m, world, rank)
        kept = range(m) if norm.whole else mine
        assert off(new[kept], x[kept]) < 4e-3
        if not norm.whole:
            others = [i for i in range(m) if i not in mine]
            assert (new[others] == 7.0).all()
        assert torch.equal(q.view(torch.uint8), made[0][1].view(torch.uint8))
        assert torch.equal(s, made[0][2])
    rounded = x.to(BF16)  # kernels truncate in the interpreter: at most a unit of bf16 apart
    _, q64, s64 = modulate_quantize.reference(rounded, None, None, *given)
    assert off(made[0][2], s64) < 2e-2
    assert off(made[0][1].float() * made[0][2], q64.float() * s64) < 4e-2


@in_interpreter
class TestKernel:
    @pytest.mark.parametrize(
        ("world", "m", "norm", "whole", "full", "by_row"),
        [
            (2, 19, "layer", False, True, True),
            (2, 8, "rms", True, False, False),
            (3, 7, "layer", True, True, True),
            (4, 5, "rms", False, True, True),  # the last rank has no rows
        ],
    )
    def test_values(self, world, m, norm, whole, full, by_row):
        spaces = ranks(m, 48, world)
        for n in range(3):  # epochs go on, boxes are used again
            args = [make(m, 48, 32, 10 * n + r, by_row) for r in range(world)]
            f = following(m, 48, n, norm, whole, full)
            check(call(spaces, args, f), args, f, world)
        check(call(spaces, args, None), args, None, world)  # the sum alone, in the same workspace
        assert [s.control[0].item() for s in spaces] == [4] * world
        assert not any(s.control[ERROR] for s in spaces)

    def test_nan_stays(self):
        spaces = ranks(6, 32, 2)
        args = [make(6, 32, 16, r) for r in range(2)]
        f = following(6, 32, 0, whole=True)
        f.residual[1, 3] = float("nan")
        for new, q, s in call(spaces, args, f):
            bad = (q.float() * s).isnan().any(1)
            assert bad.tolist() == [False, True, False, False, False, False]
            assert new.isnan().any(1).tolist() == bad.tolist()

    def test_a_late_peer(self):
        """Its part is the last call's: NaN, for all rows and calls, and the peer is told first."""
        spaces = ranks(6, 32, 2)
        args = [make(6, 32, 16, r) for r in range(2)]
        f = following(6, 32, 0, whole=True)
        call(spaces, args, f)
        rows.send_scales(spaces[0], *args[0][2:])
        out = outs(spaces[:1], f)[0]
        rows.finish(spaces[0], f, out)  # rank 1 has not come
        assert (out[1].float() * out[2]).isnan().all()
        assert out[0].isnan().all()
        assert spaces[1].control[ERROR] == 1
        assert all((q.float() * s).isnan().all() for _, q, s in call(spaces, args, f))

    @pytest.mark.parametrize("name", ["gate", "weight", "bias", "scale", "shift"])
    def test_a_vector_differs_between_ranks(self, name):
        """Every row is normed by one rank for all: NaN everywhere, from then on."""
        spaces = ranks(6, 32, 2)
        args = [make(6, 32, 16, r) for r in range(2)]
        f = following(6, 32, 0)
        check(call(spaces, args, f), args, f, 2)
        v = getattr(f, name).clone()
        v[5:9] += 1
        made = call(spaces, args, [f, dataclasses.replace(f, **{name: v})])
        assert all((q.float() * s).isnan().all() for _, q, s in made)
        assert [s.control[ERROR].item() for s in spaces] == [OTHERS] * 2
        assert all((q.float() * s).isnan().all() for _, q, s in call(spaces, args, f))
        with pytest.raises(RuntimeError, match="different residuals or vectors"):
            spaces[0].check()

    @pytest.mark.parametrize(("row", "on"), [(0, 0), (3, 2), (4, 1), (10, 0), (10, 2)])
    def test_a_row_differs_between_ranks(self, row, on):
        """The rank that finishes it sees that, whichever differs, and tells the others. Four rows a
        rank, three programs: one has two."""
        spaces = ranks(11, 32, 3)
        args = [make(11, 32, 16, r) for r in range(3)]
        f = following(11, 32, 0, whole=True)
        check(call(spaces, args, f), args, f, 3)
        x = f.residual.clone()
        x[row] = x[row].flip(0)
        norms = [dataclasses.replace(f, residual=x) if r == on else f for r in range(3)]
        for new, q, s in call(spaces, args, norms):
            assert new[row].isnan().all()
            assert (q.float() * s)[row].isnan().all()
        assert [s.control[ERROR].item() for s in spaces] == [OTHERS] * 3

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e25])
    def test_a_row_is_no_number_on_one_rank(self, value):
        spaces = ranks(4, 32, 2)
        args = [make(4, 32, 16, r) for r in range(2)]
        f = following(4, 32, 0)
        x = f.residual.clone()
        x[0, 7] = value
        call(spaces, args, [f, dataclasses.replace(f, residual=x)])
        assert [s.control[ERROR].item() for s in spaces] == [OTHERS] * 2

    def test_what_both_have_is_no_difference(self):
        """However large, small or infinite."""
        spaces = ranks(6, 32, 2)
        args = [make(6, 32, 16, r) for r in range(2)]
        f = following(6, 32, 0)
        f.residual[0, 3], f.residual[1, 3], f.residual[2, 3] = float("inf"), -float("inf"), 1e30
        f.residual[3] = f.residual[3] * 1e-30
        f.residual[4] = 0
        call(spaces, args, [f, dataclasses.replace(f, residual=f.residual * (1 + 2**-7))])
        assert not any(s.control[ERROR] for s in spaces)

    def test_half_of_the_norm_is_seen_in_each_row(self):
        """And in either direction against a row of zeros. 50 rows, of a difference each its own."""
        g = torch.Generator().manual_seed(3)
        f = following(1, 512, 0)
        seen = []
        for i in range(50):
            spaces = ranks(1, 512, 2, Rows(per_sm=1, multiprocessors=1))
            d = torch.randn(512, generator=g)
            x = f.residual + 0.5 * d * f.residual.float().norm() / d.norm()
            if i < 2:
                x = f.residual * 0
            norms = [f, dataclasses.replace(f, residual=x.to(BF16))]
            for s, n in zip(spaces, norms[:: 1 - 2 * (i % 2)], strict=True):
                digests.send(s, n.residual, n.vectors)
            rows.finish(spaces[1], f, outs(spaces, f)[1], PUBLISH)
            rows.finish(spaces[0], f, outs(spaces, f)[0], FINISH)
            seen.append(spaces[0].control[ERROR].item())
        assert seen == [OTHERS] * 50

    def test_the_first_reason_counts(self):
        """A peer that has given up, and gone on to other values, was late and not different."""
        spaces = ranks(6, 32, 2)
        args = [make(6, 32, 16, r) for r in range(2)]
        f = following(6, 32, 0, whole=True)
        call(spaces, args, f)
        other = dataclasses.replace(f, residual=-f.residual)
        for s in spaces:
            s.control[ERROR] = 1
        call(spaces, args, [f, other])
        assert [s.control[ERROR].item() for s in spaces] == [1, 1]

    def test_roundings_and_rows_of_nobody_else_are_no_difference(self):
        spaces = ranks(6, 32, 2)
        args = [make(6, 32, 16, r) for r in range(2)]
        f = following(6, 32, 0)
        up = {k: getattr(f, k) * (1 + 2**-8) for k in ("gate", "weight", "bias", "scale", "shift")}
        near = dataclasses.replace(f, residual=f.residual * (1 + 2**-7), **up)
        assert all(q.float().isfinite().all() for _, q, _ in call(spaces, args, [f, near]))
        mine = []
        for r in range(2):  # as the call before leaves it
            x = torch.full_like(f.residual, float("nan"))
            own = op.own_rows(6, 2, r)
            x[own.start : own.stop] = f.residual[own.start : own.stop]
            mine.append(dataclasses.replace(f, residual=x, compare=False))
        check(call(spaces, args, mine), args, f, 2)
        assert not any(s.control[ERROR] for s in spaces)

    def test_who_gave_up_sends_no_rows(self):
        """The peer may still be taking the last call's rows in."""
        spaces = ranks(6, 32, 2)
        args = [make(6, 32, 16, r) for r in range(2)]
        f = following(6, 32, 0, whole=True)
        call(spaces, args, f)
        at, before = spaces[0].layout, spaces[0].buffer.clone()
        out = outs(spaces[1:], f)[0]
        other = following(6, 32, 1, whole=True)
        rows.finish(spaces[1], other, out, FINISH)  # rank 0 has not come
        assert torch.equal(spaces[0].buffer[at.q :], before[at.q :])
        assert spaces[1].control[ERROR] == 1

    @pytest.mark.parametrize(
        "kinds", [((True, True), None), (None, (False, True)), ((False, True), (True, True)),
                  ((True, True), (True, False))]
    )  # fmt: skip
    def test_calls_of_two_kinds(self, kinds):
        """The norm whole, of own rows, with the residual compared or not, and the sum alone: each
        would read what nobody wrote."""
        spaces = ranks(6, 32, 2)
        args = [make(6, 32, 16, r) for r in range(2)]
        call(spaces, args, None)
        call(spaces, args, following(6, 32, 0, whole=True))
        products(spaces, args)
        norms = [
            k and dataclasses.replace(following(6, 32, 0, whole=k[0]), compare=k[1]) for k in kinds
        ]
        made = [outs([s], n)[0] for s, n in zip(spaces, norms, strict=True)]
        for stage in (PUBLISH, FINISH):
            for s, n, out in zip(spaces, norms, made, strict=True):
                rows.finish(s, n, out, stage)
        for r, (new, q, s) in enumerate(made):
            mine = op.own_rows(6, 2, r)
            assert new[mine].isnan().all()
            assert q is None or s[mine].isnan().all()
        assert [s.control[ERROR].item() for s in spaces] == [1, 1]

    def test_told_while_it_reads(self, monkeypatch):
        """The others have gone on: what was added may be of two calls."""
        spaces = ranks(6, 32, 2)
        args = [make(6, 32, 16, r) for r in range(2)]
        f = following(6, 32, 0)
        products(spaces, args)
        made = outs(spaces, f)
        for s, out in zip(spaces, made, strict=True):
            rows.finish(s, f, out, PUBLISH)
        monkeypatch.setattr(rows, "arrived", arrived_and_told)
        rows.finish(spaces[0], f, made[0], FINISH)
        monkeypatch.undo()
        rows.finish(spaces[1], f, made[1], FINISH)
        rows.finish(spaces[1], f, made[1], COLLECT)
        _, q, s = made[1]
        lost = (q.float() * s).isnan().all(1)
        assert lost.tolist() == [True] * 3 + [False] * 3  # rank 0's rows


if INTERPRET:
    import triton
    import triton.language as tl

    @triton.jit
    def arrived_and_told(flag, want, error, limit, SCOPE: tl.constexpr):
        """The part is there, and then a peer says that it has gone on."""
        tl.atomic_xchg(error, 1)
        return tl.load(flag) - want >= 0


def test_in_the_interpreter():
    """This file again, in a process of its own: the choice is made at import."""
    if rows.triton is None:
        pytest.skip("no triton")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    cmd = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "TestKernel",
    ]
    done = subprocess.run(cmd, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


def test_layout():
    at = RowsLayout(3, 757, 7680, 264, BF16)
    bounds = [CONTROL * 4, at.ready, at.flags, at.scales, at.digests]
    bounds += [at.parts, at.news, at.s, at.q, at.bytes]
    assert bounds == sorted(bounds)
    assert at.scales - at.flags >= 3 * 264 * 4
    assert at.digests - at.scales >= 3 * (757 + 7680) * 4
    assert at.parts - at.digests >= 3 * (253 + 5) * 8 * 4
    assert at.news - at.parts >= 759 * 7680 * 2
    assert at.s - at.news >= 757 * 7680 * 2
    assert at.bytes - at.q >= 757 * 7680
    assert {b % 16 for b in bounds} == {0}
    assert [len(op.own_rows(757, 3, r)) for r in range(3)] == [253, 253, 251]
    assert len(op.own_rows(5, 4, 3)) == 0
