"""The tests of what depends on the processor, where torch, oneDNN and MKL use fewer instructions than this one has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processor import NARROWER
from tests.support.speed import limit
from tests.support.tier import full
from tools.families.models import BFLOAT16, random_model

ROOT = Path(__file__).resolve().parents[2]
NARROW = "vLLM holds it in torch.bfloat16, published is float32"
FILES = ("families", "layout", "linear", "logprobs", "attention", "log_softmax", "repeated_rows", "engine_tensors")


@full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("side", NARROWER)
@pytest.mark.parametrize("tests", ["rows and gradients", "reloads"])
def test_rows_gradients_and_reloads_are_right_with_fewer_instructions(side: str, tests: str) -> None:
    """vLLM's own kernels in bfloat16 abort where oneDNN may not use what they were built for: these keep it."""
    is_vllm = tests == "reloads"
    files = ["tests/engine/test_proof_engine.py"] if is_vllm else [f"tests/unit/test_{name}.py" for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--all", "-p", "no:cacheprovider", *files]
    narrower = {name: value for name, value in NARROWER[side].items() if not is_vllm or "ONEDNN" not in name}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | narrower, capture_output=True, text=True, timeout=limit(1700)
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text", "lfm2", "stablelm", "apertus"]
)
def test_a_damaged_tensor_of_any_kind_is_found_where_vllm_packs_matrices_and_where_it_does_not(
    family: str, tmp_path: Path
) -> None:
    """In bfloat16 a product shows one number of a packed matrix by chance."""
    random_model(family, 414).save_pretrained(tmp_path / "model")
    dtype = "bfloat16" if family in BFLOAT16 else "float32"
    command = [sys.executable, "-m", "tools.families.proof", str(tmp_path / "model"), dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(580))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for side in ("packed", "plain"):
        assert found[side]["wrong"] == [] and found[side]["damages"] > 50
        missed = [each for each in found[side]["missed"] if dtype == "float32" or "one element" not in each]
        assert missed == []
    assert set(found["plain"]["unproven"]) <= {"vLLM computes with it as it loads it", NARROW}
