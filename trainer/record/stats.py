"""Metrics of one step, under TRL's names where TRL has them. Pure functions."""

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

# metric -> the sum over trained tokens whose mean it is
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

    They are means over completions unless their names say otherwise.
    policy_version: the version of the policy before the step.
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
        asked: list[Rollout] = []  # the rollouts that this function was asked to score
        for group in alive:
            if name in config.for_source(group.source).rewards.names:
                asked += group.rollouts
        metrics |= _reward_metrics(name, asked, config.rewards.full_mark(name))
    return metrics


def _is_clipped(completion: Rollout) -> bool:
    return completion.finish_reason == "length"


def _reward_metrics(name: str, rollouts: Sequence[Rollout], full_mark: float) -> dict[str, float]:
    """Returns the metrics of one reward function over the rollouts that it was asked to score."""
    metrics = {}
    scores = []
    num_right = 0
    for rollout in rollouts:
        score = rollout.rewards[name]
        if math.isnan(score):
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

    A source without groups in this step has none. sources/…/kept is the number of a source's groups
    that are not dead, that is, whose rewards give some completion an advantage.
    """
    groups_of_source: dict[str, list[Group]] = {}
    for group in without_tombstones(groups):
        if group.source:
            groups_of_source.setdefault(group.source, []).append(group)
    metrics = {}
    for source in sorted(groups_of_source):
        source_groups = groups_of_source[source]
        rollouts = _rollouts_of(source_groups)
        num_kept = 0.0
        for group in source_groups:
            if not is_dead_group(group, config):
                num_kept += 1
        metrics[f"sources/{source}/groups"] = float(len(source_groups))
        metrics[f"sources/{source}/kept"] = num_kept
        metrics[f"sources/{source}/reward"] = fmean([rollout.reward for rollout in rollouts])
        lengths = [rollout.num_sampled for rollout in rollouts]
        metrics[f"sources/{source}/mean_length"] = fmean(lengths)
    return metrics


def turn_metrics(groups: Sequence[Group | Tombstone], config: Config) -> dict[str, float]:
    """Returns metrics of the rollouts' environments.

    They are means over all rollouts that have a token, unless their names say otherwise.
    rollout/failed_ratio/… are shares of all rollouts, by the kind of failure; a rollout without a
    token is "missing".
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
    """Returns the metrics of one rollout's environment."""
    # a rollout whose task goes on when it reaches max_turns is cut off
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
    """Returns metrics of weight updates during sampling, {} without a rollout.

    policy_version: the version of the policy before the step.
    """
    staleness = []
    num_versions = []
    for group in without_tombstones(groups):
        for rollout in group.rollouts:
            versions = rollout.token_versions(group.policy_version)
            staleness.append((policy_version - versions)[rollout.sampled()])
            num_versions.append(max(1, len(rollout.version_spans)))
    if not staleness:
        return {}
    return {
        "in_flight/mixed_ratio": float(np.mean(np.array(num_versions) > 1)),
        "in_flight/max_versions": float(max(num_versions)),
        "staleness/token_mean": float(np.concatenate(staleness).mean()),
    }


def shaping_metrics(groups: Sequence[Group | Tombstone], config: Config) -> dict[str, float]:
    """Returns metrics of the reward shaping that is switched on in the trainer.

    The metric `reward` stays the mean reward of the reward functions.
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
            if not is_unmasked(rollout, True):
                num_masked += 1
        metrics["completions/masked_ratio"] = num_masked / len(rollouts)
    return metrics


def token_metrics(sums: Mapping[str, float], beta: float) -> dict[str, float]:
    """Returns the update's loss, and means over the tokens that trained.

    log-ratio = log π_θ − log π_old. Without tokens, every mean is that of unchanged weights.
    """
    num_tokens = max(sums["tokens"], 1.0)
    metrics = {"loss": sums["loss"]}
    for name, summed in _TOKEN_MEANS.items():
        metrics[name] = sums[summed] / num_tokens
    if not sums["tokens"]:
        metrics["ratio/mean"] = 1.0
        metrics["mismatch/mean_exp_abs_log_ratio"] = 1.0
    if beta > 0:
        metrics["kl"] = sums["kl"] / num_tokens
    return metrics


def correction_metrics(sums: Mapping[str, float], algorithm: Algorithm) -> dict[str, float]:
    """Returns metrics of the mismatch correction over the tokens that trained, {} without one.

    They are the mean weight, and the share of tokens truncated or masked. The bounded weight of a
    whole completion shrinks with its length, so such weights also have a mean for each range of
    lengths.
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
