"""pass@k and maj@k against brute force, their intervals, and what `launch.sh eval` makes of its arguments."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import Config, Rewards, load
from common.errors import UserError
from launcher.evaluation import main as evaluation
from launcher.evaluation.pass_at_k import estimate, final_answer, majority, majority_at_k, pass_at_k, sizes
from launcher.evaluation.results import report, table
from launcher.evaluation.target import find_target
from report.run_log import wilson_interval
from tests.support.speed import limit, overdue

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("n", "c"), [(n, c) for n in (1, 2, 5, 6) for c in range(n + 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int, c: int) -> None:
    for k in range(1, n + 1):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_what_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="expected 0 ≤ c ≤ n and 1 ≤ k ≤ n"):
        pass_at_k(n, c, k)


def test_pass_at_1_is_the_mean_and_large_numbers_stay_exact() -> None:
    assert pass_at_k(200, 50, 1) == pytest.approx(0.25)
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{144}{2}}.", "72"),
        ("<think>70+2</think><answer>72.0</answer>", "72"),
        ("<answer>$1,200</answer>", "1200"),
        ("It is 71 or 72.", "72"),
        ("<answer>(B)</answer>", "(B)"),
        (r"\boxed{ x^2 }", "x^2"),
        ("I cannot say.", None),
        ("<answer></answer> 7", None),
        (r"\boxed{}", None),
    ],
)
def test_the_final_answer_of_a_completion(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_the_most_frequent_answer_decides_and_ties_are_shared() -> None:
    assert majority(["3", "4", "3"], [False, True, False]) == 0.0
    assert majority(["4", "4", "3"], [True, True, False]) == 1.0
    assert majority(["3", "4"], [False, True]) == 0.5
    assert majority(["4", None, None], [True, False, False]) == 1.0
    assert majority([None, None], [False, False]) == 0.0


def test_maj_at_k_is_close_to_the_mean_over_all_subsets() -> None:
    answers, right = ["4", "4", "3", "5", "3"], [True, True, False, False, False]
    for k in (2, 3, 4):
        subsets = list(itertools.combinations(range(5), k))
        exact = np.mean([majority([answers[i] for i in s], [right[i] for i in s]) for s in subsets])
        assert majority_at_k(answers, right, k) == pytest.approx(exact, abs=0.1)
    assert majority_at_k(answers, right, 5) == 0.5
    assert majority_at_k(answers, right, 3) == majority_at_k(answers, right, 3)


def test_an_interval_is_wilsons_for_shares_and_bootstrapped_for_means() -> None:
    found = estimate([1.0] * 30 + [0.0] * 10)
    assert (found.low, found.high) == wilson_interval(30, 40) and found.value == 0.75
    values = np.random.default_rng(3).uniform(0, 1, 400).tolist()
    found, error = estimate(values), 1.96 * np.std(values) / math.sqrt(400)  # normal theory holds at 400
    assert found.low == pytest.approx(np.mean(values) - error, abs=0.01)
    assert found.high == pytest.approx(np.mean(values) + error, abs=0.01)
    assert math.isnan(estimate([]).value) and (estimate([]).low, estimate([]).high) == (0.0, 1.0)


def test_the_sizes_shown_are_powers_of_two_and_n() -> None:
    assert [sizes(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def completion(problem: int, text: str, answer: float | None, form: float, length: int = 10) -> dict[str, Any]:
    rewards = {"answer": answer, "format": form}
    reason = "length" if length == 99 else "stop"
    return {
        "problem_index": problem,
        "completion": text,
        "rewards": rewards,
        "num_tokens": length,
        "finish_reason": reason,
    }


SAMPLES = [
    completion(0, "4", 1.0, 1.25), completion(0, "5", -1.0, -1.0),
    completion(3, "no", -1.0, -1.0, 99), completion(3, "7", -1.0, 1.25),
    completion(5, "1", None, 1.25), completion(5, "1", None, 1.25),
]  # fmt: skip


def test_a_report_counts_problems_and_leaves_out_what_does_not_apply() -> None:
    result = report(SAMPLES, 1, [1, 2], Rewards())
    answer, form = result["functions"]["answer"], result["functions"]["format"]
    assert (result["problems"], result["completions"], result["failed_problems"]) == (3, 6, 1)
    assert answer["problems"] == 2 and answer["mean"] == -0.5
    assert (answer["pass"]["1"]["value"], answer["pass"]["2"]["value"]) == (0.25, 0.5)
    assert answer["maj"]["2"]["value"] == 0.25  # a tie of 4 and 5, and 7 alone is wrong
    assert form["problems"] == 3 and form["pass"]["1"]["value"] == pytest.approx(2 / 3)
    assert "maj" not in form
    assert result["truncated"]["value"] == result["without_answer"]["value"] == pytest.approx(1 / 6)
    assert result["length"] == {"mean": (5 * 10 + 99) / 6, "p50": 10.0, "max": 99}
    assert json.loads(json.dumps(result)) == result
    lines = table(result).splitlines()
    assert lines[0].startswith("3 problems, 1 left out, 6 completions")
    assert any(line.startswith("answer          pass@1      25.0 %  [") for line in lines)
    assert any(line.startswith("answer          maj@2 ") for line in lines)


def test_a_report_without_any_sample_says_so() -> None:
    result = report([], 4, [1], Rewards())
    assert result["functions"]["answer"]["pass"] == {} and result["functions"]["answer"]["mean"] is None
    assert "0 problems, 4 left out" in table(result)


# ---- what is evaluated


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    config = Config.model_validate(
        {"model": {"path": "start"}, "data": {"train": "t", "eval": "e.jsonl"}, "vllm": {"max_model_len": 999}}
    )
    for name in ("checkpoints/step_000020", "checkpoints/step_000100"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    return folder


def test_a_run_folder_gives_its_final_model_or_its_newest_checkpoint(run_folder: Path) -> None:
    assert find_target(str(run_folder), None).model == str(run_folder / "checkpoints" / "step_000100")
    (run_folder / "final").mkdir()
    (run_folder / "final" / "config.json").write_text("{}")
    target = find_target(str(run_folder), None)
    assert (target.model, target.config) == (str(run_folder / "final"), run_folder / "config.json")
    assert target.output == run_folder / "evaluations"


def test_a_checkpoint_knows_the_settings_of_its_run(run_folder: Path) -> None:
    step = run_folder / "checkpoints" / "step_000020"
    target = find_target(str(step), None)
    assert (target.model, target.config) == (str(step), run_folder / "config.json")


def test_a_folder_of_adapters_is_evaluated_on_the_runs_own_model(run_folder: Path) -> None:
    (run_folder / "final").mkdir()
    (run_folder / "final" / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    target = find_target(str(run_folder), None)
    assert (target.model, target.rank) == (str(run_folder / "final"), 8)
    config = load(target.config, target.overrides())
    assert (config.model.path, config.lora.r, config.lora.publishes_adapters) == ("start", 8, True)
    whole = find_target(str(run_folder / "checkpoints" / "step_000020"), None)
    config = load(whole.config, ["lora.r=4", *whole.overrides()])
    assert (config.model.path, config.lora.r) == (whole.model, 0)
    (run_folder / "final" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter_config.json is not peft's"):
        find_target(str(run_folder), None)


def test_a_runs_own_settings_load_again(run_folder: Path) -> None:
    assert load(run_folder / "config.json").vllm == {"max_model_len": 999}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["RUN", "n=8"], "n=8 completions at temperature 0 are 8 times the same; set temperature=0.6, or n=1"),
        (["RUN", "--output", "x", "n=8"], "n=8 completions at temperature 0 are 8 times the same"),
        (["RUN", "n=4", "k=8", "temperature=1.0"], "pass@8 needs as many completions per problem and n is 4; set n=8"),
        (["RUN", "eval.temprature=1"], "eval.temprature: no such option. Did you mean eval.temperature?"),
        (["RUN", "none.jsonl"], "no file or folder none.jsonl"),
        (["RUN/nowhere"], "is no folder; name a run folder"),
        (["org/model"], "which prompts and rewards? Add --config"),
        (["RUN", "a", "b"], "expected CHECKPOINT and perhaps DATA, got"),
        (["n=3"], "expected CHECKPOINT and perhaps DATA, got neither"),
    ],
    ids=str,
)
def test_a_users_mistake_is_told_before_anything_is_loaded(run_folder: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        evaluation.main([argument.replace("RUN", str(run_folder)) for argument in arguments])
    assert words in str(error.value)


def test_a_model_outside_a_run_needs_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is in no run folder"):
        find_target(str(tmp_path), None)
    assert find_target(str(tmp_path), "configs/quickstart.yaml").config == Path("configs/quickstart.yaml")


def test_a_mistake_ends_the_process_with_2_and_no_traceback(run_folder: Path) -> None:
    begun = time.monotonic()
    command = [sys.executable, "-m", "launcher.evaluation.main", str(run_folder), "eval.temprature=1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ), timeout=limit(60))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert not overdue(time.monotonic() - begun, 5)  # 0.4 on an idle machine


@pytest.mark.parametrize("script", ["sampling.py", "training_worker.py"])
def test_the_two_processes_refuse_a_run_that_only_evaluates(script: str, run_folder: Path) -> None:
    command = [sys.executable, script, "--config", str(run_folder / "config.json"), "eval.val_only=true"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(100))
    assert result.returncode == 2
    assert "bash launch.sh run CONFIG eval.val_only=true" in result.stderr
