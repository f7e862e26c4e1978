"""What a gold answer is, and which answers mean the same."""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.errors import UserError
from common.types import Problem
from rewards import answers
from rewards.answers import is_right, same_answer, verdicts
from rewards.built_in import acc, answer, base_acc, boxed
from rewards.mathematics.gold import gold_kind, gold_texts, same
from sampler.row_checks import rows_with_gold
from tests.support.configs import config_of
from tests.support.gold_table import LINES
from tests.support.speed import overdue

FORMS = [
    "<think>I work it out: 3 + 4 = 7.</think><answer>{}</answer>",
    "The answer is {}.",
    "First 3 + 4 = 7.\nSo it is {}",
    "{}",
]

KINDS = {  # of other notations than the golds of the table
    "number": r"""#### 1,200 ; 1.2\times 10^{3} ; -3/4 ; 1 1/2 ; −7 ; -\dfrac{2}{3} ; \frac12 ; \$5 ; 50\% ;
        18 dollars ; 5\text{ cm} ; 5 cm^2 ; 1{,}000 ; $5$""",
    "letter": r"\text{(B)} ; \textbf{(C)} ; A. ; \boxed{B}",
    "time": "03:45 PM ; 5 March ; 12/25/2020",
    "text": "the number 7 ; C++ ; Yes! ; 3 to 5 days",
    "mathematics": "1 or 2 ; pi/2 ; sin(x) ; n! ; |x|",
}


@pytest.mark.parametrize(
    ("kind", "gold"),
    [
        *((kind, gold) for kind, golds in KINDS.items() for gold in golds.split(" ;")),
        *(("number", gold) for gold in (5, -3, 0.5, 1e-05)),  # a column of numbers or truths is judged as such
        ("text", True),
        ("text", [None, "Paris", "7"]),  # the first that can be judged decides
    ],
)
def test_a_gold_answer_is_of_one_kind(kind, gold):
    assert gold_kind(gold).name == kind


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        *((empty, "it is empty") for empty in (None, "", "  ", math.nan, [], "#### ", r"\boxed{}")),
        ({"value": 7}, "it is a dict"),
        ("…", "it has neither letters nor digits"),
        ("so " * 200, "it has 599 characters, more than 400"),
        (r"\frac{1}{", "its braces do not match"),
        (r"\angle A = 30^\circ", "math-verify cannot read it"),
    ],
)
def test_what_cannot_be_judged_has_a_reason(gold, reason):
    assert gold_kind(gold) == (None, reason)


@pytest.mark.parametrize("line", LINES, ids=[line.gold for line in LINES])
def test_an_answer_earns_where_it_means_what_the_gold_one_does_and_nowhere_else(line):
    assert gold_kind(line.gold).name == line.kind
    right = [*gold_texts(line.gold), *line.right]
    expected = dict.fromkeys(right, True) | dict.fromkeys(line.wrong, False)
    for i, (text, is_the_same) in enumerate(expected.items()):
        written = FORMS[i % len(FORMS)].format(text)
        assert is_right(written, line.gold) is is_the_same, written
        in_box = rf"So $x$ is found: \boxed{{{text}}}."
        assert boxed([in_box], [line.gold]) == [float(is_the_same)], in_box


def test_a_guess_in_a_thought_is_no_answer():
    guesses = [
        r"<think>perhaps \boxed{7}, but let me",
        "<think>so it is <answer>7</answer>, or",
        r"<think>it is 6</think> <think>no, \boxed{7}",
        r"<think>\boxed{7}</think>",
        r"<think>perhaps \boxed{7}?</think> It is \boxed{8}.",
        "<thinking>7",
        r"\boxed{7} <think>or is it",
        "[THINK]It must be 7",
        r"[THINK]\boxed{7}[/THINK]It is 8",
        "<seed:think>It is 7",
        "<|START_THINKING|>It is 7<|END_THINKING|>It is 8",
        "<|channel>thought\nIt is 7",
        "<|channel>thought\nIt is 7<channel|>It is 8",
        "<|channel|>analysis<|message|>It is 7",
        "<|channel|>analysis<|message|>It is 8<|end|>assistant<|channel|>final<|message|>It is 9",
    ]
    for reward, wrong in ((answer, -1.0), (base_acc, 0.0), (boxed, 0.0)):
        assert reward(completions=guesses, answer=["7"] * len(guesses)) == [wrong] * len(guesses)
    assert acc(completions=guesses[:1], answer=["7"]) == [-1.0]
    assert answer(completions=guesses[-1:], answer=["9"]) == [1.0]
    assert answer(completions=["<think>6?</think> 7", "well</think>7"], answer=["7"] * 2) == [1.0, 1.0]


