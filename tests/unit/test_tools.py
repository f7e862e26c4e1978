"""Tools and TRL's environments: what the model writes becomes calls, and what goes wrong a message to the model."""

import itertools
import json
from dataclasses import make_dataclass
from datetime import date
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from common.config import Rewards, Rollouts
from common.errors import UserError
from environments import Done, Turn, conversation, prompt_of
from environments.contracts import Instance
from environments.pool import EnvironmentPool
from environments.tools import Call, answer_calls
from rewards import text_of
from rewards.pool import RewardPool
from sampler.turns.call_formats import parser_of
from sampler.turns.tool_calls import CallReader
from tests.support.python_file import python_file
from tests.support.speed import limit
from tests.support.vision import byte_tokenizer

pytestmark = pytest.mark.timeout(120)

# As in TRL's documentation of tools and of environment_factory, and a reward that reads the conversation
TRL = '''
import asyncio

def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b

async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    await asyncio.sleep(0)
    return a + b

class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        return " Count to " + kwargs["answer"] + "."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.
        """
        self.counter += step
        return self.counter

    def get_reward(self) -> float:
        return float(self.counter == 4)

def reward_func(environments, **kwargs):
    return [environment.counter for environment in environments]

def turns(completions, environment_rewards, **kwargs):
    return [None if reward is None else len(said) for said, reward in zip(completions, environment_rewards)]
'''


file = python_file(TRL)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def reader(parser="hermes"):
    return CallReader(byte_tokenizer("<|end|>"), parser)


def said(text, *names):
    """What a model with these tools wrote."""
    tokens = reader()._tokenizer(text, add_special_tokens=False)["input_ids"]
    return reader()(text, "", tokens, [{"function": {"name": name}} for name in names])


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("hermes", f"See.\n{call('f', a=1)}{call('g')} Wait.", "See.\n Wait.", [("f", {"a": 1}), ("g", {})]),
        ("hermes", "It is 24.", "It is 24.", []),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", {"a": 1})]),  # not closed
        ("hermes", f"<think>{call('f')}</think>No.", f"<think>{call('f')}</think>No.", []),
        ("hermes", f"<think>As <tool_call> says</think>{call('f')}", "<think>As <tool_call> says</think>", [("f", {})]),
        ("hermes", f"<think>Perhaps {call('f')}", f"<think>Perhaps {call('f')}", []),  # cut off in its thought
        ("hermes", f"With <tool_call>, so: {call('f')}", "With <tool_call>, so:", [("f", {})]),
        ("hermes", "I would write <tool_call>.", "I would write <tool_call>.", []),
        ("hermes", call("f", a="<think>"), "", [("f", {"a": "<think>"})]),
        (
            "llama3_json",
            '<think>{"a": 1}</think>{"name": "f", "parameters": {}}',
            '<think>{"a": 1}</think>',
            [("f", {})],
        ),
        ("llama3_json", ' {"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
        ("llama3_json", "It is {24}.", "It is {24}.", []),
    ],
)
def test_calls_are_read_in_the_form_of_the_models(parser, text, content, calls):
    assert reader(parser).read(text) == (content, [Call(*one) for one in calls])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"name": "f", "arguments": {"a": 1}', "the call is not valid JSON"),
        ("", "the call is not valid JSON"),
        ("[1]", "the call is not valid JSON: not a JSON object"),
        ('{"name": "f", "arguments": {"a": "\\ud83d"}}', "the call is not valid JSON: 'utf-8' codec"),
        ('{"arguments": {}}', 'the call has no "name"'),
        ('{"name": 7}', 'the call has no "name"'),
        ('{"name": "f", "arguments": [1]}', "the call is not valid JSON: not a JSON object"),
        ('{"name": "f", "arguments": "a=1"}', "the call is not valid JSON"),
        ("[" * 100_000, "the call is not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(body, problem):
    [found] = reader("hermes").read(f"<tool_call>{body}</tool_call>")[1]
    assert found.problem.startswith(problem)


def test_marks_that_are_special_tokens_are_read_and_what_the_model_did_not_say_in_words_is_left_out():
    tokenizer = byte_tokenizer("<|end|>", "<|mood|>", "<tool_call>", "</tool_call>")
    ids = tokenizer(f"<|mood|>See. {call('f', a=1)}<|end|>", add_special_tokens=False)["input_ids"]
    tools, visible = [{"function": {"name": "f"}}], 'See. {"name": "f", "arguments": {"a": 1}}'
    read, thought = CallReader(tokenizer, "hermes"), "<think>Hm.</think>"
    assert read(thought + visible, thought, ids, tools) == (thought + "See.", [Call("f", {"a": 1})])
    assert read(visible, "<think>", ids, tools)[1] == [], "the prompt began a thought"


def test_a_turn_that_takes_for_ever_to_read_is_one_broken_call(monkeypatch):
    monkeypatch.setattr("sampler.turns.tool_calls._CPU_S", 0.1)
    made = reader()
    monkeypatch.setattr(made, "read", lambda *_: [None for _ in itertools.count() if False])
    assert made("…", "", [5], []) == ("…", [Call(problem="the calls cannot be read: the turn is too long")])


def double(x: int) -> int:
    if x < 0:
        raise ValueError("too small")
    if x == 0:
        raise SystemExit
    return 2 * x


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (call("double", x=-1), '{"error": "ValueError: too small"}'),
        (call("double", x=0), '{"error": "SystemExit: "}'),
        (call("double"), '{"error": "TypeError: double() missing 1 required positional argument: \'x\'"}'),
        (call("double", x=1, y=1), '{"error": "TypeError: double() got an unexpected keyword argument \'y\'"}'),
        (call("halve", x=1), '{"error": "Tool halve not found. There are: double."}'),
        ("<tool_call>7</tool_call>", '{"error": "the call is not valid JSON: not a JSON object"}'),
    ],
)
def test_what_goes_wrong_in_a_call_is_told_to_the_model_and_counted(text, content):
    turn = answer_calls({"double": double}, said(f"{text}{call('double', x=2)}", "double"))
    assert (turn.num_calls, turn.num_call_errors) == (2, 1)
    assert [m["content"] for m in turn.messages] == [content, "4"]
    assert answer_calls({"double": double}, said("It is 4.", "double")) is None, "a turn without a call is the last"


