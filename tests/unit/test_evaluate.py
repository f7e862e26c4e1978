"""pass@k and maj@n against brute force, their intervals, and what `launch.sh eval` makes of its arguments."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from common.config import Rewards, load
from common.errors import UserError
from launcher.evaluation import main as evaluation
from launcher.evaluation.main import find_target
from launcher.evaluation.results import estimate, final_answer, majority, pass_at_k, report, sizes, table
from report.full_marks import wilson_interval
from tests.support.configs import config_of


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    for n in (1, 2, 5, 6):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5), "large numbers stay exact"
    assert [sizes(n) for n in (0, 1, 2, 6, 8)] == [[], [1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


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


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["3", "4", "3"], [False, True, False], 0.0),
        (["4", "4", "3"], [True, True, False], 1.0),
        (["3", "4"], [False, True], 0.5),
        (["4", None, None], [True, False, False], 1.0),
        ([None, None], [False, False], 0.0),
        (["4", "4", "3", "5", "3"], [True, True, False, False, False], 0.5),
    ],
)
def test_a_majority_decides_and_ties_are_shared(answers: list[str | None], right: list[bool], expected: float) -> None:
    assert majority(answers, right) == expected


def test_an_interval_is_wilsons_for_shares_and_normal_for_means() -> None:
    low, high = wilson_interval(30, 40)
    assert estimate([1.0] * 30 + [0.0] * 10) == {"value": 0.75, "low": low, "high": high}
    half = 1.96 * 0.25 / 2  # standard deviation 0.25, four problems
    assert estimate([0.25, 0.75, 0.25, 0.75]) == pytest.approx({"value": 0.5, "low": 0.5 - half, "high": 0.5 + half})
    assert (estimate([0.1, 0.0])["low"], estimate([0.9, 1.0])["high"]) == (0.0, 1.0)
    assert math.isnan(estimate([])["value"]) and (estimate([])["low"], estimate([])["high"]) == (0.0, 1.0)


def completion(problem: int, text: str, answer: float | None, form: float, length: int = 10) -> dict[str, Any]:
    ended = {"num_tokens": length, "finish_reason": "length" if length == 99 else "stop", "source": ""}
    return ended | {"problem_index": problem, "completion": text, "rewards": {"answer": answer, "format": form}}


SAMPLES = [
    completion(0, "4", 1.0, 1.25), completion(0, "5", -1.0, -1.0),
    completion(3, "no", -1.0, -1.0, 99), completion(3, "7", -1.0, 1.25),
    completion(5, "1", None, 1.25), completion(5, "1", None, 1.25),
]  # fmt: skip


def test_a_report_counts_problems_and_leaves_out_what_does_not_apply() -> None:
    result = report(SAMPLES, 1, Rewards())
    answer, form = result["functions"]["answer"], result["functions"]["format"]
    assert (result["problems"], result["completions"], result["failed_problems"]) == (3, 6, 1)
    assert answer["problems"] == 2 and answer["mean"] == -0.5
    assert {k: found["value"] for k, found in answer["pass"].items()} == {"1": 0.25, "2": 0.5}
    assert answer["maj"]["2"]["value"] == 0.25  # a tie of 4 and 5, and 7 alone is wrong
    assert form["problems"] == 3 and form["pass"]["1"]["value"] == pytest.approx(2 / 3)
    assert "maj" not in form
    assert result["truncated"]["value"] == result["without_answer"]["value"] == pytest.approx(1 / 6)
    assert result["length"] == {"mean": (5 * 10 + 99) / 6, "p50": 10.0, "max": 99}
    assert json.loads(json.dumps(result)) == result
    said = table(result)
    assert said.startswith("3 problems, 1 left out, 6 completions") and "median 10, longest 99" in said
    assert "\nanswer          pass@1      25.0 %  [" in said and "\nanswer          maj@2 " in said
    assert report(SAMPLES[:1], 0, Rewards())["functions"]["answer"]["maj"] == {}, "one has no majority"
    nothing = report([], 4, Rewards())
    assert nothing["functions"]["answer"]["pass"] == {} and nothing["functions"]["answer"]["mean"] is None
    assert "0 problems, 4 left out" in table(nothing)


def test_each_of_several_sources_has_its_own_lines() -> None:
    samples = [s | {"source": "sums" if s["problem_index"] < 5 else "games"} for s in SAMPLES]
    functions = report(samples, 0, Rewards())["functions"]
    assert list(functions) == ["answer", "format", "games/format", "sums/answer", "sums/format"]
    assert functions["sums/answer"]["pass"] == functions["answer"]["pass"]
    assert functions["games/format"]["pass"]["1"]["value"] == 1.0
    assert "\nsums/answer     pass@1      25.0 %  [" in table(report(samples, 0, Rewards()))


# ---- what is evaluated


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    config = config_of({"path": "start"}, {"eval": "e.jsonl"}, vllm={"max_model_len": 999})
    for name in ("checkpoints/step_000020", "checkpoints/step_000100"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    return folder


def test_a_run_gives_its_final_model_or_its_newest_checkpoint_and_each_knows_its_settings(run: Path) -> None:
    newest = run / "checkpoints" / "step_000100"
    assert find_target(str(run), None).model == str(newest)
    (run / "final").mkdir()
    (run / "final" / "config.json").write_text("{}")
    for given, model in ((run, run / "final"), (newest, newest)):
        target = find_target(str(given), None)
        assert (target.model, target.config, target.output) == (str(model), run / "config.json", run / "evaluations")


def test_a_folder_of_adapters_is_evaluated_on_the_runs_own_model(run: Path) -> None:
    (run / "final").mkdir()
    (run / "final" / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    target = find_target(str(run), None)
    assert (target.model, target.rank) == (str(run / "final"), 8)
    config = load(target.config, target.overrides())
    assert (config.model.path, config.lora.r, config.lora.publishes_adapters) == ("start", 8, True)
    whole = find_target(str(run / "checkpoints" / "step_000020"), None)
    config = load(whole.config, ["lora.r=4", *whole.overrides()])
    assert (config.model.path, config.lora.r) == (whole.model, 0)
    (run / "final" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter_config.json is not peft's"):
        find_target(str(run), None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["RUN", "eval.num_generations=8"], "are 8 times the same completion; set eval.temperature=0.6"),
        (["RUN", "eval.temprature=1"], "eval.temprature: no such option. Did you mean eval.temperature?"),
        (["RUN", "none.jsonl"], "no file or folder none.jsonl"),
        (["RUN/nowhere"], "is no folder; name a run folder"),
        (["RUN/.."], "is in no run folder"),
        (["RUN/..", "--config", "configs/quickstart.yaml"], "is no model: it has no config.json"),
        (["org/model"], "which prompts and rewards? Add --config"),
        (["RUN", "a", "b"], "expected CHECKPOINT and perhaps DATA, got"),
        (["eval.top_p=0.3"], "expected CHECKPOINT and perhaps DATA, got neither"),
        (["RUN", "data.eval=null"], "no held-out data: name it after the checkpoint"),
    ],
    ids=str,
)
def test_a_users_mistake_is_told_before_anything_is_loaded(run: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        evaluation.main([argument.replace("RUN", str(run)) for argument in arguments])
    assert words in str(error.value)


def test_other_data_need_not_have_the_set_that_the_best_policy_was_of(run: Path) -> None:
    best = {"metric_for_best_model": "hard/answer/mean", "load_best_model_at_end": True}
    config = config_of({"path": "start"}, {"eval": {"easy": "d.jsonl", "hard": "e.jsonl"}}, eval=best)
    (run / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    with pytest.raises(UserError, match="no file or folder none"):
        evaluation.main([str(run), "none.jsonl"])
