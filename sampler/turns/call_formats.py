"""The formats in which models write tool calls, by the names of vLLM's `--tool-call-parser`."""

import functools
import importlib.util
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError


class CallFormat(NamedTuple):
    """A format of tool calls."""

    template: str  # a pattern that occurs in the chat templates that write this format
    begin: str = ""  # the mark before a call
    end: str = ""  # the mark after it; without one, a turn is read as a whole


FORMS = {
    "qwen3_xml": CallFormat("<function=", "<tool_call>", "</tool_call>"),
    "glm45": CallFormat("<arg_key>", "<tool_call>", "</tool_call>"),
    "gemma4": CallFormat(r"<\|tool_call>", "<|tool_call>", "<tool_call|>"),
    "lfm2": CallFormat(
        r"<\|tool_(?:call|list)_start\|>", "<|tool_call_start|>", "<|tool_call_end|>"
    ),
    "openai": CallFormat(r"<\|call\|>", "to=functions.", "<|call|>"),
    "mistral": CallFormat(r"\[TOOL_CALLS\]", "[TOOL_CALLS]"),
    "deepseek_v3": CallFormat(
        "<｜tool▁calls▁begin｜>(?s:.*)```json", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": CallFormat(
        "<｜tool▁calls▁begin｜>(?!(?s:.*)```json)", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    ),
    "kimi_k2": CallFormat(
        "_calls_section_begin", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    ),
    "minimax_m2": CallFormat("<minimax:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>"),
    "seed_oss": CallFormat("<seed:tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
    "muse_glimmer": CallFormat("<atem:function_calls>", "<atem:function_calls>"),
    "hermes": CallFormat("<tool_call>", "<tool_call>", "</tool_call>"),
    "llama3_json": CallFormat('"parameters"'),
}
# Formats whose patterns also occur in chat templates that write other formats.
SHARED = ["hermes", "llama3_json"]
# vLLM's other names of these formats.
_SAME = {
    "qwen3_coder": "qwen3_xml",
    "glm47": "glm45",
    "qwen3_json": "hermes",
    "llama4_json": "llama3_json",
}


def parser_of(template: str, given: str) -> str:
    """Returns the name of the call format that a run reads.

    template: the source of the chat template. given: rollout.tool_parser; "auto" stands for the
    template's own format. Raises UserError if the template writes none or several, or another one.
    """
    found = [name for name, form in FORMS.items() if re.search(form.template, template)]
    written = [name for name in found if name not in SHARED]
    if not written:
        written = found
    if given == "auto" and (len(written) == 1 or written == SHARED):
        return written[0]
    name = _SAME.get(given, given)
    if name in written:
        return name
    vllm_names = _names_in_vllm()
    if name in vllm_names and (name not in FORMS or not written):
        return name
    formats = " or ".join(written)
    proposed = "hermes"
    if written:
        proposed = written[0]
    raise UserError(
        f"rollout.tool_parser {given!r}: the chat template writes calls as "
        f"{formats or 'no known parser'} reads them; set rollout.tool_parser={proposed}. "
        f"There are {', '.join(vllm_names)}"
    )


def _names_in_vllm() -> list[str]:
    """Returns the names of vLLM's parsers, without the import of vLLM, which takes many seconds."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return []
    parsers = Path(vllm.origin).with_name("tool_parsers") / "__init__.py"
    if not parsers.is_file():
        return []
    return re.findall(r'^    "([\w-]+)": \(', parsers.read_text(), re.MULTILINE)


@functools.lru_cache(maxsize=64)
def vllm_parser(tokenizer: Any, name: str, tools: str) -> Callable[[str], Any]:
    """Returns vLLM's function that finds calls in a text. tools: those of the prompt, as JSON."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    # An error is reported to the model and counted.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    schemas = []
    for tool in json.loads(tools):
        if "function" not in tool:
            tool = {"type": "function", "function": tool}
        schemas.append(tool)
    request = ChatCompletionRequest(messages=[], tools=schemas or None)
    make: Any = ToolParserManager.get_tool_parser(name)
    parser = make(tokenizer, request.tools)
    if hasattr(parser, "_parser_engine"):
        # Otherwise it reads all arguments again after each ">" in them.
        parser._parser_engine._stream_arg_deltas = False
    return functools.partial(parser.extract_tool_calls, request=request)
