"""What stands between two turns of the model, in tokens. What was sampled is never tokenised again.

    prompt of turn n + 1 = prompt of turn n ‖ sampled ids ‖ ids of the template's difference

The difference is what the chat template writes after the model's turn, up to where the model writes again: the end of
its turn, the messages of the environment, the generation prompt. It is rendered after a dummy turn and taken by prefix,
so that no text of the model passes through the template or the tokenizer. That holds for templates that leave earlier
turns alone. `TurnTemplate.of` tries the one in use. Where it rewrites them, the whole conversation is rendered before
each turn, and becomes tokens but for the turns whose text it left as it was; where these tokens go on otherwise than
those before, the rollout forks (episode.py).
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
from sampler.chat_template import TURN_MARK
from sampler.messages import arguments_of, tools_of
from sampler.prompts import begun_in
from sampler.tool_calls import CallReader

Render = Callable[..., str]  # (messages, how many of them it need not show) -> text, the generation prompt behind it
Tokenize = Callable[[str], list[int]]  # text with its special tokens, nothing added

_PLACES = re.compile("⟦turn ([0-9]+)⟧")
# Turns as models write them. A template that strips thoughts, or rewrites a call, is found out by one of these.
_TURNS = (
    "Plain words.",
    "<think>\nA thought.\n</think>\n\nWords.",
    '<tool_call>\n{"name": "f"}\n</tool_call>',
    "<|channel>thought\nA thought.\n<channel|>Words.",
)
_MANY = 8  # of them, for templates that cut what is long ago
_SHOWN = 40  # characters of a difference
REMEDY = "set prompt.chat_template=configs/templates/hermes_tools.jinja, or one of yours that writes each turn once"


@dataclass(frozen=True)
class TurnTemplate:
    """The chat template of a run, between turns."""

    render: Render
    tokenize: Tokenize
    tools: Sequence[Mapping[str, Any]] = ()
    reader: CallReader | None = None  # None: a turn is its text
    rewrites: str = ""  # where it rewrites earlier turns: how

    @functools.cached_property
    def begun(self) -> str:
        """What of the model's turn stands behind an observation, as in Prompt."""
        return begun_in(self.difference([{"role": "user", "content": "?"}]))

    @functools.cached_property
    def splits_thoughts(self) -> bool:
        """Whether it takes a thought as a field alone, and writes an empty one before one that stands in the text."""
        said = {"content": _TURNS[1]}, {"content": "Words.", "reasoning_content": "A thought."}
        before, after = {"role": "user", "content": "?"}, {"role": "user", "content": TURN_MARK}
        try:
            whole = [self.render([before, {"role": "assistant", **one}, after]).partition(TURN_MARK)[0] for one in said]
        except UserError:
            return False
        within, beside = [text.count("<think>") for text in whole]
        return within > beside > 0

    def calls(self, text: str, begun: str, ids: Sequence[int]) -> Calls:
        return self.reader(text, begun, ids, self.tools) if self.reader else NO_CALLS

    def of_row(self, problem: Problem) -> TurnTemplate:
        """With the row's own tools and template arguments, where it has them. These may make it rewrite."""
        tools, arguments = tools_of(problem) or self.tools, arguments_of(problem)
        told = functools.partial(self.render, tools=tools, arguments=arguments)
        rewrites = self.rewrites or ", ".join(arguments) * (not problem.images)
        return replace(self, render=told, tools=tools, rewrites=rewrites)

    @classmethod
    def of(cls, render: Render, tokenize: Tokenize, prompt: Sequence[Message], roles: Sequence[str]) -> TurnTemplate:
        """Tried on the messages of a prompt that ends with the user, and on observations in these roles.

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
        """Everything between the model's text and its next. Raises ValueError where the template hides its turn."""
        history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN_MARK}]
        before, mark, after = self.render([*history, *observation]).rpartition(TURN_MARK)
        if not mark or TURN_MARK in before:
            raise ValueError("the chat template does not write the assistant's turn exactly once")
        return after

    def continuation(self, last_id: int, observation: Sequence[Message]) -> NDArray[np.int32]:
        """[K] ids to append after a turn that ended with the token last_id.

        The difference begins with the template's end of turn. It is left off where the model sampled it, and stays
        where the model ended with another token, such as <|endoftext|>.
        """
        if not (ids := self._behind(last_id, self.difference(observation))):
            raise ValueError(f"between two turns it writes nothing of {observation}")  # they would be one
        return np.array(ids, np.int32)

    def conversation(
        self, prompt: Prompt, turns: Sequence[tuple[str, Sequence[Message], NDArray[np.int32]]]
    ) -> NDArray[np.int32]:
        """[K] ids of a conversation as the template writes it now. turns: (text, what followed, sampled ids)."""
        assert not isinstance(prompt.for_rewards, str), "of several turns, rewards get messages"
        messages, sampled, begun = list(prompt.for_rewards), dict[int, tuple[str, NDArray[np.int32]]](), prompt.begun
        if messages[-1].get("role") == "assistant":  # the first turn has it as what was begun
            messages.pop()
        for text, seen, ids in turns:
            message, sampled[len(messages)] = self._told(text, begun, ids)
            begun = self.begun
            messages += [message, *seen]
        return self.written(messages, sampled, [(prompt.text, prompt.token_ids)])[1]

    def _told(self, text: str, begun: str, ids: NDArray[np.int32]) -> tuple[Message, tuple[str, NDArray[np.int32]]]:
        """A turn as the template takes it, and as `written` wants it."""
        said, message = text.removeprefix(begun), dict[str, Any](role="assistant", content=text)
        fields, written, kept = self.reader.parts(said, begun, ids) if self.reader else (None, said, ids)
        if self.reader and fields is not None:
            content, calls = self.calls(text, begun, ids.tolist())
            named = [replace(call, name=call.name or "unknown").for_message() for call in calls]
            message |= {"content": self.reader.words(content)} | fields | ({"tool_calls": named} if named else {})
        return message, (written, kept)

    def written(
        self,
        messages: Sequence[Message],
        sampled: Mapping[int, tuple[str, NDArray[np.int32]]],
        known: Iterable[tuple[str, NDArray[np.int32]]],
    ) -> tuple[str, NDArray[np.int32]]:
        """(text, [K] ids) of messages as the template writes them now.

        sampled: by the place of a turn of the model, its text behind what a prompt held of it, and the ids of that. It
        keeps these where its text stands as it was, apart from white space at its ends, with which templates are free.
        Where it stands is found by a mark; where special tokens mark its parts, so that they are fields of the message,
        by itself. known: texts that have ids, of which one may be the beginning of this.
        """
        history = max(sampled, default=0)
        texts = {i for i, (text, _) in sampled.items() if messages[i]["content"].endswith(text)}
        try:
            whole = self.render(messages, history=history)
        except UserError:  # it may take calls in words alone
            parted = {i: {"role": "assistant", "content": text} for i, (text, _) in sampled.items() if i not in texts}
            texts, messages = {*sampled}, [parted.get(i, message) for i, message in enumerate(messages)]
            whole = self.render(messages, history=history)
        told = [_marked(m, f"⟦turn {i}⟧") if i in texts else m for i, m in enumerate(messages)]
        marked = self.render(told, history=history)
        gaps, places = (part := _PLACES.split(marked))[::2], map(int, part[1::2])
        ends = dict(zip(places, itertools.accumulate(map(len, gaps)), strict=False)) if "".join(gaps) == whole else {}
        begins = (one for one in known if whole.startswith(one[0]))
        begin, first = max(begins, key=lambda one: len(one[0]), default=("", np.array([], np.int32)))
        ids, last, done = first.tolist(), -1, len(begin)
        for place, (text, turn) in sorted(sampled.items()):
            said = text.strip()
            start = ends.get(place, -1) - len(said) if place in texts else whole.find(said, done)
            if start < done or not whole.startswith(said, start):
                continue
            before, behind = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
            ids += [*self._behind(last, whole[done:start].removesuffix(before)), *turn.tolist()]
            last, done = ids[-1], (end := start + len(said)) + _alike(whole[end:], behind)
        return whole, np.array([*ids, *self._behind(last, whole[done:])], np.int32)

    def _behind(self, last_id: int, text: str) -> list[int]:
        ids = self.tokenize(text) if text else []
        return ids[1:] if ids[:1] == [last_id] else ids

    def opening(self, prompt: Sequence[Message]) -> str:
        """What it writes of a turn behind the generation prompt and before its words."""
        turn = [{"role": "assistant", "content": TURN_MARK}, {"role": "user", "content": "Seen."}]
        before = self.render([*prompt, *turn]).partition(TURN_MARK)[0]
        return before[_alike(before, self.render(prompt)) :]

    def _rewrites(self, prompt: Sequence[Message], turn: str, role: str) -> str:
        """Renders many turns as a whole and in our pieces: how the texts differ, or ""."""
        said, seen = {"role": "assistant", "content": turn}, [{"role": role, "content": "Seen."}]
        earlier = [*prompt, *[said, *seen] * (_MANY - 1)]
        try:
            whole = self.render([*earlier, said, *seen], history=len(earlier))
            pieces = self.render(prompt) + _MANY * (turn + self.difference(seen))
        except (UserError, ValueError, TypeError) as error:
            raise UserError(
                f"a message of the role {role!r}, which the environment sends: {error}; {REMEDY}"
            ) from error
        if whole == pieces:
            return ""
        at = _alike(pieces, whole)
        expected, found = pieces[at : at + _SHOWN], whole[at : at + _SHOWN]
        return f"after {turn!r} and a message of the role {role!r} it writes {expected!r} as {found!r}"


def _marked(message: Message, mark: str) -> Message:
    """At the end of its words, before what a template may trim."""
    said = (text := message["content"]).rstrip()
    return {**message, "content": said + mark + text[len(said) :]}


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
