"""From an announced version to an engine that provably uses it.

verify (manifest digest, files, tensors) → copy while hashing → finite? → engine.load → canary
└──────── a failure here keeps the old weights ────────────┘   └ a failure here ends the process ┘
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common import durable, lora, weights
from common.config import Config
from common.durable import failpoint
from common.exits import Retryable
from common.weights import BadWeights, Manifest, Published

if TYPE_CHECKING:
    from sampler.engine import Engine


@dataclass(frozen=True)
class Reloaded:
    version: int
    seconds: float  # the whole reload
    verify_s: float  # of it, reading, hashing and checking files, before the engine is touched
    stall_s: float  # the rest: loading them, and the canary
    canary_s: float  # of stall_s, scoring the canary
    canary_max_diff: float  # max |log-prob of the engine − log-prob of the trainer|
    canary_mean_abs_prob_diff: float  # mean over the canary's tokens of |probability − probability|
    canary_mean_exp_abs_log_ratio: float  # and of exp |log-prob − log-prob|: 1 if engine and trainer agree
    canary_k3: float  # and of exp(x) − x − 1, x = log-prob of the trainer − log-prob of the engine


def canary_tolerance(config: Config) -> float:
    return config.weights.canary_tolerance or (1e-3 if config.model.dtype == "float32" else 0.5)


def reload(engine: Engine, published: Published, config: Config) -> Reloaded:
    """Loads a published version. Raises BadWeights (old weights untouched) or Retryable (the engine is unusable)."""
    start = time.monotonic()
    failpoint("sampler.reloading")
    private = scratch_dir(config)
    try:
        manifest = weights.read_manifest(published)
        weights.copy_verified(published, manifest, private)
        _require_expected(private, manifest, config)
        _require_finite(private, manifest)
        stalled = time.monotonic()
        try:
            engine.load(private)
            loaded = time.monotonic()
            theirs, ours = _canary_logprobs(engine, manifest)
        except Exception as error:
            raise Retryable(f"the engine failed while loading version {published.version}: {error!r}") from error
    finally:
        shutil.rmtree(private, ignore_errors=True)
    x = theirs - ours
    worst = _largest(x)
    if not worst <= canary_tolerance(config):
        raise Retryable(
            f"canary: the engine's log-probs differ from the trainer's by {worst:.3g} under version "
            f"{published.version}, more than {canary_tolerance(config):.3g} (weights.canary_tolerance)"
        )
    engine.version = published.version
    failpoint("sampler.reloaded")
    now = time.monotonic()
    return Reloaded(
        published.version,
        now - start,
        stalled - start,
        now - stalled,
        now - loaded,
        worst,
        canary_mean_abs_prob_diff=float(np.abs(np.exp(theirs) - np.exp(ours)).mean()),
        canary_mean_exp_abs_log_ratio=float(np.exp(np.abs(x)).mean()),
        canary_k3=float((np.exp(x) - x - 1).mean()),
    )


def scratch_dir(config: Config) -> Path:
    """A folder of this process alone, in memory if there is any: the copy lives for one reload."""
    return _scratch_parent() / f"{_scratch_prefix(config)}{os.getpid()}"


def remove_stale_scratch(config: Config) -> None:
    """What samplers of this run left that were killed inside a reload."""
    for path in _scratch_parent().glob(f"{_scratch_prefix(config)}*"):
        if not Path("/proc", path.name.rsplit("-", 1)[-1]).exists():
            shutil.rmtree(path, ignore_errors=True)


def _scratch_prefix(config: Config) -> str:
    return f"{durable.run_tag(config.run.output_dir)}-reload-"


def _scratch_parent() -> Path:
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def _require_expected(folder: Path, manifest: Manifest, config: Config) -> None:
    """Adapters for an engine of adapters, whole weights for another: in the wrong place either would poison it."""
    if config.lora.publishes_adapters:
        lora.require_expected(folder, manifest.tensors, config)
    elif lora.SETTINGS in manifest.files:
        raise BadWeights(f"version {manifest.version} has adapters, and lora.r is 0 here: both sides need one config")


def _require_finite(folder: Path, manifest: Manifest) -> None:
    import torch
    from safetensors import safe_open

    for name in (name for name in manifest.files if name.endswith(".safetensors")):
        with safe_open(folder / name, framework="pt") as file:
            for tensor_name in file.keys():  # noqa: SIM118 - a safetensors handle is not a dict
                if not torch.isfinite(file.get_tensor(tensor_name)).all():
                    raise BadWeights(f"tensor {tensor_name} of version {manifest.version} is not finite")


def _largest(x: NDArray[np.float64]) -> float:
    """max |x|; unlike max(), NaN wherever a NaN is."""
    return float(np.abs(x).max())


def _canary_logprobs(engine: Engine, manifest: Manifest) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of all the canary's tokens: the trainer's log-probs and the engine's."""
    canary = manifest.canary
    ours = [score[canary.prompt_length - 1 :] for score in engine.score(canary.token_ids)]
    assert [len(o) for o in ours] == [len(t) for t in canary.logprobs], "the canary's log-probs do not fit its tokens"
    return np.concatenate(canary.logprobs).astype(np.float64), np.concatenate(ours).astype(np.float64)
