"""The parts of a run with tools together: data, chat template, real environment processes, and a scripted engine."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import Config
from common.errors import UserError
from common.types import Problem, sequences
from sampler.prompts.prompts import make_prompt
from sampler.turns.multi_turn import open_multi_turn
from sampler.turns.scheduler import Turns
from sampler.turns.task import held_out_params
from tests.unit.sampler.turns.test_agents import (  # noqa: F401
    CALL,
    PROBLEM,
    ROOT,
    Model,
    _with_a_row_for_each_token,
    played,
    tokenizer,
)
from tests.unit.sampler.turns.test_agents import config as without_code

TOOL = f"{ROOT}/examples/calculator_tool.py:calculator"
pytestmark = pytest.mark.usefixtures("_with_a_row_for_each_token")


def config(folder: Path, template: str = "hermes_tools", **rollout: Any) -> Config:
    return without_code(folder, template=template, rollout={"agent": None} | (rollout or {"tools": [TOOL]}))


class Scripted(Model):
    """Writes these turns, whatever it is asked: for each rollout its own."""

    def __init__(self, *scripts: list[str]) -> None:
        turns = [iter(script) for script in scripts]
        super().__init__(lambda rollout, _: next(turns[rollout]))

    def rollout_of(self, key: Any) -> int:
        return key[1]

    @property
    def asked(self) -> list[str]:
        """The prompts of rollout 0."""
        return [tokenizer().decode(ids) for rollout, ids, _ in self.turns if rollout == 0]


def test_a_call_is_answered_by_the_tool_and_the_model_goes_on_behind_the_answer(tmp_path: Path) -> None:
    engine = Scripted([CALL, "<answer>159294</answer>"], ["<answer>7</answer>"])
    sampled = played(config(tmp_path), engine)
    called, direct = sampled.completions
    assert (called.turns, called.tool_calls, called.tool_errors, direct.turns) == (2, 1, 0, 1)
    first, second = engine.asked
    assert '"name": "calculator"' in first, "the template offers the tool"
    assert second == (
        f"{first}{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n159294\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    [(start, end)] = called.observed
    assert tokenizer().decode(called.token_ids[start:end]).strip().startswith("<|im_start|>user\n<tool_response>")
    assert [m["role"] for m in called.messages] == ["assistant", "tool", "assistant"]
    assert called.messages[1]["content"] == "159294"
    assert sampled.prompt.for_rewards == [{"role": "user", "content": "417*382?"}]


def test_the_environment_of_the_page_gives_the_prompt_the_answers_and_the_reward(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    [block] = re.findall(r"^```python\n# guess.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "guess.py").write_text(block)
    engine = Scripted(["5", "9", "7"], ["1", "one", "2", "3"])
    given = config(tmp_path, "chatml", environment=f"{tmp_path}/guess.py:Guess", max_turns=4)
    sampled = played(given, engine, Problem(3, {"question": "", "answer": "7"}))
    assert [c.environment_reward for c in sampled.completions] == [1.0, 0.0]
    said = [[m["content"] for m in c.messages if m["role"] == "user"] for c in sampled.completions]
    assert said == [["Higher.", "Lower."], ["Higher."] * 3]
    [asked] = sampled.prompt.for_rewards
    start = f"<|im_start|>user\n{asked['content']}<|im_end|>\n<|im_start|>assistant\n"
    first, second, _ = engine.asked
    assert first == start and asked["content"].startswith("Guess my number")
    assert second == f"{start}5<|im_end|>\n<|im_start|>user\nHigher.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer().decode(sampled.prompt.token_ids) == start, "what the trainer gets"


TEMPLATES = ROOT / "tests" / "support" / "templates"
GUESS = """
from tandem.environments import Done
class Guess:
    def reset(self):
        pass
    def step(self, completion):
        return Done(1.0) if completion.endswith("7") else "No."
