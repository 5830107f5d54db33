"""fuse_pre_attention: norm, RoPE, FP8 and cache writes in many people's words, in one kernel.

Three new slots a step in windows of twelve to fourteen, 64 steps. Caches start out random: a slot
that is read from the wrong place is a random row, an error of about 1. Errors are norm-wise:
against the same options without the pass, and against eager (that is FP8 itself: queries, keys and
values are rounded to three bits of mantissa, with eight channels a head to average over). In
float32 the pass changes next to nothing. In bfloat16 it leaves out the rounding between RoPE and
FP8: one value in twenty or so goes to the next FP8 number, as far as FP8's rounding itself.

Legend: B batch, H heads, G key heads, S slots, T new slots, D head size, P pairs of it.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rtc
from rtc.model import build, example_inputs
from rtc.testing import assert_pass_counts, assert_refused

F8 = torch.float8_e4m3fn
STEPS = 64
TURNS = 23  # steps from one position reset to the next
H, T, D = 4, 3, 8
THETA = torch.tensor([1.0, 0.31, 0.1, 0.017])
BOUND = 6.5e-2  # FP8 against eager, rms over steps
WORST = 0.13  # ... of one step
CLOSE = {torch.bfloat16: 2.5e-2, torch.float32: 1e-3}  # with and without, rms over steps
CACHES = {torch.bfloat16: 1.6e-2, torch.float32: 1e-6}  # a norm's own roundings
ON = rtc.Options(
    lowering="eager", regions="on", kernels="on", quantize="calibrated", quantize_kv=True,
    fp8_attention=True, warn=False,
)  # fmt: skip
OWN = dataclasses.replace(ON, quantize_kv=False)
OFF = {"fuse_pre_attention": False}


def frames(step, dtype):
    g = torch.Generator().manual_seed(700 + step)
    return torch.randn(1, T, 24, generator=g).to(dtype)


def rms(errors):
    return (sum(e * e for e in errors) / len(errors)) ** 0.5


def far(have, want):
    error = ((have - want).norm() / want.norm()).item()
    return error if error == error else float("inf")


class Chain:
    """A model, its compiled twin, and one compiled without the pass, over `steps` calls."""

    def __init__(self, make, dtype=torch.float32, options=ON, steps=STEPS, inputs=None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.dtype = dtype
        self.eager = make().to(dtype).eval().requires_grad_(False)
        self.twin, other = copy.deepcopy(self.eager), copy.deepcopy(self.eager)
        self.compiled = rtc.compile(self.twin, options=options)
        without = rtc.compile(other, options=dataclasses.replace(options, passes=OFF))
        self.errors, self.apart, self.others = [], [], []
        with torch.no_grad():
            for step in range(steps):
                x = frames(step, dtype) if inputs is None else inputs(step)
                want, have, off = (f(x, step).float() for f in (self.eager, self.compiled, without))
                assert have.isfinite().all()
                self.errors.append(far(have, want))
                self.apart.append(far(have, off))
                self.others.append(far(off, want))
        self.report = self.compiled.report().to_dict()
        self.off = without.report().to_dict()

    def check(self, applied=1):
        assert_pass_counts(self.report, {"fp8_attention": 1, "fuse_pre_attention": applied})
        assert_pass_counts(self.off, {"fp8_attention": 1, "fuse_pre_attention": 0})
        assert 1e-3 < rms(self.errors) < min(BOUND, 1.15 * rms(self.others))  # it did round
        assert max(self.errors) < WORST
        assert max(self.apart) < WORST
        assert rms(self.apart) < CLOSE[self.dtype]
        assert self.report["runtime"]["plain_calls"] == 0
        assert self.report["runtime"]["saturated_values"] == 0
        for graph in self.report["graphs"] if applied else ():  # no cache is copied to be written
            assert graph["regions"]["in_place"] == graph["regions"]["writes"] > 0
        self.check_caches()

    def check_refused(self, reason):
        self.check(applied=0)
        assert_refused(self.report, "fuse_pre_attention", reason)
        assert max(self.apart) == 0

    def check_caches(self):
        """Raw caches hold what eager's hold: FP8 is beside them."""
        self.compiled.materialize()
        twins, tol = dict(self.twin.named_buffers()), CACHES[self.dtype]
        for name, want in self.eager.named_buffers():
            torch.testing.assert_close(twins[name].float(), want.float(), rtol=tol, atol=tol)


