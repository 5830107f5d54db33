"""Keys whose position work looks like a rotation on samples, or to who reads angles off it, and is
none: they are folded into queries by nobody, and come out as in eager when positions jump back.

Legend: 14 slots, 3 new a call, raw keys in the cache, turned at every read.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rtc.passes.analysis.tables import changed
from rtc.passes.drift import apart
from rtc.passes.rotation import BENT
from rtc.testing import assert_pass_counts

from .models import Attention, chain, pair, zeros


def angles(pos, freq):
    return pos.double()[:, None] * freq


def half(x, ang):
    a, b = x.chunk(2, -1)
    return a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()


def usual(x, ang):
    return torch.cat(half(x, ang), -1)


def parts_swapped(x, ang):
    return torch.cat(half(x, ang)[::-1], -1)


def conjugated(x, ang):
    real, imag = half(x, ang)
    return torch.cat([real, -imag], -1)


def one_part_scaled(x, ang):
    real, imag = half(x, ang)
    return torch.cat([real, imag * 0.5], -1)


def butterfly(x, ang):
    real, imag = half(x, ang)
    return torch.cat([real + imag, real - imag], -1)


def swapped_by_wide_tables(x, ang):
    """The same as parts_swapped: that shows in the tables' values only."""
    cos, sin = torch.cat([ang.cos(), ang.cos()], -1), torch.cat([ang.sin(), -ang.sin()], -1)
    return x * sin + x.roll(4, -1) * cos


def clamped(x, ang):
    return usual(x, ang).clamp(-20, 20)


def hardtanh(x, ang):
    return F.hardtanh(usual(x, ang), -20.0, 20.0)


def where(x, ang):
    y = usual(x, ang)
    return torch.where(y.abs() > 20, y * 0.5, y)


def whole_part_off(x, ang):
    """fmod, by a division that rounds."""
    y = usual(x, ang)
    return y - 20 * torch.div(y, 20.0, rounding_mode="trunc")


def bent_far_out(x, ang):
    """Rational, and as good as linear on samples."""
    y = usual(x, ang)
    return y / (1 + 1e-12 * y.pow(4))


def soft_cap(x, ang):
    return 1e3 * torch.tanh(usual(x, ang) / 1e3)


def stretched(x, ang):
    """By products of table entries, in which it is not linear."""
    (a, b), (real, imag), cos, sin = x.chunk(2, -1), half(x, ang), ang.cos(), ang.sin()
    return torch.cat([real + a * cos * sin * 0.03, imag + b * cos * sin * 0.03], -1)


class Turned(Attention):
    turn = staticmethod(usual)
    size = 1.0
    dtype = torch.float64  # of caches and attention

    def __init__(self):
        super().__init__()
        self.register_buffer("k", zeros().to(self.dtype))
        self.register_buffer("v", zeros().to(self.dtype))

    def freqs(self):
        return self.freq

    def forward(self, x, step):
        n = x.shape[1]
        rows = self.qkv(x * self.size).to(self.dtype)
        q, k, v = rows.view(1, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((self.k, k), (self.v, v)):
            cache.copy_(torch.cat([cache[:, :, n:], new], 2))
        ang = angles(torch.arange(14) + 3 * (step % 9), self.freqs())
        q, k = (self.turn(r, a).to(self.dtype) for r, a in ((q, ang[-n:]), (self.k, ang)))
        y = F.scaled_dot_product_attention(q, k, self.v, scale=0.3 / self.size**2)
        return self.o(y.transpose(1, 2).flatten(2).to(x.dtype))


def model(of, large=1.0, numbers=False, of_dtype=torch.float64):
    class Model(Turned):
        turn = staticmethod(of)
        size = large
        dtype = of_dtype

        def freqs(self):
            return torch.tensor([1.0, 0.31, 0.1, 0.017]).double() if numbers else self.freq

    return Model


@pytest.mark.parametrize("numbers", [False, True], ids=["buffer", "numbers"])
@pytest.mark.parametrize(
    "of", [parts_swapped, conjugated, one_part_scaled, butterfly, swapped_by_wide_tables]
)
def test_pairs_that_do_not_turn_as_one(of, numbers):
    eager, _, compiled = pair(model(of, numbers=numbers))
    chain(eager, compiled, range(40))
    assert compiled.report().to_dict()["runtime"]["folds"] == 0


@pytest.mark.parametrize("of", [clamped, hardtanh, where, soft_cap, whole_part_off, bent_far_out])
def test_work_that_samples_would_not_show(of):
    eager, _, compiled = pair(model(of, large=40.0))
    chain(eager, compiled, range(30))
    assert compiled.report().to_dict()["runtime"]["folds"] == 0


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("of", [usual, stretched])
def test_products_of_table_entries_in_coarse_dtypes(of, dtype):
    """Keys that were turned by folding are rounded once more, and sums come in ring order."""
    eager, _, compiled = pair(model(of, of_dtype=dtype))
    chain(eager, compiled, range(40), 4 * torch.finfo(dtype).eps)
    assert (compiled.report().to_dict()["runtime"]["folds"] > 0) == (of is usual)


def polar(ang):
    return torch.polar(torch.ones_like(ang), ang)


def by_complex_product(x, ang):
    """As Wan and Llama spell it."""
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * polar(ang)).flatten(-2)


