"""Problems become Prompts: system text, worked examples and problem through the chat template, then token ids.

Tokens come from the rendered text, once, and travel as ids: nothing downstream tokenises again. The template writes
the special tokens, so none are added. Chat messages may be in the OpenAI form, role and content, or in ShareGPT's, from
and value. An image stands where the row's text says <image>, or else all stand before it. Left out: tools.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.config import Config, Data, PromptTemplate
from common.errors import UserError
from common.types import EncodedImage, Problem, Prompt
from environments import Message
from model.folder import NO_CHAT_TEMPLATE
from sampler.pictures import encode_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from model.images import Vision

IMAGE = "<image>"  # in the text of a row with images

_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
_TURN: tuple[Literal["user", "assistant"], ...] = ("user", "assistant")


def make_prompts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    vision: Vision | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[list[Prompt], int]:
    """Prompts of at most data.max_prompt_length tokens, in order, and how many longer ones were filtered out.

    vision: of the model, where data.image_key is given. tools: JSON schemas that the chat template shows. Raises
    UserError when none is left.
    """
    images = encode_all(problems, vision.form, config.data) if vision else itertools.repeat(())
    prompts = [
        make_prompt(problem, tokenizer, config, vision, its, tools)
        for problem, its in zip(problems, images, strict=False)
    ]
    limit = config.data.max_prompt_length
    short = [p for p in prompts if len(p.token_ids) <= limit]
    if not short:
        longest = max((len(p.token_ids) for p in prompts), default=0)
        raise UserError(
            f"no prompt left: all {len(prompts)} are longer than data.max_prompt_length {limit} tokens. "
            f"The longest has {longest}; set data.max_prompt_length: {longest}"
        )
    return short, len(prompts) - len(short)


def make_prompt(
    problem: Problem,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    vision: Vision | None = None,
    images: tuple[EncodedImage, ...] = (),
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Prompt:
    """The prompt of one problem and its encoded images.

    Raises UserError for a tokenizer without a chat template, for a row that is neither text nor chat messages, and for
    one with more or fewer images than places for them.
    """
    prompt = config.prompt
    if read_template(prompt.chat_template) is None and not getattr(tokenizer, "chat_template", None):
        raise UserError(NO_CHAT_TEMPLATE)
    messages = as_messages(problem, config.data, prompt)
    for_rewards = _for_rewards(problem, config, messages)
    if vision:
        messages = _with_places(messages, problem, tokenizer, prompt, vision, len(images))
    text = render(tokenizer, messages, prompt=prompt, tools=tools)
    token_ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    if vision:
        try:
            token_ids = vision.expanded(token_ids, images)
        except ValueError as error:
            raise UserError(
                f"row {problem.index}: the rendered prompt has {error}; its text or the chat template holds the token "
                f"{tokenizer.convert_ids_to_tokens(vision.image)!r} itself. Write <image> where an image stands"
            ) from None
    return Prompt(problem, for_rewards, text, token_ids, images)


def _with_places(
    messages: list[Message], problem: Problem, tokenizer: Any, prompt: PromptTemplate, vision: Vision, num_images: int
) -> list[Message]:
    """The messages with the model's image tokens for each <image> of the row, or before its first user message.

    They are written here and not by the chat template, so that templates for text serve, too.
    """
    tokens = tokenizer.convert_ids_to_tokens([vision.start, vision.image, vision.end])
    # worked examples and a given system message are no part of the row
    begin = next((i for i, m in enumerate(messages) if m["role"] != "system"), 0) + 2 * len(prompt.examples)
    given, row = messages[:begin], messages[begin:]
    marks = sum(message["content"].count(IMAGE) for message in row)
    if marks == 0 and num_images:
        first = next((i for i, message in enumerate(row) if message["role"] == "user"), 0)
        row = [{**m, "content": IMAGE * num_images * (i == first) + m["content"]} for i, m in enumerate(row)]
    elif marks != num_images:
        raise UserError(
            f"row {problem.index}: {marks} × {IMAGE} in the text, and {num_images} images in data.image_key; write "
            f"{IMAGE} once for each image, or nowhere: then images stand before the text"
        )
    return [*given, *({**message, "content": message["content"].replace(IMAGE, "".join(tokens))} for message in row)]


def as_messages(problem: Problem, data: Data, prompt: PromptTemplate) -> list[Message]:
    """What the chat template gets. Raises UserError for a row that is neither text nor chat messages."""
    raw = problem.columns[data.prompt_key]
    messages = [{"role": "user", "content": raw}] if isinstance(raw, str) else _checked(raw, problem, data)
    if prompt.format_prompt is not None:
        messages = _formatted(messages, problem, prompt.format_prompt)
    own_system = messages[:1] if messages[0]["role"] == "system" else []
    given_system = [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
    turns = [{"role": role, "content": example[role]} for example in prompt.examples for role in _TURN]
    return [*(own_system or given_system), *turns, *messages[len(own_system) :]]


def shown_to_rewards(problem: Problem, config: Config) -> str | list[Message]:
    """What reward functions get as `prompts`."""
    return _for_rewards(problem, config, as_messages(problem, config.data, config.prompt))


def _for_rewards(problem: Problem, config: Config, messages: list[Message]) -> str | list[Message]:
    """The row's string as it is; of a message list, and for rollouts of several turns, all messages."""
    raw = problem.columns[config.data.prompt_key]
    return raw if isinstance(raw, str) and not config.rollout.is_multi_turn else messages


