"""Finds the texts of turns in what a chat template writes of a conversation."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from environments import Message

_MARKS = re.compile("⟦turn ([0-9]+)⟧")


def ends_of(
    render: Callable[..., str],
    messages: Sequence[Message],
    indexes: Collection[int],
    whole: str,
    history: int,
) -> dict[int, int]:
    """Returns where the texts of the messages with these indexes end in `whole`.

    whole: the messages as `render` writes them with this `history`. Returns {} if marks at the ends
    of the texts change what it writes.
    """
    marked = list(messages)
    for i in indexes:
        marked[i] = _marked(messages[i], f"⟦turn {i}⟧")
    pieces = _MARKS.split(render(marked, history=history))
    gaps = pieces[::2]
    if "".join(gaps) != whole:
        return {}
    ends = {}
    end = 0
    for gap, index in zip(gaps, pieces[1::2], strict=False):
        end += len(gap)
        ends[int(index)] = end
    return ends


def longest_beginning(
    whole: str, known: Iterable[tuple[str, NDArray[np.int32]]]
) -> tuple[str, NDArray[np.int32]]:
    """Returns the longest of the known (text, ids) with which a text begins, or ("", [])."""
    begins = [(text, ids) for text, ids in known if whole.startswith(text)]
    if not begins:
        return "", np.array([], np.int32)
    return max(begins, key=lambda begin: len(begin[0]))


def common_length(one: str, other: str) -> int:
    """Returns the length of the common prefix of two texts."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def _marked(message: Message, mark: str) -> Message:
    """Returns a message with a mark at the end of its text.

    The mark stands before white space, which a template may trim.
    """
    text = message["content"]
    words = text.rstrip()
    return {**message, "content": words + mark + text[len(words) :]}
