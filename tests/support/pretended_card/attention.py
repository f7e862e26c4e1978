"""Layers and packed rows whose attention a pretended card compiles or executes."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from model import attention
from model.attention import NAME
from model.packing import PackedRow, pack

CAP = 5.0  # of a score: small enough to change values


@dataclass(frozen=True)
class Heads:
    """The attention of a layer."""

    query: int  # number of heads
    key: int  # number of key and value heads
    size: int
    kind: str = "full"  # window, cap, cap and window, sinks, sinks and window

    @property
    def window(self) -> int | None:
        return 23 if "window" in self.kind else None

    @property
    def cap(self) -> float | None:
        return CAP if "cap" in self.kind else None

    @property
    def has_sinks(self) -> bool:
        return "sinks" in self.kind


def packed_row(num_tokens: int, has_forks: bool, seed: int = 0) -> PackedRow:
    """Returns a row of groups of different lengths, together at least num_tokens."""
    draw = random.Random(seed)
    longest = min(60, num_tokens // 3)
    groups: list[tuple[list[int], list[list[int]]]] = []
    forks: list[list[Any]] = []
    length = 0
    while length < num_tokens:
        prompt = _tokens(draw, draw.randint(1, longest))
        completions = [_tokens(draw, draw.randint(2, longest)) for _ in range(draw.randint(1, 4))]
        groups.append((prompt, completions))
        forks.append([((1, len(prompt)), (2, 1))[: len(ids) - 1] if has_forks else () for ids in completions])
        length += len(prompt) + sum(map(len, completions))
    return pack(groups, forks=forks)


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(0, 63) for _ in range(count)]


def make_model(heads: Heads, dtype: torch.dtype, has_adapters: bool = False) -> Any:
    """Returns a model of one decoder layer, of the family whose attention has these options, on the CPU."""
    dimensions: dict[str, Any] = {
        "hidden_size": 8 * heads.query,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": heads.query,
        "num_key_value_heads": heads.key,
        "head_dim": heads.size,
        "vocab_size": 64,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    attention.register()
    window = heads.window or 1 << 20
    layer_types = ["sliding_attention" if heads.window else "full_attention"]
    model: Any
    if heads.has_sinks:
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
        model = GptOssForCausalLM(GptOssConfig(**dimensions, **experts, sliding_window=window, layer_types=layer_types))
        model.model.layers[0].mlp = InPlaceOfExperts()  # no layer with experts is compiled
        torch.nn.init.normal_(model.model.layers[0].self_attn.sinks)
    elif heads.cap is not None:
        caps = {"attn_logit_softcapping": CAP, "query_pre_attn_scalar": heads.size}
        model = Gemma2ForCausalLM(Gemma2Config(**dimensions, **caps, sliding_window=window, layer_types=layer_types))
    elif heads.window:
        config = Qwen2Config(**dimensions, use_sliding_window=True, sliding_window=window, layer_types=layer_types)
        model = Qwen2ForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**dimensions))
    model = model.to(dtype).train()
    model.set_attn_implementation(NAME)
    if has_adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).base_model.model
    return model


class InPlaceOfExperts(torch.nn.Module):
    """A function of the hidden states that takes the place of a layer's experts, which are not compiled."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return hidden.tanh(), None


def hidden_states(model: Any, row: PackedRow) -> Tensor:
    """Returns the hidden states of a row after the model's layers, [1, T, D]."""
    base = model.get_decoder()
    options = attention.options(base, row)
    return base(input_ids=row.input_ids, use_cache=False, **options).last_hidden_state
