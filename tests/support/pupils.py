"""The examples' pupils for tests of whole runs: hardly taught in seconds, or the quick start's as its config has it."""

import os
import sys
from pathlib import Path

from examples.example import Example, build
from examples.quickstart import QuickStart
from tests.support.own_process import run
from tests.support.threads import threads

# Beside the other workers' tests: threads that spin while they wait for each other would take ten times as long.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


# The quick start's pupil after 20 batches: it writes, and is never right.
HARDLY_TAUGHT = QuickStart(num_train=512, num_test=64, num_clean_steps=20, num_careless_steps=0)


def files_of(example: Example, folder: Path) -> list[str]:
    """Builds the example there, on one thread. Returns the overrides that name its model and problems."""
    with threads(1):
        build(example, folder, report=lambda line: None)
    return [f"model.path={folder}/model", f"data.train={folder}/train.jsonl", f"data.eval={folder}/test.jsonl"]


def build_quick_start() -> None:
    """The quick start's problems and model where its configs look for them; waits while another process builds it."""
    run([sys.executable, "-m", "examples.quickstart"], 900, env=os.environ | PASSIVE)
