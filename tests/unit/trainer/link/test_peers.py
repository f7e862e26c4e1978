"""What several samplers report, put together by hand, and which of them may work side by side."""

from typing import Any

import msgspec
import pytest

from tests.support.protocol_helpers import HELLO
from trainer.link.peers import Reports, refusal

OLD, NEW = (7, "first start"), (7, "second start")  # in a container every process has the same pid


def test_who_comes_or_goes_adds_what_it_did_and_nothing_else() -> None:
    """Counts are summed, seconds are the mean over samplers. Both have served a trainer before this one."""
    reports = Reports()

    def add(name: str, idle_s: float, tokens: float) -> None:
        reports.add(name, OLD, {"total/idle_s": idle_s, "total/tokens": tokens})

    add("s0", 517, 80_000)
    add("s1", 3, 500)
    assert reports.drain({"s0", "s1"}) == ({"total/idle_s": 0, "total/tokens": 0}, 2)
    add("s0", 523, 80_100)
    add("s1", 7, 540)
    assert reports.drain({"s0", "s1"}) == ({"total/idle_s": (6 + 4) / 2, "total/tokens": 100 + 40}, 2)
    assert reports.drain({"s0", "s1"}) == ({"total/idle_s": 0, "total/tokens": 0}, 2)
    add("s0", 525, 80_200)
    add("s1", 9, 550)  # its last report: it is lost
    assert reports.drain({"s0"}) == ({"total/idle_s": 2, "total/tokens": 110}, 2)
    add("s0", 527, 80_300)
    assert reports.drain({"s0"}) == ({"total/idle_s": 2, "total/tokens": 100}, 1)
    assert reports.drain(set()) == ({}, 0)


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        # started again, it counts from 0 and keeps what it did before in this step
        ([(OLD, {"total/a": 500.0}), (OLD, {"total/a": 530.0, "total/b": 3.0}), (NEW, {"total/a": 8.0})],
         {"total/a": 30.0 + 8.0, "total/b": 3.0}),
        # a report that was overtaken counts nothing twice
        ([(OLD, {"total/a": tokens}) for tokens in (10.0, 50.0, 30.0, 60.0)], {"total/a": 50.0}),
        # a count that appears later was 0 before
        ([(OLD, {}), (OLD, {"total/a": 2.0})], {"total/a": 2.0}),
        # what is no total: the newest
        ([(OLD, {"sync/load_s": 9.0}), (OLD, {"sync/load_s": 1.0, "logged/words": 4.0})],
         {"sync/load_s": 1.0, "logged/words": 4.0}),
    ],
)  # fmt: skip
def test_the_reports_of_one_sampler(reported: list[Any], expected: dict[str, float]) -> None:
    reports = Reports()
    for process, stats in reported:
        reports.add("s0", process, stats)
    assert reports.drain({"s0"}) == (expected, 1)


def test_values_that_are_no_totals_are_the_mean_over_samplers() -> None:
    reports = Reports()
    reports.add("s0", OLD, {"sync/load_s": 1.0, "logged/words": 4.0})
    reports.add("s1", OLD, {"sync/load_s": 2.0})
    assert reports.drain({"s0", "s1"}) == ({"logged/words": 4.0, "sync/load_s": 1.5}, 2)


@pytest.mark.parametrize(
    ("changes", "needs_ref", "name", "said"),
    [
        ({}, False, "", ""),
        ({"pid": 2, "incarnation": "later"}, False, "", ""),
        ({"scores_reference": True}, True, "", ""),
        ({"dataset_fingerprint": "other"}, False, "dataset_fingerprint", "other differs from the first sampler's data"),
        ({"eval_fingerprint": "other"}, False, "eval_fingerprint", "other differs from the first sampler's"),
        ({"tokenizer_hash": "words"}, False, "tokenizer_hash", "words differs from the first sampler's tokenizer"),
        ({"num_problems": 99}, False, "num_problems", "99 differs from the first sampler's 100"),
        ({"num_eval_problems": 8}, False, "num_eval_problems", "8 differs from the first sampler's 10"),
        ({"scores_reference": True}, False, "reference", "with reference log-probs and the trainer wants them without"),
        ({}, True, "reference", "without reference log-probs and the trainer wants them with"),
    ],
)
def test_a_sampler_must_agree_with_the_first(changes: dict[str, Any], needs_ref: bool, name: str, said: str) -> None:
    found_name, found = refusal(msgspec.structs.replace(HELLO, **changes), HELLO, needs_ref) or ("", "")
    assert found_name == name and said in found