# ---- norms ---------------------------------------------------------------------------------------


class Spelled(nn.Module):
    """RMSNorm as most repositories have it."""

    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(1 + 0.3 * torch.randn(dim))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * self.weight


class LessOne(nn.Module):
    """The weight is stored less one; the root is taken of a mean of products."""

    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(0.3 * torch.randn(dim))

    def forward(self, x):
        y = x.float()
        y = y / torch.sqrt((y * y).mean(dim=-1, keepdim=True) + 1e-6)
        return (y * (1.0 + self.gamma.float())).to(x.dtype)


class OnTop(LessOne):
    """The weight less one as a product on top."""

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return (y + y * self.gamma).to(x.dtype)


class Bare(nn.Module):
    """No weight."""

    def __init__(self, dim):
        super().__init__()

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


class UnitLength(nn.Module):
    """To length sqrt(dim) by F.normalize."""

    def __init__(self, dim):
        super().__init__()
        self.g = nn.Parameter(1 + 0.3 * torch.randn(dim))

    def forward(self, x):
        return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * self.g


def torch_norm(dim):
    norm = nn.RMSNorm(dim, eps=1e-6)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    return norm


def layer_norm(dim):
    norm = nn.LayerNorm(dim)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    nn.init.normal_(norm.bias, 0.0, 0.3)
    return norm


class OfAllHeads(nn.Module):
    """One mean over all heads' channels: no norm of a head."""

    def __init__(self, dim):
        super().__init__()
        self.w = nn.Parameter(1 + 0.3 * torch.randn(dim))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean((-2, -1), keepdim=True) + 1e-6)
        return y.to(x.dtype) * self.w


def no_norm(dim):
    return nn.Identity()


# ---- RoPE: x [.., N, heads, D], positions [N] ----------------------------------------------------


def angles(pos, pairs=D // 2):
    return torch.outer(pos.float(), THETA[:pairs])  # [N, P]


def half_chunk(x, pos):
    """chunk and cat, tables [N, P]."""
    ang = angles(pos)[:, None]
    cos, sin = ang.cos().to(x.dtype), ang.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def half_function(x, pos):
    """A rotate_half function, tables [N, D]."""
    ang = angles(pos)
    emb = torch.cat([ang, ang], dim=-1)
    cos, sin = emb.cos()[None, :, None, :], emb.sin()[None, :, None, :]
    return ((x.float() * cos) + (rotate_half(x.float()) * sin)).to(x.dtype)


def half_split(x, pos):
    """Two outputs by name."""
    ang = angles(pos).unsqueeze(-2)
    cos, sin = ang.cos(), ang.sin()
    x1, x2 = x[..., : D // 2].float(), x[..., D // 2 :].float()
    out1 = x1 * cos - x2 * sin
    out2 = x2 * cos + x1 * sin
    return torch.cat((out1, out2), dim=-1).type_as(x)


def interleaved_polar(x, pos):
    """Complex tables."""
    ang = angles(pos)
    cis = torch.polar(torch.ones_like(ang), ang)[None, :, None]
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * cis).flatten(3).type_as(x)


def interleaved_stack(x, pos):
    ang = angles(pos)[:, None]
    cos, sin = ang.cos(), ang.sin()
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    y = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return y.to(x.dtype)


def interleaved_function(x, pos):
    """Tables [N, D], each entry twice."""
    emb = angles(pos).repeat_interleave(2, -1)[None, :, None]
    x1, x2 = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-x2, x1), dim=-1).reshape(x.shape)
    return (x.float() * emb.cos() + turned * emb.sin()).to(x.dtype)


