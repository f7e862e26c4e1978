"""Problems become Prompts: system text and problem through the chat template, then token ids.

Tokens come from the rendered text, once, and travel as ids: nothing downstream tokenises again. The template writes
the special tokens, so none are added. Left out: images and tools.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from common.config import Data, PromptTemplate, UserError
from common.types import Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_prompts(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, data: Data, prompt: PromptTemplate
) -> tuple[list[Prompt], int]:
    """Prompts of at most data.max_prompt_length tokens, in order, and how many longer ones were filtered out.

    Raises UserError when none is left.
    """
    prompts = [make_prompt(problem, tokenizer, data, prompt) for problem in problems]
    short = [p for p in prompts if len(p.token_ids) <= data.max_prompt_length]
    if not short:
        longest = max((len(p.token_ids) for p in prompts), default=0)
        raise UserError(
            f"no prompt left: all {len(prompts)} are longer than data.max_prompt_length {data.max_prompt_length} "
            f"tokens. The longest has {longest}; set data.max_prompt_length: {longest}"
        )
    return short, len(prompts) - len(short)


def make_prompt(problem: Problem, tokenizer: PreTrainedTokenizerBase, data: Data, prompt: PromptTemplate) -> Prompt:
    """The prompt of one problem. `messages` is what reward functions see: the row's string, or the whole message list.

    Raises UserError for a tokenizer without a chat template and for a row that is neither text nor chat messages.
    """
    template = _template(prompt.chat_template)
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the tokenizer has no chat template; set prompt.chat_template: configs/templates/chatml.jinja or use an "
            "-Instruct model"
        )
    raw = problem.columns[data.prompt_key]
    messages = [{"role": "user", "content": raw}] if isinstance(raw, str) else _checked(raw, problem, data)
    if prompt.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": prompt.system}, *messages]
    is_prefilled = messages[-1]["role"] == "assistant"  # the row begins the answer: continue that message
    text = _render(tokenizer, messages, template, prompt, is_prefilled)
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Prompt(problem, raw if isinstance(raw, str) else messages, text, np.asarray(token_ids, dtype=np.int32))


def _render(
    tokenizer: Any, messages: list[dict[str, str]], template: str | None, prompt: PromptTemplate, is_prefilled: bool
) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=not is_prefilled,
            continue_final_message=is_prefilled,
            **prompt.chat_template_kwargs,
        )
    except TemplateError as error:
        source = prompt.chat_template or "the tokenizer's own; prompt.chat_template names another"
        raise UserError(f"chat template ({source}) fails on a prompt: {error}") from error


def _checked(raw: Any, problem: Problem, data: Data) -> list[dict[str, str]]:
    """A row's chat messages. Raises UserError unless each is {"role": text, "content": text}."""
    is_list = isinstance(raw, list | tuple) and len(raw) > 0
    for message in raw if is_list else [raw]:
        fields = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
        if not (is_list and all(isinstance(field, str) for field in fields)):
            raise UserError(
                f"row {problem.index}: data.prompt_key {data.prompt_key!r} holds {str(message)[:80]!r}, expected text "
                'or a list of {"role": …, "content": …} with text content'
            )
    return [{"role": message["role"], "content": message["content"]} for message in raw]


@functools.lru_cache(maxsize=4)
def _template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(f"prompt.chat_template {path}: {error.strerror or error}") from None
