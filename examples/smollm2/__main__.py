"""`python -m examples.smollm2` makes what configs/smollm2_*.yaml read, if it is not there yet."""

from __future__ import annotations

import sys

from common import exits
from examples.smollm2.build import FOLDER, SMOLLM2, build


def main() -> None:
    build(FOLDER, SMOLLM2, lambda line: print(f"tandem: {line}", flush=True))


if __name__ == "__main__":
    sys.exit(exits.run("smollm2", main))
