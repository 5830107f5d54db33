"""The Triton kernels of ``rtc::attention_fp8`` (the inner loop is in attention_fp8_tile.py).

Two schedules. One program a tile of queries: 30 heads x 12 tiles of 64 rows are 360 tiles for
2 x 132 resident programs, so the last 96 run at a third of the machine. Split: 264 programs take
equal runs of (tile, keys) and write what they could not finish in float32 (32 KB a piece, at most
two a program: 17 MB, which stay in L2); ``_merge`` combines the pieces.

Shapes: q [B, H, T, D], k [B, G, S, D], v [B, G, S, E], out [B, T, H, E]; D, E in {64, 128}.
Bytes: k and v once from memory, once a query tile from L2; q and out once.
Alignment: tensor maps need k and v to start and step by 16 bytes; pointers take anything.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rtc.kernels.attention_fp8_tile import attend

__all__ = ["Config", "config_for", "interpreted", "launch", "refuse", "v_is_transposed"]

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Config:
    """How one launch runs. ``permute`` and ``poly`` change the instructions, not the formula.

    block_m, block_n: queries and keys of a tile. maxnreg: cap on registers a thread, for residency.
    tma: k and v through tensor maps where their strides allow it (else, always, by pointers).
    permute: see attention_fp8_tile.py (FP8 PV only). poly: a quarter of exp2 by a polynomial.
    pv: "fp8", or "f16" where v is not K-major.
    split: 0: one program a tile of queries. n: n programs an SM share all tiles evenly, cutting
    them along the keys where a share ends; a second kernel merges what was cut.
    """

    block_m: int = 64
    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    tma: bool = True
    permute: bool = True
    poly: bool = False
    pv: str = "fp8"
    split: int = 0

    def __post_init__(self) -> None:
        if self.block_m not in (16, 32, 64, 128) or self.block_n not in (32, 64, 128, 256):
            raise ValueError(f"tiles of {self.block_m} x {self.block_n} are not supported")
        if self.pv not in ("fp8", "f16"):
            raise ValueError(f"pv is 'fp8' or 'f16', got {self.pv!r}")

    @property
    def label(self) -> str:
        flags = "".join(
            f" {name}"
            for name, on in (("tma", self.tma), ("perm", self.permute), ("poly", self.poly))
            if on
        )
        cap = f" r{self.maxnreg}" if self.maxnreg else ""
        cap += f" split{self.split}" if self.split else ""
        return (
            f"{self.block_m}x{self.block_n} w{self.num_warps} s{self.num_stages}{cap}"
            f"{flags} pv-{self.pv}"
        )


# Key: (arch, H, T, S, D, V is stored transposed). Filled from bench/bench_attention.py.
_TUNED: dict[tuple[str, int, int, int, int, bool], Config] = {}
# 64 x 128: V^T in FP8 at three stages is 106 KB, two CTAs an SM; f16 V adds 16 KB: two stages.
_DEFAULT = {True: Config(), False: Config(pv="f16", num_stages=2)}
# GPUs with less shared memory than Hopper (Ada: 99 KB), and no tensor maps.
_SMALL = Config(block_n=64, num_stages=2, tma=False)


def config_for(arch: str, h: int, t: int, s: int, d: int, v_transposed: bool) -> Config:
    """The measured configuration of this shape, else a default that fits every shape."""
    default = _SMALL if arch in ("sm_89", "sm_120", "sm_121") else _DEFAULT[v_transposed]
    return _TUNED.get((arch, h, t, s, d, v_transposed), default)


@triton.jit
def _attention(
    q, k, v, k_map, v_map, q_scale, k_scale, v_scale, out,
    sqb, sqh, sqt, skb, skg, sks, svb, svg, svs,
    qsb, qsh, ksb, ksg, vsb, vsg, H, REPEAT, T, S, scale_log2,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr, V_T: tl.constexpr, F16: tl.constexpr, PERMUTE: tl.constexpr,
    POLY: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head."""
    h = tl.program_id(1)
    b = tl.program_id(2)
    g = h // REPEAT
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.load(q_scale + b * qsb + h * qsh) * tl.load(k_scale + b * ksb + g * ksg) * scale_log2
    q += b.to(tl.int64) * sqb + h.to(tl.int64) * sqh
    acc, l, _ = attend(
        q, k, v, k_map, v_map, c, b, g, rows, 0, S // BLOCK_N, True,
        sqt, skb, skg, sks, svb, svg, svs, T, S,
        D, E, BLOCK_M, BLOCK_N, TAIL, V_T, F16, PERMUTE, POLY, TMA,
    )  # fmt: skip
    o = acc * (tl.load(v_scale + b * vsb + g * vsg) / l)[:, None]
    out += (b.to(tl.int64) * T * H + h) * E
    out_at = rows.to(tl.int64)[:, None] * (H * E) + tl.arange(0, E)[None, :]
    tl.store(out + out_at, o.to(out.dtype.element_ty), mask=rows[:, None] < T)


