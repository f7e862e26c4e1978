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
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.types import Problem, Prompt
from environments import Message
from environments.tools import NO_CALLS, Calls
from sampler.chat_template import TURN_MARK
from sampler.messages import arguments_of, tools_of
from sampler.prompts import begun_in

Render = Callable[..., str]  # (messages, how many of them it need not show) -> text, the generation prompt behind it
Tokenize = Callable[[str], list[int]]  # text with its special tokens, nothing added

_PLACES = re.compile("⟦turn ([0-9]+)⟧")
# Turns as models write them. A template that strips thoughts, or rewrites a call, is found out by one of these.
_TURNS = ("Plain words.", "<think>\nA thought.\n</think>\n\nWords.", '<tool_call>\n{"name": "f"}\n</tool_call>')
_MANY = 8  # of them, for templates that cut what is long ago
REMEDY = "set prompt.chat_template=configs/templates/hermes_tools.jinja, or one of yours that writes each turn once"


@dataclass(frozen=True)
class TurnTemplate:
    """The chat template of a run, between turns."""

    render: Render
    tokenize: Tokenize
    tools: Sequence[Mapping[str, Any]] = ()
    read_calls: Callable[..., Calls] = lambda *_: NO_CALLS  # as CallReader
    rewrites: str = ""  # where it rewrites earlier turns: how

    @functools.cached_property
    def begun(self) -> str:
        """What of the model's turn stands behind an observation, as in Prompt."""
        return begun_in(self.difference([{"role": "user", "content": "?"}]))

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
        found = [template._rewrites(prompt, turn, role) for role in roles for turn in _TURNS]
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
        return np.array(self._behind(last_id, self.difference(observation)), np.int32)

    def conversation(
        self, prompt: Prompt, turns: Sequence[tuple[str, Sequence[Message], NDArray[np.int32]]]
    ) -> NDArray[np.int32]:
        """[K] ids of a conversation as the template writes it now. turns: (text, what followed, sampled ids) of each.

        A turn whose text stands there as it was keeps its ids. Where it stands is found by a mark at its end.
        """
        whole, marked = (self._written(prompt, turns, mark) for mark in ("", TURN_MARK))
        gaps, numbers = (part := _PLACES.split(marked))[::2], part[1::2]
        known = whole.startswith(prompt.text)
        ids, last, done, end = prompt.token_ids.tolist() if known else [], -1, len(prompt.text) if known else 0, 0
        for gap, number in zip(gaps, numbers, strict=False) if "".join(gaps) == whole else ():
            end += len(gap)
            text, _, sampled = turns[int(number)]
            text = text[len(self.begun if int(number) else prompt.begun) :]
            begin = end - len(text.rstrip())
            if begin >= done and whole.startswith(text, begin):
                ids += [*self._behind(last, whole[done:begin]), *sampled.tolist()]
                last, done = ids[-1], begin + len(text)
        return np.array([*ids, *self._behind(last, whole[done:])], np.int32)

    def _written(self, prompt: Prompt, turns: Sequence[tuple[str, Sequence[Message], Any]], mark: str) -> str:
        """With a mark at the end of each turn, before what a template may trim."""
        assert not isinstance(prompt.for_rewards, str), "of several turns, rewards get messages"
        messages, history = list(prompt.for_rewards), 0
        if messages[-1].get("role") == "assistant":  # the first turn has it as what was begun
            messages.pop()
        for i, (text, seen, _) in enumerate(turns):
            said, history = text.rstrip(), len(messages)
            marked = said + mark.replace("turn", f"turn {i}") + text[len(said) :]
            messages += [{"role": "assistant", "content": marked}, *seen]
        return self.render(messages, history=history)

    def _behind(self, last_id: int, text: str) -> list[int]:
        ids = self.tokenize(text)
        return ids[1:] if ids[:1] == [last_id] else ids

    def opening(self, prompt: Sequence[Message], role: str) -> str:
        """What it writes of a turn behind the generation prompt and before its words."""
        turn = [{"role": "assistant", "content": TURN_MARK}, {"role": role, "content": "Seen."}]
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
        return f"after {turn!r} and a message of the role {role!r} it writes {_first_difference(pieces, whole)}"


def _first_difference(expected: str, found: str, width: int = 40) -> str:
    """ "'<think>\\nA thought…' as 'Words.…'" """
    at = _alike(expected, found)
    return f"{expected[at : at + width]!r} as {found[at : at + width]!r}"


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
