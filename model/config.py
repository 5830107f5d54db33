"""Sizes of the reference video DiT, the arithmetic that follows from them, and the presets.

One *step* makes one chunk (one latent frame) in `passes` denoising passes. Each pass and layer
owns a cache of S = sink + window * T slots: first the sink, then `window` frames of T tokens,
oldest first. A frame's T tokens are the latent grid in row-major order, then the conditioning
tokens.
"""

from dataclasses import dataclass, replace

TIME_FEATURES = 256
"""Width of the sinusoidal timestep embedding."""


@dataclass(frozen=True)
class Config:
    """Dimensions of a `DiT`; dtype and device are chosen when it is built.

    Raises ValueError where the sizes do not fit together.
    """

    dim: int
    heads: int
    head_dim: int
    layers: int
    hidden: int  # width of the SwiGLU branch
    grid_h: int  # latent rows of a frame
    grid_w: int  # latent columns of a frame
    cond_tokens: int  # conditioning tokens of a frame, after its latent positions
    window: int  # frames kept behind the sink, the new one included
    sink: int  # slots before the window; only `first_pass` writes them
    passes: int  # denoising passes in a step
    rope_axes: tuple[int, int, int]  # head channels rotated by t, h, w
    in_channels: int  # of the noise; those past out_channels are given, not denoised
    out_channels: int  # of the latent
    cond_dim: int  # width of the conditioning vector and of a prompt token
    reset_period: int = 42  # steps after which the base of the positions jumps back to 0
    batch: int = 1
    rope_theta: float = 10000.0
    quantize_kv: bool = False  # per-head FP8 round trip of the whole cache in every call
    fp8_linears: bool = False  # linear1 and linear2 in FP8, a scale a token and a weight row

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            _require(getattr(self, name) >= 1, f"{name} must be at least 1", self, name)
        _require(self.sink >= 0, "sink must not be negative", self, "sink")
        _require(
            self.dim == self.heads * self.head_dim,
            "dim must be heads * head_dim",
            self,
            "dim",
            "heads",
            "head_dim",
        )
        _require(
            len(self.rope_axes) == 3 and all(n >= 0 and n % 2 == 0 for n in self.rope_axes),
            "rope_axes must be three even channel counts (t, h, w)",
            self,
            "rope_axes",
        )
        _require(
            sum(self.rope_axes) == self.head_dim,
            "rope_axes must add up to head_dim",
            self,
            "rope_axes",
            "head_dim",
        )
        _require(
            self.in_channels >= self.out_channels,
            "in_channels must be at least out_channels",
            self,
            "in_channels",
            "out_channels",
        )
        _require(
            not self.fp8_linears or (self.dim % 16 == 0 and self.hidden % 16 == 0),
            "fp8_linears needs dim and hidden to be multiples of 16",
            self,
            "dim",
            "hidden",
        )
        _require(self.rope_theta > 1.0, "rope_theta must be above 1", self, "rope_theta")

    @property
    def grid(self) -> int:
        """Latent positions of one frame."""
        return self.grid_h * self.grid_w

    @property
    def tokens(self) -> int:
        """T: tokens of one frame, and new slots of one call."""
        return self.grid + self.cond_tokens

    @property
    def slots(self) -> int:
        """S: slots of one cache."""
        return self.sink + self.window * self.tokens

    @property
    def calls(self) -> int:
        """Attention calls in a step; each has a K and a V cache of its own."""
        return self.passes * self.layers

    @property
    def linear_params(self) -> int:
        """Weights of linear1 and linear2 in all blocks."""
        linear1 = self.dim * (3 * self.dim + 2 * self.hidden)
        linear2 = (self.dim + self.hidden) * self.dim
        return self.layers * (linear1 + linear2)

    @property
    def linear_scales(self) -> int:
        """Scales of linear1 and linear2 in all blocks: one an output row where they are in FP8."""
        return self.layers * (4 * self.dim + 2 * self.hidden) if self.fp8_linears else 0

    @property
    def params(self) -> int:
        """All parameters, scales included."""
        per_layer = 3 * self.dim + 2 * self.head_dim  # modulation table, QK norm
        inputs = self.in_channels + 2 * self.cond_dim + self.cond_tokens
        time = TIME_FEATURES + 3 * self.dim
        outside = self.dim * (inputs + time + self.out_channels)
        return self.linear_params + self.linear_scales + self.layers * per_layer + outside

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of all parameters of a model built in a dtype of `itemsize` bytes.

        FP8 linears take one byte a weight and four a scale in any dtype.
        """
        if not self.fp8_linears:
            return self.params * itemsize
        linears = self.linear_params + self.linear_scales
        others = self.params - linears
        return self.linear_params + 4 * self.linear_scales + others * itemsize

    @property
    def flops_per_step(self) -> int:
        """Floating-point operations of the blocks' linears and attention in one step."""
        linears = 2 * self.linear_params * self.tokens
        attention = 4 * self.tokens * self.slots * self.dim * self.layers
        return self.batch * self.passes * (linears + attention)

    @property
    def cache_elements(self) -> int:
        """Elements of all K and V caches together."""
        return 2 * self.calls * self.batch * self.slots * self.dim

    def cache_bytes(self, itemsize: int) -> int:
        """Bytes of all caches for elements of `itemsize` bytes."""
        return self.cache_elements * itemsize


