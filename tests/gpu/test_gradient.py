"""(c) The gradient of packed rows against one plain forward per completion, in float32 and in bfloat16.

In float32 both must agree to rounding. In bfloat16 each has its own rounding: packed may be no further from the
float32 gradient than twice what plain forwards are.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.logprobs import load_causal_lm, score_logprobs
from model.packing import pack
from tests.gpu.conftest import Row
from tools.benchmarks.cells import make_model

pytestmark = pytest.mark.gpu

_PROMPT, _COMPLETIONS = list(range(3, 40)), [list(range(40, 90)), list(range(90, 100)), list(range(100, 164))]
_FLOAT32 = 1e-4  # of the gradient's norm; TF32 products would give 1e-3


def test_packed_rows_have_the_gradient_of_plain_forwards(on_gpu: bool, tmp_path: Path, row: Row) -> None:
    make_model("1m", tmp_path / "model")
    device = "cuda" if on_gpu else "cpu"
    truth = _gradient(tmp_path, "float32", device, is_packed=False)
    packed = _distance(_gradient(tmp_path, "float32", device, is_packed=True), truth)
    half, plain = (_distance(_gradient(tmp_path, "bfloat16", device, kind), truth) for kind in (True, False))
    row("packed from plain, float32", f"{packed:.1e}", f"< {_FLOAT32:.0e}")
    row("from float32, bfloat16", f"packed {half:.1e}, plain {plain:.1e}", "packed < 2 × plain")
    assert packed < _FLOAT32
    assert half < 2 * plain


def _gradient(folder: Path, dtype: str, device: str, is_packed: bool) -> Tensor:
    """Of the sum of all log-probs, as one float32 vector."""
    model: Any = load_causal_lm(str(folder / "model"), dtype, None, False).to(device)
    groups = [(_PROMPT, _COMPLETIONS)] if is_packed else [(_PROMPT, [one]) for one in _COMPLETIONS]
    for group in groups:
        score_logprobs(model, pack([group]).to(torch.device(device)), 1.0, 64).sum().backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def _distance(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())
