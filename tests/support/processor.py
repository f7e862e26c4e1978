"""What depends on the processor, forced to each of its sides on any machine.

library     model/cpu/linear.py: MKL on Intel's and older processors of AMD, oneDNN elsewhere
packing     vLLM packs a CPU's matrices or leaves them as they are: tools.families.proof.packing
NARROWER    environments in which torch, oneDNN and MKL use fewer instructions than the processor has
"""

from collections.abc import Iterator

import pytest

from model.cpu import linear

NARROWER = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}


@pytest.fixture(params=["MKL", "oneDNN"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What linear layers of a model that is loaded in the test multiply with."""
    monkeypatch.setattr(linear, "_suits_mkl", lambda: request.param == "MKL")
    yield request.param
