"""`launch.sh check` as a command: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.speed import limit

ROOT = Path(__file__).resolve().parents[2]
# it looks for the whole of "#### 4"
OWN = "def whole(completions, answer):\n    return [float(a in c) for a, c in zip(answer, completions)]\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--rows", "5"], 0, ("gold answers: 5 of 20 rows of", "the rewards look right\n")),
        (
            ["rewards.reward_funcs=[mine.py:whole]"],
            1,
            ("problem: on 20 of 20 rows right, wrong and empty completions",),
        ),
        (["--rows", "0"], 2, ("check --rows 0: at least 1 is tried",)),
    ],
)
def test_the_command_tries_gold_answers_and_ends_as_they_do(
    tmp_path: Path, words: list[str], code: int, said: tuple[str, ...]
) -> None:
    golds = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in golds))
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "run.yaml").write_text(f"model: {{path: none/here}}\ndata: {{train: {tmp_path}/train.jsonl}}\n")
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [word.replace("mine.py", f"{tmp_path}/mine.py") for word in words]
    command = [sys.executable, "-m", "launcher.check_rewards", str(tmp_path / "run.yaml"), *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit(100))
    assert done.returncode == code, done.stderr
    assert all(text in done.stdout + done.stderr for text in said) and "Traceback" not in done.stderr
