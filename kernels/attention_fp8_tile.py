"""The inner loop of ``rtc::attention_fp8`` in Triton: one tile of queries over a run of keys.

    s = q k^T                              FP8 x FP8 into f32, raw (no scale)
    p = exp2(c (s - max s) + 8)            c = softmax_scale * q_scale * k_scale * log2(e), a head
    acc = fp8(p) v, l = sum(p)             FP8 x FP8 into f32

The offset 8 puts the largest p at 256 of e4m3's 448, so that p down to 2^-17 of it survives the
rounding; acc and l both carry the factor, which cancels. c must not be negative.

V. FP8 wgmma reads its second operand K-major, here: keys contiguous. With V stored transposed
(unit stride along S, V_T) it is used as it lies. With slots major, F16 widens V and P (PV at half
rate, V through registers); without it Triton transposes the bytes of each tile.

Order of the keys (PERMUTE). The f32 result of wgmma gives a thread the columns 2t, 2t+1, 8+2t,
8+2t+1 of 16, while its FP8 operand wants 4t .. 4t+3: plain Triton shuffles P between threads in
every tile. Row g*16 + a*8 + t*2 + b of the K tile is therefore key g*16 + t*4 + a*2 + b (a
5-dimensional tensor map reads it so, for nothing), and the permutation of P back to the order of V
only renames registers: 16 SHFL, 16 SEL and 16 PRMT of 521 instructions a 64 x 128 tile are saved.

Source: online softmax, arXiv:2205.14135; FP8 layouts, arXiv:2407.08608; exp2 by polynomial beside
the special function unit, as in FlashAttention-4. The code is our own.
"""

import triton
import triton.language as tl


