"""The real engine while its weights change under sequences: every token keeps the log-prob of its own version."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Config
from common.files.weights import Published
from sampler.engine.completions import Completion, SamplingParams
from sampler.engine.engine import Engine
from sampler.engine.reload import reload
from tests.support.engines import PROMPT, finished
from tests.support.plain_policy import PlainPolicy

pytestmark = pytest.mark.timeout(300)

PROMPTS = {"a": PROMPT, "b": [7 + i % 50 for i in range(40)], "c": [3, 4, 5]}
LENGTH, TEMPERATURE = 40, 0.7


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    sampler = {"max_completion_length": LENGTH, "ignore_eos": True, "in_flight_updates": True}
    return {"sampler": sampler, "trainer": {"max_staleness": 1}, "vllm": {"max_num_seqs": 12}}


class Versions:
    """Publishes weights that differ by a seventh of their spread, and scores tokens under each of them."""

    def __init__(self, config: Config, folder: Path):
        self._policy, self._folder = PlainPolicy(Path(config.model.path)), folder
        self._held: dict[int, PlainPolicy] = {}

    def publish(self, number: int) -> Published:
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for p in self._policy.model.parameters():
                p.add_(0.15 * p.std() * torch.randn(p.shape, generator=generator))
        self._held[number] = copy.deepcopy(self._policy)
        return self._policy.publish(self._folder, number)

    def logprobs(self, prompt: list[int], completion: Completion) -> np.ndarray:
        """[C] of each token by the version that its span names, in one plain forward for each version."""
        ids, ends = completion.token_ids.tolist(), [start for start, _ in completion.version_spans[1:]] + [None]
        parts = [
            self._held[version].logprobs(prompt, ids, TEMPERATURE)[start:end]
            for (start, version), end in zip(completion.version_spans, ends, strict=True)
        ]
        return np.concatenate(parts)

    def error(self, prompt: list[int], completions: Sequence[Completion]) -> float:
        return max(float(np.abs(c.logprobs - self.logprobs(prompt, c)).max()) for c in completions)


@pytest.fixture
def versions(config: Config, tmp_path: Path) -> Versions:
    return Versions(config, tmp_path / "weights")


def submit(engine: Engine, names: Sequence[str], seed: int = 7, length: int = LENGTH) -> None:
    for name in names:
        engine.submit(name, PROMPTS[name], SamplingParams(TEMPERATURE, length, 4, seed))


def steps(engine: Engine, count: int) -> dict[Any, list[Completion]]:
    return dict(done for _ in range(count) for done in engine.step())


def test_two_updates_in_one_sequence_and_a_group_with_the_same_prompt_that_comes_between(
    engine: Engine, config: Config, versions: Versions, figure: Callable[[str, str], None]
) -> None:
    reload(engine, versions.publish(3), config)
    submit(engine, ["a"])
    steps(engine, 6)
    reload(engine, versions.publish(4), config)
    engine.submit("late", PROMPT, SamplingParams(TEMPERATURE, LENGTH, 4, 11))  # its blocks were cached under version 3
    steps(engine, 9)
    reload(engine, versions.publish(5), config)
    found = finished(engine)
    # a load steps the engine once, for its canary: 6 tokens of version 3; 1 + 9 of version 4
    assert {c.version_spans for c in found["a"]} == {((0, 3), (6, 4), (16, 5))}
    assert {c.version_spans for c in found["late"]} == {((0, 4), (9, 5))}
    error = max(versions.error(PROMPT, completions) for completions in found.values())
    figure(
        "R5", f"2 versions loaded under 8 running sequences: every token's log-prob its own version's to {error:.0e}"
    )
    assert error <= 1e-5


def test_what_waits_for_room_is_sampled_by_the_new_version_alone_and_the_canary_does_not_wait_behind_it(
    engine: Engine, config: Config, versions: Versions
) -> None:
    reload(engine, versions.publish(9), config)
    submit(engine, PROMPTS)  # 12 sequences: the engine is full
    steps(engine, 3)
    engine.submit("late", PROMPT, SamplingParams(TEMPERATURE, 8, 4, 1))
    before = engine.num_running
    reload(engine, versions.publish(10), config)
    assert engine.num_running == before == 4, "the canary was scored while all of them had still to go"
    found = finished(engine)
    assert {c.version_spans for c in found["late"]} == {((0, 10),)}
    prompts = {**PROMPTS, "late": PROMPT}
    assert max(versions.error(prompts[name], completions) for name, completions in found.items()) <= 1e-5


def test_a_sequence_that_ends_beside_the_canary_is_returned_by_the_next_step(
    engine: Engine, config: Config, versions: Versions
) -> None:
    reload(engine, versions.publish(11), config)
    submit(engine, ["a", "b"], length=6)
    assert steps(engine, 5) == {}
    reload(engine, versions.publish(12), config)
    assert engine.num_running == 2, "both are finished, and nobody has them yet"
    found = steps(engine, 1)
    assert sorted(found) == ["a", "b"] and engine.num_running == 0
    assert {c.version_spans for c in found["a"]} == {((0, 11), (5, 12))}
