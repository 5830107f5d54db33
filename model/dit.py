"""The reference autoregressive video DiT, in plain eager PyTorch and naive on purpose.

Every attention call moves its window along by copying, then rotates all S cached raw keys and,
if asked to, quantizes the whole cache, although only T slots are new. A compiler is to remove
that; this file is the meaning that it has to keep.

Under tensor parallelism a rank holds its share of the heads and of the hidden width, and the
blocks' outputs are added over all ranks; see `parallel.py`.

Shapes: B batch, T tokens of a frame, L tokens of a prompt, N either of them, S slots of a cache,
        H heads (of this rank, but for E), D channels of a head, E = H * D model width,
        F hidden width of SwiGLU, C channels of a latent.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TIME_FEATURES, Config
from .linear import FP8, FP8_MAX, Float8Linear
from .parallel import WHOLE, Shard
from .rope import apply_rope, rope_tables, slot_positions

Tables = tuple[Tensor, Tensor]
Write = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def quantize_round_trip(x: Tensor) -> Tensor:
    """x [B, S, H, D] through FP8 and back, one scale a head, from the amax over slots and D."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    amax = wide.abs().amax(dim=(1, 3), keepdim=True)  # [B, 1, H, 1]
    scale = (amax / FP8_MAX).clamp(min=1e-12)  # a head of zeros must not divide by zero
    stored = (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return (stored.to(wide.dtype) * scale).to(x.dtype)


class Cache(nn.Module):
    """Raw (normed, unrotated) keys and values of one layer in one denoising pass.

    Buffers k and v, [B, S, H, D] each, in slot order: sink, then frames, oldest first. Slots
    nobody wrote yet are zeros, and they do take part in the softmax.
    """

    k: Tensor
    v: Tensor

    def __init__(self, cfg: Config, shard: Shard) -> None:
        super().__init__()
        self.sink = cfg.sink
        shape = (cfg.batch, cfg.slots, shard.heads(cfg), cfg.head_dim)
        self.register_buffer("k", torch.zeros(shape), persistent=False)
        self.register_buffer("v", torch.zeros(shape), persistent=False)

    def push(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Drop the oldest frame, append k and v [B, T, H, D]; return the caches [B, S, H, D]."""
        sink, kept = self.sink, self.sink + k.shape[1]
        self.k.copy_(torch.cat([self.k[:, :sink], self.k[:, kept:], k], dim=1))
        self.v.copy_(torch.cat([self.v[:, :sink], self.v[:, kept:], v], dim=1))
        return self.k, self.v

    def fill_sink(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [B, L, H, D] in the sink's first L slots, zeros in its rest; return them.

        The window is left alone.
        """
        rest = (0, 0, 0, 0, 0, self.sink - k.shape[1])
        self.k[:, : self.sink].copy_(F.pad(k, rest))
        self.v[:, : self.sink].copy_(F.pad(v, rest))
        return k, v


class Block(nn.Module):
    """Parallel attention and SwiGLU behind one norm: x + gate * linear2([attention, swiglu])."""

    def __init__(self, cfg: Config, shard: Shard) -> None:
        super().__init__()
        self.cfg, self.shard = cfg, shard
        self.heads, self.dim, self.hidden = shard.heads(cfg), shard.dim(cfg), shard.hidden(cfg)
        self.modulation = nn.Parameter(torch.empty(3, cfg.dim))
        self.linear1 = _linear(cfg, cfg.dim, 3 * self.dim + 2 * self.hidden)
        self.linear2 = _linear(cfg, self.dim + self.hidden, cfg.dim)
        self.norm_q = nn.RMSNorm(cfg.head_dim, eps=1e-6)
        self.norm_k = nn.RMSNorm(cfg.head_dim, eps=1e-6)

    def forward(
        self, x: Tensor, time: Tensor, write: Write, q_rope: Tables, k_rope: Tables
    ) -> Tensor:
        """x [B, N, E] to [B, N, E]; time [3, E].

        `write` stores the new raw keys and values [B, N, H, D] and returns those to attend to.
        """
        cfg = self.cfg
        shift, scale, gate = (self.modulation + time).unbind(0)
        h = F.layer_norm(x, (cfg.dim,)) * (1 + scale) + shift
        q, k, v, act, up = self.linear1(h).split([self.dim] * 3 + [self.hidden] * 2, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, cfg.head_dim)) for y in (q, k, v))

        keys, values = write(self.norm_k(k), v)
        q = apply_rope(self.norm_q(q), q_rope)
        keys = apply_rope(keys, k_rope)
        if cfg.quantize_kv:
            keys, values = quantize_round_trip(keys), quantize_round_trip(values)
        q, keys, values = (y.transpose(1, 2) for y in (q, keys, values))  # [B, H, N or S, D]
        attention = F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(2)

        part = self.linear2(torch.cat([attention, F.silu(act) * up], dim=-1))
        return x + gate * self.shard.sum(part)


