"""Builds the tensors of one forward and backward pass from the groups of a micro-batch.

A filler is a micro-batch of weight 0. A rank runs it when it has nothing to train, because ZeRO's
collectives require all ranks to run equally many forwards.
"""

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
    """A micro-batch of the policy, or a filler. N = the number of tokens in the row that train."""

    row: PackedRow
    old_logprobs: Tensor  # [N] float32, computed by the sampler
    ref_logprobs: Tensor | None  # [N] float32; None: beta is 0, not scored yet, or a filler
    advantages: Tensor  # [N] float32
    weights: Tensor  # [N] float32, 0 in a filler
    policy_versions: Tensor  # [N] int64, the version of the weights that sampled each token
    # [N] float32, log-probs before the first update; None: no update yet, so this pass gives them
    proximal_logprobs: Tensor | None = None
    # [N] float32, log-probs under the weights that sampled; NaN where unknown; None: all unknown
    own_logprobs: Tensor | None = None
    groups: list[TrainingGroup] = field(default_factory=list)  # in the order of their tokens

    @property
    def is_filler(self) -> bool:
        """Returns whether the micro-batch trains no token."""
        return not self.groups


@dataclass(frozen=True)
class ValueBatch:
    """A micro-batch of the critic, or a filler. M = the tokens at which the critic learns."""

    row: PackedRow
    old_values: Tensor  # [M] float32, the critic's values before its first update on the batch
    returns: Tensor  # [M] float32, the critic's targets
    weights: Tensor  # [M] float32, 0 in a filler


