"""The advantage estimators by name, and what each name means for the other settings.

Their formulas are in trainer/algorithm/estimators.py, which has the same names; those that need a critic in gae.py and
segments.py beside it. A user's own estimator is none of these names and has the values of OWN.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Estimator:
    has_group_baseline: bool = True  # equal rewards in a group mean that nothing is to be learned from it
    reward_scale: Literal["group", "none"] = "none"  # scale_rewards where the settings give none
    whitens_tokens: bool = False  # over the tokens of the batch of rollouts
    needs_critic: bool = False
    by_turn: bool = False  # an advantage for each turn, from the tokens it answers


ESTIMATORS = {
    "grpo": Estimator(reward_scale="group"),
    "dr_grpo": Estimator(),
    "rloo": Estimator(),
    "gigpo": Estimator(reward_scale="group", by_turn=True),
    "reinforce_plus_plus": Estimator(has_group_baseline=False, whitens_tokens=True),
    "reinforce_plus_plus_baseline": Estimator(whitens_tokens=True),
    "gae": Estimator(has_group_baseline=False, needs_critic=True),
    "group_ppo": Estimator(has_group_baseline=False, needs_critic=True),
}
OWN = Estimator()
