"""The record of one group of a batch, which is filled until the batch has been trained.

    taken ─► advantages, with a critic also value targets ─► log-probs, as forwards give them

All arrays over tokens are flat: they hold the group's completions one after the other, without
padding. N = the tokens that train the policy, M = those at which the critic learns. Tokens that a
tool or an environment wrote, and completions whose loss is masked, are in neither.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config import Algorithm, Config
from common.types import Group, Rollout, Tombstone
from trainer.algorithm.advantages import PerCompletion, has_advantage, is_unmasked, step_advantages
from trainer.algorithm.critic_advantages import Estimates
from trainer.algorithm.segments import Positions


class TokenSelection:
    """Some of the sampled tokens of a group's completions.

    `completions`: indexes of the completions in the group, ascending. `token_indexes`: for each of
    them an array of indexes into its completion_ids, ascending.
    """

    def __init__(self, completions: Sequence[int], token_indexes: Sequence[NDArray[np.int64]]):
        self.completions = completions
        self.token_indexes = token_indexes

    @property
    def lengths(self) -> list[int]:
        """Returns the number of selected tokens of each completion."""
        return [len(indexes) for indexes in self.token_indexes]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def narrowed(self, positions: Sequence[Positions] | None) -> "TokenSelection":
        """Returns a selection of only some of these tokens.

        positions: for each completion of the group, indexes among its selected tokens; None = all.
        """
        if positions is None:
            return self
        narrowed = []
        for completion, indexes in zip(self.completions, self.token_indexes, strict=True):
            narrowed.append(indexes[positions[completion]])
        return TokenSelection(self.completions, narrowed)

    def flat(self, arrays: Sequence[NDArray]) -> Tensor:
        """Returns the selected entries, [number of tokens]. arrays: [C] for each completion."""
        selected = [np.empty(0, arrays[0].dtype)] if arrays else [np.empty(0)]
        for completion, indexes in zip(self.completions, self.token_indexes, strict=True):
            selected.append(arrays[completion][indexes])
        return torch.from_numpy(np.concatenate(selected))

    def spread(self, values: PerCompletion) -> Tensor:
        """Returns one value for each selected token, [number of tokens] float32.

        values: for each completion of the group one value, or one for each of its selected tokens.
        """
        spread = [np.empty(0)]
        for completion, length in zip(self.completions, self.lengths, strict=True):
            spread.append(np.broadcast_to(values[completion], length))
        return torch.from_numpy(np.concatenate(spread).astype(np.float32))


class TrainingGroup:
    """A group or tombstone of a batch, and what the trainer knows of it so far."""

    def __init__(self, group: Group | Tombstone, algorithm: Algorithm, is_dead: bool = False):
        """Starts with what the sampler sent. is_dead: whether its rewards leave no advantage."""
        self.group = group
        self.is_dead = is_dead
        self._always_has_gradient = algorithm.always_has_gradient
        # Every sampled token of the completions whose loss is not masked. A critic scores them all.
        self.sampled_tokens = _sampled_tokens(group, algorithm.mask_truncated_completions)

        # Set by `set_advantages`.
        self.policy_tokens = self.sampled_tokens  # N, the tokens that count in the policy's loss
        self.advantages: Tensor | None = None  # [N] float32; None: not known yet, or a tombstone
        self._has_advantage = False  # whether some completion has an advantage that is not zero
        self.old_logprobs = torch.zeros(0)  # [N] float32, the sampler's
        self.policy_versions = torch.zeros(0, dtype=torch.int64)  # [N], which sampled each token

        # Set by `set_value_targets`.
        self.value_tokens = self.sampled_tokens  # M, the tokens at which the critic learns
        self.old_values: Tensor | None = None  # [M] the critic's, before its first update
        self.returns: Tensor | None = None  # [M] the critic's targets

        # Log-probs of the policy tokens, [N] float32, set by StepTrainer (step.py) and RolloutBatch
        # (batch.py) as forwards give them. None: not known yet.
        # Reference log-probs that the sampler sent are set by `set_advantages`.
        self.ref_logprobs: Tensor | None = None
        self.proximal_logprobs: Tensor | None = None  # before the first update on the group
        self.sampled_logprobs: Tensor | None = None  # at the version that sampled; NaN = unknown

    @property
    def group_id(self) -> int:
        return self.group.group_id

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """Returns the rollouts that are there; none of a tombstone."""
        if isinstance(self.group, Tombstone):
            return ()
        return self.group.rollouts

    @property
    def share_of_rollouts(self) -> float:
        """Returns the share of rollouts that did not fail before their first token."""
        assert isinstance(self.group, Group)
        num_present = len(self.group.rollouts)
        num_missing = len(self.group.failures)
        return num_present / (num_present + num_missing)

    @property
    def trains_policy(self) -> bool:
        """Returns whether some token of the group can change the policy."""
        if not self.policy_tokens.completions:
            return False
        if self._always_has_gradient:
            return True
        assert self.advantages is not None, f"group {self.group_id} has no advantages yet"
        return self._has_advantage

    def set_advantages(
        self, advantages: PerCompletion, positions: Sequence[Positions] | None = None
    ) -> None:
        """Stores the group's advantages, and selects the tokens that train the policy with them.

        What the sampler sent for each of these tokens is stored beside them.

        advantages: for each completion one number, or one for each of its selected tokens.
        positions: for each completion, indexes of the selected tokens among its sampled tokens;
        None = all of them.
        """
        self._has_advantage = has_advantage(np.hstack(list(advantages)))
        self.policy_tokens = self.sampled_tokens.narrowed(positions)
        self.advantages = self.policy_tokens.spread(advantages)
        old_logprobs = []
        ref_logprobs = []
        versions = []
        for rollout in self.rollouts:
            old_logprobs.append(rollout.old_logprobs)
            versions.append(rollout.token_versions(self.group.policy_version))
            if rollout.ref_logprobs is not None:
                ref_logprobs.append(rollout.ref_logprobs)
        self.old_logprobs = self.policy_tokens.flat(old_logprobs).float()
        self.policy_versions = self.policy_tokens.flat(versions)
        if len(ref_logprobs) == len(old_logprobs):
            self.ref_logprobs = self.policy_tokens.flat(ref_logprobs).float()

    def set_value_targets(
        self,
        values: PerCompletion,
        returns: PerCompletion,
        positions: Sequence[Positions] | None = None,
    ) -> None:
        """Sets the critic's targets. values, returns: for each completion, one per position.

        positions: for each completion, its sampled tokens at which the critic learns; None = all.
        """
        self.value_tokens = self.sampled_tokens.narrowed(positions)
        self.old_values = self.value_tokens.spread(values)
        self.returns = self.value_tokens.spread(returns)


def trainable(groups: Iterable[TrainingGroup], algorithm: Algorithm) -> list[TrainingGroup]:
    """Returns the groups that may train: dead groups only if algorithm.dead_groups keeps them."""
    if algorithm.dead_groups == "keep":
        return list(groups)
    return [group for group in groups if not group.is_dead]


def training_policy(groups: Iterable[TrainingGroup]) -> list[TrainingGroup]:
    """Returns the groups of which some token can change the policy."""
    return [group for group in groups if group.trains_policy]


def split_by_group(
    groups: Sequence[TrainingGroup], values: Tensor
) -> Iterator[tuple[TrainingGroup, Tensor]]:
    """Yields each group with its values among those of all groups' policy tokens, [N].

    Without groups the values are those of a filler, and nothing is yielded.
    """
    if not groups:
        return
    lengths = [group.policy_tokens.num_tokens for group in groups]
    yield from zip(groups, values.split(lengths), strict=True)


def set_advantages_from_rewards(groups: Sequence[TrainingGroup], config: Config) -> None:
    """Sets advantages that follow from rewards.

    groups: the whole batch if `needs_batch_statistics`, else any groups of it.
    """
    advantages = step_advantages([group.group for group in groups], config)
    for group in groups:
        if group.group_id in advantages:  # tombstones have none
            group.set_advantages(advantages[group.group_id])


def set_estimates(groups: Iterable[TrainingGroup], estimates: Estimates) -> None:
    """Sets the advantages and value targets that follow from the critic's values."""
    for group in groups:
        group_id = group.group_id
        if group_id not in estimates.advantages:  # tombstones have none
            continue
        group.set_advantages(estimates.advantages[group_id], estimates.positions.get(group_id))
        group.set_value_targets(
            estimates.values[group_id],
            estimates.returns[group_id],
            estimates.value_positions.get(group_id),
        )


def _sampled_tokens(group: Group | Tombstone, masks_truncated: bool) -> TokenSelection:
    """Returns every sampled token of a group's unmasked completions."""
    completions: list[int] = []
    token_indexes: list[NDArray[np.int64]] = []
    rollouts = () if isinstance(group, Tombstone) else group.rollouts
    for i, rollout in enumerate(rollouts):
        if is_unmasked(rollout, masks_truncated):
            completions.append(i)
            token_indexes.append(np.arange(len(rollout.completion_ids))[rollout.sampled()])
    return TokenSelection(completions, token_indexes)
