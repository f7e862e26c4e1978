"""The training loop: one optimizer step is a table of contents.

    commit(version, cursor) ─► samplers generate ─► take groups as they arrive ─► backward ─► step ─► publish ─┐
            ▲                                                                                                  │
            └──────────────────────────────────────────────────────────────────────────────────────────────────┘

With max_staleness 0 the trainer runs forward and backward on groups while the rest of the batch still decodes and
steps when the last one is in; because sums are divided by the whole step's denominator, the result equals waiting
for all. Groups are taken in the order of their ids, so the result does not depend on their order of arrival either.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from common import weights
from common.config import Config
from common.durable import failpoint
from common.exits import Interrupted, Retryable, code_of, interrupted
from common.metrics import MetricsLog
from common.panel import StepDisplay
from common.types import EvalResult, Group, Tombstone
from common.watchdog import moved
from trainer import checkpoint, stats
from trainer.advantages import step_advantages
from trainer.batch import micro_batch, needs_whole_batch, num_tokens
from trainer.best import Best
from trainer.checkpoint import Progress
from trainer.disk import Disk, on_rank_0
from trainer.engine import Engine, StepResult, Sums
from trainer.exchange import STOP_TOGETHER, Exchange
from trainer.inbox import Inbox
from trainer.losses import Denominator
from trainer.publish import publish
from trainer.recording import Recorder, Replay
from trainer.throughput import Throughput, num_devices

Items = list[Group | Tombstone]


@dataclass(frozen=True)
class Desk:
    """What only rank 0 has: the link to the samplers and the run's records."""

    inbox: Inbox | Replay
    recorder: Recorder | None
    log: MetricsLog
    display: StepDisplay


