"""What several samplers report, put together by hand: who comes or goes adds what it did and nothing else."""

from __future__ import annotations

from trainer.link.peers import Reports

OLD, NEW = (7, "first start"), (7, "second start")  # in a container every process has the same pid


def two_samplers() -> Reports:
    """Of two samplers that have served for a long time, when the trainer was started again."""
    reports = Reports()
    reports.add("s0", OLD, {"total/idle_s": 517.0, "total/completion_tokens": 80_000.0})
    reports.add("s1", OLD, {"total/idle_s": 3.0, "total/completion_tokens": 500.0})
    return reports


def test_what_samplers_did_before_this_start_of_the_trainer_does_not_count() -> None:
    assert two_samplers().take({"s0", "s1"}) == ({"total/completion_tokens": 0.0, "total/idle_s": 0.0}, 2)


def test_counts_are_summed_and_seconds_are_the_mean_over_samplers() -> None:
    reports = two_samplers()
    reports.add("s0", OLD, {"total/idle_s": 523.0, "total/completion_tokens": 80_100.0})
    reports.add("s1", OLD, {"total/idle_s": 7.0, "total/completion_tokens": 540.0})
    # 6 s and 4 s of a step; 100 and 40 tokens
    assert reports.take({"s0", "s1"}) == ({"total/completion_tokens": 140.0, "total/idle_s": 5.0}, 2)
    assert reports.take({"s0", "s1"}) == ({"total/completion_tokens": 0.0, "total/idle_s": 0.0}, 2)


def test_a_lost_sampler_counts_in_the_step_that_lost_it_and_then_no_more() -> None:
    reports = two_samplers()
    reports.take({"s0", "s1"})
    reports.add("s0", OLD, {"total/idle_s": 525.0, "total/completion_tokens": 80_200.0})
    reports.add("s1", OLD, {"total/idle_s": 5.0, "total/completion_tokens": 510.0})  # its last report
    assert reports.take({"s0"}) == ({"total/completion_tokens": 210.0, "total/idle_s": 5.0}, 2)
    reports.add("s0", OLD, {"total/idle_s": 527.0, "total/completion_tokens": 80_300.0})
    assert reports.take({"s0"}) == ({"total/completion_tokens": 100.0, "total/idle_s": 2.0}, 1)
    assert reports.take(set()) == ({}, 0)


def test_a_sampler_that_was_started_again_counts_from_0_and_keeps_what_it_did_in_this_step() -> None:
    reports = Reports()
    reports.add("s0", OLD, {"total/completion_tokens": 500.0, "total/aborted": 1.0})
    reports.add("s0", OLD, {"total/completion_tokens": 530.0, "total/aborted": 3.0})
    reports.add("s0", NEW, {"total/completion_tokens": 8.0})
    assert reports.take({"s0"}) == ({"total/aborted": 2.0, "total/completion_tokens": 30.0 + 8.0}, 1)


def test_a_report_that_was_overtaken_counts_nothing_twice() -> None:
    reports = Reports()
    for tokens in (10.0, 50.0, 30.0, 60.0):
        reports.add("s0", OLD, {"total/completion_tokens": tokens})
    assert reports.take({"s0"}) == ({"total/completion_tokens": 50.0}, 1)


def test_a_count_that_appears_later_was_0_before() -> None:
    reports = Reports()
    reports.add("s0", OLD, {})
    reports.add("s0", OLD, {"total/reward_failures": 2.0})
    assert reports.take({"s0"}) == ({"total/reward_failures": 2.0}, 1)


def test_values_that_are_no_totals_are_the_mean_of_the_newest() -> None:
    reports = Reports()
    reports.add("s0", OLD, {"sync/load_s": 9.0})
    reports.add("s0", OLD, {"sync/load_s": 1.0, "logged/words": 4.0})
    reports.add("s1", OLD, {"sync/load_s": 2.0})
    assert reports.take({"s0", "s1"}) == ({"logged/words": 4.0, "sync/load_s": 1.5}, 2)
