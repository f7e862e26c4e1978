"""The sampler process: `python sampling.py --config configs/quickstart.yaml [key=value …]`.

Settings, data, prompts and rewards are checked before vLLM is imported, so that a mistake costs
seconds.
"""

import argparse
import os

from common import config
from common.processes import exits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    default_id = os.environ.get("TANDEM_SAMPLER_ID", "sampler-0")
    parser.add_argument("--id", default=default_id, help="unique per sampler")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    exits.end_in_time()
    if os.environ.get("TANDEM_SUPERVISED"):
        exits.die_with_parent()
    settings = config.load(arguments.config, arguments.overrides)
    if settings.sampler.devices and "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings.sampler.devices))

    from sampler.start import run

    run(settings, arguments.id)


if __name__ == "__main__":
    exits.leave(exits.run("sampler", main))
