"""Ranks agree before their first collective, and a dead one ends the others with clear words."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import atexit
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import rtc
from rtc import settle
from rtc.ranks import Ranks, watchdog
from rtc.ranks.agree import difference
from rtc.ranks.watchdog import Watchdog, _Peer, watch

from .conftest import _server as server
from .conftest import run_ranks

TIMEOUT = 2.5  # seconds after which a rank is lost, where one is


class Sum(nn.Module):
    """A layer whose hidden part is spread over the ranks, and one whole one."""

    def __init__(self, hidden=6, layers=1, group=None):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(4, hidden) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(hidden, 4) for _ in range(layers))
        self.group = group or dist.group.WORLD
        self.fails_at = None

    def forward(self, x, step):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + funcol.all_reduce(down(up(x).relu()), "sum", self.group)
        return x + step


def compiled(model=None, **options):
    # not so short that a busy machine looks like a missing rank
    options = {"lowering": "eager", "rank_timeout_s": 30.0, **options}
    return rtc.compile((model or Sum()).eval(), options=rtc.Options(**options))


def error_of(call):
    """(class name, text, seconds) of what a call raised."""
    started = time.monotonic()
    try:
        call()
    except BaseException as e:
        return type(e).__name__, str(e), time.monotonic() - started
    return "", "", time.monotonic() - started


# -- ranks that disagree ---------------------------------------------------------------------------


def disagree():
    """Each difference in turn: (what, error) of this rank; and then a session that is fine."""
    rank, x = dist.get_rank(), torch.ones(3, 4)

    def run(model=None, x=x, step=1, **options):
        with compiled(model, **options) as made:
            return error_of(lambda: made(x, step=step))

    out = {
        "options": run(hoist_rope=rank != 1, ring_cache=rank != 1),
        "arguments": run(x=torch.ones(3 + rank, 4)),
        "numbers": run(step=5 if rank == 1 else 4),
        "parameters": run(Sum(hidden=6 + rank)),
        "layers": run(Sum(layers=1 + rank // 2)),
        "uneven": run(Sum(hidden=6 + rank), rank_check="collectives"),
    }
    torch.manual_seed(0)
    eager = Sum().eval()
    model = compiled(eager)
    with torch.no_grad():
        wrong = max((model(x, i) - eager(x, i)).abs().max().item() for i in range(4))
    dog = model._compiler.ranks.dog
    model.close()
    model.close()
    return out, wrong, dog.said.state, [dog.pulse.is_alive(), dog.judge.is_alive()]


def test_ranks_that_disagree_are_told() -> None:
    results = run_ranks(disagree, 3, timeout=60)
    for out, _, _, _ in results:
        for name in ("options", "arguments", "numbers", "parameters", "layers"):
            assert out[name][0] == "RanksDisagreeError", (name, out[name])
            # all ranks say the same
            assert out[name][1] == results[0][0][name][1]
    told = {name: e[1] for name, e in results[0][0].items()}
    says = "on options.hoist_rope: true on ranks 0, 2; false on rank 1."
    assert says in told["options"]
    assert "same rtc.Options" in told["options"]
    assert "arguments.x: " in told["arguments"]
    assert '"float32[4, 4]" on rank 1; "float32[5, 4]" on rank 2' in told["arguments"]
    assert "numbers.step: 4 on ranks 0, 2; 5 on rank 1." in told["numbers"]
    assert "rank_check='collectives'" in told["parameters"]
    assert '"float32[6, 4]" on rank 0; "float32[7, 4]" on rank 1' in told["parameters"]
    assert "on ranks 0, 1; " in told["layers"]
    assert told["uneven"] == ""
    for _, wrong, state, threads in results:
        assert wrong < 1e-6
        assert state == "done"
        assert threads == [False, False]


class Growing(nn.Module):
    """A window of numbers, of another length on rank 1, whose sizes never change there."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(1, 40, 4))

    def forward(self, x, end):
        t = self.table[:, : end if dist.get_rank() == 0 else 5]
        return x + funcol.all_reduce((x @ t.mT).softmax(-1) @ t, "sum", dist.group.WORLD) + end


def growing():
    settle._WAIT = 4
    model = compiled(Growing(), lowering="inductor", rank_check="collectives")
    with torch.no_grad():
        for i in range(10):
            model(torch.ones(1, 3, 4), 7 + i)
    graphs = model.report().to_dict()["graphs"]
    model.close()
    return len(graphs), [n for g in graphs for n in g["notes"] if "op by op" in n]


def test_ranks_do_not_wait_for_sizes_and_trace_again_alone() -> None:
    assert run_ranks(growing, 2, timeout=120) == [(1, []), (1, [])]