_POSITIVE = (
    "dim heads head_dim layers hidden grid_h grid_w cond_tokens window passes "
    "in_channels out_channels cond_dim reset_period batch"
).split()


def _require(ok: bool, rule: str, cfg: Config, *names: str) -> None:
    if not ok:
        got = ", ".join(f"{name}={getattr(cfg, name)!r}" for name in names)
        raise ValueError(f"Config: {rule}, got {got}")


PRESETS: dict[str, Config] = {
    # Every feature at the smallest size: two passes, given channels, a partly filled sink.
    "tiny": Config(
        dim=32,
        heads=2,
        head_dim=16,
        layers=2,
        hidden=64,
        grid_h=2,
        grid_w=3,
        cond_tokens=2,
        window=3,
        sink=5,
        passes=2,
        rope_axes=(8, 4, 4),
        in_channels=6,
        out_channels=4,
        cond_dim=12,
        reset_period=6,
    ),
    # Streams on two CPU cores: 57b's frame at half its size each way, so as many slots per new
    # token (7.6), and narrow, so that work on the whole cache takes about the published share of a
    # naive step (30 %; 50 % in cpu-fp8).
    "cpu": Config(
        dim=256,
        heads=4,
        head_dim=64,
        layers=6,
        hidden=256,
        grid_h=11,
        grid_w=17,
        cond_tokens=9,
        window=7,
        sink=127,
        passes=4,
        rope_axes=(24, 20, 20),
        in_channels=16,
        out_channels=16,
        cond_dim=64,
    ),
    # As many layers as 57b, for capturing a deep step as one graph.
    "deep": Config(
        dim=64,
        heads=2,
        head_dim=32,
        layers=60,
        hidden=128,
        grid_h=3,
        grid_w=4,
        cond_tokens=2,
        window=7,
        sink=9,
        passes=1,
        rope_axes=(12, 10, 10),
        in_channels=8,
        out_channels=8,
        cond_dim=16,
    ),
    # The published system's arithmetic: 56.6 B block weights, 375 TFLOP and 240 calls a step. In
    # bfloat16 with FP8 linears: 57.1 GB of weights and 42.7 GB of caches: one H200 holds it.
    "57b": Config(
        dim=7680,
        heads=60,
        head_dim=128,
        layers=60,
        hidden=4 * 7680,
        grid_h=22,
        grid_w=34,
        cond_tokens=9,
        window=7,
        sink=489,
        passes=4,
        rope_axes=(44, 42, 42),
        in_channels=128,
        out_channels=128,
        cond_dim=4096,
        quantize_kv=True,
        fp8_linears=True,
    ),
}
# cpu with the published system's third kind of whole-cache work.
PRESETS["cpu-fp8"] = replace(PRESETS["cpu"], quantize_kv=True)
# 57b's two uses of FP8 at the smallest size.
PRESETS["tiny-fp8"] = replace(PRESETS["tiny"], quantize_kv=True, fp8_linears=True)
