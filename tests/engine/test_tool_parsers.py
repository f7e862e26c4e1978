"""Calls as real chat templates write them are read back, by our parsers and vLLM's; nothing that is written raises."""

import functools
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from common.config import PromptTemplate
from common.errors import UserError
from common.types import Problem, Prompt
from environments.chat_completions import answer as answered
from environments.chat_completions import read
from environments.tools import Call
from sampler.engine.completions import Completion
from sampler.prompts.chat_template import render
from sampler.prompts.prompts import turn_prefix_of
from sampler.prompts.reading import Reader, stop_conditions
from sampler.prompts.reading import reader as reader_of
from sampler.turns.call_formats import FORMS, parser_of
from sampler.turns.chat import Chat
from sampler.turns.multi_turn import _say_or_refuse
from sampler.turns.tool_calls import CallReader
from sampler.turns.turns import TurnTemplate
from tests.support.configs import config_of
from tests.support.vision import byte_tokenizer
from tests.unit.sampler.prompts.test_chat_template import ASK, NO_TRL, REAL, with_its_tokens

KINDS = {"a": "string", "b": "integer", "c": "number", "d": "boolean", "e": "array", "f": "object"}
G = {"type": "object", "properties": {"g": {"type": "array", "items": {"type": "integer"}}}}  # Gemma's have no types
SCHEMA = {"type": "object", "properties": {name: {"type": kind, "description": name} for name, kind in KINDS.items()}}
SCHEMA["properties"]["f"] |= G
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}}
    for name in ("times", "look_up")
]
PLAIN = Call("times", {"a": "six", "b": 4})
HARD = Call(
    "look_up", {"a": 'say "<b>{x: [1]}</b>", é…', "b": -7, "c": 2.5, "d": True, "e": ["x", "y z"], "f": {"g": [1, 2]}}
)
OFFERS_TOOLS = [path for path in REAL if re.search(r"\btools\b", path.read_text())]
ENDS = r"(<\|im_end\|>|<turn\|>|<\|tool_response>|<\|eot_id\|>|<\|eot\|>|<\|call\|>|<\|observation\|>)\s*\Z"


def written(path, calls):
    """(a tokenizer, the model's turn with these calls as the template writes it, without its end)."""
    tokenizer, _ = with_its_tokens(path)
    turn = {"role": "assistant", "content": "", "tool_calls": [call.for_message() for call in calls]}
    given = {"prompt": PromptTemplate(chat_template=path), "tools": TOOLS}
    try:
        whole = render(tokenizer, [ASK, turn], is_over=True, **given)
    except UserError as error:
        pytest.skip(str(error))
    asked = render(tokenizer, [ASK], **given)
    while not whole.startswith(asked):  # of some it begins a thought
        asked = asked[:-1]
    return tokenizer, re.sub(ENDS, "", whole.removeprefix(asked))


@pytest.mark.parametrize("calls", [[PLAIN], [HARD], [PLAIN, HARD, PLAIN]], ids=("plain", "hard", "several"))
@pytest.mark.parametrize("path", OFFERS_TOOLS or [None], ids=lambda path: path and path.stem)
def test_a_call_that_a_real_template_writes_is_read_back_by_the_parser_of_that_template(path, calls):
    tokenizer, text = written(path, calls) if path else pytest.skip(NO_TRL)
    reader = CallReader(tokenizer, parser_of(path.read_text(), "auto"))
    reader.start(TOOLS)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(reader(text, "", ids, TOOLS)[1]) == calls, text


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "times", "arguments": {"a": "six", "b": 4}}\n</tool_call>',
    "qwen3_xml": "<tool_call>\n<function=times>\n<parameter=a>\nsix\n</parameter>\n<parameter=b>\n4\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": "<tool_call>times\n<arg_key>a</arg_key>\n<arg_value>six</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>4</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:times{a:<|"|>six<|"|>,b:4}<tool_call|>',
    "lfm2": "<|tool_call_start|>[times(a='six', b=4)]<|tool_call_end|>",
    "openai": '<|channel|>commentary to=functions.times <|constrain|>json<|message|>{"a": "six", "b": 4}',
    "mistral": '[TOOL_CALLS]times[ARGS]{"a": "six", "b": 4}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>times\n```json\n"
    '{"a": "six", "b": 4}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>times<｜tool▁sep｜>"
    '{"a": "six", "b": 4}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.times:0<|tool_call_argument_begin|>"
    '{"a": "six", "b": 4}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="times">\n<parameter name="a">six</parameter>\n'
    '<parameter name="b">4</parameter>\n</invoke>\n</minimax:tool_call>',
    "seed_oss": "<seed:tool_call>\n<function=times>\n<parameter=a>six</parameter>\n<parameter=b>4</parameter>\n"
    "</function>\n</seed:tool_call>",
    "muse_glimmer": ' to=times<|message|><atem:function_calls>\n<atem:invoke name="times">\n'
    '<atem:parameter name="a">six</atem:parameter>\n<atem:parameter name="b">4</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>",
    "llama3_json": '{"name": "times", "parameters": {"a": "six", "b": 4}}',
}
THOUGHTS = {
    "gemma4": "<|channel>thought\n{}<channel|>",
    "openai": "<|channel|>analysis<|message|>{}<|end|>",
    "muse_glimmer": " to=self<|message|>{}<|eom|><|start|>assistant",
    "mistral": "[THINK]{}[/THINK]",
    "seed_oss": "<seed:think>{}</seed:think>",
}
MARKS = sorted(set(re.findall(r"<[|｜][^|｜<>\s]+[|｜]?>|<\w+\|>|\[[A-Z_]+\]|<\|\"\|>", str([*WRITTEN.values()]))))
MARKS += ["[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<|end|>", "<|eom|>", "<|eot|>", "<think>", "</think>"]
MARKS += ["<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>"]
MARKS += ["</minimax:tool_call>", "<|python_tag|>", "<seed:think>", "</seed:think>"]


