"""Frees the memory of vLLM's cache while the engine has nothing to generate: enable_sleep_mode.

    last completion ─► rest ─► the last groups are sent ─► the trainer trains, publishes ─► wake ─►
                       └──────────── the cache's memory belongs to nobody ───────────┘

This is for one GPU that two processes use in turns. The canary wakes the cache. The weights stay in
GPU memory, so that a new version is loaded into them and compared while the cache sleeps. vLLM 0.32
guarantees the following in its source:

- `v1/engine/core.py` EngineCore.release_kv_cache_memory: after a pause of level 0, which changes no
  memory, it forgets what the cache holds (prefixes, images) and has the workers drop what is tagged
  "kv_cache". It refuses while a finished request is not yet reported to the workers, or a batch is
  on its way: one more step resolves either.
- `device_allocator/cumem.py` CuMemAllocator.discard, wake_up: physical memory is freed and mapped
  again, addresses stay, so CUDA graphs stay valid. The restored memory has any content. Weights are
  tagged "weights" and not touched.
- `v1/worker/gpu_worker.py` _maybe_get_memory_pool_context: only `enable_sleep_mode` puts the cache
  into that allocator.
- `v1/worker/cpu_worker.py` discard: refused, as by `config/model.py` on any platform without such
  an allocator.
"""

from typing import Any

from common.errors import Retryable


class CacheSleep:
    """Frees and restores the cache of `llm`, a vllm.LLM whose engine runs in this process."""

    def __init__(self, llm: Any):
        self._llm = llm
        self.is_asleep = False

    def rest(self) -> None:
        """Frees the cache's memory. No sequence may be queued or running."""
        if self.is_asleep:
            return
        # one step reports what finished; each takes one of the up to two batches on their way
        for _ in range(4):
            self._llm.llm_engine.step()
        self._llm.sleep(level=0, mode="keep")
        self._llm.release_kv_cache_memory()
        self.is_asleep = True

    def wake(self) -> None:
        """Restores the cache's memory before anything is generated.

        Raises Retryable if the memory is gone.
        """
        if not self.is_asleep:
            return
        try:
            is_awake = self._llm.wake_up(tags=["kv_cache"])
        except Exception as error:
            raise Retryable(
                f"vLLM's cache could not wake: {error}; set vllm.enable_sleep_mode=false"
            ) from error
        if not is_awake:
            raise Retryable(
                "vLLM's engine sleeps on after its cache was woken; "
                "set vllm.enable_sleep_mode=false"
            )
        self.is_asleep = False
