"""The in-switch design of rtc::linear_all_reduce, without multicast: nothing here may switch it on.

The kernel is compiled for Hopper and read, never launched; `supported` is asked about made-up
handles. What runs is the protocol: in a model whose ranks take steps in any order, and in the
kernel's twin, which puts plain loads and stores in the places of the multicast ones, in Triton's
interpreter.
"""

import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from rtc.kernels import linear_all_reduce as op
from rtc.kernels import linear_all_reduce_nvls as nvls
from rtc.kernels import linear_fp8
from rtc.kernels.linear_all_reduce_nvls import COPY, GEMM, SUM, InSwitch, Pair
from rtc.kernels.linear_all_reduce_space import CONTROL, ERROR, Space

FP8, BF16, F16, F64 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float64
INTERPRET = nvls.triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
HOPPER = SimpleNamespace(major=9, minor=0, multi_processor_count=132)


# Consent and refusals.


@pytest.fixture
def _no_vetoes(monkeypatch):
    """The environment itself stays as it is: it protects the machine."""
    monkeypatch.setattr(nvls, "VETOES", {})


def handle(**others):
    fields = {"world_size": 4, "multicast_ptr": 1 << 40, "buffer_ptrs": [64] * 4, "device": "cuda"}
    return SimpleNamespace(**{**fields, **others})


YES = InSwitch(multicast=True)


@pytest.mark.skipif(nvls.triton is None, reason="needs triton")
@pytest.mark.usefixtures("_no_vetoes")
@pytest.mark.parametrize(
    ("memory", "config", "device", "why"),
    [
        (handle(), InSwitch(), HOPPER, "only with consent"),
        (handle(multicast_ptr=0), YES, HOPPER, "no multicast address"),
        (handle(multicast_ptr=(1 << 40) + 8), YES, HOPPER, "0x10000000008 is not a multiple of 16"),
        (handle(world_size=2), YES, HOPPER, "with 2 ranks"),
        (handle(), YES, SimpleNamespace(major=8, minor=6, multi_processor_count=132), "8.6 has no"),
        (handle(), InSwitch(multicast=True, programs=121), HOPPER, "133 CTAs do not run at once"),
        (None, YES, HOPPER, "not torch's symmetric memory"),
        (handle(), YES, HOPPER, None),
    ],
)
def test_supported(memory, config, device, why):
    said = nvls.supported(memory, config, device)
    assert said is None if why is None else why in said


@pytest.mark.parametrize(("name", "off"), nvls.VETOES.items())
def test_an_operator_overrules_consent(name, off, monkeypatch):
    monkeypatch.setattr(nvls, "VETOES", {name: off})
    monkeypatch.setenv(name, off)
    said = nvls.supported(handle(), YES, HOPPER)
    assert said == f"NVLink multicast is turned off on this machine: {name}={off}"


@pytest.mark.usefixtures("_no_vetoes")
@pytest.mark.parametrize(
    ("config", "memory", "why"),
    [
        (InSwitch(), handle(), "only with consent"),
        (YES, None, "not torch's symmetric memory"),
        (YES, handle(multicast_ptr=0), "no multicast address"),
        (YES, handle(buffer_ptrs=[0] * 4), "does not start where"),
    ],
)
def test_a_refused_launch_starts_nothing(config, memory, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: HOPPER)
    monkeypatch.setattr(nvls, "_in_switch_kernel", None, raising=False)
    buffer = SimpleNamespace(is_cuda=True, device="cuda", data_ptr=lambda: 64)
    space = SimpleNamespace(config=config, handle=memory, buffer=buffer, rank=0)
    with pytest.raises(RuntimeError, match=why):
        nvls.launch(space, None, None, None, None)


def test_nobody_chooses_it():
    assert not InSwitch().multicast
    assert not any(isinstance(config, InSwitch) for config in op.TABLE.values())
    assert not isinstance(op.default(757, 7680, 132), InSwitch)


