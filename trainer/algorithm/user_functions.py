"""Signatures and checks of a user's own advantage estimator and loss.

This module imports no torch, so that a wrong name stops the program as soon as it starts.
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
    """Raises UserError if the file or package of a user's function does not exist.

    No user's file is imported.
    """
    if algorithm.adv_estimator not in ESTIMATORS:
        ESTIMATOR.require(algorithm.adv_estimator)
    if algorithm.loss is not None:
        OBJECTIVE.require(algorithm.loss)


def own_advantages(
    name: str, rewards: NDArray[np.float64], group: Group | None
) -> NDArray[np.float64]:
    """Returns the advantages [G] from a user's `def estimator(rewards, group)`.

    Raises UserError unless the function gives G finite numbers.
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
            "return one number each"
        )
    if not np.isfinite(advantages).all():
        raise UserError(
            f"{estimator.label} returned {advantages} for rewards {rewards}; return finite numbers"
        )
    return advantages


def own_objective(name: str, logprobs: Tensor, **arguments: Any) -> tuple[Tensor, bool]:
    """Returns the objective [N] of a user's function, and whether the function has its own KL term.

    The function is, for example, `def objective(logprobs, old_logprobs, advantages)`. It has its
    own KL term if it takes ref_logprobs. arguments: what OBJECTIVE offers besides logprobs.
    Raises UserError unless the function returns a tensor of one value per token with a gradient.
    """
    function = OBJECTIVE.load(name)
    objective = function(logprobs=logprobs, **arguments)
    shape = getattr(objective, "shape", None)
    if shape != logprobs.shape or not hasattr(objective, "requires_grad"):
        shown = type(objective).__name__ if shape is None else list(shape)
        raise UserError(
            f"{function.label} returned {shown} for {len(logprobs)} tokens; "
            "return a tensor of one value each"
        )
    if logprobs.requires_grad and not objective.requires_grad:
        raise UserError(
            f"{function.label} has no gradient; form it from logprobs, without .detach() or no_grad"
        )
    return objective, "ref_logprobs" in function.named
