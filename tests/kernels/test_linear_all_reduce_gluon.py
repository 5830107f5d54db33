"""The Gluon design of rtc::linear_all_reduce without a GPU: its schedule, and its machine code.

Gluon has no interpreter. What the kernel computes is checked on GPUs (bench/all_reduce/check.py);
here its schedule functions run as the plain Python that they are, and it is compiled for Hopper.
"""

import re
import subprocess
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

from rtc.kernels import linear_all_reduce_gluon as gluon
from rtc.kernels import linear_all_reduce_gluon_roles as roles
from rtc.kernels.linear_all_reduce_gluon import Specialized

pytestmark = pytest.mark.skipif(gluon.triton is None, reason="needs Gluon of Triton 3.6")


def plain(name, **others):
    """A schedule function without its decorator."""
    fn = getattr(roles, name).fn
    return types.FunctionType(fn.__code__, {**fn.__globals__, **others})


def schedule(m, n, c):
    """Units (m0, column) of each CTA: computed and sent, kept and added, added for others."""
    tall, short, plan, duty = (plain(f) for f in ("tall", "short", "plan", "duty"))
    deferred = plain("deferred", tall=tall, short=short)
    computed, kept, added = Counter(), Counter(), Counter()
    load = Counter()
    for pid in range(c.programs):
        talls, shorts, columns, first = plan(pid, m, n, c.short, c.programs)
        for tile in range(pid, talls, c.programs):
            m0, column = tall(tile, m)
            computed.update((m0 + u * 64, column) for u in range(4))
            load[pid] += 2
        for tile in range(first, shorts, c.programs):
            m0, column = short(tile, m, columns)
            units = [(m0 + u * 64, column) for u in range(2)]
            computed.update(units)
            load[pid] += 1
            if tile >= shorts - c.programs:
                kept.update(units)
                # A CTA waits for peers only after its last product.
                assert tile + c.programs >= shorts
        helper, helpers, units = duty(first, talls, shorts, c.programs)
        for w in range(2):
            for unit in range(helper * 2 + w, units, helpers * 2) if helper >= 0 else ():
                added[deferred(unit, m, talls, columns)] += 1
                if shorts < c.programs:
                    assert first >= shorts, "a CTA with a short tile helps"
    return computed, kept, added, load


