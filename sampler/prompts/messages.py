"""Turns rows into chat messages, tools and arguments for the chat template.

docs/data.md#from-a-row-to-a-prompt says what a row may hold.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.config import Config, Data, PromptTemplate
from common.errors import UserError
from common.types import Problem
from environments import Message
from rewards.mathematics.gold import gold_texts
from sampler.prompts.notations import (
    IMAGE,
    content_of,
    from_json,
    openai_message,
    shows_image,
    without_nulls,
)

_AFTER_AN_ANSWER = " \n.*$})"  # characters


def as_messages(problem: Problem, data: Data, prompt: PromptTemplate) -> list[Message]:
    """Returns the messages for the chat template: system message, worked examples, the row's own.

    A system message of the row replaces prompt.system. Raises UserError for a row that is neither
    text nor chat messages.
    """
    raw = raw_prompt(problem, data)
    row_messages = _messages_of_row(raw, problem, data)
    if prompt.format_prompt is not None:
        row_messages = _formatted(row_messages, problem, prompt.format_prompt)
    messages = []
    if row_messages[0]["role"] == "system":
        messages.append(row_messages[0])
        row_messages = row_messages[1:]
    elif prompt.system is not None:
        messages.append({"role": "system", "content": prompt.system})
    for example in prompt.examples:
        messages.append({"role": "user", "content": example["user"]})
        messages.append({"role": "assistant", "content": example["assistant"]})
    return messages + row_messages


def raw_prompt(problem: Problem, data: Data) -> Any:
    """Returns the row's value of data.prompt_key: text or chat messages, a number as text.

    Returns "" if there is no such column, because prompt.format_prompt makes the prompt of others.
    """
    if data.prompt_key is None:
        return ""
    raw = problem.columns[data.prompt_key]
    if isinstance(raw, int | float):
        return str(raw)
    return raw


def shown_to_rewards(problem: Problem, config: Config) -> str | list[Message]:
    """Returns the prompt that reward functions get as `prompts`. Raises UserError."""
    return for_rewards(problem, config, as_messages(problem, config.data, config.prompt))


def for_rewards(problem: Problem, config: Config, messages: list[Message]) -> str | list[Message]:
    """Returns the prompt that reward functions get as `prompts`.

    That is the row's text, or all messages if the row has a list or rollouts have several turns.
    """
    raw = raw_prompt(problem, config.data) or messages[-1]["content"]
    if isinstance(raw, str) and not config.rollout.is_multi_turn:
        return raw
    return messages


def tools_of(problem: Problem) -> list[Any] | None:
    """Returns the schemas in a row's column `tools`, which is a list or its JSON text, as in TRL.

    Returns None if there are none, and for a column of another kind.
    """
    column = from_json(problem.columns.get("tools"))
    if not isinstance(column, list | tuple):
        return None
    schemas = []
    for item in column:
        schema = without_nulls(from_json(item))
        if not isinstance(schema, Mapping) or not ("function" in schema or "name" in schema):
            return None
        schemas.append(schema)
    return schemas or None


def arguments_of(problem: Problem) -> dict[str, Any]:
    """Returns the template arguments in a row's column `chat_template_kwargs`, as in TRL.

    Returns {} if there are none, and for a column of another kind.
    """
    column = from_json(problem.columns.get("chat_template_kwargs"))
    if not isinstance(column, Mapping):
        return {}
    return dict(without_nulls(column))


def _formatted(messages: list[Message], problem: Problem, path: Path | str) -> list[Message]:
    """Returns the messages with the last user message rendered by prompt.format_prompt.

    The template gets the message as `content`, and the row's columns. Raises UserError.
    """
    last = None
    for i, message in enumerate(messages):
        if message["role"] == "user":
            last = i
    if last is None:
        raise UserError(
            f"row {problem.index}: prompt.format_prompt {path} needs a user message, and there is "
            "none"
        )
    values = {name: value for name, value in problem.columns.items() if name.isidentifier()}
    values["content"] = messages[last]["content"]
    try:
        content = _format_template(path).render(values)
    except TemplateError as error:
        names = ", ".join(dict.fromkeys(["content", *values]))
        raise UserError(
            f"prompt.format_prompt {path} fails on row {problem.index}: {error}; it may use {names}"
        ) from error
    formatted = list(messages)
    formatted[last] = messages[last] | {"content": content}
    return formatted


@functools.lru_cache(maxsize=4)
def _format_template(source: Path | str) -> Template:
    text = source if isinstance(source, str) else read("prompt.format_prompt", source)
    # Chat templates run in this sandbox too: files of both kinds come with data and models.
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(text)


def _messages_of_row(raw: Any, problem: Problem, data: Data) -> list[Message]:
    """Returns a row's chat messages, without a last one that the model is to write itself.

    A text is a user's message. Raises UserError unless each message has a role, and content or
    tool calls.

        [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
        -> [{"role": "user", "content": "2+2?"}]
    """
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    if not isinstance(raw, list | tuple) or not raw:
        raise _no_message_error(raw, problem, data)
    messages = list(map(openai_message, raw))
    if len(messages) > 1 and _is_for_model(raw[-1], messages[-1], problem):
        del messages[-1]
    for item, message in zip(raw, messages, strict=False):
        has_role = isinstance(message.get("role"), str)
        if not has_role or not isinstance(message.get("content"), str):
            raise _no_message_error(item, problem, data)
        if data.image_key is None and shows_image(content_of(item)):
            raise UserError(
                f"row {problem.index}: a message of data.prompt_key {data.prompt_key!r} shows an "
                "image; set data.image_key to the column with the images, or take the part out"
            )
    return messages


def _no_message_error(value: Any, problem: Problem, data: Data) -> UserError:
    return UserError(
        f"row {problem.index}: data.prompt_key {data.prompt_key!r} holds {str(value)[:80]!r}, "
        'expected text or a list of {"role": …, "content": …} or {"from": …, "value": …} with text '
        "content"
    )


def _is_for_model(raw: Any, message: Message, problem: Problem) -> bool:
    """Returns whether the model answers in place of a row's last message.

    That is an assistant's message that is empty, calls tools, holds the gold answer, or is
    ShareGPT's `gpt`. The model continues an assistant's message with other content.
    """
    if message.get("role") != "assistant":
        return False
    is_sharegpt = "from" in raw and "role" not in raw
    if is_sharegpt or not message.get("content") or "tool_calls" in message:
        return True
    return _holds_gold(message["content"], problem)


def leaves_gold_off(problem: Problem, data: Data) -> bool:
    """Returns whether the row's last message is left out because it holds the gold answer."""
    raw = raw_prompt(problem, data)
    if not isinstance(raw, list | tuple) or len(raw) < 2:
        return False
    last = openai_message(raw[-1])
    if last.get("role") != "assistant" or "from" in raw[-1]:
        return False
    return _holds_gold(last["content"], problem)


def _holds_gold(content: Any, problem: Problem) -> bool:
    """Returns whether an assistant's content ends in the gold answer: nothing is left to solve."""
    end = str(content).rstrip(_AFTER_AN_ANSWER)
    end = end.removesuffix("</answer>").rstrip(_AFTER_AN_ANSWER)
    for text in gold_texts(problem.columns.get("answer")):
        gold = text.rstrip(" .")
        if gold and end.endswith(gold):
            return True
    return False


def read(option: str, path: Path) -> str:
    """Returns the text of a template file. Raises UserError, which names the option."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "Templates that come with Tandem: configs/templates/"
        raise UserError(f"{option} {path}: {reason}. {remedy}") from None


def with_image_places(
    messages: Sequence[Message], problem: Problem, first_of_row: int, tokens: str
) -> list[Message]:
    """Returns the messages with the model's image tokens in place of each <image> of the row.

    If the row has no <image>, the images stand before the text of its first user message. The
    tokens are inserted before the chat template runs, so that templates for text serve, too.
    first_of_row: the index of the row's first own message, after worked examples and a system
    message. Raises UserError if the row does not have one <image> for each image.
    """
    row = list(messages[first_of_row:])
    num_images = len(problem.images)
    num_marks = sum(message["content"].count(IMAGE) for message in row)
    if num_marks == 0 and row:
        user_messages = [i for i, message in enumerate(row) if message["role"] == "user"]
        first = min(user_messages, default=0)
        row[first] = row[first] | {"content": IMAGE * num_images + row[first]["content"]}
    elif num_marks != num_images:
        raise UserError(
            f"row {problem.index}: {num_marks} × {IMAGE} in the text, and {num_images} images in "
            f"data.image_key; write {IMAGE} once for each image, or nowhere: then images stand "
            "before the text"
        )
    shown = list(messages[:first_of_row])
    for message in row:
        shown.append(message | {"content": message["content"].replace(IMAGE, tokens)})
    return shown
