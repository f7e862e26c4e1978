"""Makes a completion of the turns of an agent that has ended.

The turns are sorted by their tokens, so that each turn follows the turn with which it shares the
longest prefix: extensions first, then forks.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from common.types import Failure
from environments import Done, Message
from sampler.engine.completions import Completion
from sampler.turns.chat import AgentTurn, RenderedRequest
from sampler.turns.episode import Episode, shared

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class EndedAgent:
    """The rollout of an agent that has ended, with at least one turn."""

    turns: tuple[AgentTurn, ...]  # in the order of their requests
    firsts: tuple[RenderedRequest, ...]  # the requests made before any answer was read
    was_refused: bool  # at a limit
    done: Done
    failure: Failure | None  # why it failed

    @property
    def first(self) -> Ids:
        """Returns the rollout's prompt: the longest of its first requests that have a turn."""
        asked = [turn.asked for turn in self.turns]
        firsts = [request.ids for request in self.firsts if request in asked]
        if not firsts:
            firsts = [asked[0].ids]
        return max(firsts, key=lambda ids: (len(ids), ids.tolist()))

    def played(self, prompt_ids: Ids, limit: int) -> Completion | None:
        """Returns the completion without the last tokens that exceed the limit; None if none fits.

        It may be longer than the tokens that the rollout was allowed, because the tokens in which
        its first prompt differs from those of its group belong to the completion, too.
        """
        rollout = self
        is_cut = False
        while rollout.turns:
            completion = rollout._whole(prompt_ids)
            excess = len(completion.token_ids) - limit
            if excess <= 0:
                if is_cut:
                    completion = replace(completion, finish_reason="length")
                if self.failure is not None:
                    completion = completion.failed(self.failure)
                return completion
            is_cut = True
            *turns, last = rollout.turns
            length = len(last.completion.token_ids) - excess
            if length > 0:
                turns.append(replace(last, completion=last.completion.cut(length)))
            rollout = replace(rollout, turns=tuple(turns))
        return None

    def _whole(self, prompt_ids: Ids) -> Completion:
        """Returns the completion of all turns.

        Each turn follows the turn with which it shares the longest prefix.
        """
        turns = self.turns
        first = self.first

        def place(turn: AgentTurn) -> tuple[bool, list[int]]:
            return shared(first, turn.asked.ids) < len(first), turn.ids.tolist()

        episode = Episode(len(turns), sum(len(turn.ids) for turn in turns) + 1)
        for turn in sorted(turns, key=place):
            if episode.parts or len(turn.asked.ids) > len(prompt_ids):
                episode = episode.asked(prompt_ids, turn.asked.ids)
            episode = episode.sampled(turn.completion, turn.asked.turn_prefix + turn.text)
        calls = [call for turn in turns for call in turn.calls]
        return replace(
            episode.played(),
            finish_reason="length" if self.was_refused else "stop",
            messages=(*self._messages(), *self.done.messages),
            environment_reward=self.done.reward,
            tool_calls=len(calls),
            tool_errors=sum(bool(call.problem) for call in calls),
            environment_s=self.done.seconds,
        )

    def _messages(self) -> list[Message]:
        """Returns the last request and its answer, without the messages of the first request."""
        last = self.turns[-1]
        messages = [*last.asked.ask.messages, last.message]
        begin = self.turns[0].asked.ask.messages
        if messages[: len(begin)] == begin:
            return messages[len(begin) :]
        return messages
