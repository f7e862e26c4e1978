"""Turns problems into Prompts: renders chat messages with the template, and tokenises the text.

The run, `plan`, `check` and `eval` all make their prompts with this module. Token ids are made from
the rendered text, once, and are passed on as ids: nothing tokenises again later. The chat template
writes the special tokens, so the tokenizer adds none. The first token is the exception:
sampler/prompts/chat_template.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.config import Config
from common.errors import UserError
from common.outcomes import is_whole
from common.types import EncodedImage, Problem, Prompt
from environments import Message
from model.files.images import Vision
from sampler.prompts.bad_rows import HALF
from sampler.prompts.chat_template import render
from sampler.prompts.messages import (
    arguments_of,
    as_messages,
    for_rewards,
    tools_of,
    with_image_places,
)
from sampler.prompts.pictures import encode_problem

# A tag at the end of a prompt that opens a thought or an answer: <think>, [THINK], <seed:think> or
# <|START_THINKING|>
_OPENED = re.compile(
    r"[<\[]\|?(?!end)(?:\w+:)?"
    r"\w*?(?:think|thought|reason|reflect|scratchpad|answer)\w*\|?[>\]]\s*\Z",
    re.IGNORECASE,
)
_LONGEST_TAG = 100  # characters


@dataclass(frozen=True)
class RenderedPrompt:
    """The texts of a prompt that is not tokenised yet; the fields of Prompt say more."""

    text: str
    for_rewards: str | list[Message]
    turn_prefix: str


def make_prompt(
    problem: Problem,
    tokenizer: Any,
    config: Config,
    vision: Vision | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Prompt:
    """Returns the prompt of a problem, with its encoded images.

    vision: the model's image format, if rows have images. tools: JSON schemas for the chat
    template, unless the row has some in its column `tools`. Raises UserError.
    """
    images: tuple[EncodedImage, ...] = ()
    if vision is not None:
        images = encode_problem(problem, vision.form, config.data)
    rendered = render_problem(problem, tokenizer, config, vision, tools)
    token_ids = tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
    token_ids = np.asarray(token_ids, dtype=np.int32)
    if vision is not None:
        token_ids = vision.expanded(token_ids, images)
    return Prompt(
        problem, rendered.for_rewards, rendered.text, token_ids, images, rendered.turn_prefix
    )


def render_problem(
    problem: Problem,
    tokenizer: Any,
    config: Config,
    vision: Vision | None,
    tools: Sequence[Mapping[str, Any]] | None,
) -> RenderedPrompt:
    """Returns the texts of a problem's prompt. The arguments are those of `make_prompt`.

    Raises UserError, which names the row.
    """
    own_tools = tools_of(problem)
    if tools:
        _require_known_tools(problem, own_tools or [], tools)
    row_messages = as_messages(problem, config.data, config.prompt)
    has_words = any(message["content"].strip() for message in row_messages)
    if not has_words and not problem.images and not config.rollout.is_multi_turn:
        raise UserError(
            f"row {problem.index}: data.prompt_key {config.data.prompt_key!r} holds no word"
        )
    messages = row_messages
    if vision is not None:
        messages = _with_image_tokens(row_messages, problem, tokenizer, config, vision)
    try:
        text = render(
            tokenizer,
            messages,
            prompt=config.prompt,
            tools=own_tools or tools,
            arguments=arguments_of(problem),
        )
    except UserError as error:
        raise UserError(f"row {problem.index}: {error}") from error
    if not is_whole(text):
        raise UserError(f"row {problem.index}: {HALF} in the prompt")
    if vision is not None:
        _require_token_per_image(text, problem, tokenizer, vision)
    prompt_for_rewards = for_rewards(problem, config, row_messages)
    return RenderedPrompt(text, prompt_for_rewards, turn_prefix_of(text, messages))


def _require_known_tools(
    problem: Problem, own_tools: Sequence[Any], tools: Sequence[Mapping[str, Any]]
) -> None:
    """Raises UserError if a row offers a tool that the run does not have."""
    known = {tool["function"]["name"] for tool in tools}
    unknown = []
    for tool in own_tools:
        name = tool.get("function", tool).get("name")
        if name not in known:
            unknown.append(str(name))
    if unknown:
        raise UserError(
            f"row {problem.index} offers the tool {min(unknown)!r}; there are "
            f"{', '.join(sorted(known))}: add it to rollout.tools, or take the column away: "
            "data.rename={tools: unused_tools}"
        )


def _with_image_tokens(
    messages: list[Message], problem: Problem, tokenizer: Any, config: Config, vision: Vision
) -> list[Message]:
    """Returns the messages with the model's tokens where images stand. Raises UserError."""
    tokens = tokenizer.convert_ids_to_tokens([vision.start, vision.image, vision.end])
    turns = [i for i, message in enumerate(messages) if message["role"] != "system"]
    first_of_row = min(turns, default=0) + 2 * len(config.prompt.examples)
    return with_image_places(messages, problem, first_of_row, "".join(tokens))


def _require_token_per_image(text: str, problem: Problem, tokenizer: Any, vision: Vision) -> None:
    """Raises UserError unless the rendered prompt has one placeholder token for each image."""
    token = str(tokenizer.convert_ids_to_tokens(vision.image))
    num_tokens = text.count(token)
    if num_tokens != len(problem.images):
        raise UserError(
            f"row {problem.index}: the rendered prompt has {num_tokens} image tokens for "
            f"{len(problem.images)} images; its text or the chat template holds the token "
            f"{token!r} itself. Write <image> where an image stands"
        )


def turn_prefix_of(text: str, messages: Sequence[Message] = ()) -> str:
    r"""Returns the beginning of the model's own turn that a rendered prompt already contains.

    Rewards and tools read it before the completion. It is a tag that the chat template opens, or
    the text of an assistant's message that ends the row; "" if there is neither.

        turn_prefix_of("…<|im_start|>assistant\n<think>\n") == "<think>\n"
    """
    if messages and messages[-1].get("role") == "assistant":
        return text[text.rindex(messages[-1]["content"].strip()) :]
    opened = _OPENED.search(text[-_LONGEST_TAG:])
    return opened.group() if opened else ""
