"""Makes the tokens between two turns of the model. Sampled tokens are never tokenised again.

    prompt of turn n + 1 = prompt of turn n ‖ sampled ids ‖ ids of the template's difference

The difference is what the chat template writes after the model's turn, up to where the model writes
again: the end of its turn, the messages of the environment, the generation prompt. It is rendered
after a dummy turn and taken by prefix, so that no text of the model passes through the template or
the tokenizer. That holds for templates that leave earlier turns unchanged, which `TurnTemplate.of`
tries. For the other templates see docs/environments.md#rewritten-histories.
"""

from __future__ import annotations

import functools
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
from sampler.turns.marks import common_length, ends_of, longest_beginning
from sampler.turns.tool_calls import CallReader

# (messages, history=number that need not be shown) -> text with the generation prompt
Render = Callable[..., str]
Tokenize = Callable[[str], list[int]]  # text with its special tokens, nothing added

# Turns as models write them. One of them finds out a template that strips thoughts, or that
# rewrites a call.
_TURNS = (
    "Plain words.",
    "<think>\nA thought.\n</think>\n\nWords.",
    '<tool_call>\n{"name": "f"}\n</tool_call>',
    "<|channel>thought\nA thought.\n<channel|>Words.",
)
_MANY = 8  # number of turns, for templates that cut old ones
_SHOWN = 40  # characters of a difference
REMEDY = (
    "set prompt.chat_template=configs/templates/hermes_tools.jinja, "
    "or one of yours that writes each turn once"
)


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
        """Returns the beginning of the turn that follows an observation, as Prompt.turn_prefix."""
        return turn_prefix_of(self.difference([{"role": "user", "content": "?"}]))

    @functools.cached_property
    def splits_thoughts(self) -> bool:
        """Returns whether the template writes an extra `<think>` for a thought in the text.

        Thoughts must then be a field of the message.
        """
        try:
            in_text = self._num_thoughts({"content": _TURNS[1]})
            as_field = self._num_thoughts({"content": "Words.", "reasoning_content": "A thought."})
        except UserError:
            return False
        return in_text > as_field > 0

    def _num_thoughts(self, fields: Message) -> int:
        """Returns how often the template writes `<think>` for a turn with these fields."""
        before = {"role": "user", "content": "?"}
        turn = {"role": "assistant", **fields}
        after = {"role": "user", "content": TURN_MARK}
        return self.render([before, turn, after]).partition(TURN_MARK)[0].count("<think>")

    def calls(self, text: str, turn_prefix: str, ids: Sequence[int]) -> Calls:
        """Returns (the text around the tool calls, the calls) of a turn, as CallReader."""
        if self.reader is None:
            return NO_CALLS
        return self.reader(text, turn_prefix, ids, self.tools)

    def of_row(self, problem: Problem) -> TurnTemplate:
        """Returns the template with the row's tools and template arguments, if it has some.

        Arguments may make the template rewrite earlier turns.
        """
        tools = tools_of(problem) or self.tools
        arguments = arguments_of(problem)
        with_row = functools.partial(self.render, tools=tools, arguments=arguments)
        rewrites = self.rewrites
        if not rewrites and not problem.images:
            rewrites = ", ".join(arguments)
        return replace(self, render=with_row, tools=tools, rewrites=rewrites)

    @classmethod
    def of(
        cls,
        render: Render,
        tokenize: Tokenize,
        prompt: Sequence[Message],
        roles: Sequence[str],
    ) -> TurnTemplate:
        """Returns a template, tried on a prompt that ends with the user, and on observations.

        roles: those of the observations. Raises UserError for a template that does not show the
        model's turn, or does not take these roles.
        """
        template = cls(render, tokenize)
        found = []
        try:
            for role in roles:
                for turn in _TURNS:
                    found.append(template._rewrites(prompt, turn, role))
        except UserError as error:
            if list(roles) != ["tool"]:
                raise
            calls = [Call("f", {"a": 1}).for_message()]
            called = {"role": "assistant", "content": "", "tool_calls": calls}
            try:
                render([*prompt, called, {"role": "tool", "name": "f", "content": "Seen."}])
            except UserError:
                raise error from None
            found = [f"it writes a result behind its call alone ({error})"]
        return replace(template, rewrites=next(filter(None, found), ""))

    def difference(self, observation: Sequence[Message]) -> str:
        """Returns the text between the model's turn and its next.

        Raises ValueError if the template does not show the turn exactly once.
        """
        history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN_MARK}]
        before, mark, after = self.render([*history, *observation]).rpartition(TURN_MARK)
        if not mark or TURN_MARK in before:
            raise ValueError("the chat template does not write the assistant's turn exactly once")
        return after

    def continuation(self, last_id: int, observation: Sequence[Message]) -> NDArray[np.int32]:
        """Returns the ids to append after a turn that ended with the token last_id, [K].

        The difference begins with the template's end of turn. It is left off where the model
        sampled it, and stays where the model ended with another token, such as <|endoftext|>.
        Raises ValueError if the template writes nothing, because the two turns would be one.
        """
        ids = self._following_ids(last_id, self.difference(observation))
        if not ids:
            raise ValueError(f"between two turns it writes nothing of {observation}")
        return np.array(ids, np.int32)

    def conversation(
        self, prompt: Prompt, turns: Sequence[tuple[str, Sequence[Message], NDArray[np.int32]]]
    ) -> NDArray[np.int32]:
        """Returns the [K] ids of a conversation as the template writes it now.

        turns: those of Episode.said.
        """
        assert not isinstance(prompt.for_rewards, str), "of several turns, rewards get messages"
        messages: list[Message] = list(prompt.for_rewards)
        turn_prefix = prompt.turn_prefix
        sampled: dict[int, tuple[str, NDArray[np.int32]]] = {}
        if (
            messages[-1].get("role") == "assistant"
        ):  # the first turn's text begins with this message
            messages.pop()
        for text, seen, ids in turns:
            message, sampled[len(messages)] = self._message(text, turn_prefix, ids)
            turn_prefix = self.turn_prefix
            messages += [message, *seen]
        return self.written(messages, sampled, [(prompt.text, prompt.token_ids)])[1]

    def _message(
        self, text: str, turn_prefix: str, ids: NDArray[np.int32]
    ) -> tuple[Message, tuple[str, NDArray[np.int32]]]:
        """Returns a turn as a message for the template, and its (text, ids) for `written`."""
        own_text = text.removeprefix(turn_prefix)
        message: Message = {"role": "assistant", "content": text}
        if self.reader is None:
            return message, (own_text, ids)
        fields, written, kept = self.reader.parts(own_text, turn_prefix, ids)
        if fields is not None:
            content, calls = self.calls(text, turn_prefix, ids.tolist())
            message["content"] = self.reader.words(content)
            message |= fields
            if calls:
                named = [replace(call, name=call.name or "unknown") for call in calls]
                message["tool_calls"] = [call.for_message() for call in named]
        return message, (written, kept)

    def written(
        self,
        messages: Sequence[Message],
        sampled: Mapping[int, tuple[str, NDArray[np.int32]]],
        known: Iterable[tuple[str, NDArray[np.int32]]],
    ) -> tuple[str, NDArray[np.int32]]:
        """Returns (text, [K] ids) of messages as the template writes them now.

        sampled: (text, ids) of turns by the index of their message; the text lacks what a prompt
        already held. The ids are kept if the text is unchanged, apart from white space at its ends,
        which templates may change. known: (text, ids), of which one may be the beginning of the
        result.

        The text of a turn is found by a mark. If special tokens mark its parts, these are fields of
        the message, and the text is searched.
        """
        history = max(sampled, default=0)
        in_text = {i for i, (text, _) in sampled.items() if messages[i]["content"].endswith(text)}
        try:
            whole = self.render(messages, history=history)
        except UserError:  # the template may take calls only as text
            messages = list(messages)
            for i, (text, _) in sampled.items():
                if i not in in_text:
                    messages[i] = {"role": "assistant", "content": text}
            in_text = set(sampled)
            whole = self.render(messages, history=history)
        ends = ends_of(self.render, messages, in_text, whole, history)
        begin, begin_ids = longest_beginning(whole, known)
        ids = begin_ids.tolist()
        last_id = -1  # the last sampled id
        done = len(begin)
        for i, (text, turn_ids) in sorted(sampled.items()):
            words = text.strip()
            start = whole.find(words, done)
            if i in in_text:
                start = ends.get(i, -1) - len(words)
            if start < done or not whole.startswith(words, start):
                continue
            space_before = text[: len(text) - len(text.lstrip())]
            between = whole[done:start].removesuffix(space_before)
            ids += self._following_ids(last_id, between)
            ids += turn_ids.tolist()
            last_id = ids[-1]
            end = start + len(words)
            space_behind = text[len(text.rstrip()) :]
            done = end + common_length(whole[end:], space_behind)
        ids += self._following_ids(last_id, whole[done:])
        return whole, np.array(ids, np.int32)

    def _following_ids(self, last_id: int, text: str) -> list[int]:
        """Returns the ids of a text, without the first if that is last_id, which was sampled."""
        if not text:
            return []
        ids = self.tokenize(text)
        if ids[:1] == [last_id]:
            return ids[1:]
        return ids

    def opening(self, prompt: Sequence[Message]) -> str:
        """Returns the text of a turn between the generation prompt and the turn's own text."""
        turn = [{"role": "assistant", "content": TURN_MARK}, {"role": "user", "content": "Seen."}]
        before = self.render([*prompt, *turn]).partition(TURN_MARK)[0]
        return before[common_length(before, self.render(prompt)) :]

    def _rewrites(self, prompt: Sequence[Message], turn: str, role: str) -> str:
        """Renders many turns as a whole and in pieces. Returns how the texts differ, or ""."""
        answer = {"role": "assistant", "content": turn}
        reply = [{"role": role, "content": "Seen."}]
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
        start = common_length(pieces, whole)
        expected = pieces[start : start + _SHOWN]
        found = whole[start : start + _SHOWN]
        return (
            f"after {turn!r} and a message of the role {role!r} it writes {expected!r} as {found!r}"
        )