SHAPES = [(757, 7680), (757, 1280), (37, 112), (300, 4112), (1, 8), (513, 128)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "config", [Specialized(), Specialized(short=0), Specialized(7, 4), Specialized(3, 99), None]
)
def test_every_unit_is_computed_once_and_added_once(shape, config):
    m, n = shape
    c = Specialized.fitting(m, n, 132) if config is None else config
    computed, kept, added, _ = schedule(m, n, c)
    wanted = {(m0, column) for m0 in range(0, m, 64) for column in range(-(-n // 128))}
    assert set(computed.values()) == {1}
    assert wanted <= set(computed)
    assert computed == kept + added
    # Rows beyond M are still inside the panel, and every unit has a flag.
    assert max(m0 for m0, _ in computed) < -(-m // 256) * 256
    assert len(computed) <= c.marks(m, n)


def test_fitting():
    c = Specialized.fitting(757, 7680, 132)
    assert c.short == 16
    _, kept, _, load = schedule(757, 7680, c)
    assert max(load.values()) == 3
    assert len(kept) == 96 * 2
    # The CTA without a tall tile takes the short one.
    assert max(schedule(100, 7 * 128, Specialized(7, 1))[3].values()) == 2


@pytest.mark.parametrize("shape", [(757, 1280), (300, 1040), (200, 640)])
def test_fitting_is_the_shortest_schedule(shape):
    m, n = shape

    def length(c):
        return max(schedule(m, n, c)[3].values())

    best = min(length(Specialized(7, short)) for short in range(-(-n // 128) + 1))
    assert length(Specialized.fitting(m, n, 7)) == best


def test_errors():
    with pytest.raises(ValueError, match="bk = 32 must be 64 or 128"):
        Specialized(bk=32)
    hopper = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    blackwell = types.SimpleNamespace(major=10, minor=0, multi_processor_count=132)
    assert gluon.refusal(Specialized(), 4, hopper) is None
    assert "5 ranks are more than the 4" in gluon.refusal(Specialized(), 5, hopper)
    assert "133 CTAs do not run at once" in gluon.refusal(Specialized(133), 2, hopper)
    assert "10.0 has no wgmma" in gluon.refusal(Specialized(), 2, blackwell)


def compiled(c, world):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    fn = gluon._specialized_kernel
    eight, sixteen = gl.NVMMASharedLayout(c.bk, 8), gl.NVMMASharedLayout(128, 16)
    slot = f"tensordesc<bf16[64, 128],{sixteen!r}>"
    pointers = {
        "y_ptr": "*bf16", "xs_ptr": "*fp32", "ws_ptr": "*fp32", "bases": "*i64", "control": "*i32",
    }  # fmt: skip
    signature = {
        "x_desc": f"tensordesc<fp8e4nv[64, {c.bk}],{eight!r}>",
        "w_desc": f"tensordesc<fp8e4nv[128, {c.bk}],{eight!r}>",
        "own_desc": slot,
        **pointers,
    }
    constants = {
        "X_ROWS": True, "W_ROWS": True, "PROGRAMS": c.programs, "WORLD": world, "ITEM": 2,
        "BK": c.bk, "UNITS": c.units,
    }  # fmt: skip
    for i in range(1, gluon.MOST):
        (signature if i < world else constants)[f"peer{i}"] = slot if i < world else None
    names = fn.arg_names
    full = {a: "constexpr" if a in constants else signature.get(a, "i32") for a in names}
    even = {*pointers, "N", "K", "flag_offset", "slots", "part"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(names) if a in even}
    source = GluonASTSource(fn, full, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


@pytest.mark.parametrize(("config", "world"), [(Specialized(), 2)])
def test_machine_code(config, world, tmp_path):
    """Wgmma that is not serialized, no spills, a main loop that leaves products in flight."""
    import triton

    kernel = compiled(config, world)
    assert kernel.metadata.shared <= 227 * 1024
    ptx = kernel.asm["ptx"]
    # Two warpgroups; tall tiles have two accumulators, short tiles one; 32 of K an instruction.
    assert ptx.count("wgmma.mma_async") == 2 * 3 * config.bk // 32
    # In the loops the products of one step stay in flight; after each loop none does.
    waits = Counter(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d)", ptx))
    assert waits == {"2": 2, "1": 2, "0": 4}
    # Flags come after complete stores, not after their reads from shared memory.
    for part in ptx.split("cp.async.bulk.wait_group 0;")[1:]:
        assert part.lstrip().startswith("fence.proxy.async;")
        assert "release" in part
    assert ptx.count("cp.async.bulk.wait_group 0;") == 4
    (tmp_path / "k.ptx").write_text(ptx)
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    said = subprocess.run(
        [ptxas, "-v", "-arch=sm_90a", tmp_path / "k.ptx", "-o", tmp_path / "k.cubin"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "serialized" not in said


def test_workspace_rows_are_panels():
    """The slots of a buffer as rows of 128: what the descriptors address, and flags as counted."""
    from rtc.kernels.linear_all_reduce_space import Layout, Space

    m, n, world = 300, 200, 3
    c = Specialized()
    at = Layout(world, m, n, c.marks(m, n), torch.bfloat16)
    peers = [torch.zeros(at.bytes, dtype=torch.uint8) for _ in range(world)]
    space = Space(at, 1, peers, c)
    rows = gluon.rows_of(space, 0)
    for which in range(2):
        for rank in range(world):
            first = (which * world + rank) * (at.part // 128)
            slot = space.slot(which, rank, 0)
            assert rows[first].data_ptr() == slot.data_ptr()
            # The last panel ends inside of the part.
            assert -(-n // 128) * (-(-m // 256) * 256) <= at.part // 128
    assert rows.shape == (2 * world * at.part // 128, 128)
