"""The hand-made groups and settings of the gloo tests: the same on every rank and in the test's own process."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Config
from common.types import Group, Rollout, Tombstone
from tests.support.tier import ALL
from tests.support.tiny import VOCAB_SIZE, random_group

OWN = Path(__file__).with_name("own_functions.py")
RANKS = (1, 2)
STAGES = (0, 1, 2, 3) if ALL else (0, 1, 3)  # of ZeRO
# what each rank and stage trains; 0 is the default of one rank in float32, and the only one in which our own code drops
# a step that is not finite
LAYOUTS = [(ranks, stage) for ranks in RANKS for stage in STAGES if ALL or (ranks, stage) != (2, 0)]
# where all is tried that depends on the stage, and the ranks on which all is tried that does not
WHOLE_LAYOUTS = [(ranks, stage) for ranks, stage in LAYOUTS if ALL or ranks == 2 or stage == 0]
MANY = RANKS if ALL else (2,)
HALF_STAGES = STAGES[1:]  # of bfloat16
BETA = 0.04
GROUPS_PER_STEP = 4
NUM_GENERATIONS = 3
TEMPERATURE = 0.9
NUM_STEPS = 3
TRAINER = {
    "dist_backend": "gloo",
    "max_steps": NUM_STEPS,
    "prompts_per_step": GROUPS_PER_STEP,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 1,
    "weight_decay": 0.1,
    "max_grad_norm": 4.1,  # between the norms of the three steps: the first and the last are clipped
    "save_steps": 1,
    "logprob_chunk_size": 16,  # smaller than a micro-batch, so that chunks are recomputed
}
OF_HOSTS = {"max_steps": 12, "save_steps": 1, "save_limit": 12, "lr_scheduler_type": "constant"}
REWARDS = ([1.0, 0.0, 0.5], [0.0, 2.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 3.0])
DEAD = [0.1] * NUM_GENERATIONS
Item = Group | Tombstone
Stream = Callable[[int], Item]


# PPO with a critic: what every layout trains, and what the plain loop computes a second time
GAE: dict[str, Any] = {
    "algorithm": {"adv_estimator": "gae", "kl_in_reward": True, "gamma": 0.95, "lam": 0.9},
    "critic": {"path": "critic", "learning_rate": 2e-3, "cliprange_value": 0.01},
}
# GROUP PPO, with a threshold that cuts some of these completions and moves between steps
GROUP_PARAMS = {"group_variance_threshold": 0.7, "group_max_size": 5, "threshold_lr": 0.5}
GROUP_PPO = GAE | {"algorithm": GAE["algorithm"] | {"adv_estimator": "group_ppo", "group_params": GROUP_PARAMS}}
SUM_STAGES = HALF_STAGES if ALL else (1,)  # where gradients of a bfloat16 model add up in so many micro-batches
MICRO_BATCHES = (1, 4, 16)
CONSTANT_RATE = {"lr_scheduler_type": "constant", "warmup_steps": 0}
FOUR_STEPS = CONSTANT_RATE | {"max_steps": 4}
SCORED = {"on": "trainer", "path": "reference"}
# on a reference that the trainer scores, at each ZeRO stage with another packing, larger micro-batches included
PACKINGS: dict[int, dict[str, Any]] = {
    0: {"packing": "separate"},
    1: {"packing": "shared", "groups_per_micro_batch": 2},
    2: {"packing": "separate"},
    3: {"packing": "separate", "groups_per_micro_batch": 2},
}
CORRECTED = {
    "num_iterations": 2,
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": 1.5,
}
SHUFFLED = {"steps_per_generation": 2, "num_iterations": 2, "shuffle_mini_batches": True}
RECOMPUTED = {"model": {"gradient_checkpointing": True}, "trainer": {"groups_per_micro_batch": 2}}
ON_CPU = {"device": "cpu"}
# settings of one more batch each, by name: what differs from the others
VARIANTS: dict[str, dict[str, Any]] = {
    "dapo": {"algorithm": {"loss_type": "dapo"}},
    "dr_grpo": {"algorithm": {"loss_type": "dr_grpo"}},
    "cispo": {"algorithm": {"loss_type": "cispo", "epsilon_high": 1.5}},
    "sequence": {
        "algorithm": {"importance_sampling_level": "sequence", "delta": 1.3, "kl_estimator": "k2", "loss_type": "bnpo"}
    },
    "batch_scale": {"algorithm": {"scale_rewards": "batch"}},
    "whitened": {"algorithm": {"adv_estimator": "reinforce_plus_plus", "kl_in_reward": True}},
    "entropy": {"algorithm": {"entropy_coef": 0.5}},
    "own": {"algorithm": {"adv_estimator": f"{OWN}:above_the_mean", "loss": f"{OWN}:clipped"}},
    "twice": {"algorithm": {"num_iterations": 2}, "trainer": FOUR_STEPS},
    "corrected": {"algorithm": CORRECTED, "trainer": FOUR_STEPS},
    # batches of rollouts of eight groups: two mini-batches of four
    "in_order": {"algorithm": {"steps_per_generation": 2}, "trainer": FOUR_STEPS},
    "in_order_twice": {
        "algorithm": {"steps_per_generation": 2, "num_iterations": 2, "loss_type": "dapo", "scale_rewards": "batch"},
        "trainer": FOUR_STEPS,
    },
    "shuffled": {"algorithm": CORRECTED | SHUFFLED, "trainer": FOUR_STEPS},
    "critic_shuffled": GAE | {"algorithm": GAE["algorithm"] | SHUFFLED, "trainer": FOUR_STEPS},
    "recomputed": RECOMPUTED,
    "recomputed3": RECOMPUTED | {"deepspeed": {"zero_optimization": {"stage": 3}}},
    "offloaded": {"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": ON_CPU}}},
    "offloaded3": {
        "deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": ON_CPU, "offload_param": ON_CPU}}
    },
    "skip": {"algorithm": {"dead_groups": "skip"}},
    "resample": {"algorithm": {"dead_groups": "resample"}},
    "scored_twice": {
        "algorithm": {"num_iterations": 2, "steps_per_generation": 2},
        "trainer": FOUR_STEPS,
        "reference": SCORED,
    },
    "scored_shuffled": {
        "algorithm": SHUFFLED,
        "trainer": FOUR_STEPS | {"groups_per_micro_batch": 2},
        "reference": SCORED,
    },
    **{
        f"scored{stage}": {
            "trainer": PACKINGS[stage],
            "reference": SCORED,
            "deepspeed": {"zero_optimization": {"stage": stage}},
        }
        for ranks, stage in WHOLE_LAYOUTS
        if ranks == 2
    },
}


def settings(folder: Path, name: str, stage: int, **sections: dict[str, Any]) -> Config:
    """The common settings, with the given ones over them, section by section."""
    common = {
        "run": {"output_dir": folder / name},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "reference": {"on": "sampler"},
        "data": {"train": "unused.jsonl"},
        "sampler": {"num_generations": NUM_GENERATIONS, "temperature": TEMPERATURE, "max_completion_length": 12},
        "algorithm": {"beta": BETA},
        "trainer": TRAINER,
        "weights": {"dir": folder / name / "weights"},
        "deepspeed": {"zero_optimization": {"stage": stage}},
    }
    chosen = sections | {name: section | sections.get(name, {}) for name, section in common.items()}
    for name in ("critic", "reference"):
        if path := chosen.get(name, {}).get("path"):
            chosen[name] = chosen[name] | {"path": str(folder / path)}
    return Config.model_validate(chosen)


def group(group_id: int, beta: float = BETA) -> Group:
    """Group `group_id` of the run."""
    return random_group(group_id, VOCAB_SIZE, REWARDS[group_id % len(REWARDS)], beta=beta)


def bare(group_id: int) -> Group:
    """For a reference that the trainer scores."""
    return group(group_id, beta=0.0)


def uneven(group_id: int) -> Item:
    """Without KL, only the first group has work; all others are dead or tombstones, so of 2 ranks one has nothing."""
    if group_id == 3:
        return Tombstone(group_id, 0, "reward timed out")
    return random_group(group_id, VOCAB_SIZE, DEAD if group_id else REWARDS[group_id])


def dead(group_id: int) -> Item:
    return random_group(group_id, VOCAB_SIZE, DEAD)


def half_dead(group_id: int) -> Item:
    """Odd groups are dead."""
    return random_group(group_id, VOCAB_SIZE, DEAD, beta=BETA) if group_id % 2 else group(group_id)


def with_first(group_id: int, change: Callable[[Rollout], Rollout]) -> Group:
    """The first step has one changed rollout in group 1, which with two ranks falls to one of them; then it is good."""
    good = group(group_id if group_id < GROUPS_PER_STEP else group_id - GROUPS_PER_STEP)
    rollouts = (change(good.rollouts[0]), *good.rollouts[1:])
    return dataclasses.replace(good, rollouts=rollouts) if group_id == 1 else good


def poisoned(group_id: int) -> Item:
    """By a NaN reward, and so NaN advantages."""
    return with_first(group_id, lambda rollout: dataclasses.replace(rollout, reward=math.nan))


def infinite_loss(group_id: int) -> Item:
    """By a reference log-prob of −inf: the loss is infinite and every gradient finite."""

    def change(rollout: Rollout) -> Rollout:
        assert rollout.ref_logprobs is not None
        return dataclasses.replace(rollout, ref_logprobs=np.append(np.float32(-np.inf), rollout.ref_logprobs[1:]))

    return with_first(group_id, change)


def enormous(group_id: int) -> Item:
    """By a reward whose square float32 cannot hold: the critic's loss is infinite, no other."""
    return with_first(group_id, lambda rollout: dataclasses.replace(rollout, reward=1e30))


def batch(step: int) -> list[Group]:
    """The groups of the run's step: 0, 1, …"""
    return [group(g) for g in range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP)]
