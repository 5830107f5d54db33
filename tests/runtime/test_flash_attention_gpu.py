"""FlashAttention-3's own functions in a model, on a GPU that has them."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
from torch import nn

import rtc

pytestmark = pytest.mark.gpu
fa3 = pytest.importorskip("fa3_fwd_interface")
N, HEADS, WIDTH, WINDOW = 128, 4, 128, 4


def varlen(q, k, v):
    b, lq, lk = q.shape[0], q.shape[1], k.shape[1]
    lens = [
        torch.tensor([n] * b, dtype=torch.int32).to(q.device, non_blocking=True) for n in (lq, lk)
    ]
    ends = [torch.cat([x.new_zeros([1]), x]).cumsum(0, dtype=torch.int32) for x in lens]
    flat = (x.flatten(0, 1) for x in (q, k, v))
    out = fa3.flash_attn_varlen_func(*flat, *ends, lq, lk)
    return (out[0] if isinstance(out, tuple) else out).unflatten(0, (b, lq))


def dense(q, k, v):
    out = fa3.flash_attn_func(q, k, v)
    return out[0] if isinstance(out, tuple) else out


class Model(nn.Module):
    """A window kept by numbers in tensors, on the GPU as published code has them."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        dim = HEADS * WIDTH
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, kv):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, WIDTH).unbind(2)
        size = kv["k"].shape[1]
        last = kv["last"].item() + n
        if last > size:
            for c in (kv["k"], kv["v"]):
                c[:, : size - n] = c[:, n:].clone()
            last = size
        kv["k"][:, last - n : last] = k
        kv["v"][:, last - n : last] = v
        first = max(0, last - WINDOW * N)
        y = self.attend(q, kv["k"][:, first:last], kv["v"][:, first:last])
        kv["last"].fill_(last)
        kv["seen"].add_(n)
        return x + self.o(y.flatten(2)) * (kv["seen"].item() % 7)

    def session(self, device):
        shape = (1, WINDOW * N, HEADS, WIDTH)
        k, v = torch.zeros(2, *shape, device=device, dtype=torch.bfloat16)
        last, seen = torch.zeros(2, 1, dtype=torch.long, device=device).clone().unbind(0)
        return {"k": k.clone(), "v": v.clone(), "last": last.clone(), "seen": seen.clone()}


@pytest.mark.parametrize("attend", [dense, varlen])
def test_published_ways_become_a_ring_in_a_cuda_graph(attend):
    model = Model(attend).cuda().bfloat16()
    eager, compiled = copy.deepcopy(model), rtc.compile(model)
    mine, its = model.session("cuda"), model.session("cuda")
    with torch.no_grad():
        for _ in range(16):
            x = torch.randn(1, N, HEADS * WIDTH, device="cuda", dtype=torch.bfloat16)
            got, want = compiled(x, mine), eager(x, its)
            error = (got - want).float().norm() / want.float().norm()
            assert error < 1e-2
            assert int(mine["last"]) == int(its["last"])
            assert int(mine["seen"]) == int(its["seen"])
    compiled.materialize()
    for name in "kv":
        torch.testing.assert_close(mine[name], its[name], rtol=2e-2, atol=2e-2)
    report = compiled.report().to_dict()
    passes = {p["name"]: p for p in report["graphs"][-1]["passes"]}
    assert passes["ring_cache"]["applied"] == 2
    assert report["runtime"]["plain_calls"] == 0
    assert report["runtime"]["replays"] > 0
