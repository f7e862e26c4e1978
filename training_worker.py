"""One rank of the trainer: `deepspeed training_worker.py --config configs/quickstart.yaml [key=value …]`.

Settings and batch arithmetic are checked before torch is imported, so that a mistake costs seconds.
"""

from __future__ import annotations

import argparse
import os

from common import config, exits
from report.sinks import require_packages
from trainer.algorithm.user_functions import require_user_functions
from trainer.engine.deepspeed_config import all_optimized, deepspeed_config
from trainer.engine.rank_device import set_device
from trainer.engine.slurm_rank import set_rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    exits.end_in_time(launcher="deepspeed.launcher.launch")
    settings = config.load(arguments.config, arguments.overrides)
    set_rank(os.environ)
    for optimized in all_optimized(settings):
        deepspeed_config(settings, config.world_size(), optimized)
    require_packages(settings.run.report_to)
    require_user_functions(settings.algorithm)
    if "RANK" in os.environ:  # a killed launcher must not leave ranks behind
        exits.die_with_parent()
    set_device(os.environ)

    from trainer.start import run

    run(settings)


if __name__ == "__main__":
    exits.leave_rank(exits.run("trainer", main), int(os.environ.get("RANK", "0")))
