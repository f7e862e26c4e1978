r"""\boxed{} answers, what counts as the same answer, the rewards that use them, TRL's, and those of the examples."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.length_reward import cosine_length
from rewards.answers import last_boxed, same_answer
from rewards.built_in import (
    acc,
    accuracy_reward,
    base_acc,
    boxed,
    boxed_format,
    gated_format,
    get_soft_overlong_punishment,
    math_verify,
    strict_format,
    think_format_reward,
)
from rewards.find import resolve
from rewards.mathematics.numbers import plain_number
from tests.support.speed import overdue


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"so \boxed{72}.", "72"),
        (r"\boxed{1}, no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\fbox{a}", "a"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{1} and \boxed{\frac{1}{2", None),
        ("72", None),
        ("", None),
    ],
)
def test_the_last_box_is_read_by_balanced_braces(text, held):
    assert last_boxed(text) == held


def test_a_number_and_nothing_else_has_an_exact_value():
    values = {
        "1,234.50": "2469/2",
        r"\$18.00": "18",
        r"-\dfrac{2}{3}": "-2/3",
        r"\frac{-2}{3}": "-2/3",
        "−3/4": "-3/4",
        " 5. ": "5",
    }
    for text, value in values.items():
        assert plain_number(text) == Fraction(value), text
    for text in ("1/0", r"\pi", "1,23", "2x", "9" * 101, ""):
        assert plain_number(text) is None, text


@pytest.mark.parametrize(
    ("prediction", "gold", "is_same"),
    [
        ("0.1234567890123456789", "0.12345678901234567890", True),
        ("0.1234567890123456789", "0.1234567890123456788", False),
        (r"−\sqrt2", r"-\sqrt{2}", True),
        ("", "", False),
        ("x", "", False),
        ("9" * 500, "9" * 501, False),
    ],
)
def test_answers_are_the_same_if_they_mean_the_same(prediction, gold, is_same):
    """What others mean is in tests/support/gold_table.py."""
    assert same_answer(prediction, gold) is is_same


@settings(max_examples=30)
@given(st.text(alphabet="0123456789,.{}()[]\\frac boxed$-/*=x"), st.text(alphabet="0123456789,.{}()\\frac"))
def test_no_text_breaks_the_comparison_and_every_answer_equals_itself(a, b):
    same_answer(a, b)
    assert same_answer(a, a) or not a.strip()
    assert boxed(completions=[a], answer=[b])[0] in (0.0, 1.0, None)


def test_a_hostile_completion_costs_seconds_at_most_and_is_wrong():
    """Long ones are not looked at; on the others algebra would take for ever, and is stopped."""
    texts = [r"\boxed{" * 100_000, "{" * 500_000 + r"\boxed{" + "{" * 500_000, r"\boxed{" + "(1," * 200_000 + "}"]
    texts += [r"\boxed{" + r"\frac{1}" * 50_000 + "}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{10^{10^{10}}}"]
    start = time.process_time()
    assert boxed(completions=texts, answer=["(1,2,3)"] * 6) == [0.0] * 6
    assert not overdue(time.process_time() - start, 6)


def test_boxed_and_acc_have_the_values_of_their_tables():
    completions = [r"\boxed{0.5}", r"\boxed{2}", r"it is \frac{1}{2}", "0.5"]
    assert boxed(completions=completions, answer=[r"\frac12"] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert acc(completions=completions, answer=[r"\frac12"] * 4) == [1.0, -0.5, -1.0, -1.0]
    assert boxed(completions=["x"], answer=[""]) == acc(completions=["x"], answer=[None]) == [None]
    chat = [[{"role": "assistant", "content": r"\boxed{2}"}]]
    assert boxed(completions=chat, answer=["2"]) == acc(completions=chat, answer=["2"]) == [1.0]


def test_the_final_answer_is_the_box_else_the_last_tag_else_the_last_number():
    gold = "Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72"
    right = [
        r"so \boxed{72}",
        "<think>48/2=24</think><answer>$72.00</answer>",
        "<answer>It is 72 clips.</answer>",
        "It is 71, no, 72.",
        "<answer>71</answer><answer>72</answer>",
        "<answer><answer>72</answer></answer>",
        "<answer>72",
    ]
    wrong = [
        "<answer>71</answer> so 72",
        "72 <answer>seventy-two</answer>",
        "72 <answer></answer>",
        "<answer>-72</answer>",
        r"\boxed{72} so <answer>71</answer>",
        r"<answer>72, that is \boxed{71}</answer>",
        "72 or 71",
        "",
    ]
    for completions, verdict, score in ((right, 1.0, 1.0), (wrong, 0.0, -1.0)):
        golds = [gold] * len(completions)
        found = dict(zip(completions, base_acc(completions, golds), strict=True))
        assert found == dict.fromkeys(completions, verdict)
        assert resolve("answer")(completions=completions, answer=golds) == [score] * len(golds)


@pytest.mark.parametrize(
    ("completion", "strict", "loose"),
    [
        (r"<think>a</think><answer>\boxed{1}</answer>", 1.0, 1.0),
        (r"<think>a</think> <answer>It is \boxed{1}.</answer><|im_end|>", 1.0, 1.0),
        (r"<think>a</think> It is \boxed{1}.", -0.5, 1.0),
        (r"<think>\boxed{1}</think><answer>1</answer>", -0.5, 0.0),
        (r"<think>\boxed{2}</think><answer>\boxed{1}</answer>", -0.5, 1.0),
        (r"<answer>\boxed{1}</answer><think>a</think>", -0.5, 0.0),
        (r"well <think>a</think><answer>\boxed{1}</answer>", -0.5, 0.0),
        (r"<think>a</think><answer>\boxed{1</answer>", -0.5, 0.0),
        ("", -0.5, 0.0),
    ],
)
def test_strict_format_wants_each_part_once_and_boxed_format_a_thought_then_a_box(completion, strict, loose):
    assert strict_format(completions=[completion]) == [strict]
    assert boxed_format(completions=[completion]) == [loose]


def test_a_gated_format_never_lets_a_wrong_answer_outrank_a_right_one():
    right, wrong = "<think>a</think><answer>72</answer>", "<think>a</think><answer>71</answer>"
    completions = [right, "72", wrong, "71"]
    gated = gated_format(completions=completions, answer=["72"] * 4)
    assert gated == [1.0, 0.0, 0.0, 0.0]
    assert gated_format(completions=["72"], answer=[None]) == base_acc(completions=["72"], answer=[""]) == [None]
    answers = resolve("answer")(completions=completions, answer=["72"] * 4)
    totals = [a + g for a, g in zip(answers, gated, strict=True)]
    assert totals == [2.0, 1.0, -1.0, -1.0]


def test_math_verify_finds_the_answer_in_a_sentence_and_trls_accuracy_is_the_same():
    completions = [r"\boxed{1+x}", r"\boxed{x}", r"so $\sqrt{12}$", "nothing"]
    golds = ["x+1", "x+1", r"2\sqrt{3}", "4"]
    assert math_verify(completions=completions, answer=golds) == [1.0, 0.0, 1.0, 0.0]
    assert accuracy_reward(completions=completions, solution=golds) == [1.0, 0.0, 1.0, 0.0]
    assert math_verify(completions=["4"], answer=[""]) == [None]


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("$5", "So he pays $5$ in all.", "So he pays €5 in all."),
        ("7 red balls", r"\boxed{7\text{ balls}}", r"\boxed{7\text{ blue balls}}"),
        ("30 miles per gallon", r"\boxed{30\text{ mpg}}", r"\boxed{30\text{ gallons per mile}}"),
        (r"2 \times 3", r"\boxed{6}", r"\boxed{3 \times 2}"),
        ("3,5", r"\boxed{3,5}", r"\boxed{5,3}"),
    ],
)
def test_no_reward_that_reads_a_gold_answer_pays_another_unit_noun_or_order(gold, right, wrong):
    thought = "<think>I work it out.</think>"
    completions = [f"{thought}<answer>{right}</answer>", f"{thought}<answer>{wrong}</answer>"]
    wanted = [gold] * 2
    for reward in (resolve("answer"), base_acc, gated_format, math_verify):
        scores = reward(completions=completions, answer=wanted)
        assert scores[0] == 1.0 and scores[1] < 1.0
    assert accuracy_reward(completions=completions, solution=wanted) == [1.0, 0.0]
    if "boxed" in right:
        assert boxed(completions=completions, answer=wanted) == [1.0, 0.0]
        assert acc(completions=completions, answer=wanted) == [1.0, -0.5]


def test_trls_formats_have_its_values():
    texts = [
        "<think>a</think>4",
        "<think>a",
        "so <think>a</think>",
        "<think><think>a</think>",
        [dict(role="assistant", content="<think>\n</think>")],
    ]
    assert think_format_reward(completions=texts) == [1.0, 0.0, 0.0, 0.0, 1.0]
    ids = [[1] * n for n in (1, 6, 7, 8, 10, 12)]
    # free up to 10 − 4 tokens, then a quarter each
    found = get_soft_overlong_punishment(ids, max_completion_len=10, soft_punish_cache=4)
    assert found == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_the_cosine_falls_for_right_answers_and_rises_for_wrong_ones():
    lengths = [0, 50, 100, 400]
    arguments = {"completion_ids": [[1] * n for n in lengths], "answer": ["7"] * 4, "max_len": 100}
    # ½ (1 + cos) is 1 at 0, ½ half way, 0 at the end and beyond
    assert cosine_length(completions=["7"] * 4, **arguments) == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert cosine_length(completions=["8"] * 4, **arguments) == pytest.approx([-1.0, -0.75, -0.5, -0.5])
    twice = cosine_length(completions=["7"] * 4, **arguments, values_right=(2.0, 1.0))
    assert twice == pytest.approx([2.0, 1.5, 1.0, 1.0])
    assert cosine_length(completions=["7"], completion_ids=[[1]], answer=[""], max_len=9) == [None]
