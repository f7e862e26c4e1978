"""Tensors of one forward and backward pass, made from the groups of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.config import Algorithm, Config
from common.types import Group
from model.packing import Experts, PackedRow, Packing, pack, select
from trainer.algorithm.losses import Denominator, token_weights
from trainer.data.training_group import (
    TokenSelection,
    TrainingGroup,
    trainable,
    training_policy,
)


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of the policy. N = the tokens in the row that train."""

    row: PackedRow
    old_logprobs: Tensor  # [N] float32, the sampler's
    ref_logprobs: Tensor | None  # [N] float32; None: beta is 0, not scored yet, or a filler
    advantages: Tensor  # [N] float32
    weights: Tensor  # [N] float32, 0 in a filler
    policy_versions: Tensor  # [N] int64, versions of the weights that sampled each token
    proximal_logprobs: Tensor | None = None  # [N] float32; None: this pass gives them
    sampled_logprobs: Tensor | None = None  # [N] float32, NaN where unknown; None: all are unknown
    groups: list[TrainingGroup] = field(default_factory=list)  # in the order of their tokens

    @property
    def is_filler(self) -> bool:
        """Returns whether none of the row's tokens train."""
        return not self.groups


@dataclass(frozen=True)
class ValueBatch:
    """A micro-batch of the critic. M = the tokens in the row at which the critic learns."""

    row: PackedRow
    old_values: Tensor  # [M] float32, the critic's own before the first update on the batch
    returns: Tensor  # [M] float32
    weights: Tensor  # [M] float32, 0 in a filler


def step_denominator(taken: Sequence[TrainingGroup], num_slots: int, config: Config) -> Denominator:
    """Returns the denominator of a step. taken: all groups that were taken for its slots.

    Tombstones and empty slots count as completions of weight 0. Skipped dead groups do not count.
    """
    sampler = config.sampler
    algorithm = config.algorithm
    trained = trainable(taken, algorithm)
    num_skipped = 0
    if algorithm.dead_groups == "skip":
        num_skipped = len(taken) - len(trained)
    return Denominator(
        loss_type=algorithm.loss_type,
        num_completions=max(1, (num_slots - num_skipped) * sampler.num_generations),
        num_tokens=max(1, sum(group.policy_tokens.num_tokens for group in trained)),
        max_completion_length=sampler.max_completion_length,
    )


def micro_batch(
    groups: Iterable[TrainingGroup],
    denominator: Denominator,
    algorithm: Algorithm,
    packing: Packing = "shared",
) -> MicroBatch:
    """Packs the completions that can change the policy; a filler of weight 0 if there are none."""
    trained = training_policy(groups)
    if not trained:
        return _filler_batch()
    advantages = []
    for group in trained:
        assert group.advantages is not None, f"group {group.group_id} has no advantages yet"
        advantages.append(group.advantages)
    ref_logprobs = None
    if algorithm.beta > 0:
        ref_logprobs = _all_or_none([group.ref_logprobs for group in trained])
    return MicroBatch(
        row=policy_row(trained, packing),
        old_logprobs=torch.cat([group.old_logprobs for group in trained]),
        ref_logprobs=ref_logprobs,
        advantages=torch.cat(advantages),
        weights=_weights(trained, denominator),
        policy_versions=torch.cat([group.policy_versions for group in trained]),
        proximal_logprobs=_all_or_none([group.proximal_logprobs for group in trained]),
        sampled_logprobs=_known_or_nan(trained),
        groups=trained,
    )


def policy_row(groups: Iterable[TrainingGroup], packing: Packing) -> PackedRow:
    """Returns the packed row of the groups that train the policy, or a filler if none does.

    It is equal to the row of `micro_batch`, and needs no log-probs, so that they can be computed
    with it.
    """
    trained = training_policy(groups)
    return _row(trained, [group.policy_tokens for group in trained], packing)


def value_batch(
    groups: Iterable[TrainingGroup], num_step_tokens: int, packing: Packing = "shared"
) -> ValueBatch:
    """Packs all unmasked completions, also of groups of equal rewards; a filler if there are none.

    num_step_tokens: the number of tokens in the whole step at which the critic learns.
    """
    learned = [group for group in groups if group.value_tokens.completions]
    if not learned:
        zero = torch.zeros(1)
        return ValueBatch(filler_row(), zero, zero, zero)
    old_values = []
    returns = []
    for group in learned:
        assert group.old_values is not None and group.returns is not None
        old_values.append(group.old_values)
        returns.append(group.returns)
    return ValueBatch(
        row=_row(learned, [group.value_tokens for group in learned], packing),
        old_values=torch.cat(old_values),
        returns=torch.cat(returns),
        weights=torch.full((sum(map(len, returns)),), 1 / num_step_tokens),
    )


