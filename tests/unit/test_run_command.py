"""`launch.sh run` before and after its two processes: the run folder, the commands, the report."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.config import Config
from common.durable import lock
from common.errors import UserError
from common.files.run_folder import TRAINER_LOCK, checkpoints
from common.paths import ROOT
from common.wire import address
from launcher import run as launcher_run
from launcher.processes.commands import Commands
from launcher.processes.processes import remove
from launcher.resources import machine
from launcher.resources.machine import MACHINE
from launcher.resources.placement import placement
from launcher.run import LOCK, main, make_room, parse, to_resume
from tests.support.configs import config_of


def config(folder: Path, resume: bool = False) -> Config:
    return config_of(run={"output_dir": folder, "resume": resume})


def test_without_a_config_the_quick_start_runs():
    assert parse([]) == (Path("configs/quickstart.yaml"), [], None)
    assert parse(["trainer.max_steps=2"]) == (Path("configs/quickstart.yaml"), ["trainer.max_steps=2"], None)
    assert parse(["a.yaml", "--hosts", "h", "x.y=1"]) == (Path("a.yaml"), ["x.y=1"], Path("h"))


def test_a_run_goes_on_with_what_was_typed_and_not_with_what_was_chosen_for_it():
    typed = ["trainer.max_steps=2", "run.resume=false", "vllm.hf_token=abc"]
    assert to_resume(Path("my configs/a.yaml"), typed, Path("hosts")) == (
        "bash launch.sh run 'my configs/a.yaml' trainer.max_steps=2 'vllm.hf_token=***' run.resume=true --hosts hosts"
    )
    assert to_resume(Path("a.yaml"), ["run.resume=true"], None) == "bash launch.sh run a.yaml run.resume=true"


def test_a_report_that_nobody_sees_that_fails_or_is_stopped_does_not_change_the_end(tmp_path, capsys, monkeypatch):
    code = (
        "import sys, report.main as report; from pathlib import Path; from launcher import run\n"
        "report.main = lambda _: print('held-out answer')\n"
        "run.exits.say('continue with'); run._report(Path('.')); sys.exit(130)"
    )
    reading, unread = os.pipe()
    os.close(reading)
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=unread, stderr=unread).returncode == 130
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "curves.png").mkdir()  # in the way
    launcher_run._report(tmp_path)
    assert "no report: IsADirectoryError" in capsys.readouterr().err
    monkeypatch.setattr("report.main.main", lambda _: signal.raise_signal(signal.SIGINT))
    launcher_run._report(tmp_path)
    assert "no report: KeyboardInterrupt" in capsys.readouterr().err


def test_the_time_to_stop_is_that_of_the_last_batches_and_their_checkpoints(tmp_path):
    """2 · (2 steps of a batch · 40 s + 6 s)"""
    given = config_of(run={"output_dir": tmp_path}, algorithm={"num_iterations": 2}, trainer={"max_steps": 4})
    commands = Commands(tmp_path / "c.yaml", [], given, SimpleNamespace(num_ranks=1))
    assert commands.batch_s() == 0.0
    rows = [{"step": 1, "step_time": 40.0}, {"step": 2, "step_time": 3.0, "timing/checkpoint_s": 6.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert commands.batch_s() == 172.0


def left(folder: Path, *names: str) -> Path:
    """What an earlier run has left: "metrics.jsonl" with two steps, "checkpoints/step_000002", "final"."""
    for name in names:
        if name == "metrics.jsonl":
            folder.mkdir(exist_ok=True)
            (folder / name).write_text('{"step": 1}\n{"step": 2}\n')
        else:
            (folder / name).mkdir(parents=True)
    return folder


STEPS, SAVED = "metrics.jsonl", "checkpoints/step_000002"


@pytest.mark.parametrize("names", [(STEPS,), (STEPS, SAVED, "final"), ("final",)], ids=str)
def test_ended_runs_move_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, ...]) -> None:
    for number in (1, 2):
        folder = left(tmp_path / "run", *names)
        (folder / "which").write_text(str(number))
        make_room(config(folder))
        assert not folder.exists() and (tmp_path / f"run-{number}" / "which").read_text() == str(number)
        assert f"the earlier {folder} is now {tmp_path}/run-{number}" in capsys.readouterr().err
    make_room(config(left(folder, "logs")))
    assert folder.exists()  # nothing was trained in it


def test_a_run_that_can_go_on_is_refused_and_a_resume_needs_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=r"no checkpoint; leave run\.resume out to start anew"):
        make_room(config(folder, resume=True))
    left(folder, STEPS)
    with pytest.raises(UserError, match=rf"no checkpoint; set run\.output_dir={folder}-2 and leave run\.resume out"):
        make_room(config(folder, resume=True))
    left(folder, SAVED)
    assert [path.name for path in checkpoints(folder)] == ["step_000002"]
    make_room(config(folder, resume=True))
    with pytest.raises(UserError, match=r"a run of 2 steps\. Continue it with run\.resume=true, or .*run-2"):
        make_room(config(folder))
    left(folder, "final")
    make_room(config(folder, resume=True))
    assert folder.exists()


def test_a_folder_in_use_is_refused(tmp_path, capsys):
    yaml = tmp_path / "c.yaml"
    yaml.write_text(f"run: {{output_dir: {tmp_path}/run}}\nmodel: {{path: m}}\ndata: {{train: t.jsonl}}\n")
    with lock(tmp_path / "run" / LOCK, UserError):
        assert main([str(yaml)]) == 2
    assert f"belongs to a run that is going on (pid {os.getpid()})" in capsys.readouterr().err


def test_a_run_by_hand_is_not_moved_away_from_under_its_trainer(tmp_path: Path) -> None:
    folder = left(tmp_path / "run", STEPS)
    with lock(folder / TRAINER_LOCK, UserError), pytest.raises(UserError, match=r"a run that is going on \(pid \d+\)"):
        make_room(config(folder))


def test_a_folder_that_cannot_be_renamed_says_where_the_next_run_may_go(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Path, "rename", lambda *_: os.rmdir("/"))  # "busy", as where a volume is mounted
    folder = left(tmp_path / "run", STEPS)
    with pytest.raises(UserError, match=rf"renamed to run-1: Device or .* busy; set run\.output_dir={folder}/2"):
        make_room(config(folder))


def test_a_run_that_made_steps_leaves_a_report_however_it_ends(tmp_path, monkeypatch):
    drawn: list[list[str]] = []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setattr("report.main.main", drawn.append)
    monkeypatch.setattr(launcher_run, "Supervisor", lambda *_: SimpleNamespace(run=lambda: 130))
    settings = config(tmp_path)
    command = Commands(tmp_path / "c.yaml", (), settings, placement(settings, (), (0, 1)))
    assert launcher_run._run(command, "bash launch.sh run c.yaml") == 130
    assert drawn == [[str(tmp_path)]]


def test_a_model_is_built_because_the_config_names_its_builder(tmp_path, monkeypatch):
    asked: list[str] = []
    code = SimpleNamespace(returncode=3)
    monkeypatch.setattr(subprocess, "run", lambda words: asked.append(words[words.index("-m") + 1]) or code)
    assert launcher_run.build(config_of()) == 0 and asked == []
    assert launcher_run.build(config_of({"builder": "examples.quickstart"})) == 3 and asked == ["examples.quickstart"]
    with pytest.raises(UserError, match=r"model.builder examples.none: no such module"):
        launcher_run.build(config_of({"builder": "examples.none"}))
    monkeypatch.chdir(tmp_path)
    launcher_run.require_built(config_of({"path": "owner/name", "builder": "examples.quickstart"}))
    missing = config_of({"path": ".cache/quickstart/model", "builder": "examples.quickstart"})
    with pytest.raises(UserError, match=r"run makes it, or by itself: \.venv/bin/python -m examples\.quickstart"):
        launcher_run.require_built(missing)
    (tmp_path / ".cache/quickstart/model").mkdir(parents=True)
    launcher_run.require_built(missing)


def test_a_container_that_is_too_small_ends_the_start_before_anything_is_loaded(tmp_path, monkeypatch):
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 512, **shape}))
    given = config_of(model={"path": str(tmp_path)})
    place = placement(given, (), [0, 1])
    for gib, whose, fits in ((1, "the limit of the cgroup /job", False), (1, MACHINE, True), (16, "the limit", True)):
        for module in (launcher_run, machine):
            monkeypatch.setattr(module, "memory_limit", lambda *_, given=(gib << 30, whose): given)
        if fits:
            launcher_run._require_memory(given, place)
        else:
            with pytest.raises(UserError, match=r"the limit of the cgroup /job is 1.0 GiB: .*rank needs about"):
                launcher_run._require_memory(given, place)


def test_what_is_left_in_a_temporary_folder_is_found_whatever_its_name(tmp_path: Path, monkeypatch) -> None:
    given = config(tmp_path / "run")
    with tempfile.TemporaryDirectory(suffix="[3].server") as folder:  # as of an array of PBS
        monkeypatch.setattr(tempfile, "tempdir", folder)
        command = Commands(tmp_path / "c.yaml", (), given, placement(given, (), (0, 1)))
        (scratch := address.private_dir(given.run.output_dir)).joinpath("inbox").touch()
        remove(command.trainer().scratch)
        assert not scratch.exists()
