"""Holds one batch of rollouts on a rank: takes its groups from the stream, scores and plans them.

    take         groups fill the batch's slots (slots.py)
    advantages   follow from rewards, or from the critic's values if there is a critic
    log-probs    of all groups are computed before any update, if an importance-sampling correction
                 needs them in later steps

Scoring is done once for all optimizer steps on the batch (step.py). A round is one micro-batch on
every rank (data/micro_batches.py).
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
        """Starts the batch that follows `run_state`, without taking any of its groups yet.

        budget: the limit of one micro-batch, until `divide_rounds` sets a smaller one.
        """
        self.config = config
        self.models = models
        self.collectives = collectives
        self._receiver = receiver
        self._seconds = seconds
        self._run_state = run_state
        self.first_version = run_state.policy_version  # before any update on the batch
        self.slots = Slots(config, run_state.cursor)
        self.budget = budget
        self.groups_at_once = budget.groups_at_once(collectives.dp_size)
        # The rounds of each step, keyed by the step's slots, for later passes with the same slots.
        self.rounds: dict[tuple[int, ...], list[Round]] = {}
        self._is_scored = False

    # ---- taking and scoring

    def take(self, num_slots: int) -> None:
        """Waits until groups fill the first `num_slots` slots of the batch, and takes these groups.

        Advantages are then set, unless they depend on the whole batch. In that case they are set
        when the last slot has been filled, as are the critic's targets and the proximal log-probs.
        """
        self.slots.fill(num_slots, self.groups_at_once, self._receiver)
        groups = trainable(self.slots.taken, self.config.algorithm)
        if not needs_batch_statistics(self.config.algorithm):
            new_groups = [group for group in groups if group.advantages is None]
            set_advantages_from_rewards(new_groups, self.config)
        is_full = self.slots.num_filled == self.slots.size
        if is_full and not self._is_scored:
            self._is_scored = True
            self._score(groups)

    def _score(self, groups: Sequence[TrainingGroup]) -> None:
        """Sets the values of groups that depend on the whole batch.

        groups: the groups of the batch that may train.
        """
        if self.models.actor_critic:
            self._score_values(self.models.actor_critic, groups)
        elif needs_batch_statistics(self.config.algorithm):
            set_advantages_from_rewards(groups, self.config)
        if corrects_later_steps(self.config.algorithm):
            self._score_proximal(groups)

    def _score_values(self, actor_critic: ActorCritic, groups: Sequence[TrainingGroup]) -> None:
        """Computes advantages and value targets from the critic's values."""
        start = time.monotonic()
        report_progress("scoring a batch of rollouts with the critic")
        rounds = self.plan(range(self.slots.size))
        own_micro_batches = [self.own_groups(round_) for round_ in rounds]
        # GROUP PPO may learn its threshold. Then the setting is only the initial value.
        params = self.config.algorithm.group_params
        threshold = params.group_variance_threshold
        if params.threshold_lr and self._run_state.threshold:
            threshold = self._run_state.threshold
        actor_critic.score(groups, own_micro_batches, threshold)
        self._seconds["timing/values_s"] += time.monotonic() - start

    def _score_proximal(self, groups: Sequence[TrainingGroup]) -> None:
        """Sets each group's proximal log-probs, those before any update on the batch.

        Every rank gets the log-probs of all groups, because a later pass may shuffle groups to
        different ranks.
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
        for group, shared_logprobs in zip(trained, shared, strict=True):
            group.proximal_logprobs = shared_logprobs
        self._seconds["timing/score_s"] += time.monotonic() - start

    # ---- planning

    def works(self, slots: Iterable[int]) -> dict[int, Work]:
        """Returns the work of training each slot's group, by slot (micro_batches.Work)."""
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
        """Returns the rounds that train the groups of these slots."""
        return micro_batches.plan(self.works(slots), self.collectives.dp_size, self.budget)

    def divide_rounds(self, budget: Budget) -> None:
        """Divides the micro-batches of all planned rounds to fit a smaller budget of tokens.

        Every group stays on its rank, because no other rank has the log-probs stored for it.
        """
        assert budget.tokens is not None
        self.budget = budget
        for slots, rounds in self.rounds.items():
            works = self.works(slots)
            self.rounds[slots] = micro_batches.divided(rounds, works, budget.tokens)

    def own_groups(self, round_: Round) -> list[TrainingGroup]:
        """Returns the groups of this rank's micro-batch of a round."""
        return self.slots.trainable(round_[self.collectives.dp_rank])

    # ---- what later passes need

    def share_logprobs(self, slots: Iterable[int]) -> None:
        """Copies log-probs that only one rank has for each group of these slots to every rank.

        A group's own_logprobs and ref_logprobs are known only on the rank that trained it.
        """
        groups = training_policy(self.slots.trainable(slots))
        own = self._on_all_ranks(groups, [group.own_logprobs for group in groups])
        for group, logprobs in zip(groups, own, strict=True):
            group.own_logprobs = logprobs
        if self.models.reference:
            ref = self._on_all_ranks(groups, [group.ref_logprobs for group in groups])
            for group, logprobs in zip(groups, ref, strict=True):
                group.ref_logprobs = logprobs

    def _on_all_ranks(
        self, groups: Sequence[TrainingGroup], logprobs: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Returns the log-probs [N] of every group, on every rank.

        logprobs: for each group its log-probs on the one rank that has them, and None on the other
        ranks.
        """
        lengths = [group.policy_tokens.num_tokens for group in groups]
        addends = [torch.zeros(0)]  # because torch.cat needs a tensor even without groups
        for logprobs_of_group, length in zip(logprobs, lengths, strict=True):
            if logprobs_of_group is None:
                addends.append(torch.zeros(length))
            else:
                addends.append(logprobs_of_group.cpu())
        total = self.collectives.sum_over_dp(torch.cat(addends))  # exact: other ranks add 0
        return list(total.split(lengths))
