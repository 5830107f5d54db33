"""rtc::linear_all_reduce: on the CPU over Gloo, its kernels in Triton's interpreter, on GPUs.

The Gloo tests run this file as a script, one process a rank (`worker`). In the interpreter the
ranks are buffers of one process and take turns, phase by phase. What needs several GPUs is in
bench/all_reduce/check.py, which the benchmark shares; the test here starts that under torchrun.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from rtc.kernels import linear_all_reduce as op
from rtc.kernels import linear_all_reduce_copies as copies
from rtc.kernels import linear_all_reduce_movers as movers
from rtc.kernels import linear_fp8
from rtc.kernels import linear_fp8_triton as kernel
from rtc.kernels.linear_all_reduce_copies import Copies
from rtc.kernels.linear_all_reduce_movers import GEMM, PUSH, REDUCE, Movers
from rtc.kernels.linear_all_reduce_space import CONTROL, ERROR, Layout, Space

ROOT = Path(__file__).resolve().parents[2]
FP8, BF16, F64 = torch.float8_e4m3fn, torch.bfloat16, torch.float64
INTERPRET = kernel.triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


def make(m, n, k, seed, rows=True):
    """x, w, x_scale, w_scale of one rank; scales ten times apart, so that another row's shows."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(shape, generator=g)

    x, w = (rand(m, k) * 2).to(FP8), (rand(n, k) * 2).to(FP8)
    if not rows:
        return x, w, torch.tensor(0.03), torch.tensor([0.02])
    return x, w, torch.exp(rand(m, 1) * 0.7) * 0.02, torch.exp(rand(n) * 0.7) * 0.02


def close(y, args, dtype=BF16):
    """Against parts summed in float64: a rounding of each part, one of the sum (both truncations
    in the interpreter: a whole unit), and float32's error of the products before them."""
    parts = torch.stack([linear_fp8.reference(*a, dtype=F64) for a in args])
    sizes = torch.stack(
        [linear_fp8.reference(a[0].double().abs(), a[1].double().abs(), a[2], a[3], dtype=F64)
         for a in args]
    )  # fmt: skip
    unit = torch.finfo(dtype).eps * (1.0 if INTERPRET else 0.5)
    want = parts.sum(0)
    bound = (want.abs() + parts.abs().sum(0)) * unit * 1.02 + sizes.sum(0) * 2.0**-21
    assert y.dtype == dtype
    assert y.is_contiguous()
    over = ((y.double() - want).abs() / bound).amax().item()
    assert over <= 1, f"{over:.2f} times the bound"


# In the interpreter: ranks of one process.

TINY = Movers(
    32, 32, 32, stages=2, programs=3, movers=2, batch=2, direct=1, early=1, lag=1, split=2
)
MOVERS = [
    TINY,
    Movers(16, 64, 32, stages=2, group=2, programs=2, movers=3, batch=1, direct=0, early=9, lag=0),
    Movers(32, 32, 32, stages=2, programs=4, movers=0, copies=1, split=1),
    Movers(32, 32, 64, stages=2, programs=3, movers=1, batch=3, direct=1, lag=2, split=4),
    Movers(32, 64, 32, stages=2, programs=9, movers=2),  # more CTAs than tiles
]


def ranks(m, n, config, world=2, dtype=BF16, limit=3):
    """Spaces of ranks in one process; slots and scales are poisoned, like fresh memory may be."""
    layout = Layout(world, m, n, config.marks(m, n), dtype)
    peers = [torch.zeros(layout.bytes, dtype=torch.uint8) for _ in range(world)]
    for p in peers:
        p[layout.scales :] = 0xFF  # NaN in each of the dtypes
    spaces = [Space(layout, r, peers, config) for r in range(world)]
    for s in spaces:
        s.limit = limit
    return spaces


def take_turns(spaces, args):
    """One call on all ranks: everybody's products, then pushes, then sums."""
    at = spaces[0].layout
    ys = [torch.full((at.m, at.n), float("nan"), dtype=at.dtype) for _ in spaces]
    for phase in (GEMM, PUSH, REDUCE):
        for s, a, y in zip(spaces, args, ys, strict=True):
            movers.launch(s, *a, phases=phase, y=y)
    return ys


