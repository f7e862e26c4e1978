"""The training loop: one batch of rollouts is a table of contents.

    commit(version, cursor) ─► samplers generate ─► take groups as they arrive ─► backward ─► step ─► publish ─┐
            ▲                                                                                                  │
            └──────────────────────────────────────────────────────────────────────────────────────────────────┘

With max_staleness 0 the trainer runs forward and backward on groups while the rest of the batch still decodes and
steps when the last one of a mini-batch is in; because sums are divided by the whole step's denominator, the result
equals waiting for all. Groups are taken in the order of their ids, so the result does not depend on their order of
arrival either.
"""

from __future__ import annotations

import collections
import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import Any

from common.config import Config
from common.errors import Interrupted, Retryable
from common.exits import interrupted
from common.failpoints import failpoint
from common.run_folder import CHECKPOINTS
from common.types import EvalResult, Tombstone
from common.watchdog import report_progress
from model.reference import Reference
from report.model_card import write_model_card
from trainer.batch_training import BatchTraining, Models
from trainer.data.mini_batches import Step, steps
from trainer.engine.actor_critic import ActorCritic
from trainer.engine.critic import Critic
from trainer.engine.deepspeed_model import StepResult
from trainer.engine.policy import Engine
from trainer.engine.ranks import Exchange
from trainer.group_receiver import GroupReceiver
from trainer.record import stats
from trainer.record.rank_zero import RankZero
from trainer.record.step_records import StepRecords, sampler_values
from trainer.record.throughput import num_devices
from trainer.save import checkpoint
from trainer.save.best import Best
from trainer.save.checkpoint import Progress
from trainer.save.disk import Disk, on_rank_0
from trainer.save.publisher import Publisher
from trainer.save.resume import with_fingerprints


