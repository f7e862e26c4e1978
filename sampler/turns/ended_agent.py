"""Makes a completion of the turns of an agent that has ended.

The turns are sorted by their tokens, so that each turn follows the turn with which it shares the
longest prefix: extensions first, then forks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from common.types import Failure, Prompt
from environments import Done, Message
from sampler.engine.completions import Completion
from sampler.turns.chat import AgentTurn, RenderedRequest
from sampler.turns.episode import Episode, shared
from sampler.turns.sampled import Missing

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
        """Joins all turns in one completion, a tree in which a turn may fork from an earlier one.

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


def with_common_prompt(
    prompt: Prompt, ended: Sequence[EndedAgent | Missing], longest_prompt: int, limit: int
) -> tuple[Prompt, Sequence[Completion | Missing]]:
    """Returns the prompt that the rollouts have in common, and their completions after it.

    A rollout whose first prompt begins with another token than most of them is missing.
    longest_prompt and limit: the most tokens of a prompt and of a completion.
    """
    firsts = [one.first for one in ended if isinstance(one, EndedAgent)]
    if not firsts:
        return prompt, [one for one in ended if isinstance(one, Missing)]
    [(begin, _)] = Counter(int(first[0]) for first in firsts).most_common(1)
    firsts = [first for first in firsts if first[0] == begin]
    length = longest_prompt
    for first in firsts:
        length = min(length, shared(firsts[0], first))
    prompt_ids = firsts[0][:length]
    completions = [_after_prompt(one, prompt_ids, limit) for one in ended]
    return replace(prompt, token_ids=prompt_ids), completions


def _after_prompt(ended: EndedAgent | Missing, prompt_ids: Ids, limit: int) -> Completion | Missing:
    """Returns a rollout as a completion of its group's prompt."""
    if isinstance(ended, Missing):
        return ended
    if ended.first[0] != prompt_ids[0]:
        return Missing("its first prompt has no token in common with those of its group")
    completion = ended.played(prompt_ids, limit)
    if completion is None:
        return Missing(
            "its first prompt differs from those of its group, and with it the first answer "
            f"exceeds sampler.max_completion_length {limit}"
        )
    return completion
