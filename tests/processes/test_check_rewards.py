"""`launch.sh check` as a command: what it prints, and how it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.speed import limit

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]


def command(folder, *arguments):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "launcher.check_rewards", str(folder / "run.yaml"), *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit(100))


@pytest.fixture
def folder(tmp_path):
    golds = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in golds))
    (tmp_path / "run.yaml").write_text(f"model: {{path: none/here}}\ndata: {{train: {tmp_path}/train.jsonl}}\n")
    return tmp_path


def test_the_command_checks_gold_answers(folder):
    done = command(folder, "--rows", "5")
    assert done.returncode == 0, done.stderr
    assert f"tandem: gold answers: 5 of 20 rows of {folder}/train.jsonl" in done.stdout
    assert done.stdout.endswith("\ntandem: the rewards look right\n")


def test_the_command_ends_with_1_when_gold_answers_fail(folder):
    (folder / "mine.py").write_text(
        "def fn(completions, answer):\n    return [float(a in c) for a, c in zip(answer, completions)]\n"
    )
    done = command(folder, f"rewards.reward_funcs=[{folder}/mine.py:fn]")  # looks for the whole of "#### 4"
    assert done.returncode == 1
    assert "problem: on 20 of 20 rows right, wrong and empty completions all score the same" in done.stdout
    assert "Traceback" not in done.stderr
