"""`python -m examples.drawings` builds what configs/quickstart_vlm.yaml reads, if it is not there yet."""

from __future__ import annotations

import sys

from common import exits
from examples.drawings.build import FOLDER, build
from examples.drawings.settings import QuickStartVlm


def main() -> None:
    build(FOLDER, QuickStartVlm(), lambda line: print(f"tandem: quick start with images: {line}", flush=True))


if __name__ == "__main__":
    sys.exit(exits.run("quick start with images", main))