class Trainer:
    def __init__(  # noqa: PLR0913 three models, and all around them
        self,
        config: Config,
        engine: Engine,
        exchange: Exchange,
        tokenizer: Any,
        progress: Progress,
        rank_zero: RankZero | None,
        reference: Reference | None = None,
        critic: Critic | None = None,
    ):
        self.config, self.engine, self.exchange, self.tokenizer = config, engine, exchange, tokenizer
        self.progress, self.rank_zero, self.critic = progress, rank_zero, critic
        self.actor_critic = ActorCritic(config, engine, critic, exchange) if critic else None
        self.models = Models(engine, reference, self.actor_critic)
        self.receiver = GroupReceiver(rank_zero, exchange)
        self.seconds: collections.Counter[str] = collections.Counter()  # metrics of the step that is recorded next
        self.records: StepRecords | None = None
        if rank_zero:
            self.records = StepRecords(config, rank_zero.log, rank_zero.display, tokenizer, progress.batch)
        self.disk = Disk(
            exchange, config.channel.stall_timeout_s, rank_zero.display.note if rank_zero else lambda _: None
        )
        self.best = Best(config, exchange, self.disk, lambda: rank_zero.log.evaluations() if rank_zero else [])
        self.publisher = Publisher(
            config, engine, exchange, self.disk, rank_zero.source if rank_zero else None, self.record_seconds
        )
        self._evaluated_version = progress.policy_version  # of the newest evaluation, or of the start
        self._saved_step = progress.step
        self._is_between_batches = True  # no step of a batch that has begun is in the weights
        self._num_eval_problems = 0

    def run(self) -> None:
        if self.rank_zero:
            hello = self.rank_zero.source.wait_for_sampler()
            self._num_eval_problems = hello.num_eval_problems
            self.progress = with_fingerprints(self.progress, hello, self.config.run.output_dir)
        self.publish(evaluate=self._evaluates_at_start())
        try:
            while self.progress.batch < self.config.num_batches and not self.best.stops_early:
                self.train_batch()
                self.finish_evaluation()
                self.stop_if_interrupted()
                if self.best.stops_early:
                    break
                self.publish(evaluate=self._evaluates_now())
                self.save_checkpoint()
            self.finish_evaluation()
            self.stop_if_interrupted()
        except Interrupted:
            self.save_on_interrupt()
            raise
        finally:
            self.publisher.close()
        folder, version = self.config.run.output_dir, self.progress.policy_version
        if not self.best.commit_as_final(partial(write_model_card, folder)):
            card = partial(write_model_card, folder, version=version)
            checkpoint.commit_final(self.engine, self.exchange, self.tokenizer, folder, self.disk, self.critic, card)

    def stop_if_interrupted(self) -> None:
        """Raises Interrupted on every rank if rank 0 was asked to end."""
        if self.exchange.agree(interrupted()):
            raise Interrupted

    def train_batch(self) -> None:
        """num_iterations passes over the next batch of rollouts, with an optimizer step on each of its mini-batches."""
        self.batch = BatchTraining(
            self.config, self.models, self.exchange, self.progress, self.receiver, self.record_seconds
        )
        for step in steps(self.config, self.progress.batch):
            started, waited_s = time.monotonic(), self.receiver.waited_s
            self.batch.backward(step, self.progress)
            result, sums = self.optimizer_step()
            self._advance(result, sums, step.is_last)
            self.record(step, result, sums, time.monotonic() - started, self.receiver.waited_s - waited_s)
            if self.config.weights.publish_every == "step" and not step.is_last:
                self.publish_inside(step)

    def record_seconds(self, name: str, seconds: float) -> None:
        """Adds to a metric of the step that is recorded next. Every rank may; rank 0's are recorded."""
        self.seconds[name] += seconds  # type: ignore[assignment]

    def optimizer_step(self) -> tuple[StepResult, dict[str, float]]:
        """With the sums of the whole step, over all ranks."""
        report_progress(f"making optimizer step {self.progress.step + 1}")
        start = time.monotonic()
        sums = self.exchange.add_named(self.engine.sums.take())
        result = self.actor_critic.step(self.batch.critic_only) if self.actor_critic else self.engine.step()
        failpoint("trainer.stepped")
        self.record_seconds("timing/step_s", time.monotonic() - start)
        return result, sums

    def _advance(self, result: StepResult, sums: dict[str, float], last: bool) -> None:
        """The version moves only with an applied step; the batch is spent with its last step either way."""
        p = self.progress
        self.progress = replace(
            p,
            step=p.step + 1,
            policy_version=p.policy_version + result.new_versions,
            skipped_steps=p.skipped_steps + (not result.applied),
            num_tokens=p.num_tokens + int(sums["tokens"]),
            batch=p.batch + last,
            cursor=p.cursor + last * self.batch.slots.num_taken,
            tombstones=p.tombstones + last * sum(isinstance(g, Tombstone) for g in self.batch.slots.groups),
            kl_beta=self.batch.next_beta() if last else p.kl_beta,
            skipped_in_a_row=0 if result.applied else p.skipped_in_a_row + 1,
            threshold=self.actor_critic.next_threshold() if self.actor_critic and last else p.threshold,
        )
        self._is_between_batches = last
        if self.progress.skipped_in_a_row >= self.config.trainer.max_skipped_steps:
            raise Retryable(
                f"{self.progress.skipped_in_a_row} steps in a row were not finite (loss {sums['loss']}, gradient norm "
                f"{result.grad_norm}) and were skipped; the weights are those of version {self.progress.policy_version}"
            )

    def record(self, step: Step, result: StepResult, sums: dict[str, float], seconds: float, waited_s: float) -> None:
        # on every rank: what is timed by events of a GPU is kept until it is taken
        taken, self.seconds = {"timing/head_s": self.engine.head_time.take()} | self.seconds, collections.Counter()
        if self.rank_zero is None or self.records is None:
            return
        p, reported = self.progress, self.rank_zero.source.take_statistics()
        more = {
            "num_tokens": p.num_tokens,
            "policy_version": p.policy_version,
            "skipped_steps": p.skipped_steps,
            "tombstones": p.tombstones,
            "step_time": seconds,
            "wait/trainer_s": waited_s,
            "disk_retries": float(self.publisher.disk_retries),
            "reference_on_trainer": float(self.models.reference is not None),
        }
        more |= self.actor_critic.metrics() if self.actor_critic else {}
        more |= sampler_values(reported.samplers)
        more |= {f"link/{name}": float(n) for name, n in reported.counters.items()} | taken
        devices = num_devices(self.config, self.exchange.world_size, reported.num_samplers)
        self.records.write(p.step, p.batch, self.batch.trained(step), result, sums, more, devices)

    def publish_inside(self, step: Step) -> None:
        """Fresher weights for the groups that the sampler runs ahead with; the cursor waits for the batch's end."""
        self.finish_evaluation()
        self.publish(evaluate=False)
        is_last_pass = step.iteration + 1 == self.config.algorithm.num_iterations
        if self.rank_zero and is_last_pass:
            self.rank_zero.source.mark_trained((step.mini_batch + 1) * self.config.trainer.prompts_per_step)

    def publish(self, evaluate: bool) -> None:
        """The present version, with an evaluation if one is due."""
        p, num_problems = self.progress, self._num_eval_problems
        if evaluate:
            self._evaluated_version = p.policy_version
        eval_id = f"v{p.policy_version}" if evaluate and num_problems else None
        self.publisher.publish(p.policy_version, p.run_id, len(self.tokenizer), p.cursor, eval_id, num_problems)

    def _evaluates_at_start(self) -> bool:
        """A checkpoint is saved while its version is still being evaluated: a resumed run may have to do it again."""
        version = self.progress.policy_version
        if self.progress.step == 0:
            return self.config.eval.before
        if self.rank_zero is None or self.rank_zero.log.has_eval(version):
            return False
        recorded = [record["step"] for record in self.rank_zero.log.evaluations()]
        return self._is_due(since=max(0, version - self.config.algorithm.steps_per_batch, *recorded))

    def _evaluates_now(self) -> bool:
        """Steps that the critic made alone, or that were skipped, leave the policy, and so its version, as it was."""
        return self._is_due(since=self._evaluated_version)

    def _is_due(self, since: int) -> bool:
        """Whether versions passed a multiple of eval.steps since that one; a batch may step over it."""
        every, version = self.config.eval.steps, self.progress.policy_version
        due = every is not None and version // every > since // every
        return due or (self.config.eval.after and self.progress.batch == self.config.num_batches)

    def finish_evaluation(self) -> None:
        """Waits for the evaluation of the published version, if there is one, before that version is replaced."""
        self.publisher.finish()
        start = time.monotonic()
        results: list[EvalResult] = []
        with contextlib.suppress(Interrupted):  # all ranks stop together a moment later, without this evaluation
            results = self.rank_zero.source.finish_eval() if self.rank_zero else []
        record = stats.eval_record(results, self.config.rewards.full_mark) if results else None
        # before it is recorded: what is recorded is not evaluated again after a crash
        self.best.update(record, self.publisher.published, self.engine, self.tokenizer)
        if self.rank_zero and record:
            self.rank_zero.log.log_eval(record)
            self.rank_zero.display.evaluation(record)
        self.record_seconds("timing/evaluation_s", time.monotonic() - start)

    def save_checkpoint(self) -> None:
        every = self.config.trainer.save_steps
        if every is not None and self._passed_multiple_of(every):
            self._save()

    def save_on_interrupt(self) -> None:
        """The state is that after the last whole batch; gradients of a batch that has begun are in no checkpoint.

        Once a step of a batch has moved the weights, cursor and weights agree again only at its end: nothing is saved.
        """
        if self.config.trainer.save_steps is None or self.progress.step == self._saved_step:
            return
        if self._is_between_batches:
            self._save()
        elif self.rank_zero:
            done = f"interrupted inside a batch of {self.config.algorithm.steps_per_batch} steps"
            self.rank_zero.display.note(f"{done}: the newest checkpoint stays that of step {self._saved_step}")

    def _save(self) -> None:
        report_progress(f"saving the checkpoint of step {self.progress.step}")
        start = time.monotonic()
        self.disk.persist("the run's history", self._sync_history)
        folder, keep = self.config.run.output_dir / CHECKPOINTS, self.config.trainer.save_limit
        checkpoint.save(self.engine, self.exchange, self.tokenizer, folder, self.progress, keep, self.disk, self.critic)
        self._saved_step = self.progress.step
        self.record_seconds("timing/checkpoint_s", time.monotonic() - start)

    def _sync_history(self) -> None:
        """A checkpoint must not outlive the records of the steps before it."""

        def sync() -> None:
            assert self.rank_zero is not None
            self.rank_zero.log.sync()
            if self.rank_zero.recorder:
                self.rank_zero.recorder.sync()

        on_rank_0(self.exchange, sync)

    def _passed_multiple_of(self, every: int) -> bool:
        """A batch may hold several steps: did one of them reach a multiple?"""
        return self.progress.step // every > (self.progress.step - self.config.algorithm.steps_per_batch) // every
