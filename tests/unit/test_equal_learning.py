"""The arithmetic of tools/benchmarks/equal_learning.py."""

from __future__ import annotations

from tools.benchmarks.equal_learning import curve, outside


def test_a_curve_is_the_means_of_whole_windows_of_ten_steps() -> None:
    assert curve([1.0] * 10 + [2.0] * 5 + [4.0] * 5 + [9.0] * 7) == [1.0, 3.0]


def test_a_mean_within_the_band_is_outside_by_nothing_and_else_by_its_distance() -> None:
    band = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    # means 1.5 (within), 2.5 (0.5 above), 0.75 (0.25 below)
    assert outside([[1.0, 2.0, 0.5], [2.0, 3.0, 1.0]], band) == [0.0, 0.5, -0.25]
