"""The pretrained model's task: word problems in plain language, its configs and their rewards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import Config, load
from examples import smollm2
from examples.smollm2 import BOXES, NAMES, TEMPLATES, THINGS
from rewards.find import bind, resolve

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
CONFIGS = ("smollm2_135m.yaml", "smollm2_135m_gsm8k.yaml")

# An answer from the words alone, as a reader who has never seen the templates might find it. The first rule counts.
RULES = (
    (r"the same number into each|equally among|equal teams|How many (\w+) are needed for|into each|a week\.", "divide"),
    (r"How many more|How many fewer|longer|left|still|remain|get back|younger|find\?", "differ"),
    (r"times as many|each box|in each|each\.|each\?|every day|^One |an hour", "multiply"),
    (r"more|together|in all|in total|older|does the way take", "add"),
)
OPERATIONS = {
    "divide": lambda x, y: max(x, y) // min(x, y),
    "differ": lambda x, y: abs(x - y),
    "multiply": lambda x, y: x * y,
    "add": lambda x, y: x + y,
}


def answer_of(question: str) -> int:
    """The answer from the text alone."""
    numbers = [int(word) for word in re.findall(r"\d+", question)]
    assert len(numbers) == 2, question
    (operation, *_) = (name for pattern, name in RULES if re.search(pattern, question))
    return OPERATIONS[operation](*numbers)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Anna has 12 pens and Ben has 5. How many more pens does Anna have than Ben?", 7),
        ("Leo shares 24 apples equally among 4 friends. How many apples does each friend get?", 6),
        ("Mia buys 3 books for 7 dollars each. How many dollars does she pay?", 21),
        ("Paul is 9 years old and Rosa is 4 years older. How old is Rosa?", 13),
    ],
)
def test_the_reader_of_these_tests_answers_as_a_person_would(question: str, expected: int):
    assert answer_of(question) == expected


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, str]]]:
    sizes = {"train": smollm2.NUM_TRAIN, "test": smollm2.NUM_TEST}
    return {name: [p.row() for p in smollm2.split(name, size, smollm2.SEED)] for name, size in sizes.items()}


def test_every_answer_follows_from_the_text_of_its_question(rows: dict[str, list[dict[str, str]]]):
    for row in [*rows["train"], *rows["test"]]:
        reasoning, gold = row["answer"].split("\n#### ")
        assert int(gold) == answer_of(row["question"]), row
        a, operation, b, equals, result = reasoning.split()
        assert equals == "=" and result == gold
        assert sorted([a, b]) == sorted(re.findall(r"\d+", row["question"]))
        assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[
            operation
        ] == int(gold)
        assert 1 <= int(gold) <= 25


def test_every_template_and_kind_is_in_both_splits_and_names_are_used_once():
    assert len({template.name for template in TEMPLATES}) == len(TEMPLATES) >= 30
    for name, size in (("train", smollm2.NUM_TRAIN), ("test", smollm2.NUM_TEST)):
        problems = smollm2.split(name, size, smollm2.SEED)
        assert {p.template for p in problems} == set(TEMPLATES)
    assert len({template.kind for template in TEMPLATES}) >= 10


def test_no_held_out_problem_shares_its_text_or_its_sentence_and_numbers_with_a_training_problem():
    train = smollm2.split("train", smollm2.NUM_TRAIN, smollm2.SEED)
    test = smollm2.split("test", smollm2.NUM_TEST, smollm2.SEED)
    for key in (lambda p: p.question, lambda p: (p.template.name, p.a, p.b)):
        assert {key(p) for p in train} & {key(p) for p in test} == set()
    # nor across seeds: what is held out does not depend on the seed
    others = {(p.template.name, p.a, p.b) for p in smollm2.split("train", 1000, seed=1)}
    assert others & {(p.template.name, p.a, p.b) for p in test} == set()


def test_a_split_is_a_function_of_its_seed_in_any_process():
    code = "from examples.smollm2 import split; print([p.question for p in split('test', 5, 3)])"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([p.question for p in smollm2.split("test", 5, 3)])
    assert smollm2.split("test", 5, 3) != smollm2.split("test", 5, 4)


def test_one_of_a_thing_is_singular_and_more_are_plural(rows: dict[str, list[dict[str, str]]]):
    text = "\n".join(row["question"] for row in rows["train"])
    units = (("dollar", "dollars"), ("meter", "meters"), ("minute", "minutes"), ("year", "years"))
    counted = set(re.findall(r"\b(\d+) (\w+)", text))
    for one, many in (*THINGS, *BOXES, *units):
        assert ("1", many) not in counted
        assert {number for number, word in counted if word == one} <= {"1"}, one
    assert counted & {("1", one) for one, _ in units}


def test_pronouns_are_those_of_the_first_named(rows: dict[str, list[dict[str, str]]]):
    pronouns = dict(NAMES)
    for row in rows["train"]:
        named = [word for word in re.findall(r"[A-Z][a-z]+", row["question"]) if word in pronouns]
        for said in re.findall(r"\b(he|she|He|She)\b", row["question"]):
            assert said.lower() == pronouns[named[0]], row["question"]
        assert "{" not in row["question"] and row["question"].endswith("?")
        assert row["question"][0].isupper() or row["question"][0].isdigit()


# The configs and their rewards


@pytest.fixture(scope="module", params=CONFIGS)
def config(request: pytest.FixtureRequest) -> Config:
    return load(ROOT / "configs" / request.param)


def test_the_configs_name_what_makes_their_model(config: Config):
    assert (config.model.path, config.model.builder) == (f"{smollm2.FOLDER}/model", "examples.smollm2")


def test_the_word_problems_are_where_the_config_looks_for_them():
    config = load(ROOT / "configs" / CONFIGS[0])
    assert (config.data.train, config.data.eval) == (f"{smollm2.FOLDER}/train.jsonl", f"{smollm2.FOLDER}/test.jsonl")


RIGHT = "<reasoning>\n12 - 5 = 7\n</reasoning>\n<answer>\n7\n</answer>"


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (RIGHT, (2.0, 0.5, 0.5, 0.5)),
        (RIGHT.replace("\n", " "), (2.0, 0.5, 0.5, 0.5)),
        (RIGHT.replace("\n7\n", "\n$7\n"), (2.0, 0.5, 0.5, 0.5)),
        (RIGHT.replace("\n7\n", "\n8\n"), (0.0, 0.5, 0.5, 0.5)),
        (RIGHT.replace("\n7\n", "\n7 pens\n"), (0.0, 0.0, 0.5, 0.5)),
        (RIGHT + " That is it.", (2.0, 0.5, 0.0, 0.5)),
        ("<answer>7</answer>", (2.0, 0.5, 0.0, 0.25)),
        ("<answer>7", (0.0, 0.0, 0.0, 0.125)),
        (RIGHT + RIGHT, (2.0, 0.5, 0.0, 0.0)),
        ("The answer is 7.", (0.0, 0.0, 0.0, 0.0)),
        ("", (0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_the_four_rewards_by_hand(config: Config, completion: str, expected: tuple[float, ...]):
    functions = [bind(resolve(name), {}, name) for name in config.rewards.reward_funcs]
    for shape in (completion, [{"role": "assistant", "content": completion}]):
        found = [f(completions=[shape], answer=["12 - 5 = 7\n#### 7"], prompts=["?"], kind=["x"]) for f in functions]
        assert tuple(score for (score,) in found) == expected


def test_thousands_are_right_with_and_without_a_comma():
    correct = resolve("configs/smollm2_rewards.py:correct_answer")
    texts = [f"<answer>{text}</answer>" for text in ("1,200", "1200", "$1,200", "1.200", "120")]
    assert correct(completions=texts, answer=["so\n#### 1,200"] * 5) == [2.0, 2.0, 2.0, 0.0, 0.0]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K rows are not in ../shared/data/gsm8k")
def test_every_real_row_of_gsm8k_gives_its_gold_answer_full_marks_and_the_next_number_none():
    correct = resolve("configs/smollm2_rewards.py:correct_answer")
    for split in ("train", "test"):
        answers = [json.loads(line)["answer"] for line in (GSM8K / f"{split}.jsonl").read_text().splitlines()]
        golds = [int(answer[answer.index("####") + 4 :].replace(",", "")) for answer in answers]
        right, wrong = ([f"<answer>\n{gold + off}\n</answer>" for gold in golds] for off in (0, 1))
        assert set(correct(completions=right, answer=answers)) == {2.0}
        assert set(correct(completions=wrong, answer=answers)) == {0.0}


def test_full_marks_are_the_most_that_each_reward_gives(config: Config):
    for spec, name in zip(config.rewards.reward_funcs, config.rewards.names, strict=True):
        (most,) = resolve(spec)(completions=[RIGHT], answer=["#### 7"])
        assert config.rewards.full_mark(name) == most


def test_the_example_of_the_prompt_has_the_form_that_is_rewarded(config: Config):
    (example,) = (turns["assistant"] for turns in config.prompt.examples)
    for spec in config.rewards.reward_funcs:
        (score,) = resolve(spec)(completions=[example], answer=["#### 7"])
        assert score == config.rewards.full_mark(spec.rpartition(":")[2])
