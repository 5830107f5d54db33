"""Sizes in small int tensors that a model makes, writes and reads."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
import math

import pytest
import torch
from torch import nn

import rtc
from tests.runtime.test_settled import DIM, HEADS, REPLAY, WIDTH, N, attend, rope, table

pytestmark = pytest.mark.usefixtures("fresh")


class Model(nn.Module):
    """A window that fills; keys are roped when read, by a table of as many frames as there are."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM).double(), nn.Linear(DIM, DIM).double()
        self.register_buffer("freqs", table(100))
        for name in "kv":
            self.register_buffer(name, torch.zeros(1, 60 * N, HEADS, WIDTH).double())

    def turned(self, x, sizes):
        ((f, h, w),) = sizes.tolist()
        turn = self.freqs[:f].repeat_interleave(h * w, 0)
        return torch.stack([rope(x[:1, : f * h * w], turn)[0]])

    def keys(self, window, frames):
        return self.turned(window, self.way(torch.tensor([[1, 1, N]], dtype=torch.long), frames))

    def forward(self, x, at):
        q, k, v = self.qkv(x).view(1, N, 3, HEADS, WIDTH).unbind(2)
        start, end = at * N, at * N + N
        self.k[:, start:end] = k
        self.v[:, start:end] = v
        first = max(0, end - 4 * N)
        keys = self.keys(self.k[:, first:end], (end - first) // N)
        return x + self.o(attend(q, keys, self.v[:, first:end]))


def ring(model):
    """The report of a chain that agrees with eager and has its caches in a ring at the end."""
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=REPLAY)
    for step in range(12):
        x = torch.randn(1, N, DIM).double()
        torch.testing.assert_close(compiled(x, step), eager(x, step), rtol=1e-9, atol=1e-9)
    data = compiled.report().to_dict()
    passes = {p["name"]: p for p in data["graphs"][-1]["passes"]}
    assert passes["ring_cache"]["applied"] == 2
    return data


def put(sizes, frames):
    sizes = sizes.clone()
    sizes[0, 0] = frames
    return sizes


def put_twice(sizes, frames):
    sizes = sizes.clone()
    sizes[0][0] = frames * 2
    sizes[:, 0] -= frames
    return sizes


def made(sizes, frames):
    return torch.stack([torch.tensor((frames, 1, N))])


def added(sizes, frames):
    more = torch.tensor([[1, 0, 0]]) * (frames - 1)
    return (sizes + more).to(torch.int64).contiguous()


def through_a_view(sizes, frames):
    row = sizes[0]
    row[0].fill_(frames)
    return sizes


def in_place(sizes, frames):
    sizes[0, 0].add_(frames).sub_(1)
    return torch.cat([sizes], 0)


def by_product(sizes, frames):
    assert math.prod(sizes[0][1:]).item() == N
    return put(sizes, (sizes[0] * frames).prod().item() // (N * frames * frames))


def copied_first(sizes, frames):
    before = sizes.clone()
    sizes[0, 0] = 77
    before[0, 0] = frames
    return before


WAYS = [put, put_twice, made, added, through_a_view, in_place, by_product, copied_first]


@pytest.mark.parametrize("way", WAYS)
def test_what_was_written_is_read(way):
    assert len(ring(Model(way))["graphs"]) <= 4


class ByFrame(Model):
    """The window as frames: a size that follows from numbers is asked of what the cache holds."""

    def keys(self, window, frames):
        frames = window.shape[1] // N
        by_frame = window.view(1, frames, N, HEADS, WIDTH)
        turn = self.freqs[torch.arange(frames)].repeat_interleave(N, 0)
        return torch.stack([rope(by_frame.flatten(1, 2), turn)[0]])


def test_a_size_that_is_asked_of_a_cache():
    ring(ByFrame(None))


def by_data(sizes, frames):
    return put(sizes, frames) + torch.zeros(3, dtype=torch.long)


def halved(sizes, frames):
    return (put(sizes, frames) / 1).long()


def clamped(sizes, frames):
    return put(sizes, frames).clamp_(max=50)


def scattered(sizes, frames):
    at = torch.tensor([[0]])
    sizes.scatter_(1, at, frames)
    return sizes


def through_an_unknown_view(sizes, frames):
    sizes = put(sizes, 77)
    sizes.t()[0].fill_(frames)
    return sizes


def through_another_unknown_view(sizes, frames):
    sizes = put(sizes, 77)
    sizes.unbind(1)[0].copy_(torch.tensor([frames]))
    return sizes


def divided_in_place(sizes, frames):
    sizes = put(sizes, frames * 2)
    sizes //= torch.tensor([[2, 1, 1]])
    return sizes


def into_out(sizes, frames):
    sizes = put(sizes, 77)
    torch.add(put(sizes, frames), torch.tensor([[0, 0, 0]]), out=sizes)
    return sizes


def in_a_checkpoint(sizes, frames):
    sizes = put(sizes, 77)

    def inner(x):
        sizes.select(1, 0).fill_(frames)
        return x + 1

    torch.utils.checkpoint.checkpoint(inner, torch.ones(2), use_reentrant=False)
    return sizes


def relu_in_place(sizes, frames):
    sizes = put(sizes, frames)
    sizes[0, 1] = -frames
    torch.nn.functional.relu(sizes, inplace=True)
    sizes[0, 1] += 1
    return sizes


def wrapped(sizes, frames):
    small = torch.tensor([[frames + 2**30, 0, 0]], dtype=torch.int32) * 4
    return put(sizes, frames + small[0, 0].item() - 4 * frames)


def infinite(sizes, frames):
    torch.tensor([float("-inf"), 1.0])
    return put(sizes, frames)


UNKNOWN = [
    in_a_checkpoint, relu_in_place, wrapped, infinite,
    by_data, halved, clamped, scattered, through_an_unknown_view, through_another_unknown_view,
    divided_in_place, into_out,
]  # fmt: skip


@pytest.mark.parametrize("way", UNKNOWN)
def test_what_is_not_followed_is_right_or_refused(way):
    model = Model(way)
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=REPLAY)
    for step in range(6):
        x = torch.randn(1, N, DIM).double()
        want = eager(x, step)
        try:
            got = compiled(x, step)
        except rtc.HostSyncError:
            return
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
