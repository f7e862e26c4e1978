"""The reward of a rollout that failed after its first sampled token. No function can score it.

    reward = rollout.failure_reward
    reward = min(0, lowest reward of the group's other rollouts), by default

Often a rollout fails because of what the model wrote: a call that never ends, or an answer that an
agent cannot parse. If it were left out of its group, it would cost nothing, and a model that failed
more and more would look better and better. The reward is the lowest of the group, because where a
wrong answer has reward -1, a reward of 0 for failing would teach to fail.
"""

import math
from collections.abc import Iterable, Sequence

from common.config import Config
from common.types import Problem
from rewards import Scores
from sampler.engine.completions import Completion


def with_failures(
    completions: Sequence[Completion], scores: Scores, config: Config, problem: Problem
) -> Scores:
    """Returns the scores of all completions of a prompt, in their order.

    scores: those of the completions that did not fail. A failed completion gets the worst score
    that each reward function gave in the group, but not a positive one:

        scores 1 and −1, and a failure  →  1, −1, −1
        scores 1 and 1, and a failure   →  1, 1, 0

    If the weight of a function is negative, the worst score is the highest one, and at least 0.
    A function that does not apply to the row gives NaN to all of them.
    """
    if all(completion.failure is None for completion in completions):
        return scores
    reward = config.for_source(problem.source).rollout.failure_reward
    if reward is None:
        reward = _lowest([total for _, total in scores])
    by_function = {}
    for name, weight in zip(config.rewards.names, config.rewards.weights, strict=True):
        sign = 1.0
        if weight < 0:
            sign = -1.0
        scores_of_others = [rewards[name] for rewards, _ in scores]
        applies = not problem.scored_by or name in problem.scored_by
        if scores_of_others and all(map(math.isnan, scores_of_others)):
            applies = False
        by_function[name] = math.nan
        if applies:
            by_function[name] = sign * _lowest([sign * score for score in scores_of_others])
    remaining_scores = iter(scores)
    scores_of_all: Scores = []
    for completion in completions:
        if completion.failure is None:
            scores_of_all.append(next(remaining_scores))
        else:
            scores_of_all.append((dict(by_function), reward))
    return scores_of_all


def _lowest(scores: Iterable[float]) -> float:
    known = [score for score in scores if not math.isnan(score)]
    return min([0.0, *known])
