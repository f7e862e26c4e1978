"""Records of each step on rank 0: a line of metrics, a few samples and a row of the display. Training is unaffected."""

import time
from collections.abc import Mapping
from typing import Any

from common.config import Config
from trainer.algorithm import mismatch
from trainer.data.mini_batches import TrainedStep
from trainer.engine.step_result import StepResult
from trainer.record import stats
from trainer.record.rank_zero import RankZero
from trainer.record.throughput import Throughput

SAMPLER_TOTALS = {
    "total/idle_s": "wait/sampler_s",
    "total/incomplete_support": "mismatch/support/incomplete_tokens",
    "total/in_flight_updates": "in_flight/updates",
    "total/unread": "rollout/unread",
}


class StepRecords:
    """The writer of step records, which exists only on rank 0."""

    def __init__(self, config: Config, rank_zero: RankZero, tokenizer: Any):
        self._config, self._log, self._display = config, rank_zero.log, rank_zero.display
        self._tokenizer = tokenizer
        self._throughput = Throughput(time.monotonic())
        self._has_warned_of_size = False

    def write(
        self,
        number: int,
        trained: TrainedStep,
        result: StepResult,
        sums: Mapping[str, float],
        more: Mapping[str, float],
        devices: int,
    ) -> None:
        """Writes the records of optimizer step `number`, served by `devices` devices.
        more: metrics of the caller, which include step_time and policy_version, the newest version."""
        values = self._learning(trained, result, sums, int(more["policy_version"]) - result.new_versions)
        values |= more
        values["tokens_per_second"] = values.get("completion_tokens", 0.0) / more["step_time"]
        values |= self._throughput.step(trained.groups, trained.step.is_last, values, time.monotonic(), devices)
        values |= self._display.advice(number, values)
        self._log.log(number, values)
        self._log.log_samples(stats.samples_records(trained.groups, number, count=2, decode=self._tokenizer.decode))
        self._display.step(number, values)
        if trained.empty_slots:
            self._display.note(trained.empty_slots)
        if trained.oversized_groups and not self._has_warned_of_size:
            self._display.note(trained.oversized_groups)
            self._has_warned_of_size = True

    def _learning(
        self, trained: TrainedStep, result: StepResult, sums: Mapping[str, float], version: int
    ) -> dict[str, float]:
        """Returns the metrics of the step's groups and of its result. version: the policy's before the step."""
        step, groups, config, algorithm = trained.step, trained.groups, self._config, self._config.algorithm
        values = stats.rollout_metrics(groups, version, config) | stats.source_metrics(groups, config)
        if config.max_turns:
            values |= stats.turn_metrics(groups, config)
        if config.sampler.in_flight_updates:
            values |= stats.in_flight_metrics(groups, version)
        values |= stats.shaping_metrics(groups, config) | trained.metrics
        if not result.critic_only:
            values |= stats.token_metrics(sums, algorithm.beta) | stats.correction_metrics(sums, algorithm)
            values |= mismatch.cause_metrics(sums)
            values |= {"grad_norm": result.grad_norm, "learning_rate": result.learning_rate}
        if algorithm.steps_per_batch > 1:
            values |= {"iteration": float(step.iteration), "mini_batch": float(step.mini_batch)}
        return values


def sampler_values(samplers: Mapping[str, float]) -> dict[str, float]:
    """Returns the samplers' reported statistics under the names of metrics."""
    return {SAMPLER_TOTALS.get(k, k.replace("total/", "timing/sampler_")): value for k, value in samplers.items()}
