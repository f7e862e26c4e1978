"""Metrics of one step, under TRL's names where TRL has them. Pure functions."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, get_args

import numpy as np

from common.config import ROUNDING, Algorithm, Config
from common.types import (
    EvalResult,
    EvalSample,
    FailureKind,
    Group,
    Rollout,
    Tombstone,
    without_tombstones,
)
from model.files.images import one_mark_an_image, sample_record
from report.full_marks import by_source
from trainer.algorithm.advantages import (
    is_dead,
    is_dead_group,
    is_unmasked,
    rewards_of,
    shaped_rewards,
)
from trainer.algorithm.mismatch import RANGES

FullMark = Callable[[str], float]  # reward function's name -> the score from which a completion counts as right


def rollout_metrics(groups: Sequence[Group | Tombstone], policy_version: int, config: Config) -> dict[str, float]:
    """Returns metrics of rewards, lengths, dead groups and staleness, means over completions unless named otherwise."""
    alive = without_tombstones(groups)
    metrics: dict[str, float] = {"tombstones": float(len(groups) - len(alive))}
    if not alive:
        return metrics
    rollouts = [r for g in alive for r in g.rollouts]
    lengths = np.array([r.num_sampled for r in rollouts])
    rewards = [rewards_of(g) for g in alive]
    metrics |= {
        "reward": float(np.concatenate(rewards).mean()),
        "reward_std": fmean([r.std(ddof=1) for r in rewards]),
        "frac_reward_zero_std": fmean([is_dead(r) for r in rewards]),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": fmean([r.finish_reason == "length" for r in rollouts]),
        "prompts/mean_length": fmean([len(g.prompt_ids) for g in alive]),
        "staleness/mean": fmean([policy_version - g.policy_version for g in alive]),
        "completion_tokens": float(lengths.sum()),
    }
    for name in rollouts[0].rewards:
        asked = [g for g in alive if name in config.for_source(g.source).rewards.names]
        of_all = [r for g in asked for r in g.rollouts]
        scored = [r for r in of_all if not math.isnan(r.rewards[name])]
        if none := len(of_all) - len(scored):
            metrics[f"rewards/{name}/none"] = none / len(of_all)
        if scored:
            scores = np.array([r.rewards[name] for r in scored])
            full_mark = config.rewards.full_mark(name) - ROUNDING
            is_right = [not r.failure and r.rewards[name] >= full_mark for r in scored]
            metrics[f"rewards/{name}/mean"] = float(scores.mean())
            metrics[f"rewards/{name}/std"] = float(scores.std())
            metrics[f"rewards/{name}/accuracy"] = fmean(is_right)
    return metrics


def source_metrics(groups: Sequence[Group | Tombstone], config: Config) -> dict[str, float]:
    """Returns groups, reward and length of each named data set, and how many of its groups have an advantage."""
    metrics, alive = dict[str, float](), without_tombstones(groups)
    for source in sorted({g.source for g in alive if g.source}):
        own = [g for g in alive if g.source == source]
        rollouts = [r for g in own for r in g.rollouts]
        metrics |= {
            f"sources/{source}/groups": float(len(own)),
            f"sources/{source}/kept": float(sum(not is_dead_group(g, config) for g in own)),
            f"sources/{source}/reward": fmean([r.reward for r in rollouts]),
            f"sources/{source}/mean_length": fmean([r.num_sampled for r in rollouts]),
        }
    return metrics


def turn_metrics(groups: Sequence[Group | Tombstone], config: Config) -> dict[str, float]:
    """Returns metrics of the rollouts' environments: means over all that have a token, if not named otherwise.

    A rollout that ended because its max_turns was reached counts in max_turns_ratio: it was cut off within its task.
    failed_ratio/… are shares of all rollouts, by the kind of failure; those without a token are missing.
    """
    alive = without_tombstones(groups)
    rollouts = [r for g in alive for r in g.rollouts]
    failed = Counter[str](r.failure.kind for r in rollouts if r.failure)
    failed["missing"] = sum(len(g.failures) for g in alive)
    metrics = {"rollout/failures": float(failed.total())}
    if rollouts:
        num_rollouts = len(rollouts) + failed["missing"]
        kinds = (*get_args(FailureKind), "missing")
        metrics |= {f"rollout/failed_ratio/{kind}": failed[kind] / num_rollouts for kind in kinds}
        limits = [config.for_source(g.source).rollout.max_turns for g in alive for _ in g.rollouts]
        is_cut = [r.turns >= n and r.finish_reason == "length" for r, n in zip(rollouts, limits, strict=True)]
        metrics |= {
            "rollout/turns": fmean([r.turns for r in rollouts]),
            "rollout/max_turns_ratio": fmean(is_cut),
            "rollout/tool_calls": fmean([r.tool_calls for r in rollouts]),
            "rollout/tool_errors": fmean([r.tool_errors for r in rollouts]),
            "rollout/observed_tokens": fmean([len(r.completion_ids) - r.num_sampled for r in rollouts]),
            "rollout/forks": fmean([len(r.forks) for r in rollouts]),
            "rollout/environment_s": fmean([r.environment_s for r in rollouts]),
        }
    return metrics


def in_flight_metrics(groups: Sequence[Group | Tombstone], policy_version: int) -> dict[str, float]:
    """Returns metrics of weight updates during sampling. policy_version: the policy's version before the step."""
    rollouts = [(r, r.token_versions(g.policy_version)) for g in without_tombstones(groups) for r in g.rollouts]
    if not rollouts:
        return {}
    staleness = np.concatenate([(policy_version - versions)[r.sampled()] for r, versions in rollouts])
    spans = [max(1, len(r.version_spans)) for r, _ in rollouts]
    return {
        "in_flight/mixed_ratio": fmean([n > 1 for n in spans]),
        "in_flight/max_versions": float(max(spans)),
        "staleness/token_mean": float(staleness.mean()),
    }


