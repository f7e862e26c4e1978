"""Makes optimizer steps: takes a step's groups, plans, then packs, scores and trains micro-batches.

    take groups ─► plan rounds ─► pack ─► reference ─► forward and backward ─► optimizer step
    batch.py       micro_batches   tensors              policy, actor_critic

A round is one micro-batch on every rank. If all groups of a step have arrived when the step starts,
its rounds are planned over all groups, which balances the ranks best. Otherwise rounds are planned
over the groups that have arrived, in the order of their ids, so that the trainer works while the
samplers decode the rest. Every plan depends only on settings, lengths and rewards, so all ranks
compute the same plan without an exchange.
"""

import functools
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
    """Trains a batch of rollouts: `begin_batch`, then `backward` and `optimizer_step` per step.

    Every rank calls every method.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        collectives: Collectives,
        receiver: GroupReceiver,
        seconds: defaultdict[str, float],  # durations of a step's parts, by metric name
    ):
        self.config = config
        self.models = models
        self._collectives = collectives
        self._seconds = seconds
        self._new_batch = functools.partial(
            RolloutBatch, config, models, collectives, receiver, seconds
        )
        # Half as many tokens once memory has run out, for the rest of the run.
        self._budget = Budget(
            groups=config.trainer.groups_per_micro_batch,
            tokens=config.trainer.max_tokens_per_micro_batch,
        )
        self._ran_out_of_memory = False  # on this rank, in this step

    def begin_batch(self, run_state: RunState) -> None:
        """Begins the batch that follows `run_state`, without taking any of its groups yet."""
        self.batch = self._new_batch(run_state, self._budget)

    # ---- a step

    def backward(self, step: Step, run_state: RunState) -> None:
        """Runs forward and backward of a step, while its last groups may still be decoded."""
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
        """Makes one optimizer step with the gradients of `backward`.

        Returns its result, and sums over its trained tokens on all ranks (sums.TOKEN_SUMS).
        """
        report_progress(f"making optimizer step {self._run_state.step + 1}")
        start = time.monotonic()
        sums = self._collectives.sum_named(self.models.policy.sums.drain())
        if self.models.actor_critic:
            result = self.models.actor_critic.step(self.critic_only)
        else:
            result = self.models.policy.step()
        failpoint("trainer.stepped")
        self._seconds["timing/step_s"] += time.monotonic() - start
        return result, sums

    @property
    def critic_only(self) -> bool:
        """Returns whether the step trains only the critic, because of critic_warmup_steps."""
        return self._run_state.step < self.config.critic.critic_warmup_steps

    def trained(self, step: Step) -> TrainedStep:
        """Returns the groups, metrics and warnings of a step, for its records."""
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
            return max(step.slots) + 1  # slots are filled in order: the step's last slot comes last
        return 0

    def _set_denominators(self, step: Step) -> None:
        """Sets the denominators by which the step's losses of policy and critic are divided.

        They are known by now: `waits_for` awaits every group on which a denominator depends.
        """
        slots = self.batch.slots
        taken = slots.taken_for(step.slots)
        self._denominator = step_denominator(taken, len(step.slots), self.config)
        if self.models.actor_critic:
            groups = slots.trainable(step.slots)
            num_value_tokens = sum(group.value_tokens.num_tokens for group in groups)
            self._num_value_tokens = max(1, num_value_tokens)  # it is a divisor

    # ---- training the step's rounds

    def _train_rounds(self, step: Step) -> None:
        """Trains the step's groups in rounds, which later passes over the same groups repeat.

        The rounds are planned over all groups if all have arrived, else as groups arrive.
        """
        rounds = self.batch.rounds.get(step.slots)  # None unless an earlier pass has planned them
        have_all_arrived = max(step.slots) < self.batch.slots.num_filled
        if rounds is None and have_all_arrived:
            rounds = self.batch.plan(step.slots)
            self.batch.rounds[step.slots] = rounds
        if rounds is None:
            self.batch.rounds[step.slots] = self._train_as_groups_arrive(step)
            return
        for round_ in rounds:
            self._train_round(round_)

    def _train_as_groups_arrive(self, step: Step) -> list[Round]:
        """Trains each round of micro-batches once its groups have arrived. Returns all rounds."""
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
        """Trains this rank's micro-batch of a round, unless this step has run out of memory."""
        if self._ran_out_of_memory:
            return
        try:
            self._train_micro_batch(self.batch.own_groups(round_))
        except Exception as error:  # cuBLAS and cuDNN raise plain RuntimeErrors when out of memory
            can_restart = self._may_halve and is_out_of_memory(error)
            if not can_restart:
                raise
            self._ran_out_of_memory = True  # `backward` restarts the step on all ranks

    def _train_micro_batch(self, groups: Sequence[TrainingGroup]) -> None:
        batch = None
        if not self.critic_only:
            batch = self._pack(groups)
        report_progress(f"training a micro-batch of step {self._run_state.step + 1}")
        start = time.monotonic()
        if self.models.actor_critic:
            self.models.actor_critic.backward(groups, self._num_value_tokens)
        if batch is not None:
            self._check_proximal(batch)
            logprobs = self.models.policy.backward(batch, self._run_state.policy_version)
            self._store_logprobs(batch, logprobs)
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
        """Returns the micro-batch with reference log-probs, and scores them in the first pass.

        They are stored in the groups, so that later passes need not score them again.
        """
        needs_scores = batch.ref_logprobs is None and not batch.is_filler
        must_run = needs_scores
        if isinstance(reference, ShardedReference):
            # Its forward gathers weights from all ranks, so either all ranks run it, or no rank.
            must_run = self._collectives.any_rank(needs_scores)
        if not must_run:
            return batch
        report_progress("scoring a micro-batch with the reference model")
        ref_logprobs = reference.score(batch.row)
        if not needs_scores:
            return batch  # this rank ran the forward only because other ranks needed theirs
        for group, logprobs_of_group in split_by_group(batch.groups, ref_logprobs):
            group.ref_logprobs = logprobs_of_group
        return replace(batch, ref_logprobs=ref_logprobs)

    def _check_proximal(self, batch: MicroBatch) -> None:
        """Asserts that a micro-batch has the proximal log-probs, if a correction needs them.

        Proximal log-probs are the policy's before the first update on the batch of rollouts. The
        importance-sampling correction of sampler and trainer needs them. If they were missing, the
        objective would use the log-probs of the current weights, which an update may have changed.
        """
        is_corrected = self.config.algorithm.vllm_importance_sampling_mode is not None
        weights_have_moved = self._run_state.policy_version != self.batch.first_version
        if is_corrected and weights_have_moved and not batch.is_filler:
            group_ids = [group.group_id for group in batch.groups]
            assert batch.proximal_logprobs is not None, f"log-probs of groups {group_ids} are lost"

    def _store_logprobs(self, batch: MicroBatch, logprobs: Tensor) -> None:
        """Stores the policy's log-probs [N] of a micro-batch in its groups, for later passes.

        proximal_logprobs are those before the first update on the group. They correct for the
        mismatch of sampler and trainer. own_logprobs are the trainer's log-probs of each token
        under the version that sampled the token, and NaN where they are unknown. With them, the
        mismatch metrics can be split into numerics and staleness (mismatch.py).
        """
        algorithm = self.config.algorithm
        if algorithm.vllm_importance_sampling_mode is not None:
            for group, logprobs_of_group in split_by_group(batch.groups, logprobs):
                if group.proximal_logprobs is None:
                    group.proximal_logprobs = logprobs_of_group
        if algorithm.num_iterations > 1:
            logprobs = logprobs.cpu()
            known_before = batch.own_logprobs
            if known_before is None:
                known_before = torch.full_like(logprobs, torch.nan)
            was_sampled_by_current = batch.policy_versions == self._run_state.policy_version
            own_logprobs = torch.where(was_sampled_by_current, logprobs, known_before)
            for group, logprobs_of_group in split_by_group(batch.groups, own_logprobs):
                group.own_logprobs = logprobs_of_group

    def _must_share_logprobs(self, step: Step) -> bool:
        """Returns whether the log-probs that this step has computed must be copied to all ranks.

        Later passes need them, and a pass that shuffles may train a group on a different rank. Only
        the first of several passes computes them: later weights have sampled nothing, and the
        reference's log-probs do not change. A step that trains only the critic computes none.
        """
        algorithm = self.config.algorithm
        is_first_of_several = step.iteration == 0 and algorithm.num_iterations > 1
        return algorithm.shuffle_mini_batches and is_first_of_several and not self.critic_only

    # ---- recovery when memory runs out

    @property
    def _may_halve(self) -> bool:
        """Returns whether to halve micro-batches and restart the step when memory runs out.

        This is done at most once in a run. It needs a limit in tokens, and droppable gradients.
        """
        max_tokens = self.config.trainer.max_tokens_per_micro_batch
        was_halved = self._budget.tokens != max_tokens
        if max_tokens is None or was_halved:
            return False
        # Ranks that share a row would wait for this rank inside their forward and backward.
        return self._collectives.ranks_per_row == 1 and self.models.policy.can_drop_gradients

    def _halve_micro_batches(self) -> None:
        """Drops the step's gradients, and halves the token budget for the rest of the run."""
        self.models.policy.drop_gradients()
        if self.models.actor_critic:
            self.models.actor_critic.critic.drop_gradients()
        devices.release_cache()
        max_tokens = self.config.trainer.max_tokens_per_micro_batch
        assert max_tokens is not None
        half = max_tokens // 2
        self._budget = replace(self._budget, tokens=half)
        self.batch.divide_rounds(self._budget)
        self._ran_out_of_memory = False
        if self._collectives.rank == 0:
            say(
                f"memory ran out with micro-batches of {max_tokens:,} tokens: the step is repeated "
                f"with {half:,}, which later steps keep; to use this limit from the start, set "
                f"trainer.max_tokens_per_micro_batch={half}"
            )
