"""Reloads an announced version into an engine, and proves that the engine uses it.

verify (manifest digest, files, tensors, finite?) → weights.load → the engine's checksums → canary
└──── a failure here keeps the old weights ──────┘   └────── a failure here ends the process ───────┘
└─ fetch.py, in a thread while the engine decodes┘   └──── the engine is idle, and stands still ────┘
                                                           (or has sequences: in_flight.py)

The checksums are those that the trainer took of its own memory (model/checksum.py), so they prove the whole way from
its parameters to the engine's, bit by bit: weights that are stale, swapped or half loaded are refused however little
the learning rate has changed them. The canary proves what checksums cannot: that both compute the same with them.
"""

import base64
import math
import shutil
import time
import traceback
from collections.abc import Collection

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
from sampler.engine.fetch import Fetched, Fetcher, fetch

# Bounds of the canary's differences: RMS, largest. float32: 1e-6 and 1e-5 are normal, TF32 in attention has 5e-4 and
# 2e-3. bfloat16: RMS 0.03 to 0.04, and good engines have single outliers: the largest is only shown. A mixture's
# tokens that lie between two experts go to either: up to two in ten, off by 0.2 to 0.9 (bf16, 8 experts); the nearest
# three quarters have the RMS of other models.
_CANARY_BOUNDS = {"float32": (2.5e-4, 1e-3), "bfloat16": (0.15, math.inf)}
_NARROW_BOUND = 0.01  # largest difference of an engine that has fewer bits in places, as vLLM in xIELU (Apertus)


def reload(
    engine: Engine, published: Published, config: Config, fetcher: Fetcher | None = None
) -> dict[str, float]:
    """Loads a published version. Raises BadWeights (old weights untouched), or Retryable (the engine is unusable).

    For version 0 it raises UserError in place of Retryable. Returns its figures by their metrics (docs/metrics.md).
    """
    start = time.monotonic()
    fetched = fetcher.finish(published) if fetcher else fetch(published, config)
    fetched_s = time.monotonic()
    try:
        expected = expected_tensors(fetched, config)
        proof = engine.weights.load(fetched.folder, expected, fetched.tensors, published.version)
        loaded_s = time.monotonic()
        if proof.wrong:
            more = f" and {len(proof.wrong) - 3} more" if len(proof.wrong) > 3 else ""
            wrong, version = f"{'; '.join(proof.wrong[:3])}{more}", published.version
            raise _refused(
                version, f"after its reload the engine does not hold version {version}: {wrong}"
            )
        theirs, ours = _canary_logprobs(engine, fetched.manifest)
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
    x = theirs - ours
    may_route_otherwise = (
        config.model.dtype == "bfloat16" and expert_counts(config.model) is not None
    )
    share = 0.75 if may_route_otherwise else 1.0
    warning = _require_canary(x, config.model.dtype, published.version, share, proof.narrow)
    if warning and engine.version is None:
        say(warning)
    engine.version = published.version
    failpoint("sampler.reloaded")
    now = time.monotonic()
    return {
        "sync/reload_s": fetched.seconds + now - fetched_s,
        "sync/verify_s": fetched.seconds,
        "sync/stall_s": now - start,
        "sync/load_s": loaded_s - fetched_s - proof.seconds,
        "sync/prove_s": proof.seconds,
        "sync/unproven_tensors": len(proof.unproven),
        "sync/canary_s": now - loaded_s,
        "sync/canary_rms": _rms(x),
        "sync/canary_max_diff": _largest(x),
        "mismatch/canary/mean_abs_prob_diff": float(np.abs(np.exp(theirs) - np.exp(ours)).mean()),
        "mismatch/canary/mean_exp_abs_log_ratio": float(np.exp(np.abs(x)).mean()),
        "mismatch/canary/k3": float((np.exp(x) - x - 1).mean()),
    }


def expected_tensors(fetched: Fetched, config: Config) -> dict[str, TensorInfo]:
    """Returns the tensors that the engine must hold. vLLM multiplies an adapter's B by alpha / r as it loads it."""
    scale = config.lora.scale / config.lora.r if config.lora.publishes_adapters else 1
    if scale == 1:
        return fetched.manifest.tensors
    from model.checksum import describe

    scaled = {
        name: describe(t * scale) for name, t in fetched.tensors.items() if ".lora_B." in name
    }
    return fetched.manifest.tensors | scaled


def _require_canary(
    x: NDArray[np.float64],
    dtype: str,
    version: int,
    share: float = 1.0,
    narrow: Collection[str] = (),
) -> str:
    """Returns a warning if log-probs differ by more than the bounds, but for a known reason and by little, else "".

    x: differences of log-probs. share: fraction of tokens, the nearest ones, whose RMS is bounded. narrow: the engine's
    tensors that have fewer bits than the model's. Raises UserError or Retryable for larger differences.
    """
    nearest = np.sort(np.abs(x))[: math.ceil(share * len(x))]
    rms, largest = _rms(nearest), _largest(x)
    rms_bound, bound = _CANARY_BOUNDS[dtype]
    if rms <= rms_bound and largest <= bound:
        return ""
    if not (narrow and largest <= _NARROW_BOUND):  # negated, so that NaN is refused
        limits = f"RMS {rms_bound:.3g}" + (f", at most {bound:.3g}" if bound < math.inf else "")
        raise _refused(
            version,
            f"canary: the engine's log-probs differ from the trainer's by RMS {rms:.3g}, at most {largest:.3g}, under "
            f"version {version}, more than {limits}",
        )
    more = f" and {len(narrow) - 1} more tensors" if len(narrow) > 1 else ""
    return (
        f"the engine's log-probs differ from the trainer's by at most {largest:.2g} under the same weights, for vLLM "
        f"has {min(narrow)}{more} in fewer bits than {dtype}; the run goes on, up to {_NARROW_BOUND:g}"
    )


def _refused(version: int, why: str) -> UserError | Retryable:
    """Returns the error of a refused version; a UserError for 0, the model as given, which would fail again."""
    return permanent_error(why) if version == 0 else Retryable(why)


def _rms(x: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _largest(x: NDArray[np.float64]) -> float:
    """Returns max |x|; unlike max(), it is NaN if any x is NaN."""
    return float(np.abs(x).max())


def _canary_logprobs(
    engine: Engine, manifest: Manifest
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the log-probs of all the canary's tokens: the trainer's and the engine's."""
    canary, images = manifest.canary, []
    if canary.image_png:
        times, rows, columns = canary.grid_thw
        images = [EncodedImage(base64.b64decode(canary.image_png), (times, rows, columns))]
    scores = engine.score(canary.token_ids, images)
    ours = [score[canary.prompt_length - 1 :] for score in scores]
    assert [len(o) for o in ours] == [len(t) for t in canary.logprobs], (
        "the canary's log-probs do not fit its tokens"
    )
    return np.concatenate(canary.logprobs).astype(np.float64), np.concatenate(ours).astype(
        np.float64
    )
