"""`launch.sh check`: what a reward gets wrong is found from gold answers and real completions, without a model."""

import textwrap
from types import SimpleNamespace

import pytest

from common.config import Rewards
from rewards import trials
from rewards.gold_answers import check_gold
from rewards.probes import EMPTY, FORMS, probes, wrong_answer
from rewards.rescore import rescore
from rewards.trials import TrialRow
from tests.support.speed import limit

pytestmark = pytest.mark.timeout(120)

FUNCTIONS = """
import time

def first_word(completions, answer, **columns):
    return [1.0 if c.split()[:1] == [str(a)] else 0.0 for c, a in zip(completions, answer)]

def whole_numbers_only(completions, answer, **columns):
    return [1.0 if a.isdigit() and a in c else 0.0 for c, a in zip(completions, answer)]

def substring(completions, answer, **columns):
    return [1.0 if a in c else 0.0 for c, a in zip(completions, answer)]

def any_digit(completions, answer, **columns):
    return [1.0 if any(x.isdigit() for x in c) and (a in c or a == "4") else 0.0 for c, a in zip(completions, answer)]

def half(completions, answer, **columns):
    return [0.5 if a in c else 0.0 for c, a in zip(completions, answer)]

def flat(completions, **columns):
    return [0.25] * len(completions)

def raises_on_five(completions, answer, **columns):
    if answer[0] == "5":
        raise ValueError("five")
    return [1.0 if a in c else 0.0 for c, a in zip(completions, answer)]

def endless(completions, answer, **columns):
    time.sleep(1000 if answer[0] == "4" else 0)
    return [1.0 if a in c else 0.0 for c, a in zip(completions, answer)]

def none_on_five(completions, answer, **columns):
    return [None if a == "5" else float(a in c) for c, a in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("check") / "mine.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return path


def rows(*answers):
    return [
        TrialRow(i, f"question {i}?", {"question": f"question {i}?", "answer": gold}) for i, gold in enumerate(answers)
    ]


def gold(file, *names, answers=("4", "5", "60"), **settings):
    specs = [f"{file}:{name}" if name + "(" in FUNCTIONS else name for name in names]
    return check_gold(Rewards(reward_funcs=specs, **settings), rows(*answers))


def test_probes_hold_the_right_and_a_wrong_answer_in_every_form_and_nothing():
    made_up = probes("6*12=72\n#### 72")
    assert [(p.form, p.is_right) for p in made_up] == [(f, r) for r in (True, False) for f in FORMS] + [(EMPTY, False)]
    assert made_up[1].text == r"<think>I work it out.</think><answer>\boxed{72}</answer>"
    assert made_up[7].text.endswith(r"\boxed{73}.") and made_up[-1].text == ""
    assert [p.form for p in probes(None)] == [EMPTY]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("72", "73"), ("1,200", "1201"), (r"\frac{1}{2}", "3/2"), ("B", "C"), ("z", "y"), ("x+1", "none of these")],
)
def test_a_wrong_answer_is_of_the_same_kind(right, wrong):
    assert wrong_answer(right) == wrong


def test_rewards_that_work_have_no_problem(file):
    found = gold(file, "answer", "gated_format", "strict_format")
    assert found.problems == [] and found.warnings == []
    assert found.verifiers == ["answer", "gated_format"]
    assert "  gold answers with full marks: 3 of 3, as tags, box in tags" in found.lines
    assert "weighted sum: a right answer beats a wrong and an empty one on 3 of 3 rows" in found.lines


def test_what_an_environment_says_is_not_tried_without_its_rollout(file):
    found = gold(file, "environment", "answer")
    assert found.problems == [] and found.warnings == []
    assert [line for line in found.lines if line.startswith("environment")] == [
        "environment  what a rollout's environment says: not tried here, and no sum without it"
    ]
    texts = TrialRow(
        0, "2+2?", {"question": "2+2?", "answer": "4"}, ["4", "5"], [{"environment": 1.0, "answer": 1.0}, {}]
    )
    assert rescore(Rewards(reward_funcs=["environment"]), [texts]).problems == []


def test_gold_answers_that_cannot_be_earned_are_a_problem_with_their_rows(file):
    found = gold(file, "whole_numbers_only", answers=("4", "0.5", "60"))
    assert "whole_numbers_only: 1 of 3 gold answers do not earn full marks" in found.problems
    assert "  ✗ row 1: gold '0.5' earns 0 at best in 5 forms" in found.lines
    assert any("on 1 of 3 rows right, wrong and empty completions all score the same" in p for p in found.problems)


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        (  # a number is looked for, and the data has words
            "whole_numbers_only",
            {"answers": ("Paris", "Rome")},
            "on 2 of 2 rows right, wrong and empty completions all score the same: no gradient (row 0, 1)",
        ),
        ("flat", {}, "on 3 of 3 rows right, wrong and empty completions all score the same: no gradient (row 0, 1, 2)"),
        ("substring", {"reward_weights": [-1.0]}, "on 3 of 3 rows no right answer beats a wrong one (row 0, 1, 2)"),
        ("any_digit", {}, "any_digit gives a wrong answer full marks on 1 of 3 rows; if a right one earns more, set "),
    ],
)
def test_a_verifier_that_cannot_tell_right_from_wrong_is_a_problem_with_its_rows(file, name, given, problem):
    found = gold(file, name, **given)
    assert [p for p in found.problems if p.startswith(problem)] == found.problems[:1]
    assert name != "any_digit" or "  ✗ wrong answers with full marks: row 0" in found.lines


def test_a_formatted_wrong_answer_above_a_plain_right_one_is_a_warning_unless_weighted_down(file):
    assert [w.split(";")[0] for w in gold(file, "answer", "format").warnings] == [
        "on 3 of 3 rows a well formed wrong answer outranks a right one in plain words"
    ]
    assert gold(file, "answer", "format", reward_weights=[1.0, 0.5]).warnings == []


def test_full_marks_that_nothing_reaches_are_a_warning_with_the_key_to_set(file):
    [warning] = gold(file, "half").warnings
    assert "rewards.full_marks: {half: <its best score>}" in warning
    assert gold(file, "half", full_marks={"half": 0.5}).warnings == []


def test_a_function_that_raises_or_gives_none_is_named_with_row_and_line_and_does_not_hide_the_others(file):
    found = gold(file, "raises_on_five", "none_on_five", "answer")
    assert found.problems == ["raises_on_five fails on 1 of 3 rows"]
    assert any("✗ row 1: raises_on_five raised ValueError: five (mine.py:" in line for line in found.lines)
    assert found.warnings == ["none_on_five does not apply (None) to 1 of 3 rows"]
    assert found.verifiers == ["raises_on_five", "none_on_five", "answer"]


def test_a_slow_call_is_a_warning_and_one_beyond_the_deadline_a_problem(file, monkeypatch):
    found = gold(file, "endless", timeout_s=max(1.0, limit(0.2)))
    assert found.problems == ["endless fails on 1 of 3 rows"]
    assert any("gave no answer within" in line and "killed" in line for line in found.lines)
    clock = iter([0.0, 1.2, 2.0, 2.1, 3.0, 3.1])  # before and after each of three rows
    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=clock.__next__))
    [warning] = gold(file, "substring").warnings
    assert warning.startswith("substring took 1.2 s on row 0;")


def test_completions_show_scores_what_changed_and_where_verifiers_contradict_each_other(file):
    texts = ["It is 4.", "no 4, but 5"]
    recorded = [{"answer": 1.0, "substring": 1.0}, {"answer": 1.0, "substring": None}]
    group = TrialRow(7, "2+2?", {"answer": "4"}, texts, recorded)
    config = Rewards(reward_funcs=["answer", f"{file}:substring"])
    found = rescore(config, [group], ["answer", "substring"])
    assert found.lines == [
        "answer  scores: -1 × 1, 1 × 1; full marks 1 of 2",
        "  row 7: 1 in the run, -1 now: 'no 4, but 5'",
        "substring  scores: 1 × 2; full marks 2 of 2",
        "  row 7: nan in the run, 1 now: 'no 4, but 5'",
        "answer and substring differ on full marks for 1 of 2 completions",
        "  row 7: answer -1, substring 1: 'no 4, but 5'",
    ]
    assert found.warnings == [
        "answer gives 1 of 2 completions another score than the run did",
        "substring gives 1 of 2 completions another score than the run did",
    ]
    same = TrialRow(7, "2+2?", {"answer": "4"}, texts, [{"answer": 1.0}, {"answer": -1.0}])
    assert rescore(Rewards(reward_funcs=["answer"]), [same]).warnings == []