def shaping_metrics(groups: Sequence[Group | Tombstone], config: Config) -> dict[str, float]:
    """Returns metrics of the trainer's reward shaping, if switched on. `reward` stays that of the reward functions."""
    alive = without_tombstones(groups)
    algorithm, metrics = config.algorithm, {}
    if alive and algorithm.kl_in_reward:
        metrics["kl_per_completion"] = fmean([r.ref_log_ratios().sum() for g in alive for r in g.rollouts])
    if alive and (algorithm.kl_in_reward or algorithm.soft_punish_cache):
        metrics["reward_shaped"] = float(np.concatenate([shaped_rewards(g, config) for g in alive]).mean())
    if alive and algorithm.mask_truncated_completions:
        metrics["completions/masked_ratio"] = fmean([not is_unmasked(r, True) for g in alive for r in g.rollouts])
    return metrics


def token_metrics(sums: Mapping[str, float], beta: float) -> dict[str, float]:
    """Returns the update's loss and means over the tokens that trained, where log-ratio = log π_θ − log π_old."""
    n = max(sums["tokens"], 1.0)
    metrics = {
        "loss": sums["loss"],
        "entropy": sums["entropy"] / n,
        "ratio/mean": sums["ratio"] / n if sums["tokens"] else 1.0,
        "clip_ratio/region_mean": sums["clipped"] / n,
        "mismatch/mean_abs_log_ratio": sums["abs_log_ratio"] / n,
        "mismatch/mean_abs_prob_diff": sums["abs_prob_diff"] / n,
        "mismatch/mean_exp_abs_log_ratio": sums["exp_abs_log_ratio"] / n if sums["tokens"] else 1.0,
        "mismatch/k3": sums["k3"] / n,
    }
    return metrics | ({"kl": sums["kl"] / n} if beta > 0 else {})


def correction_metrics(sums: Mapping[str, float], algorithm: Algorithm) -> dict[str, float]:
    """Returns the mean weight of the mismatch correction over tokens, and the share of tokens truncated or masked.

    Bounded weights of whole completions shrink with their length: they have a mean for each range.
    """
    mode = algorithm.vllm_importance_sampling_mode
    if mode is None:
        return {}
    n = max(sums["tokens"], 1.0)
    metrics = {
        "mismatch/correction_mean": sums["correction"] / n if sums["tokens"] else 1.0,
        "mismatch/corrected_ratio": sums["corrected"] / n,
    }
    for name in RANGES if mode.startswith("sequence") else ():
        if tokens := sums[f"tokens_{name}"]:
            metrics[f"mismatch/correction_mean/{name}"] = sums[name] / tokens
    return metrics


