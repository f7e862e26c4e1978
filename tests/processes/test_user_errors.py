"""What a person can fix exits 2 at once, with the value and the remedy, and never with a traceback.

The commonest mistakes are in test_fifteen_mistakes.py.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from common import durable
from common.errors import UserError
from tests.support.commands import BOTH, CHATML, ROOT, check, make_task, run


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


@BOTH
def test_a_config_that_is_not_there(task: Path, script: str) -> None:
    check(run(script, task / "rnu.yaml"), "rnu.yaml: No such file or directory", f"Did you mean {task}/run.yaml?")


@BOTH
def test_an_option_that_is_no_override(task: Path, script: str) -> None:
    check(run(script, task / "run.yaml", "max_steps"), "'max_steps' is not key=value; write for example")


@BOTH
def test_a_model_folder_that_is_not_there(task: Path, script: str) -> None:
    check(run(script, task / "run.yaml", "model.path=./nowhere"), "./nowhere", "no such folder", "model.path")


@pytest.mark.parametrize("script", ["training_worker.py", "run"])
def test_ranks_that_a_sequence_cannot_be_divided_over(task: Path, script: str) -> None:
    said = "sequence_parallel_size 2 does not divide the trainer's 1 rank; set trainer.num_ranks=2"
    check(run(script, task / "run.yaml", "trainer.sequence_parallel_size=2"), said)


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


def test_data_that_is_not_there(task: Path) -> None:
    check(
        run("sampling.py", task / "run.yaml", f"data.train={task}/trian.jsonl"),
        f"no file or folder {task}/trian.jsonl",
        f"Did you mean {task}/train.jsonl?",
    )


@pytest.mark.parametrize(
    "override", ["data.train=mine.jsonl", "rewards.reward_funcs=[mine.py:fn]", "model.path=./mine"], ids=str
)
def test_a_path_that_is_meant_from_the_callers_folder_is_shown_whole(
    task: Path, override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine.jsonl", "mine.py"):
        (tmp_path / name).touch()
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("TANDEM_CALLED_FROM", str(tmp_path))
    said = f" Paths count from {ROOT}. Did you mean {tmp_path}/mine"
    check(run("sampling.py", task / "run.yaml", override), said)


def test_a_reward_that_does_not_exist(task: Path) -> None:
    check(run("sampling.py", task / "run.yaml", "rewards.reward_funcs=[anwser]"), "anwser", "answer")


@pytest.mark.parametrize("script", ["training_worker.py", "run", "plan"])
@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "adv_estimator=TASK/own.py:shot",
            "algorithm.adv_estimator 'TASK/own.py:shot': no function 'shot' in TASK/own.py",
        ),
        (
            "loss=TASK/won.py:short",
            "algorithm.loss 'TASK/won.py:short': no file TASK/won.py. Did you mean TASK/own.py?",
        ),
        (
            "loss=TASK/own.py:short",
            "algorithm.loss 'TASK/own.py:short' wants 'rewards'; it gets logprobs, old_logprobs",
        ),
    ],
    ids=["function", "file", "signature"],
)
def test_an_estimator_or_a_loss_that_cannot_be_called(task: Path, script: str, override: str, said: str) -> None:
    (task / "own.py").write_text("import torch\n\n\ndef short(rewards):\n    return rewards\n")
    overrides = [f"algorithm.{override}".replace("TASK", str(task)), f"prompt.chat_template={CHATML}"]
    check(run(script, task / "run.yaml", *overrides, f"run.output_dir={task}/own"), said.replace("TASK", str(task)))


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
        cpu_s=10,  # tokenising needs transformers
    )


@BOTH
def test_a_chat_template_that_is_not_there(task: Path, script: str) -> None:
    overrides = ["prompt.chat_template=chatlm.jinja", f"run.output_dir={task}/{script}"]
    check(run(script, task / "run.yaml", *overrides), "prompt.chat_template chatlm.jinja: no such file", "configs/")


def test_a_reward_that_raises_on_every_row_is_named_with_its_line(task: Path) -> None:
    (task / "mine.py").write_text("def fn(completions, **columns):\n    return [columns['reward_model']]\n")
    spec = f"rewards.reward_funcs=[{task}/mine.py:fn]"
    check(run("sampling.py", task / "run.yaml", spec), "KeyError: 'reward_model' (mine.py:2)")


def test_a_reward_argument_that_is_missing_names_what_to_write(task: Path) -> None:
    check(
        run("sampling.py", task / "run.yaml", "rewards.reward_funcs=[get_soft_overlong_punishment]"),
        "rewards.reward_kwargs: {get_soft_overlong_punishment: {max_completion_len: …}}",
    )


def test_a_reward_that_gives_everything_the_same_score_is_said_at_the_start(task: Path) -> None:
    (task / "flat.py").write_text("def flat(completions, **columns):\n    return [0.5] * len(completions)\n")
    # the run ends at the next mistake, a limit that no prompt meets, so that no engine starts
    spec = f"rewards.reward_funcs=[{task}/flat.py:flat]"
    check(
        run("sampling.py", task / "run.yaml", spec, "data.max_prompt_length=2", f"prompt.chat_template={CHATML}"),
        "rewards: right, wrong and empty completions of row 0 all score 0.5: such a group has no gradient",
        cpu_s=10,
    )


def test_an_address_that_is_none(task: Path) -> None:
    check(run("sampling.py", task / "run.yaml", "channel.endpoint=localhost:5555"), "write tcp://10.0.0.1:5555")


def test_a_sink_whose_package_is_missing_is_told_with_the_pip_line_before_torch_is_imported(task: Path) -> None:
    missing = "wandb"
    if find_spec(missing):
        pytest.skip("wandb is installed")
    result = run("training_worker.py", task / "run.yaml", f"run.report_to=[tensorboard, {missing}]")
    check(result, f"python -m pip install {missing}, or leave it out: run.report_to=[tensorboard]")
