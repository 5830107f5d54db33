"""The demo: one real run on the smallest preset, and what happens when something goes wrong.

The other runs stand in eager for rtc, so that nothing is compiled.
"""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from rtc import cli, demo
from rtc.demo import ladder, machine, sides, stages, stats
from rtc.demo.check import Check
from rtc.options import Options
from rtc.show.progress import Progress
from rtc.testing import check_compile

ARGV = ["demo", "--json", "--preset", "tiny", "--chunks", "14", "--lowering", "eager"]


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch) -> None:
    """Looking takes a second."""
    monkeypatch.setattr(machine, "busy_cores", lambda: 0.0)


@pytest.fixture
def few_steps(monkeypatch) -> None:
    monkeypatch.setattr(stages, "EXACT_STEPS", 8)


@pytest.fixture
def no_rtc(monkeypatch) -> None:
    """Eager in place of rtc, and no float64 chain."""

    def side(settings, options, key, label, on_phase=None):
        made = sides.eager_side(settings)
        made.key, made.label = key, label
        made.call = Reporting(made.model)
        return made

    monkeypatch.setattr(sides, "rtc_side", side)
    monkeypatch.setattr(stages.Demo, "_exactness", lambda self: None)


class Reporting(nn.Module):
    """A model with a report, as `rtc.compile` makes. `broken_at`: the step that goes wrong."""

    broken_at = None
    interrupted_at = None

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, noise, cond, step):
        if step == self.interrupted_at:
            raise KeyboardInterrupt
        out = self.model(noise, cond, step)
        return out + 1e-3 if step == self.broken_at else out

    def report(self):
        class Report:
            def to_dict(self):
                return {"graphs": [], "runtime": {}, "options": {}}

        return Report()


def _demo(tmp_path: Path, capsys, *more: str) -> tuple[int, dict, str, str]:
    out = tmp_path / "report.html"
    code = cli.main([*ARGV, "--out", str(out), *more])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), out.read_text(), captured.err


def test_the_demo_streams_compares_and_reports(tmp_path, capsys, few_steps) -> None:
    code, result, html, err = _demo(tmp_path, capsys)
    assert code == 0, err
    assert result["ok"]
    assert result["chunks"] == {"planned": 14, "done": 14, "skipped": 2, "resets": [6, 12]}
    assert result["exactness"]["passed"]
    assert result["exactness"]["max_abs_error"] < 1e-10

    compared = result["comparison"]
    assert compared["passed"]
    assert compared["chunks"] == 14, "every chunk is compared"
    assert compared["caches"] == 8, "K and V of two layers in two passes"
    assert set(compared["max_abs_error"]["cache"]) == {"eager", "rtc"}

    assert [v["key"] for v in result["variants"]] == ["eager", "rtc"]
    for v in result["variants"]:
        assert len(v["step_ms"]) == 14
        assert v["reset_ratio"] > 0
    assert result["speedup"] == {}, "lowering eager claims no speed"
    assert any("say nothing about speed" in n for n in result["notes"])

    graph = result["report"]["graphs"][0]
    assert graph["work"]["after"]["copy_elements"] == 0
    _check_html(html, result)


def _check_html(html: str, result: dict) -> None:
    assert "://" not in html, "nothing is loaded from anywhere"
    assert not re.search(r"<(?:script|link|img|iframe)\b", html)
    assert "all checks passed" in html
    assert "<svg" in html
    for p in result["report"]["graphs"][0]["passes"]:
        assert p["name"] in html
    for r in result["chunks"]["resets"]:
        assert f"reset, chunk {r}<" in html


