"""An estimator and a loss as a user would write them, equal to dr_grpo and the clipped objective."""

import numpy as np
import torch
from torch import Tensor

from common.types import Group


def above_the_mean(rewards: np.ndarray, group: Group) -> list[float]:
    assert len(group.rollouts) == len(rewards)
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


def clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio = torch.exp(logprobs - old_logprobs)
    return torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
