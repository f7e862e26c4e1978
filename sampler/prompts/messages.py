"""Turns rows into chat messages, tools and arguments for the chat template: docs/data.md#from-a-row-to-a-prompt."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.config import Config, Data, PromptTemplate
from common.errors import UserError
from common.types import Problem
from environments import Message
from rewards.mathematics.gold import gold_texts

IMAGE = "<image>"  # marks an image in the text of a row

_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
_TURN: tuple[Literal["user", "assistant"], ...] = ("user", "assistant")
_IMAGE_PARTS = ("image", "image_url", "input_image")


def as_messages(problem: Problem, data: Data, prompt: PromptTemplate) -> list[Message]:
    """Returns the messages for the chat template. Raises UserError for a row that is neither text nor chat messages."""
    raw = raw_prompt(problem, data)
    messages = [{"role": "user", "content": raw}] if isinstance(raw, str) else _checked(raw, problem, data)
    if prompt.format_prompt is not None:
        messages = _formatted(messages, problem, prompt.format_prompt)
    own_system = messages[:1] if messages[0]["role"] == "system" else []
    given_system = [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
    turns = [{"role": role, "content": example[role]} for example in prompt.examples for role in _TURN]
    return [*(own_system or given_system), *turns, *messages[len(own_system) :]]


def raw_prompt(problem: Problem, data: Data) -> Any:
    """Returns the row's prompt: text or chat messages, a number as text; "" if prompt.format_prompt makes it."""
    raw = "" if data.prompt_key is None else problem.columns[data.prompt_key]
    return str(raw) if isinstance(raw, int | float) else raw


def shown_to_rewards(problem: Problem, config: Config) -> str | list[Message]:
    """Returns the prompt that reward functions get as `prompts`."""
    return for_rewards(problem, config, as_messages(problem, config.data, config.prompt))


def for_rewards(problem: Problem, config: Config, messages: list[Message]) -> str | list[Message]:
    """Returns the row's string, or all messages if the row has a list or rollouts have several turns."""
    raw = raw_prompt(problem, config.data) or messages[-1]["content"]
    return raw if isinstance(raw, str) and not config.rollout.is_multi_turn else messages


def tools_of(problem: Problem) -> list[Any] | None:
    """Returns the schemas in a row's column `tools`, as in TRL: a list, or JSON text. None for other values."""
    given = _from_json(problem.columns.get("tools"))
    schemas = [_without_nulls(_from_json(one)) for one in given] if isinstance(given, list | tuple) else []
    are_named = all(isinstance(one, Mapping) and ("function" in one or "name" in one) for one in schemas)
    return schemas if schemas and are_named else None


def arguments_of(problem: Problem) -> dict[str, Any]:
    """Returns the template arguments in a row's `chat_template_kwargs`, as in TRL; {} for a column of another kind."""
    given = _from_json(problem.columns.get("chat_template_kwargs"))
    return dict(_without_nulls(given)) if isinstance(given, Mapping) else {}


def _from_json(value: Any) -> Any:
    """Returns the value of JSON text; other values, and text that is not JSON, unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value
    except ValueError:
        return value


def _without_nulls(value: Any) -> Any:
    """Returns a value without nulls: Arrow gives every struct the fields of all rows."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _formatted(messages: list[Message], problem: Problem, path: Path | str) -> list[Message]:
    """Returns the messages, the last user message rendered by the template from its content and the row's columns."""
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
    return [*messages[:last], messages[last] | {"content": content}, *messages[last + 1 :]]


@functools.lru_cache(maxsize=4)
def _format_prompt(given: Path | str) -> Template:
    text = given if isinstance(given, str) else read("prompt.format_prompt", given)
    # The sandbox is that of chat templates: both kinds of file are passed around with data and models.
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(text)


