"""Ints that every layer keeps for itself: one input where they are equal, under guards."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
from torch import nn

import rtc
from rtc import siblings
from tests.runtime.models import close

N, DIM, LAYERS = 2, 4, 3
REPLAY = rtc.Options(lowering="eager", step_graph="simulate", warn=False)

pytestmark = pytest.mark.usefixtures("fresh")


class Layers(nn.Module):
    """Each layer has a cache of its own in the caller's list, and its own number of the last row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.o = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))
        self.register_buffer("angles", torch.rand(200, DIM // 2))
        self.double()

    def forward(self, x, caches):
        for o, kv in zip(self.o, caches, strict=True):
            at, n = kv["at"], x.shape[1]
            kv["k"].copy_(torch.cat([kv["k"][:, n:], o(x)], 1))
            turn = self.angles[at : at + kv["k"].shape[1]]
            a, b = kv["k"].chunk(2, -1)
            k = torch.cat([a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()], -1)
            x = x + (x @ k.mT).softmax(-1) @ kv["k"]
            kv["at"] = at + kv["by"]
        return x

    def session(self, at=(0,) * LAYERS, by=(1,) * LAYERS):
        return [
            {"k": torch.zeros(1, 5 * N, DIM).double(), "at": at[i], "by": by[i]}
            for i in range(LAYERS)
        ]


def steps(compiled, model, its, mine, count=8):
    with torch.no_grad():
        for _ in range(count):
            x = torch.randn(1, N, DIM).double()
            close(compiled(x, its), model(x, mine))
    for a, b in zip(its, mine, strict=True):
        assert a["at"] == b["at"]
        close(a["k"], b["k"])


def test_layers_with_equal_numbers_share_their_places(graph_runtimes):
    model = Layers()
    compiled = rtc.compile(copy.deepcopy(model), options=REPLAY)
    steps(compiled, model, model.session(), model.session())
    assert [len(r.cohorts) for r in graph_runtimes] == [1]
    assert compiled.report().to_dict()["runtime"]["plain_calls"] == 0


def test_layers_whose_numbers_part_are_followed_one_by_one():
    model = Layers()
    compiled = rtc.compile(copy.deepcopy(model), options=REPLAY)
    steps(compiled, model, model.session(), model.session())
    for at, by in [((4, 0, 0), (1, 1, 1)), ((0, 0, 0), (1, 2, 3)), ((0, 0, 7), (2, 2, 1))]:
        steps(compiled, model, model.session(at, by), model.session(at, by))
    assert "L['caches'][#]['at']" in compiled._compiler.apart
    # one for equal numbers, one for all that differ; steps of their own are numbers as well
    assert len(compiled.report().to_dict()["graphs"]) <= 3


def test_numbers_that_are_one_input_are_guarded(monkeypatch):
    """Without: the test above fails."""

    def unguarded(gm, apart):
        found = {}
        for node in gm.graph.find_nodes(op="placeholder"):
            name, value, _ = siblings.named(node)
            if isinstance(value, torch.SymInt):
                node.replace_all_uses_with(found.setdefault(siblings._NUMBER.sub("#", name), node))

    monkeypatch.setattr(siblings, "unite", unguarded)
    with pytest.raises(AssertionError):
        test_layers_whose_numbers_part_are_followed_one_by_one()
