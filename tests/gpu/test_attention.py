"""(b) The attention of packed rows: compiled, and a new shape costs no more than a known one.

Every group of a run has another shape. If each compiled a kernel anew, it would cost more than the attention itself; so
20 shapes are run twice, forward and backward.
"""

import statistics
import time
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from model import attention, compiled
from model.packing import PackedRow, pack
from tests.gpu.conftest import Row

pytestmark = pytest.mark.gpu

_SHAPES = 20
_SLOWER = 5.0  # a shape's first time over its second; a compilation takes seconds


def test_attention_is_compiled_and_a_new_shape_costs_no_more_than_a_known_one(on_gpu: bool, row: Row) -> None:
    from transformers import AttentionInterface

    attention.register()
    run = AttentionInterface()[attention.NAME]
    random, seconds = Random(0), []
    for _ in range(3):  # compiles for any length
        _once(run, _shape(random, on_gpu), on_gpu)
    for packed in [_shape(random, on_gpu) for _ in range(_SHAPES)]:
        seconds.append([_once(run, packed, on_gpu) for _ in range(2)])
    first, again = (1000 * statistics.median(times) for times in zip(*seconds, strict=True))
    slower = statistics.median(new / old for new, old in seconds)
    row("attention", "not compiled" if compiled.has_failed() else "compiled", "compiled", not compiled.has_failed())
    text = f"first {first:.1f} ms, again {again:.1f} ms, medians"
    row(f"{_SHAPES} shapes, forward and backward", text, f"< {_SLOWER:g} times", slower < _SLOWER)


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
    row = row.to(query.device)
    base = SimpleNamespace(config=Qwen2Config(attn_implementation=attention.NAME))
    given = attention.options(base, row)
    out, _ = run(torch.nn.Identity(), query, key, value, None, scaling=128**-0.5, **given)
    out.sum().backward()
    wait()
    assert query.grad is not None and bool(torch.isfinite(query.grad).all())
    return time.perf_counter() - start
