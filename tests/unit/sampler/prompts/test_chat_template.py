"""What is said reaches the model, whatever a chat template takes it as; or it is refused by name."""

import importlib.util
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from common.config import PromptTemplate
from common.errors import UserError
from sampler.prompts.chat_template import about_first_token, render
from sampler.prompts.reading import stop_conditions
from tests.support.configs import config_of
from tests.support.vision import byte_tokenizer

TRL = importlib.util.find_spec("trl")
# The chat templates of the hub's model families, as TRL ships them.
FOLDER = Path(str(TRL and TRL.origin)).parent / "chat_templates"
REAL = sorted(path for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
NO_TRL = "TRL's collection of chat templates is not installed: pip install -r tools/locks/dev.txt"
CALL = {"type": "function", "id": "a1b2c3d4e", "function": {"name": "times", "arguments": {"a": "six", "b": 4}}}
ASK, ANSWER = {"role": "user", "content": "What is six by 4?"}, {"role": "assistant", "content": "Let me see."}
CALLED = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
SEEN = [*CALLED, {"role": "tool", "name": "times", "tool_call_id": "a1b2c3d4e", "content": "twenty-four"}]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "times", "description": "", "parameters": {"type": "object"}}}]

AS_PARTS = "{% for m in messages %}[{{ m.role }}] {% for p in m.content %}{{ p.text }}{% endfor %}|{% endfor %}"
AS_TEXT = """{% for m in messages %}[{{ m.role }}] {{ m.content or "" }}{% for c in m.tool_calls or [] %}
    {{- c.function.name + "(" + c.function.arguments + ")" }}{% endfor %}|{% endfor %}"""
CALLS_ALONE = """{% for m in messages %}[{{ m.role }}] {% for c in m.tool_calls if m.content is none %}
    {{- c.function.name }} {{ c.function.arguments | tojson }}{% else %}{{ m.content }}{% endfor %}|{% endfor %}"""
NO_CALLS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}|{% endfor %}"
NO_TOOLS = "{% for m in messages if m.role != 'tool' %}[{{ m.role }}] {{ m.content }} {{ m.tool_calls }}|{% endfor %}"
LAST = "{{ messages[-1].content }}"
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m.role }}] {{ m.content }}|{% endfor %}"


def written(template, messages, folder):
    (folder / "t.jinja").write_text(template)
    tokenizer = byte_tokenizer("<|end|>")
    tokenizer.bos_token = tokenizer.eos_token = "<|end|>"
    return render(tokenizer, messages, prompt=PromptTemplate(chat_template=folder / "t.jinja"))


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (AS_PARTS, [ASK], "[user] What is six by 4?|"),
        (AS_PARTS, [SYSTEM, ASK, ANSWER], "[system] Be brief.|[user] What is six by 4?|[assistant] Let me see."),
        (AS_TEXT, SEEN, '[user] What is six by 4?|[assistant] times({"a": "six", "b": 4})|[tool] twenty-four|'),
        (CALLS_ALONE, SEEN, '[user] What is six by 4?|[assistant] times {"a": "six", "b": 4}|[tool] twenty-four|'),
        (NO_CALLS, [ASK, ANSWER], "[user] What is six by 4?|[assistant] Let me see."),
    ],
)
def test_a_conversation_is_told_in_the_way_that_the_template_shows(template, messages, text, tmp_path):
    assert written(template, messages, tmp_path) == text


@pytest.mark.parametrize(
    ("template", "messages", "lost"),
    [
        (NO_CALLS, CALLED, "the assistant's calls"),
        (NO_TOOLS, SEEN, "a message of the role 'tool'"),
        (LAST, [ASK, ANSWER, ASK], "a message of the role 'user'"),
        ("{{ messages[0].content }}", [SYSTEM, ASK], "a message of the role 'user'"),
    ],
)
def test_what_no_way_shows_is_refused_by_name(template, messages, lost, tmp_path):
    with pytest.raises(UserError, match=f"does not show {lost}; leave it out of the rows, or name a template"):
        written(template, messages, tmp_path)


def test_a_system_message_that_is_not_shown_is_said_once(tmp_path, capsys):
    assert [written(NO_SYSTEM, [SYSTEM, ASK], tmp_path) for _ in range(2)] == ["[user] What is six by 4?|"] * 2
    assert "does not show the system message" in capsys.readouterr().err


# ---- the real ones


def with_its_tokens(path, *more):
    """A tokenizer that has every special token of the template, which is the second."""
    found = set(re.findall(r"<[|｜][^|｜<>\s]+[|｜]?>|<\w+\|>|<(?:start|end)_of_\w+>", path.read_text()))
    tokenizer = byte_tokenizer(*sorted(found | {"<s>", "</s>", *more}))
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    return tokenizer, path


@pytest.fixture(params=REAL or [None], ids=lambda path: path and path.stem)
def real(request):
    return with_its_tokens(request.param) if REAL else pytest.skip(NO_TRL)


def test_a_real_template_shows_all_words_of_a_row(real):
    tokenizer, path = real
    prompt = PromptTemplate(chat_template=path)
    for messages in ([ASK], [ASK, ANSWER, ASK], [SYSTEM, ASK]):
        try:
            text = render(tokenizer, messages, prompt=prompt)
        except UserError as error:  # Gemma 1's own words
            assert messages[0] is SYSTEM and "System role not supported" in str(error)
            continue
        assert all(message["content"] in text for message in messages)


def test_a_real_template_shows_calls_and_results_or_is_refused(real):
    tokenizer, path = real
    try:
        text = render(tokenizer, SEEN, prompt=PromptTemplate(chat_template=path), tools=TOOLS)
    except UserError as error:
        assert re.search("no place for tools", str(error)) or (path.stem == "lfm2" and "calls" in str(error))
        return
    assert all(piece in text.split("What is six by 4?")[1] for piece in ("times", "six", "twenty-four")), text


ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>",
    "gemma4": "<turn|>",
    "glm4moe": "<|user|>",
    "gptoss": "<|return|>",  # <|end|> would end a completion behind its thoughts
    "llama3_1": "<|eot_id|>",
    "phi3": "<|end|>",
    "qwen3": "<|im_end|>",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_completion_ends_where_the_real_template_ends_the_last_turn(name, tmp_path):
    tokenizer, path = with_its_tokens(REAL[0].with_name(f"{name}.jinja")) if REAL else pytest.skip(NO_TRL)
    config = config_of(model={"path": str(tmp_path)}, prompt={"chat_template": path})
    assert tokenizer.convert_ids_to_tokens(list(stop_conditions(config, tokenizer).own)) == ["</s>", ENDS[name]]


@pytest.mark.parametrize(
    ("template", "text", "said"),
    [
        (None, "<s>Hello", None),
        (None, "Hello", "prompts do not begin with <s>"),
        ("{{ messages[0].content }}", "<s>Hello", "t.jinja leaves it out"),
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Hello", None),
        ("<s>{{ messages[0].content }}", "<s>Hello", None),
    ],
)
def test_a_first_token_that_tokenizer_and_template_disagree_about_is_said(template, text, said, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(template or "")
    begins_texts = Mock(return_value={"input_ids": [1, 7]}, bos_token_id=1, bos_token="<s>")  # before each text
    found = about_first_token(begins_texts, PromptTemplate(chat_template=template and path), text)
    assert found is None if said is None else said in found
