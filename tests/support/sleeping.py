"""(e, again) vLLM's cache sleeps: its memory is free meanwhile, new weights are proven, and what it then writes is the
same. On a CPU vLLM has no memory to give back, so its worker is stood in for: what the cache held is overwritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from gpu_check.finding import Finding, judged

_FREED = 0.95  # of the cache's bytes
_PROMPT, _TOKENS = list(range(3, 75)), 24


@contextlib.contextmanager
def sleeping(engine: Any) -> Iterator[list[str]]:
    """Within it the cache of a CPU's engine sleeps, and loses what it held. Yields what the worker was asked to do."""
    from sampler.cache_sleep import CacheSleep

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


def slept(pair: Any, version: int) -> Iterator[Finding]:
    """pair: reloads.Pair, whose engine may sleep and holds the version before this one."""
    import torch

    on_gpu = torch.cuda.is_available()
    before = _written(pair.engine)
    free = torch.cuda.mem_get_info()[0] if on_gpu else 0
    pair.engine.rest()
    if on_gpu:
        freed, wanted = torch.cuda.mem_get_info()[0] - free, pair.config.vllm["kv_cache_memory_bytes"]
        text = f"{freed / 2**30:.2f} GiB of a cache of {wanted / 2**30:.2f} GiB"
        yield judged("reloads", "asleep, memory freed", freed >= _FREED * wanted, text, freed=freed, cache=wanted)
    same = _written(pair.engine) == before
    yield judged("reloads", "asleep, written after it", same, "the same tokens" if same else "other tokens than before")
    pair.engine.rest()
    pair.policy.disturb()
    found = pair.reloaded(pair.published(version))
    text = f"proven in {found.prove_s:.2f} s, canary RMS {found.canary_rms:.2g}"
    yield judged("reloads", "asleep, new weights", pair.engine.on_cpu or not found.unproven, text, rms=found.canary_rms)


def _written(engine: Any) -> list[int]:
    """Greedy, so that nothing but weights and prompt decides."""
    from sampler.completions import SamplingParams

    engine.submit("prompt", _PROMPT, SamplingParams(0.0, _TOKENS, 1, None))
    while not (finished := engine.step()):
        pass
    [(_, [completion])] = finished
    return [int(token) for token in completion.token_ids]
