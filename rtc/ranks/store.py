"""The process group's key-value store, used so that no wait is without a bound."""

from __future__ import annotations

import hashlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

T = TypeVar("T")

# Seconds that an operation on a store may take that does not wait for another rank.
ANSWER = 10.0


class NoAnswer(Exception):
    """The store did not answer in time: its host, or the way there, is gone."""


@dataclass(frozen=True)
class Party:
    """The ranks of one process group, by their numbers in the default group, in group order."""

    name: str
    ranks: tuple[int, ...]

    @property
    def key(self) -> str:
        """Where the ranks of this group meet in the store: the same on all of them."""
        members = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:8]
        return f"rtc/{self.name}/{members}"


def party(group: Any) -> Party | None:
    """Of a process group or its name; None where there is nobody to agree with.

    Raises ValueError where no group has this name here.
    """
    if not dist.is_initialized():
        return None
    found = _named(group) if isinstance(group, str) else group
    ranks = tuple(dist.get_process_group_ranks(found))
    # backends for tests: one process plays one rank, or all
    if len(ranks) < 2 or dist.get_backend(found) in ("fake", "threaded"):
        return None
    return Party(str(found.group_name), ranks)


def _named(name: Any) -> Any:
    return c10d._resolve_process_group(name)  # type: ignore[attr-defined]


def connect() -> Any:
    """The default store over a connection of one's own; holds no server alive.

    A TCPStore's connection serves one operation at a time, and a collective's setup may wait on it
    for minutes: heartbeats would stop meanwhile, and the living would look dead.
    """
    store: Any = c10d._get_default_store()
    base = store
    while isinstance(base, dist.PrefixStore):  # type: ignore[attr-defined]
        base = base.underlying_store
    own = isinstance(base, dist.TCPStore) and hasattr(store, "clone")  # type: ignore[attr-defined]
    return store.clone() if own else store


def within(seconds: float, fn: Callable[[], T]) -> T:
    """``fn()`` on a thread of its own. NoAnswer after ``seconds``; the thread is left behind.

    Most operations of a store have no timeout: with a host that stands still they never return.
    """
    out: list[Any] = []

    def work() -> None:
        try:
            out.append((True, fn()))
        except BaseException as e:
            out.append((False, e))

    thread = threading.Thread(target=work, name="rtc-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if not out:
        raise NoAnswer(f"the store gave no answer within {seconds:g} s")
    fine, value = out[0]
    if not fine:
        raise value
    return value


def exchange(
    key: str, value: Any, ranks: Sequence[int], seconds: float,
    stop: Callable[[], bool] = lambda: False,
) -> dict[int, Any]:  # fmt: skip
    """Every rank's ``value`` (JSON), as far as it came within ``seconds``: rank -> value.

    ``key`` is new to the store, and the same on all ranks. ``stop()``: give up waiting. Raises
    NoAnswer, or an error of torch.distributed, where the store itself is gone.
    """
    me = dist.get_rank()
    late = threading.Event()

    def talk() -> dict[int, Any]:
        store = connect()
        packed = json.dumps(value, default=str).encode()
        store.set(f"{key}/{me}", zlib.compress(packed))
        found = {me: json.loads(packed)}

        def come() -> bool:
            for r in [r for r in ranks if r not in found and store.check([f"{key}/{r}"])]:
                # there already: this does not wait
                found[r] = json.loads(zlib.decompress(store.get(f"{key}/{r}")))
            return len(found) == len(ranks)

        if not _until(come, seconds, lambda: stop() or late.is_set()):
            store.set(f"{key}/gone/{me}", "1")  # who comes later does not count on this rank
            return found
        gone = [r for r in ranks if store.check([f"{key}/gone/{r}"])]
        store.set(f"{key}/read/{me}", "1")
        if me == 0:  # the store may end with this process: not before all have read
            read = [f"{key}/read/{r}" for r in ranks if r not in gone]
            _until(lambda: bool(store.check(read)), ANSWER / 2, late.is_set)
        return {r: v for r, v in found.items() if r not in gone}

    try:
        return within(seconds + ANSWER, talk)
    finally:
        late.set()


def _until(ready: Callable[[], bool], seconds: float, stop: Callable[[], bool]) -> bool:
    """Ask ``ready()`` again and again: never a wait in the store, which would have no end."""
    deadline, pause = time.monotonic() + seconds, 0.002
    while not ready():
        if stop() or time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def is_gone(error: BaseException) -> bool:
    """Whether an error says that the store's host is gone."""
    return isinstance(error, (NoAnswer, dist.DistError, RuntimeError, OSError))
