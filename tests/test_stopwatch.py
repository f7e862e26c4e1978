"""Seconds of the head, counted with a clock that advances by one at every look."""

from __future__ import annotations

import itertools

import pytest
import torch

from model.stopwatch import Stopwatch

pytestmark = pytest.mark.fast


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
