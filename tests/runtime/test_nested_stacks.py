"""[layers, keys and values, ..] in one tensor: every spelling gives what eager gives, caches too.

Most are kept part by part; where a layer's row is used as a whole, all is computed as written.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc
from rtc.passes import nested_stacks

L, S, T, H, D = 3, 22, 4, 2, 8
PARTS, WRITTEN = (L, 2 * L), (0, 0)  # places of hoist_rope, of ring_cache


def rope(y, cos, sin):
    a, b = y.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def moved(cache, new):
    return torch.cat([cache[:, T:], new], 1)


def assign(c, i, k, v):
    c[i, 0], c[i, 1] = moved(c[i, 0], k), moved(c[i, 1], v)
    return c[i, 0], c[i, 1]


def row(c, i, k, v):
    r = c[i]
    r[0].copy_(moved(r[0], k))
    r[1].copy_(moved(r[1], v))
    return r.unbind(0)


def roll(c, i, k, v):
    for j, new in ((0, k), (1, v)):
        c[i, j] = c[i, j].roll(-T, 1)
        c[i, j][:, -T:] = new
    return c[i]


def older(c, i, k, v):
    """Keys are read from a version before the values were written."""
    old = c[i, 0].clone()
    c[i, 1] = moved(c[i, 1], v)
    c[i, 0] = moved(old, k)
    return c[i, 0], c[i, 1]


def from_the_end(c, i, k, v):
    c[i - L, -2], c[i - L, -1] = moved(c[i, 0], k), moved(c[i, 1], v)
    return c[i, -2], c[i, -1]


def copied(c, i, k, v):
    """One part is written from the other."""
    c[i, 0] = moved(c[i, 0], k)
    c[i, 1] = c[i, 0]
    return c[i, 0], c[i, 1]


def stacked(c, i, k, v):
    c[i] = torch.stack([moved(c[i, 0], k), moved(c[i, 1], v)])
    return c[i, 0], c[i, 1]


def both(c, i, k, v):
    c[i, :, :, :-T] = c[i, :, :, T:].clone()
    c[i, 0, :, -T:], c[i, 1, :, -T:] = k, v
    return c[i, 0], c[i, 1]


class Model(nn.Module):
    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.write = write
        self.qkv = nn.ModuleList(nn.Linear(H * D, 3 * H * D).double() for _ in range(L))
        self.register_buffer("c", torch.randn(L, 2, 1, S, H, D, dtype=torch.float64))
        self.requires_grad_(False)

    def forward(self, x, step: int):
        rates = 100.0 ** (-torch.arange(D // 2, dtype=torch.float64) / 4)
        angle = (torch.arange(S, dtype=torch.float64) + step % 9)[:, None] * rates
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        for i, layer in enumerate(self.qkv):
            new = layer(F.layer_norm(x, (H * D,))).unflatten(-1, (3, H, D))
            q, k, v = new.unbind(-3)
            keys, values = self.write(self.c, i, k, v)
            q, keys = rope(q, cos[-T:], sin[-T:]), rope(keys, cos, sin)
            y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, keys, values)))
            x = x + y.transpose(1, 2).flatten(2)
        return x


def chain(write, graph):
    model, eager = Model(write), Model(write)
    compiled = rtc.compile(model, options=rtc.Options(lowering="eager", step_graph=graph))
    with torch.no_grad():
        for step in range(20):
            if step == 11:  # a part, from outside
                model.c[1, 0].mul_(0.5), eager.c[1, 0].mul_(0.5)
            x = torch.randn(1, T, H * D, generator=torch.Generator().manual_seed(step)).double()
            got, want = compiled(x, step), eager(x, step)
            torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)
            if step == 8:
                torch.testing.assert_close(model.c + 0, eager.c, atol=1e-10, rtol=1e-10)
    compiled.materialize()
    torch.testing.assert_close(model.c, eager.c, atol=1e-10, rtol=1e-10)
    counts = compiled.report().counts()
    return counts["hoist_rope"], counts["ring_cache"]


@pytest.mark.parametrize("graph", ["off", "simulate"])
@pytest.mark.parametrize("write", [assign, row])
def test_parts_are_kept(write, graph):
    assert chain(write, graph) == PARTS


@pytest.mark.parametrize("write", [roll, older, from_the_end])
def test_other_spellings(write):
    assert chain(write, "simulate") == PARTS


@pytest.mark.parametrize("write", [stacked, both])
def test_rows_used_as_a_whole_are_computed_as_written(write):
    assert chain(write, "off") == WRITTEN


def test_a_part_written_from_another():
    assert chain(copied, "simulate") == (L, 0)


def test_memory_that_is_not_even_is_left_alone():
    """[L, 2, ..] cut out of [L, 3, ..]: the two axes are not one."""
    model, eager = Model(assign), Model(assign)
    for m in (model, eager):
        m.c = torch.zeros(L, 3, 1, S, H, D, dtype=torch.float64)[:, :2]
    compiled = rtc.compile(model, options=rtc.Options(lowering="eager"))
    with torch.no_grad():
        for step in range(8):
            x = torch.full((1, T, H * D), 0.1 * step + 1, dtype=torch.float64)
            torch.testing.assert_close(compiled(x, step), eager(x, step), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(model.c + 0, eager.c, atol=1e-10, rtol=1e-10)


def test_too_many_parts_are_left_alone(monkeypatch):
    seen = []
    real = nested_stacks.flatten
    monkeypatch.setattr("rtc.passes.normalize._MOST", 2 * L - 1)
    monkeypatch.setattr(
        "rtc.passes.normalize.flatten", lambda *a: seen.append(real(*a)) or seen[-1]
    )
    assert chain(assign, "off") == WRITTEN
    assert seen
    assert not any(seen)


def test_a_step_that_is_kept_holds_no_view_of_the_stack():
    """Else something else than the model holds the memory, and views are made anew each call."""
    compiled = rtc.compile(
        Model(assign), options=rtc.Options(lowering="eager", step_graph="simulate")
    )
    seen = []
    with torch.no_grad():
        for step in range(8):
            compiled(torch.ones(1, T, H * D).double(), step)
            seen.append(compiled.report().to_dict()["runtime"]["refreshed_slots"])
    assert seen[-1] == seen[0]
    assert compiled.report().to_dict()["runtime"]["replays"] > 3