@pytest.mark.parametrize(
    ("template", "given", "parser"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "auto", "hermes"),
        ('{{ tools }} {"parameters": …} <tool_call>', "auto", "hermes"),  # Hermes 3 writes schemas out
        ('{{ tools }} {"name": …, "parameters": …}', "auto", "llama3_json"),
        ("{{ tools }} <tool_call><function=", "auto", "qwen3_xml"),
        ("{{ tools }} <tool_call><function=", "qwen3_coder", "qwen3_xml"),
        ("{{ tools }} as you like", "xlam", "xlam"),
        ("{{ tools }} <|tool_list_start|>", "auto", "lfm2"),
    ],
)
def test_the_parser_is_the_one_of_the_chat_template(template, given, parser):
    assert parser_of(template, given) == parser


@pytest.mark.parametrize(
    ("template", "given", "words"),
    [
        ('{{ tools }} {"name": …, "parameters": …}', "hermes", "set rollout.tool_parser=llama3_json"),
        ("{{ tools }} <tool_call><function=", "hermes", "set rollout.tool_parser=qwen3_xml"),
        ("{{ tools }} <function= [TOOL_CALLS]", "auto", "qwen3_xml or mistral reads them; set .*=qwen3_xml"),
        ("{{ tools }} as you like", "auto", "as no known parser reads them; set rollout.tool_parser=hermes. There are"),
        ("{{ tools }} <tool_call>", "hermess", "'hermess': the chat template writes calls as hermes"),
    ],
)
def test_a_template_with_another_form_is_refused_by_name(template, given, words):
    with pytest.raises(UserError, match=words):
        parser_of(template, given)


def one(pool):
    [(_, reply)] = pool.ready(timeout_s=limit(60))
    return reply


def test_the_tools_of_trls_documentation_run_unchanged(file):
    given = Rollouts(tools=[f"{file}:multiply", f"{file}:async_add"], timeout_s=limit(20))
    with EnvironmentPool(given, columns=["prompt"]) as pool:
        functions = [tool["function"] for tool in pool.tools]
        assert [function["name"] for function in functions] == ["multiply", "async_add"]
        assert functions[0]["description"] == "Multiplies two integers."
        assert functions[0]["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first integer."}
        pool.start("r", {"prompt": "6*4?"})
        assert one(pool).messages == []  # the row's own prompt
        text = f"Let me see. {call('multiply', a=6, b=4)}{call('async_add', a=6, b=4)}{call('divide', a=6)}"
        pool.step("r", text, said(text, "multiply", "async_add"))
        turn = one(pool)
        assert (turn.num_calls, turn.num_call_errors) == (3, 1)
        expected = [("tool", name) for name in ("multiply", "async_add", "divide")]
        assert [(m["role"], m["name"]) for m in turn.messages] == expected
        assert [m["content"] for m in turn.messages[:2]] == ["24", "10"]
        assert turn.assistant["content"] == "Let me see."
        assert turn.assistant["tool_calls"][0]["function"] == {"name": "multiply", "arguments": {"a": 6, "b": 4}}
        pool.step("r", "It is 24.")
        assert one(pool).reward is None


