"""The tokenizer of the quick start with tools: examples/quickstart/tokenizer.py with a chat template that offers tools.

The template is that of Qwen2.5, but names tools and arguments alone: a model of a million parameters cannot read their
JSON schemas, and every prompt would carry them.
"""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerFast

from examples.quickstart.tokenizer import byte_level

TAGS = ("<answer>", "</answer>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}"
    "{%- for tool in tools %}"
    "{{ '<tool_call>' + tool.function.name + ' ' + tool.function.parameters.properties | join(' ') + '</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, context_length: int) -> PreTrainedTokenizerFast:
    """Of whole conversations, so that the words around a question are as short in tokens as those in it."""
    return byte_level(texts, vocab_size, context_length, TAGS, CHAT_TEMPLATE)
