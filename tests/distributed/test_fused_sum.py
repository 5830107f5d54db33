"""Row-parallel FP8 linears and their all-reduce as one op, over Gloo: what eager gives on 2 and 3
ranks, with the pass on and off, on the plain path as well, and mixed."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.distributed import _functional_collectives as collectives

import rtc
from rtc.backend import Compiler
from rtc.exchanges import unordered
from rtc.kernels.linear_all_reduce_norm import _compare
from rtc.kernels.linear_all_reduce_rows import Norm
from rtc.passes.analysis.layout import Fallback
from rtc.runtime.prepare import CohortRuntime

from .conftest import run_ranks

DIM, NEW, SLOTS, LAYERS = 48, 4, 16, 2
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


class Parallel(nn.Module):
    """x @ w.T, K cut over the ranks, w in FP8; summed in bfloat16."""

    def __init__(self, inputs, outputs):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        whole = torch.randn(outputs, inputs * world)
        part = whole[:, rank * inputs : (rank + 1) * inputs].contiguous()
        self.register_buffer("weight", (part * 4).to(FP8))
        self.register_buffer("scale", torch.tensor(0.02))
        self.group = dist.group.WORLD

    def forward(self, x):
        x8 = (x.flatten(0, -2) * 16).clamp(-448, 448).to(FP8)
        one = torch.full((), 1 / 16)
        y = torch._scaled_mm(
            x8, self.weight.t(), one, self.scale, out_dtype=BF16, use_fast_accum=True
        )
        return collectives.all_reduce(y.unflatten(0, x.shape[:-1]), "sum", self.group)


class Stream(nn.Module):
    """A window of keys that moves along, attention over it, and a row-parallel projection."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # the same on all ranks; replicated but for the linears
        self.qk = nn.ModuleList(nn.Linear(DIM, 2 * DIM, bias=False) for _ in range(LAYERS))
        self.out = nn.ModuleList(Parallel(DIM, DIM) for _ in range(LAYERS))
        for i in range(LAYERS):
            self.register_buffer(f"keys{i}", torch.zeros(1, 1, SLOTS, DIM))
        self.requires_grad_(False)

    def attend(self, i, q, k, step):
        """Keys are values too; q and k [1, NEW, DIM]."""
        angle = (torch.arange(SLOTS) + step)[:, None] * 0.1 ** torch.arange(1.0, DIM // 2 + 1)
        cos, sin = angle.cos(), angle.sin()

        def turn(y, n):
            a, b = y.chunk(2, -1)
            c, s = cos[-n:], sin[-n:]
            return torch.cat([a * c - b * s, a * s + b * c], -1)

        keys = getattr(self, f"keys{i}")
        keys.copy_(torch.cat([keys[:, :, NEW:], k[:, None]], 2))
        y = F.scaled_dot_product_attention(turn(q[:, None], NEW), turn(keys, SLOTS), keys)
        return y[:, 0]

    def forward(self, x, step: int):
        for i in range(LAYERS):
            q, k = self.qk[i](F.layer_norm(x, (DIM,))).chunk(2, -1)
            x = x + self.out[i](self.attend(i, q, k, step)).float()
        return x


class Blocks(Stream):
    """A residual stream in bfloat16: norm, modulation, FP8 by rows, attention, sum, gate; twice."""

    def __init__(self):
        super().__init__()
        for i in range(LAYERS):
            self.register_buffer(f"w{i}", (torch.randn(2 * DIM, DIM) * 4).to(FP8))
        self.register_buffer("vectors", torch.randn(LAYERS, 3, DIM) * 0.3)
        self.register_buffer("unit", torch.tensor(0.02))

    def project(self, i, x):
        """Queries and keys, by rows in FP8."""
        _, scale, shift = self.vectors[i]
        n = (F.layer_norm(x.float(), (DIM,)) * (1 + scale) + shift).flatten(0, 1)
        s = n.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
        n8, w = (n / s).clamp(-448, 448).to(FP8), getattr(self, f"w{i}")
        y = torch._scaled_mm(n8, w.t(), torch.ones(()), self.unit, out_dtype=torch.float32)
        return (y * s).unflatten(0, x.shape[:2]).chunk(2, -1)

    def forward(self, x, step: int):
        x = x.to(BF16)
        for i in range(LAYERS):
            q, k = self.project(i, x)
            x = x + self.vectors[i, 0].to(BF16) * self.out[i](self.attend(i, q, k, step))
        y, _ = self.project(0, x)  # a norm of the last block's sum as well
        return y + x.float() if self.whole else y

    whole = True


def noise(step):
    return torch.randn(1, NEW, DIM, generator=torch.Generator().manual_seed(step))


@contextlib.contextmanager
def plainly(wanted):
    """Calls take the plain path."""
    prepare = CohortRuntime.prepare

    def refuse(*args):
        raise Fallback("for this test")

    try:
        if wanted:
            CohortRuntime.prepare = refuse
        yield
    finally:
        CohortRuntime.prepare = prepare


def chain(options, touch=(), kind=Stream):
    """(distance from eager, counts, of the sum and of the product, notes), on each rank.

    ``touch``: steps that rank 0, and it alone, takes the plain path for.
    """
    options = rtc.Options(lowering="eager", kernels="on", **options)
    eager, model = kind(), kind()
    compiled, far = rtc.compile(model, options=options), 0.0
    with torch.no_grad():
        for step in range(12):
            with plainly(step in touch and dist.get_rank() == 0):
                got = compiled(noise(step), step)
            want = eager(noise(step), step)
            far = max(far, float((got - want).norm() / want.norm()))
            mine = [torch.empty_like(got) for _ in range(dist.get_world_size())]
            dist.all_gather(mine, got)
            assert all(torch.equal(m, got) for m in mine), f"ranks differ in step {step}"
    report = compiled.report().to_dict()
    counts = {p["name"]: (p["matched"], p["applied"]) for p in report["graphs"][0]["passes"]}
    notes = report["graphs"][0]["notes"]
    assert report["runtime"]["plain_calls"] == (len(touch) if dist.get_rank() == 0 else 0)
    compiled.close()
    (normed,) = [
        p for p in report["graphs"][0]["passes"] if p["name"] == "fuse_all_reduce_norm"
    ]  # fmt: skip
    norms = (normed["matched"], normed["applied"], normed["notes"])
    return far, counts["fuse_linear_all_reduce"], counts["fp8_linear"], notes, norms


# keys and values share a cache and nothing quantizes it: only the sum's roundings differ
CLOSE = 2.0**-7


@pytest.mark.parametrize("world", [2, 3])
def test_fused_sums_give_what_eager_gives(world):
    for far, fused, linear, notes, _ in run_ranks(chain, world, {}):
        assert far < CLOSE
        assert fused == (LAYERS, LAYERS)
        assert linear == (LAYERS, LAYERS)
        assert any("gathered and added" in n for n in notes)


def test_a_rank_that_goes_another_way_still_meets_the_others():
    """Not even for long is anything compiled anew on it alone: the others would not come."""
    touch = (1, *range(3, 12))
    for far, fused, *_ in run_ranks(chain, 2, {"rank_timeout_s": 10.0}, touch=touch):
        assert far < CLOSE
        assert fused == (LAYERS, LAYERS)


def test_off_is_a_matter_of_options():
    off = {"passes": {"fuse_linear_all_reduce": False}}
    for far, fused, linear, *_ in run_ranks(chain, 2, off):
        assert far < CLOSE
        assert fused == (0, 0)
        assert linear == (LAYERS, LAYERS)


class Ends(Blocks):
    """Nothing but norms reads the stream: no rank needs the others' rows of it."""

    whole = False


def norms(world):
    """On two ranks one whole stream, and that with its norms left alone; on three the other."""
    by_rows = {"fuse_all_reduce_norm": True}
    if world == 3:
        return [chain(by_rows, (1, 5, 6), Ends)]
    # off, the plain path rounds in other places than the compiled one: no mixing then
    return [chain(by_rows, (1, 5, 6), Blocks), chain({}, (), Blocks)]


class Differs(Ends):
    """A vector of the norms is not the same on all ranks."""

    def __init__(self):
        super().__init__()
        self.vectors[1, 1, 3] += dist.get_rank()


def different():
    try:
        chain({"fuse_all_reduce_norm": True}, kind=Differs)
    except ValueError as e:
        return str(e)


def test_the_word_that_all_is_replicated_is_held_against_the_values():
    for said in run_ranks(different, 2):
        assert "differs between ranks: give every rank the same" in said


def compared():
    """Whether a difference between ranks is told: of a rounding, as behind an FP8 linear, of a
    row, of an infinite value, of a row that is not there although all should have it, or not."""
    rank, said = dist.get_rank(), []
    cases = [
        (2.0**-8, True, True), (0.03, True, True), (0.5, True, True), (torch.inf, True, True),
        (0.0, False, True), (0.0, False, False),
    ]  # fmt: skip
    for far, there, compare in cases:
        g = torch.Generator().manual_seed(0)
        x, vector = torch.randn(4, DIM, generator=g), torch.randn(DIM, generator=g)
        if far == torch.inf:
            x[2, 3] = far if rank else 1.0
        else:
            x[2] *= 1 + far * rank
        if not there:
            x[rank] = float("nan")
        norm = Norm(x, None, vector, None, vector, vector, "rms", 1e-5, 1e-4, False, compare)
        try:
            _compare(norm, 2, dist.group.WORLD)
            said.append(False)
        except ValueError:
            said.append(True)
    return said


def test_what_is_compared():
    assert run_ranks(compared, 2) == [[False, False, True, True, True, False]] * 2


@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_norms_its_own_rows(world):
    """Rows of others are NaN on the CPU where they are not to be read: none of them shows."""
    for (far, fused, _, _, normed), *without in run_ranks(norms, world, world):
        assert far < 8 * CLOSE  # an FP8 step apart here and there
        assert fused == (LAYERS, LAYERS)
        # of Ends' last sum nobody reads the rows, which is not worth a case of its own
        own = ["1 of 2 leave each rank its own rows of the residual"]
        assert normed == (LAYERS, LAYERS, own)
        assert [w[4] for w in without] == [(0, 0, [])] * len(without)


# -- what ranks do not all do ----------------------------------------------------------------------


class Uneven(Parallel):
    """K cut in unequal parts: 2/3 of the features on rank 0."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        whole, rank = torch.randn(outputs, 2 * inputs), dist.get_rank()
        first = 4 * inputs // 3
        self.cut = (slice(first), slice(first, None))[rank]
        self.weight = (whole[:, self.cut].contiguous() * 4).to(FP8)

    def forward(self, x):
        return super().forward(torch.cat([x, x.sin()], -1)[..., self.cut])


def uneven():
    global Parallel
    Parallel = Uneven
    return chain({"rank_check": "collectives"})


def test_shards_may_be_uneven():
    for far, fused, *_ in run_ranks(uneven, 2):
        assert far < CLOSE
        assert fused == (LAYERS, LAYERS)


class Late(Stream):
    """Two sums of one shape more, of which the first is used last, and one that nothing reads."""

    def forward(self, x, step: int):
        x = super().forward(x, step)
        first, second = self.out[0](x * 2), self.out[1](x * 3)
        self.out[0](x * 4)
        y = (second.float().sin() @ self.qk[0].weight[:DIM].t()).relu()
        return x + y.sum() + first.float()


def late(lowering, regions):
    """Inductor compiles as ever, but what it is given is run as it is: (counts, notes, far)."""
    given = []

    def lower_one(self, gm, fakes):
        given.append(gm)
        return make_boxed_func(gm.forward)

    Compiler._lower_one = lower_one
    options = rtc.Options(lowering=lowering, kernels="on", regions=regions)
    eager, model = Late(), Late()
    compiled, far = rtc.compile(model, options=options), 0.0
    with torch.no_grad():
        for step in range(6):
            with plainly(step in (3, 4) and dist.get_rank() == 0):
                got = compiled(noise(step), step)
            want = eager(noise(step), step)
            far = max(far, float((got - want).norm() / want.norm()))
    (found,) = [
        p for p in compiled.report().to_dict()["graphs"][0]["passes"]
        if p["name"] == "fuse_linear_all_reduce"
    ]  # fmt: skip
    compiled.close()
    loose = {name for gm in given for name in unordered(gm)}
    reasons = sorted({r["reason"] for r in found["refused"]})
    return far, (found["matched"], found["applied"]), reasons, loose


def late_twice():
    return late("inductor", "off"), late("inductor", "on")


def test_inductor_orders_no_fused_sums():
    """As a whole, it would move one past another of the same shape, and a rank on the plain path
    would add a part of the first to a part of the second. Regions keep their order."""
    unread = "nothing reads the sum"
    for whole, cut in run_ranks(late_twice, 2):
        for far, _, _, loose in (whole, cut):
            assert far < 4 * CLOSE  # x is multiplied
            assert loose == set()
        assert whole[1] == (LAYERS + 3, 0)
        assert whole[2] == ["Inductor would not keep the order of sums: regions are off", unread]
        assert cut[1] == (LAYERS + 3, LAYERS + 2)
        assert cut[2] == [unread]
