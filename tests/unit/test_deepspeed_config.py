"""The user's DeepSpeed settings: what is filled in, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from common.errors import UserError
from tests.support.configs import config_of
from trainer.engine.deepspeed_config import backend, deepspeed_config, gloo_warning


def settings(deepspeed: Any, dtype: str = "bfloat16", **trainer: Any) -> Config:
    chosen = {"prompts_per_step": 8, "groups_per_micro_batch": 2, "max_grad_norm": 0.7, "learning_rate": 3e-6}
    return config_of({"dtype": dtype}, trainer=chosen | trainer, deepspeed=deepspeed)


def filled(deepspeed: Any, **changes: Any) -> dict[str, Any]:
    return deepspeed_config(settings(deepspeed, **changes), world_size=2)


def test_without_settings_everything_follows_from_ours() -> None:
    assert filled({}) == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,  # 8 groups = 2 ranks × 2 groups × 2 micro-batches
        "train_batch_size": 8,
        "gradient_clipping": 0.7,
        "managed_gradient_accumulation": False,
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 1, "overlap_comm": False},
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},
    }


@pytest.mark.parametrize(
    ("changes", "world_size", "stage"),
    [({}, 1, 1), ({"dtype": "float32"}, 1, 0), ({"dtype": "float32"}, 2, 1)],
    ids=["bfloat16 has master weights", "one rank in float32 has nothing to shard", "two ranks share the states"],
)
def test_the_default_zero_stage_keeps_no_copy_that_nobody_needs(
    changes: dict[str, Any], world_size: int, stage: int
) -> None:
    for given in ({}, {"zero_optimization": {"stage": "auto"}}):
        assert deepspeed_config(settings(given, **changes), world_size)["zero_optimization"]["stage"] == stage
    given = {"zero_optimization": {"stage": 2}}
    assert deepspeed_config(settings(given, **changes), world_size)["zero_optimization"]["stage"] == 2


def test_float32_turns_bf16_off() -> None:
    assert filled({}, dtype="float32")["bf16"] == {"enabled": False}


@pytest.mark.parametrize(
    ("stage", "dtype", "types"),
    [
        (0, "bfloat16", None),  # DeepSpeed refuses
        (1, "bfloat16", {"grad_accum_dtype": "fp32"}),
        (2, "bfloat16", {"grad_accum_dtype": "fp32"}),
        (3, "bfloat16", {"grad_accum_dtype": "fp32"}),
        (1, "float32", None),
    ],
)
def test_gradients_of_bfloat16_models_add_up_in_float32(stage: int, dtype: str, types: Any) -> None:
    assert filled({"zero_optimization": {"stage": stage}}, dtype=dtype).get("data_types") == types


def test_a_users_own_dtype_of_accumulation_stays() -> None:
    result = filled({"data_types": {"grad_accum_dtype": "bf16"}})
    assert result["data_types"] == {"grad_accum_dtype": "bf16"}
    assert result["bf16"] == {"enabled": True}


def test_one_rank_sends_nothing_and_rounds_nothing_to_what_it_would_send() -> None:
    assert deepspeed_config(settings({}), world_size=1)["communication_data_type"] == "fp32"
    assert "communication_data_type" not in filled({})


@pytest.mark.parametrize("stage", [2, 3])
def test_gloo_with_zero_2_or_3_is_warned_of_with_what_it_sends(stage: int) -> None:
    config = settings({"zero_optimization": {"stage": stage}}, prompts_per_step=16, groups_per_micro_batch=1)
    # 16 groups on 2 ranks: 8 micro-batches; 2 bytes · 2^30 parameters = 2 GiB
    said = gloo_warning(config, world_size=2, backend="gloo", trained=2**30)
    assert f"stage {stage} over gloo" in said and "8 × 2 GiB a step" in said
    assert "deepspeed.zero_optimization.stage=1" in said
    assert "GiB" not in gloo_warning(config, world_size=2, backend="gloo", trained=None)


@pytest.mark.parametrize(
    ("stage", "ranks", "backend", "at_once"),
    [(1, 2, "gloo", 2), (2, 2, "nccl", 2), (2, 1, "gloo", 2), (2, 2, "gloo", 4)],
)
def test_where_zero_2_costs_nothing_more_nothing_is_said(stage: int, ranks: int, backend: str, at_once: int) -> None:
    config = settings({"zero_optimization": {"stage": stage}}, groups_per_micro_batch=at_once)
    assert gloo_warning(config, ranks, backend, trained=2**30) == ""


def test_auto_is_nccl_on_gpus_and_gloo_without() -> None:
    assert [backend(settings({}), has_gpu) for has_gpu in (True, False)] == ["nccl", "gloo"]
    assert backend(settings({}, dist_backend="gloo"), has_gpu=True) == "gloo"


def test_a_file_made_for_the_hugging_face_trainer_works_as_it_is(tmp_path: Path) -> None:
    auto = "auto"
    path = tmp_path / "zero3.json"
    path.write_text(
        json.dumps(
            {
                "fp16": {"enabled": auto, "loss_scale": 0},
                "bf16": {"enabled": auto},
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": auto, "betas": auto, "eps": auto, "weight_decay": auto},
                },
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {
                        "warmup_min_lr": auto,
                        "warmup_max_lr": auto,
                        "warmup_num_steps": auto,
                        "total_num_steps": auto,
                    },
                },
                "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": auto},
                "gradient_accumulation_steps": auto,
                "gradient_clipping": auto,
                "train_batch_size": auto,
                "train_micro_batch_size_per_gpu": auto,
            }
        )
    )
    result = filled(path, warmup_steps=5, max_steps=50, weight_decay=0.1)
    assert result["fp16"] == {"enabled": False, "loss_scale": 0}
    assert result["bf16"] == {"enabled": True}
    assert result["data_types"] == {"grad_accum_dtype": "fp32"}
    assert result["optimizer"]["params"] == {"lr": 3e-6, "weight_decay": 0.1}
    assert result["scheduler"]["params"] == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 3e-6,
        "warmup_num_steps": 5,
        "total_num_steps": 50,
    }
    assert result["zero_optimization"] == {"stage": 3, "overlap_comm": True}
    assert (result["gradient_accumulation_steps"], result["train_batch_size"]) == (2, 8)
    assert "auto" not in json.dumps(result)


def test_a_scheduler_without_a_total_gets_none() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    assert filled({"scheduler": scheduler}, warmup_steps=3)["scheduler"]["params"] == {"warmup_num_steps": 3}


def test_a_scheduler_that_must_warm_up_is_refused_without_steps_to_do_so() -> None:
    with pytest.raises(UserError, match=r"warmup_num_steps is 0 by trainer.warmup_steps.*set trainer.warmup_steps=1"):
        filled({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}})


def test_equal_values_are_no_contradiction() -> None:
    result = filled({"train_batch_size": 8, "gradient_clipping": 0.7, "bf16": {"enabled": True}})
    assert result["train_batch_size"] == 8


def test_other_settings_pass_through_and_the_users_own_are_not_changed() -> None:
    given = {
        "wall_clock_breakdown": True,
        "timers": {"throughput": {"enabled": True}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    }
    before = json.dumps(given)
    result = filled(given)
    assert result["wall_clock_breakdown"] is True
    assert result["timers"] == {"throughput": {"enabled": True}}
    assert result["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_batch_size": 64}, "deepspeed.train_batch_size is 64 but trainer.prompts_per_step"),
        ({"gradient_accumulation_steps": 4}, "deepspeed.gradient_accumulation_steps is 4"),
        ({"train_micro_batch_size_per_gpu": 1}, "trainer.groups_per_micro_batch makes it 2"),
        ({"gradient_clipping": 1.0}, "deepspeed.gradient_clipping is 1.0 but trainer.max_grad_norm makes it 0.7"),
        ({"managed_gradient_accumulation": True}, "managed_gradient_accumulation is True"),
        ({"fp16": {"enabled": True}}, "set model.dtype=bfloat16"),
        ({"bf16": {"enabled": False}}, "deepspeed.bf16.enabled is False but model.dtype makes it True"),
        ({"bf16": True}, "deepspeed.bf16 is True, not a section"),
        ({"zero_optimization": {"stage": 4}}, "stage 4 is not 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, "overlap_comm is True but stage 1"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, "optimizer.params.lr is 1e-05 but trainer."),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0}}}, "trainer.learning_rate makes it 3e-06"),
    ],
)
def test_a_contradiction_is_refused_with_both_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        filled(given)
    assert message in str(error.value)


def test_groups_that_do_not_divide_by_the_ranks_are_rounded_up_to_whole_micro_batches() -> None:
    result = deepspeed_config(settings({}), world_size=3)  # 8 groups in micro-batches of 2: 3 · 2 and 2 more
    assert (result["gradient_accumulation_steps"], result["train_batch_size"]) == (2, 12)


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as JSON"), ("[1]", "holds a list")])
def test_a_file_that_holds_no_settings_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        filled(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read as JSON"):
        filled(tmp_path / "absent.json")
