"""`bash launch.sh check config.yaml [key=value …]`: tries the rewards before any GPU time is spent.

Runs the reward functions over gold and wrong answers of the config's data (rewards/gold_answers.py). Imports no torch.
"""

from __future__ import annotations

import argparse

from common import config as settings
from common import exits
from common.errors import UserError
from rewards.gold_answers import GoldRow, check_gold
from sampler.dataset import load_data, whole_row
from sampler.messages import shown_to_rewards

FAILED = 1


def main() -> None:
    """Raises UserError, and SystemExit with 1 when a reward function or a gold answer fails."""
    parser = argparse.ArgumentParser(prog="launch.sh check", description="Try the reward functions of a config.")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rows", type=int, default=1000, help="gold answers to try, evenly spaced (default: 1000)")
    arguments = parser.parse_intermixed_args()
    if arguments.rows < 1:
        raise UserError(f"check --rows {arguments.rows}: at least 1 is tried")
    config = settings.load(arguments.config, arguments.overrides)

    problems = load_data("data.train", config.data.train, config.data)
    chosen = problems[:: -(-len(problems) // arguments.rows)]
    print(f"tandem: gold answers: {len(chosen)} of {len(problems)} rows of {config.data.train}", flush=True)
    rows = [
        GoldRow(problem.index, shown_to_rewards(problem, config), whole_row(problem, config.data.image_key))
        for problem in chosen
    ]
    found = check_gold(config.rewards, rows, config.trainer.max_steps)
    print("\n".join(found.lines))
    for kind, texts in (("problem", found.problems), ("warning", found.warnings)):
        for text in texts:
            print(f"{kind}: {text}", flush=True)
    print(f"\ntandem: {len(found.problems)} problems" if found.problems else "\ntandem: the rewards look right")
    if found.problems:
        raise SystemExit(FAILED)


if __name__ == "__main__":
    exits.leave(exits.run("check", main))
