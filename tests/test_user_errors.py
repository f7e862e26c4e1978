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

from common import durable
from common.config import UserError
from quickstart.tokenizer import train_tokenizer

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[1]
CHATML = ROOT / "configs" / "templates" / "chatml.jinja"
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


def test_a_second_sampler_with_an_id_that_is_taken(task: Path) -> None:
    (task / "run").mkdir(exist_ok=True)
    with durable.lock(task / "run" / "lock.sampler-0", UserError):
        check(
            run("sampling.py", task / "run.yaml"),
            f"a sampler with the id 'sampler-0' serves this run already (pid {os.getpid()})",
            "give this one another: --id sampler-0-b",
        )


def test_a_sampler_id_that_cannot_be_a_file_name(task: Path) -> None:
    check(run("sampling.py", task / "run.yaml", "--id", "../x"), "--id '../x': use at most 64 letters")


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


def test_a_split_that_is_not_there(task: Path) -> None:
    check(
        run("sampling.py", task / "run.yaml", f"data.train={task}/train.jsonl@validation"),
        f'split "validation" is not in {task}/train.jsonl; it has train (1)',
    )


def test_a_subset_that_is_missing(task: Path) -> None:
    for subset in ("main", "socratic"):
        (task / "gsm8k" / subset).mkdir(parents=True)
        (task / "gsm8k" / subset / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    subsets = "".join(f"- config_name: {s}\n  data_files: {s}/train.jsonl\n" for s in ("main", "socratic"))
    (task / "gsm8k" / "README.md").write_text(f"---\nconfigs:\n{subsets}---\n")
    check(
        run("sampling.py", task / "run.yaml", f"data.train={task}/gsm8k@train"),
        f"{task}/gsm8k has subsets main, socratic. Write {task}/gsm8k:main@train",
    )


def test_answers_that_are_all_empty(task: Path) -> None:
    (task / "empty.jsonl").write_text(json.dumps({"question": "2+2?", "answer": ""}) + "\n")
    check(
        run("sampling.py", task / "run.yaml", f"data.train={task}/empty.jsonl"),
        "data.train: each of the 1 rows has an empty 'answer'. Set data.answer_key",
    )


def test_a_row_that_is_no_prompt(task: Path) -> None:
    (task / "number.jsonl").write_text(json.dumps({"question": 4, "answer": "4"}) + "\n")
    check(
        run("sampling.py", task / "run.yaml", f"data.train={task}/number.jsonl"),
        "row 0: data.prompt_key 'question' holds '4', expected text or a list of",
    )


def test_prompts_that_are_all_too_long(task: Path) -> None:
    check(
        run("sampling.py", task / "run.yaml", "data.max_prompt_length=2", f"prompt.chat_template={CHATML}"),
        "no prompt left: all 1 are longer than data.max_prompt_length 2 tokens",
        "set data.max_prompt_length: ",
    )


def test_lengths_that_do_not_fit_the_engine(task: Path) -> None:
    check(
        run("sampling.py", task / "run.yaml", "vllm.max_model_len=700"),
        "data.max_prompt_length 512 + max_completion_length 256 = 768 tokens > vllm.max_model_len 700",
        "set vllm.max_model_len=768",
    )


def test_a_model_without_a_chat_template(task: Path) -> None:
    (task / "base").mkdir()
    for file in (task / "model").iterdir():
        if file.name != "chat_template.jinja":
            (task / "base" / file.name).write_text(file.read_text())
    check(
        run("sampling.py", task / "run.yaml", f"model.path={task}/base"),
        "the tokenizer has no chat template; set prompt.chat_template: configs/templates/chatml.jinja",
    )


@BOTH
def test_a_chat_template_that_is_not_there(task: Path, script: str) -> None:
    overrides = ["prompt.chat_template=chatlm.jinja", f"run.output_dir={task}/{script}"]
    check(run(script, task / "run.yaml", *overrides), "prompt.chat_template chatlm.jinja: ", "configs/templates/")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("fn(completions, solution):\n    return [0.0]", "fn wants 'solution'; the data set gives question, answer"),
        (
            "fn(completions, **columns):\n    return [1.0] * 7",
            "fn returned 7 values for 11 completions. First completion:",
        ),
        ("fn(completions, **columns):\n    return [float('nan')] * 11", "fn returned nan, expected a finite number"),
        ("fn(completions, **columns):\n    return ['good'] * 11", "fn returned 'good', expected a finite number"),
        (
            "fn(completions, **columns):\n    return [len(c[0]['content']) for c in completions]",
            'use completion, not completion[0]["content"] (docs/rewards.md#shapes)',
        ),
        ("fn(completions, **columns):\n    return [columns['reward_model']]", "KeyError: 'reward_model' (mine.py:2)"),
    ],
)
def test_a_reward_that_cannot_work(task: Path, body: str, said: str) -> None:
    (task / "mine.py").write_text(f"def {body}\n")
    check(run("sampling.py", task / "run.yaml", f"rewards.reward_funcs=[{task}/mine.py:fn]"), said)


def test_a_reward_argument_that_is_missing_names_what_to_write(task: Path) -> None:
    check(
        run("sampling.py", task / "run.yaml", "rewards.reward_funcs=[cosine_length]"),
        "rewards.reward_kwargs: {cosine_length: {max_len: …}}",
    )


def test_a_reward_that_gives_everything_the_same_score_is_said_at_the_start(task: Path) -> None:
    (task / "flat.py").write_text("def flat(completions, **columns):\n    return [0.5] * len(completions)\n")
    # the run ends at the next mistake, a limit that no prompt meets, so that no engine starts
    spec = f"rewards.reward_funcs=[{task}/flat.py:flat]"
    check(
        run("sampling.py", task / "run.yaml", spec, "data.max_prompt_length=2", f"prompt.chat_template={CHATML}"),
        "rewards: right, wrong and empty completions of row 0 all score 0.5: such a group has no gradient",
    )


def test_an_address_that_is_none(task: Path) -> None:
    check(run("sampling.py", task / "run.yaml", "channel.endpoint=localhost:5555"), "write tcp://10.0.0.1:5555")


def test_a_sink_whose_package_is_missing_is_told_with_the_pip_line_before_torch_is_imported(task: Path) -> None:
    missing = next(name for name in ("trackio", "swanlab", "wandb", "mlflow") if find_spec(name) is None)
    result = run("training_worker.py", task / "run.yaml", f"run.report_to=[tensorboard, {missing}]")
    check(result, f"python -m pip install {missing}, or leave it out: run.report_to=[tensorboard]")
