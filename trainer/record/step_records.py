"""What a step leaves on record: a line of metrics, a few samples, a row of the display. Of rank 0; changes nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from common.config import Config
from report.display import StepDisplay
from report.run_log import MetricsLog
from trainer.algorithm import mismatch
from trainer.data.mini_batches import TrainedStep
from trainer.engine.deepspeed_model import StepResult
from trainer.record import stats
from trainer.record.throughput import Throughput, num_devices

SAMPLER_TOTALS = {"total/idle_s": "wait/sampler_s", "total/incomplete_support": "mismatch/support/incomplete_tokens"}


class StepRecords:
    """Only rank 0 has them."""

    def __init__(
        self, config: Config, log: MetricsLog, display: StepDisplay, tokenizer: Any, world_size: int, batch: int
    ):
        self._config, self._log, self._display, self._tokenizer = config, log, display, tokenizer
        self._throughput = Throughput(num_devices(config, world_size), batch, time.monotonic())
        self._totals: dict[str, float] = {}  # of the sampler, at the step before
        self._has_warned_of_size = False

    def write(  # noqa: PLR0913 a step's whole outcome
        self,
        number: int,
        batch: int,
        trained: TrainedStep,
        result: StepResult,
        sums: Mapping[str, float],
        progress: Mapping[str, float],
        more: Mapping[str, float],
        sampler: Mapping[str, float],
    ) -> None:
        """number: of the optimizer step. batch: how many are complete. progress: counters after the step. more: what
        else the caller knows, step_time among it. sampler: its newest values."""
        values = self._learning(trained, result, sums, progress)
        values |= progress
        values["tokens_per_second"] = values.get("completion_tokens", 0.0) / more["step_time"]
        values |= {**more, **self._sampler_values(sampler)}
        values |= self._throughput.step(trained.groups, batch, values, time.monotonic())
        values |= self._display.advice(number, values)
        self._log.log(number, values)
        decode, count = self._tokenizer.decode, self._config.run.log_samples
        self._log.log_samples(stats.samples_records(trained.groups, number, count, decode))
        self._display.step(number, values)
        self._warn(trained)

    def _learning(
        self, trained: TrainedStep, result: StepResult, sums: Mapping[str, float], progress: Mapping[str, float]
    ) -> dict[str, float]:
        """What the step trained on and what came of it."""
        step, groups, algorithm = trained.step, trained.groups, self._config.algorithm
        before = int(progress["policy_version"]) - result.new_versions
        values = stats.rollout_metrics(groups, before, self._config.rewards.full_mark)
        values |= stats.shaping_metrics(groups, trained.config) | trained.dead_group_metrics
        if not result.critic_only:
            values |= stats.token_metrics(sums, algorithm.beta) | stats.correction_metrics(sums, algorithm)
            values |= mismatch.cause_metrics(sums)
            values |= {"grad_norm": result.grad_norm, "learning_rate": result.learning_rate}
        values |= trained.plan_metrics
        if algorithm.steps_per_batch > 1:
            values |= {"iteration": float(step.iteration), "mini_batch": float(step.mini_batch)}
        return values

    def _sampler_values(self, newest: Mapping[str, float]) -> dict[str, float]:
        """Newest values as they are; running totals as what they grew by since the last step."""
        values = {}
        for name, value in newest.items():
            if name.startswith("total/"):
                grown = value - self._totals.get(name, 0.0)
                self._totals[name] = value
                # a restarted sampler counts from zero again
                values[SAMPLER_TOTALS.get(name, name.replace("total/", "timing/sampler_"))] = max(0.0, grown)
            else:
                values[name] = value
        return values

    def _warn(self, trained: TrainedStep) -> None:
        if trained.empty_slots:
            self._display.note(trained.empty_slots)
        if trained.oversized_groups and not self._has_warned_of_size:
            self._display.note(trained.oversized_groups)
            self._has_warned_of_size = True
