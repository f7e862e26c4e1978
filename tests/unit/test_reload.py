"""A reload that goes wrong: before the engine is touched it costs nothing, inside the engine it ends the process."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import Config
from common.errors import Retryable
from common.weights import BadWeights, Canary, Published
from sampler.fetch import Fetcher, scratch_dir
from sampler.proof import Proof
from sampler.reload import CanaryBounds, _require_canary, reload
from tests.support.protocol_helpers import make_config
from tests.support.speed import limit
from tests.support.versions import SHARDS, publish

CANARY = Canary(1, [[1, 2, 3]], [[-1.0, -1.0]])


class Engine:
    """Fails in `load`, or afterwards gives the canary another log-prob than the trainer's."""

    def __init__(self, error: Exception | None = None, score: float = -1.0):
        self.error, self.canary_score, self.wrong = error, score, list[str]()
        self.version: int | None = 7
        self.weights = self  # its own loader
        self.num_loads = 0

    def load(self, folder: Path, expected: Any, tensors: Any, version: int) -> Proof:
        self.num_loads += 1
        if self.error:
            raise self.error
        return Proof(set(expected or ()), {}, self.wrong)

    def score(self, sequences: Any) -> Any:
        return [np.full(len(sequence) - 1, self.canary_score, np.float32) for sequence in sequences]


@pytest.fixture
def config(folder: Path) -> Config:
    return make_config(folder, model={"path": "m", "dtype": "float32"})


@pytest.fixture
def version(folder: Path) -> Published:
    """Version 8, whose trainer gave a log-prob of -1 to every token of its canary."""
    return publish(folder / "weights", 8, canary=CANARY)


def test_a_good_version_is_used(config: Config, version: Published) -> None:
    engine = Engine()
    assert reload(engine, version, config).canary_max_diff == 0
    assert engine.version == 8
    assert not scratch_dir(config).exists()


@pytest.mark.parametrize("error", [RuntimeError("poisoned"), KeyError("lm_head.weight"), MemoryError()])
def test_an_exception_inside_the_engine_ends_the_process_with_75(
    config: Config, version: Published, error: Exception
) -> None:
    engine = Engine(error)
    with pytest.raises(Retryable, match="the engine failed while loading version 8"):
        reload(engine, version, config)
    assert engine.version == 7, "nothing may be sampled as version 8"
    assert not scratch_dir(config).exists()


@pytest.mark.parametrize("score", [-1.01, float("nan"), float("-inf")])
def test_an_engine_that_does_not_reproduce_the_canary_ends_the_process_with_75(
    config: Config, version: Published, score: float
) -> None:
    engine = Engine(score=score)
    with pytest.raises(Retryable, match=r"canary: the engine's log-probs differ .* under version 8"):
        reload(engine, version, config)
    assert engine.version == 7


