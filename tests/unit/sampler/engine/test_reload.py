"""A reload that goes wrong: before the engine is touched it costs nothing, inside the engine it ends the process."""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import Config
from common.errors import Retryable, UserError
from common.files.weights import BadWeights, Canary, Published
from common.processes.certain_errors import raising_permanent_errors
from sampler.engine.engine_tensors import Proof
from sampler.engine.fetch import Fetcher, scratch_dir
from sampler.engine.reload import _require_canary, reload
from tests.support.protocol_helpers import make_config
from tests.support.speed import limit
from tests.support.versions import SHARDS, publish

CANARY = Canary(1, [[1, 2, 3]], [[-1.0, -1.0]])


class Engine:
    """Fails in `load`, or afterwards gives the canary another log-prob than the trainer's."""

    def __init__(self, error: Exception | None = None, score: float = -1.0, wrong: Sequence[str] = ()):
        self.error, self.canary_score, self.wrong = error, score, list(wrong)
        self.version: int | None = 7
        self.weights = self  # its own loader
        self.num_loads = 0

    def load(self, folder: Path, expected: Any, tensors: Any, version: int) -> Proof:
        self.num_loads += 1
        if self.error:
            raise self.error
        return Proof(set(expected or ()), {}, self.wrong, seconds=0.5)

    def score(self, sequences: Any, images: Any) -> Any:
        return [np.full(len(sequence) - 1, self.canary_score, np.float32) for sequence in sequences]


@pytest.fixture
def config(folder: Path) -> Config:
    return make_config(folder, model={"path": "m", "dtype": "float32"})


@pytest.fixture
def version(folder: Path) -> Published:
    """Version 8, whose trainer gave a log-prob of -1 to every token of its canary."""
    return publish(folder / "weights", 8, canary=CANARY)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Engine(RuntimeError("poisoned")), "the engine failed while loading version 8"),
        (Engine(MemoryError()), "the engine failed while loading version 8"),
        (Engine(score=-1.01), "canary: .* under version 8"),
        (Engine(score=float("nan")), "canary: .* under version 8"),
        (Engine(score=float("-inf")), "canary: .* under version 8"),
        # before anything is scored, which would say canary
        (Engine(score=-9.0, wrong=[f"layer {i}" for i in range(5)]), "does not hold version 8: .*layer 2 and 2 more"),
    ],
)
def test_what_goes_wrong_inside_the_engine_ends_the_process_with_75(
    config: Config, version: Published, engine: Engine, said: str
) -> None:
    with pytest.raises(Retryable, match=said):
        reload(engine, version, config)
    assert engine.version == 7, "nothing may be sampled as version 8"
    assert not scratch_dir(config).exists()


REPEATED = (KeyError((0, 64)), RuntimeError("mat1 and mat2 shapes cannot be multiplied"), NotImplementedError("CPU"))


