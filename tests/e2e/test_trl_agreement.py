"""TRL's own code against this trainer's, where TRL has been installed beside the project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.speed import limit
from tools.benchmarks import trl_formulas


def test_losses_gradients_and_advantages_equal_those_of_trl() -> None:
    if not (trl_formulas.ENVIRONMENT / ".complete").exists():
        pytest.skip("TRL is not installed beside the project; run python tools/benchmarks/trl_formulas.py once")
    done = subprocess.run([sys.executable, trl_formulas.__file__], capture_output=True, text=True, timeout=limit(300))
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_installation_is_complete_when_pip_was_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        tmp_path.joinpath("trl").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, stdout=f"{tmp_path}\n", stderr="")

    monkeypatch.setattr(trl_formulas, "ENVIRONMENT", tmp_path / "trl")
    monkeypatch.setattr(trl_formulas, "ROOT", tmp_path)
    monkeypatch.setattr(trl_formulas.subprocess, "run", run)
    trl_formulas.install()
    assert commands[-1][-1] == f"trl=={trl_formulas.TRL}" and len(commands) == 3
    trl_formulas.install()
    assert len(commands) == 3
