"""What stands between two turns, in tokens: for real chat templates, and what is refused of others."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from common.config import PromptTemplate
from common.errors import UserError
from sampler.prompts import render
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen2.5",
            "<|im_end|>\n<|im_start|>user\n<tool_response>\n408\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        ("smollm2", "<|im_end|>\n<|im_start|>tool\n408<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", "<|im_end|>\n<|im_start|>tool\n408<|im_end|>\n<|im_start|>assistant\n"),
        (
            "llama3",
            "<|eot_id|><|start_header_id|>tool<|end_header_id|>\n\n408<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)
def test_what_follows_a_turn_is_what_the_template_writes_between_it_and_the_next(name: str, expected: str) -> None:
    assert of(name, "tool", "user").difference(SEEN) == expected


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2", "chatml", "hermes_tools", "llama3", "qwen3"])
def test_prompt_turn_and_difference_are_the_tokens_of_the_whole_conversation(name: str) -> None:
    """Byte pairs of one special token and the next never merge, so pieces and the whole have the same ids here."""
    end = tokens("<|eot_id|>" if name == "llama3" else "<|im_end|>")[0]
    text = rendered(name)
    sampled = [*tokens(CALL), end]
    pieces = [*tokens(text(ASK, True)), *sampled, *of(name, "tool").continuation(end, SEEN)]
    assert pieces == tokens(text([*ASK, {"role": "assistant", "content": CALL}, *SEEN], True))


def test_two_answers_of_tools_stand_in_one_turn_where_the_template_says_so() -> None:
    text = of("qwen2.5", "tool").difference([*SEEN, {"role": "tool", "content": "9"}])
    assert text.count("<|im_start|>user") == 1 and text.count("<tool_response>") == 2


def test_a_turn_that_ended_with_another_token_gets_the_end_of_turn_of_the_template() -> None:
    template = of("qwen2.5", "tool")
    end, other = tokens("<|im_end|>")[0], tokens("<|endoftext|>")[0]
    assert template.continuation(other, SEEN).tolist() == [end, *template.continuation(end, SEEN).tolist()]


def test_a_template_that_strips_thoughts_is_refused_where_the_user_speaks_next_and_taken_where_a_tool_does() -> None:
    of("qwen3", "tool")
    with pytest.raises(UserError, match="rewrites earlier turns") as error:
        of("qwen3", "user")
    assert "'<think>" in str(error.value) and "prompt.chat_template=configs/templates/hermes_tools.jinja" in str(
        error.value
    )
    of("hermes_tools", "user", "tool")


def test_a_template_that_does_not_take_the_role_is_refused(tmp_path: Path) -> None:
    strict = tmp_path / "strict.jinja"
    strict.write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('only user and assistant') }}{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    rendering = partial(render, tokenizer(), prompt=PromptTemplate(chat_template=strict))
    with pytest.raises(UserError, match=r"role 'tool'.*only user and assistant"):
        TurnTemplate.of(rendering, tokens, ASK, ["tool"])


def test_a_template_without_the_assistants_words_is_refused(tmp_path: Path) -> None:
    silent = tmp_path / "silent.jinja"
    silent.write_text("{% for m in messages if m.role != 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}")
    rendering = partial(render, tokenizer(), prompt=PromptTemplate(chat_template=silent))
    with pytest.raises(UserError, match="exactly once"):
        TurnTemplate.of(rendering, tokens, ASK, ["user"])
