"""A user's own advantage estimator and loss: their required signatures, and checks of their results.

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
    """Raises UserError if the file or package of a user's function does not exist; imports none of them."""
    if algorithm.adv_estimator not in ESTIMATORS:
        ESTIMATOR.require(algorithm.adv_estimator)
    if algorithm.loss is not None:
        OBJECTIVE.require(algorithm.loss)


def own_advantages(name: str, rewards: NDArray[np.float64], group: Group | None) -> NDArray[np.float64]:
    """Returns [G] by a user's `def estimator(rewards, group)`. Raises UserError unless it gives G finite numbers."""
    estimator = ESTIMATOR.load(name)
    found = estimator(rewards=rewards.copy(), group=group)
    try:
        advantages = np.asarray(found, np.float64)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with gradient
        raise UserError(f"{estimator.label} returned {str(found)[:200]}, expected {len(rewards)} numbers") from None
    if advantages.shape != rewards.shape:
        shape = list(advantages.shape)
        raise UserError(f"{estimator.label} returned shape {shape} for {len(rewards)} rewards; return one number each")
    if not np.isfinite(advantages).all():
        raise UserError(f"{estimator.label} returned {advantages} for rewards {rewards}; return finite numbers")
    return advantages


def own_objective(name: str, logprobs: Tensor, **more: Any) -> tuple[Tensor, bool]:
    """Returns [N] by a user's `def objective(logprobs, old_logprobs, advantages)`, and whether it has its own KL term.

    more: the other arguments of OBJECTIVE. Raises UserError unless it returns a value with a gradient for each token.
    """
    function = OBJECTIVE.load(name)
    objective = function(logprobs=logprobs, **more)
    shape = getattr(objective, "shape", None)
    if shape != logprobs.shape or not hasattr(objective, "requires_grad"):
        what = type(objective).__name__ if shape is None else list(shape)
        raise UserError(
            f"{function.label} returned {what} for {len(logprobs)} tokens; return a tensor of one value each"
        )
    if logprobs.requires_grad and not objective.requires_grad:
        raise UserError(f"{function.label} has no gradient; form it from logprobs, without .detach() or no_grad")
    return objective, "ref_logprobs" in function.named
