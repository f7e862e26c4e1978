"""vLLM's cache sleeps: what vLLM is asked for, and when."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import Retryable
from sampler.cache_sleep import CacheSleep


class FakeLLM:
    """Writes down what it is asked for. leftover: engine steps until the scheduler and its batches are empty."""

    def __init__(self, leftover: int = 0, problem: Exception | None = None, wakes: bool = True):
        self.asked: list[Any] = []
        self._leftover, self._problem, self._wakes = leftover, problem, wakes
        self.llm_engine = SimpleNamespace(step=self._step)

    def _step(self) -> list[Any]:
        self._leftover -= 1
        return []

    def sleep(self, level: int, mode: str) -> None:
        self.asked.append(("pause", level, mode))

    def release_kv_cache_memory(self) -> None:
        assert self._leftover <= 0, "requires a completed pause first"
        self.asked.append("release")

    def wake_up(self, tags: list[str]) -> bool:
        self.asked.append(("wake", *tags))
        if self._problem:
            raise self._problem
        return self._wakes


def test_what_is_left_of_finished_requests_is_stepped_away_before_the_cache_sleeps_once() -> None:
    llm = FakeLLM(leftover=3)
    cache = CacheSleep(llm)
    cache.wake()
    assert llm.asked == [], "it is awake"
    cache.rest()
    cache.rest()
    assert llm.asked == [("pause", 0, "keep"), "release"]
    cache.wake()
    cache.wake()
    assert llm.asked[2:] == [("wake", "kv_cache")]


@pytest.mark.parametrize(
    "llm", [FakeLLM(problem=RuntimeError("CUDA Error: out of memory")), FakeLLM(wakes=False)], ids=["memory", "asleep"]
)
def test_a_cache_that_cannot_wake_ends_the_process_and_names_the_setting(llm: FakeLLM) -> None:
    cache = CacheSleep(llm)
    cache.rest()
    with pytest.raises(Retryable, match=re.escape("set vllm.enable_sleep_mode=false")):
        cache.wake()
