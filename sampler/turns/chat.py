"""Translates between an agent's chat messages and its model's tokens: a TurnTemplate that gets all messages each time.

An assistant message that repeats an answer of this rollout keeps that turn's sampled ids if its text is unchanged.
"""

import functools
import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config import Config
from environments import Message
from environments.chat_completions import ChatRequest, ModelAnswer
from environments.tools import NO_CALLS, Call
from sampler.engine.completions import Completion
from sampler.prompts.chat_template import read_template
from sampler.prompts.prompts import turn_prefix_of
from sampler.turns.task import Decode
from sampler.turns.tool_calls import CallReader, parser_of
from sampler.turns.turns import TurnTemplate


@dataclass(frozen=True, eq=False)
class RenderedRequest:
    """A request as the model sees it."""

    ask: ChatRequest
    text: str
    ids: NDArray[np.int32]  # [P]
    turn_prefix: str  # beginning of the model's turn that the text already contains


@dataclass(frozen=True)
class AgentTurn:
    """A sampled turn of an agent's rollout: the request and its answer."""

    asked: RenderedRequest
    completion: Completion
    text: str  # decoded completion, without `asked.turn_prefix`
    message: Message  # as it was sent to the agent
    calls: list[Call]
    is_parted: bool  # its message has fields for the chat template, not the plain text
    written: tuple[str, NDArray[np.int32]]  # (text, ids) as TurnTemplate.written takes them

    @property
    def ids(self) -> NDArray[np.int32]:
        return np.concatenate([self.asked.ids, self.completion.token_ids])

    def is_repeated_by(self, message: Message) -> bool:
        """Returns whether a message is this turn's answer; clients may drop fields that OpenAI's API lacks."""
        return message in (self.message, {n: v for n, v in self.message.items() if n != "reasoning_content"})


@dataclass(frozen=True)
class Chat:
    """Renders an agent's requests with the run's turn template and reads its turns; `decode` decodes as rewards do."""

    tokenizer: Any
    config: Config
    template: TurnTemplate
    decode: Decode

    def asked(self, ask: ChatRequest, turns: Collection[AgentTurn]) -> RenderedRequest:
        """Returns the request as text and ids, given earlier `turns`. Raises UserError or ValueError if impossible."""
        if ask.reads_calls:
            self._reader.start(ask.tools or [])
        messages, sampled = list(ask.messages), {}
        for i, message in enumerate(ask.messages):
            equal = [turn for turn in turns if turn.is_repeated_by(message)]  # of several, the one at this position
            if turn := max(equal, key=lambda t: t.asked.ask.messages == ask.messages[:i], default=None):
                as_text: Message = {"role": "assistant", "content": turn.asked.turn_prefix + turn.text}
                messages[i], (written, ids) = turn.message if turn.is_parted else as_text, turn.written
                goes_on = i + 1 == len(messages) and self.decode([ids[-1:].tolist()]) == [""]  # without the end token
                sampled[i] = written, ids[:-1] if goes_on else ids
        own = {"tools": ask.tools, "arguments": ask.chat_template_kwargs or {}}
        template = replace(self.template, render=functools.partial(self.template.render, **own))
        text, ids = template.written(messages, sampled, [(turn.asked.text, turn.asked.ids) for turn in turns])
        return RenderedRequest(ask, text, ids, turn_prefix_of(text, messages))

    @functools.cached_property
    def _reader(self) -> CallReader:
        """Returns the reader of tool calls. Raises UserError if the chat template writes none."""
        template = self.tokenizer.get_chat_template(read_template(self.config.prompt.chat_template), [{}])
        parser = parser_of(template, self.config.rollout.tool_parser)
        return CallReader(self.tokenizer, parser, self.template.splits_thoughts)

    @functools.cached_property
    def _without_calls(self) -> CallReader:
        return CallReader(self.tokenizer, splits_thoughts=self.template.splits_thoughts)

    def said(self, asked: RenderedRequest, completion: Completion) -> tuple[AgentTurn, ModelAnswer]:
        ask, ids = asked.ask, completion.token_ids.tolist()
        [text] = self.decode([ids])
        turn_prefix, stays = asked.turn_prefix, len(self.begin(ask, ids[:-1]))

        def until_a_stop(said: str) -> str:
            return said[: min((at for stop in ask.stops if (at := said.find(stop, stays)) >= 0), default=len(said))]

        content = until_a_stop(text)  # the last token may contain text after the stop
        reader = self._reader if ask.reads_calls else self._without_calls
        fields, written, kept = reader.parts(text, turn_prefix, completion.token_ids)
        is_text = fields is None and not ask.reads_calls
        around, found = NO_CALLS if is_text else reader(turn_prefix + content, turn_prefix, ids, ask.tools or [])
        calls = [call for call in found if not call.problem][: 1 if ask.parallel_tool_calls is False else None]
        message: Message = {"role": "assistant", "content": content, **(fields or {})}
        if calls or fields is not None:
            message["content"] = until_a_stop(reader.words(around).removeprefix(turn_prefix))
        if calls:
            made_of = f"{asked.ids.tolist()} {ids}".encode()
            message["tool_calls"] = [
                {"id": hashlib.blake2b(made_of, salt=b"%d" % i).hexdigest()[:9]}
                | call.for_message()  # 9 characters, as Mistral's ids
                for i, call in enumerate(calls)
            ]
        turn = AgentTurn(asked, completion, text, message, list(found), fields is not None, (written, kept))
        usage = {"prompt_tokens": (p := len(asked.ids)), "completion_tokens": len(ids), "total_tokens": p + len(ids)}
        return turn, ModelAnswer(message, "tool_calls" if calls else completion.finish_reason, usage)

    def begin(self, ask: ChatRequest, ids: list[int]) -> str:
        """Returns the beginning of an unfinished turn's text, which no later token can change.
        It omits what may begin a stop text or a character, and is "" if the turn may have parts that are not text."""
        if self._without_calls.reads_parts:
            return ""
        text = self.decode([ids])[0].rstrip("\ufffd")
        return text[: max(0, len(text) - max(map(len, ask.stops), default=1) + 1)]
