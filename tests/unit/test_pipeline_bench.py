"""The arithmetic of tools/benchmarks/pipeline.py."""

from __future__ import annotations

from tools.benchmarks.pipeline import GROWTH, START, walls


def test_the_warm_up_and_the_last_step_of_a_run_do_not_count() -> None:
    """Lines at 0, 9, 10, 12, 15 and 99 s: two to warm up, 2 and 3 s measured, and the end of the run."""
    assert walls([0.0, 9.0, 10.0, 12.0, 15.0, 99.0], warmup=2) == [2.0, 3.0]


def test_every_size_that_grows_is_one_of_a_cell() -> None:
    for what, sizes in GROWTH.items():
        assert getattr(START, what) in sizes, "one point belongs to every line"
