"""Renders chat messages with the chat template, and checks that the template shows all of them.

Templates expect messages in different forms: content as text or as parts, a call's arguments as
JSON text or as an object, the content beside a call as null or as "". If a message has another
form, they leave things out without an error. So each shape of a conversation is rendered once with
marks in place of its texts, in one form after the other, until a form shows all marks.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from common.config import PromptTemplate
from common.errors import UserError
from common.processes.exits import say
from environments import Message
from model.files.folder import NO_CHAT_TEMPLATE
from sampler.prompts.messages import read
from sampler.prompts.notations import with_arguments

TURN_MARK = "⟦turn⟧"  # placeholder for the text of a turn; no template writes it itself

_FAILURES = (TemplateError, TypeError, ValueError, KeyError, AttributeError)
_READ_BY_TEMPLATES = ("role", "type", "id", "tool_call_id")  # fields on whose values they branch
_SET_BY_TANDEM = {
    "messages",
    "tools",
    "tokenize",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
}


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    prompt: PromptTemplate,
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
    is_over: bool = False,
    history: int = 0,
) -> str:
    """Returns chat messages as the text that the model sees, up to where the model writes.

    The model answers the messages, or continues the last one if it is an assistant's.
    arguments: added to prompt.chat_template_kwargs. is_over: no turn follows the messages. history:
    the number of first messages that the template need not show. Raises UserError, also for
    arguments, tools and messages that the template does not show.
    """
    is_continued = messages[-1].get("role") == "assistant" and not is_over
    all_arguments = {**prompt.chat_template_kwargs, **(arguments or {})}
    template = read_template(prompt.chat_template)
    _require_read(tokenizer, template, tuple(all_arguments), bool(tools))
    options = {
        **all_arguments,
        "tools": list(tools) if tools else None,
        "add_generation_prompt": not is_continued and not is_over,
        "continue_final_message": is_continued,
    }
    shape = [_marked(message, f"Mark{i}") for i, message in enumerate(messages)]
    form = _fitting_form(
        tokenizer,
        prompt.chat_template,
        json.dumps(options, default=str),
        json.dumps(shape),
        history,
    )
    try:
        text = _apply(tokenizer, template, messages, form, options)
    except _FAILURES as error:
        raise UserError(
            f"chat template ({_origin(prompt.chat_template)}) fails on a prompt: {error}"
        ) from error
    first = first_token(tokenizer)
    if template is not None and not text.startswith(first):
        return first + text
    return text


@dataclass(frozen=True)
class _Form:
    """A form of messages that templates expect."""

    without_thoughts: bool
    content_in_parts: bool
    arguments_in_json: bool
    null_beside_calls: bool  # content "" beside a call is null

    def of(self, message: Message) -> Message:
        """Returns a message in this form."""
        formed = dict(message)
        thought = None
        if formed["role"] == "assistant":
            thought = formed.pop("reasoning_content", None)
        # gpt-oss does not show the content of a message that has a thought and a call
        if thought and not self.without_thoughts:
            formed |= {"thinking": thought, "reasoning": thought, "reasoning_content": thought}
        calls = formed.get("tool_calls")
        if calls and self.null_beside_calls:
            formed["content"] = formed["content"] or None
        if calls and self.arguments_in_json:
            formed["tool_calls"] = [with_arguments(call, _to_json) for call in calls]
        if formed["content"] and self.content_in_parts:
            formed["content"] = [{"type": "text", "text": formed["content"]}]
        return formed


# From the commonest form on. A form with thoughts comes before all forms without.
_FORMS = [_Form(*choices) for choices in itertools.product((False, True), repeat=4)]


def _to_json(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _apply(
    tokenizer: Any,
    template: str | None,
    messages: Iterable[Message],
    form: _Form,
    options: Mapping[str, Any],
) -> str:
    formed = list(map(form.of, messages))
    text = tokenizer.apply_chat_template(formed, chat_template=template, tokenize=False, **options)
    return str(text)


def _origin(path: Path | None) -> str:
    return str(path or "the tokenizer's own; prompt.chat_template names another")


def _marked(value: Any, mark: str, key: str = "") -> Any:
    """Returns a message with a unique mark in place of each nonempty text.

    The fields on which templates branch keep their values, except that ids are zeros.
    """
    if isinstance(value, Mapping):
        return {name: _marked(item, mark + name, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, f"{mark}{i}", key) for i, item in enumerate(value)]
    if isinstance(value, str):
        return _marked_text(value, mark, key)
    if value is None or isinstance(value, bool):
        return value
    return 1


def _marked_text(text: str, mark: str, key: str) -> str:
    if key not in _READ_BY_TEMPLATES:
        return f"{mark}." if text else ""
    if key.endswith("id"):
        return "0" * len(text)
    return text


@functools.lru_cache(maxsize=256)
def _fitting_form(
    tokenizer: Any, path: Path | None, options: str, shape: str, history: int
) -> _Form:
    """Returns the first form in which the template shows all marks after the history.

    A template need not show the system message, which is logged. Raises UserError if no form shows
    all other marks. options, shape: as JSON text, because the result is cached.
    """
    messages = json.loads(shape)
    best_form = None
    fewest_hidden: list[str] = []
    for form in _FORMS:
        try:
            text = _apply(tokenizer, read_template(path), messages, form, json.loads(options))
        except _FAILURES:
            continue
        hidden: list[str] = []
        for message in messages[history:]:
            hidden += _hidden_parts(message, text)
        if not hidden:
            return form
        if best_form is None or len(hidden) < len(fewest_hidden):
            best_form = form
            fewest_hidden = hidden
    if best_form is None:
        return _FORMS[0]  # rendering the real messages raises the error that explains the failure
    finding = f"the chat template ({_origin(path)}) does not show {fewest_hidden[0]}"
    if fewest_hidden != ["the system message"]:
        raise UserError(
            f"{finding}; leave it out of the rows, or name a template that shows it: "
            "prompt.chat_template"
        )
    say(finding)
    return best_form


def _hidden_parts(message: Message, text: str) -> list[str]:
    """Returns what a rendered text does not show of a marked message, in words."""
    hidden = []
    if message["content"] not in text:
        if message["role"] == "system":
            hidden.append("the system message")
        else:
            hidden.append(f"a message of the role {message['role']!r}")
    calls = _to_json(message.get("tool_calls"))
    for mark in re.findall(r'"(Mark[^"]*)"', calls):
        if mark not in text:
            hidden.append("the assistant's calls")
    return hidden


@functools.lru_cache(maxsize=16)
def _require_read(
    tokenizer: Any, template: str | None, arguments: tuple[str, ...], has_tools: bool
) -> None:
    """Raises UserError without a template, and for arguments and tools that it does not read."""
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise UserError(NO_CHAT_TEMPLATE)
    reserved = _SET_BY_TANDEM.intersection(arguments)
    if reserved:
        raise UserError(f"prompt.chat_template_kwargs: {min(reserved)} is Tandem's own; remove it")
    text = template
    if text is None:  # a tokenizer may have a template of its own for tools
        text = tokenizer.get_chat_template(None, [{}] if has_tools else None)
    for name in arguments:
        if not re.search(rf"\b{re.escape(name)}\b", text):
            raise UserError(
                f"the chat template reads no {name!r}: remove it from prompt.chat_template_kwargs, "
                "or take the rows' away: data.rename={chat_template_kwargs: unused}"
            )
    if has_tools and not re.search(r"\btools\b", text):
        raise UserError(
            "the chat template has no place for tools, and the model would not see them; name one "
            "that has: prompt.chat_template=configs/templates/hermes_tools.jinja, or take the "
            "rows' away: data.rename={tools: unused_tools}"
        )


@functools.lru_cache(maxsize=4)
def first_token(tokenizer: Any) -> str:
    """Returns the token that the tokenizer puts before each text, as in the model's training.

    Returns "" if the tokenizer puts none.
    """
    token_ids = tokenizer("a")["input_ids"]
    first = tokenizer.bos_token_id
    if first is not None and token_ids[:1] == [first]:
        return str(tokenizer.bos_token)
    return ""


def about_first_token(tokenizer: Any, prompt: PromptTemplate, text: str) -> str | None:
    """Returns a note if the tokenizer and the chat template disagree about the first token.

    text: a rendered prompt.
    """
    first = first_token(tokenizer)
    template = read_template(prompt.chat_template)
    if not text.startswith(first):
        return (
            f"prompts do not begin with {first}, as the tokenizer's texts do: its own chat "
            "template leaves it out"
        )
    if first and template is not None and first not in template and "bos_token" not in template:
        return (
            f"prompts begin with {first}, as the tokenizer's texts do; {prompt.chat_template} "
            "leaves it out"
        )
    return None


@functools.lru_cache(maxsize=4)
def read_template(path: Path | None) -> str | None:
    """Returns the text of prompt.chat_template, or None without one. Raises UserError."""
    if path is None:
        return None
    return read("prompt.chat_template", path)
