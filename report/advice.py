"""Advice on a run's problems: sentences made of its history, with the measured value and a setting to paste.

Rules are pure functions. They look at a window of steps, and yield nothing while all is well or not known yet;
docs/metrics.md has a line for each. Left out: anything that would act by itself.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import get_args

import numpy as np

from common.config import Config
from common.types import FailureKind
from report.escape import one_line
from report.full_marks import Record, reward_functions
from report.versions import compared

WARM_UP = 2  # steps whose speed means nothing: caches fill, processes connect
LEFT_OUT = 0.01  # share of rollouts whose absence may change what is learned
FAILED = 0.02  # share of rollouts that fail, above which it should be known why
EARLY = LATE = 10  # steps that a trend compares: the first ones of the run with the newest ones


class History:
    """The part of a run that advice reads: the settings, and the first and the newest steps, added in order."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.early: list[Record] = []
        self.late: deque[Record] = deque(maxlen=2 * LATE)
        self.evaluations = list[Record]()  # all lines of eval.jsonl

    def add_step(self, row: Record) -> None:
        """Adds a line of metrics.jsonl."""
        if len(self.early) < EARLY:
            self.early.append(row)
        self.late.append(row)

    def last(self, key: str, count: int) -> list[float]:
        """Returns the newest `count` values; [] if one of them is missing or not finite."""
        return _numbers([*self.late][-count:], key, count)

    def mean(self, key: str, count: int) -> float:
        """Returns the mean of the newest `count` values, 0 if one of them is not known."""
        return fmean(self.last(key, count) or [0.0])

    def growth(self, key: str, count: int) -> float:
        """Returns by how much a total has grown in the newest `count` steps. A restarted process counts from 0."""
        totals = [float(row.get(key) or 0.0) for row in [*self.late][-count - 1 :]]
        grown = 0.0
        for before, after in itertools.pairwise(totals):
            if after >= before:
                grown += after - before
            else:
                grown += after
        return grown

    def first(self, key: str) -> list[float]:
        return _numbers(self.early, key, EARLY)

    def trend(self, key: str) -> tuple[list[float], list[float]]:
        """Returns (first 10, newest 10) values; two empty lists while the two overlap."""
        if len(self.late) < LATE or list(self.late)[-LATE]["step"] <= self.early[-1]["step"]:
            return [], []
        early, late = self.first(key), self.last(key, LATE)
        return (early, late) if early and late else ([], [])

    def functions(self) -> list[str]:
        """Returns the reward functions that the newest step has scores of."""
        return reward_functions([self.late[-1]]) if self.late else []

    def is_solved(self) -> bool:
        """Returns whether every reward function has a mean accuracy of at least 90 % over the newest steps."""
        accuracies = [self.last(f"rewards/{name}/accuracy", LATE) for name in self.functions()]
        return bool(accuracies) and all(values and fmean(values) >= 0.9 for values in accuracies)


