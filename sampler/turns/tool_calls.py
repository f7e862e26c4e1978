"""Reads tool calls from a model's text, in the format of its chat template.

The formats hermes, llama3_json and openai (of gpt-oss) are read here. vLLM's parsers read the
others, one call at a time if the format's marks are known: given a whole turn, they drop all calls
because of a broken one, and take those in a thought for calls. A call that cannot be read is
reported to the model and counted.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.processes.time_limits import within
from environments import Message
from environments.tools import Call, Calls
from sampler.turns.call_formats import FORMS, SHARED, CallFormat, vllm_parser

_HEADS = ("<|channel|>", "<|message|>")  # marks around names and contents
_TAGS = ("[THINK]", "<think>", "<seed:think>")  # text for templates if a reward reads them
# Marks of parts that templates take as fields of a message.
PART_MARKS = (*_HEADS, "<|channel>", "<channel|>", *_TAGS)
_THOUGHTS = (
    r"<(?:seed:)?think>.*?(?:</(?:seed:)?think>|\Z)",
    r"\[THINK\].*?(?:\[/THINK\]|\Z)",
    r"<\|channel>.*?(?:<channel\|>|\Z)",
    r"<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>|\Z)",
    r"to=self<\|message\|>.*?(?:<\|eom\|>|\Z)",
    r"\A(?:(?!<\|channel>).)*<channel\|>",  # a thought that started in the prompt
)
_THOUGHT = f"(?s:{'|'.join(_THOUGHTS)})"
_AROUND_THOUGHTS = "|".join(
    (
        r"<\|channel\|>analysis<\|message\|>",
        r"<\|end\|>",
        r"to=self<\|message\|>",
        r"<\|eom\|>",
        r"<\|channel>(?:thought\n)?",
        r"<channel\|>",
        r"</?(?:seed:)?think>",
        r"\[/?THINK\]",
    )
)
_CONTENT = re.compile(r"<\|message\|>((?s:.)*?)(?=<\|(?:end|eom|start|call|return)\|>|\Z)")
# What follows the mark of a call that has no end; words follow a mere mention of the mark.
_OPENING = r"\s*(?:[{\[<]|[\w:.-]+\s*[{<(])"
# Limit for a turn: some parsers take time quadratic in the length of endless repetitions.
_CPU_S = 2.0


class CallReader:
    """A parser of the tool calls in a turn.

    CallReader(tokenizer, "hermes").read('a <tool_call>{"name": "f", "arguments": {}}</tool_call>')
    returns ("a", [Call("f", {})]).
    """

    def __init__(self, tokenizer: Any, parser: str = "", splits_thoughts: bool = False) -> None:
        """Compiles the patterns of a format.

        parser: the name of the format; without one, no calls are read. splits_thoughts: whether the
        chat template takes a thought as a field of its own.
        """
        self._tokenizer = tokenizer
        self._parser = parser
        self._splits = splits_thoughts
        form = FORMS.get(parser, CallFormat(""))
        self._begin = form.begin
        self._end = form.end
        self._special = _special_tokens(tokenizer)
        self._marks = [
            token for token in self._special.values() if token in PART_MARKS or token in self._begin
        ]
        self._no_words = [mark for mark in self._marks if mark not in _TAGS]
        begin = re.escape(self._begin)
        end = re.escape(self._end)
        body = f"(?s:(?!{begin}).)*"
        kinds = (
            f"(?P<thought>{_THOUGHT})",
            f"{begin}(?P<call>{body}?){end}",
            rf"{begin}(?P<cut>(?={_OPENING}){body})\Z",
        )
        self._call = re.compile("|".join(kinds))

    def __call__(
        self, text: str, turn_prefix: str, ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> Calls:
        """Returns the content of a turn, and its calls.

        text: the turn as rewards read it, turn_prefix included. ids: its tokens, which are read
        instead of the text, because marks may be special tokens that the text lacks; a token that
        ends the turn is left out. tools: those that the prompt shows.
        """
        whole = turn_prefix + self._tokenizer.decode(self._body(ids), skip_special_tokens=False)
        late = text, [Call(problem="the calls cannot be read: the turn is too long")]
        content, calls = within(_CPU_S, lambda: self.read(whole, tools), late)
        names = [tool.get("function", tool)["name"] for tool in tools]
        known = [_checked(call, names) for call in calls]
        return self._content_without_marks(content, whole, text), known

    def _content_without_marks(self, content: str, whole: str, text: str) -> str:
        """Returns the content of a turn without what the text for rewards does not show.

        whole: the turn with its special tokens. text: the turn as rewards read it.
        """
        for thought in re.findall(_THOUGHT, whole):
            if self._is_no_word(thought, text):
                content = content.replace(thought, "")
        if any(mark in whole for mark in self._no_words if mark in _HEADS):
            content = "".join(_CONTENT.findall(content))
        for token in self._special.values():
            if token not in text:
                content = content.replace(token, "")
        return content

    @property
    def reads_parts(self) -> bool:
        """Returns whether turns may have parts that are not text."""
        return bool(self._marks) or self._splits

    def parts(
        self, text: str, turn_prefix: str, ids: NDArray[np.int32]
    ) -> tuple[Message | None, str, NDArray[np.int32]]:
        """Returns the parts of a turn that special tokens mark, and the turn as templates write it.

        text: the turn behind turn_prefix. ids: its tokens.
        First come the fields of the message besides content and calls, or None if templates take
        the turn as its text; then the turn as a template writes it, and the tokens of that.
        """
        body = self._body(ids)
        written = text
        if self.reads_parts:
            written = self._tokenizer.decode(body.tolist(), skip_special_tokens=False)
        seen = turn_prefix + text
        whole = turn_prefix + written
        marks = [mark for mark in self._marks if self._is_no_word(mark, seen)]
        if self._splits:
            marks.append("<think>")
        if not any(mark in whole for mark in marks):
            return None, text, ids
        thoughts = []
        for thought in re.findall(_THOUGHT, whole):
            if self._splits or self._is_no_word(thought, seen):
                thoughts.append(thought)
        fields = {}
        thought = re.sub(_AROUND_THOUGHTS, "", "\n".join(thoughts)).strip()
        if thought:
            fields["reasoning_content"] = thought
        return fields, written, body

    def _is_no_word(self, piece: str, text: str) -> bool:
        """Returns whether a mark or a thought is written in special tokens, which are no text."""
        return piece not in text or any(mark in piece for mark in self._no_words)

    def words(self, content: str) -> str:
        """Returns the content without thoughts that are a field."""
        if not self._splits:
            return content
        return re.sub(_THOUGHT, "", content).strip()

    def _body(self, ids: Any) -> Any:
        """Returns the ids without the special token that ends the turn."""
        if len(ids) and int(ids[-1]) in self._special:
            return ids[:-1]
        return ids

    def read(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[Call]]:
        """Returns the text around the calls, and the calls.

        tools: those of the prompt. Raises nothing, whatever the model wrote.
        """
        if not self._end:
            return self._read_whole_turn(text, tools)
        calls = []
        for found in self._call.finditer(text):
            if found["thought"] is None:
                body = found["call"] or found["cut"] or ""
                calls += self._calls(body, tools)
        content = self._call.sub(lambda found: found["thought"] or "", text).strip()
        return content, calls

    def _read_whole_turn(
        self, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[Call]]:
        """Returns what `read` does, of a format whose calls have no mark at their end."""
        thoughts = "".join(re.findall(_THOUGHT, text))
        rest = re.sub(_THOUGHT, "", text).strip()
        calls = self._calls(rest.removeprefix("<|python_tag|>").strip(), tools)
        if not calls:
            return text.strip(), []
        return thoughts, calls

    def _calls(self, body: str, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
        """Returns the calls in the text between two marks, or in the whole turn."""
        match self._parser:
            case "":
                return []
            case "llama3_json":  # has no text around a call
                if not body.startswith("{"):
                    return []
                return [_read_call(body)]
            case "hermes":
                return [_read_call(body)]
            case "openai":  # times<|channel|>commentary json<|message|>{"a": 6, "b": 4}
                name = re.split(r"[\s<]", body.strip())[0]
                arguments = body.partition("<|message|>")[2]
                return [_read_arguments(name, arguments)]
            case _:
                return self._calls_by_vllm(body, tools)

    def _calls_by_vllm(self, body: str, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
        """Returns the calls that vLLM's parser of the format finds in a text."""
        whole = body
        if self._end:
            whole = self._begin + body + self._end
        found: list[Any] = []
        with contextlib.suppress(Exception):  # vLLM's parsers raise any exception
            parse = vllm_parser(self._tokenizer, self._parser, json.dumps(tools))
            found = parse(whole).tool_calls
        if not found and self._begin and self._begin in whole:
            return [Call(problem="the call cannot be read")]
        return [_read_arguments(one.function.name, one.function.arguments) for one in found]

    def start(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Makes vLLM's parser, which raises if the tokenizer lacks its tokens."""
        if self._parser not in ("", *SHARED, "openai"):
            vllm_parser(self._tokenizer, self._parser, json.dumps(tools))


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Returns the special tokens of a tokenizer, by their ids."""
    special = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special[token_id] = str(token)
    tokens = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return special | dict(tokens)


def _checked(call: Call, names: Sequence[str]) -> Call:
    """Returns a call, which has a problem if there is no tool of its name."""
    if call.problem or call.name in names:
        return call
    problem = f"Tool {call.name} not found. There are: {', '.join(names)}."
    return replace(call, problem=problem)


def _read_call(written: str) -> Call:
    """Returns the call that a JSON object of its name and arguments describes."""
    try:
        found = _json_object(written)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"the call is not valid JSON: {error}")
    name = found.get("name")
    if not isinstance(name, str) or not name:
        return Call(problem='the call has no "name"')
    return _read_arguments(name, found.get("arguments", found.get("parameters", {})))


def _read_arguments(name: str, given: Any) -> Call:
    """Returns a call with these arguments, which may be JSON in a string, as OpenAI's are."""
    try:
        return Call(name, _json_object(given))
    except (ValueError, RecursionError) as error:
        return Call(name, problem=f"the call is not valid JSON: {error}")


def _json_object(given: Any) -> dict[str, Any]:
    """Returns a JSON object, which may be written in a string.

    Raises ValueError if it is none, and RecursionError if it is nested too deeply.
    """
    found = given
    if isinstance(given, str):
        found = json.loads(given)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    # Raises if a lone surrogate is in it, which cannot be sent to another process.
    json.dumps(found, ensure_ascii=False).encode()
    return found
