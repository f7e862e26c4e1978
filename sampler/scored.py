"""Makes the group that is sent of the completions of a prompt and their scores."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.types import Group
from model.reference import Reference
from rewards import Scores
from sampler.engine.in_flight import with_oldest_version
from sampler.turns.episode import as_rollout
from sampler.turns.sampled import Sampled
from sampler.turns.task import GroupKey


def reference_logprobs(
    reference: Reference | None, sampled: Sampled
) -> Sequence[NDArray[np.float32] | None]:
    """Returns the reference's log-probs [C] of each completion; None for each if there is none."""
    completions = sampled.completions
    if reference is None:
        return [None] * len(completions)
    return reference.logprobs(
        sampled.prompt.token_ids,
        [completion.token_ids for completion in completions],
        [completion.sampling_mask for completion in completions],
        sampled.prompt.images,
        [completion.forks for completion in completions],
    )


def group_of(
    key: GroupKey,
    sampled: Sampled,
    scores: Scores,
    ref_logprobs: Sequence[NDArray[np.float32] | None],
    environment_weight: float,
) -> Group:
    """Returns the group of a prompt.

    scores and ref_logprobs are those of all its completions. environment_weight: the weight of the
    environment's reward among the rewards.
    """
    prompt = sampled.prompt
    prompt_length = len(prompt.token_ids)
    rollouts = []
    scored = zip(sampled.completions, ref_logprobs, scores, strict=True)
    for completion, ref, (rewards, reward) in scored:
        rollouts.append(
            as_rollout(completion, ref, rewards, reward, prompt_length, environment_weight)
        )
    version, whole_rollouts = with_oldest_version(key.policy_version, tuple(rollouts))
    # The other completions have the same routing if equal rows are computed equally.
    routing = sampled.completions[0].routing
    if routing is not None:
        routing = routing[:prompt_length]
    return Group(
        group_id=key.group_id,
        policy_version=version,
        problem_index=prompt.problem.index,
        prompt_ids=prompt.token_ids,
        rollouts=whole_rollouts,
        images=prompt.images,
        failures=sampled.failures,
        routing=routing,
        source=prompt.problem.source,
    )