def _checked(raw: Any, problem: Problem, data: Data) -> list[Message]:
    """Returns a row's chat messages. Raises UserError unless each has a role, and content or tool calls.

    The last one is left off if the model answers in its place: an assistant's that is empty or holds the gold answer,
    or ShareGPT's `gpt`. With other content, the model continues it.

        [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}] -> [{"role": "user", "content": "2+2?"}]
    """
    is_list = isinstance(raw, list | tuple) and len(raw) > 0
    messages = [_message(message) for message in raw] if is_list else [{}]
    if len(messages) > 1 and messages[-1].get("role") == "assistant":
        is_sharegpt = "from" in raw[-1] and "role" not in raw[-1]
        content = messages[-1].get("content")
        is_answer = is_sharegpt or not content or "tool_calls" in messages[-1]
        messages = messages[:-1] if is_answer or _holds_gold(content, problem) else messages
    for place, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UserError(
                f"row {problem.index}: data.prompt_key {data.prompt_key!r} holds "
                f"{str(raw[place] if is_list else raw)[:80]!r}, expected text or a list of "
                '{"role": …, "content": …} or {"from": …, "value": …} with text content'
            )
        content = _content(raw[place])
        shows_an_image = _is_parts(content) and any(part.get("type") in _IMAGE_PARTS for part in content)
        if data.image_key is None and shows_an_image:
            raise UserError(
                f"row {problem.index}: a message of data.prompt_key {data.prompt_key!r} shows an image; set "
                "data.image_key to the column with the images, or take the part out"
            )
    return messages


def leaves_gold_off(problem: Problem, data: Data) -> bool:
    """Returns whether the row's last message contains its gold answer, and is therefore left out of the prompt."""
    raw = raw_prompt(problem, data)
    last = _message(raw[-1]) if isinstance(raw, list | tuple) and len(raw) > 1 else {}
    return last.get("role") == "assistant" and "from" not in raw[-1] and _holds_gold(last["content"], problem)


def _holds_gold(content: Any, problem: Problem) -> bool:
    """Returns whether an assistant's content ends in the gold answer: continuing it would solve no problem."""
    end = str(content).rstrip(" \n.*$})").removesuffix("</answer>").rstrip(" \n.*$})")
    golds = [gold.rstrip(" .") for gold in gold_texts(problem.columns.get("answer"))]
    return any(gold and end.endswith(gold) for gold in golds)


def _message(message: Any) -> Message:
    """Returns a message in the OpenAI form, without nulls; {} for a value that is no message."""
    if not isinstance(message, Mapping):
        return {}
    sender = message.get("role") if message.get("role") is not None else message.get("from")
    role = _ROLES.get(sender, sender) if isinstance(sender, str) else None
    rest = {key: value for key, value in message.items() if key not in ("role", "from", "content", "value")}
    made = {"role": role, "content": _joined(_content(message)), **_without_nulls(rest)}
    if made.get("tool_calls"):
        made["content"] = made["content"] or ""
        made["tool_calls"] = [with_arguments(call, _from_json) for call in made["tool_calls"]]
    else:
        made.pop("tool_calls", None)
    return made


def _content(message: Mapping[str, Any]) -> Any:
    return message.get("content") if message.get("role") is not None else message.get("value")


def with_arguments(call: Any, convert: Callable[[Any], Any]) -> Any:
    """Returns a call with converted arguments, which stand in its `function`, as in OpenAI's, or beside its name."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": with_arguments(call["function"], convert)}
    return {**call, "arguments": convert(call["arguments"])} if "arguments" in call else call


def _is_parts(content: Any) -> bool:
    return isinstance(content, list | tuple) and len(content) > 0 and all(isinstance(part, Mapping) for part in content)


def _joined(content: Any) -> Any:
    """Joins parts: [{"type": "image"}, {"type": "text", "text": "How many?"}] -> "<image>How many?"; else as it is."""
    if not _is_parts(content):
        return content
    texts: list[Any] = [IMAGE if part.get("type") in _IMAGE_PARTS else part.get("text") for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


def read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{option} {path}: {reason}. Templates that come with Tandem: configs/templates/") from None


def with_image_places(messages: Sequence[Message], problem: Problem, begin: int, tokens: str) -> list[Message]:
    """Returns the messages with the model's image tokens for each <image> of the row, or before its first user message.

    The tokens are inserted before the chat template runs, so that templates for text serve, too. begin: index of the
    row's first own message, after worked examples and a given system message.
    """
    given, row, num_images = messages[:begin], list(messages[begin:]), len(problem.images)
    marks = sum(message["content"].count(IMAGE) for message in row)
    if marks == 0 and num_images:
        first = next((i for i, message in enumerate(row) if message["role"] == "user"), 0)
        row = [{**m, "content": IMAGE * num_images * (i == first) + m["content"]} for i, m in enumerate(row)]
    elif marks != num_images:
        raise UserError(
            f"row {problem.index}: {marks} × {IMAGE} in the text, and {num_images} images in data.image_key; write "
            f"{IMAGE} once for each image, or nowhere: then images stand before the text"
        )
    return [*given, *({**message, "content": message["content"].replace(IMAGE, tokens)} for message in row)]