@triton.jit
def _attention_split(
    q, k, v, k_map, v_map, q_scale, k_scale, v_scale, out, pieces, piece_ml,
    sqb, sqh, sqt, skb, skg, sks, svb, svg, svs,
    qsb, qsh, ksb, ksg, vsb, vsg, H, REPEAT, T, S, scale_log2, UNITS, SHARE,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr, V_T: tl.constexpr, F16: tl.constexpr, PERMUTE: tl.constexpr,
    POLY: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Units SHARE * i .. of all tiles, S // BLOCK_N units a tile: whole tiles go to ``out``.

    A program leaves at most two pieces: the end of its first tile, and the start of its last.
    """
    program = tl.program_id(0)
    blocks = S // BLOCK_N
    begin = program * SHARE
    end = tl.minimum(begin + SHARE, UNITS)
    e = tl.arange(0, E)
    for tile in tl.range(begin // blocks, tl.cdiv(end, blocks), num_stages=1):
        lo = tl.maximum(begin - tile * blocks, 0)
        hi = tl.minimum(end - tile * blocks, blocks)
        h = tile // tl.cdiv(T, BLOCK_M) % H
        b = tile // tl.cdiv(T, BLOCK_M) // H
        g = h // REPEAT
        rows = tile % tl.cdiv(T, BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
        c = tl.load(q_scale + b * qsb + h * qsh) * tl.load(k_scale + b * ksb + g * ksg) * scale_log2
        acc, l, m = attend(
            q + b.to(tl.int64) * sqb + h.to(tl.int64) * sqh, k, v, k_map, v_map,
            c, b, g, rows, lo, hi, hi == blocks,
            sqt, skb, skg, sks, svb, svg, svs, T, S,
            D, E, BLOCK_M, BLOCK_N, TAIL, V_T, F16, PERMUTE, POLY, TMA,
        )  # fmt: skip
        if lo == 0 and hi == blocks:
            o = acc * (tl.load(v_scale + b * vsb + g * vsg) / l)[:, None]
            out_at = rows.to(tl.int64)[:, None] * (H * E) + e[None, :]
            out_at += (b.to(tl.int64) * T * H + h) * E
            tl.store(out + out_at, o.to(out.dtype.element_ty), mask=rows[:, None] < T)
        else:
            piece = program * 2 + (lo == 0).to(tl.int32)
            r = tl.arange(0, BLOCK_M)
            at = piece.to(tl.int64) * (BLOCK_M * E) + r[:, None] * E + e[None, :]
            tl.store(pieces + at, acc)
            tl.store(piece_ml + piece * (2 * BLOCK_M) + r, m * c)
            tl.store(piece_ml + piece * (2 * BLOCK_M) + BLOCK_M + r, l)


@triton.jit
def _merge(
    out, pieces, piece_ml, v_scale, vsb, vsg, H, REPEAT, T, BLOCKS, SHARE,
    E: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a tile that several programs worked on."""
    tile = tl.program_id(0)
    first = tile * BLOCKS // SHARE
    last = (tile * BLOCKS + BLOCKS - 1) // SHARE
    if first != last:
        h = tile // tl.cdiv(T, BLOCK_M) % H
        b = tile // tl.cdiv(T, BLOCK_M) // H
        r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        e = tl.arange(0, E)
        m = tl.full([ROWS], -float("inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, E], tl.float32)
        for program in range(first, last + 1):
            piece = program * 2 + tl.where(program == first, 1, 0)
            at = tl.cast(piece, tl.int64) * (BLOCK_M * E) + r[:, None] * E + e[None, :]
            m_piece = tl.load(piece_ml + piece * (2 * BLOCK_M) + r)
            l_piece = tl.load(piece_ml + piece * (2 * BLOCK_M) + BLOCK_M + r)
            m_new = tl.maximum(m, m_piece)
            old = tl.math.exp2(m - m_new)
            new = tl.math.exp2(m_piece - m_new)
            acc = acc * old[:, None] + tl.load(pieces + at) * new[:, None]
            l = l * old + l_piece * new
            m = m_new
        rows = tile % tl.cdiv(T, BLOCK_M) * BLOCK_M + r
        o = acc * (tl.load(v_scale + b * vsb + h // REPEAT * vsg) / l)[:, None]
        out_at = rows.to(tl.int64)[:, None] * (H * E) + e[None, :]
        out_at += (b.to(tl.int64) * T * H + h) * E
        tl.store(out + out_at, o.to(out.dtype.element_ty), mask=rows[:, None] < T)


def refuse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why the kernel does not take these tensors, or None."""
    if q.shape[-1] not in (64, 128) or v.shape[-1] not in (64, 128):
        return f"head sizes are 64 or 128, got {q.shape[-1]} and {v.shape[-1]}"
    if q.stride(-1) != 1 or k.stride(-1) != 1:
        return "q and k need a last axis of stride 1"
    if v.stride(-1) != 1 and v.stride(-2) != 1:
        return "v needs stride 1 along its last axis or along the slots"
    return None


def interpreted() -> str | None:
    """Why the kernel does not run on the CPU, or None: under Triton's interpreter it does."""
    if isinstance(_attention, triton.runtime.JITFunction):
        return "needs a GPU, or Triton's interpreter"
    return None


def v_is_transposed(v: torch.Tensor) -> bool:
    return v.stride(-1) != 1


def _steps(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Strides, 0 where the axis has one entry: the stride of such an axis may be anything."""
    b, g, s, d = (0 if n == 1 else st for n, st in zip(x.shape, x.stride(), strict=True))
    return b, g, s, d


def _maps(k: torch.Tensor, v: torch.Tensor, cfg: Config) -> tuple[Any, Any] | None:
    """Tensor maps of k and v, or None where strides or alignment do not allow them.

    Rows are slots; all batches and heads lie along the last axis, one behind the other or inside
    each other's rows: only the boxes that are asked for are read.
    """
    n, (_, g, s, d), e = cfg.block_n, k.shape, v.shape[-1]
    (kb, kg, ks, _), (vb, vg, vs, ve) = _steps(k), _steps(v)
    aligned = k.data_ptr() % 16 == 0 and v.data_ptr() % 16 == 0
    if s < n or not aligned or ks % 16 or ks == 0:
        return None
    k_end = (k.shape[0] - 1) * kb + (g - 1) * kg + d
    if cfg.permute:
        shape, strides = [s // 16, 2, 4, 2, k_end], [16 * ks, 2 * ks, 4 * ks, ks, 1]
        k_map = TensorDescriptor(k, shape, strides, [n // 16, 2, 4, 2, d])
    else:
        k_map = TensorDescriptor(k, [s, k_end], [ks, 1], [n, d])
    last = (v.shape[0] - 1) * vb + (g - 1) * vg
    if v_is_transposed(v):
        if ve % 16 or vb % ve or vg % ve:
            return None
        v_map = TensorDescriptor(v, [last // ve + e, s], [ve, 1], [e, n])
    else:
        if vs % 16:
            return None
        v_map = TensorDescriptor(v, [s, last + e], [vs, 1], [n, e])
    if max(k_end, last + e) >= 2**31:
        return None
    return k_map, v_map


def launch(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    softmax_scale: float,
    cfg: Config,
) -> None:
    """Write ``out`` [B, T, H, E] (contiguous). q, k, v as in the op; v slot-major or transposed."""
    (batch, h, t, d), (_, g, s, _), e = q.shape, k.shape, v.shape[-1]
    v_t = v_is_transposed(v)
    f16 = cfg.pv == "f16"
    cfg = replace(cfg, permute=cfg.permute and not f16)
    maps = _maps(k, v, cfg) if cfg.tma else None
    (kb, kg, ks, _), (vb, vg, vs, ve) = _steps(k), _steps(v)
    qb, qh, qt, _ = _steps(q)
    k_map, v_map = maps if maps is not None else (None, None)
    options = {} if cfg.maxnreg is None else {"maxnreg": cfg.maxnreg}
    inputs = (q, k, v, k_map, v_map, q_scale, k_scale, v_scale, out)
    numbers: tuple[Any, ...] = (qb, qh, qt, kb, kg, ks, vb, vg, ve if v_t else vs)
    numbers += (*q_scale.stride(), *k_scale.stride(), *v_scale.stride())
    numbers += (h, h // g, t, s, softmax_scale * LOG2E)
    constants = {
        "D": d, "E": e, "BLOCK_M": cfg.block_m, "BLOCK_N": cfg.block_n, "TAIL": 32, "V_T": v_t,
        "F16": f16, "PERMUTE": cfg.permute, "POLY": cfg.poly, "TMA": maps is not None,
        "num_warps": cfg.num_warps, "num_stages": cfg.num_stages, **options,
    }  # fmt: skip
    tiles, blocks = triton.cdiv(t, cfg.block_m), s // cfg.block_n
    units = tiles * h * batch * blocks
    share = triton.cdiv(units, _sms(q.device) * cfg.split) if cfg.split else 0
    if share == 0:  # also: fewer keys than a tile
        _attention[(tiles, h, batch)](*inputs, *numbers, **constants)
        return
    programs = triton.cdiv(units, share)
    pieces = q.new_empty((2 * programs, cfg.block_m, e), dtype=torch.float32)
    piece_ml = q.new_empty((2 * programs, 2, cfg.block_m), dtype=torch.float32)
    _attention_split[(programs,)](*inputs, pieces, piece_ml, *numbers, units, share, **constants)
    rows = min(16, cfg.block_m)
    _merge[(tiles * h * batch, cfg.block_m // rows)](
        out, pieces, piece_ml, v_scale, *v_scale.stride(), h, h // g, t, blocks, share,
        E=e, BLOCK_M=cfg.block_m, ROWS=rows,
    )  # fmt: skip


@functools.cache
def _sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count
