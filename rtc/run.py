"""``rtc run TARGET``: compile a target and time its steps, alone or as one of several ranks.

Started by torchrun (or anything that sets RANK, WORLD_SIZE and LOCAL_RANK), every process is a rank
with a GPU of its own where there are GPUs.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import rtc
from rtc import target
from rtc.demo.stats import quantile
from rtc.errors import OptionsError, RankLostError, RtcError
from rtc.options import Options
from rtc.ranks import exchange
from rtc.ranks.store import within
from rtc.ranks.watchdog import farewell

WARM = 3  # calls that compile, warm up and capture: not timed
# Arguments of these names count the steps.
COUNTERS = (
    "step", "step_index", "step_idx", "chunk", "chunk_index", "chunk_idx", "i",
)  # fmt: skip


class RunError(RtcError):
    """The model did not run; one line that says on which rank, what and where."""


@dataclass(frozen=True)
class Place:
    """This process among the ranks. ``device``: its own."""

    rank: int
    world: int
    device: torch.device


def place(device: str | None) -> Place:
    """From the environment. ``device``: None for a GPU where there is one. OptionsError."""
    rank, world, local = (
        _number(n, d) for n, d in (("RANK", None), ("WORLD_SIZE", 1), ("LOCAL_RANK", None))
    )
    world = world or 1
    if world > 1 and rank is None:
        raise OptionsError("WORLD_SIZE is set, but not RANK: start it with torchrun")
    rank = rank or 0
    local = rank if local is None else local
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise OptionsError(f"--device {kind!r}: cpu or cuda")
    if kind == "cpu":
        return Place(rank, world, torch.device("cpu"))
    have = torch.cuda.device_count()
    if not have:
        raise OptionsError("--device cuda: torch sees no CUDA GPU here; use --device cpu")
    local = local if world > 1 else 0
    if local >= have:
        raise OptionsError(
            f"process {local} of this machine has no GPU of its own: there are {have}. Start at "
            f"most {have} here, or use --device cpu"
        )
    return Place(rank, world, torch.device("cuda", local))


def _number(name: str, default: int | None) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdigit():
        raise OptionsError(f"{name}={text!r} in the environment is no number")
    return int(text)


@contextlib.contextmanager
def group(here: Place, seconds: float) -> Iterator[None]:
    """The default process group around a run; nothing for a single process."""
    if here.device.type == "cuda":
        torch.cuda.set_device(here.device)
    if here.world < 2:
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if here.device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    except (dist.DistError, RuntimeError, ValueError) as e:
        raise RunError(f"no process group of {here.world} ranks came up: {_short(e)}") from e
    try:
        yield
    finally:
        if sys.exc_info()[0] is None:  # else others may never come to the end of it
            within(30.0, dist.destroy_process_group)


def leave(here: Place, code: int) -> int:
    """The end of a rank that failed: it tells the others, and waits for nobody."""
    if here.world > 1:
        farewell()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def run(
    name: str, here: Place, options: Options, steps: int, seconds: float,
    advance: Mapping[str, int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Load the target, compile it, run it: what was measured on all ranks (complete on rank 0).

    ``advance``: int arguments -> what they grow by in each call; None: those called like a counter
    of steps, by one. ``seconds``: how long ranks may take to load and to finish. TargetError for a
    target that cannot be used on some rank, OptionsError, RunError.
    """
    made, error = None, None
    try:
        made = target.load(name, {"rank": here.rank, "world": here.world})
    except target.TargetError as e:
        error = str(e)
    _all_loaded(here, error, seconds)
    assert made is not None
    model, args, kwargs = _placed(made, here)
    calls = _Calls(model, args, kwargs, advance)
    compiled = rtc.compile(model, options=options)
    try:
        times = _timed(compiled, calls, here, WARM + steps)
        report = compiled.report().to_dict()
    finally:
        with contextlib.suppress(Exception):
            compiled.close()
    ms = [1e3 * t for t in times[WARM:]]
    row = {
        "rank": here.rank, "device": _device_name(here.device),
        "median_ms": quantile(ms, 0.5), "p95_ms": quantile(ms, 0.95), "min_ms": min(ms),
        "first_call_s": times[0], "peak_memory_bytes": _peak(here.device),
    }  # fmt: skip
    return {
        "target": name, "world": here.world, "steps": steps, "warm_up": WARM,
        "advanced": calls.advance, "ranks": _gathered("rtc/run/done", row, here, seconds),
        "report": report,
    }  # fmt: skip


