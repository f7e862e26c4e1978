"""Wall times of a batch, and the three throughputs in the log of MindSpeed-RL, by its formulas.

    tokens     = (mean completion length + mean prompt length) · completions of the batch
    e2e_tps    = tokens / num_devices / timing/all_s
    update_tps = tokens / num_devices / timing/update_s
    vllm_tps   = tokens / num_devices / timing/sampler_generate_s

A batch of rollouts may have several optimizer steps. The last step of the batch logs the
throughputs, and the times in the formulas are sums over all its steps. num_devices counts the
trainer's ranks and every sampler's devices, because all of them work on the same batch.
"""

import collections
import time
from collections.abc import Mapping, Sequence

import psutil

from common.config import Config
from common.types import Group, Tombstone, without_tombstones

# throughput -> the duration in seconds by which the tokens are divided
_DURATION_OF = {
    "e2e_tps": "timing/all_s",
    "update_tps": "timing/update_s",
    "vllm_tps": "timing/sampler_generate_s",
}


def num_devices(config: Config, world_size: int, num_samplers: int) -> int:
    """Returns the number of devices of the trainer and all samplers.

    world_size: the number of the trainer's ranks. num_samplers: 0 in a replay, whose recording is
    then counted as one sampler.
    """
    # if sampler.devices is empty, a sampler has a device for each tensor-parallel rank of vLLM
    num_listed = len(config.sampler.devices) // config.sampler.num_samplers
    devices_per_sampler = max(num_listed, config.engine_gpus)
    return world_size + max(1, num_samplers) * devices_per_sampler


class Throughput:
    """The wall times and throughputs of a run.

    Methods take `now`, the time in monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._last_step_at = now
        self._is_first = True
        # group id -> tokens of a group of the batch; a dict, because a group that trains in several
        # steps of the batch counts once
        self._tokens: dict[int, int] = {}
        self._seconds = collections.defaultdict[str, float](float)  # of the batch's steps so far

    def step(
        self,
        groups: Sequence[Group | Tombstone],
        is_last: bool,
        values: Mapping[str, float],
        now: float,
        devices: int,
    ) -> dict[str, float]:
        """Returns an optimizer step's wall times, and in a batch's last step the throughputs.

        The first step of a process also has timing/first_step_s, the seconds since the process
        started. groups: the groups that the step trained. is_last: whether it is the last step on
        its batch. values: the step's metrics, which include its durations. devices: their number.
        """
        metrics = self._wall_times(values, now)
        for group in without_tombstones(groups):
            self._tokens[group.group_id] = _num_tokens(group)
        durations = {**values, **metrics}
        for name in _DURATION_OF.values():
            self._seconds[name] += durations.get(name, 0.0)
        if is_last:
            metrics |= self._throughputs(devices)
            self._tokens.clear()
            self._seconds.clear()
        return metrics

    def _wall_times(self, values: Mapping[str, float], now: float) -> dict[str, float]:
        update_s = values.get("timing/backward_s", 0.0) + values.get("timing/step_s", 0.0)
        metrics = {"timing/all_s": now - self._last_step_at, "timing/update_s": update_s}
        if self._is_first:
            metrics["timing/first_step_s"] = time.time() - psutil.Process().create_time()
        self._last_step_at = now
        self._is_first = False
        return metrics

    def _throughputs(self, devices: int) -> dict[str, float]:
        """Returns the batch's throughputs in tokens per second and device."""
        throughputs = {}
        tokens_per_device = sum(self._tokens.values()) / devices
        for name, duration in _DURATION_OF.items():
            if self._seconds[duration] > 0:  # for example, a replay spends no time on sampling
                throughputs[name] = tokens_per_device / self._seconds[duration]
        return throughputs


def _num_tokens(group: Group) -> int:
    """Returns the number of tokens in a group. The prompt counts once for each completion."""
    num_tokens = len(group.prompt_ids) * len(group.rollouts)
    for rollout in group.rollouts:
        num_tokens += len(rollout.completion_ids)
    return num_tokens