def through_torch_compile():
    """The ecosystem's way in comes through the same door."""
    torch._dynamo.reset()
    options = {"lowering": "eager", "rank_timeout_s": 30.0}
    rank, x = dist.get_rank(), torch.ones(3, 4)
    wrong = torch.compile(Sum(hidden=6 + rank).eval(), backend="rtc", options=options)
    with torch.no_grad():
        error = error_of(lambda: wrong(x, 1))[1]
        torch.manual_seed(0)
        right = Sum().eval()
        fine = torch.compile(right, backend="rtc", options=options)
        far = (fine(x, 1) - right(x, 1)).abs().max().item()
    dog = watchdog._current
    return error, far, dog.calls, dog.depth


def test_torch_compile_agrees_too() -> None:
    for error, far, calls, depth in run_ranks(through_torch_compile, 2, timeout=60):
        assert "the ranks disagree on parameters" in error
        assert far < 1e-6
        assert (calls, depth) == (1, 0)


def test_the_first_difference_is_named() -> None:
    a = {"rtc": "1", "options": {"a": 1, "b": {"c": 2}}, "operations": ["x", "y"]}
    assert difference({0: a, 1: a}) is None
    b = {**a, "options": {"a": 1, "b": {"c": 3}}, "operations": ["x"]}
    assert "options.b.c: 2 on rank 0; 3 on ranks 1, 2." in str(difference({0: a, 1: b, 2: b}))
    c = {**a, "operations": ["x"]}
    text = str(difference({0: a, 1: c}))
    assert 'operations[1]: "y" on rank 0; nothing on rank 1.' in text
    assert "rank_check" in text
    assert 'rtc: "1" on rank 0; "2" on rank 1.' in str(difference({0: a, 1: {**b, "rtc": "2"}}))


# -- ranks that are missing or fail ----------------------------------------------------------------


def subgroup():
    """A group of ranks 1 and 2 alone: they agree, whatever rank 0 does."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return ""
    with compiled(Sum(group=group)) as model:
        out = error_of(lambda: model(torch.ones(3, 4), 1))[1]
        assert set(model._compiler.ranks.dog.peers) == {3 - dist.get_rank()}
    return out


def missing():
    x = torch.ones(3, 4)
    inside = subgroup()
    compiled()(x, 1)  # what is traced for the first time takes long
    late = None
    if dist.get_rank() != 2:
        late = error_of(lambda: compiled(rank_timeout_s=TIMEOUT)(x, 1))
    return inside, late


def test_a_missing_rank_is_named() -> None:
    results = run_ranks(missing, 3, timeout=60)
    assert [r[0] for r in results] == ["", "", ""]
    for _, late in results[:2]:
        name, text, seconds = late
        assert name == "RankLostError"
        assert "rank 2 did not come to compile this model within 2.5 s" in text
        assert "ranks 0, 1 did" in text
        assert seconds >= TIMEOUT


def goes_on_after_an_error_on_all():
    """Bad arguments on every rank: each gets its error, and the session goes on."""
    x = torch.ones(3, 4)
    with compiled(rank_timeout_s=TIMEOUT) as model:
        first = error_of(lambda: model(x, 1))
        wrong = error_of(lambda: model(torch.ones(3, 5), 1))
        time.sleep(TIMEOUT)  # the watchdogs hear of it
        after = error_of(lambda: model(x, 2))
    return first[0], wrong[0], after


def test_an_error_on_all_ranks_is_no_loss() -> None:
    for first, wrong, after in run_ranks(goes_on_after_an_error_on_all, 2, timeout=60):
        assert first == ""
        assert wrong != ""
        assert after[:2] == ("", "")


# -- processes that end ----------------------------------------------------------------------------


class Uncompiled:
    """Calls as a compiled model makes them, without the seconds of a compile."""

    def __init__(self) -> None:
        self.ranks = Ranks()
        self.ranks.dog = watch(range(dist.get_world_size()), TIMEOUT)

    def __call__(self, x, step):
        with self.ranks:
            dist.all_reduce(x @ torch.ones(4, 4))

    def close(self) -> None:
        self.ranks.close()


def in_a_process(rank: int, world: int, port: int, folder: str, play, real: bool) -> None:
    """A session of a few calls, then ``play(rank, call)``; ends as a program of its own would."""
    out = os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="FATAL")
    torch.set_num_threads(1)
    wait = timedelta(seconds=60)
    try:
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=wait)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)
        del store
        model = compiled(rank_timeout_s=30.0) if real else Uncompiled()
        model(torch.ones(3, 4), 0)
        if real:
            model._compiler.ranks.dog.timeout = TIMEOUT  # only now: compiling may take longer
        model(torch.ones(3, 4), 1)
        print("started", flush=True)
        play(rank, model)
        code = 0
    except Exception as e:
        traceback.print_exc()
        sys.last_value, code = e, 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_processes(play, world=2, send=None, real=False) -> list[tuple[int | None, str]]:
    """(exit code, all output) of each rank. ``send``: (rank, signal) once all have started; a
    stopped process is killed when the others have ended."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="rtc-ends-") as folder:
        files = [Path(folder) / str(r) for r in range(world)]
        ranks = [
            server.Process(
                target=in_a_process, args=(r, world, port, folder, play, real), daemon=True
            )
            for r in range(world)
        ]  # fmt: skip
        for p in ranks:
            p.start()
        deadline = time.monotonic() + 60
        try:
            while not all(f.exists() and "started" in f.read_text() for f in files):
                assert time.monotonic() < deadline, [f.read_text() for f in files if f.exists()]
                assert all(p.is_alive() for p in ranks), [f.read_text() for f in files]
                time.sleep(0.05)
            victim = None
            if send is not None:
                victim, number = send
                time.sleep(0.5)  # the others are in their collective by now
                os.kill(ranks[victim].pid, number)
            for r, p in enumerate(ranks):
                if r != victim:
                    p.join(max(0.0, deadline - time.monotonic()))
            ended = [p.exitcode for p in ranks]
            return [(code, f.read_text()) for code, f in zip(ended, files, strict=True)]
        finally:
            for p in ranks:
                p.kill()
                p.join()


