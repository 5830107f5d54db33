"""A rolling-cache model in the manner of published ones, as it is: eager, torch.compile, rtc.

    python bench/bench_rolling.py --device cuda
    python bench/bench_rolling.py --preset tiny

Self-Forcing and the models made from it keep a list of dicts: keys stored with their rotation, and
the ends of the window in int tensors that are read with ``.item()`` and filled; the window moves up
behind a sink once it is full; each block of frames is computed in a few denoising calls at one
place and a last one that leaves the cache clean. ``wan`` has the sizes of Wan 1.3B: 30 layers,
blocks of 3 frames of 1,560 tokens, a window of 12 frames.

torch.compile breaks the graph at every ``.item()`` (no fullgraph); rtc takes the call as one graph.
Every side is held against eager before it is timed; sides take turns, a block each. Random weights
and data. Prints a table and appends a JSON line to bench/results/rolling.jsonl.
"""

import argparse
import copy
import dataclasses
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rtc
from bench.bench_step import _commit, _machine


@dataclasses.dataclass
class Config:
    dim: int
    heads: int
    hidden: int
    layers: int
    grid: tuple[int, int]
    text: int
    frames: int = 3  # a block
    window: int = 12
    sink: int = 1

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]


PRESETS = {
    "tiny": Config(dim=96, heads=4, hidden=128, layers=2, grid=(2, 3), text=5),
    "wan": Config(dim=1536, heads=12, hidden=8960, layers=30, grid=(30, 52), text=512),
}


def table(width: int, length: int = 1024) -> Tensor:
    """Rotations of a third of the head's pairs each for frame, row and column: complex128."""
    parts = []
    third = width // 6 * 2
    for size in (width - 2 * third, third, third):
        rate = 1 / 10000 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.outer(torch.arange(length, dtype=torch.float64), rate)
        parts.append(torch.polar(torch.ones_like(angle), angle))
    return torch.cat(parts, 1)


def rotated(x: Tensor, sizes: Tensor, freqs: Tensor, start: int) -> Tensor:
    """x [B, F H W, heads, D] turned by its place in the video, in float64."""
    pairs = x.shape[-1] // 2
    time_, row, column = freqs.split([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3], 1)
    out = []
    for i, (f, h, w) in enumerate(sizes.tolist()):
        turn = torch.cat(
            [
                time_[start : start + f].view(f, 1, 1, -1).expand(f, h, w, -1),
                row[:h].view(1, h, 1, -1).expand(f, h, w, -1),
                column[:w].view(1, 1, w, -1).expand(f, h, w, -1),
            ],
            -1,
        ).reshape(f * h * w, 1, -1)
        y = torch.view_as_complex(x[i].double().reshape(f * h * w, x.shape[2], -1, 2))
        out.append(torch.view_as_real(y * turn).flatten(2))
    return torch.stack(out).type_as(x)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y.type_as(x) * self.weight