def _numbers(rows: Sequence[Record], key: str, count: int) -> list[float]:
    found = [float(row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    return found if len(found) == count else []


def advise(h: History) -> dict[str, str]:
    """Returns the advice that applies now: {"truncated": "92 % of completions …"}."""
    silent = () if h.config.learns_from_rewards else OF_REWARDS
    said = {cause: next(rule(h), "") for cause, rule in RULES.items() if cause not in silent}
    return {cause: sentence for cause, sentence in said.items() if sentence}


def _command(config: Config, which: str) -> str:
    return f"bash launch.sh samples {one_line(config.run.output_dir)} --{which}"


def dead_groups(h: History) -> Iterator[str]:
    """Advises if ≥ 90 % of 5 steps' groups scored the same: less than a tenth of the samples then has a gradient."""
    if (dead := h.mean("frac_reward_zero_std", 5)) >= 0.9:
        yield (
            f"{dead:.0%} of the groups scored the same in the last 5 steps: no gradient. If all answers are wrong, is "
            "the answer never found, or the problem too hard? If all are right, too easy? See "
            f"{_command(h.config, 'worst')}; or sample more per problem: "
            f"sampler.num_generations={2 * h.config.sampler.num_generations}"
        )


def turns_exhausted(h: History) -> Iterator[str]:
    """Advises if ≥ 50 % of 5 steps' rollouts reach max_turns: the model loops, or the task needs more turns."""
    most = h.config.max_turns
    if (cut := h.mean("rollout/max_turns_ratio", 5)) >= 0.5:
        yield (
            f"{cut:.0%} of rollouts end because they reached rollout.max_turns {most}: the model calls in a loop, or "
            f"the task needs more turns. See {_command(h.config, 'worst')}; if it was about to finish set "
            f"rollout.max_turns={2 * most}, if not reward only what ends with an answer"
        )


def kl_high(h: History) -> Iterator[str]:
    """Advises if the KL is ≥ 1 nat per token in each of 5 steps: a token is on average e times as likely as it was."""
    kl = h.last("kl", 5)
    if kl and min(kl) >= 1.0:
        yield (
            f"the KL to the reference has been {fmean(kl):.2f} nats per token for 5 steps: the model loses what it "
            f"knew. Start again with trainer.learning_rate={h.config.trainer.learning_rate / 10:.2g}, or hold it with "
            f"algorithm.beta={4 * h.config.algorithm.beta or 0.04:.2g}"
        )


def constant_reward(h: History) -> Iterator[str]:
    """Advises if a reward function gives one number, not full marks, to every completion for 10 steps."""
    for name in h.functions():
        stds, means = h.last(f"rewards/{name}/std", 10), h.last(f"rewards/{name}/mean", 10)
        solved = h.last(f"rewards/{name}/accuracy", 10) == [1.0] * 10
        if stds and means and max(stds) <= 1e-9 and max(means) - min(means) <= 1e-9 and not solved:
            yield (
                f"reward {one_line(name)} was {means[-1]:.2f} for every completion of the last 10 steps: it teaches "
                f"nothing. Usually it never finds what it looks for; see {_command(h.config, 'worst')}"
            )


def unscored(h: History) -> Iterator[str]:
    """Advises if a reward function was None for some completions of a step, which only the others then train."""
    for key, share in h.late[-1].items() if h.late else ():
        if key.startswith("rewards/") and key.endswith("/none") and share:
            name = key.removeprefix("rewards/").removesuffix("/none")
            yield (
                f"reward {one_line(name)} is None for {share:.0%} of the completions of this step: only the other "
                "rewards train on them. If it should judge all rows, see bash launch.sh check, which names those"
            )


def truncated(h: History) -> Iterator[str]:
    """Advises if ≥ 50 % of completions are cut off over 5 steps: most rewards then judge an unfinished answer."""
    # rollout.max_turns has a rule of its own
    cut = h.mean("completions/clipped_ratio", 5) - h.mean("rollout/max_turns_ratio", 5)
    length = h.config.sampler.max_completion_length
    if cut >= 0.5:
        yield (
            f"{cut:.0%} of completions reach max_completion_length {length} and end unfinished: "
            f"the reward cannot see an answer. Set sampler.max_completion_length={2 * length}"
        )


def tools_unused(h: History) -> Iterator[str]:
    """Advises if no tool is called in 10 steps, or a tenth as often as in the first 10: the model learned to guess.

    It is silent while the problems are solved, because the tools were then not needed.
    """
    calls, (early, late) = h.last("rollout/tool_calls", LATE), h.trend("rollout/tool_calls")
    if early and fmean(early) >= 0.1 and fmean(late) <= 0.1 * fmean(early):
        what = f"calls of tools fell from {fmean(early):.2f} to {fmean(late):.2f} in a rollout: it guesses instead"
    elif calls and h.config.rollout.tools and not any(calls):
        what = "no tool was called in the last 10 steps: does the model write calls as rollout.tool_parser reads them"
    else:
        return
    if not h.is_solved():
        yield (
            f"{what}. See {_command(h.config, 'best')}; say in the prompt when to call (prompt.system), and reward "
            "what only the tool can know"
        )


def tools_fail(h: History) -> Iterator[str]:
    """Advises if ≥ 90 % of the tool calls of 5 steps fail: the model cannot learn from answers that it never gets."""
    calls, errors = h.mean("rollout/tool_calls", 5), h.mean("rollout/tool_errors", 5)
    if calls and errors >= 0.9 * calls:
        yield (
            f"{errors / calls:.0%} of the calls of tools in the last 5 steps failed: wrong names or arguments, "
            f"or the tool itself. What it answered is in {_command(h.config, 'worst')}; type hints and docstrings are "
            "what the model knows of a tool (rollout.tools)"
        )


def rollouts_fail(h: History) -> Iterator[str]:
    """Advises if more than 2 % of the rollouts of 10 steps failed after their first token: they train as failures."""
    by_kind = {kind: h.mean(f"rollout/failed_ratio/{kind}", LATE) for kind in get_args(FailureKind)}
    share, worst = sum(by_kind.values()), max(by_kind, key=lambda kind: by_kind[kind])
    if share <= FAILED:
        return
    setting = h.config.rollout.failure_reward
    reward = "the lowest of its group, at most 0" if setting is None else f"{setting:g}"
    remedy = "if the program is to blame, and not what the model wrote, mend it"
    if worst == "timeout":
        remedy = f"if the time is too short, set rollout.timeout_s={2 * h.config.rollout.timeout_s:g}"
    yield (
        f"{share:.1%} of the rollouts of the last {LATE} steps failed, most of them by {worst}, and the policy learns "
        f"to avoid what led there: each got the reward {reward} (rollout.failure_reward). The log has reasons; {remedy}"
    )


def left_out(h: History) -> Iterator[str]:
    """Advises if more than 1 % of the rollouts of 10 steps did not train.

    Those that failed before their first token are missing; a tombstone is a whole group that failed, mostly by its
    rewards.
    """
    if len(h.late) <= LATE:
        return
    missing = h.mean("rollout/failed_ratio/missing", LATE)
    in_tombstones = h.growth("tombstones", LATE) / (LATE * h.config.trainer.prompts_per_step)
    share = missing + in_tombstones
    if share <= LEFT_OUT:
        return
    what = "the rewards of their groups failed or took too long"
    why = "If long answers fail more often, short ones are favoured. "
    setting = f"rewards.timeout_s={2 * h.config.rewards.timeout_s:g}"
    if missing >= in_tombstones:
        what = "their environment, tool or agent failed or took too long before the first token"
        why = ""
        setting = f"rollout.timeout_s={2 * h.config.rollout.timeout_s:g}"
    yield (
        f"{share:.1%} of the rollouts of the last {LATE} steps did not train, because {what}. {why}"
        f"The log has reasons; if it is the time limit, set {setting}"
    )


def redrawn(h: History) -> Iterator[str]:
    """Advises if more than 1 % of the groups of 10 steps were drawn again, because a process or machine was lost."""
    if len(h.late) <= LATE:
        return
    lost = h.growth("link/redrawn", LATE) + LATE * h.mean("timing/sampler_redrawn", LATE)
    share = lost / (LATE * h.config.trainer.prompts_per_step)
    if share > LEFT_OUT:
        logs = one_line(h.config.run.output_dir / "logs")
        yield (
            f"{share:.1%} of the groups of the last {LATE} steps were drawn again, because a sampler, the trainer, or "
            "the process of environments or rewards had ended before they were finished. Groups with long answers are "
            f"lost more often, so short answers are favoured. Why a process ended is in {logs}"
        )


def waits(who: str, h: History) -> Iterator[str]:
    """Advises if `who` waits ≥ 70 % of 10 steps: on policy a half is normal, above it the other is the bottleneck."""
    waited, all_s = h.mean(f"wait/{who}_s", LATE), h.mean("timing/all_s", LATE)
    if not all_s or list(h.late)[-LATE]["step"] <= WARM_UP or waited < 0.7 * all_s:
        return
    other, remedy = "sampler", "start a second sampler on another GPU, sampler.num_samplers=2"
    if who == "sampler":
        name = "max_tokens_per_micro_batch" if h.config.trainer.max_tokens_per_micro_batch else "groups_per_micro_batch"
        more = f"trainer.{name}={2 * getattr(h.config.trainer, name)}"
        other, remedy = "trainer", f"give the trainer more GPUs (trainer.devices), or more groups at once: {more}"
    if not h.config.trainer.max_staleness:
        remedy += ", or let the two overlap: trainer.max_staleness=1"
    yield f"the {who} waits for the {other} {waited / all_s:.0%} of the time: {remedy}"


def entropy_collapse(h: History) -> Iterator[str]:
    """Advises if the entropy is below a tenth of its start and a function is right in < 90 %: exploration has ended."""
    early, late = h.trend("entropy")
    if early and fmean(early) > 0 and fmean(late) <= 0.1 * fmean(early) and not h.is_solved():
        yield (
            f"the entropy fell from {fmean(early):.2g} to {fmean(late):.2g} nats per token: completions hardly differ "
            "any more, and what is not tried is not learned. Set algorithm.epsilon_high=0.28, or "
            "algorithm.entropy_coef=0.001"
        )


def _significant_change(h: History, key: str) -> float:
    """Returns the change of the mean from the first 10 to the newest 10 steps, 0 unless above 3 standard errors."""
    early, late = h.trend(key)
    if not early:
        return 0.0
    change, error = fmean(late) - fmean(early), math.sqrt((np.var(early, ddof=1) + np.var(late, ddof=1)) / EARLY)
    return change if abs(change) > 3 * error else 0.0


def reward_hacking(h: History) -> Iterator[str]:
    """Advises if the sum rises while one function falls by a quarter of its spread, both beyond 3 standard errors."""
    names, rise = h.functions(), _significant_change(h, "reward")
    for name in names if len(names) > 1 and rise > 0 else ():
        fall, spread = -_significant_change(h, f"rewards/{name}/mean"), h.first(f"rewards/{name}/std")
        if spread and fall > 0 and fall >= 0.25 * fmean(spread):
            yield (
                f"the reward rose by {rise:.2f} while {one_line(name)} fell by {fall:.2f}: the policy may have found a "
                f"way around it. Read {_command(h.config, 'best')}, and give it more weight in rewards.reward_weights"
            )


def mismatch_growing(h: History) -> Iterator[str]:
    """Advises if engine and trainer, with equal weights, differ by 0.02 in probability and 3 times as much as at first.

    bfloat16 kernels differ by some 0.005. The rule is silent off policy, where the policy's own change counts, too.
    """
    early, late = h.trend("mismatch/mean_abs_prob_diff")
    is_on_policy = h.config.algorithm.steps_per_batch == 1 and h.config.trainer.max_staleness == 0
    if early and is_on_policy and fmean(late) >= max(0.02, 3 * fmean(early)):
        yield (
            f"sampler and trainer disagree by {fmean(late):.3f} in the probability of a token, {fmean(early):.3f} at "
            "the start: the ratio no longer measures the update. Set "
            "algorithm.vllm_importance_sampling_mode=token_truncate, or model.dtype=float32"
        )


def bounded_weights(h: History) -> Iterator[str]:
    """Advises if sequence weights of some length are below 0.8 on average of 5 steps: without bounds they average 1."""
    for key in h.late[-1] if h.late else ():
        if key.startswith("mismatch/correction_mean/") and (means := h.last(key, 5)) and fmean(means) < 0.8:
            yield (
                f"{key} was {fmean(means):.2f} over 5 steps, where weights without a bound average 1: completions of "
                "these lengths train less than shorter ones. Set "
                "algorithm.vllm_importance_sampling_mode=token_truncate or token_mask, or raise "
                "algorithm.vllm_importance_sampling_clip_max"
            )


def patience_in_noise(h: History) -> Iterator[str]:
    """Advises if eval.early_stopping_patience evaluations change the metric by less than the noise of one of them.

    That noise is the standard error, over problems, of the difference between an evaluation and the next.
    """
    settings = h.config.eval
    patience = settings.early_stopping_patience
    if patience is None:
        return
    _, table = compared(h.evaluations[-4 * patience :], settings)
    if len(table) <= patience or table.shape[1] <= 2:  # too few, or without results by problem
        return
    changes = np.diff(table, axis=0)
    noise = np.sqrt(np.nanmean(changes**2) / np.isfinite(table[-1]).sum())
    gain = patience * abs(np.nanmean(changes))
    if gain < noise:
        yield (
            f"{settings.metric_for_best_model} changes by {gain:.3f} in {patience} evaluations, while one differs "
            f"from the next by {noise:.3f} by chance: an early stop is chance, too. Evaluate more problems, or more "
            f"completions of each; or set eval.early_stopping_patience={2 * patience}"
        )


RULES: dict[str, Callable[[History], Iterator[str]]] = {
    rule.__name__: rule
    for rule in (dead_groups, turns_exhausted, kl_high, constant_reward, unscored, truncated, tools_unused, tools_fail,
                 rollouts_fail, left_out, redrawn, entropy_collapse, reward_hacking, mismatch_growing,
                 bounded_weights, patience_in_noise)
}  # fmt: skip
RULES |= {f"{who}_waits": partial(waits, who) for who in ("trainer", "sampler")}
# rules for a policy that learns from rewards: one that learns from a teacher starts far off, and may get as sure as it
OF_REWARDS = ("dead_groups", "constant_reward", "unscored", "kl_high", "entropy_collapse")
