"""`python -m examples.calculator` builds what configs/quickstart_tools.yaml reads, if it is not there yet."""

from __future__ import annotations

import sys

from common import exits
from examples.calculator.build import FOLDER, build
from examples.calculator.settings import QuickStartTools


def main() -> None:
    build(FOLDER, QuickStartTools(), lambda line: print(f"tandem: quick start with tools: {line}", flush=True))


if __name__ == "__main__":
    sys.exit(exits.run("quick start with tools", main))
