"""Checks before the run that its rewards can score the rows, by gold answers and by trial."""

from collections.abc import Sequence
from typing import Any

from common.config import Config
from common.errors import UserError
from common.processes.exits import say
from common.types import Problem
from rewards import Scores
from rewards.find import FORMS, JUDGES
from rewards.mathematics.gold import unreadable
from rewards.pool import RewardFailure, RewardPool
from rewards.probes import probes
from sampler.prompts.dataset import whole_row
from sampler.prompts.messages import shown_to_rewards

_MOST_ROWS_TRIED = 4
_MOST_ROWS_EXPLAINED = 3


def rows_with_gold(option: str, problems: list[Problem], config: Config) -> list[Problem]:
    """Returns the problems without those of which rewards could judge only the format.

    A built-in reward such as `answer` cannot judge a row whose gold answer it cannot read. Such
    rows stay if a reward function of the user's own may judge them. Logs how many rows are
    affected. option: data.train or data.eval. Raises UserError if no gold answer can be read.
    """
    reward_names = config.rewards.reward_funcs
    judges = []
    gold_columns = []
    for name in reward_names:
        if name in JUDGES:
            judges.append(name)
            gold_columns.append(JUDGES[name])
    gold_columns = list(dict.fromkeys(gold_columns))  # each once
    readable = []
    unreadable_rows = []
    for problem in problems:
        reason = _why_unreadable(problem, gold_columns)
        if reason:
            unreadable_rows.append(f"row {problem.index}: {reason}")
        else:
            readable.append(problem)
    if not unreadable_rows:
        return problems
    rows = "; ".join(unreadable_rows[:_MOST_ROWS_EXPLAINED])
    counts = f"{len(readable)} of {len(problems)} gold answers"
    finding = f"{option}: {' and '.join(judges)} can judge {counts} ({rows})"
    if not readable:
        raise UserError(
            f"{finding}. Set data.answer_key to the column of the answers, or name a reward of "
            "your own in rewards.reward_funcs (docs/rewards.md)"
        )
    if any(name not in JUDGES and name not in FORMS for name in reward_names):
        say(f"{finding}: it is None for the other rows, which only the other rewards can judge")
        return problems
    say(f"{finding}: skipping the other rows: no reward can check their answer, only its format")
    return readable


def _why_unreadable(problem: Problem, gold_columns: Sequence[str]) -> str:
    """Returns why none of the columns holds a gold answer that can be read; "" if one does."""
    first_reason = ""
    for column in gold_columns:
        reason = unreadable(problem.columns.get(column))
        if not reason:
            return ""
        first_reason = first_reason or reason
    return first_reason


def try_rewards(pool: RewardPool, problems: list[Problem], config: Config) -> None:
    """Scores made-up completions of a few rows, before anything heavy is imported.

    Raises UserError if the reward functions raise, or return anything but numbers, on every row
    that is tried. Logs a warning if right, wrong and truncated completions all score the same.
    Functions that read the states of environments are not tried, because there are none yet.
    """
    if "environments" in pool.wanted.names:
        return
    stride = max(1, len(problems) // _MOST_ROWS_TRIED)
    tried = problems[::stride][:_MOST_ROWS_TRIED]
    reason = ""
    for problem in tried:
        scores = _score_made_up_completions(pool, problem, config)
        if not isinstance(scores, RewardFailure):
            _warn_of_equal_scores(problem, scores, config)
            return
        if scores.kind != "error":
            return  # a slow or killed process may be the machine's fault: the run has limits for it
        reason = scores.reason
    raise UserError(f"rewards: {reason} (all {len(tried)} rows tried before sampling fail)")


def _score_made_up_completions(
    pool: RewardPool, problem: Problem, config: Config
) -> Scores | RewardFailure:
    """Returns the scores of right, wrong and truncated completions, as many as a group has.

    There is no tokenizer yet, so the token ids number the words, and one more is for the end.
    """
    made_up = probes(problem.columns.get("answer"))
    count = max(len(made_up), config.sampler.num_generations)
    texts = []
    token_ids = []
    environment_rewards = []
    for i in range(count):
        text = made_up[i % len(made_up)].text or "I"
        texts.append(text)
        token_ids.append(list(range(len(text.split()) + 1)))
        environment_rewards.append(float(i % 2))  # of every second completion
    options: dict[str, Any] = {"scored_by": problem.scored_by}
    if config.rollout.is_multi_turn:
        options["environment_rewards"] = environment_rewards
    prompt = shown_to_rewards(problem, config)
    row = whole_row(problem, pool.image_key)
    pool.submit("trial", prompt, texts, token_ids, row, **options)
    [(_, scores)] = pool.ready(timeout_s=pool.patience_s)
    return scores


def _warn_of_equal_scores(problem: Problem, scores: Scores, config: Config) -> None:
    num_kinds = len(probes(problem.columns.get("answer")))
    totals = {total for _, total in scores}
    if num_kinds > 1 and len(totals) == 1 and config.learns_from_rewards:
        [total] = totals
        say(
            f"rewards: right, wrong and cut-off completions of row {problem.index} all score "
            f"{total:g}: such a group has no gradient. bash launch.sh check CONFIG tries more rows"
        )
