"""Complex rotations are handed to Inductor in reals."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import rtc
from rtc import reals

aten = torch.ops.aten


def pairs(x):
    return torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))


def rotate(x, table):
    """By frame, row and column, in float64."""
    a, b, c = table.split([2, 1, 1], 1)
    size = (2, 3, 2, -1)
    parts = [
        a[3:5].view(2, 1, 1, -1).expand(size),
        b[:3].view(1, 3, 1, -1).expand(size),
        c[:2].view(1, 1, 2, -1).expand(size),
    ]
    turn = torch.cat(parts, -1).reshape(12, 1, -1)
    return torch.view_as_real(pairs(x) * turn).flatten(2).type_as(x)


def back(x, table):
    """With what complex numbers know besides products."""
    turn = table[:12].unsqueeze(-2).transpose(0, -2).permute(1, 0, 2)
    y = pairs(x) * turn.conj().resolve_conj()
    turn = turn[0]
    y = y - pairs(x).clone() + turn[0].to(torch.complex128)
    y = torch.cat(y.split(5, -3), -3).repeat(1, 1, 2)
    return torch.view_as_real(y * table.real[:12, :1].unsqueeze(-1)).flatten(2)


def made_here(x, table):
    angles = torch.outer(torch.arange(12).double(), x[0, 0, :4].double())
    turn = torch.polar(1 + angles**2, angles)[:, None]
    index = torch.arange(12).flip(0)
    return torch.view_as_real(pairs(x)[index] * turn.index_select(0, index))


def narrow(x, table):
    y = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(y * table[:12, None].to(torch.complex64))


@pytest.mark.parametrize("f", [rotate, back, made_here, narrow])
def test_reals_compute_the_same(f):
    torch.manual_seed(0)
    x, table = torch.randn(12, 3, 8), torch.randn(20, 4, dtype=torch.complex128)
    gm = make_fx(f, tracing_mode="fake")(x, table)
    want = f(x, table)
    reals.spell(gm)
    gm.graph.lint()
    eps = 1e-15 if want.dtype == torch.float64 else 5e-7
    torch.testing.assert_close(gm(x, table), want, rtol=eps, atol=eps)
    left = [n for n in gm.graph.nodes if n.op == "call_function" and reals._is_complex(n)]
    assert left == []


def test_what_has_no_spelling_stays():
    def f(x):
        y = pairs(x)
        return torch.view_as_real(y.exp() * 2), torch.view_as_real(y * y.sum()), y

    x = torch.randn(12, 3, 8)
    gm = make_fx(f, tracing_mode="fake")(x)
    reals.spell(gm)
    gm.graph.lint()
    for a, b in zip(gm(x), f(x), strict=True):
        assert torch.equal(a, b)
    assert any(n.target is aten.exp.default for n in gm.graph.nodes)


def test_what_would_lie_otherwise_in_memory_stays():
    def f(a, b):
        y = torch.view_as_real(torch.view_as_complex(b).T * torch.view_as_complex(a))
        return y.as_strided((5,), (1,)) + 1, torch.view_as_real(
            torch.view_as_complex(b).T.conj() * 1
        )

    a, b = torch.randn(3, 4, 2), torch.randn(4, 3, 2)
    gm = make_fx(f, tracing_mode="fake")(a, b)
    reals.spell(gm)
    gm.graph.lint()
    for x, y in zip(gm(a, b), f(a, b), strict=True):
        assert torch.equal(x, y)
        assert x.stride() == y.stride()


def test_a_conjugated_input_and_numbers_without_axes_stay():
    def f(x, table, one):
        y = torch.view_as_complex(x)
        turned = torch.view_as_real((y * table).resolve_conj())
        return (
            turned,
            torch.view_as_real((y * one).transpose(0, 0)),
            torch.view_as_real(y.sum() * one),
        )

    x = torch.randn(3, 2)
    for table in (
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64),
    ):
        args = x, table, torch.randn((), dtype=torch.complex64)
        gm = make_fx(f, tracing_mode="fake")(*args)
        reals.spell(gm)
        gm.graph.lint()
        for got, want in zip(gm(*args), f(*args), strict=True):
            torch.testing.assert_close(got, want)


def test_a_value_is_read_where_it_was():
    """A complex buffer that is written: what is read before stays before."""

    def f(table, x):
        old = table[:4] * 2.0 * table[0]
        y = table * table
        table.copy_(y)
        return torch.view_as_real(old * y[:4])

    table = torch.randn(6, 4, dtype=torch.complex128)
    twin = table.clone()
    call = rtc.compile(f)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(call(twin, None), f(table, None), rtol=1e-14, atol=0)
            torch.testing.assert_close(twin, table, rtol=1e-14, atol=0)


def test_nothing_complex_reaches_inductor():
    """Which warns of it."""
    torch.manual_seed(0)
    x, table = torch.randn(12, 3, 8), torch.randn(20, 4, dtype=torch.complex128)
    call = rtc.compile(rotate)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("error", message=".*complex operators.*")
        torch.testing.assert_close(call(x, table), rotate(x, table))
