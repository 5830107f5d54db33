"""What the host works out and sends in every call: as little as will do."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
from torch import nn

import rtc
from rtc.passes import lifting
from tests.runtime.models import close

N, DIM = 6, 4
REPLAY = rtc.Options(lowering="eager", step_graph="simulate", warn=False)


class Frames(nn.Module):
    """Six tokens a frame, turned by frame and by place: a table made from parts, in every call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.o = nn.Linear(DIM, DIM)
        self.register_buffer("cache", torch.zeros(1, 4 * N, DIM))
        self.register_buffer("times", torch.randn(100, 2))
        self.register_buffer("places", torch.randn(N, 2))
        self.double()

    def forward(self, x, frame, offset=0):
        time = self.times[frame : frame + 1][:, None].expand(1, N, 2)
        table = torch.cat([time, self.places[None]], -1).reshape(1, N, DIM)
        ids = torch.arange(N) * 2 - offset % 3
        keep = (ids[:, None] >= ids[None] + 1).double()
        k = keep @ (self.o(x) * table)
        self.cache.copy_(torch.cat([self.cache[:, N:], k], 1))
        return x + (x @ self.cache.mT).softmax(-1) @ self.cache


@pytest.mark.parametrize("wide", [1, 1 << 20])
def test_a_table_made_of_a_few_values_is_made_on_the_device(monkeypatch, graph_runtimes, wide):
    monkeypatch.setattr(lifting, "WIDE", wide)
    torch._dynamo.reset()
    model = Frames()
    compiled = rtc.compile(copy.deepcopy(model), options=REPLAY)
    with torch.no_grad():
        for step in [*range(12), 5, 6, 7]:
            x = torch.randn(1, N, DIM).double()
            close(compiled(x, step, 2 * step), model(x, step, 2 * step))
    close(compiled.cache, model.cache)
    (runtime,) = graph_runtimes
    sent = sorted(e.shape for _, e in runtime.varying if e.kind == "host")
    # the frame's row in place of all tokens' rows; the ids in place of the mask
    table, mask = ((1, 2), (N,)) if wide == 1 else ((1, N, DIM), (1, N, N))
    assert table in sent
    assert mask in sent
    assert compiled.report().to_dict()["runtime"]["replays"] > 8
