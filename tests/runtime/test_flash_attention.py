"""FlashAttention's functions: opaque ops, taken for attention where they are no more than that.

The packages need a GPU, so here their ops stand in: the same names and schemas, computed with SDPA.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rtc

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.skipif(
        importlib.util.find_spec("flash_attn") is not None, reason="flash-attn's own ops are there"
    ),
]
REPLAY = rtc.Options(lowering="eager", step_graph="simulate", warn=False)
N, HEADS, WIDTH, WINDOW = 3, 4, 8, 4
DIM = HEADS * WIDTH


def dense(q, k, v, scale, causal, left, right, softcap):
    """[B, T, H, D]; masks count from the last key, as flash-attn's do."""
    g = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(g, 2), v.repeat_interleave(g, 2)
    s = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    t = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    at = torch.arange(k.shape[1])[None]
    off = (at > t) & causal
    if left >= 0:
        off = off | (at < t - left)
    if right >= 0:
        off = off | (at > t + right)
    s = s.masked_fill(off, float("-inf"))
    return torch.einsum("bhts,bshd->bthd", s.softmax(-1), v), s.logsumexp(-1)


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def forward2(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse = dense(q, k, v, softmax_scale, causal, window_size_left, window_size_right, softcap)
    return out.contiguous(), lse.float(), q.new_empty(0), torch.zeros(2, dtype=torch.int64)


@forward2.register_fake
def _(q, k, v, *rest):
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def varlen2(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None, zero_tensors: bool = False, num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    outs = []
    a, b = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(a) - 1):
        out, _ = dense(
            q[None, a[i] : a[i + 1]], k[None, b[i] : b[i + 1]], v[None, b[i] : b[i + 1]],
            softmax_scale, causal, window_size_left, window_size_right, softcap,
        )  # fmt: skip
        outs.append(out[0])
    return torch.cat(outs), q.new_empty(0), q.new_empty(0), torch.zeros(2, dtype=torch.int64)


@varlen2.register_fake
def _(q, k, v, *rest, **kwargs):
    return torch.empty_like(q), q.new_empty(0), q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
def forward3(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, q_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse = dense(q, k, v, softmax_scale, causal, window_size_left, window_size_right, softcap)
    if q_descale is not None:
        out = out * q_descale
    return out.contiguous(), lse.float(), q.new_empty(0), q.new_empty(0)


@forward3.register_fake
def _(q, k, v, *rest, **kwargs):
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(0)


class Flash(torch.autograd.Function):
    """As the package calls its op."""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, window, softcap, lse):
        width = q.shape[-1]
        if width % 8:
            q, k, v = (F.pad(x, [0, 8 - width % 8]) for x in (q, k, v))
        out, sums, *_ = torch.ops.flash_attn._flash_attn_forward(
            q, k, v, 0.0, scale or width**-0.5, causal=causal, window_size_left=window[0],
            window_size_right=window[1], softcap=softcap, alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        out = out[..., :width]
        return (out, sums) if lse else out


def flash(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, lse=False):
    return Flash.apply(q, k, v, scale, causal, window, softcap, lse)


def varlen(q, k, v, q_lens=None, k_lens=None, padded=False, **kwargs):
    """The way of published models: lengths of all sequences, made in every call."""
    b, lq, lk = q.shape[0], q.shape[1], k.shape[1]
    q_lens = torch.tensor([lq] * b if q_lens is None else q_lens, dtype=torch.int32).to(q.device)
    k_lens = torch.tensor([lk] * b if k_lens is None else k_lens, dtype=torch.int32).to(q.device)
    if padded:
        ends = [F.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in (q_lens, k_lens)]
    else:
        ends = [
            torch.cat([x.new_zeros([1]), x]).cumsum(0, dtype=torch.int32) for x in (q_lens, k_lens)
        ]
    out = torch.ops.flash_attn._flash_attn_varlen_forward(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *ends, lq, lk, 0.0, q.shape[-1] ** -0.5,
        False, **kwargs,
    )[0]  # fmt: skip
    return out.unflatten(0, (b, lq))


def fa3(q, k, v, **kwargs):
    return torch.ops.flash_attn_3._flash_attn_forward(q, k, v, **kwargs)[0]


class Model(nn.Module):
    def __init__(self, attend, batch=1, groups=HEADS, width=WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.groups, self.width = attend, groups, width
        self.q = nn.Linear(DIM, HEADS * width).double()
        self.kv = nn.Linear(DIM, 2 * groups * width).double()
        self.o = nn.Linear(HEADS * width, DIM).double()
        for name in "kc", "vc":
            zeros = torch.zeros(batch, WINDOW * N, groups, width).double()
            self.register_buffer(name, zeros)

    def forward(self, x, step):
        b, n, _ = x.shape
        q = self.q(x).view(b, n, HEADS, self.width)
        k, v = self.kv(x).view(b, n, 2, self.groups, self.width).unbind(2)
        k = torch.cat((self.kc[:, n:], k), 1)
        v = torch.cat((self.vc[:, n:], v), 1)
        self.kc.copy_(k)
        self.vc.copy_(v)
        return x + self.o(self.attend(q, k, v).flatten(2))


def chain(model, batch=1, options=REPLAY):
    """Caches in a ring after a chain that agrees with eager."""
    eager, compiled = copy.deepcopy(model), rtc.compile(model, options=options)
    for step in range(12):
        x = torch.randn(batch, N, DIM).double()
        torch.testing.assert_close(
            compiled(x, step), eager(x, step), rtol=1e-9, atol=1e-9, msg=f"step {step}"
        )
    compiled.materialize()
    torch.testing.assert_close(compiled.kc, eager.kc, rtol=1e-9, atol=1e-9)
    passes = {p["name"]: p for p in compiled.report().to_dict()["graphs"][-1]["passes"]}
    return passes["ring_cache"]["applied"]


KNOWN = {
    "plain": flash,
    "scale": lambda q, k, v: flash(q, k, v, scale=0.3),
    "varlen": varlen,
    "varlen, padded": lambda q, k, v: varlen(q, k, v, padded=True),
    "fa3": fa3,
    "fa3, scale": lambda q, k, v: fa3(q, k, v, softmax_scale=0.3, num_splits=2),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", KNOWN)
def test_a_cache_that_it_reads_becomes_a_ring(name, batch):
    assert chain(Model(KNOWN[name], batch), batch) == 2


def test_fewer_key_heads_and_odd_widths():
    assert chain(Model(flash, groups=2)) == 2
    assert chain(Model(varlen, groups=2)) == 2
    assert chain(Model(flash, width=6)) == 2


def halves(q, k, v):
    """Two sequences of other lengths behind one another, where the batch is one."""
    n, s = q.shape[1], k.shape[1]
    ends = torch.tensor([0, 1, n], dtype=torch.int32), torch.tensor([0, 5, s], dtype=torch.int32)
    return torch.ops.flash_attn._flash_attn_varlen_forward(
        q[0], k[0], v[0], *ends, n, s, 0.0, 0.3, False
    )[0][None]


def shorter(q, k, v):
    """The last keys are none of the sequence's: they take up memory only."""
    n, s = q.shape[1], k.shape[1]
    ends = torch.tensor([0, n], dtype=torch.int32), torch.tensor([0, s - 2], dtype=torch.int32)
    return torch.ops.flash_attn._flash_attn_varlen_forward(
        q[0], k[0], v[0], *ends, n, s - 2, 0.0, 0.3, False
    )[0][None]


def with_sums(q, k, v):
    out, sums = flash(q, k, v, lse=True)
    return out * sums.transpose(1, 2)[..., None]


def padded_later(q, k, v):
    n, s = q.shape[1], k.shape[1]
    ends = torch.tensor([0, n], dtype=torch.int32), torch.tensor([0, s], dtype=torch.int32)
    ends[1][1] -= 2
    return torch.ops.flash_attn._flash_attn_varlen_forward(
        q[0], k[0], v[0], *ends, n, s, 0.0, 0.3, False
    )[0][None]


MORE = {
    "lengths written later": padded_later,
    "causal": lambda q, k, v: flash(q, k, v, causal=True),
    "window": lambda q, k, v: flash(q, k, v, window=(5, -1)),
    "window ahead": lambda q, k, v: flash(q, k, v, window=(-1, 0)),
    "softcap": lambda q, k, v: flash(q, k, v, softcap=1.0),
    "sums": with_sums,
    "other lengths": halves,
    "fewer keys": shorter,
    "varlen, window": lambda q, k, v: varlen(q, k, v, window_size_left=5),
    "fa3, descale": lambda q, k, v: fa3(q, k, v, q_descale=torch.full((1, 1), 2.0).double()),
    "fa3, causal": lambda q, k, v: fa3(q, k, v, causal=True),
}


@pytest.mark.parametrize("name", MORE)
def test_what_asks_for_more_stays_as_it_is(name):
    assert chain(Model(MORE[name])) == 0


@pytest.mark.parametrize("batch", [1, 2])
def test_what_was_flattened_before_a_write(batch):
    def step(x, cache):
        b, n = x.shape[:2]
        keys = cache[:, :n].flatten(0, 1)
        q = x.flatten(0, 1)
        lens = torch.tensor([n] * b, dtype=torch.int32)
        ends = torch.cat([lens.new_zeros([1]), lens]).cumsum(0, dtype=torch.int32)
        cache[:, :n] = 0
        return torch.ops.flash_attn._flash_attn_varlen_forward(
            q, keys, keys, ends, ends, n, n, 0.0, 0.3, False
        )[0]

    x = torch.randn(batch, N, HEADS, WIDTH).double()
    mine = torch.randn(batch, 2 * N, HEADS, WIDTH).double()
    its = mine.clone()
    got = rtc.compile(step, options=rtc.Options(lowering="eager"))(x, mine)
    torch.testing.assert_close(got, step(x, its), rtol=1e-9, atol=1e-9)


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("k", torch.zeros(1, WINDOW * N, HEADS, WIDTH).double())

    def forward(self, x, step):
        k = torch.cat((self.k[:, x.shape[1] :], x), 1)
        self.k.copy_(k)
        return flash(x, x, x, causal=True) + flash(x, k, k)


class Filling(nn.Module):
    """A window that fills: lengths of symbolic size."""

    def __init__(self):
        super().__init__()
        for name in "kc", "vc":
            self.register_buffer(name, torch.zeros(1, 60 * N, HEADS, WIDTH).double())

    def forward(self, x, step):
        at, n = step * N, N
        self.kc[:, at : at + n] = x
        self.vc[:, at : at + n] = x * 2
        first = max(0, at + n - WINDOW * N)
        return varlen(x, self.kc[:, first : at + n], self.vc[:, first : at + n])


@pytest.mark.parametrize("model", [Causal, Filling])
def test_causal_over_as_many_keys_and_lengths_that_settle(model):
    eager = model()
    compiled = rtc.compile(copy.deepcopy(eager), options=REPLAY)
    for step in range(16):
        x = torch.randn(1, N, HEADS, WIDTH).double()
        torch.testing.assert_close(compiled(x, step), eager(x, step), rtol=1e-9, atol=1e-9)
