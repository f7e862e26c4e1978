"""`bash launch.sh check config.yaml [completions.jsonl] [key=value …]`: tries the rewards before any GPU time is spent.

Reads the data of the config and runs every reward function over gold and wrong answers (rewards/gold_answers.py); given
a file, such as samples.jsonl of a run, over its completions too (rewards/rescore.py). Imports no torch. With an
environment or tools it shows one rollout, too (launcher/check_turns.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import config as settings
from common import exits
from common.config import Config
from common.errors import UserError
from common.types import Problem
from rewards.format import END_OF_TURN, without_end_of_turn
from rewards.gold_answers import check_gold
from rewards.rescore import rescore
from rewards.trials import Findings, TrialRow
from sampler.dataset import load_data, whole_row
from sampler.prompts import shown_to_rewards

FAILED = 1


def main() -> None:
    """Raises UserError, and SystemExit with 1 when a reward function or a gold answer fails."""
    parser = argparse.ArgumentParser(prog="launch.sh check", description="Try the reward functions of a config.")
    parser.add_argument("config")
    parser.add_argument("rest", nargs="*", metavar="completions.jsonl | key=value")
    parser.add_argument("--rows", type=int, default=1000, help="gold answers to try, evenly spaced (default: 1000)")
    arguments = parser.parse_intermixed_args()
    files = [Path(item) for item in arguments.rest if "=" not in item]
    if len(files) > 1 or arguments.rows < 1:
        raise UserError("check takes one config, at most one file of completions, and --rows of at least 1")
    config = settings.load(arguments.config, [item for item in arguments.rest if "=" in item])
    records = read_completions(files[0]) if files else []

    problems = load_data("data.train", config.data.train, config.data)
    chosen = problems[:: -(-len(problems) // arguments.rows)]
    steps = config.trainer.max_steps
    print(f"tandem: gold answers: {len(chosen)} of {len(problems)} rows of {config.data.train}", flush=True)
    of_gold = check_gold(config.rewards, [row_of(problem, config) for problem in chosen], steps)
    _print(of_gold)
    num_problems = len(of_gold.problems)
    if config.rollout.is_multi_turn:
        from launcher import check_turns  # transformers' tokenizers, which rewards do not need

        num_problems += check_turns.show(config, problems[0])
    if files:
        print(f"\ntandem: completions: {len(records)} of {files[0]}", flush=True)
        of_file = rescore(config.rewards, list(groups(records, problems, config)), of_gold.verifiers, steps)
        _print(of_file)
        num_problems += len(of_file.problems)
    print(f"\ntandem: {num_problems} problems" if num_problems else "\ntandem: the rewards look right")
    if num_problems:
        raise SystemExit(FAILED)


def _print(findings: Findings) -> None:
    print("\n".join(findings.lines))
    for kind, texts in (("problem", findings.problems), ("warning", findings.warnings)):
        for text in texts:
            print(f"{kind}: {text}")
    sys.stdout.flush()


def row_of(problem: Problem, config: Config) -> TrialRow:
    """With the prompt as a run shows it to the rewards."""
    columns = whole_row(problem, config.data.image_key)
    return TrialRow(problem.index, shown_to_rewards(problem, config), columns)


def read_completions(path: Path) -> list[dict[str, Any]]:
    """The lines of a .jsonl file, each with `completion`. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"completions {path}: {getattr(error, 'strerror', None) or error}") from None
    records = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would break at U+2028, which JSON may hold
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record["completion"], str):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f'completions {path}:{number}: expected {{"completion": "…", …}}, got {line[:80]}'
            ) from None
        records.append(record)
    if not records:
        raise UserError(f"completions {path} holds no line; give samples.jsonl of a run")
    return records


def groups(records: list[dict[str, Any]], problems: list[Problem], config: Config) -> Iterator[TrialRow]:
    """One for each group of completions: by problem_index into the data, or with a row's columns in the line itself.

    Lines of one group_id that follow each other are one reward call. Raises UserError for a line of unknown origin.
    """
    by_index = {problem.index: problem for problem in problems}
    numbered = enumerate(records)
    for _, group in itertools.groupby(numbered, key=lambda item: item[1].get("group_id", f"line {item[0]}")):
        members = [record for _, record in group]
        row = row_of(_origin(members[0], by_index, config), config)
        texts = [_without_mark(record["completion"]) for record in members]
        yield TrialRow(row.index, row.prompt, row.columns, texts, [record.get("rewards") or {} for record in members])


def _origin(record: dict[str, Any], by_index: dict[int, Problem], config: Config) -> Problem:
    if (index := record.get("problem_index")) is not None:
        if index not in by_index:
            raise UserError(
                f"completions: problem_index {index} is not in data.train {config.data.train}; use the data they were "
                "sampled with"
            )
        return by_index[index]
    keys = [config.data.prompt_key] + (["answer"] if config.data.answer_key else [])
    if missing := [key for key in keys if key not in record]:
        raise UserError(
            f"completions: a line has neither problem_index nor {' and '.join(missing)}; it has {', '.join(record)}. "
            "Write problem_index, counted from 0 in data.train, into each line"
        )
    return Problem(-1, {name: value for name, value in record.items() if name not in ("completion", "rewards")})


def _without_mark(text: str) -> str:
    """samples.jsonl keeps special tokens, and reward functions never see them."""
    return without_end_of_turn(text) if text.rstrip().endswith(END_OF_TURN) else text


if __name__ == "__main__":
    exits.leave(exits.run("check", main))
