"""Prompts on their way to completions by agents, which own their loop: each asks the model when and what it likes.

    start ─► Ask ─► turn ─► Said ─► Ask ─► … ─► Done or failed ─► Sampled
             pool   engine  pool

Requests of one rollout may stand side by side. At its end the turns are put in the order of their tokens, so that each
comes behind the one with which it has most in common: extensions first, then forks.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.types import Prompt
from environments import Done, Failed
from environments.chat_completions import Ask, Said
from sampler.chat import AgentTurn, Asked, Chat
from sampler.completions import Completion, SamplingParams
from sampler.dataset import sampling_seed
from sampler.episode import Episode, Played, shared
from sampler.episodes import MAX_REASON, Episodes, RunningGroup, Sampled

Ids = NDArray[np.int32]


class OverLimit(Exception):
    """A limit of the rollout, behind which it gets no more turns."""


@dataclass
class AgentRollout:
    """On its way."""

    turns: list[AgentTurn] = field(default_factory=list)  # in the order of their answers
    running: dict[int, Asked] = field(default_factory=dict)  # in the engine, by the id of the Ask
    first: Ids | None = None  # the prompt: of the requests before the first answer the longest that may be one
    spent: int = 0  # tokens behind the prompt: of turns, and of what they follow
    refusal: str = ""  # the first, at a limit
    num_calls: int = 0
    num_call_errors: int = 0

    @property
    def asked(self) -> list[Asked]:
        return [*(turn.asked for turn in self.turns), *self.running.values()]


class Agents(Episodes):
    """Completions of agents. The key of a turn in the engine is (prompt, (rollout, Ask))."""

    _template: Chat

    def start(self, key: Hashable, prompt: Prompt, params: SamplingParams) -> None:
        super().start(key, prompt, params)
        self._groups[key].running |= {i: AgentRollout() for i in range(params.num_completions)}

    def abort(self, keys: Collection[Any]) -> None:
        for key in keys:
            for i in [*self._groups[key].running]:
                self._end(key, i)
                self._pool.close((key, i))
            del self._groups[key]

    def _end(self, key: Any, i: int) -> AgentRollout:
        """Nobody waits for what it has asked any more."""
        rollout: AgentRollout = self._groups[key].running.pop(i)
        self._engine.abort({(key, (i, number)) for number in rollout.running})
        return rollout

    def _answered(self, key: Any, i: int, reply: Any) -> None:
        group = self._groups[key]
        if isinstance(reply, Ask):
            self._ask(key, i, group, reply)
            return
        rollout = self._end(key, i)
        wants_reward = "environment" in self._config.rewards.reward_funcs
        if isinstance(reply, Failed) and reply.kind == "error" and rollout.refusal:
            reply = Done(seconds=reply.seconds)  # it raised because it was refused: truncated
        if isinstance(reply, Done) and reply.reward is None and wants_reward and rollout.refusal:
            reply = replace(reply, reward=0.0)  # as of an environment without get_reward
        if isinstance(reply, Failed):
            group.failures[i] = reply.reason[:MAX_REASON]
        elif not rollout.turns:
            group.failures[i] = f"the agent has ended without a completion. {rollout.refusal}".strip()[:MAX_REASON]
        elif reply.reward is None and wants_reward:
            group.failures[i] = "the agent gave no reward, and rewards.reward_funcs has environment"
        else:
            group.ended[i] = rollout, reply

    def _ask(self, key: Any, i: int, group: RunningGroup, ask: Ask) -> None:
        rollout: AgentRollout = group.running[i]
        try:
            asked = self._template.asked(ask, rollout.turns)
            params = self._params(group, i, ask, asked)
            self._engine.submit((key, (i, ask.id)), asked.ids, params, ())
            rollout.running[ask.id] = asked
        except Exception as error:  # template or engine may stumble over messages that an agent made
            if isinstance(error, OverLimit):
                rollout.refusal = rollout.refusal or str(error)
            self._pool.tell((key, i), Said(ask.id, error=str(error)))

    def _params(self, group: RunningGroup, i: int, ask: Ask, asked: Asked) -> SamplingParams:
        """Raises OverLimit."""
        rollout: AgentRollout = group.running[i]
        room, seed = self._room(group, rollout, asked), group.params.seed
        if seed is not None:  # of what is asked and not of when: requests side by side come in any order
            same = sum(np.array_equal(asked.ids, other.ids) for other in rollout.asked)
            told = hashlib.blake2b(f"{same} {ask.seed} {asked.ids.tolist()}".encode(), digest_size=4)
            seed = sampling_seed(seed + i, int.from_bytes(told.digest(), "little"))
        max_tokens, stop = min(room, ask.max_tokens or room), tuple(ask.stop)
        return replace(group.params, num_completions=1, seed=seed, max_tokens=max_tokens, stop=stop)

    def _room(self, group: RunningGroup, rollout: AgentRollout, asked: Asked) -> int:
        """For its completion. Raises OverLimit."""
        turns, longest = self._config.rollout.max_turns, self._config.data.max_prompt_length
        tokens = group.params.max_tokens
        if len(rollout.asked) >= turns:
            raise OverLimit(f"the rollout has had its {turns} turns (rollout.max_turns)")
        if not rollout.asked and len(asked.ids) > longest:
            raise OverLimit(f"a first prompt of {len(asked.ids)} tokens, more than data.max_prompt_length {longest}")
        known = [*(turn.ids for turn in rollout.turns), *(other.ids for other in rollout.running.values())]
        # a turn stands behind at least one token of its own (Episode.asked)
        observed = len(asked.ids) - max(shared(asked.ids[:-1], one) for one in known) if known else 0
        if (room := tokens - rollout.spent - observed) < 1:
            raise OverLimit(f"the rollout has no room left in {tokens} tokens (sampler.max_completion_length)")
        if not rollout.turns and len(asked.ids) <= longest:
            firsts = [asked.ids] if rollout.first is None else [rollout.first, asked.ids]
            rollout.first = max(firsts, key=lambda ids: (len(ids), ids.tolist()))
        rollout.spent += observed
        return room

    def _sampled(self, key: Any, i: Any, completion: Completion) -> None:
        """Of requests side by side each may take what is left, so the last of them may have to be cut."""
        i, number = i
        rollout, limit = self._groups[key].running[i], self._groups[key].params.max_tokens
        completion = completion.cut(limit - rollout.spent)
        rollout.spent += len(completion.token_ids)
        if rollout.spent >= limit and completion.finish_reason == "length":
            rollout.refusal = rollout.refusal or f"used up its {limit} tokens (sampler.max_completion_length)"
        asked = rollout.running.pop(number)
        if not len(completion.token_ids):
            self._pool.tell((key, i), Said(number, error=rollout.refusal))
            return
        turn, said, calls, errors = self._template.said(asked, completion)
        rollout.turns.append(turn)
        rollout.num_calls, rollout.num_call_errors = rollout.num_calls + calls, rollout.num_call_errors + errors
        self._pool.tell((key, i), said)

    def _over(self, group: RunningGroup) -> Sampled:
        """The prompt is what the first requests of all begin with: the same, unless agents make another each time."""
        if not group.ended:
            return group.sampled()
        [(begin, _)] = Counter(int(rollout.first[0]) for rollout, _ in group.ended.values()).most_common(1)
        for i in [i for i, (rollout, _) in group.ended.items() if rollout.first[0] != begin]:
            del group.ended[i]
            group.failures[i] = "its first prompt has no token in common with those of its group"
        firsts = [rollout.first for rollout, _ in group.ended.values()]
        prompt_ids, limit = firsts[0][: min(shared(firsts[0], first) for first in firsts)], group.params.max_tokens
        for i, (rollout, done) in sorted(group.ended.items()):
            group.ended[i] = played(rollout, done, prompt_ids)
            if (length := len(group.ended[i].token_ids)) > limit:
                del group.ended[i]
                group.failures[i] = (
                    f"its first prompt differs from those of its group, and with it are {length} tokens, more than "
                    f"sampler.max_completion_length {limit}"
                )
        group.prompt = replace(group.prompt, token_ids=prompt_ids)
        return group.sampled()


def played(rollout: AgentRollout, done: Done, prompt_ids: Ids) -> Played:
    """The rollout as it trains. Each turn comes behind the one whose tokens are most like its own."""
    first = rollout.first
    assert first is not None, "it has turns"

    def place(turn: AgentTurn) -> tuple[bool, list[int]]:
        return shared(first, turn.asked.ids) < len(first), turn.ids.tolist()

    episode = Episode(len(rollout.turns), sum(len(turn.ids) for turn in rollout.turns) + 1)
    for turn in sorted(rollout.turns, key=place):
        if episode.parts or len(turn.asked.ids) > len(prompt_ids):
            episode = episode.asked(prompt_ids, turn.asked.ids)
        episode = episode.sampled(turn.completion, turn.text)
    last = rollout.turns[-1].history
    known = len(rollout.turns[0].asked.ask.messages)
    return replace(
        episode.played(),
        finish_reason="length" if rollout.refusal else "stop",
        messages=(*last[known if last[:known] == rollout.turns[0].asked.ask.messages else 0 :], *done.messages),
        environment_reward=done.reward,
        tool_calls=rollout.num_calls,
        tool_errors=rollout.num_call_errors,
        environment_s=done.seconds,
    )
