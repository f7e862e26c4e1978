"""A trainer's rank on the simulated device, or the same one on the CPU: `python -m tests.support.device_worker`.

module    has `work(worker)`, which runs what the test wants to see
folder    has the models, and gets what the rank tells
library   the simulated device; without it everything is on the CPU
"""

import importlib
import os
import sys
from pathlib import Path


def main(module: str, folder: str, library: str | None = None) -> None:
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.pop("DS_ACCELERATOR", None)  # of another test in the process that started this one
    if library:
        from tests.support.simulated_device import start

        start(Path(library))
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    torch.set_num_threads(1)
    from tests.support.rank import Worker

    importlib.import_module(module).work(Worker(Path(folder), dist_backend="auto"))


if __name__ == "__main__":
    main(*sys.argv[1:])