class DiT(nn.Module):
    """One call is one steady step: all denoising passes of one latent frame.

    `caches[p][i]` belongs to denoising pass p and layer i. Inference only. The constructor leaves
    parameters unset; `rtc.model.build` sets them. Raises ValueError where `shard` does not divide
    the config.
    """

    def __init__(self, cfg: Config, shard: Shard = WHOLE) -> None:
        super().__init__()
        shard.check(cfg)
        self.cfg, self.shard = cfg, shard
        self.latent_in = nn.Linear(cfg.in_channels, cfg.dim, bias=False)
        self.cond_in = nn.Linear(cfg.cond_dim, cfg.dim, bias=False)
        self.cond_slots = nn.Parameter(torch.empty(cfg.cond_tokens, cfg.dim))
        self.prompt_in = nn.Linear(cfg.cond_dim, cfg.dim, bias=False)
        self.time_in = nn.Linear(TIME_FEATURES, cfg.dim, bias=False)
        self.time_out = nn.Linear(cfg.dim, 3 * cfg.dim, bias=False)
        self.blocks = nn.ModuleList(Block(cfg, shard) for _ in range(cfg.layers))
        self.head = nn.Linear(cfg.dim, cfg.out_channels, bias=False)
        self.caches = nn.ModuleList(
            nn.ModuleList(Cache(cfg, shard) for _ in range(cfg.layers)) for _ in range(cfg.passes)
        )
        self.requires_grad_(False)

    def forward(self, noise: Tensor, cond: Tensor, step: int) -> Tensor:
        """Denoise one frame and move every cache's window by one frame.

        noise [B, T, C_in], cond [B, cond_dim], step counted from 0; returns the latent
        [B, T, C_out]. Noise channels past C_out are given: every pass reads them unchanged.
        The last cond_tokens rows carry the conditioning; a decoder drops them.
        Raises ValueError where a shape does not fit the config.
        """
        cfg = self.cfg
        _expect("noise", noise, (cfg.batch, cfg.tokens, cfg.in_channels))
        _expect("cond", cond, (cfg.batch, cfg.cond_dim))
        k_rope = self.rope(slot_positions(cfg, step, noise.device))
        q_rope = k_rope[0][-cfg.tokens :], k_rope[1][-cfg.tokens :]
        cond_tokens = self.cond_in(cond)[:, None] + self.cond_slots
        context = F.pad(cond_tokens, (0, 0, cfg.grid, 0))  # [B, T, E], zeros on the grid

        x, given = noise[..., : cfg.out_channels], noise[..., cfg.out_channels :]
        for p in range(cfg.passes):
            h = self.latent_in(torch.cat([x, given], dim=-1)) + context
            time = self.time_embedding(p)
            for block, cache in zip(self.blocks, self.caches[p].children(), strict=True):
                h = block(h, time, cache.push, q_rope, k_rope)
            velocity = self.head(F.layer_norm(h, (cfg.dim,)))
            x = x - velocity / cfg.passes  # Euler, noise level 1 to 0 in equal parts
        return x

    def first_pass(self, prompt: Tensor) -> None:
        """Begin a session: write a prompt [B, L, cond_dim] into the sink of every cache.

        1 <= L <= sink, else ValueError. The prompt attends to itself alone, at the sink's
        positions. The sink's last sink - L slots become zero keys and values, which take part
        in later softmaxes like unwritten window slots. Windows are left as they are.
        """
        cfg, length = self.cfg, prompt.shape[1]
        if not 1 <= length <= cfg.sink:
            raise ValueError(f"a prompt has 1 to {cfg.sink} (sink) tokens, this one {length}")
        _expect("prompt", prompt, (cfg.batch, length, cfg.cond_dim))
        rope = self.rope(slot_positions(cfg, 0, prompt.device)[:length])
        for p in range(cfg.passes):
            h, time = self.prompt_in(prompt), self.time_embedding(p)
            for block, cache in zip(self.blocks, self.caches[p].children(), strict=True):
                h = block(h, time, cache.fill_sink, rope, rope)

    def reset_session(self) -> None:
        """Forget the conversation: every cache becomes zeros."""
        for cache in self.caches.buffers():
            cache.zero_()

    def rope(self, positions: Tensor) -> Tables:
        """cos and sin [N, D] for positions [N, 3]."""
        return rope_tables(
            positions, self.cfg.rope_axes, self.cfg.rope_theta, self.cond_slots.dtype
        )

    def time_embedding(self, p: int) -> Tensor:
        """Shift, scale and gate [3, E] that denoising pass p adds to every block's own."""
        sigma = 1 - p / self.cfg.passes
        half = TIME_FEATURES // 2
        index = torch.arange(half, device=self.cond_slots.device, dtype=torch.float64)
        angle = 1000 * sigma * torch.exp(-math.log(10000) * index / half)
        wave = torch.cat([angle.cos(), angle.sin()]).to(self.cond_slots.dtype)
        return self.time_out(F.silu(self.time_in(wave))).unflatten(-1, (3, self.cfg.dim))


def _linear(cfg: Config, in_features: int, out_features: int) -> nn.Module:
    if cfg.fp8_linears:
        return Float8Linear(in_features, out_features)
    return nn.Linear(in_features, out_features, bias=False)


def _expect(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
