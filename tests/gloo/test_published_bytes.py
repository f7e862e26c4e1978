"""What the published vGPU configuration sends through gloo in a step, counted by the recorder to the byte.

Two ranks of Qwen2.5-1.5B do not fit a test, so the count is made with three small models and is a straight line in the
number of parameters: two of them foretell the third, exactly, and so the line holds for the model of the configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config import load
from model.dims import read_dims
from tests.support.launch_worker import launch
from tests.support.published_bytes_worker import CONFIG, MODELS, PARAMETERS, STAGES
from tests.support.tiny import VOCAB_SIZE, tiny_model

MICRO_BATCHES = 8  # 16 prompts on two ranks, one at a time
Counted = dict[tuple[str, int], int]  # bytes by model and stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("published")
    for name, (hidden, layers) in MODELS.items():
        tiny_model(found / name, hidden, layers, VOCAB_SIZE)
    tiny_model(found / "model", vocab=VOCAB_SIZE)
    return found


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    of_rank_0, of_rank_1 = launch("tests.support.published_bytes_worker", folder, 2, "first")
    one_way = {"send", "recv_", "gather_"}
    for name, of_stages in of_rank_0.items():
        for stage, rows in of_stages.items():
            others = of_rank_1[name][stage]
            assert [r for r in rows if r["collective"] not in one_way] == [
                r for r in others if r["collective"] not in one_way
            ]
    return of_rank_0


@pytest.fixture(scope="module")
def counted(seen: dict[str, dict[str, list[dict[str, Any]]]]) -> Counted:
    """Gradients and weights: what is sent in the model's dtype."""
    return {
        (name, stage): sum(row["bytes"] for row in seen[name][str(stage)] if row["dtype"] == "bfloat16")
        for name in MODELS
        for stage in STAGES
    }


@pytest.fixture(scope="module")
def parameters(folder: Path) -> dict[str, int]:
    found = {name: read_dims(str(folder / name), None) for name in MODELS}
    return {name: dims.parameters for name, dims in found.items() if dims is not None}


def test_the_published_configuration_is_stage_1_on_two_ranks_with_eight_micro_batches_over_gloo() -> None:
    config = load(CONFIG, [])
    assert config.trainer.dist_backend == "gloo"
    assert config.deepspeed["zero_optimization"]["stage"] == 1
    ranks = len(config.trainer.devices)
    assert config.trainer.prompts_per_step / (ranks * config.trainer.groups_per_micro_batch) == MICRO_BATCHES


def test_the_bytes_of_a_step_are_those_of_the_formula_exactly(counted: Counted, parameters: dict[str, int]) -> None:
    """Stage 1: gradients once, then weights, 2·b·N. Stage 2: gradients after each of K micro-batches, (K + 1)·b·N."""
    for name, n in parameters.items():
        assert counted[name, 1] == 2 * 2 * n
        assert counted[name, 2] == (MICRO_BATCHES + 1) * 2 * n


def test_two_models_foretell_the_third_and_so_the_published_one(counted: Counted, parameters: dict[str, int]) -> None:
    expected = {1: 6_174_857_216, 2: 27_786_857_472}
    for stage in STAGES:
        (n1, y1), (n2, y2), (n3, y3) = ((parameters[name], counted[name, stage]) for name in MODELS)
        slope, rest = divmod(y2 - y1, n2 - n1)
        assert rest == 0
        assert y1 + slope * (n3 - n1) == y3
        assert y1 + slope * (PARAMETERS - n1) == expected[stage]


def test_what_else_is_sent_is_the_batch_and_a_few_numbers_however_large_the_model(
    seen: dict[str, dict[str, list[dict[str, Any]]]],
) -> None:
    for stage in STAGES:
        others = {sum(row["bytes"] for row in seen[name][str(stage)] if row["dtype"] != "bfloat16") for name in MODELS}
        assert len(others) == 1 and others.pop() < 1 << 14
