"""One optimizer step: take its groups, plan, then pack, score and train each micro-batch.

    take groups ─► plan rounds ─► pack ─► reference ─► forward and backward ─► optimizer step
    batch.py       micro_batches   tensors              policy, actor_critic

If all groups of a step have arrived when it starts, one plan over all of them balances the ranks
best. Otherwise rounds are planned over the groups that have arrived, in the order of their ids, so
that training goes on while the rest decodes. Both plans follow from settings, lengths and rewards
alone, so that all ranks compute the same plan.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common.config import Config
from common.failpoints import failpoint
from common.processes.exits import say
from common.processes.out_of_memory import is_out_of_memory
from common.processes.watchdog import report_progress
from model import devices
from model.cores import LentCores
from model.reference import Reference
from trainer.batch import RolloutBatch
from trainer.data import micro_batches
from trainer.data.micro_batches import Budget, Planner, Round
from trainer.data.mini_batches import Step, TrainedStep, waits_for
from trainer.data.tensors import MicroBatch, micro_batch, step_denominator
from trainer.data.training_group import TrainingGroup, split_by_group
from trainer.engine.models import Models
from trainer.engine.ranks import Collectives
from trainer.engine.sharded_reference import ShardedReference
from trainer.engine.step_result import StepResult
from trainer.engine.uncompiled_kinds import share_uncompiled_kinds
from trainer.group_receiver import GroupReceiver
from trainer.save.checkpoint import RunState


class StepTrainer:
    """Trains batches: `begin_batch`, then `backward` and `optimizer_step` for each of its steps.

    Every rank calls every method.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        collectives: Collectives,
        receiver: GroupReceiver,
        seconds: defaultdict[str, float],  # durations of a step's parts, by metric name
        lent_cores: LentCores,
    ):
        self.config = config
        self.models = models
        self._collectives = collectives
        self._receiver = receiver
        self._seconds = seconds
        self._lent_cores = lent_cores
        self._budget = Budget(
            config.trainer.groups_per_micro_batch, config.trainer.max_tokens_per_micro_batch
        )
        self._ran_out_of_memory = False  # on this rank, in this step

    def begin_batch(self, run_state: RunState) -> None:
        """Begins the batch that follows `run_state`, without taking any group of it yet."""
        self.batch = RolloutBatch(
            self.config,
            self.models,
            self._collectives,
            self._receiver,
            self._seconds,
            run_state,
            self._budget,
        )

    # ---- a step

    def backward(self, step: Step, run_state: RunState) -> None:
        """Runs forward and backward of a step's groups, while later groups may still decode."""
        self._run_state = run_state
        self.batch.take(self._num_slots_before_backward(step))
        self._set_denominators(step)
        self._train_rounds(step)
        if self._may_halve and self._collectives.any_rank(self._ran_out_of_memory):
            self._halve_micro_batches()
            self._train_rounds(step)
        if self._must_share_logprobs(step):
            self.batch.share_logprobs(step.slots)
        if devices.count() and self._collectives.world_size > 1:
            share_uncompiled_kinds(self._collectives, ())

    def optimizer_step(self) -> tuple[StepResult, dict[str, float]]:
        """Makes one optimizer step. Returns its result and the step's sums over all ranks."""
        report_progress(f"making optimizer step {self._run_state.step + 1}")
        start = time.monotonic()
        sums = self._collectives.sum_named(self.models.policy.sums.drain())
        # the optimizer also computes on the samplers' CPU cores while the samplers are idle
        with self._lent_cores.borrowed():
            if self.models.actor_critic:
                result = self.models.actor_critic.step(self.critic_only)
            else:
                result = self.models.policy.step()
        failpoint("trainer.stepped")
        self._seconds["timing/step_s"] += time.monotonic() - start
        return result, sums

    @property
    def critic_only(self) -> bool:
        """Returns whether the step is within critic_warmup_steps, which leave the policy alone."""
        return self._run_state.step < self.config.critic.critic_warmup_steps

    def trained(self, step: Step) -> TrainedStep:
        """Returns the groups and metrics of a step, for its records."""
        slots = self.batch.slots
        works = self.batch.works(step.slots)
        budget = self.batch.budget
        plan_metrics = micro_batches.plan_metrics(self.batch.rounds[step.slots], works, budget)
        return TrainedStep(
            step=step,
            groups=[taken.group for taken in slots.taken_for(step.slots)],
            metrics=slots.dead_group_metrics(step) | plan_metrics,
            empty_slots=slots.warning() if step.is_last else "",
            oversized_groups=micro_batches.warning(works, budget),
        )

    def _num_slots_before_backward(self, step: Step) -> int:
        """Returns how many slots must be filled before the first backward of the step."""
        awaited = waits_for(self.config.algorithm)
        if awaited == "batch":
            return self.batch.slots.size
        if awaited == "mini_batch":
            return max(step.slots) + 1
        return 0

    def _set_denominators(self, step: Step) -> None:
        """Sets the denominators by which the losses of policy and critic are divided in this step.

        Groups of the step that arrive after this do not change them.
        """
        slots = self.batch.slots
        taken = slots.taken_for(step.slots)
        self._denominator = step_denominator(taken, len(step.slots), self.config)
        if self.models.actor_critic:
            groups = slots.trainable(step.slots)
            num_value_tokens = sum(group.value_tokens.num_tokens for group in groups)
            self._num_value_tokens = max(1, num_value_tokens)

    # ---- training the step's rounds

    def _train_rounds(self, step: Step) -> None:
        """Trains the rounds of an earlier pass, else of one plan over all groups of the step.

        If groups of the step are missing, several plans follow each other.
        """
        rounds = self.batch.rounds
        if step.slots not in rounds and max(step.slots) < self.batch.slots.num_filled:
            rounds[step.slots] = self.batch.plan(step.slots)
        if step.slots in rounds:
            for round_ in rounds[step.slots]:
                self._train_round(round_)
        else:
            rounds[step.slots] = self._train_as_groups_arrive(step)

    def _train_as_groups_arrive(self, step: Step) -> list[Round]:
        """Trains each round of micro-batches once its groups have arrived.

        Returns the rounds, which later passes repeat.
        """
        planner = Planner(self._collectives.dp_size, self.batch.budget)
        for first in range(0, len(step.slots), self.batch.groups_at_once):
            slots = step.slots[first : first + self.batch.groups_at_once]
            self.batch.take(max(slots) + 1)  # waits until the groups of these slots have arrived
            for round_ in planner.add(self.batch.works(slots)):
                self._train_round(round_)
        for round_ in planner.finish():
            self._train_round(round_)
        return planner.rounds

    def _train_round(self, round_: Round) -> None:
        """Trains this rank's micro-batch of a round, unless the step has to begin anew."""
        try:
            with self._lent_cores.borrowed():
                if not self._ran_out_of_memory:
                    self._train_micro_batch(self.batch.own_groups(round_))
        except Exception as error:  # cuBLAS and cuDNN have no class of their own for memory
            if not self._may_halve or not is_out_of_memory(error):
                raise
            self._ran_out_of_memory = True  # the step begins anew once all ranks have ended it

    def _train_micro_batch(self, groups: Sequence[TrainingGroup]) -> None:
        batch = None if self.critic_only else self._pack(groups)
        report_progress(f"training a micro-batch of step {self._run_state.step + 1}")
        start = time.monotonic()
        if self.models.actor_critic:
            self.models.actor_critic.backward(groups, self._num_value_tokens)
        if batch is not None:
            self._check_proximal(batch)
            logprobs = self.models.policy.backward(batch, self._run_state.policy_version)
            self._remember(batch, logprobs)
        self._seconds["timing/backward_s"] += time.monotonic() - start

    def _pack(self, groups: Sequence[TrainingGroup]) -> MicroBatch:
        """Packs a micro-batch, with reference log-probs if this trainer computes them."""
        algorithm = self.config.algorithm
        batch = micro_batch(groups, self._denominator, algorithm, self.models.packing)
        if self.models.reference is None:
            if algorithm.beta > 0 and not batch.is_filler:
                assert batch.ref_logprobs is not None, "the sampler sent no reference log-probs"
            return batch
        start = time.monotonic()
        batch = self._with_reference(batch, self.models.reference)
        self._seconds["timing/reference_s"] += time.monotonic() - start
        return batch

    def _with_reference(
        self, batch: MicroBatch, reference: Reference | ShardedReference
    ) -> MicroBatch:
        """Returns the batch with reference log-probs, which only the first pass has to score.

        The groups of the batch keep these log-probs for later passes.
        """
        needs_scores = not batch.is_filler and batch.ref_logprobs is None
        scores_now = needs_scores
        if isinstance(reference, ShardedReference):
            # its forward gathers weights from all ranks, so all ranks score, or none
            scores_now = self._collectives.any_rank(needs_scores)
        if not scores_now:
            return batch
        report_progress("scoring a micro-batch with the reference model")
        ref_logprobs = reference.score(batch.row)
        if not needs_scores:
            return batch  # this rank only took part in the forward that other ranks needed
        for group, logprobs_of_group in split_by_group(batch.groups, ref_logprobs):
            group.ref_logprobs = logprobs_of_group
        return replace(batch, ref_logprobs=ref_logprobs)

    def _check_proximal(self, batch: MicroBatch) -> None:
        """Asserts that a micro-batch has the proximal log-probs that a correction needs.

        They are the policy's log-probs before the first update on the batch of rollouts. Without
        them the objective takes those of the present weights, which an update may have moved.
        """
        is_corrected = self.config.algorithm.vllm_importance_sampling_mode is not None
        weights_have_moved = self._run_state.policy_version != self.batch.first_version
        if is_corrected and weights_have_moved and not batch.is_filler:
            group_ids = [group.group_id for group in batch.groups]
            assert batch.proximal_logprobs is not None, f"log-probs of groups {group_ids} are lost"

    def _remember(self, batch: MicroBatch, logprobs: Tensor) -> None:
        """Stores the policy's log-probs of a micro-batch, [N], in its groups, for later passes.

        proximal_logprobs, from before the first update on the group, correct the mismatch of
        sampler and trainer. sampled_logprobs, under the weights that sampled, split the metrics of
        this mismatch into numerics and staleness (mismatch.py).
        """
        algorithm = self.config.algorithm
        if algorithm.vllm_importance_sampling_mode is not None:
            for group, logprobs_of_group in split_by_group(batch.groups, logprobs):
                if group.proximal_logprobs is None:
                    group.proximal_logprobs = logprobs_of_group
        if algorithm.num_iterations > 1:
            logprobs = logprobs.cpu()
            known_before = batch.sampled_logprobs
            if known_before is None:
                known_before = torch.full_like(logprobs, torch.nan)
            is_sampled_now = batch.policy_versions == self._run_state.policy_version
            sampled_logprobs = torch.where(is_sampled_now, logprobs, known_before)
            for group, logprobs_of_group in split_by_group(batch.groups, sampled_logprobs):
                group.sampled_logprobs = logprobs_of_group

    def _must_share_logprobs(self, step: Step) -> bool:
        """Returns whether all ranks must learn the log-probs that this step has computed.

        Later passes need them, and passes that shuffle may train a group on another rank. Sharing
        in the first of several passes is enough, because the reference's log-probs do not change
        within a batch, and those under the weights that sampled can be computed only before later
        updates. A step that trains only the critic computes none.
        """
        algorithm = self.config.algorithm
        is_first_of_several = step.iteration == 0 and algorithm.num_iterations > 1
        return algorithm.shuffle_mini_batches and is_first_of_several and not self.critic_only

    # ---- memory that runs out

    @property
    def _may_halve(self) -> bool:
        """Returns whether memory that runs out halves micro-batches.

        It does so once, and only where a step can begin anew.
        """
        max_tokens = self.config.trainer.max_tokens_per_micro_batch
        if max_tokens is None or self._budget.tokens != max_tokens:
            return False
        # No other rank may wait for this rank in its forward and backward.
        return self._collectives.ranks_per_row == 1 and self.models.policy.can_drop_gradients

    def _halve_micro_batches(self) -> None:
        """Drops the step's gradients, and divides the micro-batches of all passes.

        Every group keeps its rank, because no other rank knows the log-probs that are stored for
        it.
        """
        self.models.policy.drop_gradients()
        if self.models.actor_critic:
            self.models.actor_critic.critic.drop_gradients()
        devices.release_cache()
        max_tokens = self.config.trainer.max_tokens_per_micro_batch
        assert max_tokens is not None
        half = max_tokens // 2
        self._budget = replace(self._budget, tokens=half)
        self._ran_out_of_memory = False
        self.batch.budget = self._budget
        for slots, rounds in self.batch.rounds.items():
            works = self.batch.works(slots)
            self.batch.rounds[slots] = micro_batches.divided(rounds, works, half)
        if self._collectives.rank == 0:
            say(
                f"memory ran out with micro-batches of {max_tokens:,} tokens: the step begins "
                f"anew with {half:,}; to start so, set trainer.max_tokens_per_micro_batch={half}"
            )
