"""The memory that each of two ranks takes for a model while it loads, and the files that each writes of it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, Phi3Config, Qwen2Config, Qwen3MoeConfig, Qwen3NextConfig
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig

from common.errors import UserError
from model.files.tensor_parallel import layer_specs
from tests.support.gloo_data import VOCAB_SIZE, settings
from tests.support.rank import Worker
from tests.support.replay_worker import stack
from tests.support.tiny import tiny_model


def resident(*fields: str) -> list[int]:
    """Bytes of /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    return [1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1]) for field in fields]  # type: ignore[index]


def work(folder: Path) -> None:
    from trainer.engine.policy import PolicyEngine
    from trainer.save import checkpoint, model_files

    worker, model_files._LEAST = Worker(folder), 1 << 20  # type: ignore[attr-defined]
    for stage in (1, 3):
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = resident("VmHWM", "RssAnon")
        engine = PolicyEngine(settings(folder, "run", stage), 2)
        worker.seen[f"loaded{stage}"] = [b - a for a, b in zip(before, resident("VmHWM", "RssAnon"), strict=True)]
        checkpoint.save_model(engine.start(), worker.exchange, worker.tokenizer, folder / f"saved{stage}")
    worker.tell()


def test_a_rank_loads_its_part_and_one_tensor_or_shares_the_file_and_writes_its_shard() -> None:
    folder = stack().folder / "large"
    model = load_file(tiny_model(folder / "model", hidden=512, layers=12, vocab=VOCAB_SIZE) / "model.safetensors")
    size, largest = sum(t.nbytes for t in model.values()), max(t.nbytes for t in model.values())
    for rank in stack().seen(__name__, folder.name, 2).ranks:
        assert rank["loaded3"][0] <= 1.2 * (size / 2 + largest)
        assert rank["loaded1"][1] <= 0.1 * size, "a private copy"
    for stage in (1, 3):
        shards = [load_file(file) for file in sorted((folder / f"saved{stage}").glob("model-*-of-00002.safetensors"))]
        assert len(shards) == 2 and all(sum(t.nbytes for t in shard.values()) < 0.6 * size for shard in shards)
        found = shards[0] | shards[1]
        assert found.keys() == model.keys() and all(torch.equal(found[name], model[name]) for name in model)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            Qwen2Config(num_attention_heads=14, num_key_value_heads=2),
            "4 does not divide its 14 num_attention_heads and 2",
        ),
        (Qwen3MoeConfig(), "it has experts"),
        (Phi3Config(), "transformers splits it by rowwise_split_input"),
        (Qwen3NextConfig(), "it has layers of linear_attention"),
        (Qwen2_5_VLConfig(), "it sees images"),
    ],
)
def test_a_family_whose_layers_cannot_be_shared_is_refused_with_the_reason(config: Any, reason: str) -> None:
    with pytest.raises(UserError, match=f"tensor_parallel_size 4: the layers of a {config.model_type} .*{reason}"):
        layer_specs(config, 4)
    assert any("lm_head" in spec["patterns"][0] for spec in layer_specs(LlamaConfig(), 4))
