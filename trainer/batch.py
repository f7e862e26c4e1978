"""One batch of rollouts on a rank: its groups are taken from the stream, scored and planned.

    take groups ─► advantages ─► with a critic values, with a correction log-probs of all groups

Scoring is done once for all optimizer steps on the batch (step.py).
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from common.config import Config
from common.processes.watchdog import report_progress
from trainer.data import micro_batches
from trainer.data.micro_batches import Budget, Round, Work
from trainer.data.mini_batches import corrects_later_steps, needs_batch_statistics
from trainer.data.slots import Slots
from trainer.data.tensors import policy_row
from trainer.data.training_group import (
    TrainingGroup,
    set_advantages_from_rewards,
    split_by_group,
    trainable,
    training_policy,
)
from trainer.engine.actor_critic import ActorCritic
from trainer.engine.models import Models
from trainer.engine.ranks import Collectives
from trainer.group_receiver import GroupReceiver
from trainer.save.checkpoint import RunState


class RolloutBatch:
    """The groups of one batch of rollouts. Every rank calls every method."""

    def __init__(
        self,
        config: Config,
        models: Models,
        collectives: Collectives,
        receiver: GroupReceiver,
        seconds: defaultdict[str, float],  # durations of a step's parts, by metric name
        run_state: RunState,
        budget: Budget,
    ):
        """Starts the batch that follows `run_state`, without taking any group of it yet."""
        self.config = config
        self.models = models
        self.collectives = collectives
        self._receiver = receiver
        self._seconds = seconds
        self._run_state = run_state
        self.first_version = run_state.policy_version  # before any update on the batch
        self.slots = Slots(config, run_state.cursor)
        self.budget = budget  # of a micro-batch
        self.groups_at_once = budget.groups_at_once(collectives.dp_size)
        self.rounds: dict[tuple[int, ...], list[Round]] = {}  # by a step's slots, for all passes
        self._is_scored = False

    # ---- taking and scoring

    def take(self, num_slots: int) -> None:
        """Waits until groups fill the first `num_slots` slots of the batch, and takes the groups.

        Then it sets the groups' advantages if they do not depend on the whole batch. Otherwise
        these are set once the last slot is filled, like the critic's targets and the proximal
        log-probs.
        """
        self.slots.fill(num_slots, self.groups_at_once, self._receiver)
        groups = trainable(self.slots.taken, self.config.algorithm)
        if not needs_batch_statistics(self.config.algorithm):
            new = [group for group in groups if group.advantages is None]
            set_advantages_from_rewards(new, self.config)
        if not self._is_scored and self.slots.num_filled == self.slots.size:
            self._is_scored = True
            self._score(groups)

    def _score(self, groups: Sequence[TrainingGroup]) -> None:
        """Computes what depends on all groups of the batch. groups: those that may train."""
        if self.models.actor_critic:
            self._score_values(self.models.actor_critic, groups)
        elif needs_batch_statistics(self.config.algorithm):
            set_advantages_from_rewards(groups, self.config)
        if corrects_later_steps(self.config.algorithm):
            self._score_proximal(groups)

    def _score_values(self, actor_critic: ActorCritic, groups: Sequence[TrainingGroup]) -> None:
        """Sets advantages and value targets by the critic's values."""
        start = time.monotonic()
        report_progress("scoring a batch of rollouts with the critic")
        rounds = self.plan(range(self.slots.size))
        own_micro_batches = [self.own_groups(round_) for round_ in rounds]
        params = self.config.algorithm.group_params
        threshold = params.group_variance_threshold
        if params.threshold_lr and self._run_state.threshold:
            threshold = self._run_state.threshold
        actor_critic.score(groups, own_micro_batches, threshold)
        self._seconds["timing/values_s"] += time.monotonic() - start

    def _score_proximal(self, groups: Sequence[TrainingGroup]) -> None:
        """Sets the trainer's log-probs of the batch from before any update on it.

        Every rank gets those of all groups, because shuffling moves groups to other ranks.
        """
        start = time.monotonic()
        for round_ in self.plan(range(self.slots.size)):
            report_progress("scoring a batch of rollouts with the weights that sampled it")
            own_groups = self.own_groups(round_)
            row = policy_row(own_groups, self.models.packing)
            logprobs = self.models.policy.score(row, self.config.sampler.temperature)
            for group, logprobs_of_group in split_by_group(training_policy(own_groups), logprobs):
                group.proximal_logprobs = logprobs_of_group
        trained = training_policy(groups)
        shared = self._on_all_ranks(trained, [group.proximal_logprobs for group in trained])
        for group, logprobs in zip(trained, shared, strict=True):
            group.proximal_logprobs = logprobs
        self._seconds["timing/score_s"] += time.monotonic() - start

    # ---- planning

    def works(self, slots: Iterable[int]) -> dict[int, Work]:
        """Returns the work of the group that trains in each slot."""
        works = {}
        for slot in slots:
            works[slot] = micro_batches.work_of_slot(
                self.slots.trainable([slot]),
                self.config.algorithm,
                self.models.packing,
                self.models.policy.dims,
            )
        return works

    def plan(self, slots: Iterable[int]) -> list[Round]:
        return micro_batches.plan(self.works(slots), self.collectives.dp_size, self.budget)

    def own_groups(self, round_: Round) -> list[TrainingGroup]:
        """Returns the groups of this rank's micro-batch of a round."""
        return self.slots.trainable(round_[self.collectives.dp_rank])

    # ---- what later passes need

    def share_logprobs(self, slots: Iterable[int]) -> None:
        """Gives every rank the log-probs that one rank found of each group of these slots."""
        groups = training_policy(self.slots.trainable(slots))
        sampled = self._on_all_ranks(groups, [group.sampled_logprobs for group in groups])
        for group, logprobs in zip(groups, sampled, strict=True):
            group.sampled_logprobs = logprobs
        if self.models.reference:
            ref = self._on_all_ranks(groups, [group.ref_logprobs for group in groups])
            for group, logprobs in zip(groups, ref, strict=True):
                group.ref_logprobs = logprobs

    def _on_all_ranks(
        self, groups: Sequence[TrainingGroup], logprobs: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Returns each group's log-probs [N] on every rank. Before, only one rank has each."""
        lengths = [group.policy_tokens.num_tokens for group in groups]
        addends = [torch.zeros(0)]
        for logprobs_of_group, length in zip(logprobs, lengths, strict=True):
            if logprobs_of_group is None:
                addends.append(torch.zeros(length))
            else:
                addends.append(logprobs_of_group.cpu())
        total = self.collectives.sum_over_dp(torch.cat(addends))  # exact, because others add 0
        return list(total.split(lengths))
