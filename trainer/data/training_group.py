"""Holds what the trainer knows about one group while the group's batch is trained.

    taken ─► advantages, with a critic also value targets ─► log-probs, as forwards compute them

All arrays over tokens are flat: they hold the group's completions one after the other, without
padding. N is the number of tokens that train the policy, and M the number of tokens at which the
critic learns. Neither counts tokens that a tool or an environment wrote, or completions whose loss
is masked.
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
    """A selection of tokens from the completions of a group.

    completions: the indexes of the completions in the group, ascending.
    token_indexes: for each of these completions, the indexes of its selected tokens in its
    completion_ids, ascending.
    """

    def __init__(self, completions: Sequence[int], token_indexes: Sequence[NDArray[np.int64]]):
        self.completions = completions
        self.token_indexes = token_indexes

    @property
    def lengths(self) -> list[int]:
        """Returns the number of selected tokens in each of `completions`."""
        return [len(indexes) for indexes in self.token_indexes]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def narrowed(self, positions: Sequence[Positions] | None) -> "TokenSelection":
        """Returns a selection of only some of the selected tokens.

        positions: for each completion of the group, which of its selected tokens to keep, as
        indexes among them; None = all of them.
        """
        if positions is None:
            return self
        narrowed = []
        for completion, indexes in zip(self.completions, self.token_indexes, strict=True):
            narrowed.append(indexes[positions[completion]])
        return TokenSelection(self.completions, narrowed)

    def flat(self, arrays: Sequence[NDArray]) -> Tensor:
        """Returns the entries of the selected tokens, [number of selected tokens].

        arrays: for each completion of the group, an array [C] with an entry for every token.
        """
        # The first, empty array gives the result its type if nothing is selected.
        selected = [np.empty(0)]
        if arrays:
            selected = [np.empty(0, arrays[0].dtype)]
        for completion, indexes in zip(self.completions, self.token_indexes, strict=True):
            selected.append(arrays[completion][indexes])
        return torch.from_numpy(np.concatenate(selected))

    def spread(self, values: PerCompletion) -> Tensor:
        """Returns one value for each selected token, [number of selected tokens] float32.

        values: for each completion of the group, one number for all of its selected tokens, or an
        array with one number for each of them.
        """
        spread = [np.empty(0)]  # because np.concatenate needs an array
        for completion, length in zip(self.completions, self.lengths, strict=True):
            spread.append(np.broadcast_to(values[completion], length))
        return torch.from_numpy(np.concatenate(spread).astype(np.float32))


class TrainingGroup:
    """A group or tombstone of a batch, with what the trainer has computed for it so far."""

    def __init__(self, group: Group | Tombstone, algorithm: Algorithm, is_dead: bool = False):
        """Starts with what the sampler sent.

        is_dead: whether the rewards give no completion of the group an advantage.
        """
        self.group = group
        self.is_dead = is_dead
        self._always_has_gradient = algorithm.always_has_gradient
        # Every sampled token of the completions whose loss is not masked. A critic scores all.
        self.sampled_tokens = _sampled_tokens(group, algorithm.mask_truncated_completions)

        # Set by `set_advantages`.
        self.policy_tokens = self.sampled_tokens  # the N tokens that count in the policy's loss
        self.advantages: Tensor | None = None  # [N] float32; None: not known yet, or a tombstone
        self._has_advantage = False  # whether some completion has an advantage that is not zero
        self.old_logprobs = torch.zeros(0)  # [N] float32, computed by the sampler
        # [N] the version of the weights that sampled each token
        self.policy_versions = torch.zeros(0, dtype=torch.int64)

        # Set by `set_value_targets`.
        self.value_tokens = self.sampled_tokens  # the M tokens at which the critic learns
        self.old_values: Tensor | None = None  # [M] the critic's values before its first update
        self.returns: Tensor | None = None  # [M] the critic's targets

        # Log-probs of the policy tokens, [N] float32; None: not known yet. They are set by
        # StepTrainer (step.py) and RolloutBatch (batch.py) as forwards compute them. If the sampler
        # sent reference log-probs, these are set by `set_advantages`.
        self.ref_logprobs: Tensor | None = None
        self.proximal_logprobs: Tensor | None = None  # before the first update on the group
        # under the weights that sampled each token; NaN = unknown
        self.own_logprobs: Tensor | None = None

    @property
    def group_id(self) -> int:
        return self.group.group_id

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """Returns the group's rollouts, or () for a tombstone."""
        if isinstance(self.group, Tombstone):
            return ()
        return self.group.rollouts

    @property
    def share_of_rollouts(self) -> float:
        """Returns the fraction of rollouts that did not fail before their first token."""
        assert isinstance(self.group, Group)
        num_present = len(self.group.rollouts)
        num_missing = len(self.group.failures)
        return num_present / (num_present + num_missing)

    @property
    def trains_policy(self) -> bool:
        """Returns whether some token of the group can have a gradient in the policy."""
        if not self.policy_tokens.completions:
            return False
        if self._always_has_gradient:
            return True
        assert self.advantages is not None, f"group {self.group_id} has no advantages yet"
        return self._has_advantage

    def set_advantages(
        self, advantages: PerCompletion, positions: Sequence[Positions] | None = None
    ) -> None:
        """Stores the group's advantages, and selects the tokens that train the policy.

        The sampler's log-probs and policy versions of these tokens are stored too.

        advantages: for each completion, one number for all its selected tokens, or an array with
        one number for each of them.
        positions: for each completion, which of its sampled tokens to select, as indexes among
        them; None = all of them.
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
        has_ref_logprobs = len(ref_logprobs) == len(old_logprobs)
        if has_ref_logprobs:
            self.ref_logprobs = self.policy_tokens.flat(ref_logprobs).float()

    def set_value_targets(
        self,
        values: PerCompletion,
        returns: PerCompletion,
        positions: Sequence[Positions] | None = None,
    ) -> None:
        """Sets the tokens at which the critic learns, and its old values and targets there.

        values, returns: for each completion, an array with one number for each of these tokens.
        positions: for each completion, which of its sampled tokens these are, as indexes among
        them; None = all of them.
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
    """Returns the groups in which some token can have a gradient in the policy."""
    return [group for group in groups if group.trains_policy]


