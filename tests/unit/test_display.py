"""What a person sees: every expected line is written by hand."""

import io
import math
from typing import Any

import pytest

from report.display import StepDisplay, clock, step_line
from tests.support.configs import config_of

VALUES = {
    "reward": 1.42,
    "reward_std": 0.31,
    "frac_reward_zero_std": 0.12,
    "rewards/answer/mean": 0.22,
    "rewards/answer/accuracy": 0.61,
    "rewards/format/mean": 0.93,
    "completions/mean_length": 23.4,
    "completions/clipped_ratio": 0.02,
    "kl": 0.004,
    "tokens_per_second": 1830.2,
    "step_time": 1.1,
    "wait/trainer_s": 0.231,
    "wait/sampler_s": 0.033,
    "policy_version": 12,
    "staleness/mean": 0.0,
    "tombstones": 0,
}
LINE = (
    "step 12/60  reward 1.42 ±0.31  answer 0.61  format 0.93  kl 0.004  len 23  dead 12%  1830 tok/s  1.1 s  "
    "trainer waited 21%  v12 (0 behind)  ETA 0:54"
)
EVALUATION = {"step": 40, "n": 512, "full_marks": {"answer": 300, "format": 500}}


class Shown(StepDisplay):
    """Of a run of 60 steps, with a clock of its own."""

    def __init__(self, **sections: Any) -> None:
        self.stream, self.seconds = io.StringIO(), 100.0
        super().__init__(config_of(trainer={"max_steps": 60}, **sections), self.stream, lambda: self.seconds)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


SICK = {"reward": math.nan, "kl": 0.000012, "tombstones": 2, "wait/sampler_s": 3.0, "wait/trainer_s": 1.0}
SICK |= {"step_time": 4.0, "policy_version": 3, "staleness/mean": 1.5}
TURNS = {"rollout/turns": 2.04, "rollout/tool_calls": 1.25, "rollout/tool_errors": 0.1, "rollout/failures": 3.0}


@pytest.mark.parametrize(
    ("place", "values", "eta_s", "expected"),
    [
        ((12, 60), VALUES, 54.0, LINE),
        ((1, 2), {"reward": -0.5, "kl": None}, None, "step 1/2  reward -0.50"),
        (
            (3, 9),
            SICK,
            3601.4,
            "step 3/9  reward nan  kl 1.2e-05  tombstones 2  4.0 s  sampler waited 75%  v3 (1.5 behind)  ETA 1:00:01",
        ),
        (
            (1, 2),
            {"step_time": 1.0, "timing/all_s": 4.0, "wait/sampler_s": 2.0},
            None,
            "step 1/2  1.0 s  sampler waited 50%",
        ),
        ((1, 2), {"step_time": 1.0, "wait/sampler_s": 1.21}, None, "step 1/2  1.0 s  sampler waited 100%"),
        ((1, 2), TURNS, None, "step 1/2  turns 2.0  calls 1.25 (8% failed)  3 failed rollouts"),
        ((1, 2), {"rewards/\x1b[31mred\x1b[0m\nname/mean": 1.0}, None, "step 1/2  ␛[31mred␛[0m␊name 1.00"),
    ],
)
def test_a_step_is_one_line_with_what_was_measured(place, values, eta_s, expected):
    assert step_line(*place, values, eta_s) == expected


def test_clock_writes_minutes_and_hours():
    assert [clock(s) for s in (9.4, 59.6, 3599, 3754, 90_000)] == ["0:09", "1:00", "59:59", "1:02:34", "25:00:00"]


def test_a_line_per_step_note_and_evaluation_with_the_end_estimated_from_the_pace():
    display = Shown()
    display.note("resumed at step 9")
    display.step(10, VALUES)  # the only pace known is step_time: 50 · 1.1 s
    display.seconds += 2.25
    display.step(12, VALUES)  # 2 steps in 2.25 s, 48 steps left
    display.evaluation(EVALUATION)
    first = LINE.replace("step 12", "step 10").replace("ETA 0:54", "ETA 0:55")
    held_out = "held-out  answer 58.6%  format 97.7%  (v40, n = 512)"
    assert display.lines == ["resumed at step 9", first, LINE, held_out]


def test_what_the_stream_cannot_encode_is_replaced_and_a_closed_one_ends_the_display_and_not_the_run():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    display = StepDisplay(config_of(), stream)
    display.step(12, VALUES)
    assert b"reward 1.42 ?0.31  answer 0.61" in raw.getvalue()
    stream.close()
    display.step(13, VALUES)
    display.note("still here")


def test_advice_is_said_once_per_cause_and_counted_in_every_step_while_it_holds():
    display = Shown()
    cut, whole = {"completions/clipped_ratio": 0.9}, {"completions/clipped_ratio": 0.0}
    found = [display.advice(step, values) for step, values in enumerate([*[cut] * 6, *[whole] * 5, *[cut] * 5], 1)]
    expected = [step in (5, 6, 7, 8, 14, 15, 16) for step in range(1, 17)]  # 3 of 5 steps at 0.9 are a mean of 0.54
    assert [values == {"advice/truncated": 1.0} for values in found] == expected
    (said,) = display.lines
    assert said.startswith("advice: 90% of completions reach max_completion_length 256")


def test_advice_after_a_resume_goes_on_where_it_was():
    values, display = {"completions/clipped_ratio": 0.9, "policy_version": 1}, Shown()
    display.recall([{"step": step, **values} for step in range(1, 5)], [{**EVALUATION, "step": 0}])
    assert display.advice(5, values) == {"advice/truncated": 1.0}


OWN = {"rewards/mine/mean": 0.31, "rewards/mine/accuracy": 0.0}


@pytest.mark.parametrize(
    ("full_marks", "earned", "step", "evaluation"),
    [
        ({}, 0, "mine 0.31", "mine 0.31  (v2, n = 8)"),
        ({}, 1, "mine 0.12", "mine 12.5%  (v2, n = 8)"),
        ({"mine": 2.0}, 0, "mine 0.00", "mine 0.0%  (v2, n = 8)"),  # its full marks are known
    ],
)
def test_a_reward_of_ones_own_that_nothing_earned_in_full_is_shown_by_its_mean(full_marks, earned, step, evaluation):
    display = Shown(rewards={"reward_funcs": ["a.py:mine"], "full_marks": full_marks})
    display.step(1, OWN | {"rewards/mine/accuracy": earned / 8})
    display.evaluation({"step": 2, "n": 8, "full_marks": {"mine": earned}, "mean": {"mine": 0.31}})
    assert step in display.lines[0] and evaluation in display.lines[1]
    display.step(2, OWN)
    assert ("mine 0.00" in display.lines[2]) == (earned > 0 or full_marks != {}), "what was earned once stays known"
