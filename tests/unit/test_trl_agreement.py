"""TRL's own code against this trainer's, where TRL has been installed beside the project."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.speed import limit

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "tools" / "benchmarks" / "trl_formulas.py"

spec = importlib.util.spec_from_file_location("trl_formulas", SCRIPT)
assert spec is not None and spec.loader is not None
trl_formulas = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trl_formulas)


@pytest.mark.e2e
def test_losses_gradients_and_advantages_equal_those_of_trl() -> None:
    if not (trl_formulas.ENVIRONMENT / ".complete").exists():
        pytest.skip("TRL is not installed beside the project; run python tools/benchmarks/trl_formulas.py once")
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=limit(300))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_holds_what_the_command_wrote_for_the_pinned_version() -> None:
    text = trl_formulas.PAGE.read_text().split(trl_formulas.BEGIN)[1].split(trl_formulas.END)[0]
    rows = [line for line in text.splitlines() if line.startswith("| ") and "e-" in line]
    assert f"TRL {trl_formulas.TRL}," in text
    for name in ("grpo, dapo, dr_grpo, bnpo, cispo", "grpo, dapo, dr_grpo: sequence level (GSPO)"):
        (row,) = [line for line in rows if line.startswith(f"| {name} |")]
        assert max(float(cell) for cell in row.split("|")[2:4]) <= trl_formulas.TOLERANCE


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
