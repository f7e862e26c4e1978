"""From an announced version to an engine that provably uses it.

verify (manifest digest, files, tensors) → copy while hashing → finite? → engine.load → canary
└──────── a failure here keeps the old weights ────────────┘   └ a failure here ends the process ┘
└──── `fetch`, in a thread while the engine decodes ───────┘   └ the engine is idle, and stands still ┘
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common import durable, weights
from common.config import Config
from common.errors import Retryable
from common.failpoints import failpoint
from common.weights import BadWeights, Manifest, Published
from model import lora

if TYPE_CHECKING:
    from sampler.engine import Engine


@dataclass(frozen=True)
class Reloaded:
    version: int
    seconds: float  # all of it
    verify_s: float  # of it, reading, hashing and checking files, before the engine is touched
    stall_s: float  # of it, what did not happen while the engine was decoding
    load_s: float  # of stall_s, the engine's own reload
    canary_s: float  # of stall_s, scoring the canary
    canary_max_diff: float  # max |log-prob of the engine − log-prob of the trainer|
    canary_mean_abs_prob_diff: float  # mean over the canary's tokens of |probability − probability|
    canary_mean_exp_abs_log_ratio: float  # and of exp |log-prob − log-prob|: 1 if engine and trainer agree
    canary_k3: float  # and of exp(x) − x − 1, x = log-prob of the trainer − log-prob of the engine


def canary_tolerance(config: Config) -> float:
    return config.weights.canary_tolerance or (1e-3 if config.model.dtype == "float32" else 0.5)


@dataclass(frozen=True)
class Fetched:
    """A version of which every byte was checked, as a copy of ours."""

    published: Published
    manifest: Manifest
    folder: Path
    seconds: float


def fetch(published: Published, config: Config) -> Fetched:
    """Copies and checks a published version. Raises BadWeights. Who gets it deletes its folder."""
    start = time.monotonic()
    failpoint("sampler.reloading")
    private = scratch_dir(config)
    try:
        manifest = weights.read_manifest(published)
        weights.copy_verified(published, manifest, private)
        _require_expected(private, manifest, config)
        _require_finite(private, manifest)
    except BaseException:
        shutil.rmtree(private, ignore_errors=True)
        raise
    return Fetched(published, manifest, private, time.monotonic() - start)


class Fetcher:
    """Fetches the next version while the engine still decodes. One at a time: there is one private folder."""

    def __init__(self, config: Config):
        self._config = config
        self._wanted: Published | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Fetched | BaseException | None = None

    def start(self, published: Published) -> None:
        """Begins to fetch it, unless it has begun already."""
        if published == self._wanted:
            return
        self._forget()
        self._wanted = published
        self._thread = threading.Thread(target=self._fetch, args=(published,), name="fetch", daemon=True)
        self._thread.start()

    def _fetch(self, published: Published) -> None:
        try:
            self._outcome = fetch(published, self._config)
        except BaseException as error:
            self._outcome = error

    def take(self, published: Published) -> Fetched:
        """The version, as far as it has come, or from its beginning. Raises BadWeights."""
        if published != self._wanted:
            self._forget()
            return fetch(published, self._config)
        outcome = self._finished()
        if isinstance(outcome, Fetched):
            return outcome
        assert outcome is not None, "a fetch ends with one or the other"
        raise outcome

    def _finished(self) -> Fetched | BaseException | None:
        if self._thread is not None:
            self._thread.join()
        outcome, self._thread, self._wanted, self._outcome = self._outcome, None, None, None
        return outcome

    def _forget(self) -> None:
        """The trainer was started again, or announced a newer version."""
        outcome = self._finished()
        if isinstance(outcome, Fetched):
            shutil.rmtree(outcome.folder, ignore_errors=True)


def reload(engine: Engine, published: Published, config: Config, fetcher: Fetcher | None = None) -> Reloaded:
    """Loads a published version. Raises BadWeights (old weights untouched) or Retryable (the engine is unusable)."""
    start = time.monotonic()
    fetched = fetcher.take(published) if fetcher else fetch(published, config)
    begun = time.monotonic()
    try:
        engine.load(fetched.folder)
        loaded = time.monotonic()
        theirs, ours = _canary_logprobs(engine, fetched.manifest)
    except Exception as error:
        raise Retryable(f"the engine failed while loading version {published.version}: {error!r}") from error
    finally:
        shutil.rmtree(fetched.folder, ignore_errors=True)
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
        seconds=fetched.seconds + now - begun,
        verify_s=fetched.seconds,
        stall_s=now - start,
        load_s=loaded - begun,
        canary_s=now - loaded,
        canary_max_diff=worst,
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
