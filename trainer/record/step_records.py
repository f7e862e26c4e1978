"""What a step leaves on record: a line of metrics, a few samples, a row of the display. Of rank 0; changes nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from common.config import Config
from trainer.algorithm import mismatch
from trainer.data.mini_batches import TrainedStep
from trainer.engine.deepspeed_model import StepResult
from trainer.record import stats
from trainer.record.rank_zero import RankZero
from trainer.record.throughput import Throughput, num_devices

SAMPLER_TOTALS = {"total/idle_s": "wait/sampler_s", "total/incomplete_support": "mismatch/support/incomplete_tokens"}


class StepRecords:
    """Only rank 0 has them."""

    def __init__(self, config: Config, rank_zero: RankZero, tokenizer: Any, world_size: int, batch: int):
        self._config, self._rank_zero, self._tokenizer = config, rank_zero, tokenizer
        self._throughput, self._world_size = Throughput(batch, time.monotonic()), world_size
        self._has_warned_of_size = False

    def write(
        self,
        number: int,
        batch: int,
        trained: TrainedStep,
        result: StepResult,
        sums: Mapping[str, float],
        progress: Mapping[str, float],
        more: Mapping[str, float],
    ) -> None:
        """number: of the optimizer step. batch: how many are complete. progress: counters after the step. more: what
        else the caller knows, step_time among it."""
        values = self._learning(trained, result, sums, progress)
        values |= progress
        values["tokens_per_second"] = values.get("completion_tokens", 0.0) / more["step_time"]
        reported = self._rank_zero.source.take_statistics()
        values |= {**more, **{_metric_of(name): value for name, value in reported.samplers.items()}}
        values |= {f"link/{name}": float(n) for name, n in reported.counters.items()}
        devices = num_devices(self._config, self._world_size, reported.num_samplers)
        values |= self._throughput.step(trained.groups, batch, values, time.monotonic(), devices)
        log, display = self._rank_zero.log, self._rank_zero.display
        values |= display.advice(number, values)
        log.log(number, values)
        decode, count = self._tokenizer.decode, self._config.run.log_samples
        log.log_samples(stats.samples_records(trained.groups, number, count, decode))
        display.step(number, values)
        self._warn(trained)

    def _learning(
        self, trained: TrainedStep, result: StepResult, sums: Mapping[str, float], progress: Mapping[str, float]
    ) -> dict[str, float]:
        """What the step trained on and what came of it."""
        step, groups, algorithm = trained.step, trained.groups, self._config.algorithm
        before = int(progress["policy_version"]) - result.new_versions
        values = stats.rollout_metrics(groups, before, self._config.rewards.full_mark)
        values |= stats.shaping_metrics(groups, self._config, trained.beta) | trained.dead_group_metrics
        if not result.critic_only:
            values |= stats.token_metrics(sums, algorithm.beta) | stats.correction_metrics(sums, algorithm)
            values |= mismatch.cause_metrics(sums)
            values |= {"grad_norm": result.grad_norm, "learning_rate": result.learning_rate}
        values |= trained.plan_metrics
        if algorithm.steps_per_batch > 1:
            values |= {"iteration": float(step.iteration), "mini_batch": float(step.mini_batch)}
        return values

    def _warn(self, trained: TrainedStep) -> None:
        if trained.empty_slots:
            self._rank_zero.display.note(trained.empty_slots)
        if trained.oversized_groups and not self._has_warned_of_size:
            self._rank_zero.display.note(trained.oversized_groups)
            self._has_warned_of_size = True


def _metric_of(name: str) -> str:
    """What the metric of a sampler's statistic is called."""
    return SAMPLER_TOTALS.get(name, name.replace("total/", "timing/sampler_"))
