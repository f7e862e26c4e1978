"""(a) Driver, GPU, compiler and headers: what `doctor` checks, and what torch sees of it."""

import pytest
import torch

from launcher.doctor import gpu_machine
from tests.gpu.conftest import Row

pytestmark = pytest.mark.gpu


def test_doctor_finds_nothing_wrong(on_gpu: bool, row: Row) -> None:
    checks = list(gpu_machine())
    for check in checks:
        row(*check.text.partition(": ")[::2])
    assert [check.text for check in checks if on_gpu and not check.ok] == []


def test_torch_computes(on_gpu: bool, row: Row) -> None:
    row("torch", torch.__version__)
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        row(f"GPU {i}", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB")
    device = "cuda" if on_gpu else "cpu"
    matrix = torch.randn(64, 64, device=device)
    assert torch.equal(matrix @ torch.eye(64, device=device), matrix) or on_gpu  # TF32 may round
    assert bool(torch.isfinite(matrix @ matrix).all())
