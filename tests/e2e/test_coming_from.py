"""What people bring from TRL, verl and EasyR1, in the shapes of their public examples, to step 2: data files, reward
functions and a config with the keys alone that docs/coming_from.md names. The texts are our own."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from common.paths import ROOT
from examples.drawings import Drawings
from report.run_log import read_jsonl
from tests.support.own_process import run
from tests.support.pupils import files_of
from tests.support.tier import full
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.timeout(900)

SUMS = [(a, b, a + b) for a in range(2, 6) for b in range(3, 7)]


def keys(config: dict[str, Any], prefix: str = "") -> list[str]:
    """["data.train", …]"""
    nested = [keys(v, f"{k}.") if isinstance(v, dict) and not prefix else [f"{prefix}{k}"] for k, v in config.items()]
    return [key for part in nested for key in part]


def trained(framework: str, folder: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics of the run, with the functions of the page in ours.py."""
    page = (ROOT / "docs" / "coming_from.md").read_text()
    (section,) = re.findall(rf"^## {framework}\b.*?(?=^## |\Z)", page, re.M | re.S)
    assert [key for key in keys(config) if f"`{key}`" not in section] == [], "not on the page"
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (folder / "ours.py").write_text(code)
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    environment = os.environ | {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    run([sys.executable, "-m", "launcher.run", f"{folder}/run.yaml"], 400, env=environment)
    metrics = read_jsonl(folder / "run" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2] and all(m["grad_norm"] > 0 and not m["tombstones"] for m in metrics)
    return metrics


@full
def test_a_script_for_trl_with_chat_rows_and_a_solution(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    system = {"role": "system", "content": "Think first, in <think> and </think>. Then answer."}
    rows = [
        {
            "prompt": [system, {"role": "user", "content": f"A train has {a} carriages, {b} are added. How many?"}],
            "solution": f"${a} + {b} = {c}$",
            "completion_tokens": None,
        }
        for a, b, c in SUMS
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(
        "def brief(completions, **kwargs):\n"
        '    return [-len(completion[0]["content"]) / 100 for completion in completions]\n'
    )
    metrics = trained("TRL", tmp_path, {
        "model": {"path": f"{tmp_path}/model", "dtype": "float32"},
        "data": {"train": f"{tmp_path}/train.jsonl", "prompt_key": "prompt", "answer_key": "solution",
                 "max_prompt_length": 256},
        "rewards": {"reward_funcs": ["accuracy_reward", "think_format_reward", f"{tmp_path}/mine.py:brief"],
                    "reward_weights": [1.0, 0.5, 0.1]},
        "sampler": {"num_generations": 4, "max_completion_length": 16, "temperature": 1.0},
        "algorithm": {"beta": 0.001, "loss_type": "dapo", "scale_rewards": "batch"},
        "trainer": {"learning_rate": 1e-5, "max_steps": 2, "prompts_per_step": 2, "groups_per_micro_batch": 1,
                    "warmup_steps": 0},
        "run": {"output_dir": f"{tmp_path}/run", "report_to": [], "seed": 42},
    })  # fmt: skip
    assert metrics[0]["rewards/brief/mean"] < 0


@full
def test_a_parquet_file_for_verl_and_its_function(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    rows = [
        {
            "data_source": "mine/trains",
            "prompt": [
                {"role": "user", "content": f"{a} and {b} people get on. How many? End with #### and the number."}
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(c)},
            "extra_info": {"split": "train", "index": i, "question": f"{a} and {b}?", "answer": f"#### {c}"},
        }
        for i, (a, b, c) in enumerate(SUMS)
    ]
    for name, part in (("train", rows), ("test", rows[:4])):
        datasets.Dataset.from_list(part).to_parquet(str(tmp_path / f"{name}.parquet"))
    (tmp_path / "theirs.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        '    assert data_source == "mine/trains" and extra_info["split"] == "train"\n'
        '    return float(solution_str.endswith(f"#### {ground_truth}")) - len(solution_str) / 1000\n'
    )
    metrics = trained("verl", tmp_path, {
        "model": {"path": f"{tmp_path}/model", "gradient_checkpointing": True},
        "data": {"train": f"{tmp_path}/train.parquet", "eval": f"{tmp_path}/test.parquet", "prompt_key": "prompt",
                 "answer_key": "reward_model.ground_truth", "max_prompt_length": 256, "shuffle": True},
        "rewards": {"reward_funcs": [f"{tmp_path}/ours.py:score"]},
        "sampler": {"num_generations": 4, "max_completion_length": 16, "temperature": 1.0},
        "algorithm": {"adv_estimator": "grpo", "epsilon": 0.2, "beta": 0.001, "kl_estimator": "k3",
                      "loss_type": "dapo", "steps_per_generation": 2, "entropy_coef": 0.0},
        "trainer": {"learning_rate": 1e-6, "max_steps": 2, "prompts_per_step": 2, "max_grad_norm": 1.0,
                    "weight_decay": 0.01},
        "eval": {"before": False, "temperature": 1.0, "num_generations": 2},
        "run": {"output_dir": f"{tmp_path}/run"},
    })  # fmt: skip
    assert metrics[0]["rewards/score/mean"] < 0


@full
def test_a_parquet_file_with_images_for_easyr1_with_its_format_prompt_and_function(tmp_path: Path) -> None:
    files_of(Drawings(num_train=16, num_test=4, num_clean_steps=20, num_careless_steps=0, batch_size=16), tmp_path)
    rows = [
        {
            "images": [{"bytes": (tmp_path / row["images"][0]).read_bytes()}],
            "problem": "<image>" + row["question"].removeprefix("<image>"),
            "answer": row["answer"],
        }
        for row in read_jsonl(tmp_path / "train.jsonl")
    ]
    features = {"images": datasets.List(datasets.Image()), "problem": datasets.Value("string")}
    features["answer"] = datasets.Value("string")
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).to_parquet(f"{tmp_path}/train.parquet")
    (tmp_path / "r1v.jinja").write_text("{{ content | trim }} Think in <think> </think>, then answer.")
    (tmp_path / "theirs.py").write_text(
        "def compute_score(reward_inputs):\n"
        '    right = [float(row["ground_truth"] in row["response"]) for row in reward_inputs]\n'
        '    return [{"overall": r - len(row["response"]) / 1000} for r, row in zip(right, reward_inputs)]\n'
    )
    metrics = trained("EasyR1", tmp_path, {
        "model": {"path": f"{tmp_path}/model", "freeze_vision_tower": True},
        "data": {"train": f"{tmp_path}/train.parquet@train[:12]", "eval": f"{tmp_path}/train.parquet@train[12:]",
                 "prompt_key": "problem", "answer_key": "answer", "image_key": "images", "limit_images": 1,
                 "min_pixels": 3136, "max_pixels": 50176, "max_prompt_length": 200},
        "prompt": {"format_prompt": f"{tmp_path}/r1v.jinja"},
        "rewards": {"reward_funcs": [f"{tmp_path}/ours.py:accuracy"]},
        "sampler": {"num_generations": 4, "max_completion_length": 16, "temperature": 1.0},
        "algorithm": {"adv_estimator": "grpo", "beta": 0.01, "kl_estimator": "k3", "epsilon": 0.2, "epsilon_high": 0.3},
        "trainer": {"learning_rate": 1e-6, "max_steps": 2, "prompts_per_step": 2, "groups_per_micro_batch": 1,
                    "max_grad_norm": 1.0, "save_limit": 3},
        "eval": {"steps": 2, "before": True, "temperature": 0.5},
        "run": {"output_dir": f"{tmp_path}/run"},
    })  # fmt: skip
    assert metrics[0]["rewards/accuracy/mean"] != 0
