"""Frozen records of what is known of a group before its backward pass; a new record replaces one that knows less.

    taken ─► advantages, with a critic also its targets ─► log-probs, as forwards give them ─► micro-batch

Experience is PPO's term. Every sequence in these records has one entry per completion, in the group's order.
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
class Experience:
    """A group with its advantages, targets and log-probs, as far as they are known.

    The n tokens that train are the sampled ones of unmasked completions, at `positions`. Positions count only the
    sampled tokens of a completion, as every array of tokens in this record does.
    """

    group: Group | Tombstone
    is_dead: bool = False  # its rewards leave no advantage
    advantages: PerCompletion | None = None  # None: not known yet, or the group does not train
    positions: Sequence[Positions] | None = None  # tokens that train; None = all
    values: Sequence[Floats] | None = None  # the critic's, before its first update on the batch; None: not scored
    returns: Sequence[Floats] | None = None  # the critic's targets; None: not scored
    value_positions: Sequence[Positions] | None = None  # tokens at which the critic learns; None = all
    ref_logprobs: Tensor | None = None  # [n] if the trainer scores them; None: not yet, or the sampler scored them
    proximal_logprobs: Tensor | None = None  # [n] the trainer's before its first update on the group; None: unknown
    sampled_logprobs: Tensor | None = None  # [n] the trainer's at the version that sampled; None: unknown


def training(experiences: Iterable[Experience], algorithm: Algorithm) -> list[Experience]:
    """Returns the experiences that may train: those of dead groups only if dead groups are kept."""
    return [e for e in experiences if algorithm.dead_groups == "keep" or not e.is_dead]


def score_rewards(experiences: Sequence[Experience], config: Config) -> list[Experience]:
    """Returns the experiences with advantages from rewards alone; pass the whole batch if advantages depend on it."""
    advantages = step_advantages([e.group for e in experiences], config)
    return [replace(e, advantages=advantages.get(e.group.group_id)) for e in experiences]


def with_estimates(experiences: Sequence[Experience], estimates: Estimates) -> list[Experience]:
    """Returns the experiences with the advantages and value targets that follow from the critic's values."""
    names = ("advantages", "positions", "values", "returns", "value_positions")
    return [replace(e, **{name: getattr(estimates, name).get(e.group.group_id) for name in names}) for e in experiences]