# Under each gold answer, texts that end with it (+) and texts that do not (-)
ENDINGS = r"""
Paris
  - It is Paris or London.
  - The answer is not Paris.
B
  + The answer is B. A is too large.
  + A is wrong, so B
  + Therefore option (B) is correct.
  - Neither (A) nor (B).
5 cm
  + The area is 5 cm long.
  - The area is 5 m.
  - The mass is \(5\) kg at last.
$18
  - It costs €18.
2
  - We get 2x
  - so $x = \frac{7}{2}$.
3.5
  + so $x = \frac{7}{2}$.
3:45
  + It ends at 3:45.
  - It ends at 7:45.
3:45 PM
  - It ends at 3:45 PM, not at 3:50 PM.
1999-03-05
  + It was on March 5, 1999 that he left.
2\sqrt{3}
  + we find $\sqrt{12}$ at last
71
  - The answer is 71. No, it is 72.
7 red balls
  + The answer is 7 red balls that he bought.
  + so he has 7 balls in total
  + He bought 7 and went home happy.
  + Only 7 red balls remain, and he is sad.
  + So there are **7** red balls.
  + So there are $7$ red balls on the table.
  + So there are $ 7 $ red balls on the table.
  + So there are 7 very large red balls in the box.
  - The answer is 7 blue balls that he bought.
  - so he has 7 cubes in total
  - So there are $7$ blue balls on the table.
  - So there are \(7\) blue balls on the table.
  - So there are 7 very large blue balls in the box.
$5 per hour
  + He earns $5 per hour, which is little.
  + He makes $5 every hour that he works.
  + He earns 5 dollars each hour.
  - He earns €5 per hour, which is little.
  - He earns € 5 per hour, which is little.
  - He earns EUR 5 per hour, which is little.
  - He earns $5 per day, which is little.
2 liters
  + She drinks 2 liters a day.
  + She drinks 2 liters of water per day.
60 miles per hour
  + It drives at 60 miles an hour now.
  - It drives 60 miles per minute now.
100 degrees Fahrenheit
  + It is 100 degrees outside.
  - It is 100 degrees Celsius outside.
3,5
  + We get $3,5$, so we are done.
  - We get $5,3$, so we are done.
  - Total = 5,3
03/05
  + They meet on 3/5 at noon.
  - They meet on 5/3 at noon.
12 students
  + Only 12 passed the test.
  + So 12 attended the meeting.
12 pies
  - So 12 baked cakes are left.
80 pages
  + He read 80 across both books.
12 cookies
  + So 12 cookies were eaten by the children.
  - So 12 children ate the cookies.
12 tests
  - So 12 students passed their tests.
12 marbles
  + He has 12 red and blue marbles.
3/4 of a cake
  - They ate 3/4 of a pie at last.
9 cm
  + So the side is $9\text{ cm}$, as desired.
  + So the side is \(9~\mathrm{cm}\) long.
  - So the side is $9\,\text{mm}$ long.
  - So the side is $9~\text{mm}$ long.
  - So the side is *9* mm long.
  - So the side is `9` mm long.
  - So the side is 9  mm long.
9 cm^2
  + So the area is $9\,\text{cm}^2$ in all.
  - So the area is $9\,\text{cm}^{3}$ in all.
12 miles
  + It was a 12-mile run.
  - It was a 12-kilometer run.
20%
  + It was a 20%-discount.
12 years
  + He is a 12-year-old boy.
12 pages
  - It is a 12-word essay.
8 cones
  + Ann bought 8 ice-cream cones today.
3 times
  + Ann has 3 times as many.
"""


