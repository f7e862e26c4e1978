"""Reads tool calls from a model's text, in the format of its chat template.

This module reads hermes, llama3_json and openai (gpt-oss) itself; vLLM's parsers read the other names of its
`--tool-call-parser`, one call at a time if FORMS has the marks: on whole turns they drop all calls for a broken one,
and take those in a thought for calls. A call that cannot be read is reported to the model and counted.
"""

import contextlib
import functools
import importlib.util
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.processes.time_limits import within
from environments import Message
from environments.tools import Call, Calls

# The formats by name: a pattern of their chat templates, and the marks before and after calls. Without an end mark the
# turn is read as a whole. The last two patterns occur in templates of other formats, too.
FORMS = {
    "qwen3_xml": ("<function=", "<tool_call>", "</tool_call>"),
    "glm45": ("<arg_key>", "<tool_call>", "</tool_call>"),
    "gemma4": (r"<\|tool_call>", "<|tool_call>", "<tool_call|>"),
    "lfm2": (r"<\|tool_(?:call|list)_start\|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    "openai": (r"<\|call\|>", "to=functions.", "<|call|>"),
    "mistral": (r"\[TOOL_CALLS\]", "[TOOL_CALLS]", ""),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>(?s:.*)```json",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>(?!(?s:.*)```json)",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "_calls_section_begin",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "minimax_m2": ("<minimax:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>"),
    "seed_oss": ("<seed:tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
    "muse_glimmer": ("<atem:function_calls>", "<atem:function_calls>", ""),
    "hermes": ("<tool_call>", "<tool_call>", "</tool_call>"),
    "llama3_json": ('"parameters"', "", ""),
}
_SHARED = ["hermes", "llama3_json"]
_SAME = {
    "qwen3_coder": "qwen3_xml",
    "glm47": "glm45",
    "qwen3_json": "hermes",
    "llama4_json": "llama3_json",
}
_THOUGHT = (
    r"(?s:<(?:seed:)?think>.*?(?:</(?:seed:)?think>|\Z)|\[THINK\].*?(?:\[/THINK\]|\Z)|<\|channel>.*?(?:<channel\|>|\Z)"
    r"|<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>|\Z)|to=self<\|message\|>.*?(?:<\|eom\|>|\Z)"
    r"|\A(?:(?!<\|channel>).)*<channel\|>)"  # a thought that started in the prompt
)
_HEADS = ("<|channel|>", "<|message|>")  # marks around names and contents
_TAGS = ("[THINK]", "<think>", "<seed:think>")  # text for templates if a reward reads them
PART_MARKS = (
    *_HEADS,
    "<|channel>",
    "<channel|>",
    *_TAGS,
)  # marks of parts that templates take as fields of a message
_AROUND_THOUGHTS = (
    r"<\|channel\|>analysis<\|message\|>|<\|end\|>|to=self<\|message\|>|<\|eom\|>|<\|channel>(?:thought\n)?|<channel\|>"
    r"|</?(?:seed:)?think>|\[/?THINK\]"
)
_WORDS = re.compile(r"<\|message\|>((?s:.)*?)(?=<\|(?:end|eom|start|call|return)\|>|\Z)")
_CPU_S = (
    2.0  # limit for one turn: endless repetitions take some parsers time quadratic in the length
)
_OPENING = r"\s*(?:[{\[<]|[\w:.-]+\s*[{<(])"  # follows the mark of a call without an end; words follow a mere mention


def parser_of(template: str, given: str) -> str:
    """Returns the call format of rollout.tool_parser; for auto, that of the chat template. Raises UserError."""
    found = [name for name, (mark, *_) in FORMS.items() if re.search(mark, template)]
    written = [name for name in found if name not in _SHARED] or found
    if given == "auto" and (len(written) == 1 or written == _SHARED):
        return written[0]
    name, vllm = (
        _SAME.get(given, given),
        importlib.util.find_spec("vllm"),
    )  # an import takes many seconds
    parsers = Path(vllm.origin or "").with_name("tool_parsers") / "__init__.py" if vllm else Path()
    listed = re.findall(
        r'^    "([\w-]+)": \(', parsers.read_text() if parsers.is_file() else "", re.MULTILINE
    )
    if name in written or (name in listed and (name not in FORMS or not written)):
        return name
    raise UserError(
        f"rollout.tool_parser {given!r}: the chat template writes calls as {' or '.join(written) or 'no known parser'} "
        f"reads them; set rollout.tool_parser={(written or ['hermes'])[0]}. There are {', '.join(listed)}"
    )


class CallReader:
    """A parser of the tool calls in a turn.
    CallReader(tokenizer, "hermes").read('a <tool_call>{"name": "f"}</tool_call>') == ("a", [Call("f", {})])"""

    def __init__(self, tokenizer: Any, parser: str = "", splits_thoughts: bool = False) -> None:
        """Compiles the patterns. Without a parser it reads no calls. splits_thoughts: as of TurnTemplate."""
        self._tokenizer, self._parser, self._splits = tokenizer, parser, splits_thoughts
        _, self._begin, self._end = FORMS.get(parser, ("", "", ""))
        added = {
            i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._special = added | dict(
            zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        )
        self._marks = [t for t in self._special.values() if t in PART_MARKS or t in self._begin]
        self._no_words = [mark for mark in self._marks if mark not in _TAGS]
        begin, end = re.escape(self._begin), re.escape(self._end)
        body = f"(?s:(?!{begin}).)*"
        self._call = re.compile(
            rf"(?P<thought>{_THOUGHT})|{begin}(?P<call>{body}?){end}|{begin}(?P<cut>(?={_OPENING}){body})\Z"
        )

    def __call__(
        self, text: str, turn_prefix: str, ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> Calls:
        """Returns (content, calls) of a turn. text: as rewards read it, turn_prefix included.

        tools: those shown. Marks may be special tokens, which `text` lacks: so `ids` are read, except an end token.
        """
        whole = turn_prefix + self._tokenizer.decode(self._body(ids), skip_special_tokens=False)
        late = text, [Call(problem="the calls cannot be read: the turn is too long")]
        content, calls = within(_CPU_S, lambda: self.read(whole, tools), late)
        for thought in re.findall(_THOUGHT, whole):
            content = content.replace(thought, "") if self._is_no_word(thought, text) else content
        if any(mark in whole for mark in self._no_words if mark in _HEADS):
            content = "".join(_WORDS.findall(content))
        for token in self._special.values():
            content = content if token in text else content.replace(token, "")
        names = [tool.get("function", tool)["name"] for tool in tools]
        lost = f"not found. There are: {', '.join(names)}."
        known = [
            c if c.problem or c.name in names else replace(c, problem=f"Tool {c.name} {lost}")
            for c in calls
        ]
        return content, known

    @property
    def reads_parts(self) -> bool:
        """Returns whether turns may have parts that are not text."""
        return bool(self._marks) or self._splits

    def parts(
        self, text: str, turn_prefix: str, ids: NDArray[np.int32]
    ) -> tuple[Message | None, str, NDArray[np.int32]]:
        """Returns (fields of a turn besides content and calls, the turn as a template writes it, the ids of that).

        text: the turn behind turn_prefix. The fields are None if templates take the turn as its text. Otherwise special
        tokens that the text lacks mark its parts.
        """
        body = self._body(ids)
        written = (
            self._tokenizer.decode(body.tolist(), skip_special_tokens=False)
            if self.reads_parts
            else text
        )
        seen, whole = turn_prefix + text, turn_prefix + written
        marks = [mark for mark in self._marks if self._is_no_word(mark, seen)] + [
            "<think>"
        ] * self._splits
        if not any(mark in whole for mark in marks):
            return None, text, ids
        thoughts = [
            t for t in re.findall(_THOUGHT, whole) if self._splits or self._is_no_word(t, seen)
        ]
        thought = re.sub(_AROUND_THOUGHTS, "", "\n".join(thoughts)).strip()
        return {"reasoning_content": thought} if thought else {}, written, body

    def _is_no_word(self, piece: str, text: str) -> bool:
        return piece not in text or any(mark in piece for mark in self._no_words)

    def words(self, content: str) -> str:
        """Returns the content without thoughts that are a field."""
        return re.sub(_THOUGHT, "", content).strip() if self._splits else content

    def _body(self, ids: Any) -> Any:
        """Returns the ids without the special token that ends the turn."""
        return ids[:-1] if len(ids) and int(ids[-1]) in self._special else ids

    def read(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[Call]]:
        """Returns (the text around the calls, the calls). Raises nothing, whatever the model wrote."""
        if not self._end:
            thoughts, rest = "".join(re.findall(_THOUGHT, text)), re.sub(_THOUGHT, "", text).strip()
            calls = self._calls(rest.removeprefix("<|python_tag|>").strip(), tools)
            return (thoughts, calls) if calls else (text.strip(), [])
        bodies = [
            m["call"] or m["cut"] or "" for m in self._call.finditer(text) if m["thought"] is None
        ]
        content = self._call.sub(lambda found: found["thought"] or "", text).strip()
        return content, [call for body in bodies for call in self._calls(body, tools)]

    def _calls(self, body: str, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
        """Returns the calls in the text between two marks, or in the whole turn."""
        if not self._parser or (
            self._parser == "llama3_json" and not body.startswith("{")
        ):  # it has no text around it
            return []
        if self._parser in _SHARED:
            return [_read(body)]
        if self._parser == "openai":  # times<|channel|>commentary json<|message|>{"a": 6, "b": 4}
            return [_read(body.partition("<|message|>")[2], re.split(r"[\s<]", body.strip())[0])]
        whole, found = self._begin * bool(self._end) + body + self._end, list[Any]()
        with contextlib.suppress(Exception):  # vLLM's parsers raise any exception
            found = _by_vllm(self._tokenizer, self._parser, json.dumps(tools))(whole).tool_calls
        if not found and self._begin and self._begin in whole:
            return [Call(problem="the call cannot be read")]
        return [_read(one.function.arguments, one.function.name) for one in found]

    def start(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Makes vLLM's parser, which raises if the tokenizer lacks its tokens."""
        if self._parser not in ("", *_SHARED, "openai"):
            _by_vllm(self._tokenizer, self._parser, json.dumps(tools))


@functools.lru_cache(maxsize=64)
def _by_vllm(tokenizer: Any, name: str, tools: str) -> Callable[[str], Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    logging.getLogger("vllm.tool_parsers").setLevel(
        logging.CRITICAL
    )  # the error is reported to the model and counted
    schemas = [
        tool if "function" in tool else {"type": "function", "function": tool}
        for tool in json.loads(tools)
    ]
    request = ChatCompletionRequest(messages=[], tools=schemas or None)
    make: Any = ToolParserManager.get_tool_parser(name)
    parser = make(tokenizer, request.tools)
    if hasattr(
        parser, "_parser_engine"
    ):  # otherwise it reads all arguments again after each ">" in them
        parser._parser_engine._stream_arg_deltas = False
    return functools.partial(parser.extract_tool_calls, request=request)


def _read(given: Any, name: str | None = None) -> Call:
    """Returns a call, or with a name, the call of these arguments, which may be JSON in a string, as OpenAI's are."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
        json.dumps(
            found, ensure_ascii=False
        ).encode()  # a lone surrogate cannot be sent to another process
    except (ValueError, RecursionError) as error:
        return Call(name or "", problem=f"the call is not valid JSON: {error}")
    if name is not None:
        return Call(name, found)
    if not isinstance(name := found.get("name"), str) or not name:
        return Call(problem='the call has no "name"')
    return _read(found.get("arguments", found.get("parameters", {})), name)
