"""Wall times of a batch and the three throughputs of MindSpeed-RL's log, by its formulas.

    tokens = (mean completion length + mean prompt length) · completions of the batch
    e2e_tps, update_tps, vllm_tps = tokens / num_devices / (timing/all_s, timing/update_s, timing/sampler_generate_s)

over one batch of rollouts, which may give several optimizer steps: the last of them logs the three throughputs, over
the seconds of all. num_devices counts the trainer's ranks and every sampler's devices, because all serve the one batch.
"""

import collections
import time
from collections.abc import Mapping, Sequence

import psutil

from common.config import Config
from common.types import Group, Tombstone

SECONDS = {"e2e_tps": "timing/all_s", "update_tps": "timing/update_s", "vllm_tps": "timing/sampler_generate_s"}


def num_devices(config: Config, world_size: int, num_samplers: int) -> int:
    """Returns the devices of trainer and samplers; a replay, which has no sampler, counts the devices of one."""
    of_a_sampler = max(len(config.sampler.devices) // config.sampler.num_samplers, config.engine_gpus)
    return world_size + max(1, num_samplers) * of_a_sampler


class Throughput:
    """The wall times and throughputs of a run. `now`: monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._is_first = True
        self._tokens: dict[int, int] = {}  # by group id, counted once however often the group trains
        self._seconds: collections.Counter[str] = collections.Counter()

    def step(
        self, groups: Sequence[Group | Tombstone], is_last: bool, values: Mapping[str, float], now: float, devices: int
    ) -> dict[str, float]:
        """Returns timing/all_s and timing/update_s of this optimizer step, and the throughputs if it is a batch's last.
        The first step of a process also has timing/first_step_s, the seconds since the process started."""
        update_s = values.get("timing/backward_s", 0.0) + values.get("timing/step_s", 0.0)
        metrics = {"timing/all_s": now - self._last, "timing/update_s": update_s}
        if self._is_first:
            metrics["timing/first_step_s"] = time.time() - psutil.Process().create_time()
        self._last, self._is_first = now, False
        for group in groups:
            if isinstance(group, Group):
                lengths = (len(group.prompt_ids) + len(rollout.completion_ids) for rollout in group.rollouts)
                self._tokens[group.group_id] = sum(lengths)
        for key in SECONDS.values():
            self._seconds[key] += (values | metrics).get(key, 0.0)  # type: ignore[operator]
        if is_last:
            tokens = sum(self._tokens.values()) / devices
            metrics |= {name: tokens / self._seconds[key] for name, key in SECONDS.items() if self._seconds[key] > 0}
            self._tokens.clear()
            self._seconds.clear()
        return metrics
