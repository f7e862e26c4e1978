"""How a batch of rollouts becomes optimizer steps. Pure.

    batch of rollouts     prompts_per_step · steps_per_generation groups, all sampled before its last step
    mini-batch            prompts_per_step of them: one optimizer step, with denominators of its own
    pass                  every mini-batch once; num_iterations of them

    prompts_per_step 2, steps_per_generation 2, num_iterations 2:   (0 1) (2 3) │ (0 1) (2 3)      in order
                                                                    (3 0) (1 2) │ (2 3) (1 0)      shuffled

In TRL's words prompts_per_step is the per-device batch times devices times gradient_accumulation_steps; in verl's it is
ppo_mini_batch_size, the batch of rollouts is train_batch_size, and num_iterations is ppo_epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.config import Config
from common.types import Group, Tombstone


@dataclass(frozen=True)
class Step:
    """One optimizer step on a batch of rollouts."""

    iteration: int  # which pass: 0, 1, …
    mini_batch: int  # which mini-batch of the pass: 0, 1, …
    places: tuple[int, ...]  # the groups' places in the batch, counted from its first
    is_last: bool  # of the batch


@dataclass(frozen=True)
class TrainedStep:
    """What an optimizer step trained on, for its records."""

    step: Step
    groups: list[Group | Tombstone]
    beta: float  # of its batch
    dead_group_metrics: dict[str, float]
    plan_metrics: dict[str, float]
    empty_slots: str  # what to say about them; "" = nothing
    oversized_groups: str  # what to say about groups above the budget; "" = nothing


def steps(config: Config, batch: int) -> list[Step]:
    """The optimizer steps on the run's batch-th batch of rollouts, in order. The same on every rank and after a resume.

    In order, a pass trains the groups as the stream has them; shuffled, every pass deals them by (seed, batch, pass).
    """
    algorithm, size = config.algorithm, config.trainer.prompts_per_step
    planned: list[Step] = []
    for iteration in range(algorithm.num_iterations):
        places = np.arange(config.prompts_per_batch)
        if algorithm.shuffle_mini_batches:
            places = np.random.Generator(np.random.PCG64([config.run.seed % 2**64, batch, iteration])).permutation(
                places
            )
        for mini_batch in range(algorithm.steps_per_generation):
            mine = tuple(places[mini_batch * size : (mini_batch + 1) * size].tolist())
            planned.append(Step(iteration, mini_batch, mine, len(planned) + 1 == algorithm.steps_per_batch))
    return planned
