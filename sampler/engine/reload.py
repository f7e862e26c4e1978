"""Reloads an announced version into an engine, and proves that the engine uses it.

    verify ─► weights.load ─► the engine's checksums ─► canary
    └ a failure keeps         └ a failure ends the process ──┘
      the old weights

A version is verified by fetch.py, in a thread while the engine decodes: the manifest's digest, the
files, the tensors, and whether these are finite. While it is loaded, the engine either has nothing
to decode, or its sequences wait and go on with the new weights (in_flight.py).

The checksums are those that the trainer took of its own memory (model/checksum.py), so they prove
the whole way from its parameters to the engine's, bit by bit: weights that are stale, swapped or
half loaded are refused however little the learning rate has changed them. The canary proves what
checksums cannot: that both compute the same with them.
"""

import base64
import math
import shutil
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.config import Config
from common.errors import Retryable, UserError
from common.failpoints import failpoint
from common.files.weights import Manifest, Published, TensorInfo
from common.processes.certain_errors import permanent_error, would_repeat
from common.processes.exits import say
from common.types import EncodedImage
from model.files.folder import expert_counts
from sampler.engine.engine import Engine
from sampler.engine.engine_tensors import Proof
from sampler.engine.fetch import Fetched, Fetcher, fetch

# Bounds of the canary's differences: RMS, largest. In float32, 1e-6 and 1e-5 are normal, and TF32
# in attention has 5e-4 and 2e-3. In bfloat16, the RMS is 0.03 to 0.04, and good engines have single
# outliers, so the largest difference is only shown. A mixture's tokens that lie between two experts
# go to either: up to two in ten, off by 0.2 to 0.9 (bfloat16, 8 experts). The nearest three
# quarters have the RMS of other models.
_CANARY_BOUNDS = {"float32": (2.5e-4, 1e-3), "bfloat16": (0.15, math.inf)}
# largest difference of an engine that has fewer bits in some tensors, as vLLM in xIELU (Apertus)
_NARROW_BOUND = 0.01
_MOST_SHOWN = 3  # differences in a message


@dataclass(frozen=True)
class _Loaded:
    """What was found after a load."""

    proof: Proof
    loaded_s: float  # when the load and the comparison ended
    theirs: NDArray[np.float64]  # log-probs of the canary's tokens: the trainer's
    ours: NDArray[np.float64]  # the engine's


def reload(
    engine: Engine, published: Published, config: Config, fetcher: Fetcher | None = None
) -> dict[str, float]:
    """Loads a published version, and returns its figures by their metrics (docs/metrics.md).

    Raises BadWeights (the old weights are untouched), or Retryable (the engine is unusable). For
    version 0 it raises UserError in place of Retryable.
    """
    start = time.monotonic()
    fetched = fetcher.finish(published) if fetcher else fetch(published, config)
    fetched_s = time.monotonic()
    try:
        loaded = _load(engine, published.version, fetched, config)
    except (Retryable, UserError):
        raise
    except Exception as error:
        failed = f"the engine failed while loading version {published.version}"
        if published.version == 0 and would_repeat(error):
            traceback.print_exc()
            raise permanent_error(failed, error) from error
        raise Retryable(f"{failed}: {error!r}") from error
    finally:
        shutil.rmtree(fetched.folder, ignore_errors=True)
    differences = loaded.theirs - loaded.ours
    share = 1.0
    if config.model.dtype == "bfloat16" and expert_counts(config.model) is not None:
        share = 0.75  # the others may be routed otherwise
    dtype = config.model.dtype
    narrow = loaded.proof.narrow
    warning = _require_canary(differences, dtype, published.version, share, narrow)
    if warning and engine.version is None:
        say(warning)
    engine.version = published.version
    failpoint("sampler.reloaded")
    now = time.monotonic()
    seconds = {
        "sync/reload_s": fetched.seconds + now - fetched_s,
        "sync/verify_s": fetched.seconds,
        "sync/stall_s": now - start,
        "sync/load_s": loaded.loaded_s - fetched_s - loaded.proof.seconds,
        "sync/prove_s": loaded.proof.seconds,
        "sync/unproven_tensors": len(loaded.proof.unproven),
        "sync/canary_s": now - loaded.loaded_s,
    }
    return seconds | _canary_figures(loaded)


