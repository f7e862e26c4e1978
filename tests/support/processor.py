"""Every place whose behaviour follows from the processor, and how tests force each of its sides on any machine.

model/cpu/linear.py     MKL on Intel's and older processors of AMD, oneDNN elsewhere: `library`
vLLM's library and      for AVX2, AVX-512 or bfloat16; matrices packed by oneDNN or for AMX, or left as they are:
  its matrices          tools/families/narrower, by test_processors.py
vLLM's other kernels    order experts and convolutions for its instructions: vllm_insides.unpacked reads them back,
                        and what it does not know is unproven: stand-ins of kernels in test_engine_tensors.py
torch, oneDNN, MKL      choose kernels by instructions, which round otherwise: NARROWER of tools/families/families.py
model/cores.py      lends cores and counts them: test_cores.py sets them, test_placement.py
repeated_rows.py        compares itself with all rows, on whatever computes them: test_repeated_rows.py
"""

from collections.abc import Iterator

import pytest

from model.cpu import linear


@pytest.fixture(params=["MKL", "oneDNN"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What linear layers of a model that is loaded in the test multiply with."""
    monkeypatch.setattr(linear, "_suits_mkl", lambda: request.param == "MKL")
    yield request.param
