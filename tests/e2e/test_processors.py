"""The tests of what depends on the processor, where torch, vLLM, oneDNN and MKL use fewer instructions than it has."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.own_process import run
from tests.support.tier import full
from tools.families.families import NARROWER, proof
from tools.families.models import random_model

NARROW = "vLLM holds it in torch.bfloat16, published is float32"
UNIT = ("families", "layout", "logprobs", "attention", "log_softmax", "repeated_rows",
        "engine_tensors", "first_calls", "vision_models")  # fmt: skip
FILES = [*(f"tests/unit/test_{name}.py" for name in UNIT), "tests/engine/test_proof_engine.py"]


@full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("side", NARROWER)
def test_rows_gradients_and_reloads_are_right_with_fewer_instructions(side: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--all", "-p", "no:cacheprovider", *FILES]
    run(command, 1700, env=os.environ | NARROWER[side])


@full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_5_text", "lfm2", "stablelm", "apertus"])
def test_a_damaged_tensor_of_any_kind_is_found_with_all_instructions_and_with_fewer(
    family: str, tmp_path: Path
) -> None:
    random_model(family, 414).save_pretrained(tmp_path / "model")
    found = proof(family, tmp_path)["proof"]
    for side in ("all", *NARROWER):
        assert (found[side]["wrong"], found[side]["missed"]) == ([], []) and found[side]["damages"] > 50
    assert set(found["default"]["unproven"]) <= {"vLLM computes with it as it loads it", NARROW}
