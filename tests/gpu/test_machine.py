"""(a) Driver, GPU, compiler and headers: what `doctor` checks, and what torch sees of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpu_check.finding import Finding, judged
from launcher import doctor_gpu


def findings(on_gpu: bool, scratch: Path) -> Iterator[Finding]:
    import torch

    for check in doctor_gpu.checks():
        yield judged("machine", check.text.partition(":")[0], check.ok or not on_gpu, check.text.partition(": ")[2])
    if not on_gpu:
        yield Finding("machine", "torch", "figure", f"{torch.__version__}, {torch.get_num_threads()} threads")
        return
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        text = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, torch {torch.__version__}"
        bytes_ = int(properties.total_memory)
        yield judged("machine", f"torch sees GPU {i}", True, text, name=properties.name, bytes=bytes_)
    product = torch.randn(64, 64, device="cuda") @ torch.eye(64, device="cuda")
    yield judged("machine", "a product on the GPU", bool(torch.isfinite(product).all()), "computed")