def reader(parser):
    return CallReader(byte_tokenizer(*sorted({*MARKS})), parser)


@pytest.mark.parametrize("parser", FORMS)
def test_a_call_in_a_thought_is_none_and_a_broken_one_beside_a_good_one_is_told(parser):
    read, call = reader(parser).read, WRITTEN[parser]
    thought = THOUGHTS.get(parser, "<think>{}</think>").format(f"Perhaps {call}")
    assert read(thought + "It is 24.", TOOLS)[1] == []
    assert read(thought[: thought.index("Perhaps")] + call, TOOLS)[1] == [], "cut off in its thought"
    content, calls = read(thought + call, TOOLS)
    assert calls == [PLAIN] and "Perhaps" in content
    assert read("It is 24.", TOOLS) == ("It is 24.", [])
    if FORMS[parser][2]:
        broken = call.replace("times", "").replace("six", "")[:-20] + FORMS[parser][2]
        found = read(f"{broken}\n{call}", TOOLS)[1]
        assert found[-1] == PLAIN and len(found) == 2 and found[0] != PLAIN, found


@pytest.mark.parametrize("parser", FORMS)
def test_nothing_that_a_model_writes_raises(parser):
    read, call, (_, begin, end) = reader(parser).read, WRITTEN[parser], FORMS[parser]
    for text in (
        *(call[:i] for i in range(0, len(call), 3)),
        *(call[i:] for i in range(0, len(call), 7)),
        (begin or "{") * 2000,
        begin + "[" * 5000 + end,
        begin + "{" * 5000,
        f"{begin}\ud800\x00{end}",
        call.replace("4", "1" * 5000),
        call.replace("4", "1e999"),
        call.replace("times", "тимес\u202e"),
        call * 50,
    ):
        content, calls = read(text, TOOLS)
        assert isinstance(content, str) and all(isinstance(one, Call) for one in calls)


# ---- a turn in the history of the next

LAW = {"temperature": 1.0, "top_p": 1.0, "top_k": 0.0, "min_p": 0.0}
THOUGHT = dict.fromkeys(("thinking", "reasoning", "reasoning_content"), "A thought.")
SAID = {
    "words": ({"content": "Words."}, {"role": "user", "content": "Go on."}),
    "a thought and words": ({"content": "Words.", **THOUGHT}, {"role": "user", "content": "Go on."}),
    "a thought and a call": (
        {"content": "", **THOUGHT, "tool_calls": [{"id": "a1b2c3d4e", **PLAIN.for_message()}]},
        {"role": "tool", "name": "times", "tool_call_id": "a1b2c3d4e", "content": "24"},
    ),
}


@pytest.fixture(params=REAL or [None], ids=lambda path: path and path.stem)
def real_template(request, tmp_path):
    """(tokenizer, what the template writes of messages, a TurnTemplate, the config) of a real chat template."""
    path = request.param or pytest.skip(NO_TRL)
    tokenizer, _ = with_its_tokens(path, "<|tool_call_start|>", "<|tool_call_end|>")
    tools = TOOLS if re.search(r"\btools\b", path.read_text()) else None

    def write(*messages, goes_on=True):
        given = {"tools": tools, "add_generation_prompt": goes_on, "chat_template": path.read_text()}
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **given)

    config = config_of(model={"path": str(tmp_path)}, prompt={"chat_template": path})
    prompt = functools.partial(render, tokenizer, prompt=config.prompt, tools=tools)
    template = TurnTemplate(prompt, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], tools or ())
    return tokenizer, write, template, config


