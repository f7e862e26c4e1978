"""(b) Which attention kernel packed rows take, and whether a new shape costs more than a known one.

Every group of a run has another shape. A kernel that plans each shape anew (cuDNN), or that writes all scores to memory
(math), would cost more than the attention itself; so 20 shapes are run twice, forward and backward.
"""

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from model import attention
from model.packing import PackedRow, pack
from tests.gpu.conftest import Record

pytestmark = pytest.mark.gpu

_SHAPES = 20
_SLOWER = 5.0  # a shape's first time over its second; a plan of cuDNN takes hundreds of milliseconds, not a few
_KERNEL = re.compile(
    r"aten::_(?!.*backward)(?:scaled_dot_product_(?!attention$)\w+|flash_attention_forward|varlen\w*|efficient\w*forward)$"
)


def test_no_kernel_is_the_math_one_and_a_new_shape_costs_no_more_than_a_known_one(
    on_gpu: bool, record_property: Record
) -> None:
    from transformers import AttentionInterface

    attention.register()
    run = AttentionInterface()[attention.NAME]
    random, seconds, kernels = Random(0), [], Counter[str]()
    _once(run, _shape(random, on_gpu), on_gpu)  # the library's own start
    for row in [_shape(random, on_gpu) for _ in range(_SHAPES)]:
        seconds.append([_once(run, row, on_gpu) for _ in range(2)])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            _once(run, row, on_gpu)
        kernels.update(e.key.removeprefix("aten::") for e in profile.key_averages() if _KERNEL.match(e.key))
    first, again = (1000 * statistics.median(times) for times in zip(*seconds, strict=True))
    record_property(f"kernels of {_SHAPES} shapes", dict(kernels))
    record_property("forward and backward of a layer", f"first {first:.1f} ms, again {again:.1f} ms, medians")
    assert not on_gpu or not any("math" in name for name in kernels)
    assert not on_gpu or statistics.median(new / old for new, old in seconds) < _SLOWER


def _shape(random: Random, on_gpu: bool) -> PackedRow:
    """One group of random lengths, all its completions behind one prompt."""
    completions, longest = (8, 512) if on_gpu else (2, 16)
    prompt = random.randint(longest // 2, longest)
    lengths = [random.randint(longest // 4, longest) for _ in range(completions)]
    return pack([([1] * prompt, [[1] * length for length in lengths])])


def _once(run: Callable[..., Any], row: PackedRow, on_gpu: bool) -> float:
    """Seconds of one forward and backward with the heads of Qwen2.5-1.5B."""
    place: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {}
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    tokens = row.input_ids.shape[1]
    query, key, value = (torch.randn(1, heads, tokens, 128, requires_grad=True, **place) for heads in (12, 2, 2))
    wait()
    start = time.perf_counter()
    out, _ = run(torch.nn.Identity(), query, key, value, None, scaling=128**-0.5, spans=row.spans)
    out.sum().backward()
    wait()
    assert query.grad is not None and bool(torch.isfinite(query.grad).all())
    return time.perf_counter() - start