def by_complex_product_beside_heads(x, ang):
    """Heads behind tokens meanwhile."""
    x = x.transpose(1, 2)
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turned = torch.view_as_real(z * polar(ang)[:, None]).flatten(3)
    return turned.type_as(x).transpose(1, 2)


@pytest.mark.parametrize("numbers", [False, True], ids=["buffer", "numbers"])
@pytest.mark.parametrize("of", [usual, by_complex_product, by_complex_product_beside_heads])
def test_the_usual_turns_fold(of, numbers):
    eager, _, compiled = pair(model(of, numbers=numbers))
    chain(eager, compiled, range(40))
    assert compiled.report().to_dict()["runtime"]["folds"] > 0


def test_tables_of_a_buffer_that_do_not_turn_take_the_plain_path():
    eager, _, compiled = pair(model(swapped_by_wide_tables))
    chain(eager, compiled, range(20))
    assert BENT in str(compiled.report())


class Masked(Turned):
    """A table that is worked into a bias of each slot, with what does not count at -inf."""

    low = -torch.inf

    def forward(self, x, step):
        n = x.shape[1]
        q, k, v = self.qkv(x).view(1, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        at = 2 + (n * step) % 12
        self.k[:, :, at : at + n], self.v[:, :, at : at + n] = k, v
        age = (at + n - 1 - torch.arange(14)) % 14
        bias = (self.k * 0.3).sum(-1) + torch.where(age < 8, 0.0, self.low).double()
        scores = q @ self.k.mT * 0.3 + bias[:, :, None]
        return self.o((scores.softmax(-1) @ self.v).transpose(1, 2).flatten(2))


class MaskedByNumber(Masked):
    low = -1e30


@pytest.mark.parametrize("of", [Masked, MaskedByNumber])
def test_a_table_that_turns_infinite(of):
    eager, _, compiled = pair(of)
    chain(eager, compiled, range(30))


def test_what_is_infinite_or_no_number_differs_from_what_is_not():
    inf, nan = torch.inf, torch.nan
    a = torch.tensor([[0.0], [0.0], [inf], [inf], [nan], [nan], [-inf]]).double()
    b = torch.tensor([[inf], [nan], [0.0], [inf], [nan], [1.0], [inf]]).double()
    want = [True, True, True, False, False, True, True]
    assert changed(a, b).tolist() == want
    assert apart(a.numpy().astype(complex), b.numpy().astype(complex), 1e-16).tolist() == want
    assert not changed(a, a).any()
    assert np.array_equal(apart(a.numpy() + 0j, a.numpy() + 0j, 1e-16), [False] * 7)


def complex_conjugate(x, ang):
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    turned = (z * torch.polar(torch.ones_like(ang), ang)).conj().resolve_conj()
    return torch.view_as_real(turned).flatten(-2)


def test_a_conjugate_that_is_put_off():
    eager, _, compiled = pair(model(complex_conjugate))
    chain(eager, compiled, range(30))


@pytest.mark.parametrize("numbers", [False, True], ids=["buffer", "numbers"])
def test_another_number_of_new_tokens(numbers):
    """The look ahead takes sizes to stay, and errors beyond the end for nothing."""
    eager, _, compiled = pair(model(usual, numbers=numbers))
    for step, n in enumerate([3, 3, 2, 2, 1, 3, 3]):
        x = torch.randn(1, n, 6).double()
        torch.testing.assert_close(compiled(x, step), eager(x, step), rtol=1e-12, atol=1e-12)


class Preallocated(Turned):
    """The look ahead runs past the end of the buffer."""

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 2, 3, 2, 8).permute(2, 0, 3, 1, 4)
        self.k[:, :, step : step + 2], self.v[:, :, step : step + 2] = k, v
        freq, pos = torch.tensor([1.0, 0.31, 0.1, 0.017]).double(), torch.arange(14)
        q, k = usual(q, angles(torch.arange(2) + step, freq)), usual(self.k, angles(pos, freq))
        y = F.scaled_dot_product_attention(q, k, self.v, attn_mask=(pos < step + 2)[None, None])
        return self.o(y.transpose(1, 2).flatten(2))


