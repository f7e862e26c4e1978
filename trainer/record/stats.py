"""Metrics of one optimizer step, with TRL's names where TRL has the metric. Pure functions."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import get_args

import numpy as np

from common.config import ROUNDING, Algorithm, Config
from common.types import (
    FailureKind,
    Group,
    Rollout,
    Tombstone,
    without_tombstones,
)
from trainer.algorithm.advantages import (
    is_dead,
    is_dead_group,
    is_unmasked,
    rewards_of,
    shaped_rewards,
)
from trainer.algorithm.mismatch import RANGES

# metric, which is a mean over trained tokens -> the name of its sum in sums.TOKEN_SUMS
_TOKEN_MEANS = {
    "entropy": "entropy",
    "ratio/mean": "ratio",
    "clip_ratio/region_mean": "clipped",
    "mismatch/mean_abs_log_ratio": "abs_log_ratio",
    "mismatch/mean_abs_prob_diff": "abs_prob_diff",
    "mismatch/mean_exp_abs_log_ratio": "exp_abs_log_ratio",
    "mismatch/k3": "k3",
}


def _rollouts_of(groups: Iterable[Group]) -> list[Rollout]:
    rollouts: list[Rollout] = []
    for group in groups:
        rollouts += group.rollouts
    return rollouts


def rollout_metrics(
    groups: Sequence[Group | Tombstone], policy_version: int, config: Config
) -> dict[str, float]:
    """Returns metrics of rewards, lengths, dead groups and staleness.

    A metric is a mean over completions or over groups, unless its name says otherwise. In a dead
    group, all completions have the same reward. Staleness is the number of policy versions between
    sampling and training. policy_version: the version of the policy before the step.
    """
    alive = without_tombstones(groups)
    metrics: dict[str, float] = {"tombstones": float(len(groups) - len(alive))}
    if not alive:
        return metrics
    rollouts = _rollouts_of(alive)
    lengths = np.array([rollout.num_sampled for rollout in rollouts])
    rewards = [rewards_of(group) for group in alive]
    metrics["reward"] = float(np.concatenate(rewards).mean())
    metrics["reward_std"] = fmean([group_rewards.std(ddof=1) for group_rewards in rewards])
    metrics["frac_reward_zero_std"] = fmean(map(is_dead, rewards))
    metrics["completions/mean_length"] = float(lengths.mean())
    metrics["completions/min_length"] = float(lengths.min())
    metrics["completions/max_length"] = float(lengths.max())
    metrics["completions/clipped_ratio"] = fmean(map(_is_clipped, rollouts))
    metrics["prompts/mean_length"] = fmean([len(group.prompt_ids) for group in alive])
    metrics["staleness/mean"] = fmean([policy_version - group.policy_version for group in alive])
    metrics["completion_tokens"] = float(lengths.sum())

    for name in rollouts[0].rewards:
        # a data source may name the reward functions that score its rollouts
        rollouts_to_score: list[Rollout] = []
        for group in alive:
            if name in config.for_source(group.source).rewards.names:
                rollouts_to_score += group.rollouts
        metrics |= _reward_metrics(name, rollouts_to_score, config.rewards.full_mark(name))
    return metrics


def _is_clipped(completion: Rollout) -> bool:
    return completion.finish_reason == "length"


def _reward_metrics(name: str, rollouts: Sequence[Rollout], full_mark: float) -> dict[str, float]:
    """Returns the metrics of one reward function over the rollouts that it was asked to score.

    full_mark: the score from which a completion counts as right.
    """
    metrics = {}
    scores = []
    num_right = 0
    for rollout in rollouts:
        score = rollout.rewards[name]
        if math.isnan(score):  # the function returned None
            continue
        scores.append(score)
        if not rollout.failure and score >= full_mark - ROUNDING:
            num_right += 1
    num_unscored = len(rollouts) - len(scores)
    if num_unscored:
        metrics[f"rewards/{name}/none"] = num_unscored / len(rollouts)
    if scores:
        metrics[f"rewards/{name}/mean"] = float(np.mean(scores))
        metrics[f"rewards/{name}/std"] = float(np.std(scores))
        metrics[f"rewards/{name}/accuracy"] = num_right / len(scores)
    return metrics


def source_metrics(groups: Sequence[Group | Tombstone], config: Config) -> dict[str, float]:
    """Returns metrics of each named data source: its groups, mean reward and mean length.

    A source without groups in this step has no metrics. sources/…/kept is the number of the
    source's groups that are not dead. (All completions of a dead group have an advantage of 0.)
    """
    groups_of_source: dict[str, list[Group]] = {}
    for group in without_tombstones(groups):
        if group.source:
            groups_of_source.setdefault(group.source, []).append(group)

    metrics = {}
    for source in sorted(groups_of_source):
        source_groups = groups_of_source[source]
        rollouts = _rollouts_of(source_groups)
        num_kept = 0
        for group in source_groups:
            if not is_dead_group(group, config):
                num_kept += 1
        metrics[f"sources/{source}/groups"] = float(len(source_groups))
        metrics[f"sources/{source}/kept"] = float(num_kept)
        metrics[f"sources/{source}/reward"] = fmean([rollout.reward for rollout in rollouts])
        lengths = [rollout.num_sampled for rollout in rollouts]
        metrics[f"sources/{source}/mean_length"] = fmean(lengths)
    return metrics


def turn_metrics(groups: Sequence[Group | Tombstone], config: Config) -> dict[str, float]:
    """Returns metrics of the turns and tool calls in the rollouts' environments.

    A metric is a mean over all rollouts that have a token, unless its name says otherwise.
    rollout/failed_ratio/<reason> is the share of all rollouts that failed for this reason, which is
    "missing" for a rollout that failed before its first token.
    """
    alive = without_tombstones(groups)
    num_failed = Counter[str]()
    values: dict[str, list[float]] = {}
    for group in alive:
        num_failed["missing"] += len(group.failures)
        max_turns = config.for_source(group.source).rollout.max_turns
        for rollout in group.rollouts:
            if rollout.failure:
                num_failed[rollout.failure.kind] += 1
            for name, value in _turn_values(rollout, max_turns).items():
                values.setdefault(name, []).append(value)
    metrics = {"rollout/failures": float(num_failed.total())}
    if values:
        num_rollouts = len(_rollouts_of(alive)) + num_failed["missing"]
        for kind in (*get_args(FailureKind), "missing"):
            metrics[f"rollout/failed_ratio/{kind}"] = num_failed[kind] / num_rollouts
    for name, values_of_rollouts in values.items():
        metrics[name] = fmean(values_of_rollouts)
    return metrics


def _turn_values(rollout: Rollout, max_turns: int) -> dict[str, float]:
    """Returns the values of one rollout that `turn_metrics` averages."""
    # a rollout that has max_turns turns may also have finished its task in the last turn
    is_cut_off = rollout.turns >= max_turns and _is_clipped(rollout)
    return {
        "rollout/turns": rollout.turns,
        "rollout/max_turns_ratio": is_cut_off,
        "rollout/tool_calls": rollout.tool_calls,
        "rollout/tool_errors": rollout.tool_errors,
        "rollout/observed_tokens": len(rollout.completion_ids) - rollout.num_sampled,
        "rollout/forks": len(rollout.forks),
        "rollout/environment_s": rollout.environment_s,
    }


def in_flight_metrics(groups: Sequence[Group | Tombstone], policy_version: int) -> dict[str, float]:
    """Returns metrics of the weight updates during sampling, or {} if there are no rollouts.

    policy_version: the version of the policy before the step.
    """
    token_staleness = []  # an array for each rollout
    num_versions = []  # policy versions that sampled each rollout
    for group in without_tombstones(groups):
        for rollout in group.rollouts:
            versions = rollout.token_versions(group.policy_version)
            token_staleness.append((policy_version - versions)[rollout.sampled()])
            # no spans: the group's version sampled the whole rollout
            num_versions.append(max(1, len(rollout.version_spans)))
    if not num_versions:
        return {}
    return {
        "in_flight/mixed_ratio": float(np.mean(np.array(num_versions) > 1)),
        "in_flight/max_versions": float(max(num_versions)),
        "staleness/token_mean": float(np.concatenate(token_staleness).mean()),
    }


def shaping_metrics(groups: Sequence[Group | Tombstone], config: Config) -> dict[str, float]:
    """Returns metrics of the reward shaping that the config switches on.

    Shaping changes the rewards from which the trainer computes advantages. The metric `reward` is
    the mean before shaping.
    """
    metrics: dict[str, float] = {}
    alive = without_tombstones(groups)
    if not alive:
        return metrics
    algorithm = config.algorithm
    rollouts = _rollouts_of(alive)
    if algorithm.kl_in_reward:
        log_ratios = [rollout.ref_log_ratios().sum() for rollout in rollouts]
        metrics["kl_per_completion"] = fmean(log_ratios)
    if algorithm.kl_in_reward or algorithm.soft_punish_cache:
        shaped = np.concatenate([shaped_rewards(group, config) for group in alive])
        metrics["reward_shaped"] = float(shaped.mean())
    if algorithm.mask_truncated_completions:
        num_masked = 0
        for rollout in rollouts:
            if not is_unmasked(rollout, algorithm.mask_truncated_completions):
                num_masked += 1
        metrics["completions/masked_ratio"] = num_masked / len(rollouts)
    return metrics


def token_metrics(sums: Mapping[str, float], beta: float) -> dict[str, float]:
    """Returns the loss of a step, and means over the tokens that it trained.

    sums: as in sums.TOKEN_SUMS. The metrics are of the log-ratio log π_θ − log π_old, where π_θ is
    the trainer's policy and π_old is the policy that sampled. If the step trained no tokens, every
    mean has its value for a log-ratio of 0. beta: the factor of the KL term in the loss.
    """
    num_tokens = max(sums["tokens"], 1.0)
    metrics = {"loss": sums["loss"]}
    for name, summed in _TOKEN_MEANS.items():
        metrics[name] = sums[summed] / num_tokens
    if not sums["tokens"]:  # exp(0)
        metrics["ratio/mean"] = 1.0
        metrics["mismatch/mean_exp_abs_log_ratio"] = 1.0
    if beta > 0:
        metrics["kl"] = sums["kl"] / num_tokens
    return metrics


def correction_metrics(sums: Mapping[str, float], algorithm: Algorithm) -> dict[str, float]:
    """Returns metrics of the mismatch correction, or {} if the correction is off.

    The correction weights trained tokens by importance, because sampler and trainer compute
    different log-probs. The metrics are the mean weight, and the share of tokens whose weight was
    truncated or masked. If there is one weight for a whole completion, the weight shrinks with the
    completion's length, so the mean is also given for each range of lengths.
    """
    mode = algorithm.vllm_importance_sampling_mode
    if mode is None:
        return {}
    num_tokens = max(sums["tokens"], 1.0)
    metrics = {
        "mismatch/correction_mean": sums["correction"] / num_tokens,
        "mismatch/corrected_ratio": sums["corrected"] / num_tokens,
    }
    if not sums["tokens"]:
        metrics["mismatch/correction_mean"] = 1.0
    if mode.startswith("sequence"):
        for name in RANGES:
            num_in_range = sums[f"tokens_{name}"]
            if num_in_range:
                metrics[f"mismatch/correction_mean/{name}"] = sums[name] / num_in_range
    return metrics