def sampled(real_template, turn):
    """(the prompt, ids of the model's turn) as the template writes it."""
    tokenizer, write, template, config = real_template
    if "tool_calls" in turn and not template.tools:
        pytest.skip("no place for tools")
    try:
        asked, whole = write(ASK), write(ASK, {"role": "assistant", **turn}, goes_on=False)
    except Exception as error:
        pytest.skip(f"the template: {error}")
    if asked != template.render([ASK]):
        pytest.skip("it takes parts")
    if not whole.startswith(asked):
        pytest.skip("the prompt has begun what the template does not write again")
    if "tool_calls" in turn and "times" not in whole.removeprefix(asked):
        pytest.skip("it does not write calls")
    ids = tokenizer(whole.removeprefix(asked), add_special_tokens=False)["input_ids"]
    ends = stop_conditions(config, tokenizer).own
    return asked, ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]


def said_by(chat, ids, **asked):
    body = {"messages": [ASK], **asked} | ({"tools": TOOLS} if chat.template.tools else {})
    first = chat.asked(read(json.dumps(body).encode(), LAW), ())
    completion = Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop")
    return body, first, *chat.said(first, completion)


@pytest.mark.parametrize("kind", SAID)
def test_a_turn_that_an_agent_sends_back_is_written_as_its_template_writes_what_was_said(real_template, kind):
    tokenizer, write, template, config = real_template
    turn, answer = SAID[kind]
    _, ids = sampled(real_template, turn)
    kept = Reader(tokenizer, frozenset(stop_conditions(config, tokenizer).own))  # rewards.special_tokens: keep
    for decode in (reader_of(config, tokenizer), kept):
        chat = Chat(tokenizer, config, template, decode)
        body, first, agent_turn, said = said_by(chat, ids)
        if "tool_calls" not in turn:  # else it is told in one piece
            assert all(said.message["content"].startswith(chat.begin(first.ask, ids[:n])) for n in range(len(ids)))
        calls = said.message.get("tool_calls", [])
        assert [call["function"] for call in calls] == [call["function"] for call in turn.get("tool_calls", [])]
        seen = answer | {"tool_call_id": calls[0]["id"]} if calls else answer
        wanted = write(ASK, {"role": "assistant", **turn}, seen).replace("a1b2c3d4e", seen.get("tool_call_id", ""))
        back = answered({}, said)["choices"][0]["message"]
        for shown in (back, {name: value for name, value in back.items() if name != "reasoning_content"}):
            body["messages"] = [ASK, shown, seen]
            then = chat.asked(read(json.dumps(body).encode(), LAW), [agent_turn])
            assert tokenizer.decode(then.ids) == wanted


@pytest.mark.parametrize("kind", SAID)
def test_what_an_environment_answers_stands_behind_the_turn_as_its_template_writes_it(real_template, kind):
    tokenizer, write, template, config = real_template
    turn, answer = SAID[kind]
    asked, ids = sampled(real_template, turn)
    parser = parser_of(config.prompt.chat_template.read_text(), "auto") if template.tools else ""
    reader, tools = CallReader(tokenizer, parser, template.splits_thoughts), template.tools
    reader.start(tools)
    template = TurnTemplate.of(template.render, template.tokenize, [ASK], [answer["role"]])
    template, ids = replace(template, tools=tools, reader=reader), np.array(ids, np.int32)
    if template.rewrites:
        _say_or_refuse(template, [ASK], tokenizer, config)
    prompt_ids = np.array(template.tokenize(asked), np.int32)
    prompt = Prompt(Problem(0, {}), [ASK], asked, prompt_ids, (), turn_prefix_of(asked, [ASK]))
    if template.rewrites:
        text = prompt.turn_prefix + reader_of(config, tokenizer)([ids.tolist()])[0]
        found = template.conversation(prompt, [(text, [answer], ids)])
    else:
        found = [*prompt_ids, *ids, *template.continuation(int(ids[-1]), [answer])]
    assert tokenizer.decode(found) == write(ASK, {"role": "assistant", **turn}, answer)


@pytest.mark.parametrize("real_template", [path for path in REAL if path.stem == "gptoss"] or [None], indirect=True)
def test_of_a_turn_in_parts_a_stop_ends_the_words_and_a_cut_thought_is_no_word(real_template):
    tokenizer, _, template, config = real_template
    chat = Chat(tokenizer, config, template, reader_of(config, tokenizer))
    _, ids = sampled(real_template, SAID["a thought and words"][0])
    *_, said = said_by(chat, ids[: -len("s.") - 1], stop="rd")
    assert said.message == {"role": "assistant", "content": "Wo", "reasoning_content": "A thought."}
    *_, said = said_by(chat, ids[:14])
    assert said.message["content"] == "" and said.message["reasoning_content"]
