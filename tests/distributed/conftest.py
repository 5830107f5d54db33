"""`run_ranks(fn, world)`: a function on several ranks, over Gloo on the CPU.

Ranks are processes of their own, forked from a server that imported torch and rtc once: a run
costs a fraction of a second, not an import of torch a rank. They meet through a file, so no port
is taken. Whatever happens, they are dead when `run_ranks` returns.
"""

# mypy: no-check-untyped-defs, allow-untyped-defs

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.util
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "rtc"])


class RankFailed(AssertionError):
    """A rank raised, died or did not come back in time; the message has its traceback."""


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0, **kwargs: Any
) -> list[Any]:
    """`fn(*args, **kwargs)` on ranks 0 to world - 1 of a default Gloo group: results in order.

    `fn` is a function at the top of a module; what goes in and comes out is pickled. Inside it,
    `torch.distributed.get_rank()` tells the ranks apart. Raises RankFailed for the first rank
    that fails; after `timeout` seconds all ranks are killed and it tells where each one stood.
    """
    if str(ROOT) not in sys.path:  # the ranks import the module of `fn` by its name
        sys.path.append(str(ROOT))
    with tempfile.TemporaryDirectory(prefix="rtc-ranks-") as folder:
        # by value: multiprocessing's own way shares tensors with a process that may be gone
        call = pickle.dumps((fn, args, kwargs))
        ranks, ends = [], {}
        for rank in range(world):
            ours, theirs = _server.Pipe(duplex=False)
            job = (rank, world, folder, timeout, theirs, call)
            process = _server.Process(target=_rank, args=job, daemon=True)
            process.start()
            theirs.close()
            ranks.append(process)
            ends[ours] = rank
        try:
            return _collect(ends, world, time.monotonic() + timeout + 3, Path(folder))
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()


def _collect(ends: dict[Any, int], world: int, deadline: float, folder: Path) -> list[Any]:
    results: dict[int, Any] = {}
    while ends:
        ready = wait(list(ends), max(0.0, deadline - time.monotonic()))
        if not ready:
            where = "\n".join(
                f"-- rank {r}:\n{(folder / f'stack{r}').read_text()}" for r in ends.values()
            )
            raise RankFailed(f"ranks {sorted(ends.values())} of {world} hang\n{where}")
        for end in ready:
            rank = ends.pop(end)
            try:
                failed, value = pickle.loads(end.recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} of {world} died without a word") from None
            if failed:
                raise RankFailed(f"rank {rank} of {world}:\n{value}")
            results[rank] = value
    return [results[r] for r in range(world)]


def _rank(rank, world, folder, timeout, end, call):
    """In a rank's process: join the group, run, send (failed, result or traceback)."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    stack = open(Path(folder) / f"stack{rank}", "w")  # noqa: SIM115  open as long as the process
    faulthandler.dump_traceback_later(timeout, file=stack)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        store = dist.FileStore(f"{folder}/store", world)
        wait_for = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait_for)
        fn, args, kwargs = pickle.loads(call)
        end.send_bytes(pickle.dumps((False, fn(*args, **kwargs))))
        with contextlib.suppress(RuntimeError):  # a peer may have failed by now
            dist.barrier()
    except BaseException:
        end.send_bytes(pickle.dumps((True, traceback.format_exc())))
    end.close()
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]
    os._exit(0)  # not through the group's teardown, which waits for peers


@pytest.fixture(name="run_ranks")
def _run_ranks():
    return run_ranks
