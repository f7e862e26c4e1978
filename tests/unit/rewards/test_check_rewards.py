"""`launch.sh check`: what a reward gets wrong is found from gold answers, without a model."""

import json
import math
import re
import sys

import pytest

from common.config import Rewards
from common.errors import UserError
from common.types import Problem
from launcher.check_rewards import check, main
from rewards.gold_answers import check_gold
from rewards.mathematics.near_misses import wrong_answer
from rewards.mathematics.notations import notations
from rewards.probes import EMPTY, FORMS, OTHER, UNFINISHED, probes
from rewards.tally import GoldRow
from rewards.verifiers import distribution
from tests.support.configs import config_of
from tests.support.gold_table import LINES
from tests.support.python_file import python_file
from tests.support.speed import limit
from tests.support.tier import full
from tests.support.vision import byte_tokenizer

pytestmark = pytest.mark.timeout(120)

# Functions, by what each gives a completion c where the answer is a
GIVES = {
    "whole_numbers_only": "float(a.isdigit() and right(c, a))",
    "substring": "float(a in c)",
    "any_digit": "float(any(x.isdigit() for x in c) and (right(c, a) or a == '4'))",
    "half": "right(c, a) / 2",
    "flat": "0.25",
    "not_empty": "float(bool(c))",
    "raises_on_five": "right(c, a) / float(a != '5')",
    "endless": "time.sleep(1000 if a == '4' else 0) or float(a in c)",
    "none_on_five": "None if a == '5' else float(right(c, a))",
    "never": "None",
    "as_it_stands": r"float(f' {c}'.rstrip('.').endswith(f' {a}') or f'oxed{{{a}}}' in c.rpartition('</think>')[2])",
    "any_box": r"float(f'oxed{{{a}}}' in c)",
    "last_digits": r"float(re.findall(r'\d+', '0' + c)[-1] == re.findall(r'\d+', '0' + a)[-1])",
    "prefix": r"float(re.split(r'oxed{|> |is |^', c)[-1].startswith(a[0]))",
    "brief": "-len(c.split()) / 80",
    "number_alone": r"float(re.findall(r'\d+', '0' + c)[-1:] == re.findall(r'\d+', '0' + a)[-1:])",
    "any_order": r"float(sorted(re.findall(r'\d', c)) == sorted(re.findall(r'\d', a)) != [])",
    "any_word": "float(any(word in c.split() for word in a.split()[1:]))",
}


FUNCTIONS = "".join(
    f"def {name}(completions, answer):\n    return [{gives} for c, a in zip(completions, answer)]\n"
    for name, gives in GIVES.items()
)
file = python_file("import re\nimport time\nfrom tandem.rewards.answers import is_right as right\n" + FUNCTIONS)


def gold(file, *names, answers=("4", "5", "60"), **settings):
    rows = [GoldRow(i, f"{i}?", {"question": f"{i}?", "answer": answer}) for i, answer in enumerate(answers)]
    specs = [f"{file}:{name}" if name in GIVES else name for name in names]
    return check_gold(Rewards(reward_funcs=specs, **settings), rows)


def test_probes_hold_the_right_and_a_wrong_answer_in_every_form_and_nothing():
    made_up = probes("6*12=72\n#### 72")
    assert [(p.form, p.is_right) for p in made_up] == [(f, r) for r in (True, False) for f in FORMS] + [(EMPTY, False)]
    assert made_up[1].text == r"<think>I work it out.</think><answer>\boxed{72}</answer>"
    assert made_up[7].text.endswith(r"\boxed{73}.") and made_up[-1].text == ""
    assert [p.form for p in probes(None)] == [EMPTY]
    kinds = {
        "1,200": "1201",
        r"\frac{1}{2}": "3/2",
        "B": "C",
        "z": "y",
        "x+1": "x+2",
        r"2\sqrt{3}": r"2\sqrt{4}",
        "3:45": "3:46",
        "5 cm": "6 cm",
        "Paris": "none of these",
    }
    assert {right: wrong_answer(right) for right in kinds} == kinds


def test_rewards_that_work_have_no_problem(file):
    found = gold(file, "answer", "gated_format", "strict_format")
    assert found.problems == found.warnings == []
    assert "  number: 45 of 45 right completions earn full marks, 0 of 108 wrong" in found.lines
    assert "  gold answers with full marks: 3 of 3, as tags, box in tags" in found.lines
    assert sum("no verifier" in line for line in found.lines) == 1  # strict_format, of which any box is right
    assert "weighted sum: a right answer beats a wrong and an empty one on 3 of 3 rows" in found.lines
    assert gold(file, "not_empty").lines[-1].endswith("on 0 of 3 rows")
    assert distribution([1.0, math.nan, 0.0, 1.0]) == "0 × 1, 1 × 2, None × 1"
    assert distribution([0, 1, 2, 3, 4, 5, 8]) == "0 to 8, median 3"


