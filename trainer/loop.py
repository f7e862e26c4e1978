"""The training loop over batches of rollouts.

    commit(version, cursor) ─► samplers generate ─► take groups as they arrive ─► backward ─► step ─► publish ─┐
            ▲                                                                                                  │
            └──────────────────────────────────────────────────────────────────────────────────────────────────┘

With max_staleness 0 the trainer trains on groups while the rest of the batch still decodes (batch_training.py).
"""

import contextlib
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from common.config import Config
from common.errors import Interrupted, OutOfTime, Retryable
from common.failpoints import failpoint
from common.files.run_folder import FINAL
from common.processes.exits import interrupted, out_of_time
from common.processes.watchdog import report_progress
from common.types import EvalResult, Tombstone
from model.cores import lent_cores
from model.reference import Reference
from report.model_card import write_model_card
from trainer.batch_training import BatchTraining, Models
from trainer.data.mini_batches import Step, steps
from trainer.engine.actor_critic import ActorCritic
from trainer.engine.critic import Critic
from trainer.engine.deepspeed_model import StepResult
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Exchange, connect
from trainer.engine.sharded_reference import ShardedReference
from trainer.group_receiver import GroupReceiver
from trainer.link.source import GroupSource
from trainer.record import stats
from trainer.record.rank_zero import RankZero
from trainer.record.step_records import StepRecords, sampler_values
from trainer.record.throughput import num_devices
from trainer.save.best import Best
from trainer.save.checkpoint import Progress, save_models
from trainer.save.disk import write_folder
from trainer.save.moving_reference import MovingReference
from trainer.save.publisher import Publisher, writes_behind
from trainer.save.resume import base_fingerprint, with_fingerprints
from trainer.save.saver import Saver


