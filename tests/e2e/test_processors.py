"""The tests of what depends on the processor, where torch, oneDNN and MKL use fewer instructions than this one has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processor import NARROWER
from tests.support.speed import limit
from tests.support.tier import full

ROOT = Path(__file__).resolve().parents[2]
FILES = ("families", "layout", "linear", "logprobs", "attention", "log_softmax", "repeated_rows", "engine_tensors")


@full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("side", NARROWER)
def test_rows_gradients_and_reloads_are_right_with_fewer_instructions(side: str) -> None:
    tests = [f"tests/unit/test_{name}.py" for name in FILES] + ["tests/engine/test_proof_engine.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--all", "-p", "no:cacheprovider", *tests]
    environment = os.environ | NARROWER[side]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit(1700))
    assert done.returncode == 0, done.stdout[-3000:]
