"""What position a slot has, and how that changes while the slot lives.

Here, and only here, most models share their body, since the position subgraph is the subject: 12 or
14 slots, three new ones a step, raw keys, RoPE at the read.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Form


class Window(nn.Module):
    """Attention over [sink | window]; `positions(step)` gives one position per slot."""

    sink, period = 2, 0

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", torch.zeros(1, 2, self.sink + 12, 8).double())
        self.register_buffer("v", torch.zeros(1, 2, self.sink + 12, 8).double())
        self.register_buffer("freq", torch.tensor([1.0, 0.31, 0.1, 0.017]).double())

    def positions(self, step):
        raise NotImplementedError

    def tables(self, step):
        ang = self.positions(step).double()[:, None] * self.freq
        return ang.cos(), ang.sin()

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        s = self.sink
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:, :, s:-3] = cache[:, :, s + 3 :].clone()
            cache[:, :, -3:] = new
        cos, sin = self.tables(step)

        def rope(x, cos, sin):
            a, b = x[..., :4], x[..., 4:]
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        y = F.scaled_dot_product_attention(
            rope(q, cos[-3:], sin[-3:]), rope(self.k, cos, sin), self.v
        )
        return self.o(y.transpose(1, 2).flatten(2))


class Absolute(Window):
    """A slot keeps the position it was written at; the sink is where it began."""

    def positions(self, step):
        return torch.cat([torch.arange(2), torch.arange(12) + (step * 3 + 2)])


class AbsoluteNoSink(Window):
    sink = 0

    def positions(self, step):
        return torch.arange(step * 3, step * 3 + 12)


class SlowBase(Window):
    """Slot order, and the base moves by 1 while the window moves by 3: every slot turns alike."""

    sink = 0

    def positions(self, step):
        return torch.arange(12) + step


class SlowBaseSink(Window):
    """The same with a sink that stands still: relative to the window it moves in every step."""

    def positions(self, step):
        window = torch.arange(2, 14) + step
        return torch.cat([torch.arange(2), window])


class SlotOrder(Window):
    """Window-relative: positions are the slot numbers, always."""

    sink = 0

    def positions(self, step):
        return torch.arange(12)


class SlotOrderSink(Window):
    def positions(self, step):
        return torch.arange(14)


class Reset(Window):
    """The published scheme: slot order from a base that moves and starts again every `period`."""

    period = 7  # steps; the window holds 4 frames

    def positions(self, step):
        base = (step % self.period) * 3
        return torch.cat([torch.arange(2), torch.arange(12) + base + 2])


class ResetNoSink(Window):
    sink, period = 0, 9

    def positions(self, step):
        return torch.arange(12) + 3 * step - 27 * (step // self.period)


class ResetEachStep(Window):
    """A period of one: the base never gets anywhere, spelled with a modulus."""

    def positions(self, step):
        return torch.arange(14) + (step % 1)


class ResetShort(Window):
    """A period shorter than the window: some slots live through two resets."""

    period = 3

    def positions(self, step):
        ids = torch.arange(14)
        return ids + (ids > 1).long() * (step % self.period) * 3


class Fractional(Window):
    """Time in seconds: three tokens a frame share a quarter of a second."""

    def positions(self, step):
        frame = torch.arange(4).repeat_interleave(3) * 0.25
        return torch.cat([torch.zeros(2), frame + 0.25 * step])


class SinkBeforeWindow(Window):
    """The sink is kept right before the window, so that its distance stays as trained."""

    def positions(self, step):
        return torch.arange(-2, 12) + 3 * step


class Capped(Window):
    """Distances are capped: old slots pile up at one position, each reaching it in its own step."""

    def positions(self, step):
        return torch.clamp(torch.arange(14), min=5)


class Wrapped(Window):
    """Slot order from a slow base, modulo 20: each slot jumps in a step of its own."""

    def positions(self, step):
        return torch.cat([torch.arange(2), torch.remainder(torch.arange(12) + step, 20)])


class TableSlice(Window):
    """Tables are buffers; the sink's rows are the first, the window's are cut out by host ints."""

    def __init__(self):
        super().__init__()
        ang = torch.arange(40.0).double()[:, None] * self.freq
        self.register_buffer("cos", ang.cos())
        self.register_buffer("sin", ang.sin())
        del self.freq

    def tables(self, step):
        start = 2 + (step % 8) * 3
        stop = start + 12
        return (
            torch.cat([self.cos[:2], self.cos[start:stop]]),
            torch.cat([self.sin[:2], self.sin[start:stop]]),
        )


class GridTable(nn.Module):
    """A table [frames, tokens, D / 2] made once; frames are cut out and laid flat at each read."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12, bias=False).double() for _ in range(4))
        t, h = torch.meshgrid(torch.arange(300).double(), torch.arange(4).double(), indexing="ij")
        ang = torch.stack([t, t / 10, h], dim=-1)  # two pairs turn with time, one with the row
        self.register_buffer("grid", torch.polar(torch.ones_like(ang), ang))
        self.register_buffer("cached_k", torch.zeros(1, 20, 2, 6).double())
        self.register_buffer("cached_v", torch.zeros(1, 20, 2, 6).double())

    def forward(self, x, step, sink_frames=1):
        n = 4 * sink_frames
        for cache, proj in ((self.cached_k, self.k), (self.cached_v, self.v)):
            kept = cache[:, n + 4 :].clone()
            cache[:, n : n + kept.shape[1]] = kept
            cache[:, n + kept.shape[1] :] = proj(x).view(1, 4, 2, 6)
        frames = torch.cat([self.grid[:sink_frames], self.grid[step + 1 : step + 5]])

        def rope(t, turn):
            pairs = torch.view_as_complex(t.reshape(1, -1, 2, 3, 2))
            return torch.view_as_real(pairs * turn.reshape(1, -1, 1, 3)).flatten(3).transpose(1, 2)

        q = rope(self.q(x).view(1, 4, 2, 6), frames[-1:])
        y = F.scaled_dot_product_attention(
            q, rope(self.cached_k, frames), self.cached_v.transpose(1, 2)
        )
        return self.o(y.transpose(1, 2).reshape(1, 4, 12))


