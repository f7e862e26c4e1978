"""vLLM's worker on a CPU, whose key-value cache holds one full window of rollouts.

It does so whatever the model's layers store. vLLM loads it by name through `worker_cls`, unless the
user sets the size of the cache.
"""

import math

from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_configs,
    get_max_concurrency_for_kv_cache_config,
)
from vllm.v1.worker.cpu_worker import CPUWorker

_UNIT = 1 << 26  # bytes
_MUCH = 1 << 40  # bytes; nothing of it is allocated


class CpuWorker(CPUWorker):
    def determine_available_memory(self) -> int:
        """Returns the bytes of max_num_seqs sequences of max_model_len tokens.

        They are a multiple of 64 MiB, and at most kv_cache_memory_bytes. vLLM computes them,
        because layers differ in heads, widths, windows and states.
        """
        settings = self.vllm_config
        [planned] = get_kv_cache_configs(settings, [self.get_kv_cache_spec()], [_MUCH])
        per_sequence = _MUCH / get_max_concurrency_for_kv_cache_config(settings, planned)
        num_bytes = settings.scheduler_config.max_num_seqs * per_sequence
        wanted = math.ceil(num_bytes / _UNIT) * _UNIT
        limit = self.cache_config.kv_cache_memory_bytes
        self.cache_config.kv_cache_memory_bytes = min(wanted, limit or wanted)
        return int(super().determine_available_memory())