def test_the_environment_of_trls_documentation_runs_unchanged_with_its_reward_function(file):
    row, prompt = {"answer": "4"}, [{"role": "user", "content": "Start."}]
    given = Rollouts(environment=f"{file}:IncrementEnv", timeout_s=limit(20))
    with EnvironmentPool(given, columns=row) as pool:
        assert [tool["function"]["name"] for tool in pool.tools] == ["increment"]
        pool.start("r", row)
        assert prompt_of(prompt, one(pool)) == [{"role": "user", "content": "Start. Count to 4."}]
        turns: list[tuple[str, Turn | Done | None]] = []
        for text in (call("increment", step=1), call("increment", step=3), "Done."):
            pool.step("r", text, said(text, "increment"))
            turns.append((text, one(pool)))
    done = turns[-1][1]
    assert isinstance(done, Done) and (done.reward, done.state) == (1.0, {"counter": 4})
    functions = ["environment", f"{file}:reward_func", f"{file}:turns"]
    config = Rewards(reward_funcs=functions, reward_weights=[1.0, 0.5, 2.0])
    words = conversation(turns)
    assert text_of(words) == "Done." and text_of(words[:2]) == "", "the tool's words are not the model's"
    with RewardPool(config, columns=row) as rewards:
        theirs = {"environment_rewards": [done.reward, None], "environments": [done.state] * 2}
        rewards.submit(1, prompt, [words, words[:1]], [[1], [2]], row, **theirs)
        [(_, [ended, failed])] = rewards.ready(timeout_s=limit(20))
    assert ended == ({"environment": 1.0, "reward_func": 4.0, "turns": 5.0}, 13.0)
    assert failed[1] == 2.0, "without the environment's reward"


def test_reset_gives_the_prompt_or_leaves_the_rows_own_or_adds_to_its_last_user_message():
    ask = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*4?"}]
    assert prompt_of(ask, Turn()) == ask
    assert prompt_of(ask, Turn([{"role": "user", "content": "Guess."}])) == [{"role": "user", "content": "Guess."}]
    assert prompt_of(ask, Turn(appended=" Now.")) == [ask[0], {"role": "user", "content": "6*4? Now."}]
    assert prompt_of(ask[:1], Turn(appended="Go.")) == [ask[0], {"role": "user", "content": "Go."}]
    assert ask[1]["content"] == "6*4?"


def test_what_no_message_can_hold_is_left_out_of_an_environments_state():
    mine = SimpleNamespace(counter=4, cells=[object()], huge=2**70, long="x" * 100_000, _hidden=1)
    assert Instance(mine, None).state() == {"counter": 4, "huge": 2**70}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"sum": 3, "ok": True, "left": None}, '{"sum": 3, "ok": true, "left": null}'),
        ([{"name": "Zoë"}, 0.5], '[{"name": "Zoë"}, 0.5]'),
        ((1, False), "[1, false]"),
        (True, "true"),
        (None, ""),
        ("", ""),
        ("it's {'text'}", "it's {'text'}"),
        (24, "24"),
        (np.float64(0.5), "0.5"),
        ({"rows": np.array([1, 2])}, '{"rows": [1, 2]}'),
        (make_dataclass("Point", ["x"])(1), '{"x": 1}'),
        ({"when": date(2024, 2, 29)}, '{"when": "2024-02-29"}'),
        (Decimal("0.10"), "0.10"),
    ],
)
def test_what_a_tool_returns_is_text_or_json_and_none_is_empty(value, text):
    turn = answer_calls({"tool": lambda: value}, ("", [Call("tool")]))
    assert turn.messages[0]["content"] == text and turn.num_call_errors == 0


@pytest.mark.parametrize("value", [Image.new("L", (2, 2)), [Image.new("L", (2, 2))], b"\x89PNG", {"f": object()}])
def test_a_picture_and_what_else_is_no_text_is_refused_by_name(value):
    with pytest.raises(TypeError, match=r"tool draw returned .*; return text, numbers, lists or dicts"):
        answer_calls({"draw": lambda: value}, ("", [Call("draw")]))


def test_a_piece_is_no_word_where_rewards_do_not_see_it_or_a_mark_that_is_none_stands_in_it():
    reader = CallReader(byte_tokenizer())
    reader._no_words = ["<|channel|>"]
    assert reader._is_no_word("<think>a</think>", "b")
    assert not reader._is_no_word("<think>a</think>", "<think>a</think>b")
    assert reader._is_no_word("<|channel|>a", "<|channel|>a")
