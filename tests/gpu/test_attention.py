"""(b) Which attention kernel packed rows take, and whether a new shape costs more than a known one.

Every group of a run has another shape. A kernel that plans each shape anew (cuDNN), or that writes all scores to memory
(math), would cost more than the attention itself; so 20 shapes are run twice, forward and backward.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from model import attention
from model.packing import PackedRow, pack

pytestmark = pytest.mark.gpu

_SHAPES = 20
_SLOWER = 5.0  # a shape's first time over its second; a plan of cuDNN takes hundreds of milliseconds, not a few
_KERNEL = re.compile(
    r"aten::_(?!.*backward)(?:scaled_dot_product_(?!attention$)\w+|flash_attention_forward|varlen\w*|efficient\w*forward)$"
)


def test_no_kernel_is_the_math_one_and_a_new_shape_costs_no_more_than_a_known_one(
    on_gpu: bool, record_property: Callable[[str, object], None]
) -> None:
    from transformers import AttentionInterface

    attention.register()
    run = AttentionInterface()[attention.NAME]
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    random = Random(0)
    known, *rows = (_shape(random, 8 if on_gpu else 2, 512 if on_gpu else 16) for _ in range(_SHAPES + 1))
    _once(run, known, device, dtype)  # the library's own start
    seconds, kernels = [], Counter[str]()
    for row in rows:
        seconds.append([_once(run, row, device, dtype) for _ in range(2)])
        kernels.update(_kernels(run, row, device, dtype))
    first, again = (1000 * statistics.median(times) for times in zip(*seconds, strict=True))
    record_property(f"kernels in {dtype}, of {_SHAPES} shapes", dict(kernels))
    record_property("forward and backward of a layer", f"first {first:.1f} ms, again {again:.1f} ms, medians")
    assert not on_gpu or not any("math" in name for name in kernels)
    assert not on_gpu or statistics.median(new / old for new, old in seconds) < _SLOWER


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
