"""Every rule on a series made by hand, on both sides of its threshold; what it proposes can be pasted."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from common.config import load
from report.advice import RULES, History, _significant_change, advise
from tests.support.configs import config_of

Series = dict[str, Callable[[int], float] | float | None]


def said(steps: int, series: Series, **sections: Any) -> dict[str, str]:
    """What holds after so many steps, of which each that has a share of right answers ends with an evaluation."""
    series = dict(series)
    evaluated = series.pop(EVALUATED, None)
    history = History(config_of(**sections))
    if callable(evaluated):
        history.evaluations += [evaluation(step, evaluated(step)) for step in range(1, steps + 1)]
    for step in range(1, steps + 1):
        row = {name: value(step) if callable(value) else value for name, value in series.items()}
        history.add_step({"step": step, **row})
    return advise(history)


EVALUATED = "share of right answers"
PATIENCE = {
    "data": {"eval": "e.jsonl"},
    "eval": {"steps": 1, "metric_for_best_model": "answer/accuracy", "early_stopping_patience": 3},
}


def evaluation(step: int, share: float) -> dict[str, Any]:
    """Of 60 problems with this share of right answers in 100, and 40 that are right in every other evaluation."""
    right = [float(problem < 100 * share) for problem in range(60)] + [float((i + step) % 2) for i in range(40)]
    sizes = {"step": step, "n": 100, "problems": 100, "failed_problems": {}}
    return sizes | {"full_marks": {"answer": sum(right)}, "by_problem": {"answer/accuracy": right}}


def after(first: int, then: float, before: float = 0.0) -> Callable[[int], float]:
    return lambda step: then if step >= first else before


def wiggle(step: int) -> float:
    return 0.01 * (-1) ** step


class R(NamedTuple):
    """A rule: speaks of this series after so many steps in these words, but not one step earlier, nor with changes."""

    cause: str
    steps: int
    series: Series
    words: tuple[str, ...]
    silent: tuple[Series, ...] = ()
    sections: dict[str, Any] = {}  # noqa: RUF012  nobody changes it


def waiting(who: str, seconds: float) -> Series:
    return {f"wait/{who}_s": seconds, "timing/all_s": 2.0}


def function(name: str, mean: Any, std: float = 0.4, accuracy: Any = 0.0) -> Series:
    return {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std, f"rewards/{name}/accuracy": accuracy}


CONSTANT = function("boxed", 0.5, 0.0)
COLLAPSE = {"entropy": after(11, 0.03, before=0.4)} | function("answer", 0.0, accuracy=0.5)
RISES = {"reward": lambda s: 0.05 * s} | function("length", lambda s: 0.04 * s, 0.5)
FALLS = function("answer", lambda s: -0.011 * s + wiggle(s))
STOPS = {"rollout/tool_calls": after(15, 0.1, before=1.2)} | function("answer", 0.5, 0.1, 0.89)
TOOLS = {"rollout": {"tools": ["t.py:f"], "max_turns": 8}}
EIGHT = {"trainer": {"prompts_per_step": 8}, "sampler": {"num_generations": 8}}
FAILING = {f"rollout/failed_ratio/{kind}": 0.0 for kind in ("error", "timeout", "crash", "no_reward")}
CASES = (
    R("dead_groups", 5, {"frac_reward_zero_std": 0.9}, ("90% of the groups", "sampler.num_generations=16"),
      ({"frac_reward_zero_std": 0.89},)),
    R("constant_reward", 10, CONSTANT, ("reward boxed was 0.50 for every", "--worst"),
      (function("boxed", 1.0, 0.0, 1.0), {"rewards/boxed/std": after(10, 0.1)},
       {"rewards/boxed/mean": after(10, 0.01)})),
    R("unscored", 1, function("format", 1.0) | {"rewards/answer/none": 0.1}, ("answer is None for 10% of the",),
      ({"rewards/answer/none": None},)),
    R("truncated", 5, {"completions/clipped_ratio": 0.5}, ("50% of completions reach max_completion_length 128",
      "sampler.max_completion_length=256"), ({"completions/clipped_ratio": 0.49},),
      {"sampler": {"max_completion_length": 128}}),
    R("turns_exhausted", 5, {"rollout/max_turns_ratio": 0.5, "completions/clipped_ratio": 0.98},  # not called too short
      ("50% of rollouts end because they reached rollout.max_turns 8", "rollout.max_turns=16,"),
      ({"rollout/max_turns_ratio": 0.49},), TOOLS),
    R("truncated", 5, {"rollout/max_turns_ratio": 0.0, "completions/clipped_ratio": 0.5}, ("50% of completions",)),
    R("tools_unused", 24, STOPS, ("calls of tools fell from 1.20 to 0.10 in a rollout: it guesses instead.",),
      ({"rollout/tool_calls": after(15, 0.13, before=1.2)}, {"rewards/answer/accuracy": 0.9})),
    R("tools_unused", 10, {"rollout/tool_calls": 0.0}, ("no tool was called in the last 10",),
      ({"rollout/tool_calls": after(10, 0.01)},), TOOLS),
    R("tools_fail", 5, {"rollout/tool_calls": 2.0, "rollout/tool_errors": 1.8}, ("90% of the calls of tools",),
      ({"rollout/tool_errors": 1.79}, {"rollout/tool_calls": 0.0, "rollout/tool_errors": 0.0}), TOOLS),
    R("rollouts_fail", 10, FAILING | {"rollout/failed_ratio/timeout": 0.015, "rollout/failed_ratio/error": 0.006},
      ("2.1% of the rollouts", "by timeout", "rollout.timeout_s=60", "rollout.failure_reward"),
      ({"rollout/failed_ratio/timeout": 0.0139}, {"rollout/failed_ratio/timeout": after(5, 0.015)}), EIGHT),
    R("rollouts_fail", 10, FAILING | {"rollout/failed_ratio/error": 0.03}, ("by error", "reward -1 "), (),
      {"rollout": {"tools": ["t.py:f"], "failure_reward": -1}}),
    R("left_out", 11, {"rollout/failed_ratio/missing": 0.011}, ("1.1% of the rollouts", "rollout.timeout_s=60"),
      ({"rollout/failed_ratio/missing": 0.01}, {"rollout/failed_ratio/missing": after(7, 0.018)}), EIGHT),
    R("left_out", 11, {"tombstones": after(5, 3.0, before=2.0)}, ("1.2% of the rollouts", "rewards.timeout_s=20"),
      ({"tombstones": 3.0},), EIGHT),
    R("redrawn", 11, {"link/redrawn": after(5, 1.0)}, ("1.2% of the groups",),  # 1 of 80
      ({"link/redrawn": 7.0}, {"link/redrawn": None}), EIGHT),
    R("redrawn", 11, {"timing/sampler_redrawn": 0.1}, ("1.2% of the groups",),
      ({"timing/sampler_redrawn": 0.08},), EIGHT),
    # the trainer was restarted in step 8 and counts anew
    R("redrawn", 11, {"link/redrawn": lambda s: 5.0 if s < 8 else 1.0}, ("1.2% of the groups",), (), EIGHT),
    # ten steps, without the two of the warm-up
    R("trainer_waits", 12, waiting("trainer", 1.42),
      ("the trainer waits for the sampler 71% of the time", "sampler.num_samplers=2", "trainer.max_staleness=1"),
      (waiting("trainer", 1.38),)),
    R("sampler_waits", 12, waiting("sampler", 1.42), ("the sampler waits for the trainer 71% of the time",
      "trainer.groups_per_micro_batch=2", "trainer.max_staleness=1"), (waiting("sampler", 1.38),)),
    R("sampler_waits", 12, waiting("sampler", 1.42), ("trainer.max_tokens_per_micro_batch=8192",), (),
      {"trainer": {"max_tokens_per_micro_batch": 4096}}),
    # the quick start at 30 times its learning rate: 0.9, 3.3, 1.1, 3.2, 4.9 nats in steps 2 to 6
    R("kl_high", 6, {"kl": after(2, 2.69)}, ("2.69 nats per token", "trainer.learning_rate=0.0003",
      "algorithm.beta=0.04"), ({"kl": 0.99},), {"algorithm": {"beta": 0.01}, "trainer": {"learning_rate": 3e-3}}),
    R("entropy_collapse", 20, COLLAPSE, ("from 0.4 to 0.03", "algorithm.epsilon_high=0.28"),
      ({"rewards/answer/accuracy": 0.95}, {"entropy": after(11, 0.041, before=0.4)})),
    R("reward_hacking", 20, RISES | FALLS, ("the reward rose by 0.50 while answer fell by 0.11", "--best"),
      (function("answer", lambda s: -0.009 * s + wiggle(s)),  # −0.09, under a quarter of 0.4
       function("answer", lambda s: -0.01 * s + 20 * wiggle(s)), {"reward": 1.0})),
    R("mismatch_growing", 20, {"mismatch/mean_abs_prob_diff": after(11, 0.022, before=0.007)},
      ("disagree by 0.022", "algorithm.vllm_importance_sampling_mode=token_truncate"),
      ({"mismatch/mean_abs_prob_diff": after(11, 0.022, before=0.0074)},
       {"mismatch/mean_abs_prob_diff": after(11, 0.019, before=0.001)})),
    R("bounded_weights", 5, {"mismatch/correction_mean/to_1024": 0.98, "mismatch/correction_mean/to_4096": 0.78},
      ("to_4096 was 0.78", "algorithm.vllm_importance_sampling_mode=token_truncate"),
      ({"mismatch/correction_mean/to_4096": 0.81}, {"mismatch/correction_mean/to_4096": after(3, 0.98, before=0.78)},
       {"mismatch/correction_mean/to_4096": None})),
    # 40 of 100 problems turn: √0.4 / 10 = 0.063; 0.02 an evaluation is 0.06 in three, 0.03 is 0.09
    R("patience_in_noise", 4, {EVALUATED: lambda s: 0.02 * s}, ("changes by 0.060 in 3 evaluations", "by 0.06",
      "eval.early_stopping_patience=6"), ({EVALUATED: lambda s: 0.03 * s}, {EVALUATED: None}), PATIENCE),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cause)
def test_a_rule_speaks_from_its_threshold_on_and_not_before(case: R) -> None:
    found = said(case.steps, case.series, **case.sections)
    assert list(found) == [case.cause]
    assert [words for words in case.words if words not in found[case.cause]] == [], found
    assert said(case.steps - 1, case.series, **case.sections) == {}
    for change in case.silent:
        assert said(case.steps, case.series | change, **case.sections) == {}, change


@pytest.mark.parametrize(
    ("steps", "series", "sections"),
    [
        (30, {"frac_reward_zero_std": None, "kl": float("nan"), "entropy": None}, {}),
        (30, {"reward": 0.0}, {}),
        (20, {"entropy": lambda step: 0.4 if step <= 15 else None}, {}),
        (20, {"reward": RISES["reward"]} | FALLS, {}),  # a single function is the reward itself
        (10, {"rollout/tool_calls": 0.0}, {}),  # an environment may have no tools
        (20, {"mismatch/mean_abs_prob_diff": after(11, 0.5)}, {"trainer": {"max_staleness": 1}}),
        (20, {"mismatch/mean_abs_prob_diff": after(11, 0.5)}, {"algorithm": {"num_iterations": 2}}),
    ],
)
def test_what_is_not_known_or_does_not_apply_is_not_wrong(steps: int, series: Series, sections: Any) -> None:
    assert said(steps, series, **sections) == {}


def test_every_setting_that_a_sentence_proposes_can_be_pasted(tmp_path: Path) -> None:
    given = "{model: {path: m}, data: {train: t.jsonl, eval: e.jsonl}, algorithm: {beta: 0.01}, "
    given += "rollout: {tools: [t.py:f]}, eval: {steps: 1, metric_for_best_model: answer/accuracy}}"
    (tmp_path / "c.yaml").write_text(given)
    texts = [text for case in CASES for text in said(case.steps, case.series, **case.sections).values()]
    pasted = [word for text in texts for word in re.findall(r"\b[a-z]+\.[a-z_]+=[\w.+-]*\w", text)]
    assert len(pasted) >= 10
    for override in pasted:
        load(tmp_path / "c.yaml", [override])
    assert {case.cause for case in CASES} == set(RULES)


@pytest.mark.parametrize(("change", "moved"), [(1.42, 1.42), (1.41, 0.0), (-1.42, -1.42), (-1.41, 0.0)])
def test_a_mean_has_moved_where_it_moves_by_three_standard_errors_of_both_ends(change: float, moved: float) -> None:
    """Ten steps of 0 and 2 in turn have a variance of 10/9: 3 √((10/9 + 10/9) / 10) = 1.414."""
    history = History(config_of())
    for step in range(1, 31):
        history.add_step({"step": step, "x": 2.0 * (step % 2) + change * (step > 20)})
    assert _significant_change(history, "x") == pytest.approx(moved)
