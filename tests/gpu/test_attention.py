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
    r"aten::_(?!.*backward)(?:scaled_dot_product_(?!attention$)\w+|flash_attention_forward|varlen\w*|efficient\w*forward)$"
)


def findings(on_gpu: bool, scratch: Path) -> Iterator[Finding]:
    from transformers import AttentionInterface

    attention.register()
    run = AttentionInterface()[attention.NAME]
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    random = Random(0)
    known, *rows = (_shape(random, 8 if on_gpu else 2, 512 if on_gpu else 16) for _ in range(_SHAPES + 1))
    _once(run, known, device, dtype)  # the library's own start
    shapes: list[dict[str, Any]] = []
    for row in rows:
        first, again = (_once(run, row, device, dtype) for _ in range(2))
        kernels = _kernels(run, row, device, dtype)
        shapes.append({"tokens": row.input_ids.shape[1], "kernels": kernels, "first_s": first, "again_s": again})
    by_kernel = Counter(name for shape in shapes for name in shape["kernels"])
    names = ", ".join(f"{name} in {count} of {_SHAPES} shapes" for name, count in by_kernel.items())
    ok = not any("math" in name for name in by_kernel) if on_gpu else None
    yield judged("attention", f"kernel in {dtype}".replace("torch.", ""), ok, names or "none recorded", shapes=shapes)
    ratio = statistics.median(shape["first_s"] / shape["again_s"] for shape in shapes)
    slow, fast = (_ms([shape[when] for shape in shapes]) for when in ("first_s", "again_s"))
    text = f"{_SHAPES} shapes: first {slow}, again {fast} (medians, forward and backward of one layer)"
    yield judged("attention", "a new shape", ratio < _SLOWER if on_gpu else None, text, ratio=ratio)


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
    """Names of torch's attention operators in one pass."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _once(run, row, device, dtype)
    names = (event.key for event in profile.key_averages())
    return sorted(name.removeprefix("aten::") for name in names if _KERNEL.match(name))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f} ms"