@triton.jit
def _exp2_quarter_poly(x):
    """exp2 of four values at a time, one of them on the FMA pipe (relative error 6e-4)."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .f32 r, f, p;
        .reg .b32 i;
        ex2.approx.ftz.f32 $0, $4;
        ex2.approx.ftz.f32 $1, $5;
        ex2.approx.ftz.f32 $2, $6;
        max.ftz.f32 f, $7, 0fC2F00000;
        add.rn.ftz.f32 r, f, 0f4B400000;
        mov.b32 i, r;
        sub.rn.ftz.f32 r, r, 0f4B400000;
        sub.rn.ftz.f32 f, f, r;
        fma.rn.ftz.f32 p, f, 0f3D6353F8, 0f3E75FDF1;
        fma.rn.ftz.f32 p, p, f, 0f3F317218;
        fma.rn.ftz.f32 p, p, f, 0f3F800000;
        shl.b32 i, i, 23;
        mov.b32 $3, p;
        add.s32 $3, $3, i;
        }
        """,
        "=f,=f,=f,=r,f,f,f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _tile(
    acc, l, m, q, k, v, c, cols, S,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, V_T: tl.constexpr, F16: tl.constexpr,
    PERMUTE: tl.constexpr, POLY: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One tile of keys: k [N, D] in permuted order, v [E, N] where V_T, else [N, E]."""
    s = tl.dot(q, k.T)
    if MASK:
        s = tl.where(cols[None, :] < S, s, -1e30)
    m_new = tl.maximum(m, tl.max(tl.max(s.reshape(BLOCK_M, 4, BLOCK_N // 4), 1), 1))
    x = s * c - (m_new * c - 8.0)[:, None]
    if POLY:
        p = _exp2_quarter_poly(x)
    else:
        p = tl.math.exp2(x)
    if MASK:
        p = tl.where(cols[None, :] < S, p, 0.0)  # c == 0: exp2(0 * -1e30 + 8)
    alpha = tl.math.exp2((m - m_new) * c)
    l = l * alpha + tl.sum(tl.sum(p.reshape(BLOCK_M, 4, BLOCK_N // 4), 1), 1)
    if F16:
        p = p.to(tl.float16)
        v = v.to(tl.float16)
    else:
        p = p.to(tl.float8e4nv, fp_downcast_rounding="rtne")
    if PERMUTE:
        p = p.reshape(BLOCK_M, BLOCK_N // 16, 2, 4, 2).permute(0, 1, 3, 2, 4)
        p = p.reshape(BLOCK_M, BLOCK_N)
    acc = acc * alpha[:, None]
    if V_T:
        acc = tl.dot(p, v.T, acc)
    else:
        acc = tl.dot(p, v, acc)
    return acc, l, m_new


@triton.jit
def _key_order(BLOCK_N: tl.constexpr, PERMUTE: tl.constexpr):
    n = tl.arange(0, BLOCK_N)
    if PERMUTE:
        n = n // 16 * 16 + (n % 8) // 2 * 4 + (n % 16) // 8 * 2 + n % 2
    return n


@triton.jit
def attend(
    q, k, v, k_map, v_map, c, b, g, rows, lo, hi, do_tail,
    sqt, skb, skg, sks, svb, svg, svs, T, S,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr, V_T: tl.constexpr, F16: tl.constexpr, PERMUTE: tl.constexpr,
    POLY: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Tiles lo .. hi of the keys, and before them, where ``do_tail``, the ragged end.

    q: the head's first row. svs: the stride of s, or of e where V_T. Returns acc, l and m, raw.
    The end goes first, TAIL keys at a time and masked. It is a loop, and in front: as plain code,
    or behind, ptxas 12.8 finds other instructions defining the accumulators and serializes every
    wgmma of the kernel (C7515).
    """
    d = tl.arange(0, D)
    e = tl.arange(0, E)
    qt = tl.load(q + rows[:, None] * sqt + d[None, :], mask=rows[:, None] < T, other=0.0)
    k += b.to(tl.int64) * skb + g.to(tl.int64) * skg
    v += b.to(tl.int64) * svb + g.to(tl.int64) * svg
    kn = _key_order(BLOCK_N, PERMUTE)
    vn = tl.arange(0, BLOCK_N)
    k_at = kn[:, None] * sks + d[None, :]
    if V_T:
        v_at = e[:, None] * svs + vn[None, :]
        v_head = (b * svb + g * svg) // svs
    else:
        v_at = vn[:, None] * svs + e[None, :]
        v_head = b * svb + g * svg
    k_head = b * skb + g * skg
    m = tl.full([BLOCK_M], -1e30, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, E], tl.float32)
    for t0 in tl.range(tl.where(do_tail, S // BLOCK_N * BLOCK_N, S), S, TAIL, num_stages=1):
        kn_ = t0 + _key_order(TAIL, PERMUTE)
        vn_ = t0 + tl.arange(0, TAIL)
        k_in = kn_ < S
        v_in = vn_ < S
        kt_ = tl.load(k + kn_.to(tl.int64)[:, None] * sks + d[None, :], k_in[:, None], 0.0)
        if V_T:
            vt_ = tl.load(v + e[:, None] * svs + vn_[None, :], v_in[None, :], 0.0)
        else:
            vt_ = tl.load(v + vn_.to(tl.int64)[:, None] * svs + e[None, :], v_in[:, None], 0.0)
        acc, l, m = _tile(
            acc, l, m, qt, kt_, vt_, c, kn_, S,
            BLOCK_M, TAIL, V_T, F16, PERMUTE, False, True,
        )  # fmt: skip
    for s0 in range(lo * BLOCK_N, hi * BLOCK_N, BLOCK_N):
        if TMA:
            if PERMUTE:
                kt = k_map.load([s0 // 16, 0, 0, 0, k_head]).reshape(BLOCK_N, D)
            else:
                kt = k_map.load([s0, k_head])
            if V_T:
                vt = v_map.load([v_head, s0])
            else:
                vt = v_map.load([s0, v_head])
        else:
            kt = tl.load(k + tl.cast(s0, tl.int64) * sks + k_at)
            if V_T:
                vt = tl.load(v + s0 + v_at)
            else:
                vt = tl.load(v + tl.cast(s0, tl.int64) * svs + v_at)
        acc, l, m = _tile(
            acc, l, m, qt, kt, vt, c, kn, S,
            BLOCK_M, BLOCK_N, V_T, F16, PERMUTE, POLY, False,
        )  # fmt: skip
    return acc, l, m