def test_what_a_text_ends_with_is_its_answer():
    gold = ""
    for line in ENDINGS.strip().splitlines():
        if not line.startswith("  "):
            gold = line
            continue
        assert is_right(line[4:], gold) is line.startswith("  +"), (line, gold)


def test_gold_answers_are_what_a_person_reads():
    assert gold_texts("6 * 12 = <<6*12=72>>72\n#### 72") == ["72"] == gold_texts(72)  # as GSM8K writes it
    assert gold_texts(r"Thus $x = \boxed{\frac{1}{2}}$.") == [r"\frac{1}{2}"]  # MATH
    assert gold_texts(1e-05) == ["0.00001"] and gold_texts(["1", 2]) == ["1", "2"]
    assert gold_texts("She has 72 clips left.") == ["72"]
    assert gold_texts("B. Rome") == ["B", "Rome", "B. Rome"] and gold_texts("E. coli") == ["E. coli"]
    assert base_acc(completions=["(B)", "Rome", "C", "(C) Rome"], answer=["(B) Rome"] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert [gold_texts(none) for none in ({"value": 1}, math.inf, math.nan, None, "", " ", [])] == [[]] * 7


@pytest.mark.parametrize(
    ("rewards", "left", "words"),
    [
        (["answer"], [0, 2], "answer can judge 2 of 4 gold answers (row 1: it is a dict; row 3: it has 500 characters"),
        (["boxed", "format"], [0, 2], "skipping the other rows: no reward can check their answer"),
        (["answer", "my.py:f"], [0, 1, 2, 3], "it is None for the other rows"),
        (["format"], [0, 1, 2, 3], ""),
        (["my.py:f"], [0, 1, 2, 3], ""),
    ],
)
def test_rows_of_which_only_the_form_could_be_rewarded_are_left_out_and_counted(rewards, left, words, capfd):
    golds = ["72", {"value": 72}, "Paris", "7" * 500]
    problems = [Problem(i, {"answer": gold}) for i, gold in enumerate(golds)]
    config = config_of(rewards={"reward_funcs": rewards})
    assert [problem.index for problem in rows_with_gold("data.train", problems, config)] == left
    said = capfd.readouterr()
    assert words in said.out + said.err


def test_a_run_whose_rewards_can_judge_no_row_is_refused():
    problems = [Problem(i, {"answer": {"value": 72}}) for i in range(9)]
    with pytest.raises(UserError, match=r"answer can judge 0 of 9 gold .*row 0: it is a dict.*data\.answer_key"):
        rows_with_gold("data.train", problems, config_of(rewards={"reward_funcs": ["answer", "format"]}))


def test_a_group_of_hostile_answers_costs_seconds_and_not_its_right_ones():
    hostile = [rf"\boxed{{{n}^{{9^{{9^{{9}}}}}}}}" for n in range(3, 34)]
    start = time.process_time()
    found = boxed(completions=[*hostile, r"\boxed{\sqrt{12}}"], answer=[r"2\sqrt{3}"] * 32)
    assert found == [0.0] * 31 + [1.0]
    assert boxed(completions=hostile, answer=[r"2\sqrt{3}"] * 31) == [0.0] * 31  # as another reward of the same job
    assert not overdue(time.process_time() - start, 6)


def test_answers_are_compared_in_any_thread():
    with ThreadPoolExecutor() as pool:
        assert pool.submit(same_answer, r"\sqrt{12}", r"2\sqrt{3}").result() is True


def test_the_longest_answer_that_is_read_has_400_characters_and_a_longer_one_equals_only_itself() -> None:
    assert same("1, " * 133 + "1", "1," * 133 + "1")
    assert not same("1, " * 133 + "10", "1," * 133 + "10")
    assert same("A" * 401, "A" * 401)


def test_a_completion_gets_a_quarter_of_the_group_s_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[float]()
    clock = iter([0.0, 0.0, 1e9])  # begun, at the first completion, at the second
    monkeypatch.setattr(answers.time, "process_time", lambda: next(clock))
    monkeypatch.setattr(answers, "within", lambda seconds, judge, late: limits.append(seconds) or True)
    assert verdicts(["5", "6"], ["5", "6"]) == [True, True]
    assert limits == [2.0 / 4, 0.02]  # the group has two seconds, and each completion at least 20 ms
