"""Built-in rewards, finding and checking reward functions, and the weighted sum."""

import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import UserError
from rewards import NoRewardError, RewardError, score_completions
from rewards.built_in import answer, is_formatted
from rewards.find import bind, check_signature, resolve, wanted_by
from rewards.mathematics.numbers import last_number
from tests.support.raising import raising
from tests.support.speed import overdue

NUMBERS = {  # texts, with the last number of each
    "It is 71 or 72.": "72",
    "$18.": "18",
    "$1,234,567.50 in total": "2469135/2",
    "-7": "-7",
    "−7": "-7",
    "-$5": "-5",
    "$-5": "-5",
    "-\\$5": "-5",
    "x=-.5": "-1/2",
    "50%": "50",
    "3/4": "3/4",
    "-3/4 of it": "-3/4",
    "\\boxed{72}": "72",
    "48-24=24": "24",
    "covid-19": "19",
    "1,2,3": "3",
    "1234,567": "567",
    "9" * 90: "9" * 90,
}
WITHOUT_NUMBER = (
    *("5/0", "9" * 101, "," + ",111" * 60, "", "٧٢ ７２ ⁷²"),
    "__import__('os').system('true')",
)


def test_the_last_number_of_a_text_is_read_exactly():
    assert {text: last_number(text) for text in NUMBERS} == {text: Fraction(value) for text, value in NUMBERS.items()}
    for text in WITHOUT_NUMBER:
        assert last_number(text) is None, text


@given(st.integers(-(10**12), 10**12), st.integers(0, 99), st.sampled_from(["", "$", "about ", "= ", "(", "\n"]))
def test_any_decimal_number_is_read_back_whatever_its_notation(whole, cents, before):
    value = Fraction(whole) + (Fraction(cents, 100) if whole >= 0 else -Fraction(cents, 100))
    for notation in (f"{whole}.{cents:02d}", f"{whole:,}.{cents:02d}"):
        assert last_number(f"7 apples, {before}{notation} in all.") == value


# all that UTF-8 has; hypothesis' own search for it costs a new checkout a second
@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("<answer>" * 3)
@example("</answer><answer>1")
def test_no_text_breaks_a_built_in_reward(text):
    assert answer(completions=[text], answer=["#### 5"])[0] in (1.0, -1.0)
    assert resolve("format")(completions=[text])[0] in (1.25, -1.0)


def test_gold_may_be_a_text_or_a_number_and_the_reward_is_none_without_one():
    completions = ["it is 0.5", "it is 0.5", "72", "0.00001", "72", "72", "1"]
    golds = ["0.50", 0.5, 72, 1e-05, "#### unknown", math.nan, True]
    assert answer(completions=completions, answer=golds) == [1.0, 1.0, 1.0, 1.0, -1.0, None, -1.0]


def test_the_format_is_one_thought_then_one_answer_and_nothing_else():
    for text in (
        "<think>a</think><answer>4</answer>",
        " \n<think>a\nb</think> \n <answer> 4 </answer>\n",
        "<think>a</think><answer>4</answer><|im_end|>",
        "<think>a</think><answer>4</answer> <|endoftext|>\n",
    ):
        assert is_formatted(text), text
    for text in (
        "<think>a</think><answer>4</answer><|im_end|><|im_end|>",
        "<think>a</think><answer>4</answer> done",
        "well <think>a</think><answer>4</answer>",
        "<think>a</think> so <answer>4</answer>",
        "<think> </think><answer>4</answer>",
        "<think>a</think><answer> </answer>",
        "<think>a<answer>4</answer></think>",
        "<answer>4</answer><think>a</think>",
        "<think>a</think><answer>4</answer><answer>4</answer>",
        "<think><think>a</think><answer>4</answer>",
        "<think>a</think><answer>4",
        "<THINK>a</THINK><answer>4</answer>",
        "",
    ):
        assert not is_formatted(text), text