class Block(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg, dim = cfg, cfg.dim
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = Norm(dim), Norm(dim)
        self.cross_q, self.cross_k, self.cross_v, self.cross_o = (
            nn.Linear(dim, dim) for _ in range(4)
        )
        self.up, self.down = nn.Linear(dim, cfg.hidden), nn.Linear(cfg.hidden, dim)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.norm3 = nn.LayerNorm(dim, eps=1e-6)
        self.modulation = nn.Parameter(torch.randn(1, 1, 6, dim) / dim**0.5)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.cfg.heads, -1))

    def window(
        self, x: Tensor, sizes: Tensor, freqs: Tensor, kv: dict[str, Tensor], start: int
    ) -> Tensor:
        q, k = self.heads(self.norm_q(self.q(x))), self.heads(self.norm_k(self.k(x)))
        v = self.heads(self.v(x))
        tokens = (sizes[0][1] * sizes[0][2]).item()
        q = rotated(q, sizes, freqs, start // tokens)
        k = rotated(k, sizes, freqs, start // tokens)
        new, end, size = q.shape[1], start + q.shape[1], kv["k"].shape[1]
        sink = self.cfg.sink * tokens
        last = kv["last"].item() + end - kv["seen"].item()
        if end > kv["seen"].item() and last > size:
            gone = last - size
            kept = kv["last"].item() - gone - sink
            for c in (kv["k"], kv["v"]):
                c[:, sink : sink + kept] = c[:, sink + gone : sink + gone + kept].clone()
            last = last - gone
        kv["k"][:, last - new : last] = k
        kv["v"][:, last - new : last] = v
        first = max(0, last - self.cfg.window * tokens)
        out = attend(q, kv["k"][:, first:last], kv["v"][:, first:last])
        kv["seen"].fill_(end)
        kv["last"].fill_(last)
        return self.o(out)

    def cross(self, x: Tensor, text: Tensor, kept: dict[str, Any]) -> Tensor:
        if not kept["made"]:
            kept["k"], kept["v"] = self.heads(self.cross_k(text)), self.heads(self.cross_v(text))
            kept["made"] = True
        return self.cross_o(attend(self.heads(self.cross_q(x)), kept["k"], kept["v"]))

    def forward(
        self, x: Tensor, e: Tensor, sizes: Tensor, freqs: Tensor, text: Tensor,
        kv: dict[str, Tensor], kept: dict[str, Any], start: int,
    ) -> Tensor:  # fmt: skip
        frames = e.shape[1]
        a, b, c, d, f, g = (self.modulation + e).unbind(2)

        def by_frame(y: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
            y = y.unflatten(1, (frames, -1)) * scale[:, :, None]
            return (y if shift is None else y + shift[:, :, None]).flatten(1, 2)

        y = by_frame(self.norm1(x), 1 + b, a)
        x = x + by_frame(self.window(y, sizes, freqs, kv, start), c)
        x = x + self.cross(self.norm3(x), text, kept)
        y = self.down(F.gelu(self.up(by_frame(self.norm2(x), 1 + f, d)), approximate="tanh"))
        return x + by_frame(y, g)


class Rolling(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.patch = nn.Linear(64, cfg.dim)
        self.time = nn.Sequential(nn.Linear(256, cfg.dim), nn.SiLU(), nn.Linear(cfg.dim, cfg.dim))
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(cfg.dim, 6 * cfg.dim))
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.out = nn.Linear(cfg.dim, 64)
        self.register_buffer("freqs", table(cfg.dim // cfg.heads))

    def forward(
        self, x: Tensor, t: Tensor, text: Tensor, caches: list[dict[str, Tensor]],
        kept: list[dict[str, Any]], start: int,
    ) -> Tensor:  # fmt: skip
        """x [1, F, H W, 64], t [1, F], text [1, L, dim] -> [1, F, H W, 64]."""
        sizes = torch.stack([torch.tensor((u.shape[0], *self.cfg.grid)) for u in x])
        rate = torch.exp(-9.21 / 128 * torch.arange(128, device=t.device))
        angle = t.float()[..., None] * rate
        e = self.time(torch.cat([angle.cos(), angle.sin()], -1).to(x.dtype))
        e = self.modulate(e).unflatten(-1, (6, -1))
        y = self.patch(x).flatten(1, 2)
        for block, kv, cross in zip(self.blocks, caches, kept, strict=True):
            y = block(y, e, sizes, self.freqs, text, kv, cross, start)
        return self.out(y).view_as(x)


class Stream:
    """One side: a model's session, called as published pipelines call theirs."""

    def __init__(self, model: Any, cfg: Config, device: str, dtype: torch.dtype) -> None:
        self.model, self.cfg = model, cfg
        size = (1, cfg.window * cfg.tokens, cfg.heads, cfg.dim // cfg.heads)

        def end() -> Tensor:
            return torch.tensor([0], dtype=torch.long, device=device)

        self.caches = [
            {
                "k": torch.zeros(size, device=device, dtype=dtype),
                "v": torch.zeros(size, device=device, dtype=dtype),
                "seen": end(),
                "last": end(),
            }
            for _ in range(cfg.layers)
        ]
        self.kept: list[dict[str, Any]] = [
            {"made": False, "k": None, "v": None} for _ in range(cfg.layers)
        ]
        self.start = 0

    def block(self, noise: Tensor, text: Tensor, times: list[float]) -> Tensor:
        x = noise
        for t in times:
            at = torch.full((1, self.cfg.frames), t, device=noise.device)
            x = self.model(x, at, text, self.caches, self.kept, self.start)
        self.start += self.cfg.frames * self.cfg.tokens
        return x


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--preset", default="wan", choices=sorted(PRESETS))
    p.add_argument("--layers", type=int)
    p.add_argument("--device", default="cpu")
    p.add_argument("--blocks", type=int, default=24)
    p.add_argument("--warm", type=int, default=9, help="blocks before the clock runs")
    p.add_argument("--options", default="{}", metavar="JSON", help="of rtc.Options")
    p.add_argument("--most", type=float, default=0.05, help="error against eager, at most")
    p.add_argument("--no-stock", action="store_true")
    p.add_argument("--out", default="bench/results/rolling.jsonl")
    args = p.parse_args()

    cfg = PRESETS[args.preset]
    cfg = dataclasses.replace(cfg, layers=args.layers or cfg.layers)
    dtype = torch.bfloat16 if args.device != "cpu" else torch.float32
    torch.manual_seed(0)
    with torch.device(args.device):
        model = Rolling(cfg).to(dtype).eval().requires_grad_(False)
    model.freqs = table(cfg.dim // cfg.heads).to(args.device)  # .to(dtype) would make it real
    sides: dict[str, Any] = {"eager": model}
    if not args.no_stock:
        # code of its own: what Dynamo keeps with a function would be kept for both
        other = _again().Rolling(cfg).to(model.out.weight)
        other.load_state_dict(model.state_dict())
        other.freqs = model.freqs
        torch._dynamo.config.recompile_limit = 64  # 8 would leave it in eager mode
        sides["torch.compile"] = torch.compile(other.eval().requires_grad_(False))
    compiled = rtc.compile(copy.deepcopy(model), options=rtc.Options(**json.loads(args.options)))
    sides["rtc"] = compiled
    streams = {name: Stream(m, cfg, args.device, dtype) for name, m in sides.items()}
    text = torch.randn(1, cfg.text, cfg.dim, device=args.device, dtype=dtype)
    times = [1000.0, 750.0, 500.0, 250.0, 0.0]
    shape = (1, cfg.frames, cfg.tokens, 64)

    seconds: dict[str, list[float]] = {name: [] for name in streams}
    errors = dict.fromkeys(streams, 0.0)
    worst: dict[str, float] = dict.fromkeys(streams, 0.0)
    begun = time.perf_counter()
    with torch.no_grad():
        for i in range(args.blocks):
            noise = torch.randn(shape, device=args.device, dtype=dtype)
            outs = {}
            for name, stream in streams.items():
                _sync(args.device)
                t = time.perf_counter()
                outs[name] = stream.block(noise, text, times)
                _sync(args.device)
                took = time.perf_counter() - t
                (seconds[name].append(took) if i >= args.warm else None)
                worst[name] = max(worst[name], took)
            for name, out in outs.items():
                far = (out.float() - outs["eager"].float()).norm() / outs["eager"].float().norm()
                errors[name] = max(errors[name], float(far))
            if i < args.warm:
                done = ", ".join(f"{n} {errors[n]:.1e}" for n in outs)
                print(
                    f"[{time.perf_counter() - begun:6.1f} s] block {i}: errors {done}", flush=True
                )
    report = compiled.report().to_dict()
    passes = {p["name"]: p for p in report["graphs"][-1]["passes"]}
    result = {
        name: {
            "block_ms": statistics.median(s) * 1e3,
            "p95_ms": sorted(s)[int(0.95 * (len(s) - 1))] * 1e3,
            "error": errors[name],
            "slowest_block_s": worst[name],  # the first ones, which compile
        }
        for name, s in seconds.items()
    }
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "machine": _machine(args.device),
        "torch": torch.__version__,
        "preset": args.preset,
        "config": dataclasses.asdict(cfg),
        "options": json.loads(args.options),
        "calls_a_block": len(times),
        "blocks": args.blocks - args.warm,
        "sides": result,
        "graphs": len(report["graphs"]),
        "ring_caches": passes["ring_cache"]["applied"],
        "replays": report["runtime"]["replays"],
        "plain_calls": report["runtime"]["plain_calls"],
    }
    print(f"{'':14} {'block ms':>9} {'p95':>9} {'error':>9} {'slowest block s':>16}")
    for name, r in result.items():
        print(
            f"{name:14} {r['block_ms']:9.1f} {r['p95_ms']:9.1f} {r['error']:9.1e}"
            f" {r['slowest_block_s']:16.1f}"
        )
    print(f"ring caches: {line['ring_caches']}, replays: {line['replays']}")
    if result["rtc"]["error"] > args.most:
        sys.exit("rtc is too far from eager")
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as f:
        f.write(json.dumps(line) + "\n")


def _again() -> Any:
    """This module once more."""
    spec = importlib.util.spec_from_file_location("rolling_again", __file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _sync(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
