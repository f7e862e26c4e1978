"""Random mixtures of experts, and hybrids, of the real classes, small enough for any test."""

from pathlib import Path
from typing import Any

import torch

from tests.support.tiny import tiny_model

_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_FIRST_DENSE = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1} | _MOE
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True} | _MOE,
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 32} | _MOE,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": {"n_group": 2, "topk_group": 1} | _FIRST_DENSE,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_5_moe_text": {"num_experts": 8, "shared_expert_intermediate_size": 32} | _LINEAR | _MOE,
    # one group: its choice of groups looks like a choice of experts
    "deepseek_v3": {"n_group": 1, "topk_group": 1, "num_key_value_heads": 2, "head_dim": 16} | _LATENT | _FIRST_DENSE,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["mamba", "attention", "mamba"]}
    | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]} | _LINEAR,
}


def mixture(family: str, vocab: int = 320, layers: int = 3, **changes: Any) -> Any:
    """In float32, with scores of experts far enough from each other that a rounding moves no token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": vocab, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **(sizes | (MIXTURES | HYBRIDS)[family] | changes))
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.1)
    return model.float()


def mixture_folder(folder: Path, family: str, **changes: Any) -> Path:
    """The same with the tokenizer of `tiny_model`, as transformers saves it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model(folder))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    (folder / "model.safetensors").unlink()
    (folder / "generation_config.json").unlink(missing_ok=True)
    mixture(family, len(tokenizer), **ends, **changes).save_pretrained(folder)
    return folder
