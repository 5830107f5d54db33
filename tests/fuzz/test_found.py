"""What fuzzing and reading found once, in its smallest form.

First specs that the shrinker ended at, then models that the fuzzer does not write.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc

from .drive import run
from .spec import Spec, legal

FOUND = {
    "two graphs with other constants shared a state": Spec(seed=38, flag="const"),
    "views of one class, read at other points": Spec(
        seed=71, layout="BFTHD", key_ops=("bf16",), attention="by_hand"
    ),
    "rows made from the cache itself": Spec(
        seed=165, write=("shift", "where"), key_ops=("normalize",)
    ),
    "prompt keys in a buffer took over the mask": Spec(seed=132, mask="visible", text=2),
    "folded under a cast that rounds": Spec(
        seed=71, key_ops=("rope", "bf16"), offset="min(step, 6) * {n}"
    ),
    "a table of small numbers took part in no turn": Spec(
        seed=415, key_ops=("tiny",), offset="min(step, 6) * {n}", second="other_rope"
    ),
    "a write through an array of an alias": Spec(
        seed=13, groups=2, group_by="expand", actions=((5, "numpy"),)
    ),
    "written past the version counter with write_back": Spec(
        seed=24, options="write_back", key_ops=("rope",), actions=((5, "data"), (8, "numpy"))
    ),
    "passes in logical order": Spec(
        seed=7, passes=3, write=("shift", "where"), work="BSHD", key_ops=("rope",)
    ),
    "two rings that move apart": Spec(
        seed=66, passes=3, write=("ring", "narrow"), write_v=("ring", "wrap"), key_ops=("head",)
    ),
    "a second model with another order": Spec(
        seed=13,
        passes=3,
        write=("insert", "cat"),
        second="other_rope",
        actions=((5, "twin_plain"),),
    ),
    "an op with several outputs": Spec(seed=41, key_ops=("ln",)),
    "complex numbers of strided features": Spec(
        seed=72, layout="BHDS", key_ops=("rope",), rope="complex"
    ),
    "a guarded parameter is copied": Spec(seed=97, home="parameter", actions=((5, "deepcopy"),)),
    "a stacked cache that stays plain": Spec(stacked=0, key_ops=("amax_all",)),
    "a mask of changing size": Spec(
        seed=545, mask="triangle", actions=((6, "shape"), (8, "shape"))
    ),
    "a read without fresh rows": Spec(
        seed=568, passes=2, write=("ring", "slice"), read="last", key_ops=("tiny",)
    ),
    "a fresh row read twice": Spec(seed=620, write=("front", "clone"), read="twice"),
    "a scale that is a float made from the step": Spec(key_ops=("step_float", "step_int")),
    "a cache swapped while another is kept": Spec(
        key_ops=("rope",), actions=((5, "swap"), (7, "swap"), (9, "swap_all"))
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_spec(name):
    found = run(legal(FOUND[name]), steps=12)
    assert found.status == "ok", found.message


class Model(nn.Module):
    """One head of attention over a window of twelve, three new rows a call."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("k", torch.randn(1, 2, 12, 8).double())
        self.register_buffer("v", torch.randn(1, 2, 12, 8).double())

    def new(self, x):
        return self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)

    def out(self, y):
        return self.o(y.transpose(1, 2).flatten(2))


class FreshRowsMove(Model):
    """Every pass shifts; a row that an earlier pass wrote comes to another row of the table."""

    def __init__(self):
        super().__init__()
        self.k, self.v = self.k[:, :, :6].clone(), self.v[:, :, :6].clone()

    def forward(self, x, step):
        keys, values = self.k, self.v
        table = torch.arange(6).double()[:, None] + 1
        for _ in range(3):
            q, k, v = self.new(x)
            keys = torch.cat([keys[:, :, 3:], k], 2)
            values = torch.cat([values[:, :, 3:], v], 2)
            x = x + self.out(F.scaled_dot_product_attention(q, keys * table, values))
        self.k.copy_(keys)
        self.v.copy_(values)
        return x


