"""What one layer reads as a number, its sisters' tensors are taken to be at once."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
from torch import nn

import rtc
from rtc.alike import alike
from rtc.host_numbers import HostNumbers
from tests.runtime.test_host_numbers import PLAIN, Rolling, long
from tests.runtime.test_settled import DIM, REPLAY, N

pytestmark = pytest.mark.usefixtures("fresh")


def test_names_that_differ_in_one_number():
    caches = [{"end": 1}, {"end": 2}, {}]
    scope = {"L": {"caches": caches, "by": {4: {"a": [0, 1]}, "x": 1, 5: {}}}}
    assert [*alike("L['caches'][1]", "end", scope)] == [
        ("L['caches'][0]", "end"),
        ("L['caches'][2]", "end"),
    ]
    assert [*alike("L['by'][4]['a']", 0, scope)] == [
        ("L['by'][5]['a']", 0),
        ("L['by'][4]['a']", 1),
    ]
    blocks = nn.Module()
    blocks.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    name = "L['self']._modules['layers']._modules['2']"
    found = [h for h, _ in alike(name, "count", {"L": {"self": blocks}})]
    assert found == [name.replace("'2'", "'0'"), name.replace("'2'", "'1'")]
    assert not [*alike("L['gone'][0]", "end", scope)]


@pytest.mark.parametrize("options", [PLAIN, REPLAY], ids=["plain", "replay"])
def test_all_layers_are_learned_from_one(options, monkeypatch):
    learned, learn = [], HostNumbers.learn

    def counted(self, scope):
        learned.append(learn(self, scope))
        return learned[-1]

    monkeypatch.setattr(HostNumbers, "learn", counted)
    model = Rolling(layers=5)
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=options)
    mine, its = model.session(), model.session()
    for frame in range(9):
        x = [torch.randn(N, DIM).double()]
        torch.testing.assert_close(
            compiled(x, mine, frame * N), eager(x, its, frame * N), rtol=1e-9, atol=1e-9
        )
        assert [kv["last"].item() for kv in mine] == [kv["last"].item() for kv in its]
    assert [n for names in learned for n in names] == [
        "L['caches'][0]['seen']",
        "L['caches'][0]['last']",
    ]
    assert any("and 8 like them" in n for n in compiled.report().to_dict()["runtime"]["notes"])


USES = {
    "index": lambda x, n: x * 2 + x[n].sum(),
    "sum": lambda x, n: x + n,
    "clone": lambda x, n: x * n.clone().double(),
    "hasattr": lambda x, n: x * (2 if hasattr(n, "shape") else 3),
    "getattr": lambda x, n: x * (2 + getattr(n, "ndim", 7)),
    "isinstance": lambda x, n: x * (2 if isinstance(n, torch.Tensor) else 3),
    "is_tensor": lambda x, n: x * (2 if torch.is_tensor(n) else 3),
    "compared": lambda x, n: torch.where(n == 3, x, x * 5),
    "stacked": lambda x, n: x * torch.cat([n, n]).sum(),
    "written by a tensor": lambda x, n: x * n.copy_(torch.ones_like(n)),
    "counted on": lambda x, n: x * n.add_(1),
    "in place": lambda x, n: x.index_fill(0, n, 7.0),
    "kept": lambda x, n: x * next(iter({"n": n}.values())),
}


class Mixed(nn.Module):
    """The first dict's tensor is a number; what the second's is, ``use`` says."""

    def __init__(self, use):
        super().__init__()
        self.use = use

    def forward(self, x, caches, start):
        first, second = caches
        at = first["n"].item()
        first["c"][at : at + 1] = x.sum()
        first["n"].fill_(at + 1)
        return self.use(x, second["n"]) + first["c"].sum()


@pytest.mark.parametrize(("use", "inference"), [(u, i % 3 == 0) for i, u in enumerate(USES)])
def test_a_sister_that_is_more_than_a_number(use, inference):
    """It is right, or refused as ever: but not since it was taken for a number."""
    model = Mixed(USES[use])
    compiled = rtc.compile(model, options=PLAIN)

    def session():
        return [{"n": long(0), "c": torch.zeros(9).double()}, {"n": long(3)}]

    with torch.inference_mode(inference):
        mine, its = session(), session()
    for step in range(3):
        with torch.inference_mode(inference):
            x = torch.arange(8).double() + step
            want, got = model(x, its, step), compiled(x, mine, step)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        for a, b in zip(mine, its, strict=True):
            assert a["n"].item() == b["n"].item()


class Lately(nn.Module):
    """The sister is not touched at first."""

    def forward(self, x, caches, start):
        at = caches[0]["n"].item()
        caches[0]["n"].fill_(at + 1)
        y = x * (at + 1)
        return y + caches[1]["n"] if start > 3 else y


def test_a_sister_used_as_a_tensor_later():
    model = Lately()
    compiled = rtc.compile(model, options=PLAIN)
    mine, its = [{"n": long(0)}, {"n": long(5)}], [{"n": long(0)}, {"n": long(5)}]
    for step in range(8):
        x = torch.randn(4).double()
        torch.testing.assert_close(compiled(x, mine, step), model(x, its, step))
        mine[1]["n"] += 1
        its[1]["n"] += 1
