"""Advice on a run's problems: sentences made of its history, with the measured value and a setting to paste.

Rules are pure functions. They look at a window of steps, and return "" while all is well or not known yet;
docs/metrics.md has a line for each. Left out: anything that would act by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import fmean

import numpy as np

from common.config import Config
from report.escape import one_line
from report.history import EARLY, LATE, History

WARM_UP = 2  # steps whose speed means nothing: caches fill, processes connect


def advise(h: History) -> dict[str, str]:
    """Returns the advice that applies now: {"truncated": "92 % of completions …"}."""
    silent = () if h.config.learns_from_rewards else OF_REWARDS
    return {cause: sentence for cause, rule in RULES.items() if cause not in silent and (sentence := rule(h))}


def _command(config: Config, which: str) -> str:
    return f"bash launch.sh samples {one_line(config.run.output_dir)} --{which}"


def dead_groups(h: History) -> str:
    """Advises if ≥ 90 % of 5 steps' groups scored the same: less than a tenth of the samples then has a gradient."""
    dead = h.last("frac_reward_zero_std", 5)
    if not dead or fmean(dead) < 0.9:
        return ""
    return (
        f"{fmean(dead):.0%} of the groups scored the same in the last 5 steps: no gradient. If all answers are "
        "wrong, is the answer never found, or the problem too hard? If all are right, too easy? See "
        f"{_command(h.config, 'worst')}; or sample more per problem: "
        f"sampler.num_generations={2 * h.config.sampler.num_generations}"
    )


def turns_exhausted(h: History) -> str:
    """Advises if ≥ 50 % of 5 steps' rollouts reach max_turns: the model loops, or the task needs more turns."""
    cut, most = h.last("rollout/max_turns_ratio", 5), h.config.max_turns
    if not cut or fmean(cut) < 0.5:
        return ""
    return (
        f"{fmean(cut):.0%} of rollouts end because they reached rollout.max_turns {most}: the model calls in a loop, "
        f"or the task needs more turns. See {_command(h.config, 'worst')}; if it was about to finish set "
        f"rollout.max_turns={2 * most}, if not reward only what ends with an answer"
    )


def kl_high(h: History) -> str:
    """Advises if the KL is ≥ 1 nat per token in each of 5 steps: a token is on average e times as likely as it was."""
    kl = h.last("kl", 5)
    if not kl or min(kl) < 1.0:
        return ""
    return (
        f"the KL to the reference has been {fmean(kl):.2f} nats per token for 5 steps: the model loses what it "
        f"knew. Start again with trainer.learning_rate={h.config.trainer.learning_rate / 10:.2g}, or hold it with "
        f"algorithm.beta={4 * h.config.algorithm.beta or 0.04:.2g}"
    )


def constant_reward(h: History) -> str:
    """Advises if a reward function gives one number, not full marks, to every completion for 10 steps."""
    for name in h.functions():
        stds, means = h.last(f"rewards/{name}/std", 10), h.last(f"rewards/{name}/mean", 10)
        solved = h.last(f"rewards/{name}/accuracy", 10) == [1.0] * 10
        if stds and means and max(stds) <= 1e-9 and max(means) - min(means) <= 1e-9 and not solved:
            return (
                f"reward {one_line(name)} was {means[-1]:.2f} for every completion of the last 10 steps: it teaches "
                f"nothing. Usually it never finds what it looks for; see {_command(h.config, 'worst')}"
            )
    return ""


def unscored(h: History) -> str:
    """Advises if a reward function was None for some completions of a step, which only the others then train."""
    for key, share in h.late[-1].items() if h.late else ():
        if key.startswith("rewards/") and key.endswith("/none") and share:
            name = key.removeprefix("rewards/").removesuffix("/none")
            return (
                f"reward {one_line(name)} is None for {share:.0%} of the completions of this step: only the other "
                "rewards train on them. If it should judge all rows, see bash launch.sh check, which names those"
            )
    return ""


def truncated(h: History) -> str:
    """Advises if ≥ 50 % of completions are cut off over 5 steps: most rewards then judge an unfinished answer."""
    cut, turned = h.last("completions/clipped_ratio", 5), h.last("rollout/max_turns_ratio", 5)
    cut = [a - b for a, b in zip(cut, turned, strict=True)] if turned else cut  # max_turns has a rule of its own
    if not cut or fmean(cut) < 0.5:
        return ""
    length = h.config.sampler.max_completion_length
    return (
        f"{fmean(cut):.0%} of completions reach max_completion_length {length} and end unfinished: "
        f"the reward cannot see an answer. Set sampler.max_completion_length={2 * length}"
    )


def tools_unused(h: History) -> str:
    """Advises if no tool is called in 10 steps, or a tenth as often as in the first 10: the model learned to guess.

    It is silent while the problems are solved, because the tools were then not needed.
    """
    calls, (early, late) = h.last("rollout/tool_calls", LATE), h.trend("rollout/tool_calls")
    has_stopped = bool(early) and fmean(early) >= 0.1 and fmean(late) <= 0.1 * fmean(early)
    if not (has_stopped or (calls and h.config.rollout.tools and not any(calls))) or h.is_solved():
        return ""
    what = "no tool was called in the last 10 steps: does the model write calls as rollout.tool_parser reads them"
    if has_stopped:
        what = f"calls of tools fell from {fmean(early):.2f} to {fmean(late):.2f} in a rollout: it guesses instead"
    return (
        f"{what}. See {_command(h.config, 'best')}; say in the prompt when to call (prompt.system), and reward what "
        "only the tool can know"
    )