def copy_turns(spaces, args, which, calls=None):
    """The same of the copies. Products are the reference's; ``calls``: of these ranks only."""
    calls = range(len(spaces)) if calls is None else calls
    at = spaces[0].layout
    ys = {r: torch.full((at.m, at.n), float("nan"), dtype=at.dtype) for r in calls}
    one = torch.ones(1)
    for r in calls:
        s, (x, w, xs, ws) = spaces[r], args[r]
        copies.opening(s, xs, ws, which)
        for i, (a, b) in enumerate(copies.chunk_bounds(s)):
            scales = (one, one) if s.config.raw else (xs, ws[a:b] if ws.numel() > 1 else ws)
            part = linear_fp8.reference(x, w[a:b], *scales).to(at.dtype)
            copies.own_chunk(s, which, i).copy_(part)
            copies.send(s, which, i)
    for r in calls:
        copies.reduction(spaces[r], which, args[r][0], ys[r])
    return list(ys.values())


@pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter")
class TestKernels:
    @pytest.mark.parametrize("config", MOVERS)
    def test_movers(self, config):
        m, n = 40, 56
        spaces = ranks(m, n, config)
        calls = 3 if config is TINY else 2  # a slot's second use
        for call in range(calls):
            # K is each rank's own.
            args = [make(m, n, 64 - 32 * r, 10 * call + r) for r in range(2)]
            a, b = take_turns(spaces, args)
            close(a, args)
            assert torch.equal(a, b)
        assert all(s.control[: ERROR + 1].tolist() == [calls, 0, 0] for s in spaces)

    def test_kept(self):
        """One rank in one launch, in which its last tiles never see memory; the other around it."""
        m, n = 40, 72
        spaces = ranks(m, n, replace(TINY, keep=True))
        for call in range(2):
            args = [make(m, n, 32, 10 * call + r) for r in range(2)]
            ys = [torch.full((m, n), float("nan"), dtype=BF16) for _ in range(2)]
            for r, phase in [(1 - call, GEMM), (1 - call, PUSH), (call, 7), (1 - call, REDUCE)]:
                movers.launch(spaces[r], *args[r], phases=phase, y=ys[r])
            close(ys[0], args)
            assert torch.equal(*ys)
        spaces[0].check()

    @pytest.mark.parametrize("dtype", [BF16, torch.float16])
    def test_three_ranks_and_scales_of_one_element(self, dtype):
        m, n = 37, 43
        spaces = ranks(m, n, TINY, 3, dtype)
        for call in range(2):
            args = [make(m, n, 48, 10 * call + r, rows=call > 0) for r in range(3)]
            ys = take_turns(spaces, args)
            close(ys[0], args, dtype)
            assert all(torch.equal(ys[0], y) for y in ys)

    @pytest.mark.parametrize("config", [TINY, MOVERS[2]])
    def test_a_peer_one_call_ahead(self, config):
        """Rank 0 pushes its next call's parts while rank 1 still has to add this one's."""
        m, n = 40, 64
        spaces = ranks(m, n, config)
        calls = [[make(m, n, 32, 10 * call + r) for r in range(2)] for call in range(3)]
        ys = [[torch.full((m, n), float("nan"), dtype=BF16) for _ in range(2)] for _ in range(3)]

        def phases(call, r, *which):
            for phase in which:
                movers.launch(spaces[r], *calls[call][r], phases=phase, y=ys[call][r])

        phases(0, 1, GEMM, PUSH)
        for call in range(3):
            phases(call, 0, GEMM, PUSH, REDUCE)
            if call < 2:
                phases(call + 1, 0, GEMM, PUSH)
            phases(call, 1, REDUCE)
            if call < 2:
                phases(call + 1, 1, GEMM, PUSH)
        for pair, args in zip(ys, calls, strict=True):
            close(pair[1], args)
            assert torch.equal(*pair)

    def test_epochs_wrap(self):
        spaces = ranks(40, 32, TINY)
        for s in spaces:
            s.control[0] = 2**31 - 2
            s.buffer[s.layout.flags : s.layout.acks].view(torch.int32).fill_(2**31 - 2)
        for call in range(4):
            args = [make(40, 32, 32, 10 * call + r) for r in range(2)]
            close(take_turns(spaces, args)[0], args)
        assert spaces[0].control[0] == -(2**31) + 2

    @pytest.mark.parametrize("config", [TINY, MOVERS[2]])
    def test_a_late_peer(self, config):
        """Its slot and its flags still hold the call before last: NaN, not that; and silence."""
        m, n = 40, 64
        spaces = ranks(m, n, config)
        args = [make(m, n, 32, r) for r in range(2)]
        for _ in range(2):
            good = take_turns(spaces, args)[0]
        spaces[0].check()
        for again in range(2):
            y = torch.zeros((m, n), dtype=BF16)
            before = spaces[1].buffer.clone()
            movers.launch(spaces[0], *args[0], y=y)
            assert y.isnan().all()
            assert torch.equal(spaces[1].buffer, before) == (again == 1)
        with pytest.raises(RuntimeError, match="rank 0 or a peer of it waited in vain"):
            spaces[0].check()
        spaces[1].check()
        # What rank 0 pushed before it gave up is right for rank 1; the next call is lost to both.
        y = torch.zeros((m, n), dtype=BF16)
        movers.launch(spaces[1], *args[1], y=y)
        lost = y.isnan()
        assert not lost.all()
        close(torch.where(lost, good, y), args)
        movers.launch(spaces[1], *args[1], y=y)
        assert y.isnan().all()
        assert all(y.isnan().all() for y in take_turns(spaces, args))

    @pytest.mark.parametrize(("raw", "world"), [(True, 3), (False, 2)])
    def test_copies(self, raw, world):
        m, n = 19, 80
        config = Copies((32, 16, 32), raw=raw, rows=8, columns=32)
        spaces = ranks(m, n, config, world)
        # An odd graph replayed: slot 0 twice in a row.
        for call, which in enumerate([0, 1, 0, 0, 1]):
            args = [make(m, n, 48, 10 * call + r, rows=call != 1) for r in range(world)]
            ys = copy_turns(spaces, args, which)
            close(ys[0], args)
            assert all(torch.equal(ys[0], y) for y in ys)
        assert all(s.control[ERROR] == 0 for s in spaces)
        uses = spaces[0].control[4:6].tolist()
        assert uses == [3, 2]

    def test_copies_without_acknowledgement(self):
        """Rank 0 runs ahead of rank 1's reading: rank 1 must not add a part of the wrong call."""
        m, n = 37, 64
        config = Copies((32, 32), rows=8, columns=32)
        spaces = ranks(m, n, config)
        args = [make(m, n, 48, r) for r in range(2)]
        copy_turns(spaces, args, 0)
        y = copy_turns(spaces, args, 0, calls=[0])[0]  # rank 1 has not come
        assert y.isnan().all()
        assert spaces[1].control[ERROR] == 0  # it may still read: nothing was overwritten
        copy_turns(spaces, args, 0, calls=[0])
        assert spaces[1].control[ERROR] == 1
        y = copy_turns(spaces, args, 0, calls=[1])[0]
        assert y.isnan().all()

    def test_a_reduction_looks_at_its_error_word_after_reading(self):
        """The word is set while it reads (here: by its own last wait)."""
        m, n = 37, 64
        spaces = ranks(m, n, Copies((32, 32), rows=8, columns=32))
        args = [make(m, n, 48, r) for r in range(2)]
        for r, (x, w, xs, ws) in enumerate(args):
            copies.opening(spaces[r], xs, ws, 0)
            for i, (a, b) in enumerate(copies.chunk_bounds(spaces[r])):
                part = linear_fp8.reference(x, w[a:b], torch.ones(1), torch.ones(1))
                copies.own_chunk(spaces[r], 0, i).copy_(part)
                if (r, i) != (1, 1):
                    copies.send(spaces[r], 0, i)
        y = torch.zeros((m, n), dtype=BF16)
        copies.reduction(spaces[0], 0, args[0][0], y)
        assert y[:, 32:].isnan().all()
        assert y[:, :32].isnan().all()  # complete, but nobody can be sure


