"""The rules of advice for rollouts of several turns: what report/advice_rules.py says of rules holds here too."""

from __future__ import annotations

from statistics import fmean

from report.escape import one_line
from report.history import LATE, History


def tools_unused(h: History) -> str:
    """No call in 10 steps although there are tools, or a tenth of the calls of the first 10 steps: it learned to guess.

    Silent while every function is right in 90 %: then the tools were not needed.
    """
    calls, (early, late) = h.last("rollout/tool_calls", LATE), h.trend("rollout/tool_calls")
    has_stopped = bool(early) and fmean(early) >= 0.1 and fmean(late) <= 0.1 * fmean(early)
    if not (has_stopped or (calls and h.settings.has_tools and not any(calls))) or _is_solved(h):
        return ""
    what = "no tool was called in the last 10 steps: does the model write calls as rollout.tool_parser reads them"
    if has_stopped:
        what = f"calls of tools fell from {fmean(early):.2f} to {fmean(late):.2f} in a rollout: it guesses instead"
    return (
        f"{what}. See bash launch.sh samples {one_line(h.settings.output_dir)} --best; say in the prompt when to call "
        "(prompt.system), and reward what only the tool can know"
    )


def _is_solved(h: History) -> bool:
    accuracies = [h.last(f"rewards/{name}/accuracy", LATE) for name in h.functions()]
    return bool(accuracies) and all(values and fmean(values) >= 0.9 for values in accuracies)


def turns_exhausted(h: History) -> str:
    """≥ 50 % of rollouts end at max_turns over 5 steps: it calls in a loop, or the task needs more turns."""
    cut = h.last("rollout/max_turns_ratio", 5)
    if not cut or fmean(cut) < 0.5:
        return ""
    return (
        f"{fmean(cut):.0%} of rollouts end because they reached rollout.max_turns {h.settings.max_turns}: the model "
        "calls in a loop, or the task needs more turns. See "
        f"bash launch.sh samples {one_line(h.settings.output_dir)} --worst; if it was about to finish set "
        f"rollout.max_turns={2 * h.settings.max_turns}, if not reward only what ends with an answer"
    )


def tools_fail(h: History) -> str:
    """≥ 90 % of the calls of 5 steps fail: the model cannot learn from answers that it never gets."""
    calls, errors = h.last("rollout/tool_calls", 5), h.last("rollout/tool_errors", 5)
    if not calls or not errors or not sum(calls) or sum(errors) < 0.9 * sum(calls):
        return ""
    return (
        f"{sum(errors) / sum(calls):.0%} of the calls of tools in the last 5 steps failed: wrong names or arguments, "
        "or the tool itself. What it answered is in "
        f"bash launch.sh samples {one_line(h.settings.output_dir)}; type hints and docstrings are what the model knows "
        "of a tool (rollout.tools)"
    )
