"""One tiny random model of each way in which checkpoints name and keep weights otherwise than transformers' modules."""

from pathlib import Path
from typing import Any

import torch

from tools.families.models import random_model

KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "phi3": {},  # fused in files, too
    "olmo2": {},  # vLLM runs it through its Transformers back end
    "gemma4_text": {},  # has buffers in its files
    "qwen3_moe": {},  # experts in one tensor, and one by one in files
    "mixtral": {},  # and under other names
    "glm4_moe": {},  # a router with a correction, a buffer in float32
    "deepseek_v3": {},
    "gpt_oss": {},  # experts in one tensor in files, too, transposed
    "granitemoehybrid": {},
    "qwen3_5_text": {},
    "lfm2": {},
}


def model_of_kind(kind: str, dtype: str = "float32", **settings: Any) -> Any:
    """Always the same weights."""
    model = random_model(kind, 414, **KINDS[kind] | settings)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                buffer.add_(0.05 * torch.randn_like(buffer))
    return model.to(getattr(torch, dtype))


def save_kind(kind: str, folder: Path, **settings: Any) -> Path:
    model_of_kind(kind, **settings).save_pretrained(folder)
    return folder
