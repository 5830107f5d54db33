"""Random models whose calls come in modes, each a graph of its own over the same caches: one writes,
one only reads, one starts anew, one changes a table. Run: ``python -m tests.fuzz.modes 0:50``."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import contextlib
import copy
import random
import sys

import torch
import torch.nn.functional as F
from torch import nn

import rtc
from tests.runtime.models import close, rope

RARE = (
    "over", "frozen", "peek", "reset", "halve", "table", "prompt", "mask", "one", "turn",
)  # fmt: skip
KINDS = ("slot", "time", "time", "latent", "bias", "table", "visible", "norm", "causal")
DIM, HEADS, NEW = 8, 2, 2
WIDTH = DIM // HEADS


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, r, parameters):
        super().__init__()
        self.kind, self.slots, self.sink = r.choice(KINDS), r.choice([6, 8]), r.choice([0, 0, 2])
        self.moves = r.choice(["cat", "clone", "roll"])
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.text_q, self.text_k, self.text_v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.norm = nn.Parameter(torch.rand(WIDTH) + 0.5)
        for name, n in (("keys", self.slots), ("values", self.slots), ("tk", 3), ("tv", 3)):
            cache = torch.zeros(1, HEADS, n, WIDTH)
            if parameters:
                setattr(self, name, nn.Parameter(cache, requires_grad=False))
            else:
                self.register_buffer(name, cache)
        self.register_buffer("bias", torch.linspace(-1, 0, self.slots))
        self.register_buffer("freq", torch.tensor([1.0, 0.18]))
        self.register_buffer("angles", torch.outer(torch.arange(64.0), self.freq))
        self.register_buffer("scale", torch.ones(1))
        self.double()

    def write(self, cache, new):
        k = self.sink
        if self.moves == "cat":
            cache.copy_(torch.cat([cache[:, :, :k], cache[:, :, k + NEW :], new], 2))
            return
        if self.moves == "clone":
            cache[:, :, k:-NEW] = cache[:, :, k + NEW :].clone()
        else:
            cache[:, :, k:] = torch.roll(cache[:, :, k:], -NEW, 2)
        cache[:, :, -NEW:] = new

    def change(self, k, v, text, mode, first):
        if mode == "one":
            mode = "step" if first else "peek"
        elif mode == "frozen":
            mode = "peek" if first else "step"
        if mode == "prompt":
            self.tk.copy_(heads(self.text_k(text)))
            self.tv.copy_(heads(self.text_v(text)))
        if mode in ("step", "prompt"):
            self.write(self.keys, k)
            self.write(self.values, v)
        elif mode in ("over", "reset"):
            for cache, new in ((self.keys, k), (self.values, v)):
                if mode == "reset":
                    cache.zero_()
                cache[:, :, -NEW:] = new
        elif mode == "halve":
            self.keys.mul_(0.5)
            self.values[:, :, :2] *= 0.5
        elif mode == "table":
            self.angles.mul_(1.1)
            self.scale.mul_(0.9)
        elif mode == "mask":
            self.bias.copy_(self.bias.roll(1))
            self.angles[3:9] += 0.01
        elif mode == "turn":
            for cache in (self.keys, self.values):
                cache.copy_(torch.cat([cache[:, :, NEW:], cache[:, :, :NEW]], 2))

    def read(self, q, step):
        """(query, keys, values, mask)"""
        k, v, slots, mask = self.keys, self.values, torch.arange(self.slots), None
        pos = slots
        if self.kind == "time":
            pos = torch.cat([slots[: self.sink], slots[self.sink :] + step * NEW])
        elif self.kind == "visible":
            v = v * (slots >= self.slots - (step + 1) * NEW)[:, None]
            pos = slots + step
        elif self.kind == "latent":
            k = heads(k.transpose(1, 2).flatten(2) @ self.text_q.weight.T)
            v = v * self.scale
        elif self.kind == "bias":
            mask = self.bias[None].expand(NEW, self.slots) * self.scale
        elif self.kind == "table":
            turn = self.angles[step % 8 : step % 8 + self.slots]
            turn = torch.polar(torch.ones_like(turn), turn)
            pairs = torch.view_as_complex(k.unflatten(-1, (-1, 2)).contiguous())
            k = torch.view_as_real(pairs * turn).flatten(-2)
        elif self.kind == "norm":
            k = F.rms_norm(k, (WIDTH,), self.norm, 1e-6)
        elif self.kind == "causal":
            mask = torch.ones(NEW, self.slots, dtype=torch.bool).tril(self.slots - NEW)
        if self.kind in ("slot", "time", "visible"):
            pos = pos.double()
            q, k = rope(q, pos[-NEW:], self.freq), rope(k, pos, self.freq)
        return q, k, v, mask

    def forward(self, x, text, step, mode, index):
        q, k, v = (heads(p(x)) for p in (self.q, self.k, self.v))
        self.change(k, v, text, mode, index == 0)
        q, k, v, mask = self.read(q, step)
        if index % 2:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            score = q @ k.mT / WIDTH**0.5
            if mask is not None and mask.dtype == torch.bool:
                score = score.masked_fill(~mask, -1e9)
            elif mask is not None:
                score = score + mask
            y = score.softmax(-1) @ v
        y = y + F.scaled_dot_product_attention(heads(self.text_q(x)), self.tk, self.tv)
        return x + self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        r = random.Random(seed)
        parameters = r.random() < 0.5
        self.layers = nn.ModuleList(Layer(r, parameters) for _ in range(r.choice([1, 2, 3])))

    def forward(self, x, text, step, mode):
        for i, layer in enumerate(self.layers):
            x = layer(x, text, step, mode, i)
        return x


def same(model, twin):
    for a, b in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert a[0] == b[0]
        close(a[1], b[1], 1e-9)


def meddle(model, twin, r, writes_tables):
    """What a program does between calls."""
    luck, layer = r.random(), r.randrange(len(model.layers))
    for m in (model, twin):
        at = m.layers[layer]
        if luck < 0.04:
            at.keys.zero_()
        elif luck < 0.08:
            at.values[:, :, 1:3] = 0.3
        elif luck < 0.12 and writes_tables:
            at.angles.add_(0.02)
    if luck > 0.9:
        same(model, twin)


def run(seed, calls=36, **options):
    """Raises AssertionError where compiled and eager differ, in an output or in a cache."""
    torch._dynamo.reset()
    r = random.Random(seed + 1000)
    inference = r.random() < 0.4  # of tensors that count no versions
    with torch.inference_mode() if inference else contextlib.nullcontext():
        model = Model(seed)
        twin = copy.deepcopy(model)
    options = {"lowering": "eager", "warn": False, **options}
    compiled = rtc.compile(twin, options=rtc.Options(**options))
    modes, step = r.sample(RARE, 3), 0
    with torch.inference_mode() if inference else torch.no_grad():
        for _ in range(calls):
            x, text = torch.randn(1, NEW, DIM).double(), torch.randn(1, 3, DIM).double()
            mode = r.choice(modes) if r.random() < 0.4 else "step"
            step = 0 if r.random() < 0.1 else step
            close(model(x, text, step, mode), compiled(x, text, step, mode), 1e-9)
            step += 1
            meddle(model, twin, r, not inference)
        same(model, twin)


if __name__ == "__main__":
    first, last = map(int, sys.argv[1].split(":"))
    for seed in range(first, last):
        for more in ({}, {"step_graph": "simulate"}, {"regions": "on"}, {"kernels": "on"}):
            run(seed, **more)
        print(seed, "ok", flush=True)
