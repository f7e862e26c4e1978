"""TRL's own code against this trainer's, where TRL has been installed beside the project."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.speed import limit
from tools.benchmarks import trl_formulas


def test_losses_gradients_and_advantages_equal_those_of_trl() -> None:
    if not (trl_formulas.ENVIRONMENT / ".complete").exists():
        pytest.skip("TRL is not installed beside the project; run python tools/benchmarks/trl_formulas.py once")
    done = subprocess.run([sys.executable, trl_formulas.__file__], capture_output=True, text=True, timeout=limit(300))
    assert done.returncode == 0, done.stdout + done.stderr