def step_denominator(taken: Sequence[TrainingGroup], num_slots: int, config: Config) -> Denominator:
    """Returns the denominator by which the losses of a step's tokens are divided.

    A tombstone or an empty slot counts num_generations completions, as a group does, although it
    adds no loss. A dead group that is skipped does not count.

    taken: all groups that were taken for the step's slots. num_slots: the number of its slots.
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
        num_tokens=max(1, sum(group.policy_tokens.num_tokens for group in trained)),  # a divisor
        max_completion_length=sampler.max_completion_length,
    )


def micro_batch(
    groups: Iterable[TrainingGroup],
    denominator: Denominator,
    algorithm: Algorithm,
    packing: Packing = "shared",
) -> MicroBatch:
    """Packs the groups that can change the policy. Returns a filler if there are none."""
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
        own_logprobs=_known_or_nan(trained),
        groups=trained,
    )


def policy_row(groups: Iterable[TrainingGroup], packing: Packing) -> PackedRow:
    """Returns the packed row of the groups that can change the policy, or a filler row.

    This is the row that `micro_batch` would build, but it can be built before the groups' log-probs
    are known, in order to compute them.
    """
    trained = training_policy(groups)
    return _row(trained, [group.policy_tokens for group in trained], packing)


def value_batch(
    groups: Iterable[TrainingGroup], num_step_tokens: int, packing: Packing = "shared"
) -> ValueBatch:
    """Packs all unmasked completions for the critic. Returns a filler if there are none.

    Groups of equal rewards are included, because the critic also learns from them.
    num_step_tokens: the number of tokens in the whole step at which the critic learns.
    """
    learned = [group for group in groups if group.value_tokens.completions]
    if not learned:
        zero = torch.zeros(1)
        return ValueBatch(filler_row(), old_values=zero, returns=zero, weights=zero)
    old_values = []
    returns = []
    for group in learned:
        assert group.old_values is not None and group.returns is not None
        old_values.append(group.old_values)
        returns.append(group.returns)
    num_tokens = sum(len(returns_of_group) for returns_of_group in returns)
    return ValueBatch(
        row=_row(learned, [group.value_tokens for group in learned], packing),
        old_values=torch.cat(old_values),
        returns=torch.cat(returns),
        weights=torch.full((num_tokens,), 1 / num_step_tokens),
    )


def value_row(groups: Iterable[TrainingGroup], packing: Packing) -> PackedRow:
    """Returns the packed row with which the critic scores every sampled token.

    Masked completions are left out. Without any completion, the row is a filler.
    """
    scored = [group for group in groups if group.sampled_tokens.completions]
    return _row(scored, [group.sampled_tokens for group in scored], packing)


def filler_row() -> PackedRow:
    """Returns the smallest row that a model can score: a prompt and a completion of one token each.

    A rank scores it while other ranks have groups, so that all ranks run equally many forwards.
    """
    prompt = [0]  # `pack` needs a token that predicts the first token of the completion
    completion = [0]
    return pack([(prompt, [completion])])


def _filler_batch() -> MicroBatch:
    # With a log-prob of 0 from the sampler, the ratio is at most 1. So no term of the loss becomes
    # infinite, which matters because 0 · inf is NaN.
    zero = torch.zeros(1)
    return MicroBatch(
        row=filler_row(),
        old_logprobs=zero,
        ref_logprobs=None,
        advantages=zero,
        weights=zero,
        policy_versions=zero.long(),
    )


def _row(
    groups: Sequence[TrainingGroup], selections: Sequence[TokenSelection], packing: Packing
) -> PackedRow:
    """Packs the selected completions of each group into one row, or returns a filler row.

    The targets of the row, at which it is trained or scored, are the selected tokens.
    """
    if not groups:
        return filler_row()

    # These lists have one entry for each group.
    token_ids = []
    images = []
    forks = []
    # These lists have one entry for each selected completion of all groups.
    sampling_masks = []
    target_indexes: list[Any] = []
    num_tokens = 0  # in all selected completions, with the tokens that are not selected
    for group, selection in zip(groups, selections, strict=True):
        assert isinstance(group.group, Group)
        rollouts = [group.rollouts[i] for i in selection.completions]
        completions = [rollout.completion_ids.tolist() for rollout in rollouts]
        token_ids.append((group.group.prompt_ids.tolist(), completions))
        images.append(group.group.images)
        forks.append([rollout.forks for rollout in rollouts])
        sampling_masks += [rollout.sampling_mask for rollout in rollouts]
        target_indexes += selection.token_indexes
        num_tokens += sum(len(completion) for completion in completions)

    row = pack(token_ids, packing, images, _routing(groups, selections), forks)
    row = row.with_sampling_mask(sampling_masks)
    num_selected = sum(selection.num_tokens for selection in selections)
    if num_selected == num_tokens:
        return row  # `pack` has made every token of a completion a target
    return select(row, target_indexes)


def _routing(
    groups: Sequence[TrainingGroup], selections: Sequence[TokenSelection]
) -> list[tuple[Experts, list[Experts]]]:
    """Returns the recorded experts of each group's prompt and of its selected completions.

    Returns [] if the sampler recorded no experts. It must record them for all groups or for none.
    """
    routing: list[Any] = []
    for group, selection in zip(groups, selections, strict=True):
        assert isinstance(group.group, Group)
        if group.group.routing is not None:
            completion_routing = [group.rollouts[i].routing for i in selection.completions]
            routing.append((group.group.routing, completion_routing))
    num_known = len(routing)
    assert num_known in (0, len(groups)), (
        f"{num_known} of {len(groups)} groups have a record of their tokens' experts"
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
    """Joins the groups' log-probs. Returns None if the log-probs of any group are unknown."""
    known = [group_logprobs for group_logprobs in logprobs if group_logprobs is not None]
    if len(known) < len(logprobs):
        return None
    device = known[0].device  # log-probs that other ranks computed are on the CPU
    return torch.cat([group_logprobs.to(device) for group_logprobs in known])


def _known_or_nan(groups: Sequence[TrainingGroup]) -> Tensor | None:
    """Joins the groups' own_logprobs, with NaN for a group whose log-probs are unknown.

    Returns None if they are unknown for every group.
    """
    if all(group.own_logprobs is None for group in groups):
        return None
    joined = []
    for group in groups:
        if group.own_logprobs is None:
            joined.append(torch.full((group.policy_tokens.num_tokens,), torch.nan))
        else:
            joined.append(group.own_logprobs)
    return torch.cat(joined)