def partial(x, pos):
    """The first half of the channels only."""
    ang = angles(pos, 2)[:, None]
    a, b = x[..., : D // 2].float().chunk(2, -1)
    turned = torch.cat([a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()], -1)
    return torch.cat([turned.to(x.dtype), x[..., D // 2 :]], -1)


def no_rope(x, pos):
    return x


ROPES = {
    f.__name__: f
    for f in (
        half_chunk, half_function, half_split, interleaved_polar, interleaved_stack,
        interleaved_function, no_rope,
    )
}  # fmt: skip
NORMS = {
    "torch": torch_norm, "spelled": Spelled, "less_one": LessOne, "on_top": OnTop, "bare": Bare,
    "unit_length": UnitLength, "layer_norm": layer_norm, "none": no_norm,
}  # fmt: skip


# ---- a model made of such ------------------------------------------------------------------------


def round_trip(x, axes):
    scale = (x.float().abs().amax(axes, keepdim=True) / 448).clamp(min=1e-12)
    return ((x.float() / scale).clamp(-448, 448).to(F8).float() * scale).to(x.dtype)


class Model(nn.Module):
    """``heads_first``: caches [B, G, S, D]; ``ring``: written by index; ``turned``: RoPE comes
    before the cache; ``drift``: positions are those in the window, so that all keys turn on in
    every step; ``own``: it keeps FP8 itself."""

    sink = 2

    def __init__(
        self, norm=torch_norm, rope=half_chunk, q_rope=None, groups=H, heads_first=False,
        ring=False, turned=False, drift=False, own=False, heads=H,
    ):  # fmt: skip
        super().__init__()
        self.rope, self.q_rope = rope, q_rope or rope
        self.heads, self.groups, self.heads_first = heads, groups, heads_first
        self.ring, self.turned, self.drift, self.own = ring, turned, drift, own
        self.slots = 12 if ring else 14
        self.qkv = nn.Linear(24, (heads + 2 * groups) * D, bias=False)
        self.out = nn.Linear(heads * D, 24, bias=False)
        self.norm_q, self.norm_k = norm(D), norm(D)
        shape = (1, groups, self.slots, D) if heads_first else (1, self.slots, groups, D)
        self.register_buffer("k", torch.randn(shape))
        self.register_buffer("v", torch.randn(shape))

    def write(self, cache, new, step):
        axis = 2 if self.heads_first else 1
        new = new.transpose(1, 2) if self.heads_first else new
        if self.ring:
            cache.index_copy_(axis, (torch.arange(T) + T * step) % self.slots, new)
        else:
            kept = [cache.narrow(axis, 0, self.sink), cache.narrow(axis, self.sink + T, 14 - 2 - T)]
            cache.copy_(torch.cat([*kept, new], axis))
        return cache.transpose(1, 2) if self.heads_first else cache

    def positions(self, step):
        if self.drift:
            return torch.arange(self.slots)
        step = step % TURNS
        if self.ring:
            newest = T * step + T - 1
            return newest - (newest - torch.arange(self.slots)) % self.slots
        return torch.cat([torch.arange(2), torch.arange(2, 14) + T * step])

    def forward(self, x, step):
        q, k, v = self.qkv(x).split([n * D for n in (self.heads, self.groups, self.groups)], -1)
        q, k, v = (t.unflatten(-1, (-1, D)) for t in (q, k, v))  # [B, T, heads, D]
        q, k = self.norm_q(q), self.norm_k(k)
        pos = self.positions(step)
        if self.ring:  # the new slots' own positions
            new = pos[(torch.arange(T) + T * step) % self.slots]
        else:
            new = pos[-T:]
        if self.turned:
            k = self.rope(k, new)
        k, v = self.write(self.k, k, step), self.write(self.v, v, step)  # [B, S, G, D]
        q, k = self.q_rope(q, new), k if self.turned else self.rope(k, pos)
        if self.own:
            k, v = round_trip(k, (1, 3)), round_trip(v, (1, 3))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.groups != self.heads)
        return self.out(y.transpose(1, 2).flatten(2))


# ---- what is fused -------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", ROPES)
def test_ropes(rope):
    """Positions start again after 23 steps; then keys are turned by folding, or made anew."""
    chain = Chain(lambda: Model(rope=ROPES[rope]))
    chain.check()
    runtime = chain.report["runtime"]
    assert rope == "no_rope" or runtime["folds"] >= 2 or runtime["refreshed_slots"] > 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm, dtype):
    Chain(lambda: Model(norm=NORMS[norm]), dtype, steps=26).check()


def test_a_norm_of_all_heads_stays_outside():
    Chain(lambda: Model(norm=OfAllHeads), steps=26).check()


def test_another_eps_for_keys():
    def make():
        model = Model()
        model.norm_k.eps = 1e-2
        return model

    Chain(make, steps=26).check()


def test_queries_without_a_norm():
    def make():
        model = Model(rope=interleaved_stack)
        model.norm_q = nn.Identity()
        return model

    Chain(make, steps=26).check()


def turned_back(x, pos):
    return half_chunk(x, -pos)


def stretched(x, pos):
    """A turn that scales too, by position."""
    return half_function(x, pos) * (1 + 0.1 * torch.log1p(pos.float()))[:, None, None].to(x.dtype)


def mixed_pairs(x, pos):
    """Heads change places."""
    return half_chunk(x, pos).flip(-2)


def shifted(x, pos):
    return half_chunk(x, pos) + 0.25


FORMS = {
    "ring": {"ring": True},
    "ring_interleaved": {"ring": True, "rope": interleaved_polar},
    "drift": {"drift": True},
    "gqa": {"groups": 2, "norm": Spelled},
    "queries_turn_back": {"q_rope": turned_back},
    "stretched": {"rope": stretched},
    "one_head": {"heads": 1, "groups": 1},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, dtype):
    chain = Chain(lambda: Model(**FORMS[form]), dtype, steps=STEPS if form == "drift" else 26)
    chain.check()
    if form == "drift" and dtype == torch.float32:
        assert chain.report["runtime"]["folds"] > STEPS // 2


@pytest.mark.parametrize("q_rope", [interleaved_stack, mixed_pairs, shifted])
def test_queries_turned_in_another_way(q_rope):
    """In float32 keys are folded: queries turn into their frame, and that is the rotation fused,
    behind the model's own. In bfloat16 nothing is folded, and there is none."""
    Chain(lambda: Model(q_rope=q_rope), steps=26).check()
    chain = Chain(lambda: Model(q_rope=q_rope), torch.bfloat16, steps=26)
    chain.check_refused(", keys by half")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fp8_of_the_model_s_own(dtype):
    Chain(lambda: Model(own=True, norm=LessOne), dtype, OWN).check()


@pytest.mark.parametrize("form", [{}, {"drift": True, "rope": interleaved_stack, "norm": LessOne}])
def test_replayed(form):
    options = dataclasses.replace(ON, step_graph="simulate")
    chain = Chain(lambda: Model(**form), options=options)
    chain.check()
    assert chain.report["runtime"]["replays"] > STEPS // 2


def test_rows_that_others_read():
    """Fresh keys, before and after RoPE, and queries are returned as well."""

    class Read(Model):
        def forward(self, x, step):
            y = super().forward(x, step)
            k = self.norm_k(self.qkv(x)[..., H * D : 2 * H * D].unflatten(-1, (-1, D)))
            turned = self.rope(k, self.positions(step)[-T:])
            return torch.cat([y.flatten(), k.flatten() / 99, turned.flatten() / 99])

    chain = Chain(Read, steps=26)
    chain.check()


class Layers(nn.Module):
    """Three layers, one behind another."""

    def __init__(self, **kw):
        super().__init__()
        self.layers = nn.ModuleList(Model(**kw) for _ in range(3))

    def forward(self, x, step):
        for layer in self.layers:
            x = x + layer(x, step) / 4
        return x


@pytest.mark.parametrize("graph", ["auto", "simulate"])
def test_layers_and_weights_that_change(graph):
    """Norm weights of all layers are written between two steps: what was made of them is made anew.
    Inputs of later layers have FP8's errors: only caches of the first one are as eager's."""
    torch._dynamo.reset()
    options = dataclasses.replace(ON, step_graph=graph)
    eager = Layers(norm=LessOne).eval().requires_grad_(False)
    twins = [copy.deepcopy(eager) for _ in range(2)]
    runs = [
        rtc.compile(twins[0], options=options),
        rtc.compile(twins[1], options=dataclasses.replace(options, passes=OFF)),
    ]
    with torch.no_grad():
        for step in range(30):
            if step == 13:
                for model in (eager, *twins):
                    for name, p in model.named_parameters():
                        if "norm" in name:
                            p.mul_(1.4).add_(0.2)
            x = frames(step, torch.float32)
            want, (have, off) = eager(x, step), (f(x, step) for f in runs)
            assert far(have, want) < WORST, step
            assert far(have, off) < 1e-3, step
    assert_pass_counts(runs[0].report(), {"fuse_pre_attention": 3})
    for run in runs:
        run.materialize()
    for a, b in zip(twins[0].buffers(), twins[1].buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for a, b in zip(twins[0].layers[0].buffers(), eager.layers[0].buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_reference_model():
    torch._dynamo.reset()
    eager = build("tiny")
    twin, other = copy.deepcopy(eager), copy.deepcopy(eager)
    compiled = rtc.compile(twin, options=ON)
    without = rtc.compile(other, options=dataclasses.replace(ON, passes=OFF))
    with torch.no_grad():
        for step in range(8):
            noise, cond = example_inputs(eager.cfg, step=step)[:2]
            want, have, off = (f(noise, cond, step) for f in (eager, compiled, without))
            assert far(have, want) < WORST
            assert far(have, off) < 1e-3
    assert_pass_counts(compiled.report(), {"fp8_attention": 4, "fuse_pre_attention": 4})
    (regions,) = (g["regions"] for g in compiled.report().to_dict()["graphs"])
    assert regions["in_place"] == regions["writes"]


# ---- values that grow ----------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["auto", "simulate"])
def test_values_beyond_the_scale_are_clamped_and_counted(graph):
    """Inputs a hundred times as large from step 10 on. Keys are normed; values are not."""

    def inputs(step):
        return frames(step, torch.float32) * (100 if step >= 10 else 1)

    options = dataclasses.replace(ON, step_graph=graph)
    chain = Chain(Model, options=options, steps=20, inputs=inputs)  # finite, or Chain stops
    assert_pass_counts(chain.report, {"fuse_pre_attention": 1})
    assert max(chain.errors[:10]) < WORST
    assert max(chain.apart) < 1e-3
    count = chain.report["runtime"]["saturated_values"]
    assert count == chain.off["runtime"]["saturated_values"] > 300
    chain.check_caches()


# ---- what is refused -----------------------------------------------------------------------------


def own_turn_a_head(x, pos):
    """Tables that differ from head to head."""
    ang = angles(pos)[:, None] * (1 + torch.arange(x.shape[-2]))[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()], -1)


NO_ROTATION = "no rotation of pairs"
REFUSED = {
    "partial": ({"rope": partial}, NO_ROTATION),
    "own_turn_a_head": ({"rope": own_turn_a_head}, NO_ROTATION),
    "turned_before_the_cache": ({"turned": True}, "queries turn by half pairs, keys by none"),
    "turned_heads_first": ({"turned": True, "heads_first": True}, "keys by none"),
    "heads_first": ({"heads_first": True}, NO_ROTATION),
    "heads_first_ring": ({"heads_first": True, "ring": True, "groups": 2}, NO_ROTATION),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    form, reason = REFUSED[name]
    Chain(lambda: Model(**form), steps=26).check_refused(reason)


def test_two_batches():
    class Two(Model):
        def forward(self, x, step):
            return super().forward(
                x.expand(2, -1, -1) * torch.tensor([1.0, -2.0])[:, None, None], step
            )

    def make():
        model = Two()
        model.k, model.v = (t.repeat(2, 1, 1, 1) for t in (model.k, model.v))
        return model

    Chain(make, steps=26).check_refused("maximum of its own")


# ---- what only looks like it ---------------------------------------------------------------------
# Each of these was fused into something else; refused or right are both good.


def assert_the_same(make, size=1.0, options=ON):
    chain = Chain(make, options=options, steps=8, inputs=lambda s: frames(s, torch.float32) * size)
    assert max(chain.apart) < 1e-3, chain.apart
    chain.check_caches()


class Hooked(Model):
    """``before`` the norm and ``after`` it something is done to queries, keys and values."""

    def __init__(self, before=None, after=None, **kw):
        super().__init__(**kw)
        same = lambda q, k, v: (q, k, v)  # noqa: E731
        self.before, self.after = before or same, after or same

    def forward(self, x, step):
        q, k, v = (t.unflatten(-1, (-1, D)) for t in self.qkv(x).chunk(3, -1))
        q, k, v = self.before(q, k, v)
        q, k, v = self.after(self.norm_q(q), self.norm_k(k), v)
        pos = self.positions(step)
        k, v = self.write(self.k, k, step), self.write(self.v, v, step)
        q, k, v = (t.transpose(1, 2) for t in (self.rope(q, pos[-T:]), self.rope(k, pos), v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


def clipped(q, k, v):
    return q.clamp(-8, 8), k.clamp(-8, 8), v.clamp(-8, 8)


def cut_off(q, k, v):
    return torch.where(q.abs() > 8, 0.0, q), k, v


def through_e5m2(q, k, v):
    return q.to(torch.float8_e5m2).to(q.dtype), k.to(torch.float8_e5m2).to(k.dtype), v


class LargerOfBoth(nn.Module):
    """The mean square or eps, whichever is larger."""

    def __init__(self, dim):
        super().__init__()
        self.w = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True).clamp(min=1e-6)) * self.w


class EpsOutside(LargerOfBoth):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-5) * self.w


LOOKALIKES = {
    "clipped_before_the_norm": ({"before": clipped}, 40.0),
    "clipped": ({"after": clipped, "norm": no_norm}, 40.0),
    "cut_off": ({"after": cut_off, "norm": no_norm}, 40.0),
    "rounded_before_the_norm": ({"before": through_e5m2}, 1.0),
    "rounded": ({"after": through_e5m2, "norm": no_norm}, 1.0),
    "larger_of_both": ({"norm": LargerOfBoth}, 1e-3),
    "eps_outside": ({"norm": EpsOutside}, 1e-5),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_only_looks_like_it(name):
    form, size = LOOKALIKES[name]
    assert_the_same(lambda: Hooked(**form), size)


@pytest.mark.parametrize("heads", [T, 2 * T])
def test_as_many_heads_as_new_slots(heads):
    form = {"heads": heads, "groups": T, "heads_first": True, "rope": no_rope, "norm": no_norm}
    assert_the_same(lambda: Model(**form))


@pytest.mark.parametrize("rope", [no_rope, half_chunk, interleaved_polar])
def test_as_many_heads_as_new_slots_behind_them(rope):
    assert_the_same(lambda: Model(heads=T, groups=T, rope=rope))
