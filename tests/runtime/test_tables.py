"""Position tables: known by narrow keys, made for the rows that a call needs, judged once."""

# mypy: no-check-untyped-defs, allow-untyped-defs

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from rtc.passes.analysis.tables import ClassTables

from .models import Attention, chain, close, pair, rope, x, zeros


def widths(compiled):
    """Bytes by which each class of views knows a slot's table rows."""
    states = compiled._session.states
    return sorted(c.made.shape[1] for st in states for c in st.classes.values() if c.made.size)


class Base(Attention):
    """Keys rotated in the whole window; ``angles`` makes the table."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k", zeros())
        self.register_buffer("v", zeros())
        self.register_buffer("table", torch.randn(400, 4).double())

    def forward(self, x, step):
        n = x.shape[1]
        q, k, v = self.qkv(x).view(1, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((self.k, k), (self.v, v)):
            cache.copy_(torch.cat([cache[:, :, n:], new], 2))
        ang = self.angles(step)
        a, b = self.k.chunk(2, -1)
        keys = torch.cat([a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()], -1)
        y = F.scaled_dot_product_attention(q, keys, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


class Positions(Base):
    def angles(self, step):
        return (torch.arange(14) + 3 * step).double()[:, None] * self.freq


class Sliced(Base):
    def angles(self, step):
        return self.table[3 * step : 3 * step + 14]


class Indexed(Base):
    def angles(self, step):
        return self.table[torch.arange(14) + 3 * step]


class Grid(Base):
    """Two frames of seven tokens: one axis varies with the step, the other never."""

    def angles(self, step):
        t = (torch.arange(2) + step).double()[:, None, None] * self.freq[:2]
        p = torch.arange(7).double()[None, :, None] * self.freq[2:]
        return torch.cat([t.expand(2, 7, 2), p.expand(2, 7, 2)], -1).reshape(14, 4)


class Joined(Base):
    """A frame has three tokens: kept slots keep their positions, and a new one's row is an old one's.
    Angles of the two are joined before their cosines are taken."""

    def angles(self, step):
        s = torch.arange(14) + 3 * step
        t, p = (s // 3).double()[:, None], (s % 3).double()[:, None]
        return torch.cat([t * self.freq[:2], p * self.freq[2:]], -1)


class Scaled(Base):
    """A number that changes for all slots at once is no number of a slot: wide keys, right."""

    def angles(self, step):
        ang = (torch.arange(14) + 3 * step).double()[:, None] * self.freq
        return ang * (1 + step // 10)


def run(model, steps=24):
    eager, _, compiled = pair(model)
    chain(eager, compiled, range(steps))
    return widths(compiled)


def test_keys_are_one_number_a_slot_and_axis():
    assert max(run(Positions)) <= 2 * 8  # cosine's and sine's leaf
    assert max(run(Sliced)) <= 2 * 8
    assert max(run(Indexed)) <= 2 * 8
    assert max(run(Grid)) <= 4 * 8


def test_keys_that_operands_share_stand_there_once():
    keys = {name: torch.arange(3)[:, None] * at for at, name in enumerate("abc", 1)}

    def reader(names):
        def rows(env, parts, memo):
            return torch.cat(parts, 1)

        return SimpleNamespace(idents=names, keys=lambda *args: [keys[n] for n in names], rows=rows)

    readers = [reader(names) for names in (["a", "b"], ["b", "a"], ["b", "c"], [])]
    readers[-1].rows = lambda env, parts, memo: len(parts)
    tables = ClassTables(readers)
    found = tables.keys(None, np.arange(3), {}, {})
    assert found.shape == (3, 3 * 8)
    *rows, none = tables.rows({}, found)
    for got, names in zip(rows, ("ab", "ba", "bc"), strict=True):
        assert torch.equal(got, torch.cat([keys[n] for n in names], 1))
    assert none == 0


def test_what_is_not_narrow_is_right():
    assert max(run(Scaled)) >= 4 * 8


def test_a_table_that_changes_under_its_row_numbers():
    eager, model, compiled = pair(Sliced)
    chain(eager, compiled, range(8))
    for m in (eager, model):
        m.table.mul_(1.1)
    chain(eager, compiled, range(8, 16))


class Mixed(Base):
    """A step in bytes, whose negative wraps round (not the first one); joined, it is float64."""

    def angles(self, step):
        s = torch.arange(14)
        t = (0 * s + step).to(torch.uint8)[:, None].expand(14, 2)
        return -torch.cat([t, s.double()[:, None] * self.freq[:2]], -1)


def test_pieces_of_several_dtypes_become_one_before_a_function_of_them():
    eager, _, compiled = pair(Mixed)
    chain(eager, compiled, range(6))


def test_a_piece_of_a_table_that_changes_beside_one_that_stays():
    eager, model, compiled = pair(Joined)
    chain(eager, compiled, range(8))
    for m in (eager, model):
        m.freq.mul_(1.1)
    chain(eager, compiled, range(8, 16))


class Resetting(Attention):
    """Positions jump back every tenth step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k", zeros())
        self.register_buffer("v", zeros())

    def forward(self, x, step):
        n = x.shape[1]
        q, k, v = self.qkv(x).view(1, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:, :, 2:-n] = cache[:, :, 2 + n :].clone()
            cache[:, :, -n:] = new
        pos = torch.cat([torch.arange(2), torch.arange(2, 14) + 3 * (step % 10)]).to(x.dtype)
        keys = rope(self.k, pos, self.freq)
        y = F.scaled_dot_product_attention(rope(q, pos[-n:], self.freq), keys, self.v)
        return self.o(y.transpose(1, 2).flatten(2))


def test_resets_are_known_before_they_come(graph_runtimes):
    """The rehearsal after the first call meets every pattern of positions that follows."""
    eager, _, compiled = pair(Resetting)
    chain(eager, compiled, range(1))
    (cohort,) = graph_runtimes[0].cohorts
    known = set(cohort.compared)
    assert known
    chain(eager, compiled, range(1, 60))
    assert set(cohort.compared) == known
    assert compiled.report().to_dict()["runtime"]["folds"] == 5


def test_a_rehearsal_of_another_future_does_no_harm():
    """Every int goes on by one in the rehearsal; in truth it jumps about."""
    eager, _, compiled = pair(Resetting)
    for step in (0, 5, 6, 27, 28, 3, 99, 100, 41, 42, 7):
        close(compiled(x(step), step), eager(x(step), step))


def test_rows_that_join_after_the_rotation_are_not_rotated():
    """Prompt keys come rotated already: they have no row of the table."""

    class Prompted(Positions):
        def __init__(self):
            super().__init__()
            self.register_buffer("text", torch.randn(1, 2, 3, 8).double())

        def forward(self, x, step):
            n = x.shape[1]
            q, k, v = self.qkv(x).view(1, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
            for cache, new in ((self.k, k), (self.v, v)):
                cache.copy_(torch.cat([cache[:, :, n:], new], 2))
            keys = torch.cat([rope(self.k, torch.arange(14) + 3.0 * step, self.freq), self.text], 2)
            values = torch.cat([self.v, self.text * 0.5], 2)
            y = F.scaled_dot_product_attention(q, keys, values)
            return self.o(y.transpose(1, 2).flatten(2))

    eager, _, compiled = pair(Prompted)
    chain(eager, compiled, range(30))
    assert compiled.report().to_dict()["runtime"]["plain_calls"] == 0
