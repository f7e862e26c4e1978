"""(d2) A mixture of experts makes the steps on a GPU that it makes on a CPU, by the trainer's own engine."""

import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.gpu.conftest import Row
from tests.support.mixtures import mixture_folder
from tests.support.own_process import in_processes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

_STEPS = 3
_NEAR = 1e-3  # relative; products in TF32 and other orders of sums
_FAMILIES = ("qwen3_moe", "gpt_oss")


class Step(NamedTuple):
    loss: float
    gradient_norm: float


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_mixture_makes_the_steps_that_it_makes_on_a_cpu(family: str, on_gpu: bool, tmp_path: Path, row: Row) -> None:
    model = mixture_folder(tmp_path / "model", family)
    [expected] = in_processes(partial(_steps, tmp_path, model, on_gpu=False))
    [found] = in_processes(partial(_steps, tmp_path, model, on_gpu=on_gpu))
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        largest = max(largest, abs(one.gradient_norm / other.gradient_norm - 1))
        largest = max(largest, abs(one.loss - other.loss))
    norms = ", ".join(f"{step.gradient_norm:.4f}" for step in found)
    row(f"{family}, gradient norms of {_STEPS} steps", norms)
    row(f"{family}, from the CPU's", f"{largest:.1e}", f"< {_NEAR:.0e}", largest < _NEAR)
    assert expected[0] != expected[-1], "the steps change the weights"


def _steps(folder: Path, model: Path, on_gpu: bool) -> list[Step]:
    """Returns the steps on two groups of random tokens, made by one rank."""
    if not on_gpu:
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    from tests.support.configs import config_in
    from tests.support.tiny import random_group
    from tests.support.training_groups import with_rewards
    from trainer.algorithm.losses import Denominator
    from trainer.data.tensors import micro_batch
    from trainer.engine.policy import PolicyEngine
    from trainer.engine.process_group import init_distributed

    config = config_in(
        folder,
        model={"path": str(model), "dtype": "float32"},
        algorithm={"beta": 0.0},
        trainer={"max_steps": _STEPS, "prompts_per_step": 2, "learning_rate": 1e-3, "warmup_steps": 0},
    )
    init_distributed(config)
    engine = PolicyEngine(config, 1).start()
    denominator = Denominator("grpo", 8, 1, 64)
    made = []
    for step in range(_STEPS):
        groups = [random_group(2 * step + i, 300, [1.0, 0.0, 0.5, 0.0], longest=64) for i in range(2)]
        scored = with_rewards(groups, config)
        engine.backward(micro_batch(scored, denominator, config.algorithm, engine.packing))
        sums: Any = engine.sums.drain()
        made.append(Step(float(sums["loss"]), engine.step().grad_norm))
    return made
