"""Makes the tokens between two turns of the model. Sampled tokens are never tokenised again.

    prompt of turn n + 1 = prompt of turn n ‖ sampled ids ‖ ids of the template's difference

The difference is what the chat template writes after the model's turn, up to where the model writes again: the end of
its turn, the messages of the environment, the generation prompt. It is rendered after a dummy turn and taken by prefix,
so that no text of the model passes through the template or the tokenizer. That holds for templates that leave earlier
turns unchanged, which `TurnTemplate.of` tries; for the others see docs/environments.md#rewritten-histories.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.types import Problem, Prompt
from environments import Message
from environments.tools import NO_CALLS, Call, Calls
from sampler.prompts.chat_template import TURN_MARK
from sampler.prompts.messages import arguments_of, tools_of
from sampler.prompts.prompts import turn_prefix_of
from sampler.turns.tool_calls import CallReader

Render = Callable[..., str]  # (messages, history=number that need not be shown) -> text with the generation prompt
Tokenize = Callable[[str], list[int]]  # text with its special tokens, nothing added

_PLACES = re.compile("⟦turn ([0-9]+)⟧")
# Turns as models write them. A template that strips thoughts, or rewrites a call, is found out by one of these.
_TURNS = (
    "Plain words.",
    "<think>\nA thought.\n</think>\n\nWords.",
    '<tool_call>\n{"name": "f"}\n</tool_call>',
    "<|channel>thought\nA thought.\n<channel|>Words.",
)
_MANY = 8  # number of turns, for templates that cut old ones
_SHOWN = 40  # characters of a difference
REMEDY = "set prompt.chat_template=configs/templates/hermes_tools.jinja, or one of yours that writes each turn once"


@dataclass(frozen=True)
class TurnTemplate:
    """The chat template of a run, applied between turns."""

    render: Render
    tokenize: Tokenize
    tools: Sequence[Mapping[str, Any]] = ()
    reader: CallReader | None = None  # None: a turn is its text
    rewrites: str = ""  # how it rewrites earlier turns; "" if it does not

    @functools.cached_property
    def turn_prefix(self) -> str:
        """Returns the beginning of the model's turn that follows an observation, as in Prompt.turn_prefix."""
        return turn_prefix_of(self.difference([{"role": "user", "content": "?"}]))

    @functools.cached_property
    def splits_thoughts(self) -> bool:
        """Returns whether thoughts must be a field, because an empty one is written before one in the text."""
        both = {"content": _TURNS[1]}, {"content": "Words.", "reasoning_content": "A thought."}
        before, after = {"role": "user", "content": "?"}, {"role": "user", "content": TURN_MARK}
        try:
            whole = [self.render([before, {"role": "assistant", **one}, after]).partition(TURN_MARK)[0] for one in both]
        except UserError:
            return False
        within, beside = [text.count("<think>") for text in whole]
        return within > beside > 0

    def calls(self, text: str, turn_prefix: str, ids: Sequence[int]) -> Calls:
        return self.reader(text, turn_prefix, ids, self.tools) if self.reader else NO_CALLS

    def of_row(self, problem: Problem) -> TurnTemplate:
        """Returns the template with the row's tools and template arguments, if any, which may make it rewrite."""
        tools, arguments = tools_of(problem) or self.tools, arguments_of(problem)
        with_row = functools.partial(self.render, tools=tools, arguments=arguments)
        rewrites = self.rewrites or ", ".join(arguments) * (not problem.images)
        return replace(self, render=with_row, tools=tools, rewrites=rewrites)

    @classmethod
    def of(cls, render: Render, tokenize: Tokenize, prompt: Sequence[Message], roles: Sequence[str]) -> TurnTemplate:
        """Returns a template, tried on a prompt that ends with the user and on observations in these roles.

        Raises UserError for a template that does not show the model's turn, or does not take these roles.
        """
        template = cls(render, tokenize)
        try:
            found = [template._rewrites(prompt, turn, role) for role in roles for turn in _TURNS]
        except UserError as error:
            if list(roles) != ["tool"]:
                raise
            called = {"role": "assistant", "content": "", "tool_calls": [Call("f", {"a": 1}).for_message()]}
            try:
                render([*prompt, called, {"role": "tool", "name": "f", "content": "Seen."}])
            except UserError:
                raise error from None
            found = [f"it writes a result behind its call alone ({error})"]
        return replace(template, rewrites=next(filter(None, found), ""))

    def difference(self, observation: Sequence[Message]) -> str:
        """Returns the text between the model's turn and its next. Raises ValueError if the template hides its turn."""
        history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN_MARK}]
        before, mark, after = self.render([*history, *observation]).rpartition(TURN_MARK)
        if not mark or TURN_MARK in before:
            raise ValueError("the chat template does not write the assistant's turn exactly once")
        return after

    def continuation(self, last_id: int, observation: Sequence[Message]) -> NDArray[np.int32]:
        """Returns the ids to append after a turn that ended with the token last_id, [K].

        The difference begins with the template's end of turn. It is left off where the model sampled it, and stays
        where the model ended with another token, such as <|endoftext|>.
        """
        if not (ids := self._following_ids(last_id, self.difference(observation))):
            raise ValueError(f"between two turns it writes nothing of {observation}")  # the two turns would be one
        return np.array(ids, np.int32)

    def conversation(
        self, prompt: Prompt, turns: Sequence[tuple[str, Sequence[Message], NDArray[np.int32]]]
    ) -> NDArray[np.int32]:
        """Returns the [K] ids of a conversation as the template writes it now; `turns` as of Episode.said."""
        assert not isinstance(prompt.for_rewards, str), "of several turns, rewards get messages"
        messages, turn_prefix = list(prompt.for_rewards), prompt.turn_prefix
        sampled = dict[int, tuple[str, NDArray[np.int32]]]()
        if messages[-1].get("role") == "assistant":  # the first turn's text begins with this message
            messages.pop()
        for text, seen, ids in turns:
            message, sampled[len(messages)] = self._message(text, turn_prefix, ids)
            turn_prefix = self.turn_prefix
            messages += [message, *seen]
        return self.written(messages, sampled, [(prompt.text, prompt.token_ids)])[1]

    def _message(
        self, text: str, turn_prefix: str, ids: NDArray[np.int32]
    ) -> tuple[Message, tuple[str, NDArray[np.int32]]]:
        """Returns a turn as a message for the template, and as (text, ids) for `written`."""
        own_text, message = text.removeprefix(turn_prefix), dict[str, Any](role="assistant", content=text)
        fields, written, kept = self.reader.parts(own_text, turn_prefix, ids) if self.reader else (None, own_text, ids)
        if self.reader and fields is not None:
            content, calls = self.calls(text, turn_prefix, ids.tolist())
            named = [replace(call, name=call.name or "unknown").for_message() for call in calls]
            message |= {"content": self.reader.words(content)} | fields | ({"tool_calls": named} if named else {})
        return message, (written, kept)

    def written(
        self,
        messages: Sequence[Message],
        sampled: Mapping[int, tuple[str, NDArray[np.int32]]],
        known: Iterable[tuple[str, NDArray[np.int32]]],
    ) -> tuple[str, NDArray[np.int32]]:
        """Returns (text, [K] ids) of messages as the template writes them now.

        sampled: {index of a turn's message: (its text without what a prompt already held, the ids of that text)}. The
        ids are kept if the text is unchanged, apart from white space at its ends, which templates may change. The text
        is found by a mark, or by searching it if special tokens mark its parts, which then are fields of the message.
        known: (text, ids), of which one may be the beginning of the result.
        """
        history = max(sampled, default=0)
        texts = {i for i, (text, _) in sampled.items() if messages[i]["content"].endswith(text)}
        try:
            whole = self.render(messages, history=history)
        except UserError:  # the template may take calls only as text
            parted = {i: {"role": "assistant", "content": text} for i, (text, _) in sampled.items() if i not in texts}
            texts, messages = {*sampled}, [parted.get(i, message) for i, message in enumerate(messages)]
            whole = self.render(messages, history=history)
        with_marks = [_marked(m, f"⟦turn {i}⟧") if i in texts else m for i, m in enumerate(messages)]
        marked = self.render(with_marks, history=history)
        gaps, places = (part := _PLACES.split(marked))[::2], map(int, part[1::2])
        ends = dict(zip(places, itertools.accumulate(map(len, gaps)), strict=False)) if "".join(gaps) == whole else {}
        begins = (one for one in known if whole.startswith(one[0]))
        begin, first = max(begins, key=lambda one: len(one[0]), default=("", np.array([], np.int32)))
        ids, last, done = first.tolist(), -1, len(begin)
        for place, (text, turn) in sorted(sampled.items()):
            words = text.strip()
            start = ends.get(place, -1) - len(words) if place in texts else whole.find(words, done)
            if start < done or not whole.startswith(words, start):
                continue
            before, behind = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
            ids += [*self._following_ids(last, whole[done:start].removesuffix(before)), *turn.tolist()]
            last, done = ids[-1], (end := start + len(words)) + _common_length(whole[end:], behind)
        return whole, np.array([*ids, *self._following_ids(last, whole[done:])], np.int32)

    def _following_ids(self, last_id: int, text: str) -> list[int]:
        ids = self.tokenize(text) if text else []
        return ids[1:] if ids[:1] == [last_id] else ids

    def opening(self, prompt: Sequence[Message]) -> str:
        """Returns the text of a turn between the generation prompt and the turn's own text."""
        turn = [{"role": "assistant", "content": TURN_MARK}, {"role": "user", "content": "Seen."}]
        before = self.render([*prompt, *turn]).partition(TURN_MARK)[0]
        return before[_common_length(before, self.render(prompt)) :]

    def _rewrites(self, prompt: Sequence[Message], turn: str, role: str) -> str:
        """Compares many turns rendered as a whole and in pieces. Returns how the texts differ, or ""."""
        answer, reply = {"role": "assistant", "content": turn}, [{"role": role, "content": "Seen."}]
        earlier = [*prompt, *[answer, *reply] * (_MANY - 1)]
        try:
            whole = self.render([*earlier, answer, *reply], history=len(earlier))
            pieces = self.render(prompt) + _MANY * (turn + self.difference(reply))
        except (UserError, ValueError, TypeError) as error:
            raise UserError(
                f"a message of the role {role!r}, which the environment sends: {error}; {REMEDY}"
            ) from error
        if whole == pieces:
            return ""
        at = _common_length(pieces, whole)
        expected, found = pieces[at : at + _SHOWN], whole[at : at + _SHOWN]
        return f"after {turn!r} and a message of the role {role!r} it writes {expected!r} as {found!r}"


def _marked(message: Message, mark: str) -> Message:
    """Returns a message with a mark at the end of its text, before white space that a template may trim."""
    words = (text := message["content"]).rstrip()
    return {**message, "content": words + mark + text[len(words) :]}


def _common_length(one: str, other: str) -> int:
    """Returns the length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
