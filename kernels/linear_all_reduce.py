"""``rtc::linear_all_reduce``: an FP8 linear layer cut along K, summed over the ranks of a group.

    part_r = round(x_scale_r[m] * w_scale_r[n] * sum_k x_r[m, k] * w_r[n, k])     of rank r
    y      = round(part_0 + part_1 + ...)       in the order of ranks, in float32; on every rank

Shapes: x [M, K] and w [N, K], this rank's share of the columns, FP8, with scales as in
``rtc::linear_fp8``; y [M, N] contiguous, of ``dtype`` (what ``round`` rounds to). All ranks get
the same bits. K may differ between ranks, M, N and dtype may not. y is fresh memory: no call's
result aliases another's, nor the workspace.
Bytes between ranks: M N itemsize * (world - 1) a direction; 11.6 MB at 757 x 7680 on two GPUs:
33 us at the 350 GB/s that NVLink reaches there, beside 150 us of arithmetic.

``prepare`` allocates the workspace of one (group, M, N, dtype), on all ranks at once, before
anything is compiled or captured; only calls with one use the fused kernels. Every other call
computes ``rtc::linear_fp8`` and reduces by the group's own all-reduce (NCCL; its order and its
roundings where there are more than two ranks), or, on the CPU, gathers the parts and adds them as
above. Which way a call takes depends on nothing that may differ between ranks. Nothing is allocated
per shape.

Designs, chosen by ``TABLE`` or ``prepare``'s config: ``Rows`` (linear_all_reduce_rows.py: cuBLAS,
then a kernel that sums by rows; parts are rounded before their scales, not after, and y once),
``Movers`` (linear_all_reduce_movers.py: one kernel), ``Copies`` (linear_all_reduce_copies.py:
cuBLAS and copy engines; with ``raw``, parts are rounded as in ``Rows``) and ``Specialized``
(linear_all_reduce_gluon.py: one kernel of specialized warps, in Gluon). None of these uses
multicast. ``InSwitch``
(linear_all_reduce_nvls.py) does: it is taken only where ``prepare`` is given one that consents, and
has not run.

Source: own.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
except ImportError:  # the CPU builds of torch come without it
    triton = None

from rtc.kernels import linear_all_reduce_copies as copies
from rtc.kernels import linear_all_reduce_gluon as specialized
from rtc.kernels import linear_all_reduce_movers as movers
from rtc.kernels import linear_all_reduce_nvls as nvls
from rtc.kernels import linear_all_reduce_rows as rows
from rtc.kernels import linear_all_reduce_rows_layout as rows_layout
from rtc.kernels.linear_all_reduce_copies import Copies
from rtc.kernels.linear_all_reduce_gluon import Specialized
from rtc.kernels.linear_all_reduce_movers import Movers
from rtc.kernels.linear_all_reduce_nvls import InSwitch
from rtc.kernels.linear_all_reduce_rows_layout import Rows, RowsLayout
from rtc.kernels.linear_all_reduce_space import ERROR, OTHERS, Layout, Space
from rtc.kernels.linear_fp8 import check as check_linear
from rtc.kernels.linear_fp8 import linear_fp8
from rtc.kernels.linear_fp8_triton import rows_aligned

__all__ = [
    "OTHERS",
    "TABLE",
    "Copies",
    "InSwitch",
    "Movers",
    "Rows",
    "Specialized",
    "check",
    "error_words",
    "linear_all_reduce",
    "prepare",
    "prepared",
    "release",
    "reserved",
]

Config = Rows | Movers | Copies | Specialized | InSwitch
Key = tuple[str, int, int, torch.dtype]

# (major compute capability, M, N, world) -> design; medians on two H200.
TABLE: dict[tuple[int, int, int, int], Config] = {
    (9, 757, 7680, 2): Movers(stages=5, split=1),  # 203 us; Specialized 205, cuBLAS + NCCL 257
}

_SPACES: dict[Key, Space] = {}


def reference(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The second line of the formula, for parts of all ranks [M, N] of ``dtype``."""
    total = torch.zeros(parts[0].shape, dtype=torch.float32, device=parts[0].device)
    for part in parts:
        total = total + part.float()
    return total.to(dtype)