def _load(engine: Engine, version: int, fetched: Fetched, config: Config) -> _Loaded:
    """Loads a version, proves that the engine holds it, and scores the canary.

    Raises Retryable, or UserError for version 0, if the engine holds anything else.
    """
    expected = expected_tensors(fetched, config)
    proof = engine.weights.load(fetched.folder, expected, fetched.tensors, version)
    loaded_s = time.monotonic()
    if proof.wrong:
        wrong = "; ".join(proof.wrong[:_MOST_SHOWN])
        if len(proof.wrong) > _MOST_SHOWN:
            wrong += f" and {len(proof.wrong) - _MOST_SHOWN} more"
        raise _refused(
            version, f"after its reload the engine does not hold version {version}: {wrong}"
        )
    theirs, ours = _canary_logprobs(engine, fetched.manifest)
    return _Loaded(proof, loaded_s, theirs, ours)


def _canary_figures(loaded: _Loaded) -> dict[str, float]:
    x = loaded.theirs - loaded.ours
    probabilities = np.exp(loaded.theirs) - np.exp(loaded.ours)
    return {
        "sync/canary_rms": _rms(x),
        "sync/canary_max_diff": _largest(x),
        "mismatch/canary/mean_abs_prob_diff": float(np.abs(probabilities).mean()),
        "mismatch/canary/mean_exp_abs_log_ratio": float(np.exp(np.abs(x)).mean()),
        "mismatch/canary/k3": float((np.exp(x) - x - 1).mean()),
    }


def expected_tensors(fetched: Fetched, config: Config) -> dict[str, TensorInfo]:
    """Returns the tensors that the engine must hold.

    vLLM multiplies an adapter's B by alpha / r as it loads it.
    """
    tensors = fetched.manifest.tensors
    if not config.lora.publishes_adapters or config.lora.scale == config.lora.r:
        return tensors
    from model.checksum import describe

    scale = config.lora.scale / config.lora.r
    scaled = {}
    for name, tensor in fetched.tensors.items():
        if ".lora_B." in name:
            scaled[name] = describe(tensor * scale)
    return tensors | scaled


def _require_canary(
    x: NDArray[np.float64],
    dtype: str,
    version: int,
    share: float = 1.0,
    narrow: Collection[str] = (),
) -> str:
    """Returns a warning if log-probs differ, but for a known reason and by little, else "".

    x: differences of log-probs. share: the fraction of tokens, the nearest ones, whose RMS is
    bounded. narrow: the engine's tensors that have fewer bits than the model's.
    Raises UserError or Retryable for larger differences.
    """
    nearest = np.sort(np.abs(x))[: math.ceil(share * len(x))]
    rms = _rms(nearest)
    largest = _largest(x)
    rms_bound, bound = _CANARY_BOUNDS[dtype]
    if rms <= rms_bound and largest <= bound:
        return ""
    is_small = largest <= _NARROW_BOUND  # not the opposite, so that NaN is refused
    if not narrow or not is_small:
        limits = f"RMS {rms_bound:.3g}"
        if bound < math.inf:
            limits += f", at most {bound:.3g}"
        raise _refused(
            version,
            f"canary: the engine's log-probs differ from the trainer's by RMS {rms:.3g}, "
            f"at most {largest:.3g}, under version {version}, more than {limits}",
        )
    tensors = min(narrow)
    if len(narrow) > 1:
        tensors += f" and {len(narrow) - 1} more tensors"
    return (
        f"the engine's log-probs differ from the trainer's by at most {largest:.2g} under the same "
        f"weights, for vLLM has {tensors} in fewer bits than {dtype}; the run goes on, "
        f"up to {_NARROW_BOUND:g}"
    )


def _refused(version: int, why: str) -> UserError | Retryable:
    """Returns the error of a refused version.

    It is a UserError for version 0, the model as given, because that would fail again.
    """
    if version == 0:
        return permanent_error(why)
    return Retryable(why)


def _rms(x: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _largest(x: NDArray[np.float64]) -> float:
    """Returns max |x|; unlike max(), it is NaN if any x is NaN."""
    return float(np.abs(x).max())


def _canary_logprobs(
    engine: Engine, manifest: Manifest
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the log-probs of all the canary's tokens: the trainer's and the engine's."""
    canary = manifest.canary
    images = []
    if canary.image_png:
        times, rows, columns = canary.grid_thw
        images.append(EncodedImage(base64.b64decode(canary.image_png), (times, rows, columns)))
    ours = []
    for score in engine.score(canary.token_ids, images):
        ours.append(score[canary.prompt_length - 1 :])
    lengths = [len(logprobs) for logprobs in canary.logprobs]
    fits = [len(logprobs) for logprobs in ours] == lengths
    assert fits, "the canary's log-probs do not fit its tokens"
    return (
        np.concatenate(canary.logprobs).astype(np.float64),
        np.concatenate(ours).astype(np.float64),
    )
