"""Divides a batch of rollouts into optimizer steps. Pure functions.

    batch of rollouts     prompts_per_step · steps_per_generation groups, all of which are sampled
                          before the batch's last step
    mini-batch            prompts_per_step groups of the batch, which train in one optimizer step
    pass                  one step on every mini-batch; there are num_iterations passes

    An example with prompts_per_step 2, steps_per_generation 2, num_iterations 2:
                          (0 1) (2 3) │ (0 1) (2 3)      in order
                          (3 0) (1 2) │ (2 3) (1 0)      shuffled

In TRL's words prompts_per_step is the per-device batch times devices times
gradient_accumulation_steps. In verl's words it is ppo_mini_batch_size, the batch of rollouts is
train_batch_size, and num_iterations is ppo_epochs.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from common.config import Algorithm, Config
from common.types import Group, Tombstone
from trainer.algorithm.losses import TOKEN_MEAN


@dataclass(frozen=True)
class Step:
    """An optimizer step on a batch of rollouts."""

    iteration: int  # index of the pass: 0, 1, …
    mini_batch: int  # index of the mini-batch in the pass: 0, 1, …
    slots: tuple[int, ...]  # the slots of the groups that it trains (slots.py)
    is_last: bool  # whether it is the last step on the batch


@dataclass(frozen=True)
class TrainedStep:
    """The groups and metrics of one optimizer step, for its records."""

    step: Step
    groups: list[Group | Tombstone]
    metrics: dict[str, float]  # of dead groups and of the division into micro-batches
    empty_slots: str  # a warning about empty slots; "" = none is empty
    oversized_groups: str  # a warning about groups that exceed the budget; "" = none does


def steps(config: Config, batch: int) -> list[Step]:
    """Returns the optimizer steps on a batch of rollouts, in order.

    batch: the number of the batch in the run: 0, 1, …

    The steps are the same on all ranks and after a restart. Without shuffle_mini_batches, every
    pass trains the groups in the order of the stream. With it, each pass permutes the groups with a
    generator that is seeded with (run.seed, batch, pass).
    """
    algorithm = config.algorithm
    size = config.trainer.prompts_per_step
    planned: list[Step] = []
    for iteration in range(algorithm.num_iterations):
        order = np.arange(config.prompts_per_batch)
        if algorithm.shuffle_mini_batches:
            seed = [config.run.seed % 2**64, batch, iteration]
            order = np.random.Generator(np.random.PCG64(seed)).permutation(order)
        for mini_batch in range(algorithm.steps_per_generation):
            slots = tuple(order[mini_batch * size : (mini_batch + 1) * size].tolist())
            is_last = len(planned) + 1 == algorithm.steps_per_batch
            step = Step(iteration=iteration, mini_batch=mini_batch, slots=slots, is_last=is_last)
            planned.append(step)
    return planned


def needs_batch_statistics(algorithm: Algorithm) -> bool:
    """Returns whether advantages can only be computed once the whole batch of rollouts is there."""
    # a critic has to give the values of the whole batch before its first update on the batch
    return algorithm.reward_scale == "batch" or algorithm.whitens or algorithm.needs_critic


def corrects_later_steps(algorithm: Algorithm) -> bool:
    """Returns whether log-probs of the whole batch are needed before the first update on it.

    Importance-sampling correction compares the sampler with the trainer's weights before any update
    on the batch. From the second mini-batch on, the current weights are no longer these.
    """
    corrects = algorithm.vllm_importance_sampling_mode is not None
    return corrects and algorithm.steps_per_generation > 1


def waits_for(algorithm: Algorithm) -> Literal["micro_batch", "mini_batch", "batch"]:
    """Returns which groups must have arrived before the first backward of a step.

    "batch": all groups of the batch of rollouts. "mini_batch": all groups of the step.
    "micro_batch": only those of the first micro-batch, because groups are trained as they arrive.
    """
    # advantages depend on all groups of the batch
    if needs_batch_statistics(algorithm):
        return "batch"
    # a shuffled mini-batch has groups from anywhere in the batch
    if algorithm.shuffle_mini_batches:
        return "batch"
    # log-probs of the whole batch are computed before the first step updates the weights
    if corrects_later_steps(algorithm):
        return "batch"
    # the denominator is the step's number of tokens, which is unknown before the last group
    if algorithm.loss_type in TOKEN_MEAN:
        return "mini_batch"
    # the denominator excludes dead groups, and any group that has not arrived may be dead
    if algorithm.dead_groups == "skip":
        return "mini_batch"
    return "micro_batch"
