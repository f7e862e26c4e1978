"""What several samplers report, put together by hand, and which of them may work side by side."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.protocol_helpers import HELLO
from trainer.link.peers import Peer, Reports, describe, refusal

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
    ],
)  # fmt: skip
def test_the_reports_of_one_sampler(reported: list[Any], expected: dict[str, float]) -> None:
    reports = Reports()
    for process, stats in reported:
        reports.add("s0", process, stats)
    assert reports.drain({"s0"}) == (expected, 1)


def test_values_that_are_no_totals_are_the_mean_over_samplers() -> None:
    reports = Reports()
    reports.add("s0", OLD, {"sync/load_s": 9.0})
    reports.add("s0", OLD, {"sync/load_s": 1.0, "logged/words": 4.0})  # the newest counts
    reports.add("s1", OLD, {"sync/load_s": 2.0})
    assert reports.drain({"s0", "s1"}) == ({"logged/words": 4.0, "sync/load_s": 1.5}, 2)


@pytest.mark.parametrize(
    "name", ["dataset_fingerprint", "eval_fingerprint", "tokenizer_hash", "num_problems", "num_eval_problems"]
)
def test_a_sampler_must_have_the_data_of_the_first(name: str) -> None:
    other = replace(HELLO, pid=2, **{name: "other"})
    assert refusal(other, HELLO, needs_ref_logprobs=False) is not None


@pytest.mark.parametrize("needs_ref", [True, False])
def test_a_sampler_must_score_the_reference_if_the_trainer_needs_it(needs_ref: bool) -> None:
    assert refusal(replace(HELLO, scores_reference=needs_ref), HELLO, needs_ref) is None
    _, reason = refusal(replace(HELLO, scores_reference=not needs_ref), HELLO, needs_ref) or ("", "")
    assert ("trainer wants them without" in reason) != needs_ref
    assert "give both the same reference.on and algorithm.beta" in reason


@pytest.mark.parametrize(
    ("changes", "works", "state"),
    [
        ({"phase": "sampling"}, {}, "heard 4 s ago (sampling: normal)"),
        ({"heard_at": 0.0}, {}, "heard 9 s ago (silent)"),
        ({"lost": True}, {}, "(lost)"),
        ({"phase": "idle"}, {"s0": "group 7"}, "(idle, and its work is group 7)"),
        ({"phase": "idle"}, {"s1": "group 7"}, "(idle: normal)"),
        ({"phase": "idle"}, {}, "(idle, and no sampler has work)"),
    ],
)
def test_what_a_sampler_does_is_told_in_words(changes: dict[str, Any], works: dict[str, str], state: str) -> None:
    peer = Peer(**{"hello": HELLO, "heard_at": 5.0, "progressed_at": 5.0} | changes)
    assert state in describe({"s0": peer}, 9.0, works)