def _formatted(messages: list[Message], problem: Problem, path: Path) -> list[Message]:
    """The messages with the last of the user written by the Jinja file, from its own content and the row's columns."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise UserError(f"row {problem.index}: prompt.format_prompt {path} needs a user message, and there is none")
    columns = {name: value for name, value in problem.columns.items() if name.isidentifier()}
    try:
        content = _format_prompt(path).render(columns | {"content": messages[last]["content"]})
    except TemplateError as error:
        names = ", ".join(["content", *columns])
        raise UserError(
            f"prompt.format_prompt {path} fails on row {problem.index}: {error}; it may use {names}"
        ) from error
    return [*messages[:last], {"role": "user", "content": content}, *messages[last + 1 :]]


@functools.lru_cache(maxsize=4)
def _format_prompt(path: Path) -> Template:
    # Sandboxed as chat templates are: both kinds of file are passed around with data and models.
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(_read("prompt.format_prompt", path))


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    prompt: PromptTemplate,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Chat messages as the text that the model sees: it answers them, or goes on with the last if that is its own."""
    goes_on = messages[-1].get("role") == "assistant"
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            chat_template=read_template(prompt.chat_template),
            tokenize=False,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            **prompt.chat_template_kwargs,
        )
    except TemplateError as error:
        source = prompt.chat_template or "the tokenizer's own; prompt.chat_template names another"
        raise UserError(f"chat template ({source}) fails on a prompt: {error}") from error


def _checked(raw: Any, problem: Problem, data: Data) -> list[Message]:
    """A row's chat messages. Raises UserError unless each has a role and a content that are text.

    The last one is left off when it is where the model answers: an assistant's without content, or ShareGPT's `gpt`.

        [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}] -> [{"role": "user", "content": "2+2?"}]
    """
    is_list = isinstance(raw, list | tuple) and len(raw) > 0
    messages = [_message(message) for message in raw] if is_list else [(None, None)]
    if len(messages) > 1 and messages[-1][0] == "assistant":
        is_sharegpt = "from" in raw[-1] and "role" not in raw[-1]
        messages = messages[:-1] if is_sharegpt or messages[-1][1] is None else messages
    checked: list[Message] = []
    for place, (role, content) in enumerate(messages):
        content = _joined(content) if data.image_key is not None else content
        if not (isinstance(role, str) and isinstance(content, str)):
            raise UserError(
                f"row {problem.index}: data.prompt_key {data.prompt_key!r} holds "
                f"{str(raw[place] if is_list else raw)[:80]!r}, expected text or a list of "
                '{"role": …, "content": …} or {"from": …, "value": …} with text content'
            )
        checked.append({"role": role, "content": content})
    return checked


def _joined(content: Any) -> Any:
    """[{"type": "image"}, {"type": "text", "text": "How many?"}] -> "<image>How many?"; anything else as it is."""
    is_parts = isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content)
    if not is_parts:
        return content
    texts: list[Any] = [IMAGE if part.get("type") == "image" else part.get("text") for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


def _message(message: Any) -> tuple[Any, Any]:
    """(role, content) in either form; None for what is missing."""
    if not isinstance(message, Mapping):
        return None, None
    if message.get("role") is not None:
        return message["role"], message.get("content")
    sender = message.get("from")
    return _ROLES.get(sender, sender) if isinstance(sender, str) else None, message.get("value")


@functools.lru_cache(maxsize=4)
def read_template(path: Path | None) -> str | None:
    return None if path is None else _read("prompt.chat_template", path)


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{option} {path}: {reason}. Templates that come with Tandem: configs/templates/") from None