def tools_fail(h: History) -> str:
    """Advises if ≥ 90 % of the tool calls of 5 steps fail: the model cannot learn from answers that it never gets."""
    calls, errors = h.last("rollout/tool_calls", 5), h.last("rollout/tool_errors", 5)
    if not calls or not errors or not sum(calls) or sum(errors) < 0.9 * sum(calls):
        return ""
    return (
        f"{sum(errors) / sum(calls):.0%} of the calls of tools in the last 5 steps failed: wrong names or arguments, "
        f"or the tool itself. What it answered is in {_command(h.config, 'worst')}; type hints and docstrings are "
        "what the model knows of a tool (rollout.tools)"
    )


def waits(who: str, h: History) -> str:
    """Advises if `who` waits ≥ 70 % of 10 steps: on policy a half is normal, above it the other is the bottleneck."""
    waited, all_s = h.last(f"wait/{who}_s", LATE), h.last("timing/all_s", LATE)
    if not waited or not all_s or list(h.late)[-LATE]["step"] <= WARM_UP or sum(waited) < 0.7 * sum(all_s):
        return ""
    other, remedy = "sampler", "start a second sampler on another GPU, sampler.num_samplers=2"
    if who == "sampler":
        name = "max_tokens_per_micro_batch" if h.config.trainer.max_tokens_per_micro_batch else "groups_per_micro_batch"
        more = f"trainer.{name}={2 * getattr(h.config.trainer, name)}"
        other, remedy = "trainer", f"give the trainer more GPUs (trainer.devices), or more groups at once: {more}"
    if not h.config.trainer.max_staleness:
        remedy += ", or let the two overlap: trainer.max_staleness=1"
    return f"the {who} waits for the {other} {sum(waited) / sum(all_s):.0%} of the time: {remedy}"


def entropy_collapse(h: History) -> str:
    """Advises if the entropy is below a tenth of its start and a function is right in < 90 %: exploration has ended."""
    early, late = h.trend("entropy")
    if not early or fmean(early) <= 0 or fmean(late) > 0.1 * fmean(early) or h.is_solved():
        return ""
    return (
        f"the entropy fell from {fmean(early):.2g} to {fmean(late):.2g} nats per token: completions hardly differ any "
        "more, and what is not tried is not learned. Set algorithm.epsilon_high=0.28, or algorithm.entropy_coef=0.001"
    )


def _significant_change(h: History, key: str) -> float:
    """Returns the change of the mean from the first 10 to the newest 10 steps, 0 unless above 3 standard errors."""
    early, late = h.trend(key)
    if not early:
        return 0.0
    change, error = fmean(late) - fmean(early), math.sqrt((np.var(early, ddof=1) + np.var(late, ddof=1)) / EARLY)
    return change if abs(change) > 3 * error else 0.0


def reward_hacking(h: History) -> str:
    """Advises if the sum rises while one function falls by a quarter of its spread, both beyond 3 standard errors."""
    names, rise = h.functions(), _significant_change(h, "reward")
    if len(names) < 2 or rise <= 0:
        return ""
    for name in names:
        fall, spread = -_significant_change(h, f"rewards/{name}/mean"), h.first(f"rewards/{name}/std")
        if spread and fall > 0 and fall >= 0.25 * fmean(spread):
            return (
                f"the reward rose by {rise:.2f} while {one_line(name)} fell by {fall:.2f}: the policy may have found a "
                f"way around it. Read {_command(h.config, 'best')}, and give it more weight in rewards.reward_weights"
            )
    return ""


def mismatch_growing(h: History) -> str:
    """Advises if engine and trainer, with equal weights, differ by 0.02 in probability and 3 times as much as at first.

    bfloat16 kernels differ by some 0.005. The rule is silent off policy, where the policy's own change counts, too.
    """
    early, late = h.trend("mismatch/mean_abs_prob_diff")
    is_on_policy = h.config.algorithm.steps_per_batch == 1 and h.config.trainer.max_staleness == 0
    if not early or not is_on_policy or fmean(late) < max(0.02, 3 * fmean(early)):
        return ""
    return (
        f"sampler and trainer disagree by {fmean(late):.3f} in the probability of a token, {fmean(early):.3f} at the "
        "start: the ratio no longer measures the update. Set algorithm.vllm_importance_sampling_mode=token_truncate, "
        "or model.dtype=float32"
    )


RULES: dict[str, Callable[[History], str]] = {
    "dead_groups": dead_groups,
    "turns_exhausted": turns_exhausted,
    "kl_high": kl_high,
    "constant_reward": constant_reward,
    "unscored": unscored,
    "truncated": truncated,
    "tools_unused": tools_unused,
    "tools_fail": tools_fail,
    "trainer_waits": partial(waits, "trainer"),
    "sampler_waits": partial(waits, "sampler"),
    "entropy_collapse": entropy_collapse,
    "reward_hacking": reward_hacking,
    "mismatch_growing": mismatch_growing,
}
# rules for a policy that learns from rewards: one that learns from a teacher starts far off, and may get as sure as it
OF_REWARDS = ("dead_groups", "constant_reward", "unscored", "kl_high", "entropy_collapse")
