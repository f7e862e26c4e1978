"""(b) Which attention kernel packed rows take, and whether a new shape costs more than a known one.

Every group of a run has another shape. A kernel that plans each shape anew (cuDNN), or that writes all scores to memory
(math), would cost more than the attention itself; so 20 shapes are run twice, forward and backward.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from gpu_check.finding import Finding, judged
from model import attention
from model.packing import PackedRow, pack

_SHAPES = 20
_SLOWER = 5.0  # a shape's first time over its second; a plan of cuDNN takes hundreds of milliseconds, not a few
_KERNEL = re.compile(
    r"aten::_(?:scaled_dot_product_(?!attention$)\w+|flash_attention_forward|varlen\w*|efficient\w*forward)$"
)


def findings(on_gpu: bool, scratch: Path) -> Iterator[Finding]:
    from transformers import AttentionInterface

    attention.register()
    run = AttentionInterface()[attention.NAME]
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    random, first, again, kernels = Random(0), [], [], Counter[str]()
    known, *shapes = (_shape(random, 8 if on_gpu else 2, 512 if on_gpu else 16) for _ in range(_SHAPES + 1))
    _once(run, known, device, dtype)  # the library's own start
    for row in shapes:
        first.append(_once(run, row, device, dtype))
        again.append(_once(run, row, device, dtype))
    for row in shapes[:3]:
        kernels.update(_kernels(run, row, device, dtype))
    names = ", ".join(sorted(kernels)) or "none recorded"
    is_math = any("math" in name for name in kernels)
    figures = {"kernels": dict(kernels), "first_s": first, "again_s": again}
    yield judged("attention", f"kernel in {dtype}".replace("torch.", ""), not (on_gpu and is_math), names, **figures)
    ratio = statistics.median(a / b for a, b in zip(first, again, strict=True))
    text = f"{_SHAPES} shapes: first {_ms(first)}, again {_ms(again)} (medians, forward and backward of one layer)"
    yield judged("attention", "a new shape", ratio < _SLOWER or not on_gpu, text, ratio=ratio)


def _shape(random: Random, completions: int, longest: int) -> PackedRow:
    """One group of random lengths, all its completions behind one prompt."""
    prompt = random.randint(longest // 2, longest)
    lengths = [random.randint(longest // 4, longest) for _ in range(completions)]
    return pack([([1] * prompt, [[1] * length for length in lengths])])


def _once(run: Callable[..., Any], row: PackedRow, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of one forward and backward with the heads of Qwen2.5-1.5B."""
    tokens = row.input_ids.shape[1]
    query, key, value = (_heads(n, tokens, device, dtype) for n in (12, 2, 2))
    _wait(device)
    start = time.perf_counter()
    out, _ = run(torch.nn.Identity(), query, key, value, None, scaling=128**-0.5, spans=row.spans)
    out.sum().backward()
    _wait(device)
    assert query.grad is not None and bool(torch.isfinite(query.grad).all())
    return time.perf_counter() - start


def _heads(heads: int, tokens: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, heads, tokens, 128, device=device, dtype=dtype, requires_grad=True)


def _kernels(run: Callable[..., Any], row: PackedRow, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Names of torch's attention operators in one forward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _once(run, row, device, dtype)
    return [event.key for event in profile.key_averages() if _KERNEL.match(event.key)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f} ms"
