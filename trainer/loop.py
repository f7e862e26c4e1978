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

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config import Config
from common.durable import failpoint
from common.exits import Interrupted, Retryable, code_of, interrupted
from common.metrics import MetricsLog
from common.panel import StepDisplay
from common.reference import Reference
from common.types import EvalResult, Tombstone
from common.watchdog import moved
from trainer import checkpoint, mismatch, stats
from trainer.actor_critic import ActorCritic
from trainer.advantages import step_advantages
from trainer.batch import (
    MicroBatch,
    PerCompletion,
    Positions,
    micro_batch,
    num_trained_tokens,
    waits_for,
)
from trainer.best import Best
from trainer.checkpoint import Progress
from trainer.critic import Critic
from trainer.deepspeed_model import StepResult
from trainer.disk import Disk, on_rank_0
from trainer.engine import Engine, Sums
from trainer.exchange import STOP_TOGETHER, Exchange
from trainer.inbox import Inbox
from trainer.kl_controller import completion_kls, next_beta, with_beta
from trainer.losses import Denominator
from trainer.micro_batches import Round
from trainer.mini_batches import Step, steps
from trainer.publisher import Publisher
from trainer.recording import Recorder, Replay
from trainer.rollouts import Items, Rollouts
from trainer.shares import Shares
from trainer.throughput import Throughput, num_devices


@dataclass(frozen=True)
class Desk:
    """What only rank 0 has: the link to the samplers and the run's records."""

    inbox: Inbox | Replay
    recorder: Recorder | None
    log: MetricsLog
    display: StepDisplay


