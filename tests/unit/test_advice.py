"""Every rule on a series made by hand, on both sides of its threshold; what it proposes can be pasted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from common.config import load
from report.advice import Adviser, replay
from report.advice_rules import RULES
from report.history import AdviceSettings
from tests.support.configs import config_of

Series = Callable[[int], float]
EVALUATION = {"n": 400, "problems": 400}


def settings_with(**changed: Any) -> AdviceSettings:
    """The defaults of the schema, but for these."""
    return replace(AdviceSettings.of({}), **changed)


def advise(steps: int, settings: AdviceSettings = AdviceSettings.of({}), **series: Series | float) -> dict[str, str]:  # noqa: B008
    """What holds after so many steps; "__" in a name stands for "/"."""
    adviser, found = Adviser(settings), {}
    for step in range(1, steps + 1):
        row = {name.replace("__", "/"): f(step) if callable(f) else f for name, f in series.items()}
        found = adviser.step(step, row)
    return found


def after(first: int, then: float, before: float = 0.0) -> Series:
    return lambda step: then if step >= first else before


def test_every_group_scoring_the_same_for_five_steps_is_dead_and_four_steps_or_89_percent_are_not():
    found = advise(5, frac_reward_zero_std=1.0, reward=-2.0)
    assert list(found) == ["dead_groups"]
    assert found["dead_groups"].startswith("every group scored the same in the last 5 steps (mean reward -2.00)")
    assert "sampler.num_generations=16" in found["dead_groups"]
    assert advise(4, frac_reward_zero_std=1.0, reward=-2.0) == {}
    assert advise(9, frac_reward_zero_std=0.89, reward=-2.0) == {}
    assert "90% of the groups" in advise(9, frac_reward_zero_std=0.9, reward=-2.0)["dead_groups"]


def test_a_reward_function_that_always_says_the_same_is_named_unless_it_is_full_marks_or_moves_a_little():
    constant = {"rewards__boxed__std": 0.0, "rewards__boxed__mean": 0.0, "rewards__boxed__accuracy": 0.0}
    found = advise(10, **constant, rewards__answer__std=0.4, rewards__answer__mean=0.0)
    assert list(found) == ["constant_reward"] and found["constant_reward"].startswith("reward boxed was 0.00 for every")
    assert advise(9, **constant) == {}
    assert advise(10, **constant | {"rewards__boxed__mean": 1.0, "rewards__boxed__accuracy": 1.0}) == {}
    assert advise(10, **constant | {"rewards__boxed__std": after(10, 0.1)}) == {}
    assert advise(10, **constant | {"rewards__boxed__mean": after(10, 0.01)}) == {}


def test_92_percent_of_cut_off_completions_ask_for_twice_the_length():
    found = advise(5, settings_with(max_completion_length=128), completions__clipped_ratio=0.92)
    expected = (
        "92% of completions reach max_completion_length 128 and end unfinished: the reward cannot see an answer. "
        "Set sampler.max_completion_length=256"
    )
    assert found == {"truncated": expected}
    assert advise(5, completions__clipped_ratio=0.49) == {}
    assert advise(4, completions__clipped_ratio=1.0) == {}


@pytest.mark.parametrize("who", ["trainer", "sampler"])
def test_waiting_for_70_percent_of_the_wall_time_is_a_bottleneck_and_69_are_not(who):
    def waiting(seconds: float, steps: int = 12, **settings: int) -> dict[str, str]:
        return advise(steps, settings_with(**settings), **{f"wait__{who}_s": seconds, "timing__all_s": 2.0})

    assert waiting(1.38) == {}
    assert waiting(1.4, steps=11) == {}  # the ten steps would begin with the warm-up
    found = waiting(1.42)
    other = "sampler" if who == "trainer" else "trainer"
    assert list(found) == [f"{who}_waits"]
    assert f"the {who} waits for the {other} 71% of the time" in found[f"{who}_waits"]
    assert "trainer.max_staleness=1" in found[f"{who}_waits"]
    assert "max_staleness" not in waiting(1.42, max_staleness=1)[f"{who}_waits"]


def test_a_trainer_that_waits_is_not_told_to_lower_what_decodes_at_once():
    """vllm.max_num_seqs is a batch of rollouts, up to 1,024, where nobody sets it."""
    waits = {"wait__trainer_s": 1.5, "timing__all_s": 2.0}
    found = advise(12, settings_with(max_staleness=1), **waits)["trainer_waits"]
    assert "sampler.num_samplers=2" in found and "max_num_seqs" not in found


def test_the_side_that_waits_is_offered_the_reference_where_it_can_move():
    def words(who: str, **settings: Any) -> str:
        return advise(12, settings_with(**settings), **{f"wait__{who}_s": 1.9, "timing__all_s": 2.0})[f"{who}_waits"]

    assert "reference.on=trainer" in words("trainer", beta=0.1, reference_on="sampler")
    assert "reference.on=sampler" in words("sampler", beta=0.1, reference_on="trainer")
    for nothing in (words("trainer"), words("trainer", beta=0.1), words("sampler", beta=0.1, reference_on="sampler")):
        assert "reference" not in nothing
    in_reward = AdviceSettings.of(config_of(algorithm={"beta": 0.1, "kl_in_reward": True}).model_dump())
    assert (in_reward.beta, in_reward.reference_on) == (0.1, "")


def test_a_kl_that_is_high_and_speeds_up_asks_for_a_smaller_step_and_one_that_is_high_and_steady_does_not():
    settings = settings_with(beta=0.01, learning_rate=1e-4)
    found = advise(20, settings, kl=after(11, 0.45, before=0.2))
    assert list(found) == ["kl_rising"]
    assert "0.45 nats per token and was 0.20" in found["kl_rising"]
    assert "trainer.learning_rate=5e-05" in found["kl_rising"] and "algorithm.beta=0.04" in found["kl_rising"]
    assert advise(20, settings, kl=0.45) == {}
    assert advise(20, settings, kl=after(11, 0.29, before=0.0)) == {}
    assert advise(19, settings, kl=after(11, 0.45)) == {}


def test_a_kl_above_one_nat_for_five_steps_is_a_lost_policy_from_the_fifth_step_on():
    """The quick start at 30 times its learning rate: 0.9, 3.3, 1.1, 3.2, 4.9 nats in steps 2 to 6."""
    settings = settings_with(beta=0.01, learning_rate=3e-3)
    found = advise(6, settings, kl=after(2, 2.69))
    assert list(found) == ["kl_high"]
    assert "2.69 nats per token" in found["kl_high"] and "trainer.learning_rate=0.0003" in found["kl_high"]
    assert advise(5, settings, kl=after(2, 2.69)) == {}
    assert advise(9, settings, kl=0.99) == {}


def test_an_entropy_below_a_tenth_of_the_start_is_a_collapse_unless_the_problems_are_solved():
    falls = {"entropy": after(11, 0.03, before=0.4), "rewards__answer__std": 0.5}
    found = advise(20, **falls, rewards__answer__accuracy=0.5, rewards__answer__mean=0.0)
    assert list(found) == ["entropy_collapse"]
    assert (
        "from 0.4 to 0.03" in found["entropy_collapse"] and "algorithm.epsilon_high=0.28" in found["entropy_collapse"]
    )
    assert advise(20, **falls, rewards__answer__accuracy=0.95, rewards__answer__mean=0.0) == {}
    assert advise(20, **falls | {"entropy": after(11, 0.041, before=0.4)}, rewards__answer__accuracy=0.5) == {}
    assert advise(19, **falls, rewards__answer__accuracy=0.5) == {}  # the first and the newest ten overlap


def test_a_reward_that_rises_while_one_of_its_functions_falls_is_worth_a_look():
    def wiggle(step: int) -> float:
        return 0.01 * (-1) ** step

    rises = {"reward": lambda s: 0.05 * s, "rewards__length__std": 0.5, "rewards__length__mean": lambda s: 0.04 * s}
    falls = {"rewards__answer__std": 0.4, "rewards__answer__mean": lambda s: -0.011 * s + wiggle(s)}
    found = advise(20, **rises, **falls)
    assert list(found) == ["reward_hacking"]
    assert "the reward rose by 0.50 while answer fell from -0.06 to -0.17" in found["reward_hacking"]
    slower = falls | {"rewards__answer__mean": lambda s: -0.009 * s + wiggle(s)}  # −0.09, under a quarter of 0.4
    assert advise(20, **rises, **slower) == {}
    assert advise(20, **rises, **falls | {"rewards__answer__mean": lambda s: -0.01 * s + 20 * wiggle(s)}) == {}  # noise
    assert advise(20, **rises | {"reward": 1.0}, **falls) == {}
    assert advise(20, reward=rises["reward"], **falls) == {}  # a single function is the reward itself


def test_a_gradient_cut_in_twenty_steps_of_twenty_is_rescaled_and_in_nineteen_it_is_not():
    settings = settings_with(max_grad_norm=1.0)
    found = advise(20, settings, grad_norm=lambda s: 4.0 + s / 100)
    assert list(found) == ["gradient_clipped"] and "trainer.max_grad_norm=8.2" in found["gradient_clipped"]
    assert advise(20, settings, grad_norm=after(2, 4.0, before=0.9)) == {}
    assert advise(19, settings, grad_norm=4.0) == {}


def test_a_mismatch_that_triples_to_two_percent_is_told_on_policy_only():
    grows = {"mismatch__mean_abs_prob_diff": after(11, 0.022, before=0.007)}
    assert "vllm_importance_sampling_mode=token_truncate" in advise(20, **grows)["mismatch_growing"]
    assert advise(20, settings_with(is_on_policy=False), **grows) == {}
    assert advise(20, mismatch__mean_abs_prob_diff=after(11, 0.022, before=0.0074)) == {}
    assert advise(20, mismatch__mean_abs_prob_diff=after(11, 0.019, before=0.001)) == {}


def held_out(first: int, last: int, train: float, n: int = 400) -> dict[str, str]:
    """Two evaluations of n problems, made after 10 and 20 steps; training accuracy 0.5 before, `train` after."""
    adviser = Adviser(AdviceSettings.of({}))
    rows = [
        {"step": step, "policy_version": step, "rewards/answer/accuracy": 0.5 if step <= 10 else train}
        for step in range(1, 21)
    ]
    records = [{"step": 0, "full_marks": {"answer": first}}, {"step": 20, "full_marks": {"answer": last}}]
    *_, (_, found) = replay(adviser, rows, [record | {"n": n, "problems": n} for record in records])
    return found


def test_held_out_accuracy_that_stays_while_training_accuracy_rises_is_told():
    found = held_out(200, 206, train=0.7)["held_out_flat"]
    assert "answer rose by 20 points on training problems and by 2 on held-out ones (50.0 % → 51.5 %)" in found
    assert held_out(200, 220, train=0.7) == {}  # 5 points are a quarter of 20
    assert held_out(200, 200, train=0.59) == {}
    assert held_out(5, 5, train=0.7, n=10) == {}  # of 10 problems, 70 % lie in the interval around 50 %


def test_missing_and_null_values_are_not_known_rather_than_wrong():
    assert advise(30, frac_reward_zero_std=None, kl=float("nan"), grad_norm=None) == {}
    assert advise(30, reward=0.0) == {}


def test_advice_does_not_grow_with_the_run():
    adviser = Adviser(AdviceSettings.of({}))
    for step in range(1, 1000):
        adviser.step(step, {"reward": 0.0})
        adviser.evaluation({"step": step, "full_marks": {"answer": 1}, **EVALUATION})
    history = adviser._history
    sizes = [len(x) for x in (history.early, history.late, history.evaluations, history.at_evaluation)]
    assert sizes == [10, 20, 2, 2]


def test_settings_come_from_a_config_or_from_its_json_and_a_strange_one_gives_defaults():
    given = config_of(sampler={"max_completion_length": 99}, trainer={"max_staleness": 1}, run={"output_dir": "runs/x"})
    expected = settings_with(
        output_dir="runs/x", max_completion_length=99, max_staleness=1, reference_on="sampler", is_on_policy=False
    )
    assert AdviceSettings.of(given.model_dump()) == AdviceSettings.of(given.model_dump(mode="json")) == expected
    assert AdviceSettings.of({}) == AdviceSettings.of(config_of().model_dump())
    assert AdviceSettings.of({"sampler": {"learning_rate": 1.0}, "trainer": None}) == AdviceSettings.of({})
    assert not AdviceSettings.of(config_of(algorithm={"num_iterations": 2}).model_dump()).is_on_policy


def test_every_setting_that_a_sentence_proposes_can_be_pasted(tmp_path):
    (tmp_path / "c.yaml").write_text("model: {path: m}\ndata: {train: t.jsonl}\nalgorithm: {beta: 0.01}")
    kl = {"kl": after(11, 1.45, before=0.2), "grad_norm": 3.0, "mismatch__mean_abs_prob_diff": after(11, 0.5)}
    waits = {"wait__trainer_s": 1.0, "wait__sampler_s": 1.0, "timing__all_s": 1.0, "frac_reward_zero_std": 1.0}
    entropy = {"entropy": after(11, 0.01, before=1.0), "completions__clipped_ratio": 1.0, "rewards__a__std": 1.0}
    found = advise(20, settings_with(beta=0.01), **kl, **waits, **entropy, reward=0.0)
    found |= held_out(200, 200, train=0.7)
    pasted = [word for text in found.values() for word in re.findall(r"\b[a-z]+\.[a-z_]+=[\w.+-]*\w", text)]
    assert len(pasted) >= 10
    for override in pasted:
        load(tmp_path / "c.yaml", [override])
    turns = {"tools_unused", "turns_exhausted", "tools_fail"}  # test_advice_turns.py
    assert set(RULES) - set(found) - turns == {"constant_reward", "reward_hacking"}  # they propose nothing of this form
