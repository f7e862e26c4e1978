"""The trainer on one rank: `deepspeed training_worker.py --config CONFIG [key=value …]`.

Settings and batch arithmetic are checked before torch is imported, so that a mistake costs seconds.
"""

import argparse
import os

from common.processes import exits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    if "RANK" in os.environ:  # a killed launcher must not leave ranks behind
        exits.die_with_parent()
    if "CROSS_RANK" in os.environ:  # set by this launcher only
        exits.end_in_time("deepspeed.launcher.launch")
    else:
        exits.end_in_time()

    # Rows differ in length, so fixed segments of a GPU's memory would leave unusably small pieces.
    # If PYTORCH_ALLOC_CONF or a vendor's variable for it is set, the user has chosen.
    if not any(name.endswith("_ALLOC_CONF") for name in os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

    from common import config  # only after signal handlers are set
    from report.sinks import require_packages
    from trainer.algorithm.user_functions import require_user_functions
    from trainer.engine.deepspeed_config import deepspeed_config, optimizer_settings
    from trainer.engine.slurm_rank import set_rank

    settings = config.load(arguments.config, arguments.overrides)
    set_rank(os.environ)
    for optimized in optimizer_settings(settings):
        deepspeed_config(settings, config.world_size(), optimized)
    require_packages(settings.run.report_to)
    require_user_functions(settings.algorithm)

    from trainer.start import run

    run(settings)


if __name__ == "__main__":
    exits.leave(exits.run("trainer", main))
