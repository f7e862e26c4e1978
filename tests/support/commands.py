"""A task folder with deliberate room for mistakes, and the project's commands run on it in processes of their own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.speed import cpu_overdue, limit

ROOT = Path(__file__).resolve().parents[2]
CHATML = ROOT / "configs" / "templates" / "chatml.jinja"
ROW = {"question": "What is 2+2?", "answer": "#### 4"}
BOTH = pytest.mark.parametrize("script", ["sampling.py", "training_worker.py"])


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str
    cpu_s: float  # user and system, of the command and of what it started: what an idle machine would need


def make_task(folder: Path) -> Path:
    """One row, a model folder that holds only a tokenizer, and a config of both."""
    from examples.tokenizer import train_tokenizer

    (folder / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    train_tokenizer([ROW] * 4, 300, 256).save_pretrained(folder / "model")
    (folder / "run.yaml").write_text(
        f"run:\n  output_dir: {folder}/run\nmodel:\n  path: {folder}/model\ndata:\n  train: {folder}/train.jsonl\n"
    )
    return folder


def run(script: str, config: Path, *overrides: str) -> Ended:
    """`python sampling.py --config …` and its like; "check", "plan" and "run" are the commands of launch.sh."""
    start = {"check": ["-m", "launcher.check_rewards"], "plan": ["-m", "launcher.plan"], "run": ["-m", "launcher.run"]}
    command = start.get(script, [script, "--config"])
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "TANDEM_FAILPOINT")}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command, str(config), *overrides],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=limit(100),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ended(done.returncode, done.stdout, done.stderr, seconds)


def check(ended: Ended, *said: str, code: int = 2, cpu_s: float = 2.0) -> None:
    """It ended with that code, soon and without a traceback, and said all this. cpu_s: on the reference machine."""
    assert ended.code == code, ended.stderr
    assert "Traceback" not in ended.stderr
    for words in said:
        assert words in ended.stderr + ended.stdout
    print(f"{ended.cpu_s:.2f} s")
    assert not cpu_overdue(ended.cpu_s, cpu_s)
