"""rtc::pre_attention against float64.

Without a GPU the op runs its plain reference; `test_in_the_interpreter` runs this file once more
in a process where Triton interprets the kernel.
"""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from rtc.kernels import pre_attention as op

FP8 = torch.float8_e4m3fn
EPS = 1e-6
NAMES = """q k v q_weight k_weight q_cos q_sin k_cos k_sin q_inv_scale k_inv_scale v_inv_scale slots
k8 v8 k_raw v_raw saturated rope eps turned""".split()
WRITTEN = ("k8", "v8", "k_raw", "v_raw", "saturated")
REAL = {"T": 757, "H": 60, "G": 60, "D": 128, "S": 5788}
kernel = pytest.mark.skipif(
    not op.INTERPRET and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)
DEVICE = "cpu" if op.INTERPRET or not torch.cuda.is_available() else "cuda"


def make(
    B=1, T=5, H=3, G=3, D=16, S=11, dtype=torch.float32, *, rope="half", norm=True, weights=True,
    raw=True, device="cpu", gap=0, seed=0, turned=False, each=False,
) -> dict[str, Any]:  # fmt: skip
    """Arguments by name. q, k, v are slices of one wide tensor; caches hold random values; each:
    scales of every batch."""
    g = torch.Generator(device).manual_seed(seed)

    def rand(*shape, to=torch.float32):
        return torch.randn(shape, generator=g, device=device).to(to)

    wide = rand(B, T, (H + 2 * G) * D + gap, to=dtype)
    q, k, v, _ = wide.split([H * D, G * D, G * D, gap], -1)
    angle = torch.rand(2, T, D, generator=g, device=device) * 6
    # Inverse scales around 190: a few of a hundred values lie beyond 448.
    lead = (B,) if each else ()
    scales = [150 + 80 * torch.rand(*lead, n, generator=g, device=device) for n in (H, G, G)]
    slots = torch.randperm(S, generator=g, device=device)[:T]
    caches = [rand(B, S, G, D, to=to) for to in (FP8, FP8, dtype, dtype)]
    weight = [rand(D, to=dtype) * 0.2 + 1 for _ in "qk"] if norm and weights else [None, None]
    tables = [angle[0].cos(), angle[0].sin(), angle[1].cos(), angle[1].sin()]
    values = [q.unflatten(-1, (H, D)), k.unflatten(-1, (G, D)), v.unflatten(-1, (G, D))]
    values += [*weight, *tables, *scales, slots, *caches[:2], *(caches[2:] if raw else [None] * 2)]
    values += [
        torch.full((1,), 7, dtype=torch.int64, device=device),
        rope,
        EPS if norm else -1.0,
        turned,
    ]
    return dict(zip(NAMES, values, strict=True))


def run(args: dict[str, Any]) -> torch.Tensor:
    return op.pre_attention(*args.values())


def copy(args: dict[str, Any]) -> dict[str, Any]:
    keep = {n: args[n].clone() for n in WRITTEN if args[n] is not None}
    return {**args, **keep}


