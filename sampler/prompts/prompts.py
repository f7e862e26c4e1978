"""Turns problems into Prompts: renders chat messages with the chat template, then makes token ids of the text.
The run, `plan`, `check` and `eval` all make their prompts with this module.

Tokens are made from the rendered text, once, and are passed on as ids: nothing downstream tokenises again. The template
writes the special tokens, so none are added (except the first: sampler/prompts/chat_template.py).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from common.config import Config
from common.errors import UserError
from common.outcomes import is_whole
from common.types import Problem, Prompt
from environments import Message
from model.files.images import Vision
from sampler.prompts.bad_rows import HALF
from sampler.prompts.chat_template import render
from sampler.prompts.messages import arguments_of, as_messages, for_rewards, tools_of, with_image_places
from sampler.prompts.pictures import encode_problem

# A tag at the very end that opens a thought or an answer: <think>, [THINK], <seed:think>, <|START_THINKING|>
_OPENED = re.compile(
    r"[<\[]\|?(?!end)(?:\w+:)?\w*?(?:think|thought|reason|reflect|scratchpad|answer)\w*\|?[>\]]\s*\Z", re.IGNORECASE
)


def make_prompt(
    problem: Problem,
    tokenizer: Any,
    config: Config,
    vision: Vision | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Prompt:
    """Returns the prompt of a problem and its images, encoded, with tools and template arguments of its own columns.

    vision: the model's, with data.image_key. tools: JSON schemas for the chat template. Raises UserError.
    """
    images = encode_problem(problem, vision.form, config.data) if vision else ()
    text, reward_prompt, turn_prefix = rendered(problem, tokenizer, config, vision, tools)
    token_ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    token_ids = vision.expanded(token_ids, images) if vision else token_ids
    return Prompt(problem, reward_prompt, text, token_ids, images, turn_prefix)


def rendered(
    problem: Problem,
    tokenizer: Any,
    config: Config,
    vision: Vision | None,
    tools: Sequence[Mapping[str, Any]] | None,
) -> tuple[str, str | list[Message], str]:
    """Returns (text for the model, prompt for rewards, beginning of the model's turn in the text). Raises UserError."""
    prompt = config.prompt
    own_tools, own_arguments = tools_of(problem), arguments_of(problem)
    known = {tool["function"]["name"] for tool in tools or ()}
    if known and (unknown := {tool.get("function", tool).get("name") for tool in own_tools or ()} - known):
        raise UserError(
            f"row {problem.index} offers the tool {min(map(str, unknown))!r}; there are {', '.join(sorted(known))}: "
            "add it to rollout.tools, or take the column away: data.rename={tools: unused_tools}"
        )
    messages = as_messages(problem, config.data, prompt)
    if not (config.rollout.is_multi_turn or problem.images or any(message["content"].strip() for message in messages)):
        raise UserError(f"row {problem.index}: data.prompt_key {config.data.prompt_key!r} holds no word")
    reward_prompt = for_rewards(problem, config, messages)
    if vision:
        tokens = "".join(tokenizer.convert_ids_to_tokens([vision.start, vision.image, vision.end]))
        begin = next((i for i, m in enumerate(messages) if m["role"] != "system"), 0) + 2 * len(prompt.examples)
        messages = with_image_places(messages, problem, begin, tokens)
    try:
        text = render(tokenizer, messages, prompt=prompt, tools=own_tools or tools, arguments=own_arguments)
    except UserError as error:
        raise UserError(f"row {problem.index}: {error}") from error
    if not is_whole(text):
        raise UserError(f"row {problem.index}: {HALF} in the prompt")
    mark = str(tokenizer.convert_ids_to_tokens(vision.image)) if vision else ""
    if vision and (marks := text.count(mark)) != len(problem.images):
        raise UserError(
            f"row {problem.index}: the rendered prompt has {marks} image tokens for {len(problem.images)} images; its "
            f"text or the chat template holds the token {mark!r} itself. Write <image> where an image stands"
        )
    return text, reward_prompt, turn_prefix_of(text, messages)


def turn_prefix_of(text: str, messages: Sequence[Message] = ()) -> str:
    r"""Returns the start of the model's own turn in a rendered prompt: rewards and tools read it before the completion.

    turn_prefix_of("…<|im_start|>assistant\n<think>\n") == "<think>\n"; or the assistant's text that ends the row.
    """
    if messages and messages[-1].get("role") == "assistant":
        return text[text.rindex(messages[-1]["content"].strip()) :]
    opened = _OPENED.search(text[-100:])
    return opened.group() if opened else ""