def test_a_text_run_prints_the_summary(tmp_path, capsys, no_rtc) -> None:
    out = tmp_path / "report.html"
    assert cli.main([*(x for x in ARGV if x != "--json"), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "median ms" in captured.out
    assert "14 chunks" in captured.out
    assert str(out) in captured.out
    assert "streaming 14 chunks" in captured.err
    assert "\x1b" not in captured.out + captured.err, "no colour when piped"


def test_a_wrong_chunk_fails(tmp_path, capsys, no_rtc, monkeypatch) -> None:
    monkeypatch.setattr(Reporting, "broken_at", 9)
    code, result, html, err = _demo(tmp_path, capsys)
    assert code == 1
    assert not result["comparison"]["passed"]
    assert "step 9: output" in result["failures"][0]
    assert "rtc: check failed" in err
    assert "a check failed" in html


def test_a_wrong_cache_fails(tmp_path, capsys, no_rtc, monkeypatch) -> None:
    def spoiled(self):
        made = dict(copy.deepcopy(self.model).named_buffers())
        if self.key == "rtc":
            made["caches.1.0.v"][:, 7] += 1e-2
        return made

    monkeypatch.setattr(sides.Side, "caches", spoiled)
    code, result, _, _ = _demo(tmp_path, capsys)
    assert code == 1
    assert "caches.1.0.v" in result["failures"][0]
    assert "slot 7 is worst" in result["failures"][0]


def test_the_float64_chain_fails_the_demo_too(tmp_path, capsys, few_steps, monkeypatch) -> None:
    real = check_compile

    def spoil(model):
        model.register_forward_hook(lambda module, args, out: out + 1e-6)
        return model

    def broken(*args, **kwargs):
        kwargs.pop("options")
        return real(*args, **kwargs, compile=spoil)

    monkeypatch.setattr(stages, "check_compile", broken)
    monkeypatch.setattr(stages.Demo, "_compile", lambda self: None)
    monkeypatch.setattr(stages.Demo, "_stream", lambda self: None)
    code, result, _, _ = _demo(tmp_path, capsys)
    assert code == 1
    assert "preset tiny in float64 differs" in result["failures"][0]


def test_ctrl_c_keeps_what_was_measured(tmp_path, capsys, no_rtc, monkeypatch) -> None:
    monkeypatch.setattr(Reporting, "interrupted_at", 8)
    code, result, html, err = _demo(tmp_path, capsys)
    assert code == 130
    assert result["interrupted"] == "streaming 14 chunks"
    assert result["comparison"]["chunks"] == 8
    assert all(len(v["step_ms"]) >= 8 for v in result["variants"])
    assert "interrupted" in html
    assert "kept what was measured" in err


def test_without_a_compiler_it_goes_on_with_lowering_eager(
    tmp_path, capsys, no_rtc, monkeypatch
) -> None:
    monkeypatch.setattr(machine, "_compiler", lambda: None)
    code, result, html, err = _demo(tmp_path, capsys, "--lowering", "inductor")
    assert code == 0
    assert result["settings"]["options"]["lowering"] == "eager"
    assert [v["key"] for v in result["variants"]] == ["eager", "rtc"]
    assert result["speedup"] == {}
    for text in (html, err, *result["notes"][-1:]):
        assert "no C++ compiler" in text
        assert "Install g++" in text


def test_a_busy_machine_gets_fewer_threads_and_a_note(
    tmp_path, capsys, no_rtc, monkeypatch
) -> None:
    monkeypatch.setattr(machine, "busy_cores", lambda: 1e9)
    before = torch.get_num_threads()
    code, result, _, _ = _demo(tmp_path, capsys)
    assert code == 0
    assert result["machine"]["threads"] == 1
    assert "the timings are noisy" in result["notes"][0]
    assert torch.get_num_threads() == before


def test_the_ladder_switches_passes_on_one_by_one(no_rtc, monkeypatch) -> None:
    asked = []
    fake = sides.rtc_side

    def recorded(settings, options, key, label, on_phase=None):
        asked.append((label, options.switches()))
        return fake(settings, options, key, label)

    monkeypatch.setattr(sides, "rtc_side", recorded)
    settings = demo.Settings(preset="tiny", chunks=8, options=Options(lowering="eager"))
    d = stages.Demo(settings, Progress())
    d.folder = "unused"
    made = ladder.Ladder(settings, settings.options, d.folder, d._stage, d.note)
    applied = [{"name": n, "applied": 1} for n in ("hoist_rope", "ring_cache")]
    made.compile({"graphs": [{"passes": applied}]})
    off = {"hoist_rope": False, "ring_cache": False}
    assert [label for label, _ in asked] == ["all passes off", "hoist_rope"]
    assert asked[0][1].items() >= off.items()
    assert asked[1][1].items() >= {**off, "hoist_rope": True}.items()

    d._compile()
    d._stream()
    made.stream(next(s for s in d.sides if s.key == "rtc"), d.outputs, d.check)
    rows = made.close()
    assert [r["label"] for r in rows] == ["all passes off", "hoist_rope", "hoist_rope + ring_cache"]
    assert [r["full"] for r in rows] == [False, False, True]
    assert rows[-1]["ratio"]["median"] == 1
    assert d.check.failure is None


def test_step_statistics_leave_out_the_first_chunks_and_keep_resets_apart() -> None:
    seconds = [9.0, 5.0, *[0.010] * 10]
    seconds[6] = 0.025
    found = stats.steps(seconds, resets=[6])
    assert found["median_ms"] == pytest.approx(10)
    assert found["reset_ratio"] == pytest.approx(2.5)
    assert found["chunks"] == 10
    assert stats.steps(seconds[:2], []) == {}
    ratio = stats.paired_ratio([0, 0, 4.0, 6.0, 8.0], [1, 1, 2.0, 3.0, 4.0])
    assert ratio == {"median": 2.0, "p25": 2.0, "p75": 2.0}


def test_float64_must_be_exact_and_float32_is_measured_against_eagers_own_error() -> None:
    torch.manual_seed(0)
    truth = torch.randn(50, dtype=torch.float64)
    eager = truth.float()
    check = Check(torch.float32, "exact")
    assert check.needs_reference
    assert check.compare("output", 0, {"eager": eager, "rtc": eager.clone()}, truth)
    assert not check.compare("output", 1, {"eager": eager, "rtc": eager + 1e-5}, truth)

    check = Check(torch.float64, "exact")
    assert not check.needs_reference
    assert check.compare("output", 0, {"eager": truth, "rtc": truth + 1e-11}, None)
    assert not check.compare("output", 1, {"eager": truth, "rtc": truth + 1e-8}, None)
