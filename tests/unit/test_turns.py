"""What stands between two turns, in tokens: for real chat templates, and what is refused of others."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from common.config import PromptTemplate
from common.errors import UserError
from sampler.chat_template import render
from sampler.turns import TurnTemplate

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = {path.stem: path for path in (ROOT / "tests" / "support" / "templates").glob("*.jinja")}
TEMPLATES |= {name: ROOT / f"configs/templates/{name}.jinja" for name in ("chatml", "hermes_tools")}
ASK = [{"role": "user", "content": "12*34?"}]
SEEN = [{"role": "tool", "content": "408"}]
CALL = '<tool_call>\n{"name": "multiply"}\n</tool_call>'
MARKS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>")


@cache
def tokenizer() -> Any:
    from examples.tokenizer import byte_level  # and with it transformers, which not every worker needs

    made = byte_level(["12*34? 408 tool user assistant"], 400, 256, (), "", special=MARKS)
    made.bos_token = "<|begin_of_text|>"
    return made


def tokens(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def rendered(name: str) -> Any:
    prompt = PromptTemplate(chat_template=TEMPLATES[name])
    return partial(render, tokenizer(), prompt=prompt)


def of(name: str, *roles: str) -> TurnTemplate:
    return TurnTemplate.of(rendered(name), tokens, ASK, roles)


TOOL = "<|im_end|>\n<|im_start|>tool\n408<|im_end|>\n<|im_start|>assistant\n"
QWEN = TOOL.replace("tool\n408", "user\n<tool_response>\n408\n</tool_response>")
LLAMA = (
    "<|eot_id|><|start_header_id|>tool<|end_header_id|>\n\n408<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)


@pytest.mark.parametrize(
    ("name", "expected"), [("qwen2.5", QWEN), ("smollm2", TOOL), ("chatml", TOOL), ("llama3", LLAMA)]
)
def test_what_follows_a_turn_is_what_the_template_writes_between_it_and_the_next(name: str, expected: str) -> None:
    assert of(name, "tool", "user").difference(SEEN) == expected


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2", "chatml", "hermes_tools", "llama3", "qwen3"])
def test_prompt_turn_and_difference_are_the_tokens_of_the_whole_conversation(name: str) -> None:
    """Byte pairs of one special token and the next never merge, so pieces and the whole have the same ids here."""
    end = tokens("<|eot_id|>" if name == "llama3" else "<|im_end|>")[0]
    text = rendered(name)
    sampled = [*tokens(CALL), end]
    pieces = [*tokens(text(ASK)), *sampled, *of(name, "tool").continuation(end, SEEN)]
    assert pieces == tokens(text([*ASK, {"role": "assistant", "content": CALL}, *SEEN]))


def test_answers_of_tools_stand_in_one_turn_behind_the_templates_own_end_of_turn() -> None:
    template = of("qwen2.5", "tool")
    text = template.difference([*SEEN, {"role": "tool", "content": "9"}])
    assert text.count("<|im_start|>user") == 1 and text.count("<tool_response>") == 2
    end, other = tokens("<|im_end|>")[0], tokens("<|endoftext|>")[0]  # the model may have written another one
    assert template.continuation(other, SEEN).tolist() == [end, *template.continuation(end, SEEN).tolist()]


def test_a_template_that_strips_thoughts_is_refused_where_the_user_speaks_next_and_taken_where_a_tool_does() -> None:
    of("qwen3", "tool")
    with pytest.raises(UserError, match="rewrites earlier turns") as error:
        of("qwen3", "user")
    assert "'<think>" in str(error.value) and "prompt.chat_template=configs/templates/hermes_tools.jinja" in str(
        error.value
    )
    of("hermes_tools", "user", "tool")


@pytest.mark.parametrize(
    ("template", "role", "said"),
    [
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "{{ m.content }}<|im_end|>{% endfor %}",
            "tool",
            r"role 'tool'.*no tools",
        ),
        (
            "{% for m in messages if m.role != 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}",
            "user",
            "does not show a message of the role 'assistant'",
        ),
    ],
    ids=["without the role", "without the assistant's words"],
)
def test_a_template_that_cannot_write_the_turns_is_refused(tmp_path: Path, template: str, role: str, said: str) -> None:
    (tmp_path / "x.jinja").write_text(template)
    rendering = partial(render, tokenizer(), prompt=PromptTemplate(chat_template=tmp_path / "x.jinja"))
    with pytest.raises(UserError, match=said):
        TurnTemplate.of(rendering, tokens, ASK, [role])