class Trainer:
    def __init__(
        self, config: Config, engine: Engine, exchange: Exchange, tokenizer: Any, progress: Progress, desk: Desk | None
    ):
        self.config, self.engine, self.exchange, self.tokenizer = config, engine, exchange, tokenizer
        self.progress, self.desk = progress, desk
        self.weights_dir = weights.default_dir(config)
        self.incarnation = exchange.text(desk.inbox.envelope.incarnation if desk else None)
        self.disk = Disk(exchange, config.channel.stall_timeout_s, desk.display.note if desk else lambda _: None)
        self.best = Best(config, exchange, self.disk, lambda: desk.log.evaluations() if desk else [])
        self.published_version = -1
        self._saved_step = progress.step
        self._num_eval_problems = 0
        self._skipped_in_a_row = 0
        self._timing: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self.throughput = Throughput(num_devices(config, exchange.world_size), progress.batch, time.monotonic())

    def run(self) -> None:
        if self.desk:
            self._num_eval_problems = self.desk.inbox.wait_for_sampler().num_eval_problems
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
        if not self.best.commit_as_final():
            checkpoint.commit_final(self.engine, self.exchange, self.tokenizer, self.config.run.output_dir, self.disk)

    def stop_if_interrupted(self) -> None:
        """Raises Interrupted on every rank if rank 0 was asked to end."""
        if self.exchange.agree(interrupted()):
            raise Interrupted

    def train_batch(self) -> None:
        """num_iterations optimizer steps on the next prompts_per_step groups."""
        groups: Items = []
        self._own_logprobs: dict[int, Any] = {}  # tensors of this rank's micro-batches in the first iteration
        for iteration in range(self.config.algorithm.num_iterations):
            started = time.monotonic()
            if iteration == 0:
                self._taken_s = 0.0
                groups = self.backward_as_groups_arrive()
            else:
                self.backward_again(groups)
            result, sums = self.optimizer_step()
            self._advance(groups, result, sums, last=iteration == self.config.algorithm.num_iterations - 1)
            self.record(groups, result, sums, seconds=time.monotonic() - started)

    def backward_as_groups_arrive(self) -> Items:
        """Takes the batch in order, chunk by chunk, with forward and backward on each. Returns all of it."""
        groups: Items = []
        first = self.progress.cursor
        waits = needs_whole_batch(self.config.algorithm)
        for chunk in self._chunks(range(first, first + self.config.trainer.prompts_per_step)):
            groups += self.receive(chunk)
            failpoint("trainer.micro_batch")
            if not waits:
                self._backward(groups[-len(chunk) :], groups)
        if waits:
            self.backward_again(groups)
        return groups

    def backward_again(self, groups: Items) -> None:
        for chunk in self._chunks(range(len(groups))):
            self._backward([groups[i] for i in chunk], groups)

    def receive(self, group_ids: Sequence[int]) -> Items:
        """The groups with these ids, on every rank."""
        start = time.monotonic()
        try:
            taken = self.desk.inbox.take(group_ids) if self.desk else None
            if self.desk and self.desk.recorder:
                self.desk.recorder.append(taken or [])
        except BaseException as error:
            # the other ranks wait in `share`: they must not wait for a process group's timeout
            self.exchange.announce_end(STOP_TOGETHER if isinstance(error, Interrupted) else code_of(error))
            raise
        self._taken_s += time.monotonic() - start
        return self.exchange.share(taken)

    def _chunks(self, ids: range) -> list[range]:
        """One micro-batch of all ranks each."""
        size = self.config.trainer.groups_per_micro_batch * self.exchange.world_size
        return [ids[i : i + size] for i in range(0, len(ids), size)]

    def _denominator(self, groups: Items) -> Denominator:
        """B counts every completion the step was planned with: a tombstone's are there, with weight zero."""
        sampler = self.config.sampler
        return Denominator(
            loss_type=self.config.algorithm.loss_type,
            num_completions=self.config.trainer.prompts_per_step * sampler.num_generations,
            num_tokens=max(1, num_tokens(groups, self.config.algorithm)),
            max_completion_length=sampler.max_completion_length,
        )

    def _backward(self, chunk: Items, groups: Items) -> None:
        """This rank's share of one chunk of the groups taken so far: whole groups, in order."""
        moved(f"training a micro-batch of step {self.progress.step + 1}")
        start = time.monotonic()
        size, rank = self.config.trainer.groups_per_micro_batch, self.exchange.rank
        algorithm = self.config.algorithm
        mine = chunk[rank * size : (rank + 1) * size]
        advantages = step_advantages(groups if needs_whole_batch(algorithm) else mine, self.config)
        batch = micro_batch(mine, advantages, self._denominator(groups), algorithm, self.config.trainer.packing)
        first = chunk[0].group_id
        logprobs = self.engine.backward(batch, self._own_logprobs.get(first))
        if algorithm.vllm_importance_sampling_mode is not None:
            self._own_logprobs.setdefault(first, logprobs)
        self._time("timing/backward_s", start)

    def optimizer_step(self) -> tuple[StepResult, Sums]:
        moved(f"making optimizer step {self.progress.step + 1}")
        start = time.monotonic()
        mine = self.engine.take_sums()
        names = [f.name for f in fields(Sums)]
        sums = Sums(**dict(zip(names, self.exchange.add([getattr(mine, n) for n in names]), strict=True)))
        result = self.engine.step()
        failpoint("trainer.stepped")
        self._time("timing/step_s", start)
        return result, sums

    def _advance(self, groups: Items, result: StepResult, sums: Sums, last: bool) -> None:
        """The version moves only with an applied step; the batch is spent either way."""
        p = self.progress
        self.progress = replace(
            p,
            step=p.step + 1,
            policy_version=p.policy_version + result.applied,
            num_tokens=p.num_tokens + int(sums.tokens),
            batch=p.batch + last,
            cursor=p.cursor + last * len(groups),
            tombstones=p.tombstones + last * sum(isinstance(g, Tombstone) for g in groups),
        )
        self._skipped_in_a_row = 0 if result.applied else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= self.config.trainer.max_skipped_steps:
            raise Retryable(
                f"{self._skipped_in_a_row} steps in a row were not finite (loss {sums.loss}, gradient norm "
                f"{result.grad_norm}) and were skipped; the weights are those of version {self.progress.policy_version}"
            )

    def publish(self, evaluate: bool) -> None:
        """Hands version and cursor to the samplers in one message, with an evaluation if one is due."""
        start = time.monotonic()
        version = self.progress.policy_version
        moved(f"publishing version {version}")
        if version != self.published_version:
            self._published = self.disk.persist(
                f"publishing version {version}",
                lambda: publish(
                    self.engine,
                    self.exchange,
                    self.weights_dir,
                    self.progress.run_id,
                    self.incarnation,
                    version,
                    len(self.tokenizer),
                ),
                weights.temporary_dir(self.weights_dir, version, self.incarnation),
            )
            self.published_version = version
        self._time("sync/publish_s", start)
        if self.desk is None:
            return
        inbox = self.desk.inbox
        eval_id = f"v{version}" if evaluate and self._num_eval_problems else None
        inbox.commit(self.progress.cursor, self._published, eval_id, self._num_eval_problems)
        weights.prune(self.weights_dir, inbox.versions_in_use(), self.config.weights.keep)

    def _evaluates_at_start(self) -> bool:
        """A checkpoint is saved while its version is still being evaluated: a resumed run may have to do it again."""
        if self.progress.step == 0:
            return self.config.eval.before
        return self._evaluates_now() and not (self.desk and self.desk.log.has_eval(self.progress.policy_version))

    def _evaluates_now(self) -> bool:
        every = self.config.eval.steps
        due = every is not None and self.progress.policy_version % every == 0
        return due or (self.config.eval.after and self.progress.batch == self.config.num_batches)

    def finish_evaluation(self) -> None:
        """Waits for the evaluation of the published version, if there is one, before that version is replaced."""
        start = time.monotonic()
        results: list[EvalResult] = []
        with contextlib.suppress(Interrupted):  # all ranks stop together a moment later, without this evaluation
            results = self.desk.inbox.finish_eval() if self.desk else []
        record = stats.eval_record(results, self.config.rewards.full_mark) if results else None
        # before it is recorded: what is recorded is not evaluated again after a crash
        self.best.judge(record, self._published, self.engine, self.tokenizer)
        if self.desk and record:
            self.desk.log.log_eval(record)
            self.desk.display.evaluation(record)
        self._time("timing/evaluation_s", start)

    def save_checkpoint(self) -> None:
        every = self.config.trainer.save_steps
        if every is not None and self._passed_multiple_of(every):
            self._save()

    def save_on_interrupt(self) -> None:
        """The state is that after the last whole batch; gradients of a batch that has begun are in no checkpoint."""
        if self.config.trainer.save_steps is not None and self.progress.step > self._saved_step:
            self._save()

    def _save(self) -> None:
        moved(f"saving the checkpoint of step {self.progress.step}")
        start = time.monotonic()
        self.disk.persist("the run's history", self._sync_history)
        folder, keep = Path(self.config.run.output_dir) / "checkpoints", self.config.trainer.save_limit
        checkpoint.save(self.engine, self.exchange, self.tokenizer, folder, self.progress, keep, self.disk)
        self._saved_step = self.progress.step
        self._time("timing/checkpoint_s", start)

    def _sync_history(self) -> None:
        """A checkpoint must not outlive the records of the steps before it."""

        def sync() -> None:
            assert self.desk is not None
            self.desk.log.sync()
            if self.desk.recorder:
                self.desk.recorder.sync()

        on_rank_0(self.exchange, sync)

    def _passed_multiple_of(self, every: int) -> bool:
        """A batch may hold several steps: did one of them reach a multiple?"""
        return self.progress.step // every > (self.progress.step - self.config.algorithm.num_iterations) // every

    def record(self, groups: Items, result: StepResult, sums: Sums, seconds: float) -> None:
        if self.desk is None:
            return
        version = self.progress.policy_version - result.applied
        sampler_stats, counters = self.desk.inbox.snapshot()
        rollout = stats.rollout_metrics(groups, version, self.config.rewards.full_mark)
        values = rollout | stats.token_metrics(sums, self.config.algorithm.beta)
        values |= stats.shaping_metrics(groups, self.config) | stats.correction_metrics(sums, self.config.algorithm)
        values |= {
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "step_time": seconds,
            "num_tokens": self.progress.num_tokens,
            "policy_version": self.progress.policy_version,
            "skipped_steps": self.progress.step - self.progress.policy_version,
            "tokens_per_second": rollout.get("completion_tokens", 0.0) / seconds,
            "wait/trainer_s": self._taken_s,
            "tombstones": self.progress.tombstones,
            "disk_retries": self.disk.retries,
        }
        values |= self._sampler_values(sampler_stats) | {f"link/{name}": float(n) for name, n in counters.items()}
        values |= self._timing
        values |= self.throughput.step(groups, self.progress.batch, values, time.monotonic())
        self._timing = {}
        values |= self.desk.display.advice(self.progress.step, values)
        self.desk.log.log(self.progress.step, values)
        decode = self.tokenizer.decode
        self.desk.log.log_samples(
            stats.samples_records(groups, self.progress.step, self.config.run.log_samples, decode)
        )
        self.desk.display.step(self.progress.step, values)

    def _sampler_values(self, newest: dict[str, float]) -> dict[str, float]:
        """Newest values as they are; running totals as what they grew by since the last step."""
        names = {"total/idle_s": "wait/sampler_s"}
        values = {}
        for name, value in newest.items():
            if name.startswith("total/"):
                grown = value - self._totals.get(name, 0.0)
                self._totals[name] = value
                # a restarted sampler counts from zero again
                values[names.get(name, name.replace("total/", "timing/sampler_"))] = max(0.0, grown)
            else:
                values[name] = value
        return values

    def _time(self, name: str, start: float) -> None:
        self._timing[name] = self._timing.get(name, 0.0) + time.monotonic() - start