def test_errors():
    with pytest.raises(ValueError, match="bk = 96 must be a power of two"):
        InSwitch(bk=96)
    with pytest.raises(ValueError, match="split = 32: pieces of less than 16 bytes a thread"):
        InSwitch(split=32)
    with pytest.raises(ValueError, match="at most 256 x 256, not 512 x 128"):
        InSwitch(bm=512)
    with pytest.raises(ValueError, match="there are none"):
        InSwitch(summers=0)
    with pytest.raises(ValueError, match="programs must be positive"):
        InSwitch(programs=0)


# Machine code.


def compiled(c, world, element="bf16", switch=True):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = nvls._in_switch_kernel
    pointers = {
        "y_ptr": "*" + element, "xs_ptr": "*fp32", "ws_ptr": "*fp32", "bases": "*i64",
        "control": "*i32",
    }  # fmt: skip
    signature = {
        "x_desc": f"tensordesc<fp8e4nv[{c.bm},{c.bk}]>",
        "w_desc": f"tensordesc<fp8e4nv[{c.bn},{c.bk}]>",
        "multicast": "i64",
        **pointers,
    }
    constants = {
        "X_ROWS": True, "W_ROWS": True, "WORLD": world, "ITEM": 2, "BM": c.bm, "BN": c.bn,
        "BK": c.bk, "GROUP": c.group, "PROGRAMS": c.programs, "SUMMERS": c.summers,
        "EARLY": c.early, "SPLIT": c.split, "SWITCH": switch, "PHASES": GEMM | SUM | COPY,
    }  # fmt: skip
    names = fn.arg_names
    full = {a: "constexpr" if a in constants else signature.get(a, "i32") for a in names}
    even = {*pointers, "N", "K", "flag_offset", "slots", "part"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(names) if a in even}
    source = ASTSource(fn, full, constants, attributes)
    options = {"num_warps": c.warps, "num_stages": c.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def tool(name):
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin" / name


compiles = pytest.mark.skipif(
    nvls.triton is None or INTERPRET, reason="needs triton, and not its interpreter"
)


@compiles
def test_machine_code():
    c, world = InSwitch(), 8
    kernel = compiled(c, world)
    assert kernel.metadata.shared <= 227 * 1024
    ptx = kernel.asm["ptx"]
    # 16 bytes a thread and instruction, each by one thread; early tiles, and all others.
    count = 2 * (c.bm * c.bn // c.split * 2 // 16) // (32 * c.warps)
    assert Counter(re.findall(r"multimem\.\S*", ptx)) == {
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2": count,
        "multimem.st.relaxed.sys.global.v4.bf16x2": count,
    }
    assert "wgmma.mma_async" in ptx


@compiles
@pytest.mark.skipif(
    nvls.triton is not None and not nvls.triton.__version__.startswith("3.6"),
    reason="reads the PTX as the target's Triton 3.6 spells it",
)
def test_order_of_fences_and_flags(tmp_path):
    c, world = InSwitch(), 8
    kernel = compiled(c, world)
    ptx = kernel.asm["ptx"]
    count = 2 * (c.bm * c.bn // c.split * 2 // 16) // (32 * c.warps)
    steps = re.findall(
        r"bar\.sync|fence\.(?:proxy\.alias|acq_rel\.sys)|multimem\.\w+|ld\.global\.sys\.acquire"
        r"|atom\.global\.\w+\.\w+\.\w+|st\.global", ptx
    )  # fmt: skip
    order = " ".join(steps)
    # All threads' stores of a part, a barrier, one release of its count at the owner.
    assert order.count("st.global bar.sync atom.global.sys.release.add") == 1
    assert order.count("sys.release") == 1
    # A sum: the aliases' fence, all loads, all stores, fences and a barrier, all ranks' flags.
    half = count // 2
    total = ["fence.proxy.alias"] + ["multimem.ld_reduce"] * half + ["multimem.st"] * half
    total += ["fence.proxy.alias", "bar.sync", "fence.acq_rel.sys"]
    total += ["atom.global.sys.relaxed.exch"] * world
    assert order.count(" ".join(total)) == 2
    assert order.count("sys.relaxed.exch") == 2 * world
    # Four waits, for early and late sums and copies: two polls, the error word, and the fence.
    assert order.count("ld.global.sys.acquire") == 8
    assert order.count("atom.global.gpu.relaxed.max fence.proxy.alias") == 4
    (tmp_path / "k.ptx").write_text(ptx)
    cubin = tmp_path / "k.cubin"
    said = subprocess.run(
        [tool("ptxas"), "-v", "-arch=sm_90a", tmp_path / "k.ptx", "-o", cubin],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    cubin.write_bytes(kernel.asm["cubin"])
    sass = subprocess.run(
        [tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True
    ).stdout
    assert "EF_CUDA_SM90" in sass
    assert len(re.findall(r"LDGMC\.E\.F32ADD\.BF16x8\S*\.STRONG\.SYS", sass)) == count


@compiles
def test_float16_and_the_twin():
    """Half's own instructions; and a twin in which nothing is multicast."""
    c = InSwitch(bm=32, bn=32, bk=32, warps=1)
    ptx = compiled(c, 3, "fp16").asm["ptx"]
    assert set(re.findall(r"multimem\.\S*", ptx)) == {
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2",
        "multimem.st.relaxed.sys.global.v4.f16x2",
    }
    assert "multimem" not in compiled(c, 3, switch=False).asm["ptx"]


# The protocol in a model: CTAs of all ranks take steps in any order.

WORLD, TILES, PROGRAMS, EARLY, CALLS = 4, 7, 2, 4, 3


class Rank:
    """A rank's buffer; tiles of four elements, which are read and written in halves."""

    def __init__(self):
        self.part = torch.full((TILES, 4), float("nan"), dtype=BF16)
        self.total = torch.full((TILES, 4), float("nan"), dtype=BF16)
        self.count, self.flag = [0] * TILES, [0] * TILES


HALVES = (slice(0, 2), slice(2, 4))


def compute(pid, me, epoch, ranks, part):
    for tile in range(pid, TILES, PROGRAMS):
        for half in HALVES:
            ranks[me].part[tile, half] = part[tile, half]
            yield
        ranks[tile % WORLD].count[tile] += 1
        yield


def add(tile, me, epoch, ranks, without):
    while ranks[me].count[tile] < WORLD * epoch and without != "count":
        yield
    for half in HALVES:
        parts = []
        for r in ranks:
            parts.append(r.part[tile, half].clone())
            yield
        total = op.reference(parts, BF16)
        for r in ranks:
            r.total[tile, half] = total
            yield
    for r in ranks:
        r.flag[tile] = epoch
        yield


def copy(tile, me, epoch, ranks, y, without):
    while ranks[me].flag[tile] < epoch and without != "flag":
        yield
    for half in HALVES:
        y[tile, half] = ranks[me].total[tile, half]
        yield


def cta(pid, me, epoch, ranks, part, y, without):
    """The kernel of CTA ``pid``; the last one is a summer."""
    if pid < PROGRAMS:
        yield from compute(pid, me, epoch, ranks, part)
    else:
        for tile in range(me, EARLY, WORLD):
            yield from add(tile, me, epoch, ranks, without)
        for tile in range(EARLY):
            yield from copy(tile, me, epoch, ranks, y, without)
    late = [t for t in range(me, TILES, WORLD) if t >= EARLY]
    for tile in late[pid :: PROGRAMS + 1]:
        yield from add(tile, me, epoch, ranks, without)
    for tile in range(EARLY + pid, TILES, PROGRAMS + 1):
        yield from copy(tile, me, epoch, ranks, y, without)


def wrong(seed, without=None):
    """Results of a random schedule that are not `reference`'s bits. ``without``: a part of it."""
    rng = random.Random(seed)
    parts = torch.randn(CALLS, WORLD, TILES, 4).to(BF16)
    ys = torch.full_like(parts, float("nan"))
    ranks = [Rank() for _ in range(WORLD)]
    speed = [rng.choice((1, 1, 30)) for _ in range(WORLD)]  # ranks may be far apart
    begun = [0] * WORLD
    running: dict[int, list] = {r: [] for r in range(WORLD)}
    for _ in range(200_000):
        for r in range(WORLD):
            # A call begins when all CTAs of the one before have ended.
            if begun[r] < CALLS and (not running[r] or (without == "end" and len(running[r]) < 3)):
                now = begun[r]
                begun[r] += 1
                running[r] += [
                    cta(p, r, now + 1, ranks, parts[now, r], ys[now, r], without)
                    for p in range(PROGRAMS + 1)
                ]
        alive = [r for r in range(WORLD) if running[r]]
        if not alive:
            break
        r = rng.choices(alive, [speed[r] for r in alive])[0]
        one = rng.choice(running[r])
        if next(one, one) is one:
            running[r].remove(one)
    else:
        raise AssertionError("hangs")
    want = torch.stack([op.reference(list(p), BF16) for p in parts])
    return int((ys != want[:, None]).sum())


def test_any_order_of_steps():
    assert [wrong(seed) for seed in range(25)] == [0] * 25


@pytest.mark.parametrize("without", ["count", "flag", "end"])
def test_the_model_notices_what_is_missing(without):
    assert sum(wrong(seed, without) > 0 for seed in range(10)) >= 3


# The twin in the interpreter: ranks of one process.

TINY = InSwitch(bm=32, bn=32, bk=32, warps=1, stages=2, programs=3, summers=2, early=1, split=4)
TWINS = [
    TINY,
    InSwitch(bm=32, bn=64, bk=32, warps=1, programs=2, summers=3, early=9, split=2),
    InSwitch(bm=32, bn=32, bk=64, warps=1, programs=4, summers=0, early=0, split=1),
    InSwitch(bm=32, bn=64, bk=32, warps=2, programs=9, summers=1, early=0),  # more CTAs than tiles
]


def make(m, n, k, seed):
    """x, w, x_scale, w_scale of one rank; scales ten times apart, so that another row's shows."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(shape, generator=g)

    x, w = (rand(m, k) * 2).to(FP8), (rand(n, k) * 2).to(FP8)
    return x, w, torch.exp(rand(m, 1) * 0.7) * 0.02, torch.exp(rand(n) * 0.7) * 0.02


def spaces_of(m, n, config, world, dtype=BF16, limit=3):
    """Spaces of ranks in one process; parts and sums are poisoned, like fresh memory may be."""
    layout = Pair(world, m, n, config.marks(m, n), dtype)
    peers = [torch.zeros(layout.bytes, dtype=torch.uint8) for _ in range(world)]
    for p in peers:
        p[layout.slots :] = 0xFF  # NaN in each of the dtypes
    spaces = [Space(layout, r, peers, config) for r in range(world)]
    for s in spaces:
        s.limit = limit
    return spaces


def launch(space, args, phases, y):
    return nvls.launch(space, *args, phases=phases, y=y, twin=True)


def take_turns(spaces, args):
    """One call on all ranks: everybody's products, then sums, then copies."""
    at = spaces[0].layout
    ys = [torch.full((at.m, at.n), float("nan"), dtype=at.dtype) for _ in spaces]
    for phase in (GEMM, SUM, COPY):
        for s, a, y in zip(spaces, args, ys, strict=True):
            launch(s, a, phase, y)
    return ys


def part_of(space):
    """A rank's own part as a matrix; in these shapes all tiles of a column block follow."""
    c, at = space.config, space.layout
    rows, columns = -(-at.m // c.bm), -(-at.n // c.bn)
    assert rows <= c.group
    flat = space.buffer[at.slots :].view(at.dtype)[: rows * columns * c.bm * c.bn]
    tiles = flat.view(columns, rows, c.bm, c.bn).permute(1, 2, 0, 3)
    return tiles.reshape(rows * c.bm, columns * c.bn)[: at.m, : at.n]


def close(y, args):
    """To float64: the interpreter truncates each part and the sum to bfloat16, a unit each."""
    parts = torch.stack([linear_fp8.reference(*a, dtype=F64) for a in args])
    bound = (parts.sum(0).abs() + parts.abs().sum(0)) * torch.finfo(y.dtype).eps * 1.02 + 1e-4
    assert ((y.double() - parts.sum(0)).abs() <= bound).all()


@pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter")
class TestTwin:
    @pytest.mark.parametrize(
        ("config", "dtype", "n"), [(TINY, BF16, 40), *((config, F16, 72) for config in TWINS)]
    )
    def test_four_ranks(self, config, dtype, n):
        m, world = 40, 4
        spaces = spaces_of(m, n, config, world, dtype)
        calls = 2 if dtype == BF16 else 1
        for call in range(calls):
            # K is each rank's own.
            args = [make(m, n, 48 - 16 * (r % 2), 10 * call + r) for r in range(world)]
            ys = take_turns(spaces, args)
            close(ys[0], args)
            assert all(torch.equal(ys[0], y) for y in ys)
            if dtype == F16:  # which the interpreter rounds like torch
                assert torch.equal(ys[0], op.reference([part_of(s) for s in spaces], dtype))
        assert all(s.control[: ERROR + 1].tolist() == [calls, 0, 0] for s in spaces)

    def test_a_slow_peer_and_single_buffers(self):
        """Two ranks compute the next call before the last one has copied this one's sums."""
        m, n, world = 40, 32, 3
        spaces = spaces_of(m, n, TINY, world)
        calls = [[make(m, n, 32, 10 * call + r) for r in range(world)] for call in range(2)]
        ys = [[torch.zeros((m, n), dtype=BF16) for _ in range(world)] for _ in range(2)]

        def phase(call, which, *ranks):
            for r in ranks:
                launch(spaces[r], calls[call][r], which, ys[call][r])

        phase(0, GEMM, 0, 1, 2)
        phase(0, SUM, 0, 1, 2)
        phase(0, COPY, 0, 1)
        phase(1, GEMM, 0, 1)
        phase(0, COPY, 2)
        phase(1, GEMM, 2)
        phase(1, SUM, 2, 1, 0)
        phase(1, COPY, 1, 0, 2)
        for three, args in zip(ys, calls, strict=True):
            close(three[0], args)
            assert all(torch.equal(three[0], y) for y in three)

    def test_epochs_wrap(self):
        spaces = spaces_of(16, 32, TINY, 3)
        tiles = TINY.tiles(16, 32)
        for s in spaces:
            s.control[0] = 2**31 - 2
            words = s.buffer[s.layout.flags : s.layout.acks].view(torch.int32)
            words[:tiles] = (3 * (2**31 - 2) + 2**31) % 2**32 - 2**31
            words[tiles:] = 2**31 - 2
        for call in range(3):
            args = [make(16, 32, 32, 10 * call + r) for r in range(3)]
            close(take_turns(spaces, args)[0], args)
        assert spaces[0].control[0] == -(2**31) + 1

    def test_an_absent_peer(self):
        """Its part is the call before's: NaN, not that; and silence from then on, on all ranks."""
        m, n, world = 40, 32, 3
        spaces = spaces_of(m, n, TINY, world)
        args = [make(m, n, 32, r) for r in range(world)]
        take_turns(spaces, args)
        ys = [torch.zeros((m, n), dtype=BF16) for _ in range(world)]
        for phase in (GEMM, SUM, COPY):
            for r in (0, 1):
                launch(spaces[r], args[r], phase, ys[r])
        assert ys[0].isnan().all()
        assert ys[1].isnan().all()
        with pytest.raises(RuntimeError, match="rank 0 or a peer of it waited in vain"):
            spaces[0].check()
        spaces[2].check()
        # The late one finds what the others computed, but not their sums.
        launch(spaces[2], args[2], GEMM | SUM | COPY, ys[2])
        assert ys[2].isnan().any()
        before = [s.buffer[CONTROL * 4 :].clone() for s in spaces]
        assert all(y.isnan().all() for y in take_turns(spaces, args))
        assert all(
            torch.equal(b, s.buffer[CONTROL * 4 :]) for b, s in zip(before, spaces, strict=True)
        )


@pytest.mark.skipif(nvls.triton is None or INTERPRET, reason="starts the interpreter")
def test_in_the_interpreter():
    cmd = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*cmd, "-k", "TestTwin"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout, done.stdout[-3000:]
