"""Which architectures the installed vLLM runs, without importing it."""

import subprocess
import sys
from pathlib import Path

import pytest

from model.engine_models import is_unknown
from tests.support.speed import limit

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("architecture", "unknown"),
    [
        ("Qwen2ForCausalLM", False),  # vLLM's own
        ("Qwen2VLForConditionalGeneration", False),
        ("SmolLM3ForCausalLM", False),  # its Transformers back end, as vLLM says itself
        ("HeliumForCausalLM", False),  # as transformers' source says
        ("CodeGenForCausalLM", True),  # has an attention of its own
        ("MptForCausalLM", True),  # vLLM had it once
        ("NobodysForCausalLM", True),
    ],
)
def test_what_vllm_has_and_what_its_transformers_back_end_takes_is_known(architecture: str, unknown: bool) -> None:
    assert is_unknown([architecture]) is unknown
    assert not is_unknown([architecture, "LlamaForCausalLM"])


def test_the_answer_takes_less_than_a_second_and_imports_neither() -> None:
    code = (
        "import sys, time; begun = time.monotonic(); from model.engine_models import is_unknown; "
        "assert is_unknown(['NobodysForCausalLM']); assert not {'vllm', 'transformers', 'torch'} & set(sys.modules); "
        "print(time.monotonic() - begun)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < limit(1.0)