def others_wait(rank, model):
    """The highest rank does not come; the others wait for it in a collective."""
    if rank == dist.get_world_size() - 1:
        time.sleep(1000)
    model(torch.ones(3, 4), 2)


def lowest_does_not_come(rank, model):
    if rank == 0:
        time.sleep(1000)
    model(torch.ones(3, 4), 2)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_a_killed_rank_is_named_by_all_others() -> None:
    ended = run_processes(others_wait, world=3, send=(2, signal.SIGKILL), real=True)
    for code, text in ended[:2]:
        assert code == 1
        assert "RankLostError: rank 2 is lost: no sign of life for 2.5 s" in last_line(text)


def test_a_rank_that_stands_still_ends_who_waits_for_it() -> None:
    """Its sockets stay open: the other one hangs in the collective, and is ended."""
    (code, text), _ = run_processes(others_wait, send=(1, signal.SIGSTOP))
    assert code == 1
    assert last_line(text).startswith("rtc: rank 0: rank 1 is lost: no sign of life for 2.5 s")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_host_of_the_store_may_be_the_dead_one(number) -> None:
    _, (code, text) = run_processes(lowest_does_not_come, send=(0, number))
    assert code == 1
    says = "the store that it hosts is gone"
    if number == signal.SIGSTOP:
        says = "the store of the process group has not answered for 2.5 s: rank 0"
    assert says in last_line(text), text


def raises_in_a_call(rank, model):
    if rank == 1:
        name, _, _ = error_of(lambda: model(torch.ones(3, 5), 2))
        print(name)
        time.sleep(1000)
    model(torch.ones(3, 4), 2)


def test_a_rank_that_raises_in_a_call_ends_the_others() -> None:
    (code, text), _ = run_processes(raises_in_a_call, send=(1, signal.SIGCONT))
    assert code == 1
    assert last_line(text).startswith("rtc: rank 0: rank 1 failed: ")
    assert "Error" in last_line(text)


def raises_outside(rank, model):
    if rank == 1:
        raise LookupError("no frames left")
    time.sleep(1.5)  # in Python: told at the next call
    model(torch.ones(3, 4), 2)


def test_an_exception_outside_of_a_call_is_told_too() -> None:
    (code, text), (other, _) = run_processes(raises_outside)
    assert (code, other) == (1, 1)
    assert "RankLostError: rank 1 failed: LookupError: no frames left" in last_line(text)


def ends_early(rank, model):
    if rank == 0:
        time.sleep(TIMEOUT + 1)  # goes on alone, without a collective; and then with one
        print(error_of(lambda: model(torch.ones(3, 4), 2))[0])
    elif rank == 1:
        model.close()


def test_a_rank_that_ends_well_is_no_loss() -> None:
    ended = run_processes(ends_early, world=2)
    assert ended == [(0, "started\nRuntimeError\n"), (0, "started\n")]


def test_a_process_that_stood_still_blames_nobody() -> None:
    """After a pause of this process, the others' signs of life are as old as the pause."""
    dog = Watchdog.__new__(Watchdog)
    dog.timeout, dog.period = 1.0, 0.25
    dog.peers = {1: _Peer(beat=3, seen=5.0)}
    dog.failed_call, dog.store_error, dog.rank = -1, None, 0
    dog.clock = dog.pulsed = 5.5
    assert dog._verdict() is None
    dog.clock = 6.4  # nothing read since: the rank may have told
    assert dog._verdict() is None
    dog.clock = dog.pulsed = 6.4
    assert "rank 1 is lost" in str(dog._verdict())
