"""Forward and backward of one batch of rollouts, in mini-batches and passes, while its groups still arrive.

    take groups ─► score ─► plan rounds ─► their arrays ─► pack ─► reference ─► forward and backward
     slots.py       here     micro_batches   receiver      tensors               engine/policy, engine/actor_critic

All that is known of a group is in one record (data/experience.py). If all groups of a step have arrived when it starts,
one plan over all of them balances the ranks best. Otherwise rounds are planned over the groups that have arrived, in
the order of their ids, so that training goes on while the rest decodes. Both plans follow from settings, lengths and
rewards alone, which every rank has for all groups, so that all ranks compute the same plan.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.config import Config
from common.processes.exits import say
from common.processes.out_of_memory import is_out_of_memory
from common.processes.watchdog import report_progress
from model import devices
from model.cores import LentCores
from model.layout import packing_of
from model.packing import Packing, common_packing
from model.reference import Reference
from trainer.data import micro_batches
from trainer.data.experience import Experience, score_rewards
from trainer.data.micro_batches import Budget, Planner, Round, Work, plan, plan_metrics, work_of
from trainer.data.mini_batches import Step, TrainedStep, corrects_later_steps, needs_batch_statistics, waits_for
from trainer.data.slots import Slots, fill
from trainer.data.tensors import (
    MicroBatch,
    micro_batch,
    num_trained_tokens,
    num_value_tokens,
    policy_row,
    step_denominator,
)
from trainer.engine.abandoned_kinds import agree_on_kinds
from trainer.engine.actor_critic import ActorCritic
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Exchange
from trainer.engine.sharded_reference import ShardedReference
from trainer.group_receiver import GroupReceiver
from trainer.save.checkpoint import Progress


@dataclass(frozen=True)
class Models:
    policy: PolicyEngine
    reference: Reference | ShardedReference | None = None  # None: the trainer's ranks do not score it
    critic: ActorCritic | None = None

    @property
    def packing(self) -> Packing:
        """Returns the packing of the rows that policy and reference share."""
        return common_packing(self.policy.packing, *([packing_of(self.reference.model)] if self.reference else []))


class BatchTraining:
    """The training on one batch: `prepare` it, then `train` each of its steps. Every rank calls every method."""

    def __init__(
        self,
        config: Config,
        models: Models,
        exchange: Exchange,
        receiver: GroupReceiver,
        seconds: defaultdict[str, float],  # durations of a step's parts, by metric name
        lent_cores: LentCores,
    ):
        self.config = config
        self.models, self._exchange, self._receiver = models, exchange, receiver
        self._seconds, self._lent_cores = seconds, lent_cores
        self._budget = Budget(config.trainer.groups_per_micro_batch, config.trainer.max_tokens_per_micro_batch)
        self._ran_out_of_memory = False  # on this rank, in this step

    def prepare(self, progress: Progress) -> None:
        """Prepares the batch that follows `progress`, without taking any group of it yet."""
        self.slots = Slots(self.config, progress.cursor)
        self._receiver.begin_batch(progress.cursor)
        self._groups_at_once = self._budget.at_once(self._exchange.dp_size)
        self._rounds: dict[tuple[int, ...], list[Round]] = {}  # by the step's places; the same in every pass
        self._first_version = progress.policy_version  # before any update on the batch
        self._delivered: set[tuple[int, int]] = set()  # (group id, dp_rank that has its arrays)
        self._is_scored = False  # whether the whole batch is scored, if it must be

    def train(self, step: Step, progress: Progress) -> None:
        """Runs forward and backward on a mini-batch, while later groups still decode if the settings allow it."""
        self._progress = progress
        needed = {"batch": self.slots.size, "mini_batch": max(step.places) + 1, "micro_batch": 0}
        self._fill(needed[waits_for(self.config.algorithm)])
        # once for all micro-batches: the denominator does not depend on groups of the step that are still missing
        self._denominator = step_denominator(self.slots.at(step.places), len(step.places), self.config)
        if self.models.critic:  # the step's tokens that train the critic
            self._value_tokens = max(1, num_value_tokens(self.slots.training(step.places), self.config.algorithm))
        self._train_rounds(step)
        if self._may_halve and self._exchange.any_rank(self._ran_out_of_memory):
            self._halve_micro_batches()
            self._train_rounds(step)
        self._share_with_later_passes(step)
        if devices.count() and self._exchange.world_size > 1:
            agree_on_kinds(self._exchange, ())

    def _train_rounds(self, step: Step) -> None:
        """Trains the rounds of an earlier pass, else of one plan, or of several plans while groups are missing."""
        if step.places not in self._rounds and max(step.places) < self.slots.num_filled:
            self._rounds[step.places] = self._plan(step.places)
        if step.places in self._rounds:
            for round_ in self._rounds[step.places]:
                self._train_round(round_)
        else:
            self._rounds[step.places] = self._train_as_they_come(step)

    @property
    def _may_halve(self) -> bool:
        """Returns whether memory that runs out halves micro-batches: once, and where a step can begin anew."""
        most = self.config.trainer.max_tokens_per_micro_batch
        if most is None or self._budget.tokens != most:
            return False
        # no other rank may wait for this one in its forward and backward
        return self._exchange.ranks_per_row == 1 and self.models.policy.can_drop_gradients

    def _halve_micro_batches(self) -> None:
        """Drops the gradients of the step, and divides the micro-batches of all passes.

        Every group keeps its rank, because no other rank knows the log-probs that are stored for it.
        """
        for engine in (self.models.policy, *([self.models.critic.critic] if self.models.critic else [])):
            engine.drop_gradients()
        devices.release_cache()
        most = self.config.trainer.max_tokens_per_micro_batch or 0
        half = most // 2
        self._budget, self._ran_out_of_memory = replace(self._budget, tokens=half), False
        for places, rounds in self._rounds.items():
            self._rounds[places] = micro_batches.divided(rounds, self._works_by_place(places), half)
        if self._exchange.rank == 0:
            say(
                f"memory ran out with micro-batches of {most:,} tokens: the step begins anew with "
                f"{half:,}; to start so, set trainer.max_tokens_per_micro_batch={half}"
            )

    def _train_as_they_come(self, step: Step) -> list[Round]:
        """Trains as `train` does, on several groups at a time. Returns the rounds, which later passes repeat."""
        planner = Planner(self._exchange.dp_size, self._budget)
        for first in range(0, len(step.places), self._groups_at_once):
            places = step.places[first : first + self._groups_at_once]
            self._fill(max(places) + 1)
            for round_ in planner.add(self._works_by_place(places)):
                self._train_round(round_)
        for round_ in planner.finish():
            self._train_round(round_)
        return planner.rounds

    def _share_with_later_passes(self, step: Step) -> None:
        """Gives every rank what the first pass found, because shuffling moves groups to others."""
        algorithm = self.config.algorithm
        is_first = step.iteration == 0 and algorithm.num_iterations > 1
        if algorithm.shuffle_mini_batches and is_first and not self.critic_only:
            self._share_logprobs("sampled_logprobs", step.places)
            if self.models.reference:
                self._share_logprobs("ref_logprobs", step.places)

    @property
    def critic_only(self) -> bool:
        """Returns whether the step is within critic_warmup_steps, which change neither the policy nor its version."""
        return self._progress.step < self.config.critic.critic_warmup_steps

    def trained(self, step: Step) -> TrainedStep:
        """Returns the groups and metrics of a step, for its records."""
        works = self._works_by_place(step.places)
        return TrainedStep(
            step=step,
            groups=[experience.group for experience in self.slots.at(step.places)],
            metrics=self.slots.dead_group_metrics(step) | plan_metrics(self._rounds[step.places], works, self._budget),
            empty_slots=self.slots.warning() if step.is_last else "",
            oversized_groups=micro_batches.warning(works, self._budget),
        )

    def _fill(self, count: int) -> None:
        """Fills `count` slots, then computes advantages and needed log-probs as soon as their inputs are complete."""
        fill(self.slots, count, self._groups_at_once, self._receiver.receive, self._receiver.refill)
        algorithm, batch = self.config.algorithm, self.slots.training()
        if not needs_batch_statistics(algorithm):
            new = [experience for experience in batch if experience.advantages is None]
            self.slots.replace(score_rewards(new, self.config))
        if self._is_scored or self.slots.num_filled < self.slots.size:
            return
        self._is_scored = True
        if self.models.critic:
            self._score_values(self.models.critic)
        elif needs_batch_statistics(algorithm):
            self.slots.replace(score_rewards(batch, self.config))
        if corrects_later_steps(algorithm):
            self._score_proximal()

    def _score_values(self, critic: ActorCritic) -> None:
        start = time.monotonic()
        report_progress("scoring a batch of rollouts with the critic")
        parts = [self._own_part(round_) for round_ in self._plan(range(self.slots.size))]
        params = self.config.algorithm.group_params
        adapted = self._progress.threshold if params.threshold_lr else None
        threshold = adapted or params.group_variance_threshold
        self.slots.replace(critic.score(self.slots.training(), parts, threshold))
        self._seconds["timing/values_s"] += time.monotonic() - start

    def _score_proximal(self) -> None:
        """Computes the trainer's log-probs of the batch, for every rank because shuffling moves groups to others."""
        start = time.monotonic()
        algorithm, packing = self.config.algorithm, self.models.packing
        places = range(self.slots.size)
        for round_ in self._plan(places):
            report_progress("scoring a batch of rollouts with the weights that sampled it")
            own = self._own_part(round_)
            logprobs = self.models.policy.score(policy_row(own, algorithm, packing), self.config.sampler.temperature)
            if lengths := self._lengths(own):  # else the row is a filler
                self._set_logprobs("proximal_logprobs", lengths, logprobs)
        self._share_logprobs("proximal_logprobs", places)
        self._seconds["timing/score_s"] += time.monotonic() - start

    def _share_logprobs(self, name: str, places: Iterable[int]) -> None:
        """Sets log-probs of these groups on every rank; before, one rank knows those of each group.

        name: a field of Experience.
        """
        lengths = self._lengths(self.slots.training(places))
        parts = [torch.zeros(0)]
        for experience, n in lengths:
            known = getattr(experience, name)
            parts.append(torch.zeros(n) if known is None else known.cpu())
        logprobs = self._exchange.sum_over_dp(torch.cat(parts))  # exact: other ranks add 0
        self._set_logprobs(name, lengths, logprobs)

    def _set_logprobs(
        self,
        name: str,
        lengths: Sequence[tuple[Experience, int]],  # of the groups, in the order of their tokens
        logprobs: Tensor,
    ) -> None:
        """Sets each group's log-probs, which `logprobs` joins. name: a field of Experience."""
        logprobs_of_groups = logprobs.split([n for _, n in lengths])
        for (experience, _), of_group in zip(lengths, logprobs_of_groups, strict=True):
            self.slots.update(experience.group.group_id, **{name: of_group})

    def _lengths(self, experiences: Iterable[Experience]) -> list[tuple[Experience, int]]:
        """Returns the experiences that train the policy, with their numbers of tokens."""
        return [(e, n) for e in experiences if (n := num_trained_tokens(e, self.config.algorithm))]

    def _works_by_place(self, places: Sequence[int]) -> dict[int, Work]:
        algorithm, packing, dims = self.config.algorithm, self.models.packing, self.models.policy.dims
        return {place: work_of(self.slots.training([place]), algorithm, packing, dims) for place in places}

    def _plan(self, places: Sequence[int]) -> list[Round]:
        rounds = plan(self._works_by_place(places), self._exchange.dp_size, self._budget)
        self._deliver(rounds)
        return rounds

    def _deliver(self, rounds: Iterable[Round]) -> None:
        """Sends the arrays of the rounds' groups to the ranks that train them and have none yet."""
        owners: dict[int, list[int]] = {}
        for dp_rank, places in itertools.chain(*map(enumerate, rounds)):
            for group_id in (experience.group.group_id for experience in self.slots.training(places)):
                if (group_id, dp_rank) not in self._delivered:
                    self._delivered.add((group_id, dp_rank))
                    owners.setdefault(group_id, []).append(dp_rank)
        for group_id, group in self._receiver.deliver(owners).items():
            self.slots.update(group_id, group=group)

    def _own_part(self, round_: Round) -> list[Experience]:
        return self.slots.training(round_[self._exchange.dp_rank])

    def _train_round(self, round_: Round) -> None:
        """Trains on this rank's part of one round of a step."""
        self._deliver([round_])
        try:
            with self._lent_cores.borrowed():
                if not self._ran_out_of_memory:  # else the step begins anew once all ranks have ended it
                    self._backward(self._own_part(round_))
        except Exception as error:  # cuBLAS and cuDNN have no class of their own for memory
            if not self._may_halve or not is_out_of_memory(error):
                raise
            self._ran_out_of_memory = True

    def _backward(self, own: Sequence[Experience]) -> None:
        batch = None if self.critic_only else self._packed(own)
        report_progress(f"training a micro-batch of step {self._progress.step + 1}")
        start = time.monotonic()
        if self.models.critic:
            self.models.critic.backward(own, self._value_tokens)
        if batch:
            self._check_proximal(batch)
            logprobs = self.models.policy.backward(batch, self._progress.policy_version)
            self._remember(batch, logprobs)
        self._seconds["timing/backward_s"] += time.monotonic() - start

    def _packed(self, own: Sequence[Experience]) -> MicroBatch:
        """Packs a micro-batch, with reference log-probs if this rank computes them: once for all passes."""
        reference, algorithm, packing = self.models.reference, self.config.algorithm, self.models.packing
        batch = micro_batch(own, self._denominator, algorithm, packing, awaits_reference=reference is not None)
        if reference is None:
            return batch
        start = time.monotonic()
        needs_scores = not batch.is_filler and batch.ref_logprobs is None
        is_sharded = isinstance(reference, ShardedReference)  # all ranks score, or none
        if self._exchange.any_rank(needs_scores) if is_sharded else needs_scores:
            report_progress("scoring a micro-batch with the reference model")
            scored = reference.score(batch.row)
            if needs_scores:
                batch = replace(batch, ref_logprobs=scored)
                for group_id, logprobs in batch.by_group(scored).items():
                    self.slots.update(group_id, ref_logprobs=logprobs)
        self._seconds["timing/reference_s"] += time.monotonic() - start
        return batch

    def _check_proximal(self, batch: MicroBatch) -> None:
        """Asserts that proximal log-probs are known once an update on the batch has moved the weights.

        Without them the moved weights would give them, and correct the sampler's mismatch wrongly.
        """
        is_corrected = self.config.algorithm.vllm_importance_sampling_mode is not None
        has_moved = self._progress.policy_version != self._first_version
        if is_corrected and has_moved and not batch.is_filler:
            groups = list(batch.tokens_of)
            assert batch.proximal_logprobs is not None, f"log-probs of groups {groups} are lost"

    def _remember(self, batch: MicroBatch, logprobs: Tensor) -> None:
        """Keeps log-probs for later passes: to correct the mismatch, and to tell numerics from staleness."""
        algorithm = self.config.algorithm
        if algorithm.vllm_importance_sampling_mode is not None:
            for group_id, proximal in batch.by_group(logprobs).items():
                if self.slots.of_group(group_id).proximal_logprobs is None:
                    self.slots.update(group_id, proximal_logprobs=proximal)
        if algorithm.num_iterations > 1:
            is_present = batch.by_group(batch.policy_versions == self._progress.policy_version)
            for group_id, sampled in batch.by_group(logprobs.cpu()).items():
                before = self.slots.of_group(group_id).sampled_logprobs
                before = torch.full_like(sampled, torch.nan) if before is None else before
                self.slots.update(group_id, sampled_logprobs=torch.where(is_present[group_id], sampled, before))
