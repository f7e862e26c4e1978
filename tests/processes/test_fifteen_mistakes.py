"""The fifteen mistakes that cost users of such trainers most of their time, each made here, each answered at once.

Every answer says what happened, the value, and what to paste. Mistakes that end a command are made with the command
itself: exit code 2 (1 for a plan or a check that fails), no traceback, within 2 seconds of CPU time. What shows only
while a run is on its way is advice, and the run goes on (8 and 15). A peer that is absent or dies (14) needs both
processes: test_end_to_end.py::test_a_sampler_without_a_trainer_says_so_and_ends_with_75, test_endings.py and
test_watchdog.py hold that. More mistakes than these: test_user_errors.py.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from common import out_of_memory
from common.config import Config
from common.errors import UserError
from report.advice import Adviser
from report.history import AdviceSettings
from tests.support.commands import BOTH, CHATML, ROOT, ROW, check, make_task, run
from tests.support.speed import limit


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


@BOTH
def test_01_a_typo_in_the_config(task: Path, script: str) -> None:
    (task / "typo.yaml").write_text((task / "run.yaml").read_text() + "sampler:\n  temprature: 0.7\n")
    expected = f"{task}/typo.yaml:8: sampler.temprature: no such option. Did you mean sampler.temperature?"
    check(run(script, task / "typo.yaml"), expected)
    check(
        run(script, task / "run.yaml", "trainer.max_step=5"),
        "trainer.max_step: no such option. Did you mean trainer.max_steps?",
    )


@pytest.fixture(scope="module")
def hub_clone(task: Path) -> str:
    """A clone of a data set with two subsets, as of openai/gsm8k."""
    for subset in ("main", "socratic"):
        (task / "gsm8k" / subset).mkdir(parents=True)
        for split, rows in (("train", 3), ("test", 1)):
            (task / "gsm8k" / subset / f"{split}.jsonl").write_text((json.dumps(ROW) + "\n") * rows)
    parts = "".join(f"  - {{split: {s}, path: SUBSET/{s}.jsonl}}\n" for s in ("train", "test"))
    subsets = "".join(
        f"- config_name: {name}\n  data_files:\n{parts.replace('SUBSET', name)}" for name in ("main", "socratic")
    )
    (task / "gsm8k" / "README.md").write_text(f"---\nconfigs:\n{subsets}---\n")
    return f"{task}/gsm8k"


def test_02_a_data_set_without_its_subset(task: Path, hub_clone: str) -> None:
    check(
        run("sampling.py", task / "run.yaml", f"data.train={hub_clone}@train"),
        f"{hub_clone} has subsets main, socratic. Write {hub_clone}:main@train",
    )


def test_03_a_split_that_is_not_there(task: Path, hub_clone: str) -> None:
    check(
        run("sampling.py", task / "run.yaml", f"data.train={hub_clone}:main@validation"),
        f'split "validation" is not in {hub_clone}:main; it has train (3), test (1)',
    )


def test_04_a_column_that_is_not_there(task: Path) -> None:
    check(
        run("sampling.py", task / "run.yaml", "data.prompt_key=problem"),
        f'data.prompt_key "problem" not found in {task}/train.jsonl; columns are question, answer. '
        "Set data.prompt_key: question",
    )


def reward(task: Path, body: str) -> str:
    (task / "mine.py").write_text(f"def fn({body}\n")
    return f"rewards.reward_funcs=[{task}/mine.py:fn]"


def test_05_a_reward_that_wants_a_column_that_is_not_there(task: Path) -> None:
    check(
        run("sampling.py", task / "run.yaml", reward(task, "completions, solution):\n    return [0.0]")),
        "reward fn wants 'solution'; the data set gives question, answer",
        "data.rename: {answer: solution}, or give it a value in rewards.reward_kwargs: {fn: {solution: …}}",
    )


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("[1.0] * 7", "fn returned 7 values for 11 completions. First completion:"),
        ("[float('nan')] * 11", "fn returned nan, expected a finite number"),
        ("['good'] * 11", "fn returned 'good', expected a finite number"),
    ],
)
def test_06_a_reward_that_returns_something_else_than_one_number_each(task: Path, returned: str, said: str) -> None:
    check(run("sampling.py", task / "run.yaml", reward(task, f"completions, **columns):\n    return {returned}")), said)


def test_07_a_reward_that_takes_text_for_messages(task: Path) -> None:
    body = "completions, **columns):\n    return [len(c[0]['content']) for c in completions]"
    check(
        run("sampling.py", task / "run.yaml", reward(task, body)),
        "fn raised TypeError: string indices must be integers",
        'use completion, not completion[0]["content"] (docs/rewards.md#shapes)',
    )


def test_08_no_learning_signal(task: Path) -> None:
    """Before the run by `check`; in it after five steps."""
    flat = reward(task, "completions, **columns):\n    return [0.5] * len(completions)")
    ended = run("check", task / "run.yaml", flat)
    check(ended, "problem: on 1 of 1 rows right, wrong and empty completions all score the same", code=1)
    adviser = Adviser(AdviceSettings.of({}))
    said = [adviser.step(step, {"frac_reward_zero_std": 1.0, "reward": 0.0}) for step in range(1, 6)]
    assert said[3] == {} and list(said[4]) == ["dead_groups"]
    assert said[4]["dead_groups"].startswith("every group scored the same in the last 5 steps (mean reward 0.00)")
    assert "samples" in said[4]["dead_groups"]


@pytest.mark.parametrize("script", ["sampling.py", "training_worker.py", "run"])
def test_09_a_model_that_is_not_there_and_no_network(task: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(task / "hub"))
    check(
        run(script, task / "run.yaml", "model.path=Qwen/Qwen2.5-1.5B", f"run.output_dir={task}/absent"),
        "model 'Qwen/Qwen2.5-1.5B' is not a folder and cannot be had from the hub or ",
        f"HF_HOME={task}/hub; HF_HUB_OFFLINE=1",
        "Download: hf download Qwen/Qwen2.5-1.5B, or set model.path to a folder. Behind a firewall: HF_ENDPOINT=…",
    )


@pytest.mark.parametrize("script", ["sampling.py", "training_worker.py", "run"])
def test_10_a_model_without_a_chat_template(task: Path, script: str) -> None:
    (task / "base").mkdir(exist_ok=True)
    for file in (task / "model").iterdir():
        if file.name != "chat_template.jinja":
            (task / "base" / file.name).write_text(file.read_text())
    check(
        run(script, task / "run.yaml", f"model.path={task}/base", f"run.output_dir={task}/untold"),
        "the tokenizer has no chat template; set prompt.chat_template: configs/templates/chatml.jinja",
    )


@BOTH
def test_11_both_processes_on_one_gpu(task: Path, script: str) -> None:
    check(
        run(script, task / "run.yaml", "sampler.devices=[0]", "trainer.devices=[0, 1]"),
        "GPU 0 is in sampler.devices [0] and in trainer.devices [0, 1]; give each process its own",
    )


QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


def test_12_memory_that_cannot_suffice_is_told_by_the_plan(task: Path) -> None:
    for file in (task / "model").iterdir():
        (task / "large").mkdir(exist_ok=True)
        (task / "large" / file.name).write_text(file.read_text())
    (task / "large" / "config.json").write_text(json.dumps(QWEN_7B))
    ended = run("plan", task / "run.yaml", f"model.path={task}/large", "--gpus", "2x24")
    check(ended, "does not fit: a trainer rank needs about", code=1, cpu_s=10)  # the plan shows a prompt: tokenizer


def test_12_memory_that_runs_out_is_told_with_the_settings_that_need_less() -> None:
    code = """
