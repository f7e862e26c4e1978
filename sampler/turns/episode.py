"""The tokens of a rollout of several turns, its limits, and the completion that it becomes.

    prompt ─► turn ─► observation ─► turn ─► … ─► turn
              sampled  environment   sampled       sampled

An observation that no turn follows is not part of the completion, because its tokens would have no
use. The prompt of a turn may differ from the tokens so far, for example if a template drops old
thoughts. The sequence then forks at the first difference (`Episode.asked`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.types import FinishReason, Forks, Rollout, sequences
from environments import Done, Message, Turn, conversation
from sampler.engine.completions import Completion, SamplingParams
from sampler.prompts.dataset import sampling_seed

EpisodePart = Completion | NDArray[np.int32]  # a turn, or the token ids of an observation after one


@dataclass(frozen=True)
class Episode:
    """A rollout of several turns that has not ended yet."""

    max_turns: int
    max_tokens: int  # limit for all turns and observations together
    parts: tuple[EpisodePart, ...] = ()
    replies: tuple[tuple[str, Turn | Done | None], ...] = ()  # (text, reply to it) of each turn
    seconds: float = 0.0  # time spent in the environment
    finish_reason: FinishReason = "stop"
    rewards: tuple[tuple[int, float], ...] = ()  # (turn, its reward), the one at the end included
    state: Mapping[str, Any] = field(default_factory=dict)  # attributes of the ended environment
    forks: Forks = ()  # as Rollout.forks

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Returns the sampled and observed tokens in their order, [C]."""
        nothing: NDArray[np.int32] = np.array([], np.int32)
        return np.concatenate([nothing, *map(_ids, self.parts)]).astype(np.int32)

    def sequence(self, prompt_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the tokens that the next token follows, [K]: all of them, or what forks kept."""
        token_ids = self.token_ids
        prompt_and_completion = np.concatenate([prompt_ids, token_ids])
        positions = sequences(len(prompt_ids), len(token_ids), self.forks)[-1]
        return prompt_and_completion[positions]

    def said(self) -> list[tuple[str, list[Message], NDArray[np.int32]]]:
        """Returns (text, messages of the environment's reply, sampled ids) of each turn."""
        said = []
        for (text, reply), turn in zip(self.replies, _turns(self.parts), strict=True):
            messages: list[Message] = []
            if reply is not None:
                messages = reply.messages
            said.append((text, messages, turn.token_ids))
        return said

    @property
    def num_turns(self) -> int:
        """Returns the number of turns that the model has had."""
        return len(self.replies)

    def params(self, first: SamplingParams, rollout: int) -> SamplingParams:
        """Returns the next turn's sampling parameters.

        first: those of the prompt. rollout: the number of the rollout in its group. The first turn
        has the seed of a run of single turns, which is the prompt's seed + rollout.
        """
        seed = first.seed
        if seed is not None:
            seed += rollout
            if self.num_turns > 0:
                seed = sampling_seed(seed, self.num_turns)
        room = self.max_tokens - len(self.token_ids)
        return replace(first, num_completions=1, seed=seed, max_tokens=room)

    def sampled(self, turn: Completion, text: str) -> Episode:
        """Returns the episode with a turn appended, which may have used up the tokens."""
        return replace(
            self,
            parts=(*self.parts, turn),
            replies=(*self.replies, (text, None)),
            finish_reason=turn.finish_reason,
        )

    def answered(self, reply: Turn | Done) -> Episode:
        """Returns the episode with the environment's reply to the last turn, or to its end."""
        *earlier, (text, before) = self.replies
        last = reply
        if isinstance(before, Turn):
            last = before
        rewards = self.rewards
        if reply.reward is not None:
            rewards = (*rewards, (self.num_turns - 1, reply.reward))
        state = self.state
        if isinstance(reply, Done):
            state = reply.state
        return replace(
            self,
            replies=(*earlier, (text, last)),
            seconds=self.seconds + reply.seconds,
            rewards=rewards,
            state=state,
        )

    def asked(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> Episode:
        """Returns the episode before a turn that follows exactly `token_ids`, prompt included.

        It extends the present sequence, or forks from it after the common prefix. The last of
        `token_ids` is always observed, because a turn follows an observation. It ends as `observed`
        does.
        """
        present = self.sequence(prompt_ids)
        kept = shared(present, token_ids[:-1])
        fork: Forks = ()
        if kept < len(present):
            fork = ((len(self.token_ids), kept),)
        return self.observed(token_ids[kept:], fork)

    def observed(self, token_ids: NDArray[np.int32], fork: Forks = ()) -> Episode:
        """Returns the episode with the observation that the next turn follows.

        If no turn fits after it, the observation is left out and finish_reason is "length".
        """
        fits = len(self.token_ids) + len(token_ids) < self.max_tokens
        if self.num_turns >= self.max_turns or not fits:
            return replace(self, finish_reason="length")
        return replace(self, parts=(*self.parts, token_ids), forks=self.forks + fork)

    def played(self) -> Completion:
        """Returns the completion that is trained on, in which observed tokens have log-prob 0."""
        replies = [reply for _, reply in self.replies if reply is not None]
        rewards = self._rewards_by_turn()
        turn_rewards: tuple[float, ...] = ()
        if any(rewards[:-1]):
            turn_rewards = tuple(rewards)
        environment_reward = None
        if self.rewards:
            environment_reward = math.fsum(rewards)
        return Completion(
            token_ids=self.token_ids,
            logprobs=np.concatenate([_logprobs(part) for part in self.parts]),
            finish_reason=self.finish_reason,
            sampling_mask=_joined_masks(self.parts),
            incomplete_support=sum(turn.incomplete_support for turn in _turns(self.parts)),
            observed=self._observed_spans(),
            turns=self.num_turns,
            tool_calls=sum(reply.num_calls for reply in replies),
            tool_errors=sum(reply.num_call_errors for reply in replies),
            environment_s=self.seconds,
            routing=_joined_routing(self.parts, self.forks),
            forks=self.forks,
            messages=tuple(conversation(self.replies)),
            environment_reward=environment_reward,
            environment_state=self.state,
            turn_rewards=turn_rewards,
        )

    def _rewards_by_turn(self) -> list[float]:
        """Returns the sum of the environment's rewards for each turn."""
        given: list[list[float]] = [[] for _ in range(self.num_turns)]
        for turn, reward in self.rewards:
            given[turn].append(reward)
        return [math.fsum(rewards) for rewards in given]

    def _observed_spans(self) -> tuple[tuple[int, int], ...]:
        """Returns the half-open spans of token_ids that the environment wrote."""
        spans = []
        start = 0
        for part in self.parts:
            end = start + len(_ids(part))
            if not isinstance(part, Completion):
                spans.append((start, end))
            start = end
        return tuple(spans)


def as_rollout(
    completion: Completion,
    ref_logprobs: NDArray[np.float32] | None,
    rewards: Mapping[str, float],
    reward: float,
    prompt: int = 0,
    weight: float = 1.0,
) -> Rollout:
    """Returns the Rollout that is sent.

    ref_logprobs: [C] of the reference; those of observed tokens mean nothing, and are set to 0.
    prompt: the number of its tokens. weight: of the environment's reward among the rewards.
    """
    if ref_logprobs is not None and completion.observed:
        ref_logprobs = ref_logprobs.copy()
        for start, end in completion.observed:
            ref_logprobs[start:end] = 0.0
    routing = completion.routing
    if routing is not None:
        routing = routing[prompt:]
    turn_rewards: tuple[float, ...] = ()
    if weight:
        turn_rewards = tuple(weight * given for given in completion.turn_rewards)
    return Rollout(
        completion_ids=completion.token_ids,
        old_logprobs=completion.logprobs,
        ref_logprobs=ref_logprobs,
        rewards=rewards,
        reward=reward,
        finish_reason=completion.finish_reason,
        sampling_mask=completion.sampling_mask,
        observed=completion.observed,
        turns=completion.turns,
        tool_calls=completion.tool_calls,
        tool_errors=completion.tool_errors,
        environment_s=completion.environment_s,
        version_spans=completion.version_spans,
        routing=routing,
        turn_rewards=turn_rewards,
        forks=completion.forks,
        failure=completion.failure,
    )


def shared(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Returns the length of the common prefix of two token sequences."""
    length = min(len(one), len(other))
    differences = np.flatnonzero(one[:length] != other[:length])
    if len(differences):
        return int(differences[0])
    return length


def _turns(parts: Sequence[EpisodePart]) -> list[Completion]:
    return [part for part in parts if isinstance(part, Completion)]


def _ids(part: EpisodePart) -> NDArray[np.int32]:
    if isinstance(part, Completion):
        return part.token_ids
    return part


def _logprobs(part: EpisodePart) -> NDArray[np.float32]:
    if isinstance(part, Completion):
        return part.logprobs
    return np.zeros(len(part), np.float32)


def _joined_masks(parts: Sequence[EpisodePart]) -> NDArray[np.int32] | None:
    """Returns the sampling masks of all parts as one, [C, K], filled with -1; None without masks.

    An observed token is its own only choice.
    """
    masks = []
    for part in parts:
        if not isinstance(part, Completion):
            masks.append(part[:, None])
        elif part.sampling_mask is None:
            return None
        else:
            masks.append(part.sampling_mask)
    width = max(mask.shape[1] for mask in masks)
    padded = []
    for mask in masks:
        missing = width - mask.shape[1]
        padded.append(np.pad(mask, ((0, 0), (0, missing)), constant_values=-1))
    return np.concatenate(padded).astype(np.int32)


def _joined_routing(parts: Sequence[EpisodePart], forks: Forks) -> NDArray[Any] | None:
    """Returns each token's experts in the turn that first ran it; None if they are not recorded.

    Later turns run again the tokens after the last block that the prefix cache has as a whole. The
    last token before a fork was never run, and the value in its position is never read.
    """
    joined: list[NDArray[Any]] = []
    num_known = 0  # tokens of the present sequence whose experts are in `joined`
    kept_at = dict(forks)
    end = 0
    for part in parts:
        if end in kept_at:
            joined.append(joined[0][:1])
            num_known = kept_at.pop(end)
        if isinstance(part, Completion):
            if part.routing is None:
                return None
            joined.append(part.routing[num_known:])
            num_known = len(part.routing)
        end += len(_ids(part))
    if not joined:
        return None
    return np.concatenate(joined)
