"""Publicly reported ways in which mutation goes wrong under compilers, on rtc's own pipeline.

Each model is a small one that shows the kind of the report; the caches are compared as well as the
outputs, since a write that got lost may show much later.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc

from .models import EAGER, Attention, chain, close, pair, rope, x, zeros


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


class Cached(Attention):
    def __init__(self):
        super().__init__()
        self.register_buffer("k", torch.randn(1, 2, 12, 8).double())
        self.register_buffer("v", torch.randn(1, 2, 12, 8).double())

    def new(self, x):
        return self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)

    def read(self, q, step, k=None, v=None):
        k, v = self.k if k is None else k, self.v if v is None else v
        keys = rope(k, torch.arange(k.shape[2]).double() + 3 * step, self.freq)
        y = F.scaled_dot_product_attention(q, keys, v)
        return self.o(y.transpose(1, 2).flatten(2))


class RollForward(Cached):
    """pytorch#197829: the clone in a window roll is dropped, and the copy overlaps itself."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:, :, 3:] = cache[:, :, :-3].clone()
            cache[:, :, :3] = new
        return self.read(q, step)


class RollTwice(Cached):
    """The same with two rolls in opposite directions over the same slots."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:, :, 1:] = cache[:, :, :-1].clone()
            cache[:, :, 2:-3] = cache[:, :, 5:].clone()
            cache[:, :, -3:] = new
        return self.read(q, step)


class Snapshot(Cached):
    """pytorch#198131: a snapshot sees a write that comes after it."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        before = self.k.clone()
        self.k[:, :, :-3] = self.k[:, :, 3:].clone()
        self.k[:, :, -3:] = k
        after = self.k.clone()
        self.k[:, :, -3:] = 0.5 * k
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        return self.read(q, step, before) + self.read(q, step, after) + self.read(q, step)


class FedItsOwnClone(Cached):
    """pytorch#198031: a mutating op that is fed a clone of what it mutates."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        self.k.mul_(0.9).add_(self.k.clone() * 0.05)
        self.k.add_(self.k.clone())
        self.k.mul_(0.5)
        self.k[:, :, -3:] = k
        self.v.index_copy_(2, torch.arange(11), self.v[:, :, 1:].clone())
        self.v[:, :, -3:] = v
        return self.read(q, step)


class OrderOfMutations(Cached):
    """pytorch#177631: the order of mutations gets lost where loops are fused."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        self.k[:, :, -3:] = k
        self.v.copy_(self.k)
        self.k.mul_(0.5)
        self.v.add_(self.k)
        self.k[:, :, :3] = self.v[:, :, -3:]
        return self.read(q, step)


class TwoViewsOfOneBase(Attention):
    """pytorch#153389: the epilogue undoes the mutation of one of two views of a base."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kv", torch.randn(2, 1, 2, 12, 8).double())

    def forward(self, x, step):
        q, k, v = self.qkv(x).view(1, 3, 3, 2, 8).permute(2, 0, 3, 1, 4)
        keys, values = self.kv.unbind(0)
        for cache, new in ((keys, k), (values, v)):
            cache[:, :, :-3] = cache[:, :, 3:].clone()
            cache[:, :, -3:] = new
        self.kv[:, :, :, 0] *= 0.9
        roped = rope(keys, torch.arange(12).double() + 3 * step, self.freq)
        y = F.scaled_dot_product_attention(q, roped, values)
        return self.o(y.transpose(1, 2).flatten(2)) + self.kv.sum() * 0.01


class WrittenNeverRead(Cached):
    """vllm PR#33945: a write that nothing in the call reads is dead code to a fusion."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        y = self.read(q, step)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        return y


class ReadBetweenRollAndWrite(Cached):
    """flashdreams#520: a read between roll and write sees a chunk twice. It must, as in eager."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        for cache in (self.k, self.v):
            cache[:, :, :-3] = cache[:, :, 3:].clone()
        y = self.read(q, step)
        self.k[:, :, -3:], self.v[:, :, -3:] = k, v
        return y + self.read(q, step)


class WholeCacheRecurrence(Cached):
    """The new cache is a function of all of the old one: nothing is a copy of a slot."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        self.k.copy_(self.k.cumsum(2) * 0.1 + k.mean(2, keepdim=True))
        self.v.copy_(self.v.flip(2) * 0.5 + v.mean(2, keepdim=True))
        return self.read(q, step)


