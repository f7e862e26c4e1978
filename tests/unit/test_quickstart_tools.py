"""The quick start with tools: problems, the calculator, the tokens of the warm start, and what is built."""

from __future__ import annotations

import collections
import json
import random
from pathlib import Path
from typing import Any

import pytest

from common import config
from environments.tools import Toolbox
from examples.calculator import problems
from examples.calculator.build import FOLDER, build, stamp
from examples.calculator.calculator import calculator, thrift
from examples.calculator.settings import QuickStartTools, ToolWarmStart
from launcher.run import built_by

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart_tools.yaml"
TINY = QuickStartTools(
    num_train=60, num_test=20, warm_start=ToolWarmStart(num_clean_steps=2, num_careless_steps=1, batch_size=4)
)
PRODUCT = problems.ToolProblem("product", 76, 49, "Ken has 76 boxes with 49 pens each. How many pens?")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "quickstart_tools"
    assert build(folder, TINY, report=lambda line: None)
    return folder


@pytest.fixture(scope="module")
def tokenizer(built: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(built / "model"))


def test_problems_are_sums_and_products_and_no_held_out_numbers_are_trained_on() -> None:
    train, test = problems.split("train", 2000, seed=0), problems.split("test", 500, seed=0)
    kinds = collections.Counter(problem.kind for problem in test)
    assert 0.5 < kinds["product"] / 500 < 0.7, "without a calculator at most half of the problems can be solved"
    products = [{(p.a, p.b) for p in split if p.kind == "product"} for split in (train, test)]
    assert not products[0] & products[1] and not {p.question for p in train} & {p.question for p in test}
    assert PRODUCT.row() == {"question": PRODUCT.question, "answer": "#### 3724", "kind": "product"}
    assert all(p.result >= 0 for p in train)


def test_the_calculator_computes_and_refuses_what_is_no_operation() -> None:
    assert [calculator(e) for e in ("76*49", " 7 + 5", "9-4")] == ["3724", "12", "5"]
    with pytest.raises(ValueError, match="two numbers"):
        calculator("__import__('os')")


def test_a_call_costs_and_a_run_without_tools_does_not() -> None:
    said, seen = {"role": "assistant", "content": "…"}, {"role": "tool", "content": "4"}
    assert thrift([[said, seen, said], [said], "text"]) == [-0.2, 0.0, 0.0]


def test_what_the_pupil_is_shown_is_right_unless_asked_to_be_wrong() -> None:
    from examples.calculator.warm_start import turns_of

    rng = random.Random(0)
    call, answer = turns_of(PRODUCT, rng, by_heart=0, wrong=0, malformed=0)
    turn = Toolbox({"calculator": calculator}, "hermes").answer(call)
    assert turn is not None and [m["content"] for m in turn.messages] == ["3724"]
    assert answer == "<answer>3724</answer>"
    assert {len(turns_of(PRODUCT, rng, by_heart=0, wrong=1, malformed=0)) for _ in range(20)} == {1}
    six = problems.ToolProblem("add", 4, 2, "Ken has 4 pens and buys 2 more. How many pens does Ken have?")
    assert turns_of(six, rng, by_heart=1, wrong=1, malformed=1) == ["<answer>6</answer>"]
    assert len(turns_of(six, rng, by_heart=0, wrong=1, malformed=1)) == 2, "sums are never spoiled"
    for _ in range(20):
        [broken] = turns_of(PRODUCT, rng, by_heart=0, wrong=0, malformed=1)
        answered = Toolbox({"calculator": calculator}, "hermes").answer(broken)
        assert answered is not None and answered.num_call_errors == 1


def test_the_warm_start_teaches_the_tokens_that_a_run_samples_and_no_other(tokenizer: Any) -> None:
    from common.config import PromptTemplate
    from environments.tools import schemas
    from examples.calculator.warm_start import conversation, turns_of
    from sampler.prompts import render
    from sampler.turns import TurnTemplate

    def rendered(messages: Any, asks: bool) -> str:
        tools = schemas({"calculator": calculator})
        return render(tokenizer, messages, asks, prompt=PromptTemplate(), tools=tools)

    ask = [{"role": "user", "content": PRODUCT.question}]
    template = TurnTemplate.of(rendered, lambda text: tokenizer(text)["input_ids"], ask, ["tool"])
    turns = turns_of(PRODUCT, random.Random(0), by_heart=0, wrong=0, malformed=0)
    prompt = template.tokenize(rendered(ask, True))
    pieces = conversation(PRODUCT, turns, prompt, template, tokenizer.eos_token_id)
    call, answer = ({"role": "assistant", "content": turn} for turn in turns)
    whole = rendered([*ask, call, {"role": "tool", "content": "3724"}, answer], False)
    assert tokenizer.decode(pieces.token_ids) + "\n" == whole
    taught = [i for i, is_taught in zip(pieces.token_ids, pieces.is_taught, strict=True) if is_taught]
    assert tokenizer.decode(taught) == f"{turns[0]}<|im_end|>{turns[1]}<|im_end|>"
    assert len(pieces.token_ids) < 130, "the configuration's lengths hold it"


def test_the_build_writes_what_the_configuration_reads(built: Path) -> None:
    settings = config.load(CONFIG)
    for path in (settings.data.train, settings.data.eval, settings.model.path):
        assert str(path).startswith(f"{FOLDER}/") and (built / Path(str(path)).relative_to(FOLDER)).exists()
    assert built_by(settings) == "examples.calculator"
    rows = [json.loads(line) for line in (built / "test.jsonl").read_text().splitlines()]
    assert rows == [p.row() for p in problems.split("test", 20, seed=0)]


def test_the_same_configuration_runs_without_the_calculator() -> None:
    assert not config.load(CONFIG, ["rollout.tools=[]"]).rollout.is_multi_turn


def test_another_setting_is_built_again() -> None:
    assert stamp(TINY) != stamp(QuickStartTools()) == stamp(QuickStartTools())
