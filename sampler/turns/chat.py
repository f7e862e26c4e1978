"""Translates between an agent's chat messages and its model's tokens.

The chat template gets all messages of each request. An assistant message that repeats an answer of
this rollout keeps the sampled ids of that turn if its text is unchanged.
"""

import functools
import hashlib
from collections.abc import Collection, Sequence
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
from sampler.turns.call_formats import parser_of
from sampler.turns.task import Decode
from sampler.turns.tool_calls import CallReader
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
    calls: list[Call]  # those that could not be read included
    is_parted: bool  # whether its message has fields for the chat template, not the plain text
    written: tuple[str, NDArray[np.int32]]  # (text, ids) as TurnTemplate.written takes them

    @property
    def ids(self) -> NDArray[np.int32]:
        """Returns the tokens of the request and of the answer."""
        return np.concatenate([self.asked.ids, self.completion.token_ids])

    def is_repeated_by(self, message: Message) -> bool:
        """Returns whether a message is this turn's answer.

        Clients may drop the reasoning_content, because OpenAI's API lacks that field.
        """
        without_reasoning = dict(self.message)
        without_reasoning.pop("reasoning_content", None)
        return message in (self.message, without_reasoning)


@dataclass(frozen=True)
class Chat:
    """Renders an agent's requests with the run's turn template, and reads its turns."""

    tokenizer: Any
    config: Config
    template: TurnTemplate
    decode: Decode  # as for rewards

    def asked(self, ask: ChatRequest, turns: Collection[AgentTurn]) -> RenderedRequest:
        """Returns the request as text and ids, given earlier `turns`.

        Raises UserError or ValueError if the template does not take the messages.
        """
        if ask.reads_calls:
            self._reader.start(ask.tools or [])
        messages = list(ask.messages)
        sampled = {}
        for i, message in enumerate(ask.messages):
            turn = _repeated_turn(message, ask.messages[:i], turns)
            if turn is None:
                continue
            if turn.is_parted:
                messages[i] = turn.message
            else:
                content = turn.asked.turn_prefix + turn.text
                messages[i] = {"role": "assistant", "content": content}
            written, ids = turn.written
            is_last = i + 1 == len(messages)
            if is_last and self.decode([ids[-1:].tolist()]) == [""]:
                ids = ids[
                    :-1
                ]  # the model goes on with this turn, so without the token that ends it
            sampled[i] = (written, ids)
        arguments = ask.chat_template_kwargs or {}
        render = functools.partial(self.template.render, tools=ask.tools, arguments=arguments)
        template = replace(self.template, render=render)
        known = [(turn.asked.text, turn.asked.ids) for turn in turns]
        text, ids = template.written(messages, sampled, known)
        return RenderedRequest(ask, text, ids, turn_prefix_of(text, messages))

    @functools.cached_property
    def _reader(self) -> CallReader:
        """Returns the reader of tool calls. Raises UserError if the chat template writes none."""
        given = read_template(self.config.prompt.chat_template)
        template = self.tokenizer.get_chat_template(given, [{}])
        parser = parser_of(template, self.config.rollout.tool_parser)
        return CallReader(self.tokenizer, parser, self.template.splits_thoughts)

    @functools.cached_property
    def _without_calls(self) -> CallReader:
        return CallReader(self.tokenizer, splits_thoughts=self.template.splits_thoughts)

    def said(self, asked: RenderedRequest, completion: Completion) -> tuple[AgentTurn, ModelAnswer]:
        """Returns a request's turn, and the answer that the agent gets."""
        ask = asked.ask
        ids = completion.token_ids.tolist()
        [text] = self.decode([ids])
        turn_prefix = asked.turn_prefix
        num_sent = len(self.begin(ask, ids[:-1]))
        # The last token may contain text after the stop.
        content = _until_a_stop(text, ask.stops, num_sent)
        reader = self._without_calls
        if ask.reads_calls:
            reader = self._reader
        fields, written, kept = reader.parts(text, turn_prefix, completion.token_ids)
        around, found = NO_CALLS
        if fields is not None or ask.reads_calls:
            around, found = reader(turn_prefix + content, turn_prefix, ids, ask.tools or [])
        calls = [call for call in found if not call.problem]
        if ask.parallel_tool_calls is False:
            calls = calls[:1]
        message: Message = {"role": "assistant", "content": content, **(fields or {})}
        if calls or fields is not None:
            words = reader.words(around).removeprefix(turn_prefix)
            message["content"] = _until_a_stop(words, ask.stops, num_sent)
        finish_reason: str = completion.finish_reason
        if calls:
            finish_reason = "tool_calls"
            message["tool_calls"] = _with_ids(calls, f"{asked.ids.tolist()} {ids}")
        turn = AgentTurn(
            asked,
            completion,
            text,
            message,
            calls=list(found),
            is_parted=fields is not None,
            written=(written, kept),
        )
        usage = {
            "prompt_tokens": len(asked.ids),
            "completion_tokens": len(ids),
            "total_tokens": len(asked.ids) + len(ids),
        }
        return turn, ModelAnswer(message, finish_reason, usage)

    def begin(self, ask: ChatRequest, ids: list[int]) -> str:
        """Returns the beginning of an unfinished turn's text, which no later token can change.

        It omits what may begin a stop text or a character. It is "" if the turn may have parts that
        are not text.
        """
        if self._without_calls.reads_parts:
            return ""
        text = self.decode([ids])[0].rstrip("\ufffd")
        longest_stop = max((len(stop) for stop in ask.stops), default=1)
        return text[: max(0, len(text) - longest_stop + 1)]


def _repeated_turn(
    message: Message, before: Sequence[Message], turns: Collection[AgentTurn]
) -> AgentTurn | None:
    """Returns the turn whose answer this message repeats, or None.

    Of several such turns it is the turn whose request had the messages `before`.
    """
    repeated = [turn for turn in turns if turn.is_repeated_by(message)]
    for turn in repeated:
        if turn.asked.ask.messages == before:
            return turn
    if repeated:
        return repeated[0]
    return None


def _until_a_stop(text: str, stops: Sequence[str], start: int) -> str:
    """Returns the text up to the first stop text that begins at `start` or later."""
    end = len(text)
    for stop in stops:
        position = text.find(stop, start)
        if position >= 0:
            end = min(end, position)
    return text[:end]


def _with_ids(calls: Sequence[Call], content: str) -> list[Message]:
    """Returns tool calls as messages have them, with ids of nine characters, as Mistral's have.

    content: what the ids are made of.
    """
    messages = []
    for i, call in enumerate(calls):
        digest = hashlib.blake2b(content.encode(), salt=b"%d" % i).hexdigest()
        messages.append({"id": digest[:9]} | call.for_message())
    return messages
