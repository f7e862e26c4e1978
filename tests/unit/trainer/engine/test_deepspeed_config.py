"""The user's DeepSpeed settings: what is filled in, and what is refused."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import Config
from common.errors import UserError
from tests.support.configs import config_of
from tests.support.mixtures import mixture
from trainer.engine.deepspeed_config import deepspeed_config

AUTO = "auto"


def settings(deepspeed: Any, dtype: str = "bfloat16", **trainer: Any) -> Config:
    chosen = {"prompts_per_step": 8, "groups_per_micro_batch": 2, "max_grad_norm": 0.7, "learning_rate": 3e-6}
    return config_of({"dtype": dtype}, trainer=chosen | trainer, deepspeed=deepspeed)


def filled(deepspeed: Any, ranks: int = 2, **changes: Any) -> dict[str, Any]:
    return deepspeed_config(settings(deepspeed, **changes), ranks)


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


CHECKED, DELAYED = {"enabled": True, "check_grad_overflow": True}, {"immediate_grad_update": False}
OFFLOADED = zero(1, offload_optimizer={"device": "cpu"})
FILLED: list[tuple[dict[str, Any], int, str, dict[str, Any]]] = [
    # given, ranks, dtype: what it becomes, None = absent
    # no copy that nobody needs: bfloat16 has master weights, one rank in float32 has nothing to shard
    ({}, 1, "bfloat16", {"zero_optimization": {"stage": 1, "overlap_comm": False}}),
    (zero("auto"), 1, "float32", {"zero_optimization": {"stage": 0, "overlap_comm": False}}),
    ({}, 2, "float32", {"zero_optimization": {"stage": 1, "overlap_comm": False}, "bf16": {"enabled": False}}),
    (zero(2), 1, "float32", {"zero_optimization": {"stage": 2}}),
    # gradients of bfloat16 add up in float32, where DeepSpeed does not refuse
    (zero(3), 2, "bfloat16", {"data_types": {"grad_accum_dtype": "fp32"}, "bf16": CHECKED}),
    (zero(1), 2, "float32", {"data_types": None}),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, 2, "bfloat16", {"data_types": {"grad_accum_dtype": "bf16"}}),
    # ZeRO 1 adds them up while backward runs, except where the optimizer's state is on the CPU
    (zero(1), 2, "bfloat16", {"bf16": CHECKED | {"immediate_grad_update": True}}),
    ({"bf16": {"immediate_grad_update": AUTO}}, 2, "bfloat16", {"bf16": CHECKED | {"immediate_grad_update": True}}),
    ({**OFFLOADED, "bf16": DELAYED}, 2, "bfloat16", {"bf16": CHECKED | DELAYED}),
    (zero(2) | {"bf16": DELAYED}, 2, "bfloat16", {"bf16": CHECKED | DELAYED}),
    # 8 groups in micro-batches of 2 on 3 ranks: 3 · 2 and 2 more
    ({}, 3, "bfloat16", {"gradient_accumulation_steps": 2, "train_batch_size": 12}),
    # equal values are no contradiction, and others pass through
    ({"train_batch_size": 8, "gradient_clipping": 0.7, "bf16": {"enabled": True}}, 2, "bfloat16", {}),
    ({"wall_clock_breakdown": True}, 2, "bfloat16", {"wall_clock_breakdown": True}),
    ({"timers": {"throughput": {"enabled": True}}}, 2, "bfloat16", {"timers": {"throughput": {"enabled": True}}}),
]


@pytest.mark.parametrize(("given", "ranks", "dtype", "expected"), FILLED)
def test_only_what_is_absent_is_added(given: dict[str, Any], ranks: int, dtype: str, expected: dict[str, Any]) -> None:
    before = json.dumps(given)
    found = filled(given, ranks, dtype=dtype)
    assert {name: found.get(name) for name in expected} == expected
    assert json.dumps(given) == before


@pytest.mark.parametrize("word", ["float32", "float", "torch.float32"])
def test_every_word_of_deepspeed_for_float32_sums_is_understood_alike(word: str) -> None:
    assert filled({"data_types": {"grad_accum_dtype": word}}) == filled({"data_types": {"grad_accum_dtype": "fp32"}})


def test_a_file_made_for_the_hugging_face_trainer_works_as_it_is(tmp_path: Path) -> None:
    names = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
    schedule = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    optimizer = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)
    given = dict.fromkeys(names, AUTO) | {
        "fp16": {"enabled": AUTO, "loss_scale": 0},
        "bf16": {"enabled": AUTO},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(schedule, AUTO)},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": AUTO},
    }
    (tmp_path / "zero3.json").write_text(json.dumps(given))
    result = filled(tmp_path / "zero3.json", weight_decay=0.1)
    assert result["fp16"] == {"enabled": False, "loss_scale": 0}
    assert result["bf16"] == CHECKED
    assert result["optimizer"]["params"] == {"lr": 3e-6, "weight_decay": 0.1}
    assert "scheduler" not in result, "trainer.lr_scheduler_type is the schedule"
    assert result["zero_optimization"] == {"stage": 3, "overlap_comm": True}
    assert (result["gradient_accumulation_steps"], result["train_batch_size"]) == (2, 8)
    assert AUTO not in json.dumps(result)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_batch_size": 64}, "deepspeed.train_batch_size is 64 but trainer.prompts_per_step"),
        ({"gradient_accumulation_steps": 4}, "deepspeed.gradient_accumulation_steps is 4"),
        ({"train_micro_batch_size_per_gpu": 1}, "trainer.groups_per_micro_batch makes it 2"),
        ({"gradient_clipping": 1.0}, "deepspeed.gradient_clipping is 1.0 but trainer.max_grad_norm makes it 0.7"),
        ({"managed_gradient_accumulation": True}, "managed_gradient_accumulation is True"),
        ({"fp16": {"enabled": True}}, "set model.dtype=bfloat16"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "shard experts by deepspeed.zero_optimization"),
        ({"bf16": {"enabled": False}}, "deepspeed.bf16.enabled is False but model.dtype makes it True"),
        ({"bf16": DELAYED}, "bf16.immediate_grad_update is False but stage 1"),
        (
            {"bf16": DELAYED, "data_types": {"grad_accum_dtype": "float32"}},
            "bf16.immediate_grad_update is False but stage 1",
        ),
        (zero(2) | {"bf16": {"check_grad_overflow": False}}, "bf16.check_grad_overflow is False but the training loop"),
        ({"bf16": True}, "deepspeed.bf16 is True, not a section"),
        (zero(4), "stage 4 is not 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, "overlap_comm is True but stage 1"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, "optimizer.params.lr is 1e-05 but trainer."),
        ({"optimizer": {"type": "AdamW8bit"}}, "AdamW8bit is not one of adam, adamw"),
        ({"optimizer": {"type": "OneBitAdam"}}, "leave deepspeed.optimizer out for AdamW"),
        ({"optimizer": {"type": "Muon"}}, "set model.dtype=float32 and deepspeed.zero_optimization.stage=0"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "trainer.lr_scheduler_type"),
        ({"zero_optimisation": {}}, "deepspeed.zero_optimisation: there is no such setting. Did you mean"),
        (zero(2, offload_optimiser={"device": "cpu"}), "Did you mean deepspeed.zero_optimization.offload_optimizer?"),
        (zero(2, offload_optimizer={"devise": "cpu"}), "mean deepspeed.zero_optimization.offload_optimizer.dev"),
        ({"flops_profiler": {"enable": True}}, "Did you mean deepspeed.flops_profiler.enabled?"),
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


@pytest.mark.parametrize(
    ("stage", "world_size", "is_refused"),
    [(1, 2, False), (2, 1, False), (2, 2, True), (3, 1, True), (3, 2, True)],
)
def test_experts_one_by_one_are_refused_where_ranks_would_send_gradients_of_different_ones(
    stage: int, world_size: int, is_refused: bool
) -> None:
    from trainer.engine.deepspeed_insides import require_fused_experts

    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})})
    require_fused_experts(mixture("qwen3_moe", num_hidden_layers=1), stage, world_size)
    refusal = pytest.raises(UserError, match=r"mlp.experts of ModuleDict .* set deepspeed.zero_optimization.stage=1")
    with refusal if is_refused else contextlib.nullcontext():
        require_fused_experts(model, stage, world_size)
