"""Calls as real chat templates write them are read back, by our parsers and vLLM's; nothing that is written raises."""

import re

import pytest

from common.config import PromptTemplate
from common.errors import UserError
from environments.tools import Call
from sampler.chat_template import render
from sampler.tool_calls import FORMS, CallReader, parser_of
from tests.support.vision import byte_tokenizer
from tests.unit.test_chat_template import ASK, NO_TRL, REAL, with_its_tokens

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
