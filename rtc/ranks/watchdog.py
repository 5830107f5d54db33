"""A rank that fails or dies ends the others with a clear message, instead of a hang.

Two daemon threads per process, from the first compiled model with collectives to the last close():
one tells the store that this rank lives and reads what the others tell; the other one judges, and
touches no store, so that a store that stands still cannot stop it. A steady call only counts.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rtc.errors import RankLostError
from rtc.ranks.store import connect, within

# A call that failed on the ranks alike (bad arguments, say) is no loss: they are numbered.
_NEVER = -1
_LONGEST_GRACE = 5.0


@dataclass
class _Peer:
    beat: int = -1
    seen: float = 0.0  # on the judge's clock, when the beat last changed
    state: str = "running"
    error: str = ""
    call: int = _NEVER
    root: int = _NEVER  # the rank whose failure this rank ended with


@dataclass
class _Said:
    """What this rank tells the others."""

    state: str = "running"
    error: str = ""
    call: int = _NEVER
    root: int = _NEVER


@dataclass
class Watchdog:
    """Watches ``peers`` for as long as one model that talks to them is open.

    timeout: seconds without a sign of life after which a rank is lost. grace: seconds that a call
    may stand at one place, or the GPU's work take, once a rank is lost; then the process ends with
    exit code 1. end: how it ends (for tests).
    """

    rank: int
    timeout: float
    grace: float = _LONGEST_GRACE
    end: Callable[[int], Any] = os._exit
    peers: dict[int, _Peer] = field(default_factory=dict)
    failure: str | None = None  # what is known of a lost rank
    root: int = _NEVER  # which one that is

    def __post_init__(self) -> None:
        self.period = min(1.0, self.timeout / 4)
        self.grace = min(self.grace, self.timeout / 2)
        self.users = 0
        self.depth = self.calls = 0  # calls of models with collectives: open, and made
        self.thread = threading.get_ident()  # the one that calls
        self.failed_call = _NEVER
        self.clock = 0.0  # counts no time in which this process stood still
        self.pulsed = 0.0
        self.store_error: BaseException | None = None
        self.said = _Said()
        self.stopped, self.wake = threading.Event(), threading.Event()
        self.told: _Said | None = None  # the last word that is in the store
        self.device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.group = weakref.ref(c10d._get_default_group())
        self.pulse = threading.Thread(target=self._pulse, name="rtc-pulse", daemon=True)
        self.judge = threading.Thread(target=self._judge, name="rtc-watchdog", daemon=True)

    def start(self) -> None:
        self.pulse.start()
        self.judge.start()

    def watch(self, ranks: Iterable[int], timeout: float) -> None:
        """One more model, whose collectives these ranks take part in."""
        self.timeout = max(self.timeout, timeout)
        self.users += 1
        for r in ranks:
            self.more(r)
        self.wake.set()

    def more(self, rank: int) -> None:
        if rank != self.rank and rank not in self.peers:
            self.peers[rank] = _Peer(seen=self.clock)

    def release(self) -> None:
        """A model was closed. The last one ends the watch, and the others are told."""
        self.users -= 1
        if self.users == 0:
            self.stop(_Said("done"))

    def stop(self, last: _Said | None = None) -> None:
        """End the threads, after a last word. Idempotent; waits for moments only."""
        if self.stopped.is_set():
            return
        if last is not None:
            self.said = last
        self.stopped.set()
        self.wake.set()
        for thread in (self.pulse, self.judge):
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(2.0)
        if self.said.state == "failed":
            self._linger()

    # -- calls -------------------------------------------------------------------------------------

    def enter(self) -> None:
        """A compiled call begins. RankLostError if a rank is known to be lost."""
        if self.failure is not None and not self.stopped.is_set():
            raise RankLostError(self.failure)
        self.begin()

    def begin(self) -> None:
        self.depth += 1
        self.calls += 1
        self.thread = threading.get_ident()
        if self.said.state == "failed":  # the user caught the error and goes on
            self.said = _Said()
            self.wake.set()

    def leave(self, error: BaseException | None) -> None:
        """The call is over. RankLostError in place of the error that a dead rank caused."""
        self.depth -= 1
        if error is None:
            return
        error = getattr(error, "inner_exception", None) or error  # of a compile
        self.failed_call = self.calls
        ours = not isinstance(error, RankLostError)
        if not ours or _of_communication(error):
            # the others' sockets tell of a death at once, the store by a silence
            if ours:
                self._wait_for_failure()
            if self.failure is not None:
                self.said = _Said("failed", self.failure, self.calls, self.root)
                self.wake.set()
                if ours:
                    raise RankLostError(self.failure) from error
                return
        self.said = _Said("failed", _short(error), self.calls, self.rank)
        self.wake.set()

    def _wait_for_failure(self) -> None:
        deadline = time.monotonic() + self.timeout + 3 * self.period
        call, self.failed_call = self.failed_call, _NEVER  # any failure explains it
        fresh = self.pulsed
        while self.failure is None and time.monotonic() < deadline and self.judge.is_alive():
            ended = [r for r, p in self.peers.items() if p.state == "done"]
            if ended and self.pulsed > fresh:  # it ended well, and this rank went on without it
                break
            time.sleep(self.period / 8)
        self.failed_call = call

    # -- the pulse: all talk with the store --------------------------------------------------------

    def _pulse(self) -> None:
        try:
            store = connect()
            beat = 0
            while True:
                last = self.stopped.is_set()
                self.wake.clear()
                beat += 1
                said = self.said
                store.set(_key(self.rank), json.dumps({"beat": beat, **vars(said)}))
                self.told = said
                if last:
                    return
                for rank, peer in list(self.peers.items()):
                    if store.check([_key(rank)]):
                        self._read(peer, json.loads(store.get(_key(rank))))
                self.pulsed = self.clock
                self.wake.wait(self.period)
        except Exception as e:
            self.store_error = e

    def _read(self, peer: _Peer, said: dict[str, Any]) -> None:
        if said["beat"] != peer.beat:
            peer.beat, peer.seen = said["beat"], self.clock
        peer.error, peer.call, peer.root = said["error"], said["call"], said["root"]
        peer.state = said["state"]

    # -- the judge: no store -----------------------------------------------------------------------

    def _judge(self) -> None:
        tick = self.period / 2
        before = time.monotonic()
        held, since = None, 0.0  # where the open call stands, since a rank was lost
        work: _Work | None = None
        while not self.stopped.wait(tick):
            now = time.monotonic()
            self.clock += min(now - before, 2 * tick)
            before = now
            if not self._group_lives():  # the user destroyed it: nobody to wait for
                self.failure, self.root = None, _NEVER
                self.stopped.set()
                self.wake.set()
                return
            found = self._verdict()
            self.failure, self.root = (None, _NEVER) if found is None else found
            if found is None:
                held, work = None, None
                continue
            stands = self._stands()
            if stands != held:  # it moves: a compile, say
                held, since = stands, self.clock
            if work is None or (work.done and work.in_call):  # a call goes on giving work
                work = _Work(self.device, stands is not None, self.clock)
            hangs = held is not None and self.clock - since >= self.grace
            if hangs or (not work.done and self.clock - work.began >= self.grace):
                self._end(found)
                return

    def _stands(self) -> tuple[int, int, int] | None:
        """Where the open call stands in Python: it stays there while a collective waits."""
        frame = sys._current_frames().get(self.thread) if self.depth > 0 else None
        return None if frame is None else (self.calls, id(frame), frame.f_lasti)

    def _group_lives(self) -> bool:
        return dist.is_initialized() and self.group() is c10d._get_default_group()

    def _verdict(self) -> tuple[str, int] | None:
        """(message, rank) of the first rank that is lost."""
        peers = sorted(self.peers.items())
        for rank, p in peers:
            if p.state == "failed" and (p.call == _NEVER or p.call != self.failed_call):
                if p.root in (self.rank, rank) or p.root == _NEVER:
                    return f"rank {rank} failed: {p.error}. Its own output tells more.", rank
                return p.error, p.root
        host = self.peers.get(0)
        if self.store_error is not None:
            # who hosts it may have ended well, and then nobody can be watched any more
            if host is None or host.state == "done":
                return None
            return (
                f"rank 0 is lost, or the launcher: the store that it hosts is gone "
                f"({_short(self.store_error)}). Start all ranks again.",
                0,
            )
        if self.clock - self.pulsed > self.timeout + 2 * self.period:
            return (
                f"the store of the process group has not answered for {self.timeout:g} s: rank 0, "
                "or the launcher that hosts it, hangs or is cut off. Start all ranks again.",
                0,
            )
        for rank, p in peers:
            # as of the last time the store was read
            if p.state != "done" and self.pulsed - p.seen > self.timeout:
                return (
                    f"rank {rank} is lost: no sign of life for {self.timeout:g} s (killed, hung or "
                    "cut off). See its own output, and start all ranks again.",
                    rank,
                )
        return None

    def _end(self, found: tuple[str, int]) -> None:
        text, root = found
        with contextlib.suppress(OSError):
            os.write(2, f"rtc: rank {self.rank}: {text}\n".encode())
        self.said = _Said("failed", text, _NEVER, root)
        self.wake.set()
        self._linger()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                within(1.0, stream.flush)
        self.end(1)

    def _linger(self) -> None:
        """Until the last word is in the store, and until the others have read it where the store
        may end with this process. Moments; a second or two at most."""
        deadline = time.monotonic() + 1.0
        while self.told is not self.said and time.monotonic() < deadline:
            if not self.pulse.is_alive():
                return
            time.sleep(0.01)
        if self.rank == 0 and self.said.state == "failed":
            time.sleep(1.5 * self.period)


_current: Watchdog | None = None
_lock = threading.Lock()


def watch(ranks: Iterable[int], timeout: float) -> Watchdog:
    """The watchdog of this process, started if there is none, with one more model to serve."""
    global _current
    with _lock:
        if _current is None or _current.stopped.is_set() or not _current.judge.is_alive():
            if _current is None:
                atexit.register(farewell, os.getpid())
            _current = Watchdog(dist.get_rank(), timeout)
            _current.watch(ranks, timeout)
            _current.start()
        else:
            _current.watch(ranks, timeout)
        return _current


def farewell(pid: int | None = None) -> None:
    """A last word to the others, when this process ends.

    At exit, since threads must not be inside the store when the interpreter goes.
    """
    if _current is None or os.getpid() != (pid or os.getpid()):  # a forked child has no threads
        return
    error = getattr(sys, "last_value", None)  # set when an exception ended the program
    if _current.said.state == "failed":
        _current.stop()
    elif error is not None and not hasattr(sys, "ps1"):
        _current.stop(_Said("failed", _short(error), _NEVER, _current.rank))
    else:
        _current.stop(_Said("done"))


class _Work:
    """What the GPU had been given when this was made: ``done`` at once without a GPU.

    A collective that waits for a dead rank never ends on the GPU, wherever the host may be by then.
    The driver may block whoever asks, hence a thread.
    """

    def __init__(self, device: int | None, in_call: bool, began: float) -> None:
        self.in_call, self.began = in_call, began
        self.done = device is None
        if device is not None:
            args = (device,)
            threading.Thread(target=self._wait, args=args, name="rtc-gpu", daemon=True).start()

    def _wait(self, device: int) -> None:
        # an error of the device reaches the main thread by itself
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)
        self.done = True


def _of_communication(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket")
    return isinstance(error, RuntimeError) and any(w in str(error).lower() for w in words)


def _key(rank: int) -> str:
    return f"rtc/life/{rank}"


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


__all__ = ["Watchdog", "farewell", "watch"]