class Trainer:
    def __init__(  # noqa: PLR0913 three models, and all around them
        self,
        config: Config,
        engine: Engine,
        exchange: Exchange,
        tokenizer: Any,
        progress: Progress,
        desk: Desk | None,
        reference: Reference | None = None,
        critic: Critic | None = None,
    ):
        self.config, self.engine, self.exchange, self.tokenizer = config, engine, exchange, tokenizer
        self.progress, self.desk, self.reference, self.critic = progress, desk, reference, critic
        self.actor_critic = ActorCritic(config, engine, critic, exchange) if critic else None
        self.disk = Disk(exchange, config.channel.stall_timeout_s, desk.display.note if desk else lambda _: None)
        self.best = Best(config, exchange, self.disk, lambda: desk.log.evaluations() if desk else [])
        self.publisher = Publisher(config, engine, exchange, self.disk, desk.inbox if desk else None, self._took)
        self._evaluated_version = progress.policy_version  # at the start, or in an earlier life
        self._saved_step = progress.step
        self._is_between_batches = True  # no step of a batch that has begun is in the weights
        self._num_eval_problems = 0
        self._has_warned_of_size = False
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
        finally:
            self.publisher.close()
        if not self.best.commit_as_final():
            output_dir = self.config.run.output_dir
            checkpoint.commit_final(self.engine, self.exchange, self.tokenizer, output_dir, self.disk, self.critic)

    def stop_if_interrupted(self) -> None:
        """Raises Interrupted on every rank if rank 0 was asked to end."""
        if self.exchange.agree(interrupted()):
            raise Interrupted

    def train_batch(self) -> None:
        """num_iterations passes over the next batch of rollouts, with an optimizer step on each of its mini-batches."""
        self._shaping = with_beta(self.config, self.progress.kl_beta)
        self._rollouts = Rollouts(
            self._shaping, self.progress.cursor, self.receive, self._refill, self._batch_advantages
        )
        self._shares = Shares(self.config, self._rollouts, self.engine.dims, self.exchange)
        self._own_logprobs: dict[int, Tensor] = {}  # by group id; of this rank's micro-batches, or of the whole batch
        self._sampled_logprobs: dict[int, Tensor] = {}  # by group id; at the version that sampled it, for metrics
        self._ref_logprobs: dict[int, Tensor] = {}  # by group id; of this rank's micro-batches, if it scores them
        for step in steps(self.config, self.progress.batch):
            started, self._taken_s = time.monotonic(), 0.0
            self.backward(step)
            result, sums = self.optimizer_step()
            self._advance(result, sums, step.is_last)
            self.record(step, result, sums, seconds=time.monotonic() - started)
            if self.config.weights.publish_every == "step" and not step.is_last:
                self.publish_inside(step)

    def backward(self, step: Step) -> None:
        """Forward and backward on a mini-batch, while later groups still decode where its settings allow."""
        waits = waits_for(self.config.algorithm)
        size = self.config.prompts_per_batch if waits == "batch" else 0
        self._rollouts.take_up_to(max(step.places) + 1 if waits == "mini_batch" else size, self._shares.at_once)
        if self._needs_scoring:
            self._score_batch()
        for chunk in self._shares.rounds(step.places):
            self._backward(chunk, step)

    def _refill(self, count: int) -> None:
        if self.desk:
            self.desk.inbox.refill(count)

    def _batch_advantages(self, groups: Items) -> Mapping[int, PerCompletion]:
        """Where they depend on all groups of the batch."""
        if self.actor_critic is None:
            return step_advantages(groups, self._shaping)
        start = time.monotonic()
        moved("scoring a batch of rollouts with the critic")
        shares = [self._shares.mine(chunk) for chunk in self._shares.rounds(range(self.config.prompts_per_batch))]
        threshold = self.progress.threshold or self.config.algorithm.group_params.group_variance_threshold
        advantages = self.actor_critic.begin_batch(groups, shares, self._shaping, threshold)
        self._time("timing/values_s", start)
        return advantages

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

    def _micro_batch(self, chunk: Round, denominator: Denominator) -> MicroBatch:
        algorithm, packing = self.config.algorithm, self.config.trainer.packing
        advantages = self._rollouts.advantages
        batch = micro_batch(self._shares.mine(chunk), advantages, denominator, algorithm, packing, self._positions)
        is_filler = not batch.tokens_of
        return batch if self.reference is None or is_filler else self._with_reference(batch, self.reference)

    def _with_reference(self, batch: MicroBatch, reference: Reference) -> MicroBatch:
        """Scored once in a batch of rollouts: later passes remember what this rank scored."""
        start = time.monotonic()
        if not batch.tokens_of.keys() <= self._ref_logprobs.keys():
            moved("scoring a micro-batch with the reference model")
            parts = reference.score(batch.row).split(list(batch.tokens_of.values()))
            self._ref_logprobs |= zip(batch.tokens_of, parts, strict=True)
        self._time("timing/reference_s", start)
        return replace(batch, ref_logprobs=torch.cat([self._ref_logprobs[g] for g in batch.tokens_of]))

    @property
    def _positions(self) -> Positions | None:
        """The tokens that train; None = all."""
        return self.actor_critic.estimates.policy_positions if self.actor_critic else None

    def _backward(self, chunk: Round, step: Step) -> None:
        """This rank's share of one round of a step."""
        batch = (
            None
            if self._critic_only
            else self._micro_batch(chunk, self._shares.denominator(step.places, self._positions))
        )
        moved(f"training a micro-batch of step {self.progress.step + 1}")
        start = time.monotonic()
        if self.actor_critic:
            groups = self._rollouts.trained(self._rollouts.of(step.places))
            self.actor_critic.backward(self._shares.mine(chunk), groups)
        if batch:
            self._backward_policy(batch)
        self._time("timing/backward_s", start)

    def _backward_policy(self, batch: MicroBatch) -> None:
        own = [self._own_logprobs[g] for g in batch.tokens_of if g in self._own_logprobs]
        unknown = {g: torch.full((n,), torch.nan) for g, n in batch.tokens_of.items()}
        sampled = [self._sampled_logprobs.get(g, nans) for g, nans in unknown.items()]
        logprobs = self.engine.backward(
            batch,
            torch.cat(own) if own else None,
            torch.cat(sampled) if sampled else None,
            self.progress.policy_version,
        )
        if self.config.algorithm.num_iterations > 1:
            self._remember_sampled(batch, logprobs.cpu())
        if self.config.algorithm.vllm_importance_sampling_mode is not None and not own:
            self._remember(batch, logprobs)

    @property
    def _critic_only(self) -> bool:
        """Within critic_warmup_steps: the policy, and so its version, stays."""
        return self.progress.step < self.config.critic.critic_warmup_steps

    @property
    def _needs_scoring(self) -> bool:
        """Later mini-batches meet weights that have moved: log-probs at the sampled version must come before them."""
        algorithm = self.config.algorithm
        corrects = algorithm.vllm_importance_sampling_mode is not None
        return corrects and algorithm.steps_per_generation > 1 and not self._own_logprobs

    def _score_batch(self) -> None:
        """The trainer's own log-probs of the whole batch, on every rank: shuffling gives groups to other ranks."""
        start = time.monotonic()
        places = range(self.config.prompts_per_batch)
        for chunk in self._shares.rounds(places):
            moved("scoring a batch of rollouts with the weights that sampled it")
            batch = self._micro_batch(chunk, self._shares.denominator(places, self._positions))
            self._remember(batch, self.engine.score(batch.row, self.config.sampler.temperature))
        algorithm, advantages = self.config.algorithm, self._rollouts.advantages
        groups = self._rollouts.trained(self._rollouts.items)
        lengths = {g.group_id: num_trained_tokens(g, advantages, algorithm, self._positions) for g in groups}
        zeros = {g: torch.zeros(n) for g, n in lengths.items() if n}
        flat = torch.cat([self._own_logprobs.get(g, zero) for g, zero in zeros.items()] or [torch.zeros(0)])
        everyones = torch.tensor(self.exchange.add(flat.tolist()), dtype=torch.float32)  # exact: others add 0
        self._own_logprobs = dict(zip(zeros, everyones.split([len(z) for z in zeros.values()]), strict=True))
        self._time("timing/score_s", start)

    def _remember(self, batch: MicroBatch, logprobs: Tensor) -> None:
        if batch.tokens_of:  # a filler has none
            parts = logprobs.split(list(batch.tokens_of.values()))
            self._own_logprobs |= zip(batch.tokens_of, parts, strict=True)

    def _remember_sampled(self, batch: MicroBatch, logprobs: Tensor) -> None:
        """Those of groups that the present version sampled: later passes tell numerics and staleness apart by them."""
        lengths = list(batch.tokens_of.values())
        parts = zip(batch.tokens_of, logprobs[: sum(lengths)].split(lengths), strict=True) if lengths else ()
        versions = {g.group_id: g.policy_version for g in self._rollouts.items}
        self._sampled_logprobs |= {g: p for g, p in parts if versions[g] == self.progress.policy_version}

    def optimizer_step(self) -> tuple[StepResult, Sums]:
        moved(f"making optimizer step {self.progress.step + 1}")
        start = time.monotonic()
        mine = self.engine.take_sums()
        names = [f.name for f in fields(Sums)]
        sums = Sums(**dict(zip(names, self.exchange.add([getattr(mine, n) for n in names]), strict=True)))
        result = self.actor_critic.step(self._critic_only) if self.actor_critic else self.engine.step()
        failpoint("trainer.stepped")
        self._time("timing/step_s", start)
        return result, sums

    def _advance(self, result: StepResult, sums: Sums, last: bool) -> None:
        """The version moves only with an applied step; the batch is spent with its last step either way."""
        p = self.progress
        self.progress = replace(
            p,
            step=p.step + 1,
            policy_version=p.policy_version + result.new_versions,
            skipped_steps=p.skipped_steps + (not result.applied),
            num_tokens=p.num_tokens + int(sums.tokens),
            batch=p.batch + last,
            cursor=p.cursor + last * self._rollouts.num_taken,
            tombstones=p.tombstones + last * sum(isinstance(g, Tombstone) for g in self._rollouts.items),
            kl_beta=self._next_beta() if last else p.kl_beta,
            skipped_in_a_row=0 if result.applied else p.skipped_in_a_row + 1,
            threshold=self.actor_critic.next_threshold() if self.actor_critic and last else p.threshold,
        )
        self._is_between_batches = last
        if self.progress.skipped_in_a_row >= self.config.trainer.max_skipped_steps:
            raise Retryable(
                f"{self.progress.skipped_in_a_row} steps in a row were not finite (loss {sums.loss}, gradient norm "
                f"{result.grad_norm}) and were skipped; the weights are those of version {self.progress.policy_version}"
            )

    def publish_inside(self, step: Step) -> None:
        """Fresher weights for the groups that the sampler runs ahead with; the cursor waits for the batch's end."""
        self.finish_evaluation()
        self.publish(evaluate=False)
        is_last_pass = step.iteration + 1 == self.config.algorithm.num_iterations
        if self.desk and is_last_pass:
            self.desk.inbox.spend((step.mini_batch + 1) * self.config.trainer.prompts_per_step)

    def _next_beta(self) -> float | None:
        if self.config.algorithm.kl_controller == "fixed":
            return None
        return next_beta(self._shaping.algorithm.beta, completion_kls(self._rollouts.items), self.config.algorithm)

    def publish(self, evaluate: bool) -> None:
        """The present version, with an evaluation if one is due."""
        p, num_problems = self.progress, self._num_eval_problems
        if evaluate:
            self._evaluated_version = p.policy_version
        eval_id = f"v{p.policy_version}" if evaluate and num_problems else None
        self.publisher.publish(p.policy_version, p.run_id, len(self.tokenizer), p.cursor, eval_id, num_problems)

    def _evaluates_at_start(self) -> bool:
        """A checkpoint is saved while its version is still being evaluated: a resumed run may have to do it again."""
        if self.progress.step == 0:
            return self.config.eval.before
        return self._is_due() and not (self.desk and self.desk.log.has_eval(self.progress.policy_version))

    def _evaluates_now(self) -> bool:
        """Once for each version: steps that the critic made alone, or that were skipped, leave the policy as it was."""
        return self._is_due(is_new=self.progress.policy_version != self._evaluated_version)

    def _is_due(self, is_new: bool = True) -> bool:
        every, version = self.config.eval.steps, self.progress.policy_version
        before = max(0, version - self.config.algorithm.steps_per_batch)  # a batch may step over a multiple
        due = every is not None and is_new and (version // every > before // every or version == 0)
        return due or (self.config.eval.after and self.progress.batch == self.config.num_batches)

    def finish_evaluation(self) -> None:
        """Waits for the evaluation of the published version, if there is one, before that version is replaced."""
        self.publisher.finish()
        start = time.monotonic()
        results: list[EvalResult] = []
        with contextlib.suppress(Interrupted):  # all ranks stop together a moment later, without this evaluation
            results = self.desk.inbox.finish_eval() if self.desk else []
        record = stats.eval_record(results, self.config.rewards.full_mark) if results else None
        # before it is recorded: what is recorded is not evaluated again after a crash
        self.best.judge(record, self.publisher.published, self.engine, self.tokenizer)
        if self.desk and record:
            self.desk.log.log_eval(record)
            self.desk.display.evaluation(record)
        self._time("timing/evaluation_s", start)

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
        elif self.desk:
            done = f"interrupted inside a batch of {self.config.algorithm.steps_per_batch} steps"
            self.desk.display.note(f"{done}: the newest checkpoint stays that of step {self._saved_step}")

    def _save(self) -> None:
        moved(f"saving the checkpoint of step {self.progress.step}")
        start = time.monotonic()
        self.disk.persist("the run's history", self._sync_history)
        folder, keep = Path(self.config.run.output_dir) / "checkpoints", self.config.trainer.save_limit
        checkpoint.save(self.engine, self.exchange, self.tokenizer, folder, self.progress, keep, self.disk, self.critic)
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
        return self.progress.step // every > (self.progress.step - self.config.algorithm.steps_per_batch) // every

    def record(self, step: Step, result: StepResult, sums: Sums, seconds: float) -> None:
        if self.desk is None:
            return
        groups = self._rollouts.of(step.places)
        version = self.progress.policy_version - result.new_versions
        sampler_stats, counters = self.desk.inbox.snapshot()
        rollout = stats.rollout_metrics(groups, version, self.config.rewards.full_mark)
        values = rollout | stats.shaping_metrics(groups, self._shaping) | self._rollouts.dead_group_metrics(step)
        if not result.critic_only:
            algorithm = self.config.algorithm
            values |= stats.token_metrics(sums, algorithm.beta) | stats.correction_metrics(sums, algorithm)
            values |= mismatch.cause_metrics(vars(sums))
            values |= {"grad_norm": result.grad_norm, "learning_rate": result.learning_rate}
        values |= self.actor_critic.metrics() if self.actor_critic else {}
        values |= self._shares.plan_metrics(step.places)
        values |= {
            "step_time": seconds,
            "num_tokens": self.progress.num_tokens,
            "policy_version": self.progress.policy_version,
            "skipped_steps": self.progress.skipped_steps,
            "tokens_per_second": rollout.get("completion_tokens", 0.0) / seconds,
            "wait/trainer_s": self._taken_s,
            "tombstones": self.progress.tombstones,
            "disk_retries": self.publisher.disk_retries,
            "reference_on_trainer": float(self.reference is not None),
        }
        if self.config.algorithm.steps_per_batch > 1:
            values |= {"iteration": float(step.iteration), "mini_batch": float(step.mini_batch)}
        values |= self._sampler_values(sampler_stats) | {f"link/{name}": float(n) for name, n in counters.items()}
        values |= self._timing | {"timing/head_s": self.engine.head_time.take()}
        values |= self.throughput.step(groups, self.progress.batch, values, time.monotonic())
        self._timing = {}
        values |= self.desk.display.advice(self.progress.step, values)
        self.desk.log.log(self.progress.step, values)
        decode = self.tokenizer.decode
        self.desk.log.log_samples(
            stats.samples_records(groups, self.progress.step, self.config.run.log_samples, decode)
        )
        self.desk.display.step(self.progress.step, values)
        if step.is_last and (warning := self._rollouts.warning()):
            self.desk.display.note(warning)
        if values.get("oversized_groups") and not self._has_warned_of_size:
            self.desk.display.note(self._shares.warning(step.places))
            self._has_warned_of_size = True

    def _sampler_values(self, newest: dict[str, float]) -> dict[str, float]:
        """Newest values as they are; running totals as what they grew by since the last step."""
        names = {
            "total/idle_s": "wait/sampler_s",
            "total/incomplete_support": "mismatch/support/incomplete_tokens",
        }
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
        self._took(name, time.monotonic() - start)

    def _took(self, name: str, seconds: float) -> None:
        self._timing[name] = self._timing.get(name, 0.0) + seconds
