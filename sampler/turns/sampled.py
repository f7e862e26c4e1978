"""The completions of one prompt before they are scored, and how they are given to rewards."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.types import Failure, Prompt
from environments import Failed
from sampler.engine.completions import Completion
from sampler.prompts.dataset import whole_row
from sampler.turns.task import Decode, GroupKey

if TYPE_CHECKING:
    from rewards.pool import RewardPool

MIN_ROLLOUTS = 2  # of a group; fewer have no standard deviation and train nothing
MAX_REASON = 500  # characters, the limit of the wire format


@dataclass(frozen=True)
class Sampled:
    """The completions of one prompt."""

    prompt: Prompt  # after the environment's reset
    completions: Sequence[Completion]  # those with a `failure` included
    failures: tuple[str, ...] = ()  # why the other rollouts failed before their first token
    unread: int = 0  # the number of answers that agents did not read
    lost: str = ""  # why the prompt is to be sampled again: the machine lost a rollout

    @property
    def to_score(self) -> list[Completion]:
        """Returns the completions that reward functions score, which are all that did not fail."""
        return [completion for completion in self.completions if not completion.failure]

    @property
    def failure_reasons(self) -> list[str]:
        """Returns why rollouts failed, before their first token or after it."""
        reasons = list(self.failures)
        for completion in self.completions:
            if completion.failure:
                reasons.append(completion.failure.reason)
        return reasons


@dataclass(frozen=True)
class Missing:
    """A rollout that failed before its first sampled token, so that nothing of it can train."""

    reason: str


def of_rollouts(
    prompt: Prompt, rollouts: Sequence[Completion | Missing], unread: int = 0
) -> Sampled:
    """Returns the result of a prompt from its rollouts, which are in the order of their numbers."""
    completions = []
    failures = []
    for rollout in rollouts:
        if isinstance(rollout, Missing):
            failures.append(rollout.reason)
        else:
            completions.append(rollout)
    return Sampled(prompt, completions, tuple(failures), unread)


def failure_of(reply: Failed) -> Failure:
    """Returns why a rollout failed, which was not a loss by the machine."""
    assert reply.kind != "lost", "a lost rollout is sampled again"
    return Failure(reply.kind, reply.reason[:MAX_REASON])


def too_few_reason(key: Hashable, sampled: Sampled) -> str | None:
    """Returns why too few rollouts have a token to train or evaluate, or None if enough have one.

    An evaluation needs all rollouts, a group MIN_ROLLOUTS.
    """
    if sampled.lost:
        return sampled.lost
    if not sampled.failures:
        return None
    if isinstance(key, GroupKey) and len(sampled.completions) >= MIN_ROLLOUTS:
        return None
    return f"{len(sampled.failures)} environments failed; the first: {sampled.failures[0]}"


def submit_rewards(
    pool: RewardPool, key: Hashable, sampled: Sampled, decode: Decode, policy_version: int = 0
) -> None:
    """Gives the completions that did not fail to reward functions.

    They get the text of completions of one turn, and the messages of those of several turns.
    """
    prompt = sampled.prompt
    completions = sampled.to_score
    ids = [completion.token_ids.tolist() for completion in completions]
    columns = whole_row(prompt.problem, pool.image_key)
    extra: dict[str, Sequence[Any]] = {"scored_by": prompt.problem.scored_by}
    played = [c for c in completions if c.messages]
    outputs: list[Any]
    if played:
        outputs = [list(c.messages) for c in played]
        extra["environment_rewards"] = [c.environment_reward for c in played]
        extra["environments"] = [c.environment_state for c in played]
    else:
        outputs = [prompt.turn_prefix + text for text in decode(ids)]
    pool.submit(key, prompt.for_rewards, outputs, ids, columns, policy_version, **extra)