def split_by_group(
    groups: Sequence[TrainingGroup], values: Tensor
) -> Iterator[tuple[TrainingGroup, Tensor]]:
    """Splits an array over the policy tokens of all groups, and yields each group with its part.

    values: [sum of the groups' N]. Without groups it belongs to a filler, and nothing is yielded.
    """
    if not groups:
        return
    lengths = [group.policy_tokens.num_tokens for group in groups]
    yield from zip(groups, values.split(lengths), strict=True)


def set_advantages_from_rewards(groups: Sequence[TrainingGroup], config: Config) -> None:
    """Computes the groups' advantages from their rewards, and stores them in the groups.

    groups: all groups of the batch that may train if `needs_batch_statistics` (mini_batches.py),
    otherwise any groups of the batch.
    """
    advantages = step_advantages([group.group for group in groups], config)
    for group in groups:
        if group.group_id in advantages:  # tombstones have none
            group.set_advantages(advantages[group.group_id])


def set_estimates(groups: Iterable[TrainingGroup], estimates: Estimates) -> None:
    """Stores advantages and value targets that were estimated with the critic's values."""
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
    """Selects every sampled token of a group's unmasked completions, and none of a tombstone."""
    completions: list[int] = []
    token_indexes: list[NDArray[np.int64]] = []
    if isinstance(group, Tombstone):
        return TokenSelection(completions, token_indexes)
    for i, rollout in enumerate(group.rollouts):
        if is_unmasked(rollout, masks_truncated):
            completions.append(i)
            token_indexes.append(np.arange(len(rollout.completion_ids))[rollout.sampled()])
    return TokenSelection(completions, token_indexes)
