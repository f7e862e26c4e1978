"""Tiny random models of the decoders that people train, in folders that transformers and vLLM load like published ones.

A family is a `model_type` of transformers and what its configuration needs beyond BASE to be small, and to look like
the published files: windows shorter than a sequence, every kind of layer, sizes that vLLM's kernels for a CPU take.
"""

import json
import shutil
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                            num_key_value_heads=2, head_dim=32, max_position_embeddings=512)  # fmt: skip
_MOE = dict(num_experts_per_tok=2, moe_intermediate_size=64)
_DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128,
              head_dim=64)  # fmt: skip
_WINDOW = dict(sliding_window=32)
_LATENT = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=16, v_head_dim=32, num_key_value_heads=4,
               head_dim=64, n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=1, **_MOE)  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {}, "qwen3": {},
    "llama": {}, "ministral3": {}, "smollm3": {}, "phi3": {}, "olmo2": {},
    "granite": dict(logits_scaling=8.0, embedding_multiplier=12.0, residual_multiplier=0.22,
                    attention_multiplier=0.015625),
    "stablelm": {}, "apertus": {}, "glm4": {}, "seed_oss": {},
    "ernie4_5": {}, "starcoder2": {}, "nanochat": {}, "hunyuan_v1_dense": {},
    "mistral": _WINDOW, "olmo3": _WINDOW, "exaone4": _WINDOW, "cohere2": _WINDOW | dict(logit_scale=0.25),
    "gemma2": _WINDOW | dict(query_pre_attn_scalar=32),
    "gemma3_text": _WINDOW | dict(query_pre_attn_scalar=32,
                                  layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    "gemma4_text": _WINDOW | dict(hidden_size_per_layer_input=16, global_head_dim=64),
    "qwen2_moe": dict(num_experts=8, shared_expert_intermediate_size=64, **_MOE),
    "qwen3_moe": dict(num_experts=8, **_MOE), "glm4_moe": dict(n_routed_experts=8, n_group=1, topk_group=1,
                                                               first_k_dense_replace=1, **_MOE),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2), "olmoe": dict(num_experts=8, num_experts_per_tok=2),
    "gpt_oss": _WINDOW | dict(num_local_experts=8, num_experts_per_tok=2),
    "llama4_text": dict(num_local_experts=4, intermediate_size_mlp=256),
    "deepseek_v3": dict(q_lora_rank=32, topk_method="noaux_tc", scoring_func="sigmoid", **_LATENT),
    "granitemoehybrid": dict(layer_types=["mamba"] * 3 + ["attention"], mamba_n_heads=8, mamba_d_head=32,
                             mamba_d_state=16, num_local_experts=0),
    "falcon_h1": dict(mamba_d_ssm=256, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16, embedding_multiplier=2.0,
                      lm_head_multiplier=0.5, key_multiplier=0.7),
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": dict(num_experts=8, shared_expert_intermediate_size=64, **_MOE, **_DELTA),
    "lfm2": dict(layer_types=["conv", "conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False,
                 conv_dim=128, conv_dim_out=128, block_dim=128, block_ff_dim=256),
    "nemotron_h": dict(layer_types=["linear_attention", "mlp", "full_attention", "mlp"],
                       mamba_num_heads=8, mamba_head_dim=32, n_groups=1, ssm_state_size=16),
}  # fmt: skip
BFLOAT16 = ("qwen3_5_text", "qwen3_5_moe_text")  # vLLM's CPU kernel of their layers takes nothing else
_TOKENIZER = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


def family_config(name: str, vocab: int, **more: Any) -> Any:
    """Returns transformers' configuration of the tiny model. Token 0 pads and 2 ends a turn: examples/tokenizer.py."""
    from transformers import AutoConfig

    tokens = dict(vocab_size=vocab, pad_token_id=0, bos_token_id=None, eos_token_id=2)
    if name == "gemma4_text":
        tokens["vocab_size_per_layer_input"] = vocab
    return AutoConfig.for_model(name, **(tokens | BASE | FAMILIES[name] | more))


def random_model(name: str, vocab: int, **more: Any) -> Any:
    """Makes a float32 model with weights that make every token's log-prob differ; always the same ones."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(family_config(name, vocab, **more)).float()
        for path, parameter in model.named_parameters():
            parameter.normal_(0, 0.06) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
            if name == "gemma4_text" and "q_norm" in path:  # no other scale precedes its softmax
                parameter.mul_(parameter.numel() ** -0.5)
    return model


def build(name: str, tokenizer: Path, folder: Path) -> None:
    """Writes the model's folder, with the tokenizer of another model."""
    words = json.loads((tokenizer / "tokenizer.json").read_text())
    vocab = 1 + max(*words["model"]["vocab"].values(), *(token["id"] for token in words["added_tokens"]))
    model = random_model(name, vocab)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    for file in _TOKENIZER:
        shutil.copy(tokenizer / file, folder / file)
