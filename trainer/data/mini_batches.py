"""Division of a batch of rollouts into optimizer steps. Pure functions.

    batch of rollouts     prompts_per_step · steps_per_generation groups, all sampled before its last step
    mini-batch            prompts_per_step of them: one optimizer step, with denominators of its own
    pass                  every mini-batch once; num_iterations of them

    prompts_per_step 2, steps_per_generation 2, num_iterations 2:   (0 1) (2 3) │ (0 1) (2 3)      in order
                                                                    (3 0) (1 2) │ (2 3) (1 0)      shuffled

In TRL's words prompts_per_step is the per-device batch times devices times gradient_accumulation_steps; in verl's it is
ppo_mini_batch_size, the batch of rollouts is train_batch_size, and num_iterations is ppo_epochs.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from common.config import Algorithm, Config
from common.config.estimators import ESTIMATORS
from common.types import Group, Tombstone
from trainer.algorithm.losses import TOKEN_MEAN


@dataclass(frozen=True)
class Step:
    """An optimizer step on a batch of rollouts."""

    iteration: int  # index of the pass: 0, 1, …
    mini_batch: int  # index of the mini-batch in the pass: 0, 1, …
    places: tuple[int, ...]  # the groups' positions in the batch, counted from its first
    is_last: bool  # whether it is the last step on the batch


@dataclass(frozen=True)
class TrainedStep:
    """The groups and metrics of one optimizer step, for its records."""

    step: Step
    groups: list[Group | Tombstone]
    metrics: dict[str, float]  # of dead groups and of the plan
    empty_slots: str  # the warning about empty slots; "" = none
    oversized_groups: str  # the warning about groups above the budget; "" = none


def steps(config: Config, batch: int) -> list[Step]:
    """Returns the ordered optimizer steps on the run's batch-th batch of rollouts, equal on all ranks and on resume.

    Unshuffled, a pass trains the groups in stream order; shuffled, each pass permutes them by (seed, batch, pass).
    """
    algorithm, size = config.algorithm, config.trainer.prompts_per_step
    planned: list[Step] = []
    for iteration in range(algorithm.num_iterations):
        places = np.arange(config.prompts_per_batch)
        if algorithm.shuffle_mini_batches:
            seed = [config.run.seed % 2**64, batch, iteration]
            places = np.random.Generator(np.random.PCG64(seed)).permutation(places)
        for mini_batch in range(algorithm.steps_per_generation):
            mine = tuple(places[mini_batch * size : (mini_batch + 1) * size].tolist())
            planned.append(Step(iteration, mini_batch, mine, len(planned) + 1 == algorithm.steps_per_batch))
    return planned


def needs_batch_statistics(algorithm: Algorithm) -> bool:
    """Returns whether advantages depend on all groups of a batch of rollouts, not on each alone, as with a critic."""
    return algorithm.reward_scale == "batch" or algorithm.whitens or algorithm.needs_critic


def needs_all_arrays(algorithm: Algorithm) -> bool:
    """Returns whether ranks read tokens or log-probs of other ranks' groups, not only their lengths and rewards."""
    is_own = algorithm.adv_estimator not in ESTIMATORS  # a user's function gets the group
    return algorithm.kl_in_reward or algorithm.needs_critic or algorithm.estimator.by_turn or is_own


def corrects_later_steps(algorithm: Algorithm) -> bool:
    """Returns whether later mini-batches, on updated weights, need the trainer's log-probs from before any update."""
    return algorithm.vllm_importance_sampling_mode is not None and algorithm.steps_per_generation > 1


def waits_for(algorithm: Algorithm) -> Literal["micro_batch", "mini_batch", "batch"]:
    """Returns what must have arrived before the first backward of a step; micro_batch: groups train as they arrive.

    Waiting changes nothing but time: a token mean, or a step that leaves dead groups out, has a denominator that is
    known only with the step's last group, and the correction of the sampler's mismatch needs log-probs of the whole
    batch before the first step updates the weights.
    """
    if needs_batch_statistics(algorithm) or algorithm.shuffle_mini_batches or corrects_later_steps(algorithm):
        return "batch"
    counts_first = algorithm.loss_type in TOKEN_MEAN or algorithm.dead_groups == "skip"
    return "mini_batch" if counts_first else "micro_batch"
