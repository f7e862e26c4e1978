"""The mixtures of experts and hybrids of tools/families, for tests of any part."""

from pathlib import Path
from typing import Any

from tests.support.tiny import tiny_model
from tools.families.models import random_model

MIXTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "gpt_oss", "qwen3_5_moe_text", "deepseek_v3")


def mixture(family: str, vocab: int = 320, **changes: Any) -> Any:
    return random_model(family, vocab, **{"max_position_embeddings": 1024, "norm_topk_prob": True} | changes)


def mixture_folder(folder: Path, family: str, **changes: Any) -> Path:
    """The same with the tokenizer of `tiny_model`, as transformers saves it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model(folder))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "model.safetensors").unlink()
    (folder / "generation_config.json").unlink(missing_ok=True)
    mixture(family, len(tokenizer), **ends, **changes).save_pretrained(folder)
    return folder
