"""Records of each optimizer step on rank 0: a line of metrics, some samples, a row of the display.

They have no influence on the training.
"""

import time
from collections.abc import Mapping
from typing import Any

from common.config import Config
from trainer.algorithm import mismatch
from trainer.data.mini_batches import TrainedStep
from trainer.engine.step_result import StepResult
from trainer.link.source import Statistics
from trainer.record import stats
from trainer.record.rank_zero import RankZero
from trainer.record.samples import samples_records
from trainer.record.throughput import Throughput

# a sampler's statistic -> its metric; any other statistic total/… becomes timing/sampler_…
SAMPLER_TOTALS = {
    "total/idle_s": "wait/sampler_s",
    "total/incomplete_support": "mismatch/support/incomplete_tokens",
    "total/in_flight_updates": "in_flight/updates",
    "total/unread": "rollout/unread",
}


class StepRecords:
    """The writer of step records, which exists only on rank 0."""

    def __init__(self, config: Config, rank_zero: RankZero, tokenizer: Any):
        self._config = config
        self._log = rank_zero.log
        self._display = rank_zero.display
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
        """Writes the records of one optimizer step, and then displays the step.

        number: the step's number in the run, from 1. trained: the groups that the step trained.
        sums: over the step's trained tokens, named as in sums.TOKEN_SUMS. more: the caller's
        metrics, which replace the step's metrics of the same name. They include step_time, in
        seconds, and policy_version, the version after the step. devices: the number of devices of
        the trainer and all samplers.
        """
        groups = trained.groups
        version_before = int(more["policy_version"]) - result.new_versions
        values = self._training_metrics(trained, result, sums, version_before)
        values |= more
        values["tokens_per_second"] = values.get("completion_tokens", 0.0) / more["step_time"]
        # the throughputs use the durations in `values`, and the advice uses all metrics
        now = time.monotonic()
        values |= self._throughput.step(groups, trained.step.is_last, values, now, devices)
        values |= self._display.advice(number, values)

        self._log.log(number, values)
        decode = self._tokenizer.decode
        self._log.log_samples(samples_records(groups, number, count=2, decode=decode))
        self._display.step(number, values)
        if trained.empty_slots:
            self._display.note(trained.empty_slots)
        if trained.oversized_groups and not self._has_warned_of_size:  # once in a run
            self._display.note(trained.oversized_groups)
            self._has_warned_of_size = True

    def _training_metrics(
        self,
        trained: TrainedStep,
        result: StepResult,
        sums: Mapping[str, float],
        version_before: int,
    ) -> dict[str, float]:
        """Returns the metrics of the groups that a step trained, and of the step's result.

        version_before: the policy version before the step.
        """
        groups = trained.groups
        config = self._config
        algorithm = config.algorithm
        values = stats.rollout_metrics(groups, version_before, config)
        values |= stats.source_metrics(groups, config)
        if config.max_turns:
            values |= stats.turn_metrics(groups, config)
        if config.sampler.in_flight_updates:
            values |= stats.in_flight_metrics(groups, version_before)
        values |= stats.shaping_metrics(groups, config)
        values |= trained.metrics
        if not result.critic_only:  # otherwise the policy was not trained in this step
            values |= stats.token_metrics(sums, algorithm.beta)
            values |= stats.correction_metrics(sums, algorithm)
            values |= mismatch.cause_metrics(sums)
            values["grad_norm"] = result.grad_norm
            values["learning_rate"] = result.learning_rate
        if algorithm.steps_per_batch > 1:
            values["iteration"] = float(trained.step.iteration)
            values["mini_batch"] = float(trained.step.mini_batch)
        return values


def link_metrics(statistics: Statistics) -> dict[str, float]:
    """Returns the metrics of the link to the samplers, by name.

    They are the statistics that the samplers reported, and the trainer's counters of messages and
    groups.
    """
    metrics = {}
    for name, value in statistics.samplers.items():
        metric = name.replace("total/", "timing/sampler_")
        metrics[SAMPLER_TOTALS.get(name, metric)] = value
    for name, count in statistics.counters.items():
        metrics[f"link/{name}"] = float(count)
    return metrics
