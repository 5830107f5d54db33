"""Tensors of one element that are more than a number, or come in by another way: right or refused."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
from torch import nn

import rtc
from rtc.host_numbers import HostNumber, _Place
from tests.runtime.test_host_numbers import PLAIN, Counter, long

pytestmark = pytest.mark.usefixtures("fresh")


def compared(self, x, at):
    return x.sum() * (self.at == 3)


def asked(self, x, at):
    return x.sum() if isinstance(self.at, torch.Tensor) else x.sum() * 2


def asked_torch(self, x, at):
    return x.sum() if torch.is_tensor(self.at) else x.sum() * 2


def asked_type(self, x, at):
    return x.sum() if type(self.at) is torch.Tensor else x.sum() * 2


def asked_attribute(self, x, at):
    return x.sum() if hasattr(self.at, "device") else x.sum() * 2


def asked_other(self, x, at):
    return x.sum() if getattr(self.at, "device", None) is not None else x.sum() * 2


def multiplied(self, x, at):
    return x.sum() * self.at


def indexed(self, x, at):
    return x[:, self.at * 0].sum()


def halves(self, x, at):
    self.at.fill_(2.5)
    return x.sum()


def copied(self, x, at):
    self.at.copy_(x.sum())
    return x.sum()


def inverted(self, x, at):
    return x.sum() * ~self.at


def truth(self, x, at):
    return x.sum() if self.at else x.sum() * 2


def hashed(self, x, at):
    return x.sum() * ({long(0): 1.0}.get(self.at, 2.0))


def caught(self, x, at):
    try:
        more = self.at.device.index
    except Exception:
        more = 100
    return x.sum() * (more or 1)


def caught_sum(self, x, at):
    try:
        y = self.at + 1
    except TypeError:
        y = 100
    return x.sum() * y


USES = [caught, caught_sum, compared, asked, asked_torch, asked_type, asked_attribute, asked_other, multiplied, indexed,
        halves, copied, inverted, truth]  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_a_tensor_that_is_more_than_a_number_is_refused(use):
    """None of these may take another way for a number than for the tensor."""
    model = Counter(use)
    with pytest.raises(rtc.HostSyncError, match=r"test_host_numbers(_refused)?\.py:"):
        rtc.compile(model, options=PLAIN)(torch.ones(1, 2, 4).double())
    assert isinstance(model.at, torch.Tensor)
    assert int(model.at) == 0


class Twice(nn.Module):
    """The same memory by two ways: one reads it on the host, the other on the device."""

    def __init__(self, second):
        super().__init__()
        self.second = second
        self.register_buffer("k", torch.zeros(1, 8, 4).double())

    def forward(self, x, first, second):
        first.fill_(first.item() + 1)
        self.k.copy_(torch.cat((self.k[:, 2:], x), 1))
        return self.k.sum() * second


@pytest.mark.parametrize(
    "other", [lambda t: t, lambda t: t.view(()), lambda t: t.detach(), lambda t: t.unsqueeze(0)]
)
def test_memory_that_comes_in_twice_is_refused(other):
    at = long(0)
    model = Twice(None)
    second = other(at)
    with pytest.raises(rtc.HostSyncError):
        rtc.compile(model, options=PLAIN)(torch.ones(1, 2, 4).double(), at, second)
    assert int(at) == 0


def test_a_tensor_in_a_dict_that_is_an_argument_too():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("k", torch.zeros(1, 8, 4).double())

        def forward(self, x, kv, second):
            kv["n"].fill_(kv["n"].item() + 1)
            self.k.copy_(torch.cat((self.k[:, 2:], x), 1))
            return self.k.sum() * second

    kv = {"n": long(0)}
    with pytest.raises(rtc.HostSyncError):
        rtc.compile(Model(), options=PLAIN)(torch.ones(1, 2, 4).double(), kv, kv["n"])
    assert int(kv["n"]) == 0


def test_types_are_not_asked_after_others_were():
    """Dynamo keeps its way to ask for a type, by kinds of arguments."""

    class Thing:
        pass

    class Model(nn.Module):
        def forward(self, x, kv, thing):
            if isinstance(thing, torch.Tensor):
                x = x + 100
            n = kv["end"].item()
            if isinstance(kv["end"], torch.Tensor):
                x = x + 1
            kv["end"].fill_(n + 3)
            return x + n

    compiled = rtc.compile(Model(), options=PLAIN)
    with pytest.raises(rtc.HostSyncError):
        compiled(torch.ones(2), {"end": long(2)}, Thing())


class Moving(nn.Module):
    def __init__(self, move):
        super().__init__()
        self.move = move
        self.register_buffer("k", torch.zeros(1, 8, 4).double())

    def forward(self, x, kv):
        self.k.copy_(torch.cat((self.k[:, 2:], x * kv["end"].item()), 1))
        self.move(kv)
        return self.k.sum()


def anchored(kv):
    if "anchor" not in kv:
        kv["anchor"] = kv["end"]
    kv["end"].fill_(kv["anchor"].item() + 3)


def exchanged(kv):
    kv["end"].add_(kv["other"].item())
    kv["end"], kv["other"] = kv["other"], kv["end"]


@pytest.mark.parametrize("move", [anchored, exchanged])
def test_tensors_that_change_places_are_right_or_refused(move):
    model = Moving(move)
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=PLAIN)
    mine, its = ({"end": long(2), "other": long(5)} for _ in range(2))
    kept = dict(mine)
    for _ in range(6):
        x = torch.randn(1, 2, 4).double()
        want = eager(x, its)
        try:
            got = compiled(x, mine)
        except Exception as e:  # a number that the model put elsewhere: loud
            assert "HostNumber" in str(e) or isinstance(e, rtc.HostSyncError)
            break
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        for name in ("end", "other"):
            assert isinstance(mine[name], torch.Tensor)
            assert int(mine[name]) == int(its[name])
    assert all(isinstance(mine[name], torch.Tensor) for name in kept)


def test_a_call_that_ends_half_way_forgets_what_it_knew(monkeypatch):
    class Model(nn.Module):
        def forward(self, x, kv):
            return x + kv["a"].item() + kv["b"].item()

    compiled = rtc.compile(Model(), options=PLAIN)
    x, kv = torch.zeros(2), {"a": long(3), "b": long(0)}
    torch.testing.assert_close(compiled(x, kv), x + 3)
    kv["a"], kv["b"] = long(9), long(1)
    put = _Place.put

    def dies(self, holder, value, order=()):
        put(self, holder, value, order)
        if isinstance(value, HostNumber):
            raise KeyboardInterrupt

    monkeypatch.setattr(_Place, "put", dies)
    with pytest.raises(KeyboardInterrupt):
        compiled(x, kv)
    monkeypatch.setattr(_Place, "put", put)
    assert [int(kv[name]) for name in "ab"] == [9, 1]
    torch.testing.assert_close(compiled(x, kv), x + 10)
