"""The command line: output, machine output, and what bad input gets."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rtc
from rtc import cli
from rtc.passes import pipeline


def test_passes_json_is_the_pipeline(capsys) -> None:
    assert cli.main(["passes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["passes"]
    assert [r["name"] for r in rows] == pipeline.names()
    assert {r["tier"] for r in rows} <= {"exact", "numerics"}
    for row in rows:
        assert row["summary"]
        # a flag switches off what is on, and on what needs consent
        flag = "--no-" if row["default"] else "--"
        assert row["switch"] == flag + row["name"].replace("_", "-")


def test_passes_text_names_every_pass_and_switch(capsys) -> None:
    assert cli.main(["passes"]) == 0
    out = capsys.readouterr().out
    for name in pipeline.names():
        assert name in out
        assert "-" + name.replace("_", "-") in out
    assert "\x1b" not in out, "no colour when piped"


def test_consent_is_a_flag() -> None:
    said = ["--quantize=calibrated", "--quantize-kv", "--fp8-attention"]
    options = cli.options_of(cli.parser().parse_args(["explain", "x:y", *said]))
    assert (options.quantize_kv, options.fp8_attention) == (True, True)
    options = cli.options_of(cli.parser().parse_args(["explain", "x:y"]))
    assert (options.quantize_kv, options.fp8_attention) == (False, False)


def test_every_switch_is_an_option(capsys) -> None:
    """A pass added to the list gets its flag with no edit here or in the command line."""
    args = cli.parser().parse_args(["explain", "x:y", "--no-hoist-rope", "--quantize=calibrated"])
    options = cli.options_of(args)
    assert not options.hoist_rope
    assert options.ring_cache
    assert options.quantize == "calibrated"


@pytest.mark.parametrize("argv", [["--version", "--json"], ["--json", "--version"]])
def test_version_json(capsys, argv) -> None:
    assert cli.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["rtc"] == rtc.__version__


def test_the_console_script_writes_results_to_stdout_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rtc.cli", "--json", "passes"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert json.loads(done.stdout)["passes"]


BAD_USAGE = {
    "no command": [],
    "unknown command": ["compile"],
    "unknown flag": ["demo", "--frobnicate"],
    "unknown preset": ["demo", "--preset", "huge"],
    "explain without a target": ["explain"],
}


@pytest.mark.parametrize("argv", BAD_USAGE.values(), ids=BAD_USAGE.keys())
def test_bad_usage_is_one_line_and_exit_code_2(capsys, argv) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(argv)
    assert e.value.code == 2
    _one_line(capsys.readouterr())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--chunks", "1"], "at least 4"),
        (["--preset", "57b"], "choose a smaller preset"),
        (["--device", "tpu"], "cpu or cuda"),
        (["--out", "/nowhere/report.html"], "no folder /nowhere"),
        (["--out", "/"], "is a folder"),
    ],
)
def test_demo_refuses_before_it_starts(capsys, argv, says) -> None:
    assert cli.main(["demo", *argv]) == 2
    assert says in _one_line(capsys.readouterr())


def _one_line(captured) -> str:
    assert captured.out == ""
    assert captured.err.startswith("rtc: error: ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


# -- explain ---------------------------------------------------------------------------------------

MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn

SINK, NEW, WINDOW, HEADS, DIM = 2, 3, 3, 2, 8
SLOTS = SINK + NEW * WINDOW


class Model(nn.Module):
    def __init__(self, causal=False):
        super().__init__()
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.causal = causal
        self.register_buffer("k", torch.zeros(1, HEADS, SLOTS, DIM))
        self.register_buffer("v", torch.zeros(1, HEADS, SLOTS, DIM))

    def rotate(self, x, positions):
        frequency = 100.0 ** (-torch.arange(0, DIM, 2) / DIM)
        angle = (positions[:, None] * frequency).repeat(1, 2)
        low, high = x.chunk(2, dim=-1)
        return x * angle.cos() + torch.cat([-high, low], -1) * angle.sin()

    def forward(self, x, step):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        for cache, new in ((self.k, k), (self.v, v)):
            cache.copy_(torch.cat([cache[:, :, :SINK], cache[:, :, SINK + NEW :], new], dim=2))
        positions = torch.arange(SLOTS) + step
        keys = self.rotate(self.k, positions)
        if self.causal:
            keys = keys.cumsum(dim=2)
        return F.scaled_dot_product_attention(self.rotate(q, positions[-NEW:]), keys, self.v)


def inputs():
    return torch.randn(1, NEW, HEADS * DIM), 7


def good():
    print("on stdout")
    return Model().eval(), inputs()


def in_order():
    return Model(causal=True).eval(), inputs()[:1], {"step": 7}


def alone():
    return Model().eval()


def example_inputs():
    return inputs()[:1], {"step": 7}


def raises():
    return undefined_name


def no_model():
    return 3, ()


def no_arguments():
    return Model(), 3


def breaks():
    def f(x):
        torch._dynamo.graph_break()
        return x + 1

    return f, (torch.ones(3),)


def reads_the_device():
    return lambda x: x + x.sum().item(), (torch.ones(3),)


def fits_not():
    return Model().eval(), (torch.randn(1, NEW, 5), 7)


answer = 42
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A model outside the repository, and its folder as the current one."""
    file = tmp_path / "my_model.py"
    file.write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield file
    sys.modules.pop("my_model", None)


