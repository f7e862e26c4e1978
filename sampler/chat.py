"""What stands between an agent's messages and the tokens of its model: a TurnTemplate that is told all messages anew.

The turns among them are those that the agent was told; each keeps its sampled ids where the text of it stays.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config import Config
from environments import Message
from environments.chat_completions import Ask, Said
from environments.tools import NO_CALLS, Call
from sampler.chat_template import read_template
from sampler.completions import Completion
from sampler.prompts import begun_in
from sampler.task import Decode
from sampler.tool_calls import CallReader, parser_of
from sampler.turns import TurnTemplate


@dataclass(frozen=True, eq=False)
class Asked:
    """A request as the model sees it."""

    ask: Ask
    text: str
    ids: NDArray[np.int32]  # [P]
    begun: str  # what of the model's turn the text holds


@dataclass(frozen=True)
class AgentTurn:
    """What it was answered."""

    asked: Asked
    completion: Completion
    text: str  # behind what the prompt holds of it, as it was read off the tokens
    message: Message  # as the agent was told
    calls: list[Call]
    is_parted: bool  # its message is how the chat template takes it, and not its text
    written: tuple[str, NDArray[np.int32]]  # as TurnTemplate's

    @property
    def ids(self) -> NDArray[np.int32]:
        return np.concatenate([self.asked.ids, self.completion.token_ids])

    def is_told_by(self, message: Message) -> bool:
        """Clients may drop what OpenAI has no name for."""
        return message in (self.message, {n: v for n, v in self.message.items() if n != "reasoning_content"})


@dataclass(frozen=True)
class Chat:
    """template: of the run. decode: as rewards read tokens."""

    tokenizer: Any
    config: Config
    template: TurnTemplate
    decode: Decode

    def asked(self, ask: Ask, turns: Collection[AgentTurn]) -> Asked:
        """turns: that the agent has had. Raises UserError or ValueError for what cannot be shown to the model."""
        if ask.reads_calls:
            self._reader.start(ask.tools or [])
        messages, sampled = list(ask.messages), {}
        for i, message in enumerate(ask.messages):
            told = [turn for turn in turns if turn.is_told_by(message)]  # of several the one that said it there
            if turn := max(told, key=lambda t: t.asked.ask.messages == ask.messages[:i], default=None):
                as_text: Message = {"role": "assistant", "content": turn.asked.begun + turn.text}
                messages[i], (written, ids) = turn.message if turn.is_parted else as_text, turn.written
                goes_on = i + 1 == len(messages) and self.decode([ids[-1:].tolist()]) == [""]  # without what ended it
                sampled[i] = written, ids[:-1] if goes_on else ids
        own = {"tools": ask.tools, "arguments": ask.chat_template_kwargs or {}}
        template = replace(self.template, render=functools.partial(self.template.render, **own))
        text, ids = template.written(messages, sampled, [(turn.asked.text, turn.asked.ids) for turn in turns])
        return Asked(ask, text, ids, begun_in(text, messages))

    @functools.cached_property
    def _reader(self) -> CallReader:
        """Raises UserError where the chat template writes no calls."""
        template = self.tokenizer.get_chat_template(read_template(self.config.prompt.chat_template), [{}])
        parser = parser_of(template, self.config.rollout.tool_parser)
        return CallReader(self.tokenizer, parser, self.template.splits_thoughts)

    @functools.cached_property
    def _without_calls(self) -> CallReader:
        return CallReader(self.tokenizer, splits_thoughts=self.template.splits_thoughts)

    def said(self, asked: Asked, completion: Completion) -> tuple[AgentTurn, Said]:
        ask, ids = asked.ask, completion.token_ids.tolist()
        [text] = self.decode([ids])
        begun, stays = asked.begun, len(self.begin(ask, ids[:-1]))

        def until_a_stop(said: str) -> str:
            return said[: min((at for stop in ask.stops if (at := said.find(stop, stays)) >= 0), default=len(said))]

        content = until_a_stop(text)  # its last token may hold more
        reader = self._reader if ask.reads_calls else self._without_calls
        fields, written, kept = reader.parts(text, begun, completion.token_ids)
        is_text = fields is None and not ask.reads_calls
        around, found = NO_CALLS if is_text else reader(begun + content, begun, ids, ask.tools or [])
        calls = [call for call in found if not call.problem][: 1 if ask.parallel_tool_calls is False else None]
        message: Message = {"role": "assistant", "content": content, **(fields or {})}
        if calls or fields is not None:
            message["content"] = until_a_stop(reader.words(around).removeprefix(begun))
        if calls:
            made_of = f"{asked.ids.tolist()} {ids}".encode()
            message["tool_calls"] = [
                {"id": hashlib.blake2b(made_of, salt=b"%d" % i).hexdigest()[:9]}
                | call.for_message()  # as Mistral's are
                for i, call in enumerate(calls)
            ]
        turn = AgentTurn(asked, completion, text, message, list(found), fields is not None, (written, kept))
        usage = {"prompt_tokens": (p := len(asked.ids)), "completion_tokens": len(ids), "total_tokens": p + len(ids)}
        return turn, Said(message, "tool_calls" if calls else completion.finish_reason, usage)

    def begin(self, ask: Ask, ids: list[int]) -> str:
        """Of what is being sampled the text that will stay, whatever follows: a stop or a character may have begun, or
        a part that is no text."""
        if self._without_calls.reads_parts:
            return ""
        text = self.decode([ids])[0].rstrip("\ufffd")
        return text[: max(0, len(text) - max(map(len, ask.stops), default=1) + 1)]