"""


def with_template(folder: Path, template: Path, **data: Any) -> Config:
    (folder / "guess.py").write_text(GUESS)
    given = config(folder, environment=f"{folder}/guess.py:Guess", max_turns=4)
    changes = {"prompt": {"chat_template": template}, "data": {**given.data.model_dump(), **data}}
    return Config.model_validate(given.model_dump() | changes)


def test_dropped_thoughts_make_more_sequences_of_one_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = "<think>\nFive?\n</think>\n\n5", "<think>\nSix?\n</think>\n\n6"
    engine = Scripted([first, second, "7"], ["7"])
    sampled = played(with_template(tmp_path, TEMPLATES / "qwen3.jinja"), engine)
    assert "rewrites earlier turns" in capsys.readouterr().err
    long, short = sampled.completions
    begin = "<|im_start|>user\n417*382?<|im_end|>\n<|im_start|>assistant\n"
    no = "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    asked = engine.asked
    assert asked == [begin, f"{begin}5{no}", f"{begin}5{no}6{no}"]
    assert (long.turns, len(long.forks), long.environment_reward, short.forks) == (3, 2, 1.0, ())
    prompt = len(sampled.prompt.token_ids)
    whole = np.array([*sampled.prompt.token_ids, *long.token_ids])
    seen = [tokenizer().decode(whole[of]) for of in sequences(prompt, len(long.token_ids), long.forks)]
    assert seen == [begin + first + "<|im_end|>", f"{begin}5{no}{second}<|im_end|>", f"{begin}5{no}6{no}7<|im_end|>"]
    parts = np.split(long.token_ids, np.ravel(long.observed))
    written = [tokenizer().decode(part) for part in parts]
    assert written[::2] == [f"{text}<|im_end|>" for text in (first, second, "7")], "what trains, once each"
    assert long.forks == ((len(parts[0]), prompt), (sum(map(len, parts[:3])), len(tokenizer()(asked[1]).input_ids)))
    assert (long.logprobs[np.r_[tuple(slice(*span) for span in long.observed)]] == 0).all()


def test_a_template_that_opens_turns_with_special_tokens_or_rewrites_beside_images_is_refused(tmp_path: Path) -> None:
    opens = tmp_path / "opens.jinja"
    turn = "<|im_start|>{{ m.role }}{{ '<|endoftext|>' if m.role == 'assistant' }}{{ m.content }}<|im_end|>"
    opens.write_text("{% for m in messages %}" + turn + "{% endfor %}<|im_start|>assistant")
    with pytest.raises(UserError, match=r"The text of a turn lacks <\|endoftext\|>.*hermes_tools.jinja"):
        played(with_template(tmp_path, opens), Scripted())
    given = with_template(tmp_path, TEMPLATES / "qwen3.jinja", image_key="image")
    with pytest.raises(UserError, match=r"prompts with images.*data\.image_key=null"):
        played(given, Scripted())


def test_an_answer_with_an_unknown_token_costs_its_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sampler.turns.multi_turn.vocabulary", lambda _: 1)
    engine = Scripted([CALL], ["<answer>7</answer>"])
    sampled = played(config(tmp_path), engine)
    failed, ended = sampled.completions
    assert ended.failure is None and failed.turns == 1
    assert failed.failure.kind == "error"
    assert re.search("the model's embedding has no row for '.+'", failed.failure.reason)


def test_a_row_offers_its_own_tools_and_has_its_own_template_arguments_in_every_turn(tmp_path: Path) -> None:
    two = "\n".join(f'def {name}() -> str:\n    """{name}"""\n    return "42"\n' for name in "fg")
    (tmp_path / "two.py").write_text(two)
    given = config(tmp_path, tools=[f"{tmp_path}/two.py:f", f"{tmp_path}/two.py:g"])
    template = given.prompt.chat_template
    assert template is not None
    own = template.read_text() + "{% if add_generation_prompt and mood %}{{ mood }} {% endif %}"
    (tmp_path / "t.jinja").write_text(own)
    given = given.model_copy(update={"prompt": given.prompt.model_copy(update={"chat_template": tmp_path / "t.jinja"})})
    g = {"type": "function", "function": {"name": "g", "description": "g", "parameters": {"type": "object"}}}
    row = Problem(3, {"question": "?", "answer": "1", "tools": [g], "chat_template_kwargs": {"mood": "Gladly"}})
    calls = [CALL.replace("calculator", name).replace('"expression": "417*382"', "") for name in "fg"]
    engine = Scripted(["".join(calls), "Done."], ["Done."])
    sampled = played(given, engine, row)
    assert '"name": "g"' in engine.asked[0] and '"name": "f"' not in engine.asked[0]
    assert [text.endswith("<|im_start|>assistant\nGladly ") for text in engine.asked] == [True, True]
    said = [m["content"] for m in sampled.completions[0].messages if m["role"] == "tool"]
    assert said == ['{"error": "Tool f not found. There are: g."}', "42"]


def test_rows_of_one_turn_and_of_several_share_an_engine(tmp_path: Path) -> None:
    given = config(tmp_path)
    scripts: dict[Any, list[str]] = {
        ("calls", 0): [CALL, "<answer>159294</answer>"],
        ("calls", 1): ["<answer>7</answer>"],
        "plain": ["eight"],
    }
    engine: Any = Model(lambda key, _: scripts[key].pop(0))
    engine.rollout_of = lambda key: key
    with open_multi_turn(given, tokenizer(), PROBLEM, PROBLEM.columns) as multi_turn:
        assert multi_turn is not None
        decode = functools.partial(tokenizer().batch_decode, skip_special_tokens=True)
        turns = Turns(engine, decode, {"tools": multi_turn, "plain": None})
        for source, key, shown in (("tools", "calls", multi_turn.pool.tools), ("plain", "plain", None)):
            problem = dataclasses.replace(PROBLEM, source=source)
            turns.start(key, make_prompt(problem, tokenizer(), given, tools=shown), held_out_params(given, 0))
        over: dict[Any, Any] = {}
        while turns.num_running:
            over |= dict(turns.step())
    assert [c.turns for c in over["calls"].completions] == [2, 1]
    assert over["calls"].completions[0].messages[1]["content"] == "159294"
    assert [decode([c.token_ids.tolist()]) for c in over["plain"].completions] == [["eight"]]
