"""Wall times of a batch and the three throughputs of MindSpeed-RL's log, by its formulas.

    tokens     = (mean completion length + mean prompt length) · completions of the batch
    e2e_tps    = tokens / num_devices / timing/all_s
    update_tps = tokens / num_devices / timing/update_s
    vllm_tps   = tokens / num_devices / timing/sampler_generate_s

A batch of rollouts may give several optimizer steps. The last one logs the throughputs, over the
seconds of all of them. num_devices counts the trainer's ranks and every sampler's devices, because
all of them serve the same batch.
"""

import collections
import time
from collections.abc import Mapping, Sequence

import psutil

from common.config import Config
from common.types import Group, Tombstone, without_tombstones

# throughput -> the seconds that it divides by
_SECONDS = {
    "e2e_tps": "timing/all_s",
    "update_tps": "timing/update_s",
    "vllm_tps": "timing/sampler_generate_s",
}


def num_devices(config: Config, world_size: int, num_samplers: int) -> int:
    """Returns the number of devices of the trainer and all samplers.

    A replay has no sampler and counts the devices of one.
    """
    # if sampler.devices is empty, a sampler has a device for each tensor-parallel rank of vLLM
    listed = len(config.sampler.devices) // config.sampler.num_samplers
    devices_per_sampler = max(listed, config.engine_gpus)
    # num_samplers is 0 in a replay
    return world_size + max(1, num_samplers) * devices_per_sampler


class Throughput:
    """The wall times and throughputs of a run. `now`: monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._is_first = True
        # by group id, so that a group is counted once however often it trains
        self._tokens: dict[int, int] = {}
        self._seconds: collections.Counter[str] = collections.Counter()

    def step(
        self,
        groups: Sequence[Group | Tombstone],
        is_last: bool,
        values: Mapping[str, float],
        now: float,
        devices: int,
    ) -> dict[str, float]:
        """Returns the wall times of an optimizer step, and the throughputs if it is a batch's last.

        The first step of a process also has timing/first_step_s, the seconds since the process
        started. values: the step's durations by metric name. now: monotonic seconds.
        """
        update_s = values.get("timing/backward_s", 0.0) + values.get("timing/step_s", 0.0)
        metrics = {"timing/all_s": now - self._last, "timing/update_s": update_s}
        if self._is_first:
            metrics["timing/first_step_s"] = time.time() - psutil.Process().create_time()
        self._last = now
        self._is_first = False
        for group in without_tombstones(groups):
            num_tokens = len(group.prompt_ids) * len(group.rollouts)
            for rollout in group.rollouts:
                num_tokens += len(rollout.completion_ids)
            self._tokens[group.group_id] = num_tokens
        durations = {**values, **metrics}
        for key in _SECONDS.values():
            self._seconds[key] += durations.get(key, 0.0)  # type: ignore[assignment]
        if is_last:
            tokens_per_device = sum(self._tokens.values()) / devices
            for name, key in _SECONDS.items():
                if self._seconds[key] > 0:
                    metrics[name] = tokens_per_device / self._seconds[key]
            self._tokens.clear()
            self._seconds.clear()
        return metrics