def _all_loaded(here: Place, error: str | None, seconds: float) -> None:
    """TargetError where a rank could not load the target: the same on all ranks."""
    errors = _gathered("rtc/run/loaded", error, here, seconds)
    if not any(errors):
        return
    if here.world < 2 or len({*errors}) == 1:
        raise target.TargetError(next(e for e in errors if e))
    said = "; ".join(f"rank {r}: {e}" for r, e in enumerate(errors) if e)
    raise target.TargetError(f"the target did not load everywhere: {said}")


def _gathered(key: str, value: Any, here: Place, seconds: float) -> list[Any]:
    if here.world < 2:
        return [value]
    found = exchange(key, value, range(here.world), seconds)
    missing = [str(r) for r in range(here.world) if r not in found]
    if missing:
        raise RankLostError(f"rank {', '.join(missing)} did not come within {seconds:g} s")
    return [found[r] for r in range(here.world)]


def _placed(made: target.Target, here: Place) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Model and arguments on this rank's device; what is on a GPU already stays there."""

    def moved(x: Any) -> Any:
        on_cpu = isinstance(x, torch.Tensor) and x.device.type == "cpu"
        return x.to(here.device) if on_cpu else x

    model = made.model
    if isinstance(model, torch.nn.Module):
        state = [*model.parameters(), *model.buffers()]
        if state and all(t.device.type == "cpu" for t in state) and here.device.type != "cpu":
            model = model.to(here.device)
        model = model.eval()
    args, kwargs = pytree.tree_map(moved, (made.args, made.kwargs))
    return model, args, kwargs


class _Calls:
    """The arguments of each call: those of the target, with its counters advanced."""

    def __init__(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        advance: Mapping[str, int] | None,
    ) -> None:  # fmt: skip
        fn = model.forward if isinstance(model, torch.nn.Module) else model
        try:
            self.bound = inspect.signature(fn).bind(*args, **kwargs)
        except (TypeError, ValueError) as e:
            raise OptionsError(f"the target's arguments do not fit its model: {e}") from e
        ints = {
            k: v
            for k, v in self.bound.arguments.items()
            if isinstance(v, int) and not isinstance(v, bool)
        }
        if advance is None:
            advance = {n: 1 for n in ints if n in COUNTERS}
        unknown = sorted(set(advance) - set(ints))
        if unknown:
            has = f"has {', '.join(ints)}" if ints else "has none"
            raise OptionsError(f"--advance {unknown[0]}: no int argument of the model; it {has}")
        self.first, self.advance = ints, dict(advance)

    def __getitem__(self, call: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for name, by in self.advance.items():
            self.bound.arguments[name] = self.first[name] + call * by
        return self.bound.args, self.bound.kwargs


def _timed(compiled: Callable[..., Any], calls: _Calls, here: Place, count: int) -> list[float]:
    """Seconds of each call, the device's work included. RunError."""
    cuda = here.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(here.device)
    out = []
    for i in range(count):
        args, kwargs = calls[i]
        start = time.perf_counter()
        try:
            with torch.no_grad():
                compiled(*args, **kwargs)
            if cuda:
                torch.cuda.synchronize(here.device)
        except RtcError:
            raise
        except Exception as e:
            said = target.capture_problem(e) if "from user code" in str(e) else _short(e) + _at(e)
            raise RunError(f"call {i} failed: {said}") from e
        out.append(time.perf_counter() - start)
    return out


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _peak(device: torch.device) -> int:
    """Bytes: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _short(e: BaseException) -> str:
    text = str(e).strip().splitlines()
    return f"{type(e).__name__}: {text[0]}" if text else type(e).__name__


def _at(e: BaseException) -> str:
    """The last line of the traceback that is neither torch's nor rtc's own."""
    ours: Sequence[Path] = (Path(torch.__file__).parent, Path(__file__).parent)
    for frame in reversed(traceback.extract_tb(e.__traceback__)):
        if not any(Path(frame.filename).is_relative_to(o) for o in ours):
            return f" ({frame.filename}:{frame.lineno} in {frame.name})"
    return ""
