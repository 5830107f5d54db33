"""What torch.compile's own code generation computes wrong, rtc does not."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import rtc
from rtc.for_inductor import spell

pytestmark = pytest.mark.usefixtures("fresh")


def spelled(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1) @ v


class Spatial(nn.Module):
    """Attention within each frame over [B, F, heads, tokens, D], then over a cache of frames."""

    def __init__(self, written_out=False, dim=32, heads=2, frames=5, tokens=4):
        super().__init__()
        torch.manual_seed(0)
        self.attend = spelled if written_out else F.scaled_dot_product_attention
        self.heads, self.tokens = heads, tokens
        self.space, self.time = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim)
        for name in "kv":
            self.register_buffer(name, torch.randn(1, frames, tokens, heads, dim // heads))
        self.double()

    def forward(self, x, step):
        shape = (1, 1, self.tokens, 3, self.heads, -1)
        parts = (a.transpose(2, 3) for a in self.space(x).view(shape).unbind(3))
        x = x + self.attend(*parts).transpose(2, 3).flatten(3)
        q, k, v = self.time(x).view(shape).unbind(3)
        self.k.copy_(torch.cat([self.k[:, 1:], k], 1))
        self.v.copy_(torch.cat([self.v[:, 1:], v], 1))
        q, k, v = (a.permute(0, 2, 3, 1, 4).flatten(0, 1) for a in (q, self.k, self.v))
        return x + F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)[None]


@pytest.mark.parametrize("written_out", [False, True])
def test_attention_over_five_axes(written_out):
    model = Spatial(written_out)
    eager, compiled = copy.deepcopy(model), rtc.compile(model)
    for step in range(8):
        x = torch.randn(1, 1, 4, 32).double()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, step), eager(x, step), rtol=1e-9, atol=1e-9)
    compiled.materialize()
    torch.testing.assert_close(compiled.k, eager.k, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_large_number_in_arithmetic_of_a_half_type(dtype):
    def step(x, k, at):
        y = x * 100 / (at * 1000 + 100_000) + (at * 257 + 257) - (at * 257 + 257)
        k.copy_(torch.cat([k[:, 1:], y], 1))
        return torch.softmax(x @ k.transpose(1, 2), -1) @ k, y

    mine = torch.randn(1, 6, 8, dtype=dtype)
    its = mine.clone()
    compiled = rtc.compile(step)
    for at in range(4):
        x = torch.randn(1, 1, 8, dtype=dtype)
        with torch.no_grad():
            got, want = compiled(x, mine, at), step(x.float(), its.float(), at)
            step(x, its, at)
        # eager rounds between the operations, Inductor at the end: both are near float32
        torch.testing.assert_close(got[1].float(), want[1], rtol=0.05, atol=0.02)


SHAPES = [
    ((2, 3, 4, 5, 8), None),
    ((2, 3, 4, 5, 8), (5, 6)),
    ((2, 3, 4, 5, 8), (4, 5, 6)),
    ((2, 3, 4, 5, 8), (3, 1, 5, 6)),
    ((2, 3, 4, 5, 8), (2, 1, 1, 1, 6)),
    ((1, 2, 3, 4, 5, 8), (2, 1, 1, 5, 6)),
    ((3, 4, 5, 8), (5, 6)),
]


@pytest.mark.parametrize(("shape", "mask"), SHAPES)
def test_leading_axes_become_one(shape, mask):
    q = torch.randn(shape).double()
    k, v = torch.randn(2, *shape[:-2], 6, 8).double()
    bias = None if mask is None else torch.randn(mask).double()

    def attend(q, k, v, bias):
        return torch.ops.aten.scaled_dot_product_attention.default(q, k, v, bias, 0.0, False)

    args = (q, k, v, bias)
    gm = torch.fx.symbolic_trace(attend)
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), args, strict=True):
        node.meta["val"] = value
    for node in gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
    ):
        if bias is None:
            node.update_arg(3, None)
        node.meta["val"] = attend(*args)
    spell(gm)
    torch.testing.assert_close(gm(*args), attend(*args), rtol=1e-9, atol=1e-9)
    traced = make_fx(gm)(*args)
    assert all(
        n.meta["val"].dim() <= 4
        for n in traced.graph.nodes
        if "softmax" in str(n.target) and isinstance(n.meta["val"], torch.Tensor)
    )