def _line(text: str) -> int:
    return next(i for i, x in enumerate(MODEL.splitlines(), 1) if text in x)


def test_explain_names_every_decision(model, capsys) -> None:
    assert cli.main(["explain", f"{model}:good"]) == 0
    captured = capsys.readouterr()
    for name in pipeline.names():
        assert name in captured.out
    assert "applied: 1 of 1" in captured.out  # the keys' RoPE
    assert "applied: 2 of 2" in captured.out  # the two caches
    assert "computed over whole caches" in captured.out
    assert "ring" in captured.out
    assert "on stdout" not in captured.out
    assert "on stdout" in captured.err


def test_explain_refuses_with_the_users_line(model, capsys) -> None:
    assert cli.main(["explain", "my_model:in_order", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    ring = next(p for p in report["graphs"][0]["passes"] if p["name"] == "ring_cache")
    assert ring["applied"] == 0
    assert any(r["reason"] and r["node"] for r in ring["refused"])
    assert any(re.search(r"my_model\.py:\d+ in forward", r["where"]) for r in ring["refused"])

    assert cli.main(["explain", "my_model:in_order"]) == 0
    out = capsys.readouterr().out
    assert "refused" in out
    assert re.search(r"my_model\.py:\d+ in forward", out)


def test_explain_with_a_pass_off(model, capsys) -> None:
    off = ["--no-ring-cache", "--no-hoist-rope"]
    assert cli.main(["explain", "my_model:alone", "--json", *off]) == 0
    report = json.loads(capsys.readouterr().out)
    enabled = {p["name"]: p["enabled"] for p in report["graphs"][0]["passes"]}
    assert not enabled["ring_cache"]
    assert not enabled["hoist_rope"]

    assert cli.main(["explain", "my_model:alone", "--no-hoist-rope"]) == 2
    assert "Switch ring_cache off as well" in _one_line(capsys.readouterr())


def test_explain_writes_one_file_of_html(model, capsys) -> None:
    assert cli.main(["explain", "my_model:in_order", "--html", "report.html"]) == 0
    text = Path("report.html").read_text()
    assert re.search(r"my_model\.py:\d+ in forward", text)
    assert "://" not in text
    for name in pipeline.names():
        assert name in text


BAD_TARGETS = {
    "my_model": "names no factory",
    ":good": "names no factory",
    "no_such.py:good": "no file 'no_such.py'",
    "no_such_module:good": "No module named 'no_such_module'",
    "my_model:goood": "has no 'goood': it defines Model, inputs, good",
    "my_model:answer": "is a int, not a function",
    "my_model.py:raises": f"'undefined_name' is not defined (line {_line('undefined_name')})",
    "my_model:no_model": "returned a int as model",
    "my_model:no_arguments": "must return `model, args`",
    "my_model:breaks": f"line {_line('graph_break()')}, in f",
    "my_model:reads_the_device": "item() reads device data on the host",
    "my_model:fits_not": "cannot be captured as one graph",
}


@pytest.mark.parametrize(("target", "says"), BAD_TARGETS.items(), ids=BAD_TARGETS.keys())
def test_bad_targets_say_what_and_where(model, capsys, target, says) -> None:
    assert cli.main(["explain", target]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("rtc: error: ")
    assert says in last


def test_a_syntax_error_names_its_line(tmp_path, capsys) -> None:
    file = tmp_path / "wrong.py"
    file.write_text("x = 1\ndef f(:\n")
    assert cli.main(["explain", f"{file}:f"]) == 2
    assert "(line 2)" in _one_line(capsys.readouterr())
