"""Models for fuse_pre_attention: norms, RoPE and caches in many people's words.

Legend: B batch, H heads, G key heads, S slots, T new slots, D head size, P pairs of it.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs
# Models as users write them carry no annotations, and a buffer is `Tensor | Module` to mypy.

import copy
import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

import rtc
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


def frames(step, dtype, batch=1):
    g = torch.Generator().manual_seed(700 + step)
    return torch.randn(batch, T, 24, generator=g).to(dtype)


def in_dtypes(forms, halves):
    """(name, dtype): all in float32, those named in ``halves`` in bfloat16 too."""
    return [(f, torch.float32) for f in forms] + [(f, torch.bfloat16) for f in halves.split()]


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
        self.twin, self.other = copy.deepcopy(self.eager), copy.deepcopy(self.eager)
        self.compiled = rtc.compile(self.twin, options=options)
        self.without = rtc.compile(self.other, options=dataclasses.replace(options, passes=OFF))
        self.errors, self.apart, self.others = [], [], []
        with torch.no_grad():
            for step in range(steps):
                batch = getattr(self.eager, "batch", 1)
                x = frames(step, dtype, batch) if inputs is None else inputs(step)
                sides = self.eager, self.compiled, self.without
                want, have, off = (f(x, step).float() for f in sides)
                assert have.isfinite().all()
                self.errors.append(far(have, want))
                self.apart.append(far(have, off))
                self.others.append(far(off, want))
        self.report = self.compiled.report().to_dict()
        self.off = self.without.report().to_dict()

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


def interleaved_double(x, pos):
    """Complex tables in double precision."""
    ang = angles(pos).double()
    cis = torch.polar(torch.ones_like(ang), ang)[:, None]
    pairs = torch.view_as_complex(x.to(torch.float64).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * cis).flatten(-2).type_as(x)


def one_by_one(x, pos):
    """The same for one sample after another."""
    return torch.stack([interleaved_double(y, pos) for y in x.unbind(0)])


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
        half_chunk, half_function, half_split, interleaved_polar, interleaved_double,
        interleaved_stack, interleaved_function, no_rope,
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
        ring=False, turned=False, drift=False, own=False, heads=H, batch=1,
    ):  # fmt: skip
        super().__init__()
        self.rope, self.q_rope = rope, q_rope or rope
        self.heads, self.groups, self.heads_first, self.batch = heads, groups, heads_first, batch
        self.ring, self.turned, self.drift, self.own = ring, turned, drift, own
        self.slots = 12 if ring else 14
        self.qkv = nn.Linear(24, (heads + 2 * groups) * D, bias=False)
        self.out = nn.Linear(heads * D, 24, bias=False)
        self.norm_q, self.norm_k = norm(D), norm(D)
        shape = (batch, self.slots, groups, D)
        shape = (batch, groups, self.slots, D) if heads_first else shape
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
        k, v = (k, v) if k is not None else v  # written as one
        q, k = self.q_rope(q, new), k if self.turned else self.rope(k, pos)
        if self.own:
            k, v = round_trip(k, (1, 3)), round_trip(v, (1, 3))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.groups != self.heads)
        return self.out(y.transpose(1, 2).flatten(2))


# ---- heads first all the way: x [B, heads, N, D] -------------------------------------------------


def half_behind(x, pos):
    ang = angles(pos)
    cos, sin = torch.cat([ang, ang], -1).cos().to(x.dtype), torch.cat([ang, ang], -1).sin()
    return x * cos + rotate_half(x) * sin.to(x.dtype)


def interleaved_behind(x, pos):
    ang = angles(pos)
    even, odd = x.unflatten(-1, (-1, 2)).float().unbind(-1)
    y = (even * ang.cos() - odd * ang.sin(), even * ang.sin() + odd * ang.cos())
    return torch.stack(y, -1).flatten(-2).to(x.dtype)


def polar_behind(x, pos):
    ang = angles(pos).double()
    cis = torch.polar(torch.ones_like(ang), ang)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * cis).flatten(-2).to(x.dtype)


class HeadsFirst(Model):
    """Norm, RoPE and caches after the transposition; three linears where ``apart``; one norm of all
    heads before it where ``wide``."""

    def __init__(self, rope=half_behind, apart=False, wide=False, **kw):
        super().__init__(rope=rope, heads_first=True, **kw)
        if apart:
            self.qkv = nn.ModuleList(nn.Linear(24, n * D) for n in (self.heads, *2 * [self.groups]))
        if wide:
            self.norm_q, self.norm_k = torch_norm(self.heads * D), torch_norm(self.groups * D)
        self.apart, self.wide = apart, wide

    def forward(self, x, step):
        if self.apart:
            q, k, v = (f(x) for f in self.qkv)
        else:
            q, k, v = self.qkv(x).split([n * D for n in (self.heads, *2 * [self.groups])], -1)
        if self.wide:
            q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = (t.view(self.batch, T, -1, D).transpose(1, 2) for t in (q, k, v))
        if not self.wide:
            q, k = self.norm_q(q), self.norm_k(k)
        pos = self.positions(step)
        at = (torch.arange(T) + T * step) % self.slots
        new = pos[at] if self.ring else pos[-T:]
        if self.turned:
            k = self.rope(k, new)
        for cache, rows in ((self.k, k), (self.v, v)):
            if self.ring:
                cache.index_copy_(2, at, rows)
            else:
                cache.copy_(torch.cat([cache[:, :, :2], cache[:, :, 2 + T :], rows], 2))
        k, v = self.k if self.turned else self.rope(self.k, pos), self.v
        if self.own:
            k, v = round_trip(k, (2, 3)), round_trip(v, (2, 3))
        y = F.scaled_dot_product_attention(
            self.rope(q, new), k, v, enable_gqa=self.groups != self.heads
        )
        return self.out(y.transpose(1, 2).flatten(2))