@pytest.mark.parametrize(
    ("engine", "kind", "said"),
    [
        *((Engine(error), UserError, f"version 0: {type(error).__name__}: .*docs/model.md") for error in REPEATED),
        (Engine(score=-1.01), UserError, "canary: .* under version 0, .*docs/model.md"),
        (Engine(wrong=["a layer"]), UserError, "does not hold version 0: a layer.*The next start would end the same"),
        # what may be otherwise the next time
        (Engine(OSError("no such device")), Retryable, "while loading version 0"),
        (Engine(RuntimeError("NCCL error")), Retryable, "while loading version 0"),
        (Engine(ValueError("DefaultCPUAllocator: can't allocate memory")), Retryable, "while loading version 0"),
    ],
)
def test_version_0_that_does_not_load_is_said_once_where_the_next_start_would_end_the_same(
    config: Config, folder: Path, engine: Engine, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        reload(engine, publish(folder / "weights", 0, canary=CANARY), config)
    assert engine.version == 7


@pytest.mark.parametrize(
    ("dtype", "share", "distances", "is_refused"),
    [
        ("float32", 1.0, [9e-4] + [1e-5] * 55, False),
        ("float32", 1.0, [1.1e-3] + [0.0] * 55, True),
        ("float32", 1.0, [2.4e-4] * 56, False),
        ("float32", 1.0, [2.6e-4] * 56, True),  # TF32 gives 5e-4
        ("bfloat16", 1.0, [0.9] + [0.04] * 55, False),  # one token far off, as in good engines: RMS 0.13
        ("bfloat16", 1.0, [0.16] * 56, True),  # none far off, all wrong
        ("bfloat16", 0.75, [0.9] * 14 + [0.04] * 42, False),  # a quarter at another expert of a mixture
        ("bfloat16", 0.75, [0.16] * 56, True),
        ("bfloat16", 0.75, [0.9] * 21 + [0.04] * 35, True),
        ("bfloat16", 0.75, [float("nan")] + [0.0] * 55, True),
    ],
)
def test_the_canary_is_judged_by_the_rms_of_its_nearest_tokens_and_in_float32_by_its_largest_distance_too(
    dtype: str, share: float, distances: list[float], is_refused: bool
) -> None:
    with pytest.raises(Retryable, match="canary") if is_refused else contextlib.nullcontext():
        _require_canary(np.array(distances), dtype, 8, share)


def test_a_reload_measures_its_parts_and_how_engine_and_trainer_differ(config: Config, version: Published) -> None:
    found = reload(Engine(score=-1.0002), version, config)  # where the trainer has −1
    x = 0.0002
    assert found["sync/canary_max_diff"] == found["sync/canary_rms"] == pytest.approx(x, rel=1e-3)
    assert found["sync/prove_s"] == 0.5
    parts = [found[f"sync/{part}_s"] for part in ("verify", "load", "prove", "canary")]
    assert found["sync/reload_s"] == pytest.approx(sum(parts))
    assert found["mismatch/canary/mean_exp_abs_log_ratio"] == pytest.approx(math.exp(x), rel=1e-6)
    assert found["mismatch/canary/mean_abs_prob_diff"] == pytest.approx(math.exp(-1) - math.exp(-1.0002), rel=1e-3)
    assert found["mismatch/canary/k3"] == pytest.approx(math.exp(x) - x - 1, rel=1e-2)


def fetched(config: Config, version: Published) -> Fetcher:
    """With a fetch that has ended, well or not."""
    fetcher = Fetcher(config)
    assert not fetcher.has(version)
    fetcher.start(version)
    fetcher.start(version)  # each turn of the sampler's loop asks again
    fetcher._coming.exception(timeout=limit(20))
    assert fetcher.has(version) and not fetcher.has(Published(9, version.weights_dir, version.manifest_sha256))
    return fetcher


def test_a_fetched_version_is_used_at_once(config: Config, version: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher, engine = fetched(config, version), Engine()
    monkeypatch.setattr("sampler.engine.fetch.fetch", lambda *_: pytest.fail("fetched twice"))
    found = reload(engine, version, config, fetcher)
    assert engine.version == 8 and not fetcher.has(version)
    assert found["sync/reload_s"] >= found["sync/verify_s"] > 0
    assert found["sync/stall_s"] < found["sync/reload_s"], "nobody stood still for the fetch"
    assert not scratch_dir(config).exists()


def test_of_an_overtaken_version_nothing_is_left_or_used(config: Config, version: Published, folder: Path) -> None:
    newer = publish(folder / "weights", 9, canary=CANARY)
    engine, fetcher = Engine(), Fetcher(config)
    fetcher.start(version)
    fetcher.start(newer)
    for _ in range(2):
        reload(engine, newer, config, fetcher)
        assert engine.version == 9
        fetcher.start(version)  # and nobody takes it
    reload(engine, newer, config, fetcher)
    assert not scratch_dir(config).exists()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_bad_version_is_refused_when_it_is_wanted_before_the_engine_is_touched_and_tried_anew_then(
    config: Config, version: Published, ahead: bool
) -> None:
    shard = Path(version.weights_dir) / SHARDS[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    engine, fetcher = Engine(), fetched(config, version) if ahead else None
    with pytest.raises(BadWeights, match="bytes, the manifest says"):
        reload(engine, version, config, fetcher)
    assert (engine.num_loads, engine.version) == (0, 7)
    assert not scratch_dir(config).exists()
    shard.write_bytes(whole)
    reload(engine, version, config, fetcher)
    assert engine.version == 8


@pytest.mark.parametrize(
    ("largest", "narrow", "is_refused"),
    [(2e-4, {"a.beta"}, False), (0.009, {"a.beta", "a.eps"}, False), (0.011, {"a.beta"}, True), (0.009, set(), True)],
)
def test_fewer_bits_may_differ_by_a_hundredth_which_is_said(largest: float, narrow: set[str], is_refused: bool) -> None:
    with pytest.raises(Retryable, match="canary") if is_refused else contextlib.nullcontext():
        said = _require_canary(np.array([largest, 0.0]), "float32", 8, narrow=narrow)
        assert ("a.beta and 1 more tensors in fewer bits than float32" in said) is (len(narrow) == 2)
        assert bool(said) is (largest > 1e-3)
    if is_refused and narrow:
        with pytest.raises(Retryable):
            _require_canary(np.array([math.nan, 0.0]), "float32", 8, narrow=narrow)


def test_a_library_s_assertion_without_words_is_shown_by_its_line() -> None:
    said = r"AssertionError: `raise AssertionError\(words\)` in test_reload.py, line \d+\."
    for words in ("", ".", " \n"):
        with pytest.raises(UserError, match=said), raising_permanent_errors("vLLM does not start"):
            raise AssertionError(words)