class TestOp:
    def test_layout(self):
        at = Layout(3, 757, 7680, 360, BF16)
        bounds = [CONTROL * 4, at.acks, at.scales, at.slots, at.bytes]
        assert at.flags == bounds[0]
        assert bounds == sorted(bounds)
        assert at.acks - at.flags >= 3 * 360 * 4
        assert at.scales - at.acks >= 3 * 2 * 4
        assert at.slots - at.scales >= 2 * 3 * (757 + 7680) * 4
        assert at.bytes - at.slots == 2 * 3 * 768 * 7680 * 2
        assert at.slots % 1024 == at.scales % 16 == at.scale_stride % 4 == 0

    def test_one_rank_is_the_linear(self):
        args = make(37, 104, 160, 0)
        y = op.linear_all_reduce(*args, BF16, 1, "nobody asks")
        assert torch.equal(y, linear_fp8.linear_fp8(*args, None, BF16))

    def test_opcheck(self):
        args = make(5, 48, 16, 0)
        # test_schema compares inputs by arithmetic that FP8 has not.
        tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        torch.library.opcheck(op.linear_all_reduce, (*args, BF16, 1, ""), test_utils=tests)

    def test_fake(self):
        """No group is needed to trace for two ranks."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode()
        fake = [mode.from_tensor(t) for t in make(5, 48, 16, 0)]
        with mode:
            y = op.linear_all_reduce(*fake, torch.float16, 2, "a group")
        assert (y.shape, y.stride(), y.dtype) == ((5, 48), (48, 1), torch.float16)

    def test_fitting(self):
        for k in (16, 20, 3):
            t = (torch.randn(5, k) * 2).to(FP8)
            for u in (t, t.t().contiguous().t(), torch.cat([t, t], 1)[:, :k]):
                fit = op._fitting(u)
                assert kernel.rows_aligned(fit)
                assert fit.shape[1] % 16 == 0
                assert torch.equal(fit[:, :k].float(), t.float())
                assert not fit[:, k:].float().any()

    def test_errors(self):
        args = make(5, 48, 16, 0)
        with pytest.raises(ValueError, match=r"group 'x': torch.distributed is not initialized"):
            op.linear_all_reduce(*args, BF16, 2, "x")
        with pytest.raises(ValueError, match="world = 0 must be at least 1"):
            op.linear_all_reduce(*args, BF16, 0, "x")
        with pytest.raises(ValueError, match=r"chunks \(32, 24\) must be positive multiples of 16"):
            Copies((32, 24))
        with pytest.raises(ValueError, match=r"chunks \(32, 32\) are 64 columns of 48"):
            Copies((32, 32)).marks(5, 48)
        with pytest.raises(ValueError, match="keep takes direct waves"):
            Movers(keep=True, direct=0)
        with pytest.raises(ValueError, match="there are none"):
            Movers(movers=0, early=1)
        with pytest.raises(ValueError, match="bn = 96 must be a power of two"):
            Movers(bn=96)

    def test_default_leaves_multiprocessors_to_move(self):
        for m, n in [(757, 7680), (757, 5120), (300, 4096), (16, 16), (4000, 7680)]:
            c = op.default(m, n, 132)
            assert c.programs + c.movers <= 132
            assert c.movers >= 4
        c = op.default(757, 7680, 132)
        assert (c.programs, c.movers) == (120, 12)


# Over Gloo: this file as a script, a process a rank.

_SHARED: dict[tuple[int, ...], torch.Tensor] = {}


@torch.library.custom_op("rtc_test::untruthful", mutates_args=())
def untruthful(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype,
    world: int,
    group: str,
) -> torch.Tensor:
    """Says that its result is fresh, and returns the workspace: what the chain must catch."""
    y = op.unfused(x, w, x_scale, w_scale, dtype, world, group)
    return _SHARED.setdefault(tuple(y.shape), torch.empty_like(y)).copy_(y)[:]


@untruthful.register_fake
def _(x, w, x_scale, w_scale, dtype, world, group):
    return x.new_empty((x.shape[0], w.shape[0]), dtype=dtype)


def wrong_in_chain(call, sets, want, compiled):
    """Which of the chained calls' results are not theirs."""

    def chain():
        ys = [call(*args) for args in sets]
        return [*ys, ys[0] + ys[1]]

    run = torch.compile(chain, fullgraph=True, backend="aot_eager") if compiled else chain
    ys = run()
    return [i for i, (y, w) in enumerate(zip(ys, want, strict=False)) if not torch.equal(y, w)]