from common import exits, out_of_memory
def main():
    import torch
    with out_of_memory.with_memory_advice("trainer"):
        torch.empty(10**15)
raise SystemExit(exits.run("trainer", main))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("tandem: trainer: the trainer ran out of memory: ") and "4000000000000000 bytes" in last
    assert "model.gradient_checkpointing=true, trainer.groups_per_micro_batch=1" in last


@pytest.mark.parametrize(
    ("file", "said", "remedy"),
    [
        (
            "worker/utils.py",
            "Free memory on device cuda:0 (41.0/79.3 GiB) on startup is less than desired GPU memory utilization (0.9)",
            "vllm.gpu_memory_utilization lower",
        ),
        ("core/kv_cache_utils.py", "No available memory for the cache blocks.", "gpu_memory_utilization higher"),
        (
            "core/kv_cache_utils.py",
            "1.5 GiB KV cache is needed, which is larger than the available KV cache memory (0.5 GiB)",
            "vllm.max_model_len lower",
        ),
    ],
)
def test_12_what_vllm_says_of_memory_is_still_what_we_look_for(file: str, said: str, remedy: str) -> None:
    told = out_of_memory.memory_advice("sampler", ValueError(said))
    assert told is not None and said in told and remedy in told
    assert out_of_memory.memory_advice("sampler", ValueError("max_model_len must be positive")) is None
    (place,) = find_spec("vllm").submodule_search_locations  # type: ignore[union-attr]
    source = re.sub(r'"\s*f?"', "", (Path(place) / "v1" / file).read_text())
    signs = [sign for sign in out_of_memory._ENGINE if sign in said]
    assert signs and all(sign in source for sign in signs)


