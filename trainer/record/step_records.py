"""What a step leaves on record: a line of metrics, a few samples, a row of the display. Of rank 0; changes nothing."""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping
from typing import Any

from common.config import Config
from trainer.algorithm import mismatch
from trainer.batch_training import BatchTraining
from trainer.data.mini_batches import Step
from trainer.engine.deepspeed_model import StepResult
from trainer.engine.policy import Sums
from trainer.rank_zero import RankZero
from trainer.record import stats
from trainer.record.throughput import Throughput, num_devices
from trainer.save.checkpoint import Progress

SAMPLER_TOTALS = {"total/idle_s": "wait/sampler_s", "total/incomplete_support": "mismatch/support/incomplete_tokens"}


class StepRecords:
    """Every rank may add seconds; only one with a rank_zero writes."""

    def __init__(self, config: Config, rank_zero: RankZero | None, tokenizer: Any, world_size: int, batch: int):
        self._config, self._rank_zero, self._tokenizer = config, rank_zero, tokenizer
        self._throughput, self._world_size = Throughput(batch, time.monotonic()), world_size
        self._seconds: collections.Counter[str] = collections.Counter()
        self._has_warned_of_size = False

    def record_seconds(self, name: str, seconds: float) -> None:
        """Adds to a metric of the step that is recorded next."""
        self._seconds[name] += seconds  # type: ignore[assignment]

    def write(
        self,
        step: Step,
        result: StepResult,
        sums: Sums,
        batch: BatchTraining,
        after: Progress,
        more: Mapping[str, float],
    ) -> None:
        """more: metrics that the caller knows, step_time among them."""
        assert self._rank_zero is not None
        groups = batch.rollouts.of(step.places)
        values = self._learning(step, result, sums, batch, after)
        values |= {
            "num_tokens": after.num_tokens,
            "policy_version": after.policy_version,
            "skipped_steps": after.skipped_steps,
            "tombstones": after.tombstones,
            "tokens_per_second": values.get("completion_tokens", 0.0) / more["step_time"],
        }
        reported = self._rank_zero.source.take_statistics()
        values |= {**more, **{_metric_of(name): value for name, value in reported.samplers.items()}}
        values |= {f"link/{name}": float(n) for name, n in reported.counters.items()}
        values |= self._seconds
        devices = num_devices(self._config, self._world_size, reported.num_samplers)
        values |= self._throughput.step(groups, after.batch, values, time.monotonic(), devices)
        self._seconds.clear()
        values |= self._rank_zero.display.advice(after.step, values)
        self._rank_zero.log.log(after.step, values)
        decode, count = self._tokenizer.decode, self._config.run.log_samples
        self._rank_zero.log.log_samples(stats.samples_records(groups, after.step, count, decode))
        self._rank_zero.display.step(after.step, values)
        self._warn(step, batch, values)

    def _learning(
        self, step: Step, result: StepResult, sums: Sums, batch: BatchTraining, after: Progress
    ) -> dict[str, float]:
        """What the step trained on and what came of it."""
        groups, algorithm = batch.rollouts.of(step.places), self._config.algorithm
        values = stats.rollout_metrics(
            groups, after.policy_version - result.new_versions, self._config.rewards.full_mark
        )
        values |= stats.shaping_metrics(groups, self._config, batch.beta) | batch.rollouts.dead_group_metrics(step)
        if not result.critic_only:
            values |= stats.token_metrics(sums, algorithm.beta) | stats.correction_metrics(sums, algorithm)
            values |= mismatch.cause_metrics(vars(sums))
            values |= {"grad_norm": result.grad_norm, "learning_rate": result.learning_rate}
        values |= batch.shares.plan_metrics(step.places)
        if algorithm.steps_per_batch > 1:
            values |= {"iteration": float(step.iteration), "mini_batch": float(step.mini_batch)}
        return values

    def _warn(self, step: Step, batch: BatchTraining, values: Mapping[str, float]) -> None:
        assert self._rank_zero is not None
        if step.is_last and (warning := batch.rollouts.warning()):
            self._rank_zero.display.note(warning)
        if values.get("oversized_groups") and not self._has_warned_of_size:
            self._rank_zero.display.note(batch.shares.warning(step.places))
            self._has_warned_of_size = True


def _metric_of(name: str) -> str:
    """What the metric of a sampler's statistic is called."""
    return SAMPLER_TOTALS.get(name, name.replace("total/", "timing/sampler_"))
