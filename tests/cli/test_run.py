"""``rtc run TARGET``: alone in this process, and two ranks as torchrun starts them."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rtc import cli
from rtc.run import WARM

MODEL = """\
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

torch.set_num_threads(1)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x, step, start=0):
        x = self.down(self.up(x).relu())
        if dist.is_initialized():
            x = funcol.all_reduce(x, "sum", dist.group.WORLD)
        return x + step + start


def alone():
    print("on stdout")
    return Sum(), (torch.ones(3, 4), 7)


def counts():
    return Sum(), (torch.ones(3, 4), 7), {"start": 10}


def no_loop():
    return lambda x: (_ for _ in ()).throw(KeyError("no frames")), (torch.ones(3),)


def ranks(rank, world):
    assert dist.get_rank() == rank and dist.get_world_size() == world == 2
    return Sum(), (torch.ones(3, 4), 7)


def disagrees(rank):
    return Sum(), (torch.ones(3 + rank, 4), 7)


def one_raises(rank):
    if rank == 1:
        raise FileNotFoundError("no weights")
    return Sum(), (torch.ones(3, 4), 7)

"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    file = tmp_path / "run_model.py"
    file.write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield file
    sys.modules.pop("run_model", None)


FAST = ["--lowering", "eager", "--device", "cpu", "--steps", "4"]


def test_one_process_prints_a_table(model, capsys) -> None:
    assert cli.main(["run", f"{model}:alone", *FAST]) == 0
    captured = capsys.readouterr()
    head, columns, row, *rest = captured.out.splitlines()
    assert head == f"{model}:alone: 4 steps (step by 1 a step)"
    assert columns.split()[:4] == ["rank", "device", "median", "ms"]
    assert row.split()[:2] == ["0", "cpu"]
    assert rest[-1] == f"{WARM + 4} calls, 0 on the plain path"
    assert "on stdout" in captured.err


def test_json_is_one_document(model, capsys) -> None:
    advance = ["--advance", "start=21", "--advance", "step"]
    assert cli.main(["run", f"{model}:counts", "--json", *FAST, *advance]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["advanced"] == {"start": 21, "step": 1}
    (row,) = result["ranks"]
    assert 0 < row["min_ms"] <= row["median_ms"] <= row["p95_ms"]
    assert row["first_call_s"] > 0
    assert row["peak_memory_bytes"] > 1e6
    assert result["report"]["runtime"]["calls"] == WARM + 4
    assert len(result["report"]["graphs"]) == 1, "the counters stay symbolic"


def test_the_passes_are_told(capsys, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["run", "rtc.demo:tiny", "--no-ring-cache", "--no-hoist-rope", *FAST]) == 0
    out = capsys.readouterr().out
    assert "hoist_rope" not in out
    assert "ring_cache" not in out
    assert cli.main(["run", "rtc.demo:tiny", *FAST]) == 0
    assert "ring_cache: 8 of 8 places" in capsys.readouterr().out


BAD = {
    "no steps": (["x:y", "--steps", "0"], "--steps 0: at least 1"),
    "no such target": (["nowhere.py:f"], "no file 'nowhere.py'"),
    "no such counter": (["{model}:counts", "--advance", "frame"], "it has step, start"),
    "no number": (["{model}:counts", "--advance", "step=x"], "NAME=BY with a whole number"),
    "no such device": (["{model}:alone", "--device", "tpu"], "cpu or cuda"),
    "no time": (["{model}:alone", "--rank-timeout", "0"], "rank_timeout_s"),
}


@pytest.mark.parametrize(("argv", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line(model, capsys, argv, says) -> None:
    assert cli.main(["run", *(a.format(model=model) for a in argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rtc: error: ")
    assert captured.err.count("\n") == 1, captured.err
    assert says in captured.err


def test_bad_environment_is_said(model, capsys, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["run", f"{model}:alone", *FAST]) == 2
    assert "WORLD_SIZE is set, but not RANK" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert cli.main(["run", f"{model}:alone", *FAST]) == 2
    assert "WORLD_SIZE='two'" in capsys.readouterr().err


def test_a_model_that_raises_is_one_line(model, capsys) -> None:
    assert cli.main(["run", f"{model}:no_loop", *FAST]) == 1
    error = capsys.readouterr().err
    assert error.startswith("rtc: error: call 0 failed: ")
    assert error.count("\n") == 1, error


# -- two ranks -------------------------------------------------------------------------------------


def ranks(model: Path, name: str, *argv: str) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of two ranks, with the environment that torchrun sets."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    started = []
    for r in range(2):
        env = {
            **os.environ, "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "FATAL", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "rtc", "run", f"{model}:{name}", *FAST, *argv]
        started.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        said = [p.communicate(timeout=60) for p in started]
        return [(p.returncode, *o) for p, o in zip(started, said, strict=True)]
    finally:
        for p in started:
            p.kill()
            p.wait()


def test_two_ranks_make_one_table(model) -> None:
    (code, out, err), (other, nothing, _) = ranks(model, "ranks", "--json")
    assert (code, other) == (0, 0), err
    result = json.loads(out)
    assert nothing == ""
    assert result["world"] == 2
    assert [r["rank"] for r in result["ranks"]] == [0, 1]
    assert all(r["median_ms"] > 0 for r in result["ranks"])


def test_ranks_that_disagree_say_so(model) -> None:
    for r, (code, out, err) in enumerate(ranks(model, "disagrees")):
        assert (code, out) == (1, "")
        assert err.startswith(f"rtc: rank {r}: error: the ranks disagree on arguments.x: ")
        assert err.count("\n") == 1, err


def test_a_rank_that_cannot_load_is_named_once(model) -> None:
    (code, out, err), (other, _, quiet) = ranks(model, "one_raises")
    assert (code, other) == (2, 2)
    assert "rank 1: " in err
    assert "FileNotFoundError: no weights (line" in err
    assert err.count("\n") == 1, err
    assert (out, quiet) == ("", "")
