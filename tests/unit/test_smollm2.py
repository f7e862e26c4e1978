"""The pretrained model's task: word problems in plain language, its configs and their rewards."""

import hashlib
import json

import pytest

from common.config import Config, load
from common.paths import ROOT
from examples import smollm2
from rewards.find import bind, resolve


def test_no_held_out_problem_shares_its_text_or_its_sentence_and_numbers_with_a_training_problem():
    train = smollm2.split("train", smollm2.NUM_TRAIN, smollm2.SEED)
    test = smollm2.split("test", smollm2.NUM_TEST, smollm2.SEED)
    for key in (lambda p: p.question, lambda p: (p.template.name, p.a, p.b)):
        assert {key(p) for p in train} & {key(p) for p in test} == set()
    # nor across seeds: what is held out does not depend on the seed
    others = {(p.template.name, p.a, p.b) for p in smollm2.split("train", 1000, seed=1)}
    assert others & {(p.template.name, p.a, p.b) for p in test} == set()


def test_problems_are_those_of_the_published_figures():
    """A digest: whoever means to change them measures the pages' figures again. The same in any process."""
    sizes = {"train": smollm2.NUM_TRAIN, "test": smollm2.NUM_TEST}
    rows = {name: [p.row() for p in smollm2.split(name, size, smollm2.SEED)] for name, size in sizes.items()}
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == "58e4aba452327c00"


# The configs and their rewards


@pytest.fixture(scope="module", params=["smollm2_135m.yaml", "smollm2_135m_gsm8k.yaml"])
def config(request: pytest.FixtureRequest) -> Config:
    return load(ROOT / "configs" / request.param)


def test_the_configs_name_what_makes_their_model(config: Config):
    assert (config.model.path, config.model.builder) == (f"{smollm2.FOLDER}/model", "examples.smollm2")
    for split, path in (("train", config.data.train), ("test", config.data.eval)):
        assert str(path).startswith((f"{smollm2.FOLDER}/{split}.jsonl", "openai/gsm8k"))


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


def test_the_example_of_the_prompt_has_the_form_that_is_rewarded(config: Config):
    """And full marks are the most that each reward gives."""
    (example,) = (turns["assistant"] for turns in config.prompt.examples)
    for spec in config.rewards.reward_funcs:
        scores = resolve(spec)(completions=[example, RIGHT], answer=["#### 7"] * 2)
        assert scores == [config.rewards.full_mark(spec.rpartition(":")[2])] * 2
