"""A sampler's speed, worked out by hand. One group costs the link 5 ms, whoever makes it."""

from __future__ import annotations

import pytest

from trainer.link.pace import Pace, seconds_per_group


def about(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


def test_a_new_sampler_is_as_fast_as_the_others_and_less_the_longer_it_delivers_nothing() -> None:
    pace = Pace()
    assert pace.speed(fellows_s=0.5, now=10.0) == about(2.0)
    pace.begin(10.0)
    assert pace.speed(fellows_s=0.5, now=11.5) == about(1 / (1.5 + 0.5))


def test_only_the_time_with_work_counts() -> None:
    pace = Pace()
    pace.begin(10.0)
    pace.deliver(11.0)
    pace.begin(11.5)  # it had work already
    pace.deliver(12.0)
    pace.end(12.0)
    assert pace.busy_until(100.0) == 2.0
    assert pace.speed(fellows_s=1.0, now=100.0) == about((2 + 1) / (2.0 + 2 * 0.005 + 1.0))
    pace.begin(100.0)
    assert (pace.silent_s(103.0), pace.busy_until(103.0)) == (3.0, 5.0)


def test_each_version_halves_what_was_known_before_it_and_one_without_work_keeps_it() -> None:
    pace = Pace(groups=8.0, busy_s=4.0)
    pace.halve(0.0)
    assert (pace.groups, pace.busy_s, pace.prior) == (8.0, 4.0, 1.0), "it had nothing to do"
    pace.begin(0.0)
    pace.deliver(2.0)
    pace.halve(2.0)  # its work goes on into the next version
    assert (pace.groups, pace.busy_until(2.0), pace.prior) == (4.5, 3.0, 0.5)
    pace.halve(4.0)
    assert (pace.groups, pace.busy_until(4.0), pace.prior) == (2.25, 2.5, 0.25)


def test_one_that_never_delivers_becomes_slower_with_every_version() -> None:
    pace, speeds = Pace(), []
    for version in range(4):
        pace.begin(2.0 * version)
        speeds.append(pace.speed(fellows_s=0.0, now=2.0 * version + 2.0))
        pace.end(2.0 * version + 2.0)
        pace.halve(2.0 * version + 2.0)
    assert speeds == pytest.approx([1 / 2, 0.5 / 3, 0.25 / 3.5, 0.125 / 3.75])


def test_who_is_silent_is_so_only_with_work() -> None:
    pace = Pace()
    assert pace.silent_s(50.0) == 0.0
    pace.begin(50.0)
    assert pace.silent_s(53.0) == 3.0
    pace.deliver(54.0)
    assert pace.silent_s(55.0) == 1.0


def test_the_seconds_of_a_group_are_those_of_all_that_delivered_together() -> None:
    fast, slow, new = Pace(groups=30.0, busy_s=10.0), Pace(groups=10.0, busy_s=10.0), Pace(busy_s=5.0)
    assert seconds_per_group([fast, slow, new], now=0.0) == about(20 / 40 + 0.005)
    assert seconds_per_group([new], now=0.0) == 1.0, "nobody has delivered: all are equal"
