"""float32 on a GPU: vLLM's Triton attention would multiply in TF32, and the canary would refuse good weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.errors import Retryable
from sampler.engine_arguments import set_environment
from sampler.reload import CanaryBounds, _require_canary
from tests.support.protocol_helpers import make_config

SETTING = "TRITON_F32_DEFAULT"


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "given", "expected"),
    [
        ("float32", False, None, "ieee"),
        ("float32", False, "tf32x3", "tf32x3"),  # what the user has set stays
        ("bfloat16", False, None, None),
        ("float32", True, None, None),
    ],
)
def test_triton_multiplies_in_full_float32_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, on_cpu: bool, given: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {SETTING: given} if given else {})
    monkeypatch.setattr("sampler.engine_arguments.cpu_cache_gib", lambda _: 1)
    set_environment(make_config(tmp_path, model={"path": "m", "dtype": dtype}), on_cpu)
    assert os.environ.get(SETTING) == expected


def tf32(x: Tensor) -> Tensor:
    """Rounded to 10 bits of mantissa, to nearest, as tensor cores read their operands."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def test_tf32_keeps_ten_bits() -> None:
    x = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-12, 1 + 2**-11 + 2**-20, -3.0])
    assert tf32(x).tolist() == [1.0, 1 + 2**-10, 1.0, 1 + 2**-10, -3.0]


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Plain attention whose two products have operands in TF32."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = tf32(query) @ tf32(key).transpose(2, 3) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (tf32(scores.softmax(-1)) @ tf32(value)).transpose(1, 2), None


def test_without_it_the_canary_refuses_good_weights(tmp_path: Path) -> None:
    """Emulated in a small model with the sharp attention of a trained one, over 56 tokens like the canary's."""
    from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

    AttentionInterface.register("tf32", attention)
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 512}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.12}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, attn_implementation="eager")).eval()
    ids = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(0))

    def logprobs() -> Tensor:
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, 3:-1]
        return torch.log_softmax(logits.double(), -1).gather(-1, ids[:, 4:, None]).flatten()

    exact = logprobs()
    model.config._attn_implementation = "tf32"
    x = np.asarray((logprobs() - exact).tolist())
    assert len(x) == 56
    bounds = CanaryBounds.of(make_config(tmp_path, model={"path": "m", "dtype": "float32"}))
    with pytest.raises(Retryable, match="canary"):
        _require_canary(x, bounds, 1)
    _require_canary(np.zeros(56), bounds, 1)