@BOTH
def test_13_steps_that_do_not_divide_into_batches(task: Path, script: str) -> None:
    """Groups and ranks need not divide: test_uneven_ranks.py."""
    check(
        run(script, task / "run.yaml", "trainer.max_steps=200", "algorithm.steps_per_generation=3"),
        "trainer.max_steps 200 does not divide by algorithm.num_iterations 1 × steps_per_generation 3",
        "set trainer.max_steps=201",
    )


def test_14_a_port_that_is_taken(task: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        check(
            run("training_worker.py", task / "run.yaml", f"channel.endpoint=tcp://127.0.0.1:{port}"),
            f"cannot bind tcp://127.0.0.1:{port}: Address already in use, port {port} is used by pid {os.getpid()} (",
            "Stop what uses it, or set channel.endpoint to a free address of this host",
        )


def test_15_everything_is_cut_off() -> None:
    adviser = Adviser(AdviceSettings.of({"sampler": {"max_completion_length": 128}}))
    said = [adviser.step(step, {"completions/clipped_ratio": 0.92}) for step in range(1, 6)]
    assert said[-1] == {
        "truncated": "92% of completions reach max_completion_length 128 and end unfinished: the reward cannot see an "
        "answer. Set sampler.max_completion_length=256"
    }


def test_15_prompts_that_are_too_long_are_counted_and_if_all_are_the_run_ends(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from model.tokenizer import load_tokenizer
    from sampler.dataset import load_data
    from sampler.start import prompts_of

    lines = [ROW, ROW, {"question": "What is " + "2+" * 200 + "2?", "answer": "#### 402"}]
    (task / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    sections = {
        "model": {"path": str(task / "model")},
        "data": {"train": f"{task}/long.jsonl", "max_prompt_length": 99},
    }
    config, tokenizer = Config.model_validate(sections), load_tokenizer(str(task / "model"))
    problems = load_data("data.train", config.data.train, config.data)
    assert len(prompts_of("data.train", problems, tokenizer, config)) == 2
    said = "1 of 3 prompts have more than 99 tokens (data.max_prompt_length) and are left out"
    assert said in capsys.readouterr().err
    with pytest.raises(UserError, match=r"all 1 are longer than data\.max_prompt_length 99"):
        prompts_of("data.train", problems[2:], tokenizer, config)


def test_15_a_prompt_and_a_completion_that_do_not_fit_the_engine(task: Path) -> None:
    check(
        run("sampling.py", task / "run.yaml", "vllm.max_model_len=700", f"prompt.chat_template={CHATML}"),
        "data.max_prompt_length 512 + max_completion_length 256 = 768 tokens > vllm.max_model_len 700",
        "set vllm.max_model_len=768",
    )


@pytest.mark.parametrize("script", ["sampling.py", "training_worker.py", "run", "plan"])
def test_15_a_prompt_and_a_completion_that_the_model_has_no_positions_for(task: Path, script: str) -> None:
    (task / "short").mkdir(exist_ok=True)
    for file in (task / "model").iterdir():
        (task / "short" / file.name).write_text(file.read_text())
    (task / "short" / "config.json").write_text(json.dumps(QWEN_7B | {"max_position_embeddings": 600}))
    check(
        run(script, task / "run.yaml", f"model.path={task}/short", f"run.output_dir={task}/short_run"),
        "data.max_prompt_length 512 + max_completion_length 256 = 768 tokens > the 600 positions of ",
        "set data.max_prompt_length=344",
    )
