"""What a user's own estimator and loss must look like. Free of torch: a wrong name ends the start at once."""

from __future__ import annotations

from common.config import Algorithm
from common.config.estimators import ESTIMATORS
from common.functions import Contract

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
    """Raises UserError if one is plainly not there, or cannot be called with what it gets. Imports none of them."""
    if algorithm.adv_estimator not in ESTIMATORS:
        ESTIMATOR.check(algorithm.adv_estimator)
    if algorithm.loss is not None:
        OBJECTIVE.check(algorithm.loss)