def exact(a: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What goes to q8, k8, v8 before the clamp, and to k_raw, in float64, nothing rounded."""

    def norm(x, w):
        x = x.double()
        if a["eps"] < 0:
            return x
        x = x / (x.square().mean(-1, keepdim=True) + a["eps"]).sqrt()
        return x if w is None else x * w.double()

    def rotate(x, cos, sin):
        cos, sin, D = cos.double()[:, None], sin.double()[:, None], x.shape[-1]
        out = x.clone()
        for i in range(D // 2):
            lo, hi = (i, i + D // 2) if a["rope"] == "half" else (2 * i, 2 * i + 1)
            out[..., lo] = x[..., lo] * cos[..., lo] - x[..., hi] * sin[..., lo]
            out[..., hi] = x[..., hi] * cos[..., hi] + x[..., lo] * sin[..., hi]
        return x if a["rope"] == "none" else out

    def scaled(x, name):
        scale = a[name].double()
        return x * (scale[:, None, :, None] if scale.dim() == 2 else scale[:, None])

    q, k, v = norm(a["q"], a["q_weight"]), norm(a["k"], a["k_weight"]), a["v"].double()
    turned = rotate(k, a["k_cos"], a["k_sin"])
    return {
        "q8": scaled(rotate(q, a["q_cos"], a["q_sin"]), "q_inv_scale"),
        "k8": scaled(turned, "k_inv_scale"),
        "v8": scaled(v, "v_inv_scale"),
        "k_raw": turned if a["turned"] else k,
        "v_raw": v,
    }


def check(before: dict[str, Any], after: dict[str, Any], q8: torch.Tensor, loose=False) -> None:
    true, ref = exact(before), copy(before)
    ref["q8"] = op.reference(*(ref[n] for n in NAMES))
    assert q8.dtype == FP8
    assert q8.shape == before["q"].shape
    assert q8.is_contiguous()
    slots, norm = before["slots"], before["eps"] >= 0
    unit = torch.finfo(before["q"].dtype).eps * (1 if loose else 0.5)
    rest = torch.ones(before["k8"].shape[1], dtype=torch.bool, device=slots.device)
    rest[slots] = False
    for name in ("q8", "k8", "v8", "k_raw", "v_raw"):
        if name != "q8" and before[name] is None:
            continue
        got, theirs = (q8, ref["q8"]) if name == "q8" else (after[name], ref[name])
        if name != "q8":
            old, new = before[name][:, rest], got[:, rest]
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8)), f"{name}: other slots"
            got, theirs = got[:, slots], theirs[:, slots]
        want = true[name].clamp(-448, 448) if name.endswith("8") else true[name]
        got, theirs = got.double(), theirs.double()
        assert torch.isfinite(got).all(), name
        room = 1e-5 * want.abs().amax(-1, keepdim=True)
        if name == "k_raw" and (norm or before["turned"]):
            room = room + 1.01 * unit * want.abs()
            if before["turned"]:  # of rows that the norm rounded
                room = room + 3 * unit * want.abs().amax(-1, keepdim=True)
        if name.endswith("8"):  # half a step of FP8, and the rounded norm it starts from
            room = room + 2**-4 * want.abs() + 2**-10
            room = room + (3 * unit * want.abs().amax(-1, keepdim=True) if name != "v8" else 0)
        assert ((got - want).abs() <= room).all(), name
        bound = (1.1 if loose else 1.02) * (theirs - want).norm()
        assert (got - want).norm() <= bound + (2 * unit if loose else 1e-6) * want.norm(), name
    # Values within rounding of 448 may count or not.
    over, spread = 0, 0
    for name in ("q8", "k8", "v8"):
        over += int((true[name].abs() > 448).sum())
        near = 448 * 4 * unit if name != "v8" else 1e-3
        spread += int(((true[name].abs() - 448).abs() <= near).sum())
    counted = int(after["saturated"]) - int(before["saturated"])
    assert abs(counted - over) <= spread, (counted, over, spread)


def loosely(dtype):
    """The interpreter truncates in casts to bf16."""
    return op.INTERPRET and dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rope", ["half", "interleaved", "none"])
@pytest.mark.parametrize("raw", [True, False])
def test_ropes(dtype, rope, raw):
    args = make(dtype=dtype, rope=rope, raw=raw)
    after = copy(args)
    check(args, after, run(after), loosely(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rope", ["half", "interleaved", "none"])
@pytest.mark.parametrize("raw", [True, False])
def test_keys_turned_before_they_are_stored(dtype, rope, raw):
    args = make(B=2, dtype=dtype, rope=rope, raw=raw, turned=True)
    after = copy(args)
    check(args, after, run(after), loosely(dtype))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
def test_scales_of_every_batch(turned, groups):
    args = make(B=3, H=4, G=groups, rope="interleaved", turned=turned, each=True)
    after = copy(args)
    check(args, after, run(after))


@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"B": 2, "H": 6, "G": 2},
        {"D": 12, "gap": 5},
        {"T": 1, "H": 1, "G": 1, "D": 2},
        {"H": 33, "G": 17, "D": 6},
        {"norm": False},
        {"weights": False},
        {"T": 11},
    ],
)
def test_shapes(rope, sizes):
    args = make(rope=rope, **sizes)
    after = copy(args)
    check(args, after, run(after))


def test_values_beyond_448_are_counted_and_clamped():
    args = make(T=2, H=2, G=2, norm=False, rope="none")
    args["k"].fill_(1.0)
    args["v"].fill_(-1.0)
    args["k_inv_scale"] = torch.tensor([500.0, 448.0])
    args["v_inv_scale"] = torch.tensor([1.0, 1e6])
    scaled = args["q"].double() * args["q_inv_scale"].double().view(-1, 1)
    queries = int((scaled.abs() > 448).sum())
    assert queries > 0
    run(args)
    assert args["saturated"].item() == 7 + 2 * 16 + 2 * 16 + queries
    assert (args["k8"][:, args["slots"]].float() == 448).all()
    assert (args["v8"][:, args["slots"], 1].float() == -448).all()
    small = {name: args[name] * 0.01 for name in ("q", "k", "v")}
    run({**args, **small, "v_inv_scale": torch.ones(2)})
    assert args["saturated"].item() == 7 + 2 * 16 + 2 * 16 + queries


def rebuild(**sizes) -> float:
    """Share of k8 that differs from what the raw cache gives: both come from the rounded keys."""
    first = make(**sizes)
    run(first)
    again = {**copy(first), "k": first["k_raw"][:, first["slots"]], "k_weight": None, "eps": -1.0}
    run({**again, "q_weight": None})
    return (first["k8"].float() != again["k8"].float()).double().mean().item()


@pytest.mark.parametrize("rope", ["half", "interleaved"])
def test_keys_are_rotated_as_they_are_cached(rope):
    """In f16, which the interpreter rounds to; of unrounded keys 1 % would go to another value."""
    assert rebuild(T=11, S=11, H=17, G=17, dtype=torch.float16, rope=rope) == 0


@pytest.mark.gpu
def test_gpu_keys_are_rotated_as_they_are_cached():
    # Two compilations may contract multiplications differently: a last place of f32.
    assert rebuild(**REAL, dtype=torch.bfloat16, device="cuda") < 1e-4


def test_value_cache_stored_d_major():
    args = make(D=12)
    args["v8"] = args["v8"].view(torch.uint8).permute(0, 2, 3, 1).contiguous().view(FP8)
    args["v8"] = args["v8"].permute(0, 3, 1, 2)
    assert args["v8"].stride(1) == 1
    after = {**copy(args), "v8": args["v8"].clone()}
    assert after["v8"].stride() == args["v8"].stride()
    check(args, after, run(after))


@kernel
@pytest.mark.parametrize("config", [op.Config(1, 1), op.Config(2, 4), op.Config(64, 8)])
def test_every_output_is_written(config):
    for rope in ("half", "interleaved"):
        args = make(H=5, rope=rope, device=DEVICE)
        after = copy(args)
        q8 = torch.full((1, 5, 5, 16), 0x7F, dtype=torch.uint8, device=DEVICE).view(FP8)
        for name in ("k8", "v8"):
            after[name].view(torch.uint8)[:, args["slots"]] = 0x7F
        for name in ("k_raw", "v_raw"):
            after[name][:, args["slots"]] = float("nan")
        op.launch(tuple(after.values())[:-1], q8, config)
        check(args, after, q8)


def test_writes_what_its_schema_says_and_nothing_else():
    schema = op.pre_attention._opoverload._schema
    declared = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert declared == set(WRITTEN)
    assert schema.returns[0].alias_info is None
    args = make(gap=8)
    before = {n: a.clone() for n, a in args.items() if torch.is_tensor(a)}
    q8 = run(args)
    changed = {n for n, a in before.items() if not torch.equal(a.float(), args[n].float())}
    assert changed == set(WRITTEN)
    storages = {args[n].untyped_storage().data_ptr() for n in before}
    assert q8.untyped_storage().data_ptr() not in storages


@pytest.mark.parametrize("raw", [True, False])
def test_opcheck_and_fake_strides(raw):
    args = make(gap=8, raw=raw, B=2)
    # test_schema compares FP8 tensors with an operation that they lack: its work is done below.
    tests = ["test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(op.pre_attention, tuple(args.values()), test_utils=tests)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = run({n: mode.from_tensor(a) if torch.is_tensor(a) else a for n, a in args.items()})
    q8 = run(args)
    assert (q8.shape, q8.dtype, q8.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_two_calls_on_one_cache_under_compile():
    """The second call must see the first one's rows, and both reads theirs."""
    first, second = make(seed=0), make(seed=1)
    second["slots"] = (first["slots"] + 1) % 11  # four of five rows written twice

    def step(a, b, k8, v8, k_raw, v_raw, saturated):
        shared = {"k8": k8, "v8": v8, "k_raw": k_raw, "v_raw": v_raw, "saturated": saturated}
        q1 = run({**a, **shared})
        read1 = k8.float() + v8.float() + k_raw, saturated.clone()
        q2 = run({**b, **shared})
        return q1.float(), q2.float(), *read1, k8.float() + v8.float() + v_raw

    eager, compiled = ([first[n].clone() for n in WRITTEN] for _ in range(2))
    want = step(first, second, *eager)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(first, second, *compiled)
    for x, y in zip([*want, *eager], [*got, *compiled], strict=True):
        assert torch.equal(x.float(), y.float())
    assert not torch.equal(want[2], want[4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope": "third"}, "rope must be"),
        ({"eps": -1.0}, "no norm"),
        ({"slots": torch.arange(4)}, "int64, 5 values"),
        ({"slots": torch.arange(5).int()}, "int64, 5 values"),
        ({"k_cos": torch.ones(5, 8)}, "80 values"),
        ({"q_inv_scale": torch.ones(2)}, "3 values"),
        ({"k8": torch.zeros(1, 11, 3, 16)}, "k8 must be"),
        ({"v_raw": torch.zeros(1, 11, 3, 16).half()}, "v_raw must be"),
        ({"q": torch.zeros(1, 5, 16, 3).transpose(2, 3)}, "unit stride"),
        ({"v": torch.zeros(1, 5, 2, 16)}, "v .* as k"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        run({**make(), **change})


def test_config_refuses_what_triton_cannot_do():
    with pytest.raises(ValueError, match="heads must be"):
        op.Config(heads=12, warps=4)


@pytest.mark.skipif(op.INTERPRET, reason="is the inner run")
@pytest.mark.skipif(op.triton is None, reason="needs triton")
def test_in_the_interpreter():
    cmd = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    cmd += ["-m", "not gpu"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(cmd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("rope", ["half", "interleaved", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "sizes", [{}, REAL, {"T": 33, "H": 20, "G": 4, "D": 96, "S": 70, "gap": 3, "B": 2}]
)
def test_gpu_sizes(rope, dtype, sizes):
    args = make(**sizes, rope=rope, dtype=dtype, device="cuda")
    after = copy(args)
    check(args, after, run(after))


@pytest.mark.gpu
@pytest.mark.parametrize("rope", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_turned_keys_and_scales_of_every_batch(rope, dtype):
    args = make(
        B=2, T=37, H=12, G=4, D=128, S=99, dtype=dtype, rope=rope, turned=True, each=True,
        device="cuda",
    )  # fmt: skip
    after = copy(args)
    check(args, after, run(after))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [(4, 1), (16, 4), (64, 8), (64, 4)])
def test_gpu_configs(config):
    args = make(**{**REAL, "T": 100, "S": 300}, dtype=torch.bfloat16, device="cuda")
    after, q8 = copy(args), torch.empty(1, 100, 60, 128, dtype=FP8, device="cuda")
    op.launch(tuple(after.values())[:-1], q8, op.Config(*config))
    check(args, after, q8)


@pytest.mark.gpu
def test_gpu_one_graph_serves_every_ring_position():
    args = make(T=9, S=40, H=4, G=4, D=128, dtype=torch.bfloat16, device="cuda")
    work = copy(args)
    run(work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q8 = run(work)
    for position in (0, 13, 31):
        args["slots"].copy_(torch.arange(position, position + 9))
        before = copy({**args, **{n: work[n] for n in WRITTEN}})
        graph.replay()
        check(before, work, q8)