def test_an_engine_that_holds_other_weights_ends_the_process_with_75_before_anything_is_scored(
    config: Config, version: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    engine.wrong = [f"the engine's layer {i} does not hold the published layer {i}" for i in range(5)]
    monkeypatch.setattr(engine, "score", lambda _: pytest.fail("scored"))
    with pytest.raises(Retryable, match=r"does not hold version 8: the engine's layer 0 .*layer 2 and 2 more"):
        reload(engine, version, config)
    assert engine.version == 7
    assert not scratch_dir(config).exists()


@pytest.mark.parametrize(
    ("dtype", "distances", "is_refused"),
    [
        ("bfloat16", [0.9] + [0.04] * 55, False),  # one token far off, as in good engines: RMS 0.13
        ("bfloat16", [0.16] * 56, True),  # none far off, all wrong
        ("float32", [9e-4] + [1e-5] * 55, False),
        ("float32", [1.1e-3] + [0.0] * 55, True),
        ("float32", [5e-4] * 56, True),  # what TF32 does
    ],
)
def test_the_bounds_tell_rounding_from_other_weights(
    folder: Path, dtype: str, distances: list[float], is_refused: bool
) -> None:
    bounds = CanaryBounds.of(make_config(folder, model={"path": "m", "dtype": dtype}))
    with pytest.raises(Retryable, match="canary") if is_refused else contextlib.nullcontext():
        _require_canary(np.array(distances), bounds, 8)


def test_the_canary_measures_what_engine_and_trainer_compute_differently(config: Config, version: Published) -> None:
    found = reload(Engine(score=-1.0002), version, config)  # where the trainer has −1
    x = 0.0002
    assert found.canary_max_diff == found.canary_rms == pytest.approx(x, rel=1e-3)
    assert found.canary_mean_exp_abs_log_ratio == pytest.approx(math.exp(x), rel=1e-6)
    assert found.canary_mean_abs_prob_diff == pytest.approx(math.exp(-1) - math.exp(-1.0002), rel=1e-3)
    assert found.canary_k3 == pytest.approx(math.exp(x) - x - 1, rel=1e-2)


def test_a_version_fetched_while_the_engine_decodes_is_used_without_another_look(
    config: Config, version: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = Fetcher(config)
    fetcher.start(version)
    fetcher.start(version)  # each turn of the sampler's loop asks again
    assert fetcher._thread is not None
    fetcher._thread.join(timeout=limit(20))
    monkeypatch.setattr("sampler.fetch.fetch", lambda *_: pytest.fail("fetched twice"))
    engine = Engine()
    found = reload(engine, version, config, fetcher)
    assert engine.version == 8
    assert found.seconds >= found.verify_s > 0
    assert found.stall_s < found.seconds, "nobody stood still for the fetch"
    assert not scratch_dir(config).exists()


def test_a_version_is_here_once_its_fetch_has_ended_well_or_not_and_until_it_is_taken(
    config: Config, version: Published
) -> None:
    fetcher = Fetcher(config)
    assert not fetcher.has(version)
    fetcher.start(version)
    assert fetcher._thread is not None
    fetcher._thread.join(timeout=limit(20))
    assert fetcher.has(version) and not fetcher.has(Published(9, version.weights_dir, version.manifest_sha256))
    reload(Engine(), version, config, fetcher)
    assert not fetcher.has(version)
    missing = Published(9, "/nowhere", "0" * 64)
    fetcher.start(missing)
    fetcher._thread.join(timeout=limit(20))
    assert fetcher.has(missing), "the loop hears why it could not be had, without waiting"


def test_a_version_that_was_overtaken_leaves_nothing_and_the_newer_one_is_used(
    config: Config, version: Published, folder: Path
) -> None:
    newer = publish(folder / "weights", 9, canary=CANARY)
    fetcher = Fetcher(config)
    fetcher.start(version)
    fetcher.start(newer)
    engine = Engine()
    assert reload(engine, newer, config, fetcher).version == engine.version == 9
    fetcher.start(version)
    assert reload(engine, newer, config, fetcher).version == 9
    assert not scratch_dir(config).exists()


def test_a_bad_version_fetched_ahead_is_refused_when_it_is_wanted_and_tried_anew_then(
    config: Config, version: Published
) -> None:
    shard = Path(version.weights_dir) / SHARDS[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    engine, fetcher = Engine(), Fetcher(config)
    fetcher.start(version)
    with pytest.raises(BadWeights, match="bytes, the manifest says"):
        reload(engine, version, config, fetcher)
    assert (engine.num_loads, engine.version) == (0, 7)
    shard.write_bytes(whole)
    assert reload(engine, version, config, fetcher).version == 8


def test_bad_files_are_found_before_the_engine_is_touched(config: Config, version: Published) -> None:
    shard = Path(version.weights_dir) / SHARDS[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    engine = Engine()
    with pytest.raises(BadWeights, match="bytes, the manifest says"):
        reload(engine, version, config)
    assert (engine.num_loads, engine.version) == (0, 7)
    assert not scratch_dir(config).exists()
