"""`launch.sh gpu-check`: its table and verdict, how it ends, and the whole command at toy size on the CPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_check import __main__ as command
from gpu_check.finding import Finding, judged, table
from launcher.processes import MARK
from tests.support.speed import overdue, until

PROCESSES = pytest.mark.processes
ROOT = Path(__file__).resolve().parents[2]


def test_a_table_is_aligned_and_a_judgement_is_a_word() -> None:
    found = [
        judged("a", "short", True, "1"),
        judged("part", "longer name", False, "no", error=2),
        judged("a", "b", None, "3"),
    ]
    rows = ["a     short        pass    1", "part  longer name  fail    no", "a     b            figure  3"]
    assert table(found).splitlines() == rows
    assert found[1].record()["figures"] == {"error": 2}


def test_a_part_that_is_not_there_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--cpu", "--only", "machine,atention"]) == 2
    assert "--only atention: there is no such part; parts are machine, attention" in capsys.readouterr().err


Fake = Callable[..., None]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    """fake(machine="sleep 60") puts a shell command in the place of a part."""

    def put(**parts: str) -> None:
        cases = "\n".join(f'*"--part {name} "*) {body} ;;' for name, body in parts.items())
        script = f'#!/bin/bash\ncase "$*" in\n{cases}\n*) exec {sys.executable} "$@" ;;\nesac\n'
        (tmp_path / "python").write_text(script)
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    return put


def report(tmp_path: Path) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "out.json").read_text()))


@PROCESSES
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("echo kernel broken >&2; exit 3", "kernel broken (exit 3; see "),
        ("kill -SEGV $$", " (exit -11; see "),
        ("echo begun; sleep 600", "not done after 0.5 s; see "),
    ],
    ids=["error", "crash", "hang"],
)
def test_a_part_that_fails_crashes_or_hangs_is_one_failure_and_the_next_still_runs(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, problem: str
) -> None:
    fake(attention=body, gradient="exit 0")
    monkeypatch.setattr(command, "_CPU_PATIENCE_S", 0.5 if "sleep" in body else 600)
    assert command.main(["--cpu", "--only", "attention,gradient", "--out", str(tmp_path / "out.json")]) == 1
    found = [Finding(**record) for record in report(tmp_path)["findings"]]
    assert [(f.part, f.outcome) for f in found][:2] == [("attention", "fail"), ("attention", "figure")]
    assert problem in found[0].value
    assert "--part attention" in (tmp_path / "out-attention.log").read_text()
    if "sleep" not in body:
        assert [(f.part, f.outcome) for f in found][2:] == [("gradient", "figure")]
        assert report(tmp_path)["failed"] == 1


@PROCESSES
def test_what_ten_minutes_do_not_hold_is_named_and_no_failure(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "visible_gpus", lambda _: (0,))
    monkeypatch.setattr(command, "BUDGET_S", 1.5)
    fake(machine="exit 0", attention="sleep 600", gradient="exit 0")
    assert command.main(["--only", "machine,attention,gradient", "--out", str(tmp_path / "out.json")]) == 0
    found = [Finding(**record) for record in report(tmp_path)["findings"]]
    skipped = {f.part: f for f in found if f.outcome == "skipped"}
    assert skipped["attention"].value.startswith("stopped after ")
    assert skipped["gradient"].what == "not begun"
    assert skipped["gradient"].value.endswith("this part alone: bash launch.sh gpu-check --only gradient")


def marked(mark: str) -> list[str]:
    """Command lines of the processes that carry the mark."""
    everyone = [process.info for process in psutil.process_iter(["environ", "status", "cmdline"])]
    alive = [one for one in everyone if one["status"] != psutil.STATUS_ZOMBIE]
    return [" ".join(one["cmdline"] or ()) for one in alive if (one["environ"] or {}).get(MARK, "").startswith(mark)]


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_stopped_amid_a_run_of_both_processes_it_leaves_none(number: signal.Signals, tmp_path: Path) -> None:
    """By Ctrl-C, or killed outright, while a rank starts: no process, and no folder of ours."""
    mark, out = f"gpu-check-{os.getpid()}-{number.name}-", tmp_path / "out.json"
    words = [sys.executable, "-m", "gpu_check", "--cpu", "--only", "machine,together", "--out", str(out)]
    short = Path(tempfile.mkdtemp())  # sockets are below it, and their paths have a limit
    env = os.environ | {MARK: mark, "TMPDIR": str(short)}
    process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    a_rank = "training_worker.py --local_rank"
    until(lambda: any(a_rank in line for line in marked(mark)) or process.poll() is not None, 60)
    assert process.poll() is None
    process.send_signal(number)
    code = process.wait()
    until(lambda: not marked(mark) and not list(short.glob("tandem-*")), 20)
    shutil.rmtree(short)
    if number is not signal.SIGKILL:
        assert code == 130
        assert {record["part"] for record in json.loads(out.read_text())["findings"]} == {"machine"}


ASLEEP = {"asleep, written after it", "asleep, new weights"}
# What each part must at least say at toy size.
SAYS = {
    "machine": {"Python.h", "torch"},
    "attention": {"kernel in float32", "a new shape"},
    "gradient": {"packed against dense, float32", "packed against dense, bfloat16"},
    "head": {"compiled against plain, bfloat16", "seconds and memory"},
    "collectives": {
        "gloo broadcast",
        "gloo all_reduce SUM, bfloat16",
        "gloo reduce_scatter_tensor",
        "gloo, a step",
        "NCCL",
    },
    "together": {"both processes", "first optimizer step"},
    "reloads": {"float32, reloads", "float32, canary", "float32, compared", "float32, one stale number"} | ASLEEP,
    "step": {"1M, seconds", "1M, MFU", "1M, memory", "1M, packed over padded"},
}


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_whole_command_runs_on_a_cpu_at_toy_size_within_three_minutes(tmp_path: Path) -> None:
    begun = time.monotonic()
    words = [sys.executable, "-m", "gpu_check", "--cpu", "--out", str(tmp_path / "out.json")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [Finding(**record) for record in report(tmp_path)["findings"]]
    assert list(dict.fromkeys(f.part for f in found)) == list(SAYS) == list(command.PARTS)
    for part, says in SAYS.items():
        assert {f.what for f in found if f.part == part} >= says
    assert not overdue(time.monotonic() - begun, 180)
