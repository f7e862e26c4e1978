"""What stands between an agent's messages and the tokens of its model.

A history that comes back as it was told is not tokenised again: where the chat template leaves it as it was, the ids of
its turn are followed by those of the template's difference. Where the template rewrites it, or the agent, the text as
it is rendered now is another sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config import Config
from environments import Message
from environments.chat_completions import Ask, Said
from environments.tools import NO_CALLS
from sampler.chat_template import TURN_MARK, read_template, render
from sampler.completions import Completion
from sampler.prompts import begun_in
from sampler.task import Decode
from sampler.tool_calls import CallReader, parser_of


@dataclass(frozen=True)
class Asked:
    """A request as the model sees it."""

    ask: Ask
    text: str
    ids: NDArray[np.int32]  # [P]


@dataclass(frozen=True)
class AgentTurn:
    """What it was answered."""

    asked: Asked
    completion: Completion
    text: str  # as it was read off the tokens, with what of it the prompt holds
    whole: str  # of prompt and turn
    message: Message  # as the agent was told

    @property
    def ids(self) -> NDArray[np.int32]:
        return np.concatenate([self.asked.ids, self.completion.token_ids])

    @property
    def history(self) -> list[Message]:
        return [*self.asked.ask.messages, self.message]


@dataclass(frozen=True)
class Chat:
    """tokenize: text with its special tokens, nothing added. decode: as rewards read tokens."""

    tokenizer: Any
    config: Config
    tokenize: Callable[[str], list[int]]
    decode: Decode

    def asked(self, ask: Ask, turns: Sequence[AgentTurn]) -> Asked:
        """turns: that the agent has had. Raises UserError or ValueError for what cannot be shown to the model."""
        if not all(isinstance(tool.get("function"), dict) and tool["function"].get("name") for tool in ask.tools):
            raise ValueError('tools: each is {"type": "function", "function": {"name": …, "parameters": …}}')
        if ask.reads_calls:
            self._reader.start(ask.tools)
        known = [turn for turn in turns if self._goes_on(ask, turn)]
        last = max(known, key=lambda turn: len(turn.history), default=None)
        messages = list(ask.messages)
        for turn in known:
            messages[len(turn.history) - 1] = {"role": "assistant", "content": turn.text}
        place = len(last.history) - 1 if last else 0
        written: Callable[[Sequence[Message]], str] = functools.partial(
            render,
            self.tokenizer,
            prompt=self.config.prompt,
            tools=ask.tools,
            arguments=ask.template_arguments,
            history=place,
        )
        text = written(messages)
        if last is not None and _bare(text).startswith(_bare(last.whole)):
            messages[place] = {"role": "assistant", "content": TURN_MARK}
            if len(parts := written(messages).split(TURN_MARK)) == 2:
                added = self.tokenize(parts[1])
                ended = [int(last.ids[-1])] == added[:1]  # the template's end of turn, which the model sampled
                return Asked(ask, text, np.array([*last.ids, *added[ended:]], np.int32))
        return Asked(ask, text, np.array(self.tokenize(text), np.int32))

    def _goes_on(self, ask: Ask, turn: AgentTurn) -> bool:
        of = turn.asked.ask
        same = (ask.tools, ask.template_arguments) == (of.tools, of.template_arguments)
        return same and len(ask.messages) > len(turn.history) and ask.messages[: len(turn.history)] == turn.history

    @functools.cached_property
    def _reader(self) -> CallReader:
        """Raises UserError where the chat template writes no calls."""
        template = self.tokenizer.get_chat_template(read_template(self.config.prompt.chat_template), [{}])
        return CallReader(self.tokenizer, parser_of(template, self.config.rollout.tool_parser))

    def said(self, asked: Asked, completion: Completion) -> tuple[AgentTurn, Said, int, int]:
        """The turn, what the agent is told, how many tools it calls and how many of these calls cannot be read."""
        ask, ids = asked.ask, completion.token_ids.tolist()
        [text] = self.decode([ids])
        begun = begun_in(asked.text, ask.messages)
        content = text
        for stop in ask.stop:
            content = content.removesuffix(stop)
        message: Message = {"role": "assistant", "content": content}
        around, found = self._reader(begun + content, begun, ids, ask.tools) if ask.reads_calls else NO_CALLS
        calls = [call for call in found if not call.problem][: 1 if ask.one_call else None]
        if calls:
            message["content"] = around.removeprefix(begun)
            message["tool_calls"] = [{"id": f"call_{ask.id}_{i}"} | call.for_message() for i, call in enumerate(calls)]
        said = Said(ask.id, message, completion.finish_reason, len(asked.ids), len(ids))
        turn = AgentTurn(asked, completion, begun + text, asked.text + text, message)
        return turn, said, len(found), sum(1 for call in found if call.problem)


def _bare(text: str) -> str:
    """Without white space, with which templates are free."""
    return "".join(text.split())
