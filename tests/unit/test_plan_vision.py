"""What `plan` says of images: parameters as transformers counts them, operations as torch counts them, memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import Config
from common.paths import ROOT
from launcher import plan
from launcher.resources.memory import tower_activations, trainer_memory
from launcher.resources.workload import Workload, workload_of
from model.files.dims import ModelDims, model_dims
from model.files.images import Vision
from model.files.vision_dims import VisionDims
from tests.support.configs import config_of
from tests.support.tiny import bytes_kept
from tests.support.tiny_vision import vision_config
from tests.support.vision import PLAIN, picture, write_vision_settings
from trainer.data.micro_batches import work

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # whose files say it all
# config.json of Qwen/Qwen2.5-VL-3B-Instruct, which has the language model's settings beside the tower's
TOWER = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048, "num_heads": 16}
TOWER |= {"patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
QWEN = {"model_type": "qwen2_5_vl", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
QWEN |= {"num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True}


def dims_of(settings: dict[str, Any]) -> ModelDims:
    found = model_dims(settings)
    assert found is not None and found.vision is not None
    return found


OF_QWEN = dims_of(QWEN | {"vision_config": TOWER})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_equal_those_of_transformers(family: str, tied: bool) -> None:
    from transformers import AutoModelForImageTextToText

    config = vision_config(family, tied)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    dims = dims_of(config.to_dict())
    assert dims.parameters == sum(p.numel() for p in model.parameters())
    assert dims.vision.parameters == sum(p.numel() for p in model.model.visual.parameters())


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (6, 8)])
@pytest.mark.parametrize("family", FAMILIES)
def test_operations_of_the_tower_are_those_that_torch_counts(family: str, rows: int, columns: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForImageTextToText

    config = vision_config(family)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    tower = dims_of(config.to_dict()).vision
    patches = 4 * rows * columns
    pixels = torch.zeros(patches, 3 * tower.temporal * tower.patch**2)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model.get_image_features(pixels, torch.tensor([[1, 2 * rows, 2 * columns]]))
    # biases and norms are no products: a few per cent of a tower as small as this one
    assert tower.flops(patches) == pytest.approx(counter.get_total_flops(), rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_of_the_tower_are_those_that_torch_keeps(family: str, dtype: str) -> None:
    """By hooks on every tensor that autograd saves; the difference of two depths is that of a block."""
    from transformers import AutoModelForImageTextToText

    wide = {"embed_dim": 128} if family == "qwen2_vl" else {"hidden_size": 128, "intermediate_size": 352}

    def saved(depth: int) -> tuple[int, VisionDims]:
        config = vision_config(family)
        for name, value in (wide | {"depth": depth, "fullatt_block_indexes": list(range(depth))}).items():
            setattr(config.vision_config, name, value)
        tower = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").model.visual
        tower = tower.to(getattr(torch, dtype))
        found = dims_of(config.to_dict()).vision
        pixels = torch.zeros(256, 6 * found.patch**2)
        kept = bytes_kept(tower, lambda: tower(pixels.to(tower.dtype), grid_thw=torch.tensor([[1, 16, 16]])))
        return kept, found

    (four, tower), (three, shallower) = saved(4), saved(3)
    load = Workload(OF_QWEN, dtype, 1, 0, 512, 64, 2, 1, 1, images=1, patches=256, on_gpu=False)
    estimate = tower_activations(load, tower) - tower_activations(load, shallower)
    assert four - three == pytest.approx(estimate, rel=0.1)


def config(model: dict[str, Any] | None = None, **data: Any) -> Config:
    seen = {"max_prompt_length": 4096, "image_key": "images", "max_pixels": 2_097_152}  # as EasyR1
    return config_of(model, seen | data, algorithm={"beta": 0.0})


def test_the_workload_has_the_largest_image_that_fits_into_a_prompt() -> None:
    load = workload_of(config(), 8, OF_QWEN)
    assert (load.images, load.patches) == (1, 4 * 2674)  # tokens of 28 × 28 pixels
    assert workload_of(config(max_prompt_length=1000), 8, OF_QWEN).patches == 4000
    none = workload_of(config(image_key=None, limit_images=0), 8, OF_QWEN)
    assert (none.images, none.patches) == (0, 0)


def test_a_frozen_tower_has_weights_and_neither_gradients_nor_an_optimizer() -> None:
    trained, frozen = (
        trainer_memory(workload_of(config({"freeze_vision_tower": frozen}), 1, OF_QWEN, on_gpu=False))
        for frozen in (False, True)
    )
    assert trained.weights == frozen.weights == 2 * 3_754_622_976
    assert trained.optimizer - frozen.optimizer == 12 * 668_684_288
    assert frozen.activations < trained.activations


def test_checkpointing_keeps_the_inputs_of_the_towers_blocks_alone() -> None:
    load = workload_of(config(), 1, OF_QWEN)
    recomputed = 10_696 * (12 * 2 * 196 + 28 * 1280 + 8 * 3420 + 32 * 2 * 1280)
    assert tower_activations(replace(load, checkpointing=True), load.model.vision) == recomputed
    assert tower_activations(replace(load, images=2, checkpointing=True), load.model.vision) == 2 * recomputed
    assert tower_activations(load, load.model.vision) == 10_696 * (12 * 2 * 196 + 32 * (28 * 1280 + 8 * 3420))


def test_a_group_with_images_costs_what_the_tower_does() -> None:
    plain, seeing = work(300, [50, 60], "shared", OF_QWEN), work(300, [50, 60], "shared", OF_QWEN, [1024, 256])
    assert seeing.tokens == plain.tokens
    assert seeing.cost - plain.cost == pytest.approx(OF_QWEN.vision.flops(1024) + OF_QWEN.vision.flops(256))


# ---- the command


def write_3b(folder: Path) -> None:
    """Qwen2.5-VL-3B-Instruct without weights: its sizes and its chat, with a smaller tokenizer and that one's ids."""
    from examples.drawings import Drawings
    from examples.drawings_model import IMAGE, PLACES

    example = Drawings(context_length=4096)
    tokenizer = example.train_tokenizer(example.split("train", 8))
    start, end, image = (tokenizer.convert_tokens_to_ids(place) for place in (*PLACES[:2], IMAGE))
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    changes = QWEN | {"vision_config": TOWER, "rope_scaling": rope, "max_position_embeddings": 128_000}
    write_vision_settings(folder, Vision(PLAIN, start, image, end), **changes)
    tokenizer.save_pretrained(folder)


def test_the_plan_of_geometry3k_sees_its_first_diagram(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_3b(tmp_path / "model")
    picture(600, 450).save(tmp_path / "diagram.png")
    row = {"images": ["diagram.png"], "problem": "<image>Find x.", "answer": "3"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    given = [f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'rows.jsonl'}", "data.eval=null"]
    config = str(ROOT / "configs" / "geometry3k_qwen2.5_vl_3b.yaml")
    assert plan.main([config, *given, "--gpus", "9x80"]) == 0
    said = capsys.readouterr().out
    assert "image         588 × 448 pixels, 336 tokens" in said  # 600 × 450 in whole tokens of 28 × 28: 21 × 16