class TwoLayoutsOfOneRow(Model):
    """The new keys are attended with in another arrangement of features than they are kept in."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        flat = k.transpose(1, 2).reshape(1, 3, 16)
        other = flat.view(1, 3, 8, 2).transpose(2, 3).transpose(1, 2)
        keys = torch.cat([self.k[:, :, 3:], other], 2)
        values = torch.cat([self.v[:, :, 3:], v], 2)
        y = F.scaled_dot_product_attention(q, keys, values)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(values)
        return self.out(y)


class SlowDrift(Model):
    """A table moves by less than its rounding in each call, and by much in the end."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        for cache, new in ((self.k, k), (self.v, v)):
            cache.copy_(torch.cat([cache[:, :, :6], cache[:, :, 9:], new], 2))
        table = (torch.arange(12).float() * 1e-7 * step)[:, None] + 1.0
        return self.out(F.scaled_dot_product_attention(q, self.k * table, self.v))


class OldAndNew(Model):
    """The cache is read before it is written and after."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        table = 1.0 + torch.arange(12).double()[:, None] + step
        y = F.scaled_dot_product_attention(q, self.k * table, self.v)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        return self.out(y + F.scaled_dot_product_attention(q, self.k * table, self.v))


class OneSlotTwice(Model):
    """The content of a slot is kept at two places, each with its own position."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:, :, 1:] = cache[:, :, :-1].clone()
            cache[:, :, 2:-3] = cache[:, :, 5:].clone()
            cache[:, :, -3:] = new
        table = 1.0 + 0.3 * torch.arange(12).double()[:, None]
        return self.out(F.scaled_dot_product_attention(q, self.k * table, self.v))


MODELS = [FreshRowsMove, TwoLayoutsOfOneRow, SlowDrift, OldAndNew, OneSlotTwice]


@pytest.mark.parametrize("ring", [True, False], ids=["ring", "order"])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_model(model, ring):
    torch.manual_seed(0)
    eager = model()
    twin = copy.deepcopy(eager)
    options = rtc.Options(lowering="eager", warn=False, ring_cache=ring)
    compiled = rtc.compile(twin, options=options)
    # SlowDrift's table is float32: a view may lag behind by its rounding, never by more
    tolerance = 1e-6 if model is SlowDrift else 1e-12
    with torch.no_grad():
        for step in range(300 if model is SlowDrift else 12):
            x = torch.randn(1, 3, 6, dtype=torch.float64)
            y = eager(x, step)
            torch.testing.assert_close(compiled(x, step), y, rtol=tolerance, atol=tolerance)
            if step % 5 == 4:
                for name, cache in eager.named_buffers():
                    torch.testing.assert_close(getattr(twin, name), cache, rtol=0, atol=1e-10)


class PartsAndWhole(nn.Module):
    """Of two graphs one sees a stacked cache in two parts, the other as a whole."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48).double(), nn.Linear(16, 6).double()
        self.register_buffer("kv", torch.randn(2, 1, 2, 12, 8).double())
        self.register_buffer("gain", torch.rand(8).double() + 0.5)

    def forward(self, x, step, whole):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        if whole:
            self.kv.copy_(torch.cat([self.kv[:, :, :, 3:], torch.stack([k, v])], 3))
        else:
            self.kv[:, :, :, :-3] = self.kv[:, :, :, 3:].clone()
            self.kv[0, :, :, -3:] = k
            self.kv[1, :, :, -3:] = v
        y = F.scaled_dot_product_attention(q, self.kv[0] * self.gain, self.kv[1])
        if whole:
            y = y + self.kv.mean() * 0.1
        return self.o(y.transpose(1, 2).flatten(2))


def test_parts_and_whole():
    torch.manual_seed(0)
    eager = PartsAndWhole()
    twin = copy.deepcopy(eager)
    compiled = rtc.compile(twin, options=rtc.Options(lowering="eager", warn=False))
    with torch.no_grad():
        for step, whole in enumerate([False, False, True, False, True, True, True, False, False]):
            x = torch.randn(1, 3, 6, dtype=torch.float64)
            torch.testing.assert_close(compiled(x, step, whole), eager(x, step, whole))
    torch.testing.assert_close(twin.kv, eager.kv)
