"""(e) The engine starts, proves five versions of disturbed weights, and refuses another if a single number is stale.

Its cache also sleeps (sleep.py): on a GPU in an engine of its own, so that neither hides what the other shows.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import exits
from gpu_check.finding import Finding, judged, recorded, write_down
from gpu_check.running import RUN, run
from gpu_check.sleep import sleeping, slept

_RELOADS = 5
_ASLEEP = "asleep"  # in the place of a dtype: float32, and the cache sleeps
_LIFE = "life"
_VOCABULARY = 512  # tokens that a canary may hold: those of the tokenizer that all shapes share
_CACHE = {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.3}  # as beside a trainer: measured by nobody


def findings(on_gpu: bool, scratch: Path) -> Iterator[Finding]:
    """Engines one after the other, each in a process of its own: vLLM gives its memory back only with it."""
    engines = {"float32": "1m", "bfloat16": "qwen2.5-0.5b", _ASLEEP: "1m"} if on_gpu else {"float32": "1m"}
    for what, shape in engines.items():
        out = scratch / f"{what}.jsonl"
        problem = ""
        try:
            run([sys.executable, "-m", "gpu_check.reloads", shape, what, str(scratch), str(out)])
        except RuntimeError as error:
            problem = str(error)
        yield from recorded(out)
        if problem:
            yield Finding("reloads", f"{what}, came to its end", "fail", problem)


class Pair:
    """A trainer's weights and an engine that takes them, in one process."""

    def __init__(self, shape: str, dtype: str, scratch: Path, **vllm: Any) -> None:
        import torch

        from common import weights
        from sampler.engine import Engine
        from tools.benchmarks.handover import UntrainedPolicy, settings

        self.config = settings(shape, dtype, 0, scratch)
        assert self.config.run.output_dir == scratch / RUN, "or what a killed part leaves in memory would stay"
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            self.config = self.config.model_copy(update={"vllm": self.config.vllm | _CACHE | vllm})
        self.policy = UntrainedPolicy(self.config, "cuda" if on_gpu else "cpu")
        self.folder = weights.default_dir(self.config)
        self.engine = Engine(self.config, torch.cuda.device_count())
        self.newest = -1  # version that was reloaded

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


def _engine_findings(shape: str, what: str, scratch: Path) -> Iterator[Finding]:
    from common import weights

    begun = time.monotonic()
    if what == _ASLEEP:
        pair = Pair(shape, "float32", scratch, enable_sleep_mode=True)
        pair.reloaded(pair.published(0))
        yield from slept(pair, 1)
    else:
        pair = Pair(shape, what, scratch)
        started = time.monotonic() - begun
        yield Finding("reloads", f"{what}, engine start", "figure", f"{started:.0f} s", {"seconds": started})
        yield from _good(pair, what)
        if pair.engine.on_cpu:
            with sleeping(pair.engine):
                yield from slept(pair, _RELOADS)
        yield _stale(pair, what)
    weights.remove_versions(pair.folder)


def _good(pair: Pair, dtype: str) -> Iterator[Finding]:
    """A reload that fails raises, which is the end of this engine."""
    from sampler.reload import CanaryBounds

    seen = []
    for version in range(_RELOADS):
        pair.policy.disturb()
        seen.append(pair.reloaded(pair.published(version)))
    seconds = statistics.median(one.seconds for one in seen)
    text = f"{_RELOADS} of {_RELOADS}, {seconds:.2f} s each"
    yield judged("reloads", f"{dtype}, reloads", True, text, seconds=seconds)
    rms, largest = max(one.canary_rms for one in seen), max(one.canary_max_diff for one in seen)
    text = f"RMS {rms:.2g} nats, at most {largest:.2g}; refused above RMS {CanaryBounds.of(pair.config).rms:.2g}"
    yield judged("reloads", f"{dtype}, canary", True, text, rms=rms, largest=largest)
    unproven = seen[-1].unproven
    text = "; ".join(f"{name}: {why}" for name, why in unproven.items()) or "every published tensor, bit by bit"
    ok = pair.engine.on_cpu or not unproven  # a CPU's matrices are packed
    yield judged("reloads", f"{dtype}, compared", ok, text[:200], unproven=unproven)


def _stale(pair: Pair, dtype: str) -> Finding:
    """The engine loads the last version again, and one number of the next one differs by a hundredth of itself."""
    import torch

    from common import weights
    from common.errors import Retryable

    with torch.no_grad():
        next(pair.policy.model.parameters()).view(-1)[0].mul_(1.01)
    loader, before = pair.engine.weights, weights.version_dir(pair.folder, pair.newest, _LIFE)
    load = loader.load
    setattr(loader, "load", lambda _, expected, *__: load(before, expected))  # noqa: B010
    try:
        pair.reloaded(pair.published(pair.newest + 1))
    except Retryable as error:
        return judged("reloads", f"{dtype}, one stale number", True, f"refused: {error}"[:160])
    return judged("reloads", f"{dtype}, one stale number", False, "not noticed")


if __name__ == "__main__":
    shape, what, scratch, out = sys.argv[1:]
    write_down(_engine_findings(shape, what, Path(scratch)), Path(out))
    exits.leave(exits.DONE)
