"""Defines a rollout of several turns: its tokens so far, its limits, and the Completion that it becomes, without I/O.

    prompt ─► turn ─► observation ─► turn ─► … ─► turn
              sampled  environment   sampled       sampled

An observation that no turn follows is not part of the completion: its tokens would have no use. A turn may be requested
after other tokens than the present ones: at the first difference the sequence forks (`Episode.asked`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.types import Failure, FinishReason, Forks, Rollout, sequences
from environments import Done, Message, Turn, conversation
from sampler.engine.completions import Completion, SamplingParams
from sampler.prompts.dataset import sampling_seed

EpisodePart = Completion | NDArray[np.int32]  # a turn, or the token ids of an observation after one
_SAME_IN_ROLLOUT = {f.name for f in fields(Completion)} & {f.name for f in fields(Rollout)}


@dataclass(frozen=True)
class PlayedCompletion(Completion):
    """A completion of several turns: token_ids are all sampled and observed tokens, without the prompt."""

    messages: tuple[Message, ...] = ()  # after the prompt, as reward functions get them
    environment_reward: float | None = None  # sum over all turns and the end
    environment_state: Mapping[str, Any] = field(default_factory=dict)  # the environment's public attributes at the end
    turn_rewards: tuple[float, ...] = ()  # sum is environment_reward; () = all of it at the end

    def failed(self, failure: Failure) -> PlayedCompletion:
        """Returns the completion as one that failed: what the environment gave so far counts no more."""
        return replace(self, failure=failure, environment_reward=None, turn_rewards=())


@dataclass(frozen=True)
class Episode:
    """A rollout of several turns that has not ended yet."""

    max_turns: int
    max_tokens: int  # limit for all turns and observations together
    parts: tuple[EpisodePart, ...] = ()
    replies: tuple[tuple[str, Turn | Done | None], ...] = ()  # (text, environment's reply) of each turn
    seconds: float = 0.0  # time spent in the environment
    finish_reason: FinishReason = "stop"
    rewards: tuple[tuple[int, float], ...] = ()  # (turn, its reward), the one at the end included
    state: Mapping[str, Any] = field(default_factory=dict)  # the environment's public attributes at its end
    forks: Forks = ()  # as Rollout.forks

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Returns the sampled and observed tokens in their order, [C]."""
        return np.concatenate([np.array([], np.int32), *map(_ids, self.parts)]).astype(np.int32)

    def sequence(self, prompt_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the tokens that the next one follows, [K]: prompt and all after it, or what forks kept of that."""
        whole = np.concatenate([prompt_ids, self.token_ids])
        return whole[sequences(len(prompt_ids), len(self.token_ids), self.forks)[-1]]

    def said(self) -> list[tuple[str, list[Message], NDArray[np.int32]]]:
        """Returns (text, messages of the environment's reply, sampled ids) of each turn."""
        sampled = [part.token_ids for part in self.parts if isinstance(part, Completion)]
        answers = [reply.messages if reply else [] for _, reply in self.replies]
        return list(zip([text for text, _ in self.replies], answers, sampled, strict=True))

    @property
    def num_turns(self) -> int:
        return len(self.replies)

    def params(self, first: SamplingParams, rollout: int) -> SamplingParams:
        """Returns the next turn's sampling parameters. The first turn has a single-turn run's seed: seed + rollout."""
        seed = first.seed
        if seed is not None:
            seed = seed + rollout if self.num_turns == 0 else sampling_seed(seed + rollout, self.num_turns)
        room = self.max_tokens - len(self.token_ids)
        return replace(first, num_completions=1, seed=seed, max_tokens=room)

    def sampled(self, turn: Completion, text: str) -> Episode:
        """Returns the episode with a turn appended; if the turn has used up the tokens, finish_reason is "length"."""
        parts, replies = (*self.parts, turn), (*self.replies, (text, None))
        return replace(self, parts=parts, replies=replies, finish_reason=turn.finish_reason)

    def answered(self, reply: Turn | Done) -> Episode:
        """Returns the episode with the environment's reply to the last turn, or to its end."""
        *earlier, (text, before) = self.replies
        replies = (*earlier, (text, before if isinstance(before, Turn) else reply))
        given = () if reply.reward is None else ((self.num_turns - 1, reply.reward),)
        going = replace(self, replies=replies, seconds=self.seconds + reply.seconds, rewards=self.rewards + given)
        return replace(going, state=reply.state) if isinstance(reply, Done) else going

    def asked(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> Episode:
        """Returns the episode before a turn that follows exactly `token_ids`, prompt included.
        It extends the present sequence, or forks from it after the common prefix; the last of `token_ids` is always
        observed, because a turn follows an observation. It ends as `observed` does."""
        present = self.sequence(prompt_ids)
        kept = shared(present, token_ids[:-1])
        return self.observed(token_ids[kept:], () if kept == len(present) else ((len(self.token_ids), kept),))

    def observed(self, token_ids: NDArray[np.int32], fork: Forks = ()) -> Episode:
        """Returns the episode with the observation that the next turn follows, or ended if no turn fits after it."""
        fits = len(self.token_ids) + len(token_ids) < self.max_tokens
        if self.num_turns >= self.max_turns or not fits:
            return replace(self, finish_reason="length")
        return replace(self, parts=(*self.parts, token_ids), forks=self.forks + fork)

    def played(self) -> PlayedCompletion:
        """Returns the completion that is trained on: all tokens, with log-prob 0 for observed ones."""
        turns = [part for part in self.parts if isinstance(part, Completion)]
        replies = [reply for _, reply in self.replies if reply is not None]
        ends = np.cumsum([len(_ids(part)) for part in self.parts]).tolist()
        spans = zip([0, *ends], ends, self.parts, strict=False)
        by_turn = [math.fsum(reward for at, reward in self.rewards if at == turn) for turn in range(self.num_turns)]
        logprobs = [p.logprobs if isinstance(p, Completion) else np.zeros(len(p), np.float32) for p in self.parts]
        return PlayedCompletion(
            self.token_ids,
            np.concatenate(logprobs),
            self.finish_reason,
            _joined_masks(self.parts),
            sum(turn.incomplete_support for turn in turns),
            observed=tuple((start, end) for start, end, part in spans if not isinstance(part, Completion)),
            turns=self.num_turns,
            tool_calls=sum(reply.num_calls for reply in replies),
            tool_errors=sum(reply.num_call_errors for reply in replies),
            environment_s=self.seconds,
            routing=_joined_routing(self.parts, self.forks),
            forks=self.forks,
            messages=tuple(conversation(self.replies)),
            environment_reward=math.fsum(by_turn) if self.rewards else None,
            environment_state=self.state,
            turn_rewards=tuple(by_turn) if any(by_turn[:-1]) else (),
        )


def as_rollout(
    completion: Completion,
    ref_logprobs: NDArray[np.float32] | None,
    rewards: Mapping[str, float],
    reward: float,
    prompt: int = 0,
    weight: float = 1.0,
) -> Rollout:
    """Returns the Rollout that is sent. The reference's log-probs of observed tokens mean nothing, and are set to 0.

    prompt: number of its tokens. weight: weight of the environment's reward among the rewards.
    """
    c = completion
    if ref_logprobs is not None and c.observed:
        ref_logprobs = ref_logprobs.copy()
        for start, end in c.observed:
            ref_logprobs[start:end] = 0.0
    turn_rewards = c.turn_rewards if isinstance(c, PlayedCompletion) and weight else ()
    same: dict[str, Any] = {name: getattr(c, name) for name in _SAME_IN_ROLLOUT} | {
        "routing": None if c.routing is None else c.routing[prompt:],
        "turn_rewards": tuple(weight * given for given in turn_rewards),
    }
    return Rollout(c.token_ids, c.logprobs, ref_logprobs, rewards, reward, **same)


def shared(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Returns the length of the common prefix of two token sequences."""
    both = min(len(one), len(other))
    return int(next(iter(np.flatnonzero(one[:both] != other[:both])), both))


def _ids(part: EpisodePart) -> NDArray[np.int32]:
    return part.token_ids if isinstance(part, Completion) else part


def _joined_masks(parts: Sequence[EpisodePart]) -> NDArray[np.int32] | None:
    """Returns the sampling masks of all parts as one, [C, K], -1 fills. An observed token is its own only choice."""
    masks = [part.sampling_mask if isinstance(part, Completion) else part[:, None] for part in parts]
    if any(mask is None for mask in masks):
        return None
    width = max(mask.shape[1] for mask in masks if mask is not None)
    padded = [np.pad(m, ((0, 0), (0, width - m.shape[1])), constant_values=-1) for m in masks if m is not None]
    return np.concatenate(padded).astype(np.int32)


def _joined_routing(parts: Sequence[EpisodePart], forks: Forks) -> NDArray[Any] | None:
    """Returns each token's experts in the turn that first ran it: later turns rerun tokens after the last whole block.

    The last token before a fork was never run; the value in its position is never read.
    """
    found, known, kept, end = list[NDArray[Any]](), 0, dict(forks), 0
    for part in parts:
        if end in kept:
            found.append(found[0][:1])
            known = kept.pop(end)
        if isinstance(part, Completion):
            if part.routing is None:
                return None
            found.append(part.routing[known:])
            known = len(part.routing)
        end += len(_ids(part))
    return np.concatenate(found) if found else None
