"""What is known of a group on its way to a backward: one frozen record, replaced by another where more is known.

    taken ─► advantages, with a critic also its targets ─► log-probs, as forwards give them ─► micro-batch

Experience is PPO's word for it. Everything here is by completion of the group, in its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from common.config import Algorithm, Config
from common.types import Group, Tombstone
from trainer.algorithm.advantages import Floats, PerCompletion, step_advantages
from trainer.algorithm.critic_advantages import Estimates
from trainer.algorithm.segments import Positions


@dataclass(frozen=True)
class ValueTargets:
    """What the critic learns from a group."""

    values: Sequence[Floats]  # its own, before the first update on the batch
    returns: Sequence[Floats]
    positions: Sequence[Positions] | None = None  # tokens at which it learns; None = all


@dataclass(frozen=True)
class Experience:
    """n = tokens of the group that train: the sampled ones of completions that are not masked, at their positions.

    Positions count the sampled tokens of a completion, as every array of tokens here does.
    """

    group: Group | Tombstone
    is_dead: bool = False  # its rewards leave no advantage
    advantages: PerCompletion | None = None  # None: not known yet; never known of what does not train
    positions: Sequence[Positions] | None = None  # tokens that train; None = all
    targets: ValueTargets | None = None  # None: there is no critic, or it has not scored yet
    ref_logprobs: Tensor | None = None  # [n] where the trainer scores them; None: not yet, or they came with the group
    proximal_logprobs: Tensor | None = None  # [n] the trainer's before its first update on them; None: not known yet
    sampled_logprobs: Tensor | None = None  # [n] the trainer's at the version that sampled; None: not known


def training(experiences: Iterable[Experience], algorithm: Algorithm) -> list[Experience]:
    """Those that may train: not the dead, unless they are kept."""
    return [e for e in experiences if algorithm.dead_groups == "keep" or not e.is_dead]


def score_rewards(experiences: Sequence[Experience], config: Config) -> list[Experience]:
    """With advantages from rewards alone. Give it all of the batch where advantages depend on all."""
    advantages = step_advantages([e.group for e in experiences], config)
    return [replace(e, advantages=advantages.get(e.group.group_id)) for e in experiences]


def with_estimates(experiences: Sequence[Experience], estimates: Estimates) -> list[Experience]:
    """What comes of the critic's values, for policy and critic."""

    def scored(e: Experience) -> Experience:
        g, at, learned = e.group.group_id, estimates.policy_positions, estimates.value_positions
        if g not in estimates.advantages:
            return e
        targets = ValueTargets(estimates.values[g], estimates.returns[g], learned[g] if learned is not None else None)
        positions = at[g] if at is not None else None
        return replace(e, advantages=estimates.advantages[g], positions=positions, targets=targets)

    return [scored(e) for e in experiences]
