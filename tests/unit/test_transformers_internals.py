"""What an upgrade of transformers or peft would take away, by the name of the function that leans on it."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2VLConfig

from model import transformers_internals

SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def model_of(kind: str) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **HEADS))


@pytest.mark.parametrize(("kind", "mixes"), [("qwen2", False), ("llama", False), ("mamba", True)])
def test_mixes_packed_sequences(kind: str, mixes: bool) -> None:
    assert transformers_internals.mixes_packed_sequences(model_of(kind)) is mixes


def test_decoder_layers() -> None:
    model = model_of("qwen2")
    assert transformers_internals.decoder_layers(model) == list(model.model.layers)


def test_value_class() -> None:
    made = transformers_internals.value_class(Qwen2VLConfig())
    assert made.__name__ == "Qwen2VLForConditionalGeneration" and made._tied_weights_keys == {}
    assert isinstance(made.__mro__[1]._tied_weights_keys, dict)


def test_without_adapters() -> None:
    from peft import LoraConfig, get_peft_model

    plain, ids = model_of("qwen2").train(), torch.tensor([[1, 2, 3]])
    expected = plain(ids).logits.detach()
    adapted = get_peft_model(plain, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted.train()
    assert not torch.equal(adapted(ids).logits, expected)
    with transformers_internals.without_adapters(adapted):
        assert torch.equal(adapted(ids).logits, expected) and not adapted.training
    assert adapted.training and any(p.requires_grad for p in adapted.parameters())
    assert not torch.equal(adapted(ids).logits, expected)