@pytest.mark.parametrize("others", [["answer"], []])
def test_what_an_environment_says_is_not_tried_without_its_rollout(file, others):
    found = gold(file, "environment", *others)
    assert found.problems == found.warnings == [] and found.lines[-1].startswith("environment  what an environment")


ALL_SAME = "rows right, wrong and empty completions all score the same: no gradient"


@pytest.mark.parametrize(
    ("names", "given", "problems"),
    [
        (
            ["whole_numbers_only"],
            {"answers": ("4", "0.5", "60")},
            ["whole_numbers_only: 1 of 3 gold answers do not earn full marks", f"on 1 of 3 {ALL_SAME} (row 1)"],
        ),
        (["whole_numbers_only"], {"answers": ("Paris", "Rome")}, [f"on 2 of 2 {ALL_SAME} (row 0, 1)"]),
        (["flat"], {}, [f"on 3 of 3 {ALL_SAME}"]),
        (["substring"], {"reward_weights": [-1.0]}, ["on 3 of 3 rows no right answer beats a wrong one (row 0, 1, 2)"]),
        (["any_digit"], {}, ["any_digit gives a wrong answer full marks on 1 of 3 rows (row 0): a near miss"]),
        (["not_empty"], {}, ["on 3 of 3 rows no right answer beats a wrong one"]),
        (["raises_on_five"], {}, ["the rewards fail on 1 of 3 rows"]),
        (["none_on_five"], {}, ["the rewards fail on 1 of 3 rows"]),
    ],
)
def test_what_cannot_train_is_a_problem_with_its_rows(file, names, given, problems):
    found = gold(file, *names, **given)
    assert [start for start in problems if not any(p.startswith(start) for p in found.problems)] == []


def test_a_problem_shows_the_row_and_its_gold_answer_or_error(file):
    found = gold(file, "raises_on_five")
    assert any(line.startswith("  ✗ row 1: raises_on_five raised ZeroDivisionError") for line in found.lines)
    found = gold(file, "whole_numbers_only", answers=("4", "0.5", "60"))
    assert "  ✗ row 1: gold '0.5' earns 0 at best in 5 forms" in found.lines


@pytest.mark.parametrize(
    ("names", "given", "warning"),
    [
        (["answer", "format"], {}, "on 3 of 3 rows a well formed wrong answer outranks a right one in plain words"),
        (["answer", "format"], {"reward_weights": [1.0, 0.5]}, None),
        (["half"], {}, "no gold answer earns half's full marks of 1; "),
        (["half"], {"full_marks": {"half": 0.5}}, None),
        (["none_on_five", "answer"], {}, "none_on_five does not apply (None) to 1 of 3 rows (row 1)"),
    ],
)
def test_what_may_be_intended_is_a_warning(file, names, given, warning):
    found = gold(file, *names, **given)
    assert found.problems == []
    assert [w.startswith(warning or "-") for w in found.warnings] == [True] * (warning is not None)


def test_a_call_beyond_the_deadline_is_a_problem(file):
    found = gold(file, "endless", timeout_s=max(1.0, limit(0.2)))
    assert found.problems[0] == "the rewards fail on 1 of 3 rows"
    assert any("✗ row 0" in line and "gave no answer within" in line for line in found.lines)


