"""What a person can fix exits 2 at once, with the value and the remedy, and never with a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from quickstart.tokenizer import train_tokenizer

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[1]
ROW = {"question": "What is 2+2?", "answer": "#### 4"}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a model folder that holds only a tokenizer, and a config of both."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    train_tokenizer([ROW] * 4, 300, 256).save_pretrained(folder / "model")
    (folder / "run.yaml").write_text(
        f"run:\n  output_dir: {folder}/run\nmodel:\n  path: {folder}/model\ndata:\n  train: {folder}/train.jsonl\n"
    )
    return folder


def run(script: str, config: Path, *overrides: str, world_size: int | None = None) -> tuple[int, str, float]:
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "FAILPOINT")}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | ({"WORLD_SIZE": str(world_size)} if world_size else {})
    start = time.monotonic()
    command = [sys.executable, script, "--config", str(config), *overrides]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    return result.returncode, result.stderr, time.monotonic() - start


def check(result: tuple[int, str, float], *said: str) -> None:
    code, stderr, seconds = result
    assert code == 2, stderr
    assert "Traceback" not in stderr
    for words in said:
        assert words in stderr
    print(f"{seconds:.2f} s")
    assert seconds < 10  # about 1 to 3 on an idle machine


BOTH = pytest.mark.parametrize("script", ["sampling.py", "training_worker.py"])


@BOTH
def test_a_config_that_is_not_there(task: Path, script: str) -> None:
    check(run(script, task / "rnu.yaml"), "rnu.yaml: No such file or directory", f"Did you mean {task}/run.yaml?")


@BOTH
def test_an_unknown_option(task: Path, script: str) -> None:
    check(
        run(script, task / "run.yaml", "trainer.max_step=5"),
        "trainer.max_step: no such option. Did you mean trainer.max_steps?",
    )


@BOTH
def test_an_option_that_is_no_override(task: Path, script: str) -> None:
    check(run(script, task / "run.yaml", "max_steps"), "'max_steps' is not key=value; write for example")


@BOTH
def test_a_model_folder_that_is_not_there(task: Path, script: str) -> None:
    check(run(script, task / "run.yaml", "model.path=./nowhere"), "./nowhere", "no such folder", "model.path")


def test_ranks_that_do_not_divide_the_batch(task: Path) -> None:
    check(
        run("training_worker.py", task / "run.yaml", world_size=3),
        "trainer.prompts_per_step 8 does not divide by 3 ranks",
        "Nearest: trainer.prompts_per_step=6 or 9",
    )


def test_data_that_is_not_there(task: Path) -> None:
    check(
        run("sampling.py", task / "run.yaml", f"data.train={task}/trian.jsonl"),
        f"no file or folder {task}/trian.jsonl",
        f"Did you mean {task}/train.jsonl?",
    )


def test_a_column_that_is_not_there(task: Path) -> None:
    check(
        run("sampling.py", task / "run.yaml", "data.prompt_key=questoin"), "questoin", "Set data.prompt_key: question"
    )


def test_a_reward_that_does_not_exist(task: Path) -> None:
    check(run("sampling.py", task / "run.yaml", "rewards.reward_funcs=[anwser]"), "anwser", "answer")


def test_an_address_that_is_none(task: Path) -> None:
    check(run("sampling.py", task / "run.yaml", "channel.endpoint=localhost:5555"), "write tcp://10.0.0.1:5555")


def test_a_sink_whose_package_is_missing_is_told_with_the_pip_line_before_torch_is_imported(task: Path) -> None:
    missing = next(name for name in ("trackio", "swanlab", "wandb", "mlflow") if find_spec(name) is None)
    result = run("training_worker.py", task / "run.yaml", f"run.report_to=[tensorboard, {missing}]")
    check(result, f"python -m pip install {missing}, or leave it out: run.report_to=[tensorboard]")