def value_row(groups: Iterable[TrainingGroup], packing: Packing) -> PackedRow:
    """Returns the row of every sampled token of all unmasked completions, to score their values."""
    scored = [group for group in groups if group.sampled_tokens.completions]
    return _row(scored, [group.sampled_tokens for group in scored], packing)


def filler_row() -> PackedRow:
    """Returns a row of one token, for ranks that have nothing to train while others have."""
    return pack([([0], [[0]])])


def _filler_batch() -> MicroBatch:
    # The ratio is at most 1 and there is no reference: nothing overflows, and 0 · inf would be NaN.
    zero = torch.zeros(1)
    return MicroBatch(filler_row(), zero, None, zero, zero, zero.long())


def _row(
    groups: Sequence[TrainingGroup], selections: Sequence[TokenSelection], packing: Packing
) -> PackedRow:
    """Packs the selected completions of each group. The row's targets are the selected tokens."""
    if not groups:
        return filler_row()
    # one entry for each group
    token_ids = []
    images = []
    forks = []
    # one entry for each completion of all groups
    sampling_masks = []
    target_indexes: list[Any] = []
    num_tokens = 0  # of all these completions, selected or not
    for group, selection in zip(groups, selections, strict=True):
        assert isinstance(group.group, Group)
        rollouts = [group.rollouts[i] for i in selection.completions]
        completions = [rollout.completion_ids.tolist() for rollout in rollouts]
        token_ids.append((group.group.prompt_ids.tolist(), completions))
        images.append(group.group.images)
        forks.append([rollout.forks for rollout in rollouts])
        sampling_masks += [rollout.sampling_mask for rollout in rollouts]
        target_indexes += selection.token_indexes
        num_tokens += sum(map(len, completions))
    row = pack(token_ids, packing, images, _routing(groups, selections), forks)
    row = row.with_sampling_mask(sampling_masks)
    if sum(map(len, target_indexes)) == num_tokens:
        return row  # every token is selected, and `pack` has made them all targets
    return select(row, target_indexes)


def _routing(
    groups: Sequence[TrainingGroup], selections: Sequence[TokenSelection]
) -> list[tuple[Experts, list[Experts]]]:
    """Returns the experts of each group's prompt and completions; [] if none were recorded."""
    routing: list[Any] = []
    for group, selection in zip(groups, selections, strict=True):
        assert isinstance(group.group, Group)
        if group.group.routing is not None:
            of_completions = [group.rollouts[i].routing for i in selection.completions]
            routing.append((group.group.routing, of_completions))
    num_known = len(routing)
    assert num_known in (0, len(groups)), (
        f"of {len(groups)} groups {num_known} say which experts their tokens met"
    )
    return routing


def _weights(groups: Sequence[TrainingGroup], denominator: Denominator) -> Tensor:
    """Returns the weight of each token in the step's loss, [N]."""
    lengths = []
    shares = []
    for group in groups:
        lengths += group.policy_tokens.lengths
        shares += [group.share_of_rollouts] * len(group.policy_tokens.completions)
    return token_weights(lengths, denominator, shares)


def _all_or_none(logprobs: Sequence[Tensor | None]) -> Tensor | None:
    """Joins the groups' log-probs. Returns None if those of any group are unknown."""
    known = [of_group for of_group in logprobs if of_group is not None]
    if len(known) < len(logprobs):
        return None
    device = known[0].device  # log-probs from other ranks are on the CPU
    return torch.cat([of_group.to(device) for of_group in known])


def _known_or_nan(groups: Sequence[TrainingGroup]) -> Tensor | None:
    """Joins the groups' sampled_logprobs, NaN where they are unknown; None if all are unknown."""
    if all(group.sampled_logprobs is None for group in groups):
        return None
    joined = []
    for group in groups:
        if group.sampled_logprobs is None:
            joined.append(torch.full((group.policy_tokens.num_tokens,), torch.nan))
        else:
            joined.append(group.sampled_logprobs)
    return torch.cat(joined)
