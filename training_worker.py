"""Runs the trainer on one rank: `deepspeed training_worker.py --config CONFIG [key=value …]`.

Settings and batch sizes are checked before torch is imported, so that a mistake is reported within
seconds.
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
    if "RANK" in os.environ:  # if the launcher is killed, the ranks that it started must end too
        exits.die_with_parent()
    if "CROSS_RANK" in os.environ:  # only DeepSpeed's launcher sets it
        exits.end_in_time("deepspeed.launcher.launch")
    else:
        exits.end_in_time()

    # Rows differ in length, which would fragment a GPU's memory if its segments could not expand.
    # The user's own choice is kept: PYTORCH_ALLOC_CONF, or a vendor's PYTORCH_CUDA_ALLOC_CONF.
    if not any(name.endswith("_ALLOC_CONF") for name in os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

    from common import config  # imported here, because signal handlers must be set before
    from report.sinks import require_packages
    from trainer.algorithm.user_functions import require_user_functions
    from trainer.engine.deepspeed_config import deepspeed_config, optimizer_settings
    from trainer.engine.slurm_rank import set_rank

    settings = config.load(arguments.config, arguments.overrides)
    set_rank(os.environ)
    for optimizer in optimizer_settings(settings):  # of the policy, and of a critic
        # Here only for its checks: it raises UserError for settings that contradict each other.
        deepspeed_config(settings, config.world_size(), optimizer)
    require_packages(settings.run.report_to)
    require_user_functions(settings.algorithm)

    from trainer.start import run  # its imports take longer than all checks above

    run(settings)


if __name__ == "__main__":
    exits.leave(exits.run("trainer", main))