class Trainer:
    """The trainer of a run on one rank. Every rank calls every method."""

    def __init__(  # noqa: PLR0913 three models, and all around them
        self,
        config: Config,
        engine: PolicyEngine,
        exchange: Exchange,
        tokenizer: Any,
        progress: Progress,
        rank_zero: RankZero | None,
        reference: Reference | ShardedReference | None = None,
        critic: Critic | None = None,
    ):
        self.config, self.engine, self.critic, self.exchange = config, engine, critic, exchange
        self.tokenizer, self.progress, self.rank_zero = tokenizer, progress, rank_zero
        source = rank_zero.source if rank_zero else None
        self._source = source or GroupSource()  # only rank 0 uses it
        say = rank_zero.display.note if rank_zero else lambda _: None
        sync = rank_zero.sync if rank_zero else lambda: None
        self.seconds = defaultdict[str, float](float)  # durations in the step that is recorded next, by metric name
        behind = connect(config) if writes_behind(config) else None
        self.publisher = Publisher(config, engine, exchange, behind, source, self.seconds)
        self.receiver = GroupReceiver(config, rank_zero, exchange)
        self.lent_cores = lent_cores(config, exchange, self.receiver.samplers_are_idle, self.publisher.is_writing)
        self.lent_cores.watch(engine, *([critic] if critic else []))
        self.actor_critic = ActorCritic(config, engine, critic, exchange) if critic else None
        models = Models(engine, reference, self.actor_critic)
        self.batch = BatchTraining(config, models, exchange, self.receiver, self.seconds, self.lent_cores)
        self.moving_reference = MovingReference(config, engine, exchange, tokenizer, reference)
        self.best = Best(config, exchange, say, lambda: rank_zero.log.evaluations() if rank_zero else [])
        self.saver = Saver(config, engine, critic, exchange, tokenizer, say, sync, self.seconds, progress.step)
        self.records = StepRecords(config, rank_zero, tokenizer) if rank_zero else None
        self._evaluated_version = progress.policy_version  # the version of the newest evaluation, or of the start
        self._is_between_batches = True  # the weights contain no step of a started batch
        self._num_eval_problems = 0

    def run(self) -> None:
        fingerprints = {"base_fingerprint": base_fingerprint(self.engine) if self.config.lora.r else ""}
        hello = self.exchange.run_on_rank_0(lambda: self._source.wait_for_sampler())
        if hello:
            self._num_eval_problems = hello.num_eval_problems
            fingerprints |= {"dataset_fingerprint": hello.dataset_fingerprint, "tokenizer_hash": hello.tokenizer_hash}
            self.progress = with_fingerprints(self.progress, fingerprints, self.config.run.output_dir)
        self.best.load_history()
        self.publish(evaluate=self._evaluates_at_start())
        try:
            while self.progress.batch < self.config.num_batches and not self.best.stops_early:
                self.train_batch()
                self.finish_evaluation()
                self.stop_if_interrupted()
                if self.best.stops_early:
                    break
                self.publish(evaluate=self._is_due(since=self._evaluated_version))
                self.saver.save_if_due(self.progress)
                if self.rank_zero and self.saver.saved_step == self.progress.step:
                    self._source.forget(self.progress.policy_version)
            self.finish_evaluation()
            self.stop_if_interrupted()
        except Interrupted:
            self.save_and_end()
        finally:
            self.publisher.close()
        folder, version = self.config.run.output_dir, self.progress.policy_version
        if not self.best.commit_as_final(partial(write_model_card, folder)):
            card = partial(write_model_card, folder, version=version)
            save = partial(save_models, self.engine, self.critic, self.exchange, self.tokenizer)
            write_folder(self.exchange, folder / FINAL, card, save)

    def stop_if_interrupted(self) -> None:
        """Raises Interrupted on every rank if one of them was asked to end."""
        if self.exchange.any_rank(interrupted()):
            raise Interrupted

    def save_and_end(self) -> NoReturn:
        """Saves a checkpoint if possible, then raises OutOfTime if all ranks end for that reason, else Interrupted."""
        is_over, hours = self.exchange.agree(out_of_time()), self.config.trainer.max_hours
        self.saver.save_before_the_end(self.progress, self._is_between_batches)
        if not is_over:
            raise Interrupted
        step = self.saver.saved_step
        rest = f"step {step} is saved, go on with run.resume=true" if step else "no step is saved"
        raise OutOfTime(f"trainer.max_hours {hours:g} is over: {rest}")

    def train_batch(self) -> None:
        """Trains num_iterations passes over the next batch, with an optimizer step on each of its mini-batches."""
        self.batch.prepare(self.progress)
        for step in steps(self.config, self.progress.batch):
            started, waited_s = time.monotonic(), self.receiver.waited_s
            self.batch.train(step, self.progress)
            result, sums = self.optimizer_step()
            self._advance(result, sums, step.is_last)
            self.record(step, result, sums, time.monotonic() - started, self.receiver.waited_s - waited_s)

    def optimizer_step(self) -> tuple[StepResult, dict[str, float]]:
        """Makes one optimizer step. Returns its result and the sums of the whole step over all ranks."""
        report_progress(f"making optimizer step {self.progress.step + 1}")
        start = time.monotonic()
        sums = self.exchange.sum_named(self.engine.sums.drain())
        with self.lent_cores.borrowed():
            result = self.actor_critic.step(self.batch.critic_only) if self.actor_critic else self.engine.step()
        failpoint("trainer.stepped")
        self.seconds["timing/step_s"] += time.monotonic() - start
        return result, sums

    def _advance(self, result: StepResult, sums: dict[str, float], last: bool) -> None:
        """Updates the progress: only an applied step raises the version; the last step ends the batch either way."""
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
            skipped_in_a_row=0 if result.applied else p.skipped_in_a_row + 1,
            threshold=self.actor_critic.next_threshold() if self.actor_critic and last else p.threshold,
        )
        self._is_between_batches = last
        if self.progress.skipped_in_a_row >= 3:
            raise Retryable(
                f"{self.progress.skipped_in_a_row} steps in a row were not finite (loss {sums['loss']}, gradient norm "
                f"{result.grad_norm}) and were skipped; the weights are those of version {self.progress.policy_version}"
            )

    def record(self, step: Step, result: StepResult, sums: dict[str, float], seconds: float, waited_s: float) -> None:
        durations = dict(self.seconds)
        self.seconds.clear()  # on every rank, because durations add up otherwise
        if self.rank_zero is None or self.records is None:
            return
        p, reported = self.progress, self.rank_zero.source.drain_statistics()
        more = {
            "num_tokens": p.num_tokens,
            "policy_version": p.policy_version,
            "skipped_steps": p.skipped_steps,
            "tombstones": p.tombstones,
            "step_time": seconds,
            "wait/trainer_s": waited_s,
            "reference_on_trainer": float(self.batch.models.reference is not None),
        }
        more |= self.actor_critic.metrics() if self.actor_critic else {}
        more |= sampler_values(reported.samplers)
        more |= {f"link/{name}": float(n) for name, n in reported.counters.items()} | durations
        devices = num_devices(self.config, self.exchange.world_size, reported.num_samplers)
        self.records.write(p.step, self.batch.trained(step), result, sums, more, devices)

    def publish(self, evaluate: bool) -> None:
        """Publishes the present version, with an evaluation if `evaluate` and the run has problems for one."""
        p, num_problems = self.progress, self._num_eval_problems
        if evaluate:
            self._evaluated_version = p.policy_version
        eval_id = f"v{p.policy_version}" if evaluate and num_problems else None
        with self.lent_cores.borrowed():
            self.publisher.publish(p.policy_version, p.run_id, len(self.tokenizer), p.cursor, eval_id, num_problems)
        if self.moving_reference.is_due(p.step):
            self.publisher.finish()
            self.moving_reference.follow(p.step, self.publisher.published)

    def _evaluates_at_start(self) -> bool:
        """Returns whether the run starts with an evaluation. A resumed run makes up for one that its checkpoint lacks.

        A checkpoint is saved while its version, or after an interrupt the one before, is still being evaluated. Only
        its own version can be evaluated again, because the weights of the other are gone."""
        if self.progress.step == 0:
            return self.config.eval.before
        recorded = [record["step"] for record in self.rank_zero.log.evaluations()] if self.rank_zero else []
        if self.rank_zero is None or self.progress.policy_version in recorded:
            return False
        return self._is_due(since=max([0, *recorded])) or (not recorded and self.config.eval.before)

    def _is_due(self, since: int) -> bool:
        """Returns whether versions passed a multiple of eval.steps since `since`, or whether this is the last batch.

        A batch may step over a multiple. Steps of the critic alone, and skipped ones, leave the version unchanged.
        """
        every, version = self.config.eval.steps, self.progress.policy_version
        is_last = self.progress.batch == self.config.num_batches
        return is_last or (every is not None and version // every > since // every)

    def finish_evaluation(self) -> None:
        """Waits for the evaluation of the published version, if there is one, before that version is replaced."""
        self.publisher.finish()
        start = time.monotonic()
        results: list[EvalResult] = []
        with contextlib.suppress(Interrupted):  # all ranks stop together a moment later, without this evaluation
            results = self.exchange.run_on_rank_0(lambda: self._source.finish_eval()) or []
        record = stats.eval_record(results, self.config.rewards.full_mark) if results else None
        # before the record is written: a recorded evaluation is not repeated after a crash
        self.best.update(record, self.publisher.published, self.engine, self.tokenizer)
        if self.rank_zero and record:
            self.rank_zero.log.log_eval(record)
            self.rank_zero.display.evaluation(record)
        self.seconds["timing/evaluation_s"] += time.monotonic() - start
