"""The user's DeepSpeed settings: what is filled in, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from tests.support.configs import config_of
from trainer.engine.deepspeed_config import deepspeed_config
from trainer.engine.deepspeed_insides import require_fused_experts

AUTO = "auto"


def filled(deepspeed: Any, ranks: int = 2, dtype: str = "bfloat16", **trainer: Any) -> dict[str, Any]:
    chosen = {"prompts_per_step": 8, "groups_per_micro_batch": 2, "max_grad_norm": 0.7, "learning_rate": 3e-6}
    return deepspeed_config(config_of({"dtype": dtype}, trainer=chosen | trainer, deepspeed=deepspeed), ranks)


def zero(stage: Any, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def test_without_settings_everything_follows_from_ours() -> None:
    assert filled({}) == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,  # 8 groups = 2 ranks × 2 groups × 2 micro-batches
        "train_batch_size": 8,
        "gradient_clipping": 0.7,
        "managed_gradient_accumulation": False,
        "bf16": {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 1, "overlap_comm": False},
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},
    }


CHECKED = {"enabled": True, "check_grad_overflow": True}
DELAYED = {"immediate_grad_update": False}
OFFLOADED = zero(1, offload_optimizer={"device": "cpu"})
FILLED: list[tuple[dict[str, Any], int, str, dict[str, Any]]] = [
    # given, ranks, dtype: what it becomes, None = absent
    # no copy that nobody needs: bfloat16 has master weights, one rank in float32 has nothing to shard
    ({}, 1, "bfloat16", zero(1, overlap_comm=False)),
    (zero("auto"), 1, "float32", zero(0, overlap_comm=False)),
    ({"optimizer": {"type": "Muon"}}, 2, "float32", zero(0, overlap_comm=False)),
    ({}, 2, "float32", zero(1, overlap_comm=False) | {"bf16": {"enabled": False}, "data_types": None}),
    # gradients of bfloat16 add up in float32, where DeepSpeed does not refuse
    (zero(3), 2, "bfloat16", zero(3, overlap_comm=False) | {"data_types": {"grad_accum_dtype": "fp32"}}),
    (
        {"data_types": {"grad_accum_dtype": "torch.float32"}},
        2,
        "bfloat16",
        {"data_types": {"grad_accum_dtype": "fp32"}},
    ),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, 2, "bfloat16", {"data_types": {"grad_accum_dtype": "bf16"}}),
    # ZeRO 1 adds them up while backward runs, except where the optimizer's state is on the CPU
    (OFFLOADED | {"bf16": DELAYED}, 2, "bfloat16", {"bf16": CHECKED | DELAYED, "zero_force_ds_cpu_optimizer": False}),
    (zero(2) | {"bf16": DELAYED}, 2, "bfloat16", zero(2) | {"bf16": CHECKED | DELAYED}),
    # 8 groups in micro-batches of 2 on 3 ranks: 3 · 2 and 2 more
    ({}, 3, "bfloat16", {"gradient_accumulation_steps": 2, "train_batch_size": 12}),
    # equal values are no contradiction, and others pass through
    ({"train_batch_size": 8, "bf16": {"enabled": True}}, 2, "bfloat16", {"train_batch_size": 8}),
    ({"timers": {"throughput": {"enabled": True}}}, 2, "bfloat16", {"timers": {"throughput": {"enabled": True}}}),
]


@pytest.mark.parametrize(("given", "ranks", "dtype", "expected"), FILLED)
def test_only_what_is_absent_is_added(given: dict[str, Any], ranks: int, dtype: str, expected: dict[str, Any]) -> None:
    before = json.dumps(given)
    found = filled(given, ranks, dtype=dtype)
    assert {name: found.get(name) for name in expected} == expected
    assert json.dumps(given) == before


def test_a_file_made_for_the_hugging_face_trainer_works_as_it_is(tmp_path: Path) -> None:
    given = {
        "train_batch_size": AUTO,
        "fp16": {"enabled": AUTO, "loss_scale": 0},
        "bf16": {"enabled": AUTO},
        "optimizer": {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "weight_decay": AUTO}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": AUTO}},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": AUTO},
    }
    (tmp_path / "zero3.json").write_text(json.dumps(given))
    result = filled(tmp_path / "zero3.json", weight_decay=0.1)
    assert {name: result.get(name) for name in given} == {
        "train_batch_size": 8,
        "fp16": {"enabled": False, "loss_scale": 0},
        "bf16": CHECKED,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-6, "weight_decay": 0.1}},
        "scheduler": None,  # trainer.lr_scheduler_type is the schedule
        "zero_optimization": {"stage": 3, "overlap_comm": True},
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_micro_batch_size_per_gpu": 1}, "trainer.groups_per_micro_batch makes it 2"),
        ({"gradient_clipping": 1.0}, "deepspeed.gradient_clipping is 1.0 but trainer.max_grad_norm makes it 0.7"),
        ({"fp16": {"enabled": True}}, "set model.dtype=bfloat16"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "shard experts by deepspeed.zero_optimization"),
        ({"bf16": DELAYED}, "bf16.immediate_grad_update is False but stage 1"),
        ({"bf16": True}, "deepspeed.bf16 is True, not a section"),
        (zero(4), "stage 4 is not 0, 1, 2 or 3"),
        (zero(0), "set deepspeed.zero_optimization.stage=1"),
        ({"optimizer": {"type": "OneBitAdam"}}, "leave deepspeed.optimizer out for AdamW"),
        ({"optimizer": {"type": "Muon"}}, "set model.dtype=float32 and deepspeed.zero_optimization.stage=0"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "trainer.lr_scheduler_type"),
        ({"zero_optimisation": {}}, "deepspeed.zero_optimisation: there is no such setting. Did you mean"),
        (zero(2, offload_optimizer={"devise": "cpu"}), "mean deepspeed.zero_optimization.offload_optimizer.dev"),
        ("{", "cannot be read as JSON"),
        ("[1]", "holds a list"),
        (None, "cannot be read as JSON"),
    ],
)
def test_a_contradiction_and_a_file_without_settings_are_refused(tmp_path: Path, given: Any, message: str) -> None:
    file = tmp_path / "deepspeed.json"
    if isinstance(given, str):
        file.write_text(given)
    with pytest.raises(UserError) as error:
        filled(given if isinstance(given, dict) else file)
    assert message in str(error.value)


def test_experts_one_by_one_are_refused_where_ranks_would_send_gradients_of_different_ones() -> None:
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})})
    require_fused_experts(model, 1, 2)
    require_fused_experts(model, 2, 1)
    for stage, world_size in ((2, 2), (3, 1)):
        with pytest.raises(UserError, match=r"mlp.experts of ModuleDict .* set deepspeed.zero_optimization.stage=1"):
            require_fused_experts(model, stage, world_size)
