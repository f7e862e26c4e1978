"""Renders chat messages with the chat template, and checks that the template shows all of them.

Templates differ in the form of messages that they take: content as text or as parts, a call's arguments as JSON text or
as an object, the content beside a call as null or as "". Given another form, they leave things out without an error. So
each shape of a conversation is rendered once with marks in place of its texts, in the first form that shows all marks.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from common.config import PromptTemplate
from common.errors import UserError
from common.processes.exits import say
from environments import Message
from model.files.folder import NO_CHAT_TEMPLATE
from sampler.prompts.messages import read, with_arguments

TURN_MARK = "⟦turn⟧"  # placeholder for the text of a turn; no template writes it itself

_FAILURES = (TemplateError, TypeError, ValueError, KeyError, AttributeError)
Form = Callable[[Message], Message]

_KEPT = ("role", "type", "id", "tool_call_id")  # fields that templates branch on
_as_json = functools.partial(json.dumps, ensure_ascii=False)


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
    """Returns chat messages as the text that the model sees: it answers them, or continues the last if that is its own.

    arguments: added to prompt.chat_template_kwargs. is_over: no turn follows. history: how many of the first messages
    need not be shown. Raises UserError, also for arguments, tools and messages that the template does not show.
    """
    goes_on = messages[-1].get("role") == "assistant" and not is_over
    arguments = {**prompt.chat_template_kwargs, **(arguments or {})}
    template = read_template(prompt.chat_template)
    _require_read(tokenizer, template, tuple(arguments), bool(tools))
    options = arguments | {
        "tools": list(tools) if tools else None,
        "add_generation_prompt": not goes_on and not is_over,
        "continue_final_message": goes_on,
    }
    shape = [_marked(message, f"Mark{i}") for i, message in enumerate(messages)]
    form = _fitting_form(tokenizer, prompt.chat_template, json.dumps(options, default=str), json.dumps(shape), history)
    try:
        text = _write(tokenizer, template, map(form, messages), options)
    except _FAILURES as error:
        raise UserError(f"chat template ({_source(prompt.chat_template)}) fails on a prompt: {error}") from error
    first = first_token(tokenizer)
    return text if template is None or text.startswith(first) else first + text


def _write(tokenizer: Any, template: str | None, messages: Iterable[Message], options: Mapping[str, Any]) -> str:
    return str(tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False, **options))


def _source(path: Path | None) -> str:
    return str(path or "the tokenizer's own; prompt.chat_template names another")


def _marked(value: Any, mark: str, key: str = "") -> Any:
    """Returns a message with a unique mark for each nonempty text, except the fields that templates branch on."""
    if isinstance(value, Mapping):
        return {name: _marked(item, mark + name, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, f"{mark}{i}", key) for i, item in enumerate(value)]
    if isinstance(value, str):
        return ("0" * len(value) if key.endswith("id") else value) if key in _KEPT else f"{mark}." if value else ""
    return value if value is None or isinstance(value, bool) else 1


@functools.lru_cache(maxsize=256)
def _fitting_form(tokenizer: Any, path: Path | None, options: str, shape: str, history: int) -> Form:
    """Returns the first message form in which the template shows all marks after the history, else raises UserError."""
    messages, hidden_by = json.loads(shape), dict[Form, list[str]]()
    forms: list[Form] = [functools.partial(_in_form, choice) for choice in itertools.product((False, True), repeat=4)]
    for form in forms:
        try:
            text = _write(tokenizer, read_template(path), map(form, messages), json.loads(options))
        except _FAILURES:
            continue
        hidden_by[form] = [what for message in messages[history:] for what in _hidden_parts(message, text)]
        if not hidden_by[form]:
            return form
    if not hidden_by:
        return forms[0]  # rendering the real messages raises the error that tells why
    form, hidden = min(hidden_by.items(), key=lambda found: len(found[1]))
    if hidden != ["the system message"]:
        raise UserError(
            f"the chat template ({_source(path)}) does not show {hidden[0]}; leave it out of the rows, or name a "
            "template that shows it: prompt.chat_template"
        )
    say(f"the chat template ({_source(path)}) does not show {hidden[0]}")
    return form


def _in_form(choice: Sequence[bool], message: Message) -> Message:
    """Returns a message in one of the forms that templates take; `choice` selects among the alternatives."""
    (without_thought, in_parts, calls_in_json, calls_alone), made = choice, dict(message)
    if made["role"] == "assistant" and (thought := made.pop("reasoning_content", None)):
        # gpt-oss drops the content of a message that has a thought and a call
        made |= {} if without_thought else dict.fromkeys(("thinking", "reasoning", "reasoning_content"), thought)
    if calls := made.get("tool_calls"):
        made["content"] = made["content"] or None if calls_alone else made["content"]
        made["tool_calls"] = [with_arguments(call, _as_json) for call in calls] if calls_in_json else calls
    if in_parts and made["content"]:
        made["content"] = [{"type": "text", "text": made["content"]}]
    return made


def _hidden_parts(message: Message, text: str) -> Iterator[str]:
    if message["content"] not in text:
        yield "the system message" if message["role"] == "system" else f"a message of the role {message['role']!r}"
    calls = json.dumps(message.get("tool_calls"), ensure_ascii=False)
    yield from ("the assistant's calls" for mark in re.findall(r'"(Mark[^"]*)"', calls) if mark not in text)


@functools.lru_cache(maxsize=16)
def _require_read(tokenizer: Any, template: str | None, arguments: tuple[str, ...], has_tools: bool) -> None:
    """Raises UserError if there is no template, and for arguments and tools that it does not read."""
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise UserError(NO_CHAT_TEMPLATE)
    ours = {"messages", "tools", "tokenize", "chat_template", "add_generation_prompt", "continue_final_message"}
    if taken := ours & set(arguments):
        raise UserError(f"prompt.chat_template_kwargs: {min(taken)} is Tandem's own; remove it")
    text = template if template is not None else tokenizer.get_chat_template(None, [{}] if has_tools else None)
    for name in arguments:
        if not re.search(rf"\b{re.escape(name)}\b", text):
            raise UserError(
                f"the chat template reads no {name!r}: remove it from prompt.chat_template_kwargs, or take the rows' "
                "away: data.rename={chat_template_kwargs: unused}"
            )
    if has_tools and not re.search(r"\btools\b", text):
        raise UserError(
            "the chat template has no place for tools, and the model would not see them; name one that has: "
            "prompt.chat_template=configs/templates/hermes_tools.jinja, or take the rows' away: "
            "data.rename={tools: unused_tools}"
        )


@functools.lru_cache(maxsize=4)
def first_token(tokenizer: Any) -> str:
    """Returns the token that the tokenizer puts before each text, as in the model's training; "" if it puts none."""
    ids, first = tokenizer("a")["input_ids"], tokenizer.bos_token_id
    return str(tokenizer.bos_token) if first is not None and ids[:1] == [first] else ""


def about_first_token(tokenizer: Any, prompt: PromptTemplate, text: str) -> str | None:
    """Returns a note on the prompts' first token if the tokenizer and the chat template disagree, else None."""
    first, own = first_token(tokenizer), read_template(prompt.chat_template)
    if not text.startswith(first):
        return f"prompts do not begin with {first}, as the tokenizer's texts do: its own chat template leaves it out"
    if first and own is not None and first not in own and "bos_token" not in own:
        return f"prompts begin with {first}, as the tokenizer's texts do; {prompt.chat_template} leaves it out"
    return None


@functools.lru_cache(maxsize=4)
def read_template(path: Path | None) -> str | None:
    return None if path is None else read("prompt.chat_template", path)