def test_a_megabyte_of_hostile_text_is_scored_within_50_ms():
    pieces = ["1", "1,", "1/", "-", "a", " ", "<answer>", "</answer>", "<think>", "<think>a</think>", "111,", ".", "$-"]
    for piece in [*pieces, "<think>" + "9" * 99, "١", "\n####"]:
        text = piece * (1_000_000 // len(piece))
        start = time.process_time()
        answer(completions=[text], answer=[text])
        resolve("format")(completions=[text])
        assert not overdue(time.process_time() - start, 0.05), piece


def test_every_way_to_misname_a_function_says_how_to_name_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("import os\nlimit = 3\ndef short(completions):\n    return []\n")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    for name, words in {
        "anser": ["Did you mean answer?", "answer, boxed", "path/file.py:function"],
        f"{tmp_path}/mine.py": ["which function", f"{tmp_path}/mine.py:function"],
        f"{tmp_path}/min.py:short": ["no file", f"Did you mean {tmp_path}/mine.py?"],
        f"{tmp_path}/mine.py:shot": ["no function 'shot'", "Did you mean short?"],
        f"{tmp_path}/mine.py:xyzzy": ["no function 'xyzzy'", "Functions there: short"],
        f"{tmp_path}/mine.py:limit": ["no function 'limit'"],
        f"{tmp_path}/broken.py:f": ["cannot be imported", "No module named 'nothing_of_this_name'", "broken.py:1"],
        "broken.f": ["broken cannot be imported: ModuleNotFoundError", "broken.py:1"],
        "nothing_of_this_name.f": ["no module 'nothing_of_this_name'", "path/file.py:function"],
        "rewards.built_in.anser": ["no function 'anser'", "Did you mean answer?"],
    }.items():
        with pytest.raises(UserError) as error:
            resolve(name)
        for word in words:
            assert word in str(error.value)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text("def short(completions): return [2]\n")
    assert resolve(f"{tmp_path}/other/mine.py:short")([]) == [2] and resolve(f"{tmp_path}/mine.py:short")([]) == []


def test_signatures_that_cannot_be_called_by_keyword_with_these_columns_are_refused():
    def needs_solution(completions, solution, **columns): ...

    def positional(completions, /, **columns): ...

    def blind(prompts): ...

    for function, words in (
        (needs_solution, r"mine wants 'solution'; the data set gives question, answer .*{answer: solution}"),
        (positional, "positional only"),
        (blind, "takes no completions"),
    ):
        with pytest.raises(UserError, match=words):
            check_signature(function, ["question", "answer"], "mine")
    check_signature(needs_solution, ["question", "solution"], "mine")
    check_signature(lambda prompts, completions, completion_ids, question, level=3: [], ["question"], "mine")
    check_signature(lambda **everything: [], [], "mine")


def named(completions, answer, **columns):
    return [0.0]


@pytest.mark.parametrize(
    ("function", "names", "rest"),
    [
        (named, ["answer", "columns", "completions"], True),
        (bind(named, {"level": 3}, "f"), ["answer", "columns", "completions"], True),
        (resolve("answer"), ["answer", "completions"], False),
        (lambda prompts, completions: [], ["completions", "prompts"], False),
        (max, [], True),  # written in C, without a signature
    ],
)
def test_a_row_is_wanted_whole_only_by_functions_that_take_all_columns(function, names, rest):
    wanted = wanted_by([("f", function)])
    assert (wanted.names, wanted.rest, wanted.needs_rollout) == (names, rest, [])
    both = wanted_by([("f", function), ("g", lambda completions, environments: [])])
    assert both.rest is rest and both.needs_rollout == ["g"] and "environments" in both.names


def run(*functions, completions=("a", "b"), weights=(1.0, 0.5), **columns):
    """Functions fn0, fn1, … on these completions of one prompt."""
    n = len(completions)
    named_functions = [(f"fn{i}", function, weights[i]) for i, function in enumerate(functions)]
    return score_completions(named_functions, ["p"] * n, list(completions), columns, [[1]] * n)


def test_the_weighted_sum_leaves_out_rewards_that_do_not_apply():
    second = np.array([-1, 2, 0.5], np.float32)
    scores = run(lambda completions, **_: [True, None, 0.25], lambda completions: second, completions="abc")
    assert [total for _, total in scores] == [0.5, 1.0, 0.5]
    assert scores[0][0] == {"fn0": 1.0, "fn1": -1.0}
    assert math.isnan(scores[1][0]["fn0"]) and scores[1][0]["fn1"] == 2.0


def test_functions_get_what_they_name_by_keyword_everything_with_double_star_and_copies():
    seen = {}

    def everything(**arguments):
        seen.update({name: value[:] for name, value in arguments.items() if isinstance(value, list)})
        arguments["level"].reverse()
        return [0.0, 0.0]

    scores = run(everything, lambda completions, level: level, answer=["3", "4"], level=[1, 2])
    assert seen == {
        "prompts": ["p", "p"],
        "completions": ["a", "b"],
        "completion_ids": [[1], [1]],
        "completions_ids": [[1], [1]],
        "answer": ["3", "4"],
        "level": [1, 2],
    }
    assert [total for _, total in scores] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("weights", "totals"), [([1.0, 0.0], None), ([1.0, 1.0], [4.0, 5.0]), ([0.0, 0.0], [0.0, 0.0])]
)
def test_a_function_of_weight_0_measures_and_is_no_reward_where_no_other_applies(weights, totals):
    functions = (lambda completions: [1.0, None], lambda completions: [3.0, 5.0])
    if totals is None:
        with pytest.raises(NoRewardError, match="every reward is None"):
            run(*functions, weights=weights)
    else:
        assert [total for _, total in run(*functions, weights=weights)] == totals


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        (lambda: [1.0], "fn0 returned 1 values for 2 completions. First completion: 'a'"),
        (lambda: [1.0, math.nan], "fn0 returned nan, expected a finite number or None. Completion: 'b'"),
        (lambda: [math.inf, 1.0], "fn0 returned inf"),
        (lambda: ["1", 1.0], "fn0 returned '1'"),
        (lambda: [10**400, 1.0], "fn0 returned 1000000"),
        (lambda: [10**5000, 1.0], "fn0 returned a value of type int"),
        (lambda: [1j, 1.0], "fn0 returned 1j"),
        (lambda: 1.0, "fn0 returned 1.0, expected a list of 2 numbers"),
        (lambda: None, "fn0 returned None, expected a list"),
        (lambda: "ab", "fn0 returned 'ab', expected a list"),
        (lambda: [None, 1.0], "every reward is None for a completion: fn0. Completion: 'a'"),
        (lambda: [1e308, 1.0], "is not finite. Completion: 'a'"),
        (raising(KeyError("reward_model")), "fn0 raised KeyError: 'reward_model' (raising.py:"),
        (raising(SystemExit(3)), "fn0 raised SystemExit: 3"),
    ],
)
def test_anything_but_one_finite_number_per_completion_is_an_error_that_shows_it(gives, words):
    with pytest.raises(RewardError) as error:
        run(lambda completions: gives(), weights=[10.0])
    assert words in str(error.value)
