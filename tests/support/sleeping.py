"""On a CPU vLLM has no memory to give back, so its worker is stood in for: what the cache held is overwritten."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def sleeping(engine: Any) -> Iterator[list[str]]:
    """Within it the cache of a CPU's engine sleeps, and loses what it held. Yields what the worker was asked to do."""
    from sampler.engine.cache_sleep import CacheSleep

    asked: list[str] = []
    [worker] = engine._llm.collective_rpc(lambda worker: worker)

    def discard(tags: tuple[str, ...]) -> None:
        asked.append(f"discard {' '.join(tags)}")
        for cache in worker.model_runner.kv_caches:
            cache.fill_(1000.0)

    worker.discard, worker.wake_up = discard, lambda tags: asked.append(f"wake {' '.join(tags)}")
    engine._cache = CacheSleep(engine._llm)
    try:
        yield asked
    finally:
        engine._cache.wake()
        engine._cache = None
        del worker.discard, worker.wake_up
