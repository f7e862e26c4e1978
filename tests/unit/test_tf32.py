"""float32 on a GPU: vLLM's Triton attention would multiply in TF32, and the canary would refuse good weights."""

import os
from pathlib import Path

import pytest

from sampler.engine_arguments import set_environment
from tests.support.protocol_helpers import make_config

SETTING = "TRITON_F32_DEFAULT"


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "given", "expected"),
    [
        ("float32", False, None, "ieee"),
        ("float32", False, "tf32x3", "tf32x3"),  # what the user has set stays
        ("bfloat16", False, None, None),
        ("float32", True, None, None),
    ],
)
def test_triton_multiplies_in_full_float32_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, on_cpu: bool, given: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {SETTING: given} if given else {})
    set_environment(make_config(tmp_path, model={"path": "m", "dtype": dtype}), on_cpu)
    assert os.environ.get(SETTING) == expected