def worker(rank, world, store):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    pair = dist.new_group([0, 1])
    groups = [(dist.group.WORLD, world)] + ([(pair, 2)] if rank < 2 else [])
    for group, size in groups:
        name = group.group_name
        for seed, (m, n, k) in enumerate([(37, 101, 48), (1, 8, 3), (5, 64, 320)]):
            for dtype in (BF16, torch.float32):
                args = [make(m, n, k + 16 * r, 10 * seed + r) for r in range(size)]
                y = op.linear_all_reduce(*args[rank], dtype, size, name)
                close(y, args, dtype)
                others = [torch.empty_like(y) for _ in range(size)]
                dist.all_gather(others, y, group=group)
                assert all(torch.equal(y, other) for other in others)
                parts = [linear_fp8.linear_fp8(*a, None, dtype) for a in args]
                total = parts[rank].float()
                dist.all_reduce(total, group=group)
                room = total.abs() * torch.finfo(dtype).eps + sum(p.abs() for p in parts) * 2**-22
                assert ((y.float() - total).abs() <= room).all()
        sets = [make(8, 16, 32, 100 + 10 * i + rank) for i in range(3)]
        want = [op.linear_all_reduce(*args, BF16, size, name) for args in sets]
        assert not torch.equal(want[0], want[1])
        # Compiled by two ranks only: most of this test's time.
        for compiled in (False, True) if size == 2 else (False,):

            def fused(*args, size=size, name=name):
                return torch.ops.rtc.linear_all_reduce(*args, BF16, size, name)

            def twin(*args, size=size, name=name):
                return torch.ops.rtc_test.untruthful(*args, BF16, size, name)

            assert wrong_in_chain(fused, sets, want, compiled) == []
            assert wrong_in_chain(twin, sets, want, compiled) == [0, 1]
    args = make(5, 16, 16, 0)
    for group, size, message in [
        ("nobody", world, "there is no process group named 'nobody'"),
        (dist.group.WORLD.group_name, world + 1, f"has {world} ranks, not the {world + 1}"),
    ]:
        with pytest.raises(ValueError, match=message):
            op.linear_all_reduce(*args, BF16, size, group)
    with pytest.raises(ValueError, match="a workspace needs CUDA and triton"):
        op.prepare(dist.group.WORLD.group_name, 5, 16)
    dist.barrier()
    print("rank done")


@pytest.mark.skipif(INTERPRET, reason="is the inner run")
def test_over_gloo(tmp_path):
    """Three ranks, and a group of the first two of them."""
    world, store = 3, tmp_path / "store"
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    runs = [
        subprocess.Popen(
            [sys.executable, __file__, str(r), str(world), str(store)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(world)
    ]
    try:
        outs = [run.communicate(timeout=120)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    for run, out in zip(runs, outs, strict=True):
        assert run.returncode == 0, out[-3000:]
        assert "rank done" in out


@pytest.mark.skipif(INTERPRET, reason="is the inner run")
@pytest.mark.skipif(kernel.triton is None, reason="needs triton")
def test_in_the_interpreter():
    cmd = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    cmd += ["-k", "TestKernels"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(cmd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout, done.stdout[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRET, reason="needs compiled kernels")
def test_on_two_gpus():
    """Values, ranks alike, replays under skew, 1,000 token counts, a peer that never comes."""
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs two Hopper GPUs")
    cmd = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    cmd += ["bench/bench_linear_all_reduce.py", "--check", "--no-times", "--replays", "200"]
    done = subprocess.run(cmd, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "checks: all ok" in done.stdout


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
