"""What stands between two turns of the model, in tokens. What was sampled is never tokenised again.

    prompt of turn n + 1 = prompt of turn n ‖ sampled ids ‖ ids of the template's difference

The difference is what the chat template writes after the model's turn, up to where the model writes again: the end of
its turn, the messages of the environment, the generation prompt. It is rendered after a dummy turn and taken by prefix,
so that no text of the model passes through the template or the tokenizer. That holds for templates that leave earlier
turns alone. `TurnTemplate.of` proves it on the one in use, and refuses one that rewrites what was sampled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.types import Problem
from environments import Message
from environments.tools import NO_CALLS, Calls
from sampler.messages import arguments_of, tools_of
from sampler.prompts import begun_in

Render = Callable[..., str]  # of messages, with the generation prompt behind them
Tokenize = Callable[[str], list[int]]  # text with its special tokens, nothing added

_MARK = "⟦turn⟧"  # stands for what the model wrote; no template writes it itself
# Turns as models write them. A template that strips thoughts, or rewrites a call, fails on one of these.
_TURNS = ("Plain words.", "<think>\nA thought.\n</think>\n\nWords.", '<tool_call>\n{"name": "f"}\n</tool_call>')
_REMEDY = "set prompt.chat_template=configs/templates/hermes_tools.jinja, or one of yours that writes each turn once"


@dataclass(frozen=True)
class TurnTemplate:
    """The chat template of a run, between turns."""

    render: Render
    tokenize: Tokenize
    tools: Sequence[Mapping[str, Any]] = ()
    read_calls: Callable[..., Calls] = lambda *_: NO_CALLS  # as CallReader

    @functools.cached_property
    def begun(self) -> str:
        """What of the model's turn stands behind an observation, as in Prompt."""
        return begun_in(self.difference([{"role": "user", "content": "?"}]))

    def of_row(self, problem: Problem) -> TurnTemplate:
        """With the row's own tools and template arguments, where it has them."""
        tools = tools_of(problem) or self.tools
        told = functools.partial(self.render, tools=tools, arguments=arguments_of(problem))
        return replace(self, render=told, tools=tools)

    @classmethod
    def of(cls, render: Render, tokenize: Tokenize, prompt: Sequence[Message], roles: Sequence[str]) -> TurnTemplate:
        """Proven on the messages of a prompt that ends with the user, and on observations in these roles.

        Raises UserError for a template that rewrites earlier turns, or does not take these roles.
        """
        template = cls(render, tokenize)
        for role in roles:
            for turn in _TURNS:
                template._require_exact(prompt, turn, role)
        return template

    def difference(self, observation: Sequence[Message]) -> str:
        """Everything between the model's text and its next. Raises ValueError where the template hides its turn."""
        history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        before, mark, after = self.render([*history, *observation]).rpartition(_MARK)
        if not mark or _MARK in before:
            raise ValueError("the chat template does not write the assistant's turn exactly once")
        return after

    def continuation(self, last_id: int, observation: Sequence[Message]) -> NDArray[np.int32]:
        """[K] ids to append after a turn that ended with the token last_id.

        The difference begins with the template's end of turn. It is left off where the model sampled it, and stays
        where the model ended with another token, such as <|endoftext|>.
        """
        ids = self.tokenize(self.difference(observation))
        return np.array(ids[1:] if ids[:1] == [last_id] else ids, np.int32)

    def _require_exact(self, prompt: Sequence[Message], turn: str, role: str) -> None:
        """Renders two turns as a whole and in our pieces: both must be the same text."""
        said, seen = {"role": "assistant", "content": turn}, [{"role": role, "content": "Seen."}]
        try:
            whole = self.render([*prompt, said, *seen, said, *seen])
            pieces = self.render(prompt) + 2 * (turn + self.difference(seen))
        except (UserError, ValueError, TypeError) as error:
            raise UserError(
                f"a message of the role {role!r}, which the environment sends: {error}; {_REMEDY}"
            ) from error
        if whole != pieces:
            raise UserError(
                f"the chat template rewrites earlier turns of a conversation: after {turn!r} and a message of the role "
                f"{role!r} it writes {_first_difference(pieces, whole)}. The next turn would follow other tokens than "
                f"those that were sampled; {_REMEDY}"
            )


def _first_difference(expected: str, found: str, width: int = 40) -> str:
    """ "'<think>\\nA thought…' as 'Words.…'" """
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(map(len, (expected, found)))
    )
    return f"{expected[at : at + width]!r} as {found[at : at + width]!r}"
