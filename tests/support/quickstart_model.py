"""The quick start's problems and model where its configs look for them, for tests in several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.speed import limit

ROOT = Path(__file__).resolve().parents[2]
# Beside the other workers' tests: threads that spin while they wait for each other would take ten times as long.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def build_once() -> None:
    """Waits while another process builds it."""
    command = [sys.executable, "-m", "examples.quickstart"]
    subprocess.run(command, cwd=ROOT, env=os.environ | PASSIVE, check=True, timeout=limit(900))
