"""The rules of advice: what a run's history shows -> a sentence with the value and a setting to paste.

Pure. Every rule looks at a window of steps, never at one, and says "" while all is well or not known yet. Its
threshold and the reason for it stand in its docstring, and docs/metrics.md repeats both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

from report.advice_turns import tools_fail, tools_unused, turns_exhausted
from report.escape import one_line
from report.full_marks import scored, share
from report.history import EARLY, LATE, WARM_UP, AdviceSettings, History, Row
from report.run_log import wilson_interval


def dead_groups(h: History) -> str:
    """≥ 90 % dead groups over 5 steps: less than a tenth of the samples has a gradient at all."""
    dead, rewards = h.last("frac_reward_zero_std", 5), h.last("reward", 5)
    if not dead or fmean(dead) < 0.9:
        return ""
    share = "every group" if min(dead) == 1 else f"{fmean(dead):.0%} of the groups"
    return (
        f"{share} scored the same in the last 5 steps (mean reward {fmean(rewards or [math.nan]):.2f}): no gradient. "
        "If all answers are wrong, is the answer never found, or the problem too hard? If all are right, too easy? "
        f"See bash launch.sh samples {one_line(h.settings.output_dir)} --worst; "
        f"or sample more per problem: sampler.num_generations={2 * h.settings.num_generations}"
    )


def constant_reward(h: History) -> str:
    """One reward function gives the same number to every completion for 10 steps, and it is not full marks."""
    for name in h.functions():
        stds, means = h.last(f"rewards/{name}/std", 10), h.last(f"rewards/{name}/mean", 10)
        solved = h.last(f"rewards/{name}/accuracy", 10) == [1.0] * 10
        if stds and means and max(stds) <= 1e-9 and max(means) - min(means) <= 1e-9 and not solved:
            return (
                f"reward {one_line(name)} was {means[-1]:.2f} for every completion of the last 10 steps: it teaches "
                "nothing. Usually it never finds what it looks for; see "
                f"bash launch.sh samples {one_line(h.settings.output_dir)} --worst"
            )
    return ""


def truncated(h: History) -> str:
    """≥ 50 % of completions cut off over 5 steps: most rewards judge an unfinished answer."""
    cut, turned = h.last("completions/clipped_ratio", 5), h.last("rollout/max_turns_ratio", 5)
    cut = [a - b for a, b in zip(cut, turned, strict=True)] if turned else cut  # max_turns has a rule of its own
    if not cut or fmean(cut) < 0.5:
        return ""
    length = h.settings.max_completion_length
    return (
        f"{fmean(cut):.0%} of completions reach max_completion_length {length} and end unfinished: "
        f"the reward cannot see an answer. Set sampler.max_completion_length={2 * length}"
    )


def _waiting_share(h: History, who: str) -> float:
    """The part of the newest 10 steps' wall time that this side waited; 0 if not known."""
    waited, all_s = h.last(f"wait/{who}_s", LATE), h.last("timing/all_s", LATE)
    warm = list(h.late)[-LATE:]
    if not waited or not all_s or warm[0]["step"] <= WARM_UP or sum(all_s) <= 0:
        return 0.0
    return sum(waited) / sum(all_s)


def trainer_waits(h: History) -> str:
    """≥ 70 % of 10 steps: on policy the two take turns, so a half is normal; above it the sampler is the bottleneck."""
    share = _waiting_share(h, "trainer")
    if share < 0.7:
        return ""
    ahead = "" if h.settings.max_staleness else ", or let it run ahead: trainer.max_staleness=1"
    return (
        f"the trainer waits for the sampler {share:.0%} of the time: start a second sampler on another GPU, "
        f"sampler.num_samplers=2{ahead}{_reference_to(h.settings, 'trainer')}"
    )


def _reference_to(settings: AdviceSettings, side: str) -> str:
    """Words that move the reference to the side that waits; "" where there is none, or it is there already."""
    if settings.beta == 0 or settings.reference_on in ("", side):
        return ""
    return f", or let the {side} score the reference: reference.on={side}"


def sampler_waits(h: History) -> str:
    """≥ 70 % of 10 steps, for the same reason: the trainer is the bottleneck."""
    share = _waiting_share(h, "sampler")
    if share < 0.7:
        return ""
    ahead = "" if h.settings.max_staleness else ", or overlap the two: trainer.max_staleness=1"
    more = f"trainer.groups_per_micro_batch={2 * h.settings.groups_per_micro_batch}"
    if h.settings.max_tokens_per_micro_batch:
        more = f"trainer.max_tokens_per_micro_batch={2 * h.settings.max_tokens_per_micro_batch}"
    return (
        f"the sampler waits for the trainer {share:.0%} of the time: give the trainer more GPUs (trainer.devices), or "
        f"more groups at once: {more}{ahead}{_reference_to(h.settings, 'sampler')}"
    )


def kl_rising(h: History) -> str:
    """Above 0.3 nats per token and 1.5 times the 10 steps before: useful runs stay below 0.2, this one speeds up."""
    kl = h.last("kl", 2 * LATE)
    if not kl:
        return ""
    before, now = fmean(kl[:LATE]), fmean(kl[LATE:])
    if now <= 0.3 or now < 1.5 * before:
        return ""
    return (
        f"the KL to the reference is {now:.2f} nats per token and was {before:.2f} ten steps before: the policy runs "
        f"away. Set trainer.learning_rate={h.settings.learning_rate / 2:.2g}, or hold it with "
        f"algorithm.beta={4 * h.settings.beta or 0.04:.2g}"
    )


