"""Sizes of all families, counted without weights, against the models themselves and the caches that they make."""

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from model.files.counted_dims import counted_dims
from model.files.dims import model_dims
from tests.support.configs import config_of
from tests.support.tier import full
from tools.families.models import BASE, FAMILIES, family_config, random_model

VOCAB = 64
KINDS = ("gemma4_text", "gpt_oss", "deepseek_v3", "granitemoehybrid", "lfm2")


def values(cache: Any) -> int:
    """Of every floating-point tensor in transformers' cache."""
    held = tree_leaves([vars(layer) for layer in cache.layers])
    return sum(t.numel() for t in held if torch.is_tensor(t) and t.is_floating_point())


@pytest.mark.parametrize("family", [name if name in KINDS else pytest.param(name, marks=full) for name in FAMILIES])
def test_parameters_and_cache_of_every_family_are_those_of_the_model(family: str) -> None:
    """The model's own cache after five and six tokens: what grows, and what does not, where transformers keeps the
    token that a convolution sees now beside those before it."""
    dims = counted_dims(family_config(family, VOCAB))
    model = random_model(family, VOCAB).eval()
    model.set_attn_implementation("eager")  # sdpa would pass over a soft cap
    assert dims is not None and dims.parameters == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        five, six = (values(model(torch.arange(n)[None], use_cache=True).past_key_values) for n in (5, 6))
    present = sum(m.weight.shape[0] for m in model.modules() if isinstance(m, torch.nn.Conv1d))
    assert (dims.kv_values_per_token, dims.state_values) == (six - five, five - 5 * (six - five) - present)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_counting_and_the_formulas_agree(family: str) -> None:
    config = family_config(family, VOCAB, tie_word_embeddings=True)
    counted, by_formula = counted_dims(config), model_dims(config.to_dict())
    assert counted is not None and by_formula is not None
    for name in ("parameters", "intermediate", "kv_values_per_token", "hidden", "kv_heads", "head_dim", "tied"):
        assert getattr(counted, name) == getattr(by_formula, name), name
    assert counted.active_in_layers == by_formula.active_in_layers + 128  # and the last norm
    assert counted.adapter_parameters(8) == by_formula.adapter_parameters(8)


@pytest.mark.parametrize("family", ["granitemoehybrid", "phi3", "glm4_moe", "llama4_text"])
def test_adapters_are_those_that_peft_makes(family: str) -> None:
    from model.files.lora import add_adapters

    model, dims = random_model(family, VOCAB), counted_dims(family_config(family, VOCAB))
    add_adapters(model, config_of(lora={"r": 8}))
    made = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert dims is not None and dims.adapter_parameters(8) == made > 0


def test_linear_attention_keeps_no_keys() -> None:
    """Every second layer of MiniMax has linear attention, with fused projections."""
    dims = counted_dims(AutoConfig.for_model("minimax", vocab_size=VOCAB, num_local_experts=4, **BASE))
    assert dims is not None and dims.kv_values_per_token == 2 * 2 * 2 * 32


def test_what_transformers_does_not_have_is_not_counted() -> None:
    from transformers import PretrainedConfig

    assert counted_dims(PretrainedConfig(model_type="of somebody's own")) is None