class Sorted(Cached):
    """Slots are ordered by their data."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([self.v[:, :, 3:], v], 2))
        order = self.k.sum((0, 1, 3)).argsort()
        self.k.copy_(self.k[:, :, order])
        self.v.copy_(self.v[:, :, order])
        return self.read(q, step)


class DataDependentEviction(Cached):
    """StreamDiffusionV2's kind: the slots with the smallest norm go."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        idx = self.k.pow(2).sum((0, 1, 3)).topk(3, largest=False).indices
        self.k.index_copy_(2, idx, k)
        self.v.index_copy_(2, idx, v)
        return self.read(q, step)


class KeysIntoValues(Cached):
    """Slots of one cache move into another."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        self.v.copy_(torch.cat([self.v[:, :, 3:], self.k[:, :, :3]], 2))
        self.k.copy_(torch.cat([self.k[:, :, 3:], k], 2))
        return self.read(q, step)


class CachesSwap(Cached):
    """Keys and values change places in every call."""

    def forward(self, x, step):
        q, k, v = self.new(x)
        kept = self.k.clone()
        self.k.copy_(torch.cat([self.v[:, :, 3:], k], 2))
        self.v.copy_(torch.cat([kept[:, :, 3:], v], 2))
        return self.read(q, step)


MODELS = [
    RollForward, RollTwice, Snapshot, FedItsOwnClone, OrderOfMutations, TwoViewsOfOneBase,
    WrittenNeverRead, ReadBetweenRollAndWrite, WholeCacheRecurrence, Sorted, DataDependentEviction,
    KeysIntoValues, CachesSwap,
]  # fmt: skip


@pytest.mark.parametrize(
    "options", [EAGER, rtc.Options(lowering="eager", ring_cache=False)], ids=["ring", "order"]
)
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_outputs_and_caches(model, options):
    eager, twin, compiled = pair(model, options)
    for step in range(16):
        chain(eager, compiled, [step])
        if step in (4, 9, 15):
            for name, cache in eager.named_buffers():
                close(cache, getattr(twin, name))


class AllKinds(nn.Module):
    """Several kinds in one graph, so that the code generator has something to reorder."""

    def __init__(self):
        super().__init__()
        kinds = (RollForward, Snapshot, OrderOfMutations)
        self.kinds = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x, step):
        for kind in self.kinds:
            x = x + 0.3 * kind(x, step)
        return x


@pytest.mark.cpp
def test_with_generated_code():
    torch.manual_seed(0)
    eager = AllKinds()
    twin = copy.deepcopy(eager)
    compiled = rtc.compile(twin, options=rtc.Options(warn=False))
    kept = []
    for step in range(16):
        kept.append((eager(x(step), step), compiled(x(step), step)))
        if step in (7, 15):
            for (name, a), (_, b) in zip(eager.named_buffers(), twin.named_buffers(), strict=True):
                torch.testing.assert_close(
                    b, a, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
                )
    for a, b in kept:  # of every call, after the last
        close(a, b, 1e-10)


@pytest.mark.cpp
def test_two_sessions_with_generated_code():
    """Results of interleaved calls, all compared at the end."""
    from .models import Given

    eager, _, compiled = pair(Given, rtc.Options(warn=False))
    ours, theirs = [(zeros(), zeros()) for _ in range(2)], [(zeros(), zeros()) for _ in range(2)]
    kept = []
    for call in range(20):
        s = call % 3 % 2
        kept.append((eager(x(call), *ours[s], call), compiled(x(call), *theirs[s], call)))
        if call == 9:
            ours[1][0].zero_(), theirs[1][0].zero_()
    for a, b in kept:
        close(a, b, 1e-10)
    for a, b in zip(ours, theirs, strict=True):
        close(a[0], b[0], 1e-10)
        close(a[1], b[1], 1e-10)
