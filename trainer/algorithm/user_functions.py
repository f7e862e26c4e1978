"""Calls a user's own advantage estimator or objective, and checks what it returns.

This module does not import torch, so that the program can check the names of these functions, and
stop at a wrong name, as soon as it starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from common.config import Algorithm
from common.config.estimators import ESTIMATORS
from common.errors import UserError
from common.types import Group
from common.user_code.functions import Contract

if TYPE_CHECKING:
    from torch import Tensor

ESTIMATOR = Contract(
    setting="algorithm.adv_estimator",
    offered=("rewards", "group"),
    one_of=("rewards", "group"),
    example="def estimator(rewards, group)",
)
OBJECTIVE = Contract(
    setting="algorithm.loss",
    offered=("logprobs", "old_logprobs", "ref_logprobs", "advantages", "lengths", "settings"),
    one_of=("logprobs",),
    example="def objective(logprobs, old_logprobs, advantages)",
)


def require_user_functions(algorithm: Algorithm) -> None:
    """Raises UserError if the settings name a user's function whose file or package does not exist.

    It does not import the file.
    """
    if algorithm.adv_estimator not in ESTIMATORS:
        ESTIMATOR.require(algorithm.adv_estimator)
    if algorithm.loss is not None:
        OBJECTIVE.require(algorithm.loss)


def own_advantages(
    name: str, rewards: NDArray[np.float64], group: Group | None
) -> NDArray[np.float64]:
    """Returns the advantages [G] that a user's own estimator computes for a group.

    name: the function, as in algorithm.adv_estimator. rewards: [G]; the function gets a copy.
    Raises UserError unless the function returns G finite numbers.
    """
    estimator = ESTIMATOR.load(name)
    result = estimator(rewards=rewards.copy(), group=group)
    try:
        advantages = np.asarray(result, np.float64)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with gradient
        shown = str(result)[:200]
        raise UserError(
            f"{estimator.label} returned {shown}, expected {len(rewards)} numbers"
        ) from None
    if advantages.shape != rewards.shape:
        shape = list(advantages.shape)
        raise UserError(
            f"{estimator.label} returned shape {shape} for {len(rewards)} rewards; "
            "return one number for each reward"
        )
    if not np.isfinite(advantages).all():
        raise UserError(
            f"{estimator.label} returned {advantages} for rewards {rewards}; return finite numbers"
        )
    return advantages


def own_objective(name: str, logprobs: Tensor, **arguments: Any) -> tuple[Tensor, bool]:
    """Returns the objective [N] that a user's function computes, and whether it contains a KL term.

    It is taken to contain a KL term if the function has a parameter ref_logprobs.

    name: the function, as in algorithm.loss. logprobs: [N]. arguments: everything else that
    OBJECTIVE offers. Raises UserError unless the function returns a tensor with one value per token
    and, where logprobs have a gradient, with a gradient.
    """
    function = OBJECTIVE.load(name)
    objective = function(logprobs=logprobs, **arguments)
    shape = getattr(objective, "shape", None)
    is_tensor = hasattr(objective, "requires_grad")
    if shape != logprobs.shape or not is_tensor:
        shown = type(objective).__name__ if shape is None else list(shape)
        raise UserError(
            f"{function.label} returned {shown} for {len(logprobs)} tokens; "
            "return a tensor with one value for each token"
        )
    if logprobs.requires_grad and not objective.requires_grad:
        raise UserError(
            f"{function.label} has no gradient; "
            "compute it from logprobs, without .detach() or no_grad"
        )
    return objective, "ref_logprobs" in function.named