def kl_high(h: History) -> str:
    """Above 1 nat per token in each of 5 steps: a sampled token is on average e times as likely as it was."""
    kl = h.last("kl", 5)
    if not kl or min(kl) <= 1:
        return ""
    return (
        f"the KL to the reference has been {fmean(kl):.2f} nats per token for 5 steps: the model loses what it knew. "
        f"Start again with trainer.learning_rate={h.settings.learning_rate / 10:.2g}"
    )


def entropy_collapse(h: History) -> str:
    """Below a tenth of the start while a function is right in less than 90 %: nothing new is tried any more."""
    early, late = h.trend("entropy")
    if not early or fmean(early) <= 0 or fmean(late) > 0.1 * fmean(early):
        return ""
    accuracies = [h.last(f"rewards/{name}/accuracy", LATE) for name in h.functions()]
    if all(values and fmean(values) >= 0.9 for values in accuracies):
        return ""
    return (
        f"the entropy fell from {fmean(early):.2g} to {fmean(late):.2g} nats per token: completions hardly differ any "
        "more, and what is not tried is not learned. Set algorithm.epsilon_high=0.28, or algorithm.entropy_coef=0.001"
    )


def _variance(values: list[float]) -> float:
    """With n − 1; statistics.variance counts in fractions, which makes a report of a long run take minutes."""
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _moved(h: History, key: str) -> float:
    """Change of the mean from the first 10 to the newest 10 steps, 0 unless it is 3 standard errors of the two."""
    early, late = h.trend(key)
    if not early:
        return 0.0
    change, error = fmean(late) - fmean(early), math.sqrt((_variance(early) + _variance(late)) / EARLY)
    return change if abs(change) > 3 * error else 0.0


def reward_hacking(h: History) -> str:
    """The sum rises and one of several functions falls by a quarter of its spread, both beyond 3 standard errors."""
    names = h.functions()
    rise = _moved(h, "reward")
    if len(names) < 2 or rise <= 0:
        return ""
    for name in names:
        fall, spread = -_moved(h, f"rewards/{name}/mean"), h.first(f"rewards/{name}/std")
        if spread and fall > 0 and fall >= 0.25 * fmean(spread):
            early, late = h.trend(f"rewards/{name}/mean")
            return (
                f"the reward rose by {rise:.2f} while {one_line(name)} fell from {fmean(early):.2f} to "
                f"{fmean(late):.2f}: the policy may have found a way around it. Read "
                f"bash launch.sh samples {one_line(h.settings.output_dir)} --best, "
                "and give it more weight in rewards.reward_weights"
            )
    return ""


def gradient_clipped(h: History) -> str:
    """Every one of 20 steps: a limit that always acts is no guard against outliers but a rescaling of every step."""
    norms, limit = h.last("grad_norm", 20), h.settings.max_grad_norm
    if not norms or min(norms) <= limit:
        return ""
    return (
        f"every gradient of the last 20 steps was cut to max_grad_norm {limit:g} (median {sorted(norms)[10]:.2g}): a "
        "step on noise is as long as one on a clear signal. "
        f"Set trainer.max_grad_norm={2 * sorted(norms)[10]:.2g}, or a smaller trainer.learning_rate"
    )


def mismatch_growing(h: History) -> str:
    """Engine and trainer, under the same weights, differ by 0.02 in probability and 3 times as much as at the start.

    bfloat16 kernels differ by some 0.005. Off policy the metric also holds the policy's own change: silent there.
    """
    early, late = h.trend("mismatch/mean_abs_prob_diff")
    if not early or not h.settings.is_on_policy or fmean(late) < 0.02 or fmean(late) < 3 * fmean(early):
        return ""
    return (
        f"sampler and trainer disagree by {fmean(late):.3f} in the probability of a token, {fmean(early):.3f} at the "
        "start: the ratio no longer measures the update. Set algorithm.vllm_importance_sampling_mode=token_truncate, "
        "or model.dtype=float32"
    )


def held_out_flat(h: History) -> str:
    """Accuracy on training problems rises by ≥ 0.1 between two evaluations and held-out by less than a quarter of it.

    Only where the first interval excludes the training gain, that is, where the evaluation could have seen it.
    """
    first, last = min(h.at_evaluation, default=0), max(h.at_evaluation, default=0)
    if first == last:
        return ""
    for name in h.evaluations[last]["full_marks"]:
        train = [h.at_evaluation[v].get(f"rewards/{name}/accuracy", math.nan) for v in (first, last)]
        held_out = [_share(h.evaluations[v], name) for v in (first, last)]
        gain, moved = train[1] - train[0], held_out[1] - held_out[0]
        if gain >= 0.1 and moved < gain / 4 and held_out[0] + gain > _upper(h.evaluations[first], name):
            return (
                f"{one_line(name)} rose by {100 * gain:.0f} points on training problems and by {100 * moved:.0f} on "
                f"held-out ones ({100 * held_out[0]:.1f} % → {100 * held_out[1]:.1f} %): learned by heart, or the two "
                "differ. More problems in data.train, fewer trainer.max_steps, and compare eval.temperature=1.0"
            )
    return ""


def _share(record: Row, name: str) -> float:
    return share(record, name) if name in record["full_marks"] else math.nan


def _upper(record: Row, name: str) -> float:
    """The upper end of the 95 % interval. It counts problems: completions of one problem are not independent."""
    _, problems = scored(record, name)
    return wilson_interval(share(record, name) * problems, problems)[1]


RULES: dict[str, Callable[[History], str]] = {
    rule.__name__: rule
    for rule in (
        dead_groups,
        constant_reward,
        truncated,
        tools_unused,
        turns_exhausted,
        tools_fail,
        trainer_waits,
        sampler_waits,
        kl_rising,
        kl_high,
        entropy_collapse,
        reward_hacking,
        gradient_clipped,
        mismatch_growing,
        held_out_flat,
    )
}
