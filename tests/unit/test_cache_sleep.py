"""vLLM's cache sleeps: what vLLM is asked for, and when."""

import re
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from common.errors import Retryable
from sampler.cache_sleep import CacheSleep


def test_finished_requests_are_stepped_away_before_the_cache_sleeps_once_and_it_wakes_once() -> None:
    llm = MagicMock(wake_up=MagicMock(return_value=True))
    cache = CacheSleep(llm)
    for act in (cache.wake, cache.rest, cache.rest, cache.wake, cache.wake):
        act()
    asleep = [call.sleep(level=0, mode="keep"), call.release_kv_cache_memory()]
    assert llm.mock_calls == [*[call.llm_engine.step()] * 4, *asleep, call.wake_up(tags=["kv_cache"])]


@pytest.mark.parametrize("waking", [{"side_effect": RuntimeError("CUDA out of memory")}, {"return_value": False}])
def test_a_cache_that_cannot_wake_ends_the_process_and_names_the_setting(waking: dict[str, Any]) -> None:
    cache = CacheSleep(MagicMock(wake_up=MagicMock(**waking)))
    cache.rest()
    with pytest.raises(Retryable, match=re.escape("set vllm.enable_sleep_mode=false")):
        cache.wake()
