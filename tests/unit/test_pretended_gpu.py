"""Kernels that torch generates and Triton compiles for a GPU that is not there. Nothing runs; its tensors are fake."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PRETENDED = ROOT.parent / "shared" / "prototypes" / "gpu_offline"

SCRIPT = """
import json, sys
from pretend import RECORDS, pretend
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
capability, cases = json.loads(sys.argv[1])
pretend(capability)
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
precompile = CachingAutotuner.precompile

def fits(self, *given, **named):
    first = len(RECORDS)
    precompile(self, *given, **named)
    for record in RECORDS[first:]:
        needed = record.get("shared1", record.get("shared", 0))
        if needed > record["limit"]:
            raise RuntimeError(f"out of resource: shared memory, Required: {needed}, Hardware limit: {record['limit']}")

CachingAutotuner.precompile = fits
from model import attention, compiled
compiled.is_compiled = lambda _: True
with FakeTensorMode(allow_non_fake_inputs=True):
    for heads, key_heads, size, value_size, dtype, length in cases:
        torch._dynamo.reset()
        mask = attention._mask_of(torch.zeros(3, length, dtype=torch.int32, device="cuda"), length)
        query, key, value = (
            torch.randn(1, h, length, d, device="cuda", dtype=getattr(torch, dtype), requires_grad=True)
            for h, d in ((heads, size), (key_heads, size), (key_heads, value_size))
        )
        slower = []
        instead = lambda: slower.append(1) or (query.sum() * 0 + value.repeat_interleave(heads // key_heads, 1))
        given = query, key, value, mask, size**-0.5, None, None
        compiled.compiled(attention._flex_attention, *given, instead=instead).sum().backward()
        print(json.dumps(not slower), flush=True)
"""


@pytest.fixture(scope="module")
def pretended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (PRETENDED / "pretend.py").exists():
        pytest.skip("the library that pretends a GPU is not beside this folder: ../shared/prototypes/gpu_offline")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install triton==3.7.1 beside torch's build for CPUs")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: apt-get install g++")
    return Path(shutil.copytree(PRETENDED, tmp_path_factory.mktemp("pretended") / "gpu"))


def are_compiled(folder: Path, capability: int, cases: list[Any]) -> list[bool]:
    """Returns for each case whether FlexAttention's forward and backward were compiled."""
    changes = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "NO_PTXAS": "1", "TORCHDYNAMO_DISABLE": "0"}
    changes["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", SCRIPT, json.dumps([capability, cases])]
    done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_rows_below_128_tokens_of_grouped_heads_are_compiled(pretended: Path) -> None:
    cases = [(heads, 2, 64, 64, "bfloat16", length) for heads, length in ((4, 100), (8, 60), (16, 17))]
    assert are_compiled(pretended, 90, cases) == [True] * 3


def test_large_heads_are_trained_on_a_card_with_99_kib_for_a_block(pretended: Path) -> None:
    cases = [(4, 2, 256, 256, "bfloat16", 300), (4, 2, 192, 192, "float32", 300)]
    assert are_compiled(pretended, 120, cases) == [True, True]


def test_heads_of_160_and_of_192_with_values_of_128_are_trained_on_such_a_card(pretended: Path) -> None:
    cases = [(4, 2, 160, 160, "bfloat16", 300), (4, 2, 192, 128, "bfloat16", 300)]
    assert are_compiled(pretended, 86, cases) == [True, True]
