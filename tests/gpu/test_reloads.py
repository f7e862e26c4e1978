"""(e) The engine starts, proves five versions of disturbed weights, and refuses another if a single number is stale.

Its cache also sleeps: on a GPU in an engine of its own, so that neither hides what the other shows. Every engine has a
process of its own, for vLLM gives its memory back only with it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_process import in_processes
from tests.support.sleeping import sleeping

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
Record = Callable[[str, object], None]

_RELOADS, _LIFE = 5, "life"
_VOCABULARY = 512  # tokens that a canary may hold: those of the tokenizer that all shapes share
_CACHE = {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.3}  # as beside a trainer: measured by nobody
_FREED = 0.95  # of the cache's bytes
_PROMPT, _TOKENS = list(range(3, 75)), 24


@pytest.mark.parametrize(("shape", "dtype"), [("1m", "float32"), ("qwen2.5-0.5b", "bfloat16")])
def test_disturbed_weights_are_proven_and_one_stale_number_is_refused(
    shape: str, dtype: str, on_gpu: bool, folder: Path, record_property: Record
) -> None:
    if not on_gpu and dtype == "bfloat16":
        pytest.skip("half a billion parameters need a GPU")
    [figures] = in_processes(_reloads, (shape, dtype, folder))
    for name, value in figures.items():
        record_property(name, value)


def test_a_cache_that_slept_writes_the_same_tokens_and_takes_new_weights(
    on_gpu: bool, folder: Path, record_property: Record
) -> None:
    [freed] = in_processes(_sleeps, (folder,))
    record_property("memory freed asleep", f"{freed / 2**30:.2f} GiB")
    assert not on_gpu or freed >= _FREED * _CACHE["kv_cache_memory_bytes"]


class Pair:
    """A trainer's weights and an engine that takes them, in one process."""

    def __init__(self, shape: str, dtype: str, scratch: Path, **vllm: Any) -> None:
        import torch

        from common import weights
        from sampler.engine import Engine
        from tools.benchmarks.handover import UntrainedPolicy, settings

        self.config = settings(shape, dtype, 0, scratch)
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            self.config = self.config.model_copy(update={"vllm": self.config.vllm | _CACHE | vllm})
        self.policy = UntrainedPolicy(self.config, "cuda" if on_gpu else "cpu")
        self.folder = weights.default_dir(self.config)
        self.engine = Engine(self.config, torch.cuda.device_count())
        self.newest = -1  # version that was reloaded

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        from common import weights

        weights.remove_versions(self.folder)

    def published(self, version: int) -> Any:
        """The policy's present weights, as a version."""
        from tools.benchmarks.handover import OneRank
        from trainer.save.write_version import write_version

        policy: Any = self.policy
        ranks: Any = OneRank()
        return write_version(policy, ranks, self.folder, "run", _LIFE, version, _VOCABULARY)

    def reloaded(self, version: Any) -> Any:
        from common import weights
        from sampler.reload import reload

        found = reload(self.engine, version, self.config)
        self.newest = version.version
        weights.prune(self.folder, [self.newest], keep=2)
        return found

    def written(self) -> list[int]:
        """Greedy, so that nothing but weights and prompt decides."""
        from sampler.completions import SamplingParams

        self.engine.submit("prompt", _PROMPT, SamplingParams(0.0, _TOKENS, 1, None))
        while not (finished := self.engine.step()):
            pass
        [(_, [completion])] = finished
        return [int(token) for token in completion.token_ids]


def _reloads(shape: str, dtype: str, scratch: Path) -> dict[str, str]:
    """Figures of the good reloads. Raises if one is refused, or the stale one is not."""
    begun = time.monotonic()
    with Pair(shape, dtype, scratch) as pair:
        started_s, seen = time.monotonic() - begun, []
        for version in range(_RELOADS):
            pair.policy.disturb()
            seen.append(pair.reloaded(pair.published(version)))
        # A CPU's matrices are packed.
        assert pair.engine.on_cpu or seen[-1].unproven == {}, "every published tensor is compared bit by bit"
        refused = _refusal_of_a_stale_number(pair)
    rms, largest = max(one.canary_rms for one in seen), max(one.canary_max_diff for one in seen)
    return {
        "engine start": f"{started_s:.0f} s",
        "reload": f"{statistics.median(one.seconds for one in seen):.2f} s",
        "canary": f"RMS {rms:.2g} nats, at most {largest:.2g}",
        "stale": refused[:160],
    }


def _refusal_of_a_stale_number(pair: Pair) -> str:
    """The engine loads the last version again, and one number of the next one differs by a hundredth of itself."""
    import torch

    from common import weights
    from common.errors import Retryable

    with torch.no_grad():
        next(pair.policy.model.parameters()).view(-1)[0].mul_(1.01)
    loader, before = pair.engine.weights, weights.version_dir(pair.folder, pair.newest, _LIFE)
    load = loader.load
    setattr(loader, "load", lambda _, expected, *__: load(before, expected))  # noqa: B010
    with pytest.raises(Retryable) as refused:
        pair.reloaded(pair.published(pair.newest + 1))
    return str(refused.value)


def _sleeps(scratch: Path) -> int:
    """Bytes of GPU memory that were free while it slept."""
    import torch

    on_gpu = torch.cuda.is_available()
    with Pair("1m", "float32", scratch, enable_sleep_mode=True) as pair, _may_sleep(pair.engine, on_gpu):
        pair.reloaded(pair.published(0))
        before, free = pair.written(), torch.cuda.mem_get_info()[0] if on_gpu else 0
        pair.engine.rest()
        freed = torch.cuda.mem_get_info()[0] - free if on_gpu else 0
        assert pair.written() == before
        pair.engine.rest()
        pair.policy.disturb()
        found = pair.reloaded(pair.published(1))
        assert pair.engine.on_cpu or found.unproven == {}
        return freed


def _may_sleep(engine: Any, on_gpu: bool) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if on_gpu else sleeping(engine)
