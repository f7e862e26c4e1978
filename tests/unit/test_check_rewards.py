"""`launch.sh check`: what a reward gets wrong is found from gold answers, without a model."""

import json
import math
import sys
from types import SimpleNamespace

import pytest

from common.config import Rewards
from common.errors import UserError
from launcher.check_rewards import main
from rewards import gold_answers
from rewards.gold_answers import GoldRow, check_gold, distribution
from rewards.probes import EMPTY, FORMS, probes, wrong_answer
from tests.support.speed import limit

pytestmark = pytest.mark.timeout(120)

# Functions, by what each gives a completion c where the answer is a
GIVES = {
    "whole_numbers_only": "float(a.isdigit() and a in c)",
    "substring": "float(a in c)",
    "any_digit": "float(any(x.isdigit() for x in c) and (a in c or a == '4'))",
    "half": "(a in c) / 2",
    "flat": "0.25",
    "not_empty": "float(bool(c))",
    "raises_on_five": "(a in c) / float(a != '5')",
    "endless": "time.sleep(1000 if a == '4' else 0) or float(a in c)",
    "none_on_five": "None if a == '5' else float(a in c)",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("check") / "mine.py"
    functions = [
        f"def {name}(completions, answer):\n    return [{gives} for c, a in zip(completions, answer)]\n"
        for name, gives in GIVES.items()
    ]
    path.write_text("import time\n" + "".join(functions))
    return path


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
    kinds = {"1,200": "1201", r"\frac{1}{2}": "3/2", "B": "C", "z": "y", "x+1": "none of these"}
    assert {right: wrong_answer(right) for right in kinds} == kinds


def test_rewards_that_work_have_no_problem(file):
    found = gold(file, "answer", "gated_format", "strict_format")
    assert found.problems == found.warnings == []
    assert "  scores: -1 × 18, 1 × 15" in found.lines
    assert "  gold answers with full marks: 3 of 3, as tags, box in tags" in found.lines
    assert sum("no verifier" in line for line in found.lines) == 1  # strict_format, of which any box is right
    assert "weighted sum: a right answer beats a wrong and an empty one on 3 of 3 rows" in found.lines
    assert gold(file, "not_empty").lines[-1].endswith("on 0 of 3 rows")
    assert distribution([1.0, math.nan, 0.0, 1.0]) == "0 × 1, 1 × 2, None × 1"
    assert distribution([0, 1, 2, 3, 4, 5, 8]) == "0 to 8, median 3"


@pytest.mark.parametrize("others", [["answer"], []])
def test_what_an_environment_says_is_not_tried_without_its_rollout(file, others):
    found = gold(file, "environment", *others)
    assert found.problems == found.warnings == [] and found.lines[-1].startswith("environment  what a rollout's")


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
        (["any_digit"], {}, ["any_digit gives a wrong answer full marks on 1 of 3 rows (row 0); if a right one earns"]),
        (["not_empty"], {}, ["on 3 of 3 rows no right answer beats a wrong one"]),
        (["raises_on_five"], {}, ["the rewards fail on 1 of 3 rows"]),
        (["none_on_five"], {}, ["the rewards fail on 1 of 3 rows"]),
    ],
)
def test_what_cannot_train_is_a_problem_with_its_rows(file, names, given, problems):
    found = gold(file, *names, **given)
    assert [problem[: len(start)] for problem, start in zip(found.problems, problems, strict=False)] == problems
    shown = [line.split(": ", 1)[1] for line in found.lines if "✗ row 1" in line]
    if names == ["raises_on_five"]:
        assert shown[0].startswith("raises_on_five raised ZeroDivisionError")
    if len(problems) == 2:
        assert shown == ["gold '0.5' earns 0 at best in 5 forms"]


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


def test_a_slow_call_is_a_warning_and_one_beyond_the_deadline_a_problem(file, monkeypatch):
    found = gold(file, "endless", timeout_s=max(1.0, limit(0.2)))
    assert found.problems == ["the rewards fail on 1 of 3 rows"]
    assert any("✗ row 0" in line and "gave no answer within" in line for line in found.lines)
    clock = iter([0.0, 1.2, 2.0, 2.1, 3.0, 3.1])  # before and after each of three rows
    monkeypatch.setattr(gold_answers, "time", SimpleNamespace(monotonic=clock.__next__))
    [warning] = gold(file, "substring").warnings
    assert warning.startswith("the slowest call took 1.200 s, on row 0;")


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