def noise(*shape):
    return lambda step: ((torch.randn(*shape).double(), step), {})


BOTH = {"hoist_rope": 1, "ring_cache": 2}

FORMS = [
    *(
        Form(f"position_{name}", model, noise(1, 3, 6), expect=BOTH, notes=notes)
        for name, model, notes in [
            ("absolute_sink", Absolute, "constant rows: no rotation ever"),
            ("absolute", AbsoluteNoSink, "arange with symbolic ends"),
            ("slow_base", SlowBase, "one angle for all slots: fold"),
            ("slow_base_sink", SlowBaseSink, "counter-rotate the sink"),
            ("slot_order", SlotOrder, "fold"),
            ("slot_order_sink", SlotOrderSink, "counter-rotate the sink"),
            ("reset_sink", Reset, "period 7, window 4: constant rows between resets"),
            ("reset", ResetNoSink, "period 9 by floor division: fold at the reset"),
            ("reset_each_step", ResetEachStep, "Dynamo folds step % 1 away"),
            ("reset_short", ResetShort, "period 3, shorter than the window"),
            ("fractional", Fractional, "float positions, float32 arithmetic of exact quarters"),
            ("sink_before_window", SinkBeforeWindow, "only the sink turns"),
            ("table_slice", TableSlice, "reset of period 8"),
            ("wrapped", Wrapped, "slots jump in different steps"),
            ("capped", Capped, "slots turn by different angles"),
        ]
    ),
    Form("position_grid_table", GridTable, noise(1, 4, 12), expect=BOTH),
]
