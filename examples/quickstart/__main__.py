"""`python -m examples.quickstart` builds what configs/quickstart.yaml reads, if it is not there yet."""

from __future__ import annotations

import sys

from common import exits
from examples.quickstart.build import FOLDER, build
from examples.quickstart.settings import QuickStart


def main() -> None:
    build(FOLDER, QuickStart(), lambda line: print(f"tandem: quick start: {line}", flush=True))


if __name__ == "__main__":
    sys.exit(exits.run("quick start", main))