def default(m: int, n: int, multiprocessors: int) -> Movers:
    """Equal waves, with multiprocessors left to move tiles."""
    tiles = -(-m // 128) * -(-n // 128)
    waves = -(-tiles // max(1, multiprocessors - 4))
    programs = -(-tiles // waves)
    return Movers(programs=programs, movers=min(16, multiprocessors - programs))


def prepare(
    group: str,
    m: int,
    n: int,
    dtype: torch.dtype = torch.bfloat16,
    config: Config | None = None,
    normed: bool = False,
) -> int:
    """Allocate and exchange the workspace for results [m, n]; its bytes on this GPU.

    A collective: every rank of ``group`` (a process group's ``group_name``) calls it, with the same
    arguments, before compiling and capturing. ``normed``: most sums go on to a norm
    (``rtc::linear_all_reduce_norm``): design ``Rows``. Known shapes return at once. Memory stays
    until
    ``release``. Raises ValueError on an unknown group, and where ranks disagree or the design does
    not fit.
    """
    import torch.distributed as dist

    pg = _resolve(group)
    world = dist.get_world_size(pg)
    known = _SPACES.get((group, m, n, dtype))
    if known is not None:
        if config is not None and config != known.config:
            raise ValueError(
                f"linear_all_reduce: [{m}, {n}] of group {group!r} is prepared as {known.config}; "
                "release it before preparing it as something else"
            )
        return known.layout.bytes
    if not torch.cuda.is_available() or triton is None:
        raise ValueError("linear_all_reduce: a workspace needs CUDA and triton")
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("linear_all_reduce: prepare must be called before CUDA graph capture")
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    if config is None and normed:
        config = Rows(multiprocessors=properties.multi_processor_count)
        if _refusal(config, m, n, world, dtype, properties):
            config = None
    if config is None:
        config = TABLE.get((properties.major, m, n, world))
        if config is None or _refusal(config, m, n, world, dtype, properties):
            config = default(m, n, properties.multi_processor_count)
    refused = _refusal(config, m, n, world, dtype, properties)
    said: list[Any] = [None] * world
    dist.all_gather_object(said, (config, m, n, dtype, refused), group=pg)
    if any(s != said[0] for s in said):
        raise ValueError(f"linear_all_reduce: ranks disagree on the workspace: {said}")
    if refused:
        raise ValueError(f"linear_all_reduce: {refused}")
    kinds: dict[type, Any] = {InSwitch: nvls.Pair, Rows: RowsLayout}
    layout = kinds.get(type(config), Layout)(world, m, n, config.marks(m, n), dtype)
    space = Space.allocate(pg, layout, config, device)
    if isinstance(config, InSwitch):
        why: list[Any] = [None] * world
        dist.all_gather_object(why, nvls.supported(space.handle, config, properties), group=pg)
        if any(why):
            raise ValueError(f"linear_all_reduce: {next(w for w in why if w)}")
    _SPACES[group, m, n, dtype] = space
    return layout.bytes


def _refusal(
    config: Config, m: int, n: int, world: int, dtype: torch.dtype, properties: Any
) -> str | None:
    if properties.major < 9:
        return f"compute capability {properties.major}.{properties.minor} has no FP8 kernel here"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"a workspace holds bfloat16 or float16, not {dtype}"
    if m < 1 or n < 1:
        return f"an empty result [{m}, {n}]"
    if isinstance(config, Movers):
        count = config.programs + config.movers
        if count > properties.multi_processor_count:
            return f"{count} CTAs do not run at once on {properties.multi_processor_count} SMs"
    elif isinstance(config, (Specialized, InSwitch)):
        room = specialized if isinstance(config, Specialized) else nvls
        why = room.refusal(config, world, properties)
        if why:
            return why
    elif isinstance(config, Rows):
        why = rows_layout.refusal(config, m, n, world, dtype, properties)
        if why:
            return why
    elif dtype != torch.bfloat16:
        return f"cuBLAS rounds row-wise scaled products to bfloat16, not {dtype}"
    try:
        config.marks(m, n)
    except ValueError as e:
        return str(e)
    return None


def prepared(group: str, m: int, n: int, dtype: torch.dtype) -> bool:
    """Whether calls of this shape take the fused kernels."""
    return (group, m, n, dtype) in _SPACES


def space_of(group: str, x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> Space | None:
    """The workspace that a call takes."""
    return _SPACES.get((group, x.shape[0], w.shape[0], dtype)) if x.is_cuda else None


def by_rows(group: str, m: int, n: int, dtype: torch.dtype) -> bool:
    """Whether that workspace serves ``rtc::linear_all_reduce_norm``."""
    space = _SPACES.get((group, m, n, dtype))
    return space is not None and isinstance(space.config, Rows)


def held(group: str) -> int:
    """Workspaces of a group."""
    return sum(key[0] == group for key in _SPACES)


def drop(group: str, m: int, n: int, dtype: torch.dtype) -> None:
    """Free one workspace, if it is there, before anything uses it."""
    _SPACES.pop((group, m, n, dtype), None)


def reserved() -> int:
    """Bytes of all workspaces on this GPU."""
    return sum(space.layout.bytes for space in _SPACES.values())


def release(group: str | None = None) -> None:
    """Free the workspaces of a group, or all. No kernel or captured graph may use them any more."""
    for key in [k for k in _SPACES if group is None or k[0] == group]:
        del _SPACES[key]


def error_words(keys: list[Key]) -> list[torch.Tensor]:
    """int32 [1] each, on the GPU: not 0 once a call waited in vain, or ranks differ (``Space``)."""
    return [_SPACES[k].control[ERROR : ERROR + 1] for k in keys if k in _SPACES]


def check() -> None:
    """Raise RuntimeError if any call waited in vain for a peer, or ranks differ. Waits for the
    device."""
    for space in _SPACES.values():
        space.check()


def _resolve(group: str) -> Any:
    """The process group of that name. Raises ValueError if there is none."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"linear_all_reduce: group {group!r}: torch.distributed is not initialized"
        )
    from torch.distributed import distributed_c10d as c10d

    try:
        return c10d._resolve_process_group(group)  # type: ignore[arg-type,attr-defined]
    except (LookupError, RuntimeError, ValueError, TypeError) as e:
        raise ValueError(f"linear_all_reduce: there is no process group named {group!r}") from e


def _check(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype,
    world: int,
) -> None:
    check_linear(x, w, x_scale, w_scale, dtype)
    if world < 1:
        raise ValueError(f"linear_all_reduce: world = {world} must be at least 1")


def _fitting(t: torch.Tensor) -> torch.Tensor:
    """t, or a copy with rows as tensor descriptors and cuBLAS want them; K padded with zeros.

    A copy is slow, but a rank that took another path than its peers would wait for them for ever.
    """
    rows, k = t.shape
    if rows_aligned(t) and k % 16 == 0:
        return t
    out = torch.zeros((rows, max(16, -(-k // 16) * 16)), dtype=torch.uint8, device=t.device)
    out[:, :k] = t.view(torch.uint8) if t.is_contiguous() else t.contiguous().view(torch.uint8)
    return out.view(t.dtype)


def run(
    space: Space,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
) -> torch.Tensor:
    """The fused kernels of a workspace, for benchmarks and the op."""
    x, w = _fitting(x), _fitting(w)
    if isinstance(space.config, Movers):
        return movers.launch(space, x, w, x_scale, w_scale)
    if isinstance(space.config, Rows):
        return rows.launch(space, x, w, x_scale, w_scale)[0]
    if isinstance(space.config, Specialized):
        return specialized.launch(space, x, w, x_scale, w_scale)
    if isinstance(space.config, InSwitch):
        return nvls.launch(space, x, w, x_scale, w_scale)
    return copies.launch(space, x, w, x_scale, w_scale)


def unfused(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype,
    world: int,
    group: str,
) -> torch.Tensor:
    """rtc::linear_fp8, then the group's own collective."""
    import torch.distributed as dist

    part = linear_fp8(x, w, x_scale, w_scale, None, dtype)
    if world == 1:
        return part
    pg = _resolve(group)
    if part.is_cuda:
        dist.all_reduce(part, group=pg)
        return part
    parts = [torch.empty_like(part) for _ in range(world)]
    dist.all_gather(parts, part, group=pg)
    return reference(parts, dtype)


@torch.library.custom_op("rtc::linear_all_reduce", mutates_args=())
def linear_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype,
    world: int,
    group: str,
) -> torch.Tensor:
    """world: ranks of the group named ``group``; with one, the group is not looked up."""
    _check(x, w, x_scale, w_scale, dtype, world)
    if world > 1:
        size = _resolve(group).size()
        if size != world:
            raise ValueError(
                f"linear_all_reduce: group {group!r} has {size} ranks, not the {world} of this call"
            )
        space = space_of(group, x, w, dtype)
        if space is not None:
            return run(space, x, w, x_scale, w_scale)
    return unfused(x, w, x_scale, w_scale, dtype, world, group)


@linear_all_reduce.register_fake
def _(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype,
    world: int,
    group: str,
) -> torch.Tensor:
    _check(x, w, x_scale, w_scale, dtype, world)
    return x.new_empty((x.shape[0], w.shape[0]), dtype=dtype)
