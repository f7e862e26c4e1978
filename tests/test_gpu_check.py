"""`launch.sh gpu-check`: the table and the verdict, and every part at toy size on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gpu_check import __main__ as command
from gpu_check.finding import Finding, judged, table

FAST, PROCESSES = pytest.mark.fast, pytest.mark.processes


@FAST
def test_a_table_is_aligned_and_a_judgement_is_a_word() -> None:
    found = [judged("a", "short", True, "1"), judged("part", "longer name", False, "no", error=2)]
    assert table(found).splitlines() == ["a     short        pass  1", "part  longer name  fail  no"]
    assert found[1].record()["figures"] == {"error": 2}


@FAST
def test_a_part_that_is_not_there_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--cpu", "--only", "machine,atention"]) == 2
    assert "--only atention: there is no such part; parts are machine, attention" in capsys.readouterr().err


@FAST
def test_all_parts_together_take_about_ten_minutes_at_most() -> None:
    assert sum(command.PARTS.values()) <= 630


@FAST
@pytest.mark.parametrize("patience", [60, 0.2], ids=["crash", "hang"])
def test_a_part_that_crashes_or_hangs_fails_and_the_others_still_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], patience: float
) -> None:
    body = "raise SystemExit('kernel broken')" if patience > 1 else "__import__('time').sleep(60)"
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{body}"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(command.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(command, "_CPU_PATIENCE_S", patience)
    assert command.main(["--cpu", "--only", "machine", "--out", str(tmp_path / "out.json")]) == 1
    report = json.loads((tmp_path / "out.json").read_text())
    (problem, _) = report["findings"]
    assert (report["on_gpu"], report["failed"], problem["outcome"]) == (False, 1, "fail")
    assert problem["value"] == ("kernel broken" if patience > 1 else "not done after 0.2 s")
    assert "1 failed" in capsys.readouterr().out


# What each part must at least say at toy size.
SAYS = {
    "machine": {"Python.h", "torch"},
    "attention": {"kernel in float32", "a new shape"},
    "gradient": {"packed against dense, float32", "packed against dense, bfloat16"},
    "step": {"toy step, seconds"},
    "collectives": {"gloo broadcast", "gloo all_reduce SUM, bfloat16", "gloo reduce_scatter_tensor", "NCCL"},
    "reloads": {"float32, reloads", "float32, a stale engine"},
    "together": {"both processes", "first optimizer step"},
}
MARKS = {"step": pytest.mark.gloo, "collectives": pytest.mark.gloo, "reloads": pytest.mark.vllm}
MARKS |= {"together": pytest.mark.e2e}


@pytest.mark.timeout(700)
@pytest.mark.parametrize("part", [pytest.param(name, marks=MARKS.get(name, PROCESSES)) for name in command.PARTS])
def test_every_part_runs_on_a_cpu_at_toy_size(part: str, tmp_path: Path) -> None:
    code = command.main(["--cpu", "--only", part, "--out", str(tmp_path / "out.json")])
    found = [Finding(**record) for record in json.loads((tmp_path / "out.json").read_text())["findings"]]
    assert code == 0, table(found)
    assert {finding.what for finding in found} >= SAYS[part]
