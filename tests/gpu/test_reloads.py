"""(e) The engine starts, proves five versions of disturbed weights, and refuses another if a single number is stale.

A hand-over is publishing, checks, loading and proof, by the code of both processes. 0.5B are 1 GB and 1.5B 3 GB.
Its cache also sleeps: on a GPU in an engine of its own, so that neither hides what the other shows. Every engine has a
process of its own, for vLLM gives its memory back only with it.
"""

import contextlib
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.resources.machine import GIB, shared_memory_bytes
from tests.gpu.conftest import Row, at_most
from tests.support.own_process import in_processes
from tests.support.sleeping import sleeping

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

_RELOADS = 5
_PARTS = ("publish", "verify", "load", "prove", "canary")
_CACHE = {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.3}  # as beside a trainer: measured by nobody
_FREED = 0.95  # of the cache's bytes


@pytest.mark.parametrize(("shape", "within_s"), [("1m", None), ("qwen2.5-0.5b", 0.4), ("qwen2.5-1.5b", 1.0)])
def test_disturbed_weights_are_handed_over_and_proven_and_one_stale_number_is_refused(
    shape: str, within_s: float | None, on_gpu: bool, row: Row
) -> None:
    if not on_gpu and shape != "1m":
        pytest.skip("needs a GPU")
    [(seconds, figures)] = in_processes(partial(_reloads, shape, "float32" if shape == "1m" else "bfloat16"))
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
    total = sum(seconds.values())
    row(f"{shape}, hand-over", f"{total:.2f} s: {parts}", *at_most(total, within_s))
    for name, value in figures.items():
        row(f"{shape}, {name}", value)


def test_a_cache_that_slept_writes_the_same_tokens_and_takes_new_weights(on_gpu: bool, folder: Path, row: Row) -> None:
    [freed] = in_processes(partial(_sleeps, folder))
    row("memory freed asleep", f"{freed / 2**30:.2f} GiB")
    assert not on_gpu or freed >= _FREED * _CACHE["kv_cache_memory_bytes"]


class Pair:
    """A trainer's weights and an engine that takes them, in one process."""

    def __init__(self, shape: str, dtype: str, scratch: Path, **vllm: Any) -> None:
        from sampler.engine.engine import Engine
        from tests.support.configs import config_in
        from tests.support.plain_policy import DevicePolicy
        from tools.benchmarks.cells import Cell, prepare

        self.scratch, model, on_gpu = scratch, prepare(Cell(shape)) / "model", torch.cuda.is_available()
        self.config = config_in(
            scratch,
            model={"path": str(model), "dtype": dtype},
            data={"max_prompt_length": 64},
            sampler={"num_generations": 8, "max_completion_length": 64},
            vllm={"max_model_len": 128} | (_CACHE | vllm if on_gpu else {}),
        )
        self.policy = DevicePolicy(model, dtype, "cuda" if on_gpu else "cpu")
        self.engine = Engine(self.config, torch.cuda.device_count())

    def published(self, version: int) -> Any:
        return self.policy.publish(self.scratch / "weights", version)

    def reloaded(self, version: int) -> Any:
        """What the engine says of other weights than before."""
        from common.files import weights
        from sampler.engine.reload import reload

        self.policy.disturb(version)
        start = time.monotonic()
        published = self.published(version)
        found = {"sync/publish_s": time.monotonic() - start} | reload(self.engine, published, self.config)
        weights.prune(self.scratch / "weights", [version], keep=1)
        return found


def _reloads(shape: str, dtype: str) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds and figures of the good reloads. Raises if one is refused, or the stale one is not."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if shared_memory_bytes() > 8 * GIB else None) as scratch:
        pair = Pair(shape, dtype, Path(scratch))
        seen = [pair.reloaded(version) for version in range(_RELOADS)]
        stale = _refusal_of_a_stale_number(pair)[:160]
    # A CPU's matrices are packed.
    assert pair.engine.on_cpu or seen[-1]["sync/unproven_tensors"] == 0, "every tensor is compared bit by bit"
    rms, largest = max(one["sync/canary_rms"] for one in seen), max(one["sync/canary_max_diff"] for one in seen)
    seconds = {name: statistics.median(one[f"sync/{name}_s"] for one in seen) for name in _PARTS}
    return seconds, {"canary": f"RMS {rms:.2g} nats, at most {largest:.2g}", "stale": stale}


def _refusal_of_a_stale_number(pair: Pair) -> str:
    """The engine loads the last version again, and one number of the next one differs by a hundredth of itself."""
    from common.errors import Retryable
    from common.files.weights import VersionName
    from sampler.engine.reload import reload
    from tests.support.engines import given_instead

    with torch.no_grad():
        next(pair.policy.model.parameters()).view(-1)[0].mul_(1.01)
    before = VersionName(pair.scratch / "weights", "run", "life", _RELOADS - 1).final
    given_instead(pair.engine, before, pytest.MonkeyPatch())
    with pytest.raises(Retryable) as refused:
        reload(pair.engine, pair.published(_RELOADS), pair.config)
    return str(refused.value)


def _sleeps(scratch: Path) -> int:
    """Bytes of GPU memory that were free while it slept."""
    from tests.support.engines import greedy

    on_gpu = torch.cuda.is_available()
    pair = Pair("1m", "float32", scratch, enable_sleep_mode=True)
    with contextlib.nullcontext() if on_gpu else sleeping(pair.engine):
        pair.reloaded(0)
        before, free = greedy(pair.engine), torch.cuda.mem_get_info()[0] if on_gpu else 0
        pair.engine.rest()
        freed = torch.cuda.mem_get_info()[0] - free if on_gpu else 0
        assert greedy(pair.engine) == before
        pair.engine.rest()
        found = pair.reloaded(1)
        assert pair.engine.on_cpu or found["sync/unproven_tensors"] == 0
        return freed
