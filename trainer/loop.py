"""Runs the training loop over batches of rollouts.

    publish weights ─► samplers generate ─► take groups ─► backward ─► optimizer step ─┐
          ▲                                                                            │
          └────────────────────────────────────────────────────────────────────────────┘

With max_staleness 0 the trainer already trains on the groups that have arrived while the samplers
still decode the rest of the batch (step.py).
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NoReturn

from common.config import Config
from common.errors import Interrupted, OutOfTime
from common.processes.exits import interrupted, out_of_time
from common.types import EvalResult
from model.reference import Reference
from trainer.data.mini_batches import Step, steps
from trainer.engine.actor_critic import ActorCritic
from trainer.engine.critic import Critic
from trainer.engine.models import Models
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Collectives, connect
from trainer.engine.sharded_reference import ShardedReference
from trainer.engine.step_result import StepResult
from trainer.evaluation_schedule import EvaluationSchedule
from trainer.group_receiver import GroupReceiver
from trainer.link.source import GroupSource
from trainer.record.eval_record import eval_record
from trainer.record.rank_zero import RankZero
from trainer.record.step_records import StepRecords, link_metrics
from trainer.record.throughput import num_devices
from trainer.run_state import after_batch, after_step, raise_if_diverged, state_metrics
from trainer.save.best import Best
from trainer.save.checkpoint import RunState
from trainer.save.final_model import write_final_model
from trainer.save.moving_reference import MovingReference
from trainer.save.publisher import Publisher, writes_behind
from trainer.save.resume import base_fingerprint, with_fingerprints
from trainer.save.saver import Saver
from trainer.step import StepTrainer


class Trainer:
    """The trainer of a run on one rank. Every rank calls every method."""

    def __init__(  # noqa: PLR0913 three models, and everything that is built around them
        self,
        config: Config,
        engine: PolicyEngine,
        collectives: Collectives,
        tokenizer: Any,
        run_state: RunState,
        rank_zero: RankZero | None,
        reference: Reference | ShardedReference | None = None,
        critic: Critic | None = None,
    ):
        self.config = config
        self.engine = engine
        self.critic = critic
        self.collectives = collectives
        self.tokenizer = tokenizer
        self.run_state = run_state
        self.rank_zero = rank_zero
        source = rank_zero.source if rank_zero else None
        self._source = source or GroupSource()  # never called on other ranks than 0
        # Durations within the step that is recorded next, by metric name.
        self.seconds = defaultdict[str, float](float)
        # A thread that publishes needs a process group that no other thread uses.
        publishing_collectives = connect(config) if writes_behind(config) else None
        self.publisher = Publisher(
            config, engine, collectives, publishing_collectives, source, self.seconds
        )
        self.receiver = GroupReceiver(rank_zero, collectives)
        self.actor_critic = None
        if critic is not None:
            self.actor_critic = ActorCritic(config, engine, critic, collectives)
        self.step_trainer = StepTrainer(
            config,
            Models(engine, reference, self.actor_critic),
            collectives,
            self.receiver,
            self.seconds,
        )
        self.moving_reference = MovingReference(config, engine, collectives, tokenizer, reference)
        self.best = Best(config, collectives, self._say, self._evaluations)
        self.saver = Saver(
            config,
            engine,
            critic,
            collectives,
            tokenizer,
            self._say,
            self._sync_records,
            self.seconds,
            run_state.step,
        )
        self.records = StepRecords(config, rank_zero, tokenizer) if rank_zero else None
        self.schedule = EvaluationSchedule(config, run_state.policy_version)
        self._is_between_batches = True  # False after some, but not all, steps of a batch
        self._num_eval_problems = 0  # held-out problems of the samplers, on rank 0

    # ---- the run

    def run(self) -> None:
        """Trains until the last batch, or until the evaluation has stopped improving."""
        self._meet_samplers()
        self.best.load_history()
        self.publish(evaluate=self._starts_with_evaluation())
        try:
            while self.run_state.batch < self.config.num_batches and not self.best.stops_early:
                self.train_batch()
                self.finish_evaluation()
                self.stop_if_interrupted()
                if self.best.stops_early:
                    break  # nothing is trained any more, so no new version is published
                self.publish(evaluate=self.schedule.is_due(self.run_state))
                self._save_if_due()
            self.finish_evaluation()
            self.stop_if_interrupted()
        except Interrupted:
            self.save_and_end()
        finally:
            self.publisher.close()
        write_final_model(
            self.config,
            self.best,
            self.engine,
            self.critic,
            self.collectives,
            self.tokenizer,
            self.run_state.policy_version,
        )

    def _meet_samplers(self) -> None:
        """Waits for the first sampler, and checks its data and tokenizer against the checkpoint's.

        Raises UserError if any of them, or the base model under adapters, has changed.
        """
        fingerprints = {"base_fingerprint": ""}
        if self.config.lora.r:
            fingerprints["base_fingerprint"] = base_fingerprint(self.engine)
        hello = self.collectives.run_on_rank_0(self._source.wait_for_sampler)
        if hello is None:  # this is not rank 0
            return
        self._num_eval_problems = hello.num_eval_problems
        fingerprints["dataset_fingerprint"] = hello.dataset_fingerprint
        fingerprints["tokenizer_hash"] = hello.tokenizer_hash
        output_dir = self.config.run.output_dir
        self.run_state = with_fingerprints(self.run_state, fingerprints, output_dir)

    def stop_if_interrupted(self) -> None:
        """Raises Interrupted on every rank if any rank was asked to end."""
        if self.collectives.any_rank(interrupted()):
            raise Interrupted

    def save_and_end(self) -> NoReturn:
        """Saves a checkpoint if possible. Raises OutOfTime (trainer.max_hours) or Interrupted."""
        is_out_of_time = self.collectives.agree(out_of_time())
        self.saver.save_before_the_end(self.run_state, self._is_between_batches)
        if not is_out_of_time:
            raise Interrupted
        advice = "no checkpoint was saved"
        if self.saver.saved_step:
            advice = f"step {self.saver.saved_step} is saved, go on with run.resume=true"
        raise OutOfTime(f"trainer.max_hours {self.config.trainer.max_hours:g} is over: {advice}")

    def _save_if_due(self) -> None:
        """Saves a checkpoint if one is due, and drops received groups that no resume can need."""
        self.saver.save_if_due(self.run_state)
        if self.rank_zero and self.saver.saved_step == self.run_state.step:
            self._source.forget(self.run_state.policy_version)

    # ---- a batch

    def train_batch(self) -> None:
        """Trains num_iterations passes over the next batch, with one step per mini-batch."""
        self.step_trainer.begin_batch(self.run_state)
        for step in steps(self.config, self.run_state.batch):
            start = time.monotonic()
            waited_s_before = self.receiver.waited_s
            self.step_trainer.backward(step, self.run_state)
            result, sums = self.step_trainer.optimizer_step()
            self._advance(result, sums, step.is_last)
            duration_s = time.monotonic() - start
            waited_s = self.receiver.waited_s - waited_s_before
            self.record(step, result, sums, duration_s, waited_s)

    def _advance(self, result: StepResult, sums: Mapping[str, float], is_last: bool) -> None:
        """Updates the run state after a step. is_last: whether it is the last step on its batch."""
        self.run_state = after_step(self.run_state, result, int(sums["tokens"]))
        if is_last:
            threshold = self.run_state.threshold
            if self.actor_critic:
                threshold = self.actor_critic.next_threshold()
            taken = self.step_trainer.batch.slots.taken
            self.run_state = after_batch(self.run_state, taken, threshold)
        self._is_between_batches = is_last
        raise_if_diverged(self.run_state, sums["loss"], result.grad_norm)

    def record(
        self,
        step: Step,
        result: StepResult,
        sums: Mapping[str, float],
        duration_s: float,
        waited_s: float,
    ) -> None:
        """Records a step's metrics and samples on rank 0.

        sums: sums over the step's trained tokens on all ranks, keyed as sums.TOKEN_SUMS lists them.
        duration_s: seconds that the step took. waited_s: its seconds of waiting for groups.
        """
        durations = dict(self.seconds)
        self.seconds.clear()  # on every rank, so that the next step's durations start from zero
        if self.rank_zero is None or self.records is None:
            return
        statistics = self.rank_zero.source.drain_statistics()
        metrics = state_metrics(self.run_state)
        metrics["step_time"] = duration_s
        metrics["wait/trainer_s"] = waited_s
        metrics["reference_on_trainer"] = float(self.step_trainer.models.reference is not None)
        if self.actor_critic:
            metrics |= self.actor_critic.metrics()
        metrics |= link_metrics(statistics)
        metrics |= durations
        devices = num_devices(self.config, self.collectives.world_size, statistics.num_samplers)
        trained = self.step_trainer.trained(step)
        self.records.write(self.run_state.step, trained, result, sums, metrics, devices)

    # ---- publishing and evaluation

    def publish(self, evaluate: bool) -> None:
        """Publishes the current policy version to the samplers.

        evaluate: whether the samplers also evaluate it, if they have held-out problems.
        """
        version = self.run_state.policy_version
        eval_id = None
        if evaluate:
            self.schedule.note_evaluation(version)
            if self._num_eval_problems:
                eval_id = f"v{version}"
        self.publisher.publish(
            version,
            self.run_state.run_id,
            len(self.tokenizer),
            self.run_state.cursor,
            eval_id,
            self._num_eval_problems,
        )
        if self.moving_reference.is_due(self.run_state.step):
            self.publisher.finish()
            self.moving_reference.follow(self.run_state.step, self.publisher.published)

    def _starts_with_evaluation(self) -> bool:
        """Returns whether the first published version is to be evaluated.

        Only rank 0's answer counts, because only rank 0 requests evaluations from the samplers. In
        a resumed run the answer depends on the recorded evaluations, which only rank 0 can read, so
        the other ranks return False there.
        """
        if self.rank_zero is None:
            return self.run_state.step == 0 and self.config.eval.before
        recorded_versions = [record["step"] for record in self._evaluations()]
        return self.schedule.is_due_at_start(self.run_state, recorded_versions)

    def finish_evaluation(self) -> None:
        """Waits for the published version's evaluation, which needs its weights, and records it."""
        self.publisher.finish()
        start = time.monotonic()
        results: list[EvalResult] = []
        # After an interrupt `stop_if_interrupted`, which is called next, ends all ranks together.
        with contextlib.suppress(Interrupted):
            results = self.collectives.run_on_rank_0(self._source.finish_eval) or []
        record = None
        if results:
            record = eval_record(results, self.config.rewards.full_mark)
        # The best policy is kept before the evaluation is recorded: if the trainer crashes between
        # the two, the evaluation is repeated after a resume, and the policy is kept then.
        self.best.update(record, self.publisher.published, self.engine, self.tokenizer)
        if self.rank_zero and record:
            self.rank_zero.log.log_eval(record)
            self.rank_zero.display.evaluation(record)
        self.seconds["timing/evaluation_s"] += time.monotonic() - start

    # ---- the records of rank 0

    def _say(self, text: str) -> None:
        """Shows a note to the user, on rank 0."""
        if self.rank_zero:
            self.rank_zero.display.note(text)

    def _sync_records(self) -> None:
        if self.rank_zero:
            self.rank_zero.sync()

    def _evaluations(self) -> list[dict[str, Any]]:
        """Returns the recorded evaluations on rank 0, and an empty list on the other ranks."""
        if self.rank_zero is None:
            return []
        return self.rank_zero.log.evaluations()