def test_the_command_tries_gold_answers_evenly_spaced_and_ends_as_they_do(tmp_path, monkeypatch, capsys):
    golds = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in golds))
    (tmp_path / "run.yaml").write_text(f"model: {{path: none/here}}\ndata: {{train: {tmp_path}/train.jsonl}}\n")
    monkeypatch.setattr(sys, "argv", ["check", f"{tmp_path}/run.yaml", "--rows", "5"])
    main()
    said = capsys.readouterr().out
    assert "gold answers: 5 of 20 rows of" in said and said.endswith("the rewards look right\n")
    monkeypatch.setattr(sys, "argv", ["check", f"{tmp_path}/run.yaml", "rewards.reward_weights=[-1, 0]"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "problem: on 20 of 20 rows no right answer beats a wrong one" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["check", f"{tmp_path}/run.yaml", "--rows", "0"])
    with pytest.raises(UserError, match="check --rows 0: at least 1 is tried"):
        main()


# ---- notations and near misses


@pytest.mark.parametrize("lines", [pytest.param(LINES[::4], id="a quarter"), pytest.param(LINES, id="all", marks=full)])
def test_no_writing_of_a_gold_answer_is_wrong_and_no_near_miss_is_right(lines):
    """By the verdicts that are written by hand."""
    for line in lines:
        made = probes(line.gold, thorough=True)
        right = {probe.answer for probe in made if probe.is_right}
        wrong = {probe.answer for probe in made if not probe.is_right and probe.form in FORMS}
        assert not right & set(line.wrong) and not wrong & {line.gold, *line.right}, line.gold
        assert len(right) > 1 and len(wrong) > 1, line.gold


@pytest.mark.parametrize(
    ("gold", "writings"),
    [
        ("0.5", ["1/2", r"\frac{1}{2}"]),
        (r"-\frac{2}{3}", ["-2/3"]),
        ("1e-05", ["1/100000", "0.00001"]),
        ("1,234", ["1234"]),
        ("B", ["(B)"]),
        (r"\textbf{(D)}", ["D", "(D)"]),
        (r"\{1,2\}", [r"\{2, 1\}"]),
        ("x^2+1", ["x^{2}+1"]),
        ("3:45 PM", [r"\text{3:45 PM}"]),
        ("5 cm", [r"5\text{ cm}"]),
    ],
)
def test_a_gold_answer_is_tried_in_the_writings_that_models_choose(gold, writings):
    assert set(writings) <= set(notations(gold).values())


# ---- rewards that are wrong, each in its way


BY_KIND = {
    "number": (r"\frac{1}{2}", "0.75", "-0.2"),
    "letter": ("B", "(C)", "A"),
    "text": ("New York", "no solution", "Paris"),
    "mathematics": (r"2\sqrt{3}", "x^2+1", "(1, 2)"),
    "time": ("3:45", "December 25, 2020", "10:30"),
}


@pytest.mark.parametrize("kind", BY_KIND)
@pytest.mark.parametrize("reward", ["as_it_stands", "substring", "last_digits", "prefix", "any_box"])
def test_a_reward_that_mistakes_a_kind_of_gold_answer_does_not_look_right(file, reward, kind):
    found = gold(file, reward, "format", answers=BY_KIND[kind], reward_weights=[1.0, 0.1])
    assert found.problems or found.doubts, found.lines


@pytest.mark.parametrize("kind", BY_KIND)
def test_rewards_that_judge_every_kind_look_right(file, kind):
    found = gold(file, "answer", "boxed", "gated_format", answers=BY_KIND[kind])
    assert found.problems == found.doubts == []
    assert sum(line.startswith(f"  {kind}: ") for line in found.lines) == 3, "a verdict by kind of each function"


@pytest.mark.parametrize(
    ("reward", "answers", "named"),
    [
        ("number_alone", ("7 red balls", "4 large boxes"), ("another unit", "another noun")),
        ("number_alone", ("$5 per hour", "60 miles per hour"), ("another unit",)),
        ("number_alone", ("100 degrees Fahrenheit", "10 cm^2"), ("another unit",)),
        ("number_alone", ("3 bags of rice", "5 apples per child"), ("another noun",)),
        ("any_word", ("7 red balls", "12 small boxes"), ("another noun",)),
    ],
)
def test_a_reward_that_pays_another_unit_or_noun_is_a_problem(file, reward, answers, named):
    problems = gold(file, reward, answers=answers).problems
    paid = [text for text in problems if "gives a wrong answer full marks on 2 of 2" in text]
    assert [what for what in named if not any(what in problem for problem in paid)] == []


def test_a_reward_that_pays_another_order_is_a_problem(file):
    answers = ["3,5", "7,2", "3:8", "4:7", "2x3", "4x6", "(1, 9)", "[1, 2, 4]", "03/05", "02/11"]
    problems = gold(file, "any_order", answers=answers).problems
    paid = [text for text in problems if "gives a wrong answer full marks on 10 of 10 rows" in text]
    assert "another order" in paid[0]


def test_few_nouns_among_many_numbers_are_tried(file):
    answers = (*(str(number) for number in range(10, 70)), "7 red balls", *map(str, range(70, 99)))
    problems = gold(file, "number_alone", answers=answers).problems
    assert any("on 1 of 90 rows (row 60): another unit, another noun" in text for text in problems)


def test_rewards_that_compare_units_nouns_and_orders_look_right(file):
    answers = (
        *("7 red balls", "4 large boxes", "100 degrees Fahrenheit", "$5 per hour", "3,5", "3,5 kg"),
        *("60 miles per hour", "3 bags of rice", "5 Canadian dollars", "3rd floor", "03/05", "2x3"),
    )
    found = gold(file, "answer", "math_verify", answers=answers)
    assert found.problems == found.doubts == []


def test_a_list_that_may_be_a_decimal_is_named(file):
    [warning] = gold(file, "answer", answers=("3,5", "7", "2,5 kg")).warnings
    assert "row 0, 2" in warning and "3.5" in warning
    assert gold(file, "answer", answers=("3, 5", "(3,5)", "1,000")).warnings == []


def test_what_a_strict_reward_may_mean_is_a_doubt_and_other_notations_and_wrong_answers_are_problems(file):
    found = gold(file, "as_it_stands")
    assert found.problems == [] and "a decimal of a whole number" in found.doubts[0]
    [problem] = gold(file, "as_it_stands", answers=("0.5", "0.25")).problems
    assert "right answers in other notations on 2 of 2 rows (row 0, 1): a fraction, a LaTeX fraction" in problem
    found = gold(file, "last_digits", answers=(r"\frac{1}{2}", "1/4"))
    assert any("gives a wrong answer full marks on 2 of 2 rows (row 0, 1): a near miss" in p for p in found.problems)
    assert any(re.search(r"row 0: gold .*: a near miss, .*\{7\}\{2\}", line) for line in found.lines)


def test_the_answer_of_another_row_that_means_the_same_is_not_wrong():
    for gold, others in (("5", ("5 km", "5.0", "7")), (r"0.\overline{3}", ("1/3", "7"))):
        assert {p.answer for p in probes(gold, others, thorough=True) if p.what == OTHER} == {"7"}


def test_a_guess_in_a_thought_is_no_answer_where_models_think(file):
    found = gold(file, "any_box", "format", reward_weights=[1.0, 0.1])
    assert any(UNFINISHED in problem for problem in found.problems)
    assert not any(UNFINISHED in problem for problem in gold(file, "any_box").problems)


def test_a_reward_that_is_none_everywhere_is_a_problem_and_one_for_length_no_verifier(file):
    assert "never does not apply (None) to 3 of 3 rows (row 0, 1, 2)" in gold(file, "never", "answer").problems
    found = gold(file, "answer", "brief", answers=("9", "99", "12"), reward_weights=[1.0, 0.1])
    assert found.problems == found.doubts == [] and sum("no verifier" in line for line in found.lines) == 1


# ---- on the way of a completion


CHATML = "configs/templates/chatml.jinja"
THINKING = "tests/support/templates/qwen3_thinking.jinja"


def checked(folder, template=CHATML, marks=(), reward_funcs=("answer", "format"), rewards=(), **sections):
    byte_tokenizer("<|im_start|>", "<|im_end|>", *marks).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 300}))
    problems = [Problem(i, {"question": f"{i}?", "answer": str(i + 4)}) for i in range(2)]
    rewards = {"reward_funcs": list(reward_funcs), "reward_weights": [1.0, 0.5][: len(reward_funcs)], **dict(rewards)}
    config = config_of(model={"path": str(folder)}, prompt={"chat_template": template}, rewards=rewards, **sections)
    return check(config, problems)


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_probes_go_behind_the_real_prompt_with_what_it_has_begun(tmp_path, template):
    found = checked(tmp_path, template, reward_funcs=("gated_format", "strict_format"))
    assert found.problems == found.doubts == []
    assert any("begin the model's turn with '<think>\\n'" in line for line in found.lines) == (template == THINKING)
    assert any("full marks: 2 of 2, as tags" in line for line in found.lines)


def test_what_a_template_or_a_tokenizer_makes_impossible_is_said_with_the_remedy(tmp_path):
    tags = {"marks": ("<think>", "</think>", "<answer>", "</answer>")}
    assert checked(tmp_path, **tags).problems == []
    problems = checked(tmp_path, **tags, rewards={"special_tokens": "drop"}).problems
    assert any(p.startswith("format: no completion earns its full marks") for p in problems)
    assert any("without the special tokens <think>" in p and "rewards.special_tokens=auto" in p for p in problems)
    problems = checked(tmp_path, sampler={"stop": ["</think>"]}).problems
    assert any(p.startswith("sampler.stop ends completions inside of a right answer") for p in problems)
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}[THINK]")
    problems = checked(tmp_path, tmp_path / "t.jinja").problems
    assert any(p.startswith("format: no completion earns its full marks behind these prompts") for p in problems)


def test_without_the_model_the_rewards_are_tried_alone_and_it_is_said():
    found = check(config_of(model={"path": "none/here"}), [Problem(0, {"question": "2+2?", "answer": "4"})])
    assert any("model none/here is not here" in warning for warning in found.warnings)