def test_a_buffer_that_ends_within_the_look_ahead():
    eager, _, compiled = pair(Preallocated)
    for step in range(0, 14, 2):
        x = torch.randn(1, 2, 6).double()
        torch.testing.assert_close(compiled(x, step), eager(x, step), rtol=1e-12, atol=1e-12)


class Frames(Turned):
    """A cache of frames, each stored whole by its number: ``cache[:, i] = k``."""

    def __init__(self):
        super().__init__()
        self.k, self.v = (torch.zeros(1, 5, 4, 2, 8).double() for _ in "kv")

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 4, 3, 2, 8).unbind(2)
        i = step % 5
        self.k[:, i], self.v[:, i] = k, v
        frames = step - (step - torch.arange(5)) % 5
        freq = torch.tensor([1.0, 0.31, 0.1, 0.017]).double()
        pos = (frames[:, None] * 4 + torch.arange(4)).flatten()
        keys, values = (c.flatten(1, 2).transpose(1, 2) for c in (self.k, self.v))
        q = usual(q.transpose(1, 2), angles(torch.arange(4) + 4 * step, freq))
        y = F.scaled_dot_product_attention(q, usual(keys, angles(pos, freq)), values)
        return self.o(y.transpose(1, 2).flatten(2))


def test_frames_that_are_stored_by_their_number():
    eager, twin, compiled = pair(Frames)
    for step in range(30):
        x = torch.randn(1, 4, 6).double()
        torch.testing.assert_close(compiled(x, step), eager(x, step), rtol=1e-12, atol=1e-12)
        if step % 7 == 3:
            torch.testing.assert_close(twin.k, eager.k)
            torch.testing.assert_close(twin.v, eager.v)
    graphs = 5  # a graph for each number: what is stored where is known when compiling
    assert_pass_counts(compiled, {"hoist_rope": graphs, "ring_cache": 2 * graphs})


class OneSinkToken(Turned):
    """One kept slot is computed again, of tables of two widths: marks, and whole positions."""

    def turned(self, x, pos, mark):
        freq = torch.tensor([1.0, 0.31, 0.1]).double()
        ang = angles(pos, freq)
        a, b, rest = x.split([3, 3, 2], -1)
        turned = a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()
        return torch.cat([*turned, rest * mark[:, None]], -1)

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((self.k, k), (self.v, v)):
            cache.copy_(torch.cat([cache[:, :, :1], cache[:, :, 4:], new], 2))
        pos = torch.arange(14)
        mark = torch.where(pos % 2 == 0, 1.0, -1.0).float()
        q, k = self.turned(q, pos[-3:], mark[-3:]), self.turned(self.k, pos, mark)
        y = F.scaled_dot_product_attention(q, k, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


def test_one_slot_alone_is_computed_again():
    eager, _, compiled = pair(OneSinkToken)
    chain(eager, compiled, range(20))
