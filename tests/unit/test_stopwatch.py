"""Seconds of the head, counted with a clock that advances by one at every look."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.stopwatch import Stopwatch
from trainer.loop import Trainer
from trainer.record.throughput import StepSeconds


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    looks = itertools.count()
    monkeypatch.setattr("model.stopwatch.time.perf_counter", lambda: float(next(looks)))
    return Stopwatch(torch.device("cpu"))


def test_times_add_up_until_they_are_taken(watch: Stopwatch) -> None:
    for _ in range(3):
        watch.start()
        watch.stop()
    assert watch.take() == 3.0
    assert watch.take() == 0.0


def test_a_stop_without_a_start_counts_nothing(watch: Stopwatch) -> None:
    watch.stop()
    assert watch.take() == 0.0


def test_a_backward_counts_between_the_two_tensors_only(watch: Stopwatch) -> None:
    x = torch.ones(3, requires_grad=True)
    first = 2 * x
    last = first.exp()
    watch.watch_backward(first, last)
    (3 * last).sum().backward()
    assert watch.take() == 1.0  # begun where the gradient of `last` was known, ended where that of `first` was


def test_every_rank_takes_the_seconds_of_each_step_also_those_that_record_nothing(watch: Stopwatch) -> None:
    """On a GPU they are events, which would grow without end."""
    rank: Any = SimpleNamespace(
        rank_zero=None, records=None, seconds=StepSeconds(), engine=SimpleNamespace(head_time=watch)
    )
    watch.start()
    watch.stop()
    Trainer.record(rank, None, None, {}, 1.0, 0.0)  # type: ignore[arg-type]
    assert watch.take() == 0.0
