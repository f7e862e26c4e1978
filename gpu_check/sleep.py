"""(h) vLLM's cache sleeps: its memory is free meanwhile, new weights are proven, and what it then writes is the same.

On a CPU vLLM has no memory to give back, so its worker is stood in for: what a sleeping cache held is overwritten.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import exits
from gpu_check.finding import Finding, judged, recorded, write_down
from gpu_check.reloads import CACHE, Pair
from gpu_check.running import run

_FREED = 0.95  # of the cache's bytes
_PROMPT, _TOKENS = list(range(3, 75)), 24


def findings(on_gpu: bool, scratch: Path) -> Iterator[Finding]:
    out, problem = scratch / "sleep.jsonl", ""
    try:
        run([sys.executable, "-m", "gpu_check.sleep", str(scratch), str(out)])
    except RuntimeError as error:
        problem = str(error)
    yield from recorded(out)
    if problem:
        yield Finding("sleep", "came to its end", "fail", problem)


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


def _all(scratch: Path) -> Iterator[Finding]:
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        pair = Pair("1m", "float32", scratch, enable_sleep_mode=True)
        yield from _slept(pair, lambda: torch.cuda.mem_get_info()[0])
        return
    pair = Pair("1m", "float32", scratch)
    with sleeping(pair.engine):
        yield from _slept(pair, None)


def _slept(pair: Pair, free_bytes: Callable[[], int] | None) -> Iterator[Finding]:
    from common import weights

    pair.reloaded(pair.published(0))
    before = _written(pair.engine)
    free = free_bytes() if free_bytes else 0
    pair.engine.rest()
    if free_bytes:
        freed, wanted = free_bytes() - free, CACHE["kv_cache_memory_bytes"]
        text = f"{freed / 2**30:.2f} GiB of a cache of {wanted / 2**30:.2f} GiB"
        yield judged("sleep", "memory freed", freed >= _FREED * wanted, text, freed=freed, cache=wanted)
    same = _written(pair.engine) == before
    yield judged("sleep", "written after it", same, "the same tokens" if same else "other tokens than before")
    pair.engine.rest()
    pair.policy.disturb()
    found = pair.reloaded(pair.published(1))
    text = f"proven in {found.prove_s:.2f} s, canary RMS {found.canary_rms:.2g}"
    yield judged("sleep", "new weights while it sleeps", not found.unproven, text, rms=found.canary_rms)
    weights.remove_versions(pair.folder)


def _written(engine: Any) -> list[int]:
    """Greedy, so that nothing but weights and prompt decides."""
    from sampler.completions import SamplingParams

    engine.submit("prompt", _PROMPT, SamplingParams(0.0, _TOKENS, 1, None))
    while not (finished := engine.step()):
        pass
    [(_, [completion])] = finished
    return [int(token) for token in completion.token_ids]


if __name__ == "__main__":
    scratch, out = sys.argv[1:]
    write_down(_all(Path(scratch)), Path(out))
    exits.leave(exits.DONE)
