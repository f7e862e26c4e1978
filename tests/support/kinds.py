"""One tiny random model of each way in which checkpoints name and keep weights otherwise than transformers' modules."""

from pathlib import Path
from typing import Any

import torch

_SHAPE: dict[str, Any] = {
    **{"vocab_size": 414, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2},
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTED = {**_EXPERTS, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "layer_types": ["mamba", "attention"]}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "phi3": {},  # fused in files, too
    "olmo2": {},  # vLLM runs it through its Transformers back end
    "gemma4_text": {"vocab_size_per_layer_input": 414, "hidden_size_per_layer_input": 16},  # has buffers in its files
    "qwen3_moe": {"num_experts": 8, **_EXPERTS},  # experts in one tensor, and one by one in files
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},  # and under other names
    "glm4_moe": _ROUTED,  # a router with a correction, a buffer in float32
    "deepseek_v3": {**_ROUTED, **_LATENT, "num_key_value_heads": 4, "head_dim": 16}
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # as published: vLLM takes softmax else
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},  # experts in one tensor in files, too, transposed
    "granitemoehybrid": {**_MAMBA, "num_local_experts": 0},
    "qwen3_5_text": {
        **_DELTA,
        **{"linear_value_head_dim": 128, "head_dim": 64, "layer_types": ["linear_attention", "full_attention"]},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}


def model_of_kind(kind: str, dtype: str = "float32", **settings: Any) -> Any:
    """Always the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_SHAPE | KINDS[kind] | settings))
        for tensor in [*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("bias"))]:
            tensor.normal_(0, 0.06) if tensor.dim() > 1 else tensor.add_(0.05 * torch.randn_like(tensor))
    return model.to(getattr(torch, dtype))


def save_kind(kind: str, folder: Path, **settings: Any) -> Path:
    model_of_kind(kind, **settings).save_pretrained(folder)
    return folder