def eval_record(results: Sequence[EvalResult], full_mark: FullMark) -> dict[str, Any]:
    """Returns one line of eval.jsonl. Problems that could not be scored are named, and left out of n and the means.

    A function's shares and means cover the completions that it scored: those for which it did not return None. Each of
    several sources also has shares and means of its own, such as "math/answer". A completion that failed is not right,
    and counts in a mean as the worst of all, and at most 0. by_problem has the mean of each
    problem's completions; null where there is none.
    """
    samples = [s for result in results for s in result.samples]
    record: dict[str, Any] = {
        "step": results[0].policy_version,
        "eval_id": results[0].eval_id,
        "n": len(samples),
        "problems": len({s.problem_index for s in samples}),
        "failed_problems": {f.problem_index: f.reason for result in results for f in result.failures},
        "full_marks": {},
        "mean": {},
        "by_problem": {},
    }
    num_problems = 1 + max([*(s.problem_index for s in samples), *record["failed_problems"]])
    for place, part in by_source(samples, lambda s: s.source).items():
        for function in part[0].rewards if part else ():
            scored = [s for s in part if not math.isnan(s.rewards[function])]
            if not scored:
                continue
            name, lowest = place + function, min([0.0, *(s.rewards[function] for s in scored)])
            scores = [s.rewards[function] if s.failure is None else lowest for s in scored]
            mark = full_mark(function) - ROUNDING
            marks = [not s.failure and s.rewards[function] >= mark for s in scored]
            record["by_problem"][f"{name}/accuracy"] = _by_problem(scored, marks, num_problems)
            record["by_problem"][f"{name}/mean"] = _by_problem(scored, scores, num_problems)
            record["full_marks"][name] = sum(marks)
            record["mean"][name] = sum(scores) / len(scores)
            if len(scored) < len(samples):
                record.setdefault("scored", {})[name] = [len(scored), len({s.problem_index for s in scored})]
    if samples:
        record["mean_length"] = fmean([s.num_tokens for s in samples])
        record["clipped_ratio"] = fmean([s.finish_reason == "length" for s in samples])
    return record


def _by_problem(samples: Sequence[EvalSample], values: Sequence[float], num_problems: int) -> list[float | None]:
    """Returns the mean value of each problem's samples, by problem index; None without any."""
    found: list[list[float]] = [[] for _ in range(num_problems)]
    for sample, value in zip(samples, values, strict=True):
        found[sample.problem_index].append(value)
    return [fmean(of_one) if of_one else None for of_one in found]


def samples_records(groups: Sequence[Group | Tombstone], step: int, count: int, decode: Any) -> list[dict[str, Any]]:
    """Returns the worst and the best completion of each of the first `count` groups, for samples.jsonl."""
    records = []
    for group in without_tombstones(groups)[:count]:
        ranked = sorted(group.rollouts, key=lambda r: r.reward)
        for which, rollout in (("worst", ranked[0]), ("best", ranked[-1])):
            records.append(
                {
                    "step": step,
                    "group_id": group.group_id,
                    "policy_version": group.policy_version,
                    "problem_index": group.problem_index,
                    "which": which,
                    "prompt": one_mark_an_image(decode(group.prompt_ids.tolist())),
                    "completion": decode(rollout.completion_ids.tolist()),
                    "rewards": dict(rollout.rewards),
                    "reward": rollout.reward,
                    "finish_reason": rollout.finish_reason,
                }
                | ({"images": [sample_record(image) for image in group.images]} if group.images else {})
                | ({"turns": turn_texts(rollout, decode)} if rollout.observed else {})
                | ({"failure": asdict(rollout.failure)} if rollout.failure else {})
            )
    return records


def turn_texts(rollout: Rollout, decode: Any) -> list[dict[str, Any]]:
    """Returns a completion's parts by author: [{"by": "model", "text": …}, {"by": "environment", "text": …}, …].

    A part by "history" is what a rewritten history repeats, and the new text after it. If turns had rewards of their
    own, the model's parts have `reward`.
    """
    edges = [0, *itertools.chain(*rollout.observed), len(rollout.completion_ids)]
    texts = [decode(rollout.completion_ids[start:end].tolist()) for start, end in itertools.pairwise(edges)]
    parts = [{"by": by, "text": text} for by, text in zip(itertools.cycle(("model", "environment")), texts)]
    for part, span in zip(parts[1::2], rollout.observed, strict=True):
        part["by"] = "history" if span[0] in dict(rollout.forks) else "environment"
    for part, reward in zip(parts[::2], rollout.turn_rewards, strict=False):
        part["reward"] = reward
    return parts
