"""Both ends of the link in one process: real threads, ledger and frames around groups made by hand."""

import contextlib
import dataclasses
import itertools
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from common.config import Config
from common.errors import Interrupted, PeerEnded, Retryable, UserError
from common.types import EvalFailure, EvalRequest, EvalResult, Failure, Group, Tombstone
from common.wire import channel, wire
from sampler.link import Link
from tests.support.memory_transport import TRAINER
from tests.support.protocol_helpers import (
    HELLO,
    LIMITS,
    MemoryLink,
    changed,
    hurried_config,
    make_eval_result,
    make_group,
    make_rollout,
    published,
    receive,
    train,
)
from tests.support.speed import limit, until
from trainer.link.evaluation import problems_per_chunk
from trainer.link.inbox import Inbox
from trainer.link.peers import Peer

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryLink]:
    for config in hurried_config(monkeypatch):
        yield MemoryLink(config)


def counted(inbox: Inbox, *reasons: str) -> int:
    return sum(inbox.state.counters[f"refused/{reason}"] for reason in reasons)


def useless(_: int, version: int) -> Group:
    """A group that nobody asked for: this sampler never delivers."""
    return make_group(60, version)


def stuck(until_set: threading.Event, make: Callable[..., Any] = make_group) -> Callable[..., Any]:
    """Makes what it is asked for once the event is set."""
    return lambda *asked: until_set.wait(limit(20)) and make(*asked)


class Doubling(Link):
    def _send(self, frames: list[bytes]) -> None:
        super()._send(frames)
        super()._send(frames)


class Lossy(Link):
    """Loses a third of the messages, whatever they are; by chance, for a loss in step with the beats is for ever."""

    chance = random.Random(1)

    def _send(self, frames: list[bytes]) -> None:
        if self.chance.random() > 1 / 3:
            super()._send(frames)


# ---- groups ------------------------------------------------------------------------------------------------


def test_groups_are_taken_in_order_whatever_the_order_of_sending(link: MemoryLink) -> None:
    with link.inbox() as inbox, link.sampler(order=lambda ids: sorted(ids, reverse=True)) as sampler:
        assert train(inbox, 10) == list(range(20))
        until(lambda: sampler.link.credit and sampler.link.credit.cursor == 18)
        assert not any(sampler.link.has_result(g) for g in range(18)), "what is trained may be forgotten"
    assert not [name for name in inbox.state.counters if name.startswith("refused")]


def test_nothing_is_produced_beyond_the_window(link: MemoryLink) -> None:
    with link.inbox() as inbox, link.sampler() as sampler:
        inbox.commit(0, published(0))
        receive(inbox, [0, 1, 2, 3])
        for _ in range(5):  # beats, each of which is answered with a credit
            heard_at = inbox.state.peers["s0"].heard_at
            until(lambda before=heard_at: inbox.state.peers["s0"].heard_at > before)
        assert sampler.produced == [0, 1, 2, 3]  # 2 groups a step, one step ahead


def test_duplicates_are_counted_and_never_trained_twice(link: MemoryLink) -> None:
    with link.inbox() as inbox, link.sampler(link_class=Doubling):
        assert train(inbox, 10) == list(range(20))
        until(lambda: counted(inbox, "duplicate", "trained") >= 20)
        inbox.commit(20, published(10), "v10", num_problems=3)
        until(lambda: counted(inbox, "eval_duplicate"))
        assert len(inbox.finish_eval()) == 1


def test_what_is_lost_on_the_way_is_sent_again(link: MemoryLink) -> None:
    with link.inbox() as inbox, link.sampler(link_class=Lossy) as sampler:
        for step in range(10):
            inbox.commit(2 * step, published(step), f"v{step}", num_problems=130)
            assert [g.group_id for g in receive(inbox, [2 * step, 2 * step + 1])] == [2 * step, 2 * step + 1]
            assert [r.chunk for r in inbox.finish_eval()] == [0, 1, 2]
        assert sampler.link.counters["resent"] > 0
        assert sampler.produced == list(range(len(sampler.produced))), "resent, not sampled again"


def test_of_a_lost_sampler_and_the_one_in_its_place_only_the_second_counts(
    link: MemoryLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first may have been shorter: which of the two is trained must not depend on that."""
    monkeypatch.setattr(channel, "LOST_AFTER_S", 60.0)
    first_goes_on = threading.Event()
    second_goes_on = threading.Event()

    def second_group(group_id: int, version: int) -> Group:
        return make_group(group_id, version, make_rollout((7, 8, 9)), make_rollout((7,)))

    with link.inbox() as inbox, link.sampler("first", make=stuck(first_goes_on)) as first:
        inbox.commit(0, published(0))
        until(lambda: first.produced == [0])
        with link.sampler("second", make=stuck(second_goes_on, second_group)) as second:
            until(lambda: "second" in inbox.state.peers)
            lose(inbox, "first")
            until(lambda: inbox.state.ledger.by_sampler() == {"second": [0, 1, 2, 3]})
            first_goes_on.set()
            until(lambda: counted(inbox, "not_leased") >= 1)
            second_goes_on.set()
            trained = receive(inbox, [0, 1, 2, 3])
            assert [len(group.rollouts[0].completion_ids) for group in trained] == [3, 3, 3, 3]
            until(lambda: first.link.credit.lease == [])
            assert inbox.drain_statistics().counters["redrawn"] == 4
    assert second.produced[:4] == [0, 1, 2, 3]


def test_what_a_killed_sampler_had_begun_is_drawn_again_and_counted_though_it_is_soon_back(link: MemoryLink) -> None:
    is_back = threading.Event()
    restarted = msgspec.structs.replace(HELLO, pid=HELLO.pid + 1)
    with link.inbox() as inbox:
        link.say("s0", HELLO, "", "")
        until(lambda: "s0" in inbox.state.peers)
        inbox.commit(0, published(0))
        until(lambda: inbox.state.ledger.by_sampler() == {"s0": [0, 1, 2, 3]})
        with link.sampler("s0", make=stuck(is_back), hello=restarted) as sampler:
            until(lambda: sampler.produced == [0])  # by a credit for its earlier process
            sampler.link.beat("sampling", 0, 0, {}, now=True)
            until(lambda: inbox.state.peers["s0"].hello.pid == restarted.pid)
            is_back.set()
            assert train(inbox, 2) == list(range(4))
            assert inbox.drain_statistics().counters["redrawn"] == 4


# ---- who may speak -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "incarnation", "name", "reason"),
    [
        ("run", "start-0", "s0", "other_incarnation"),
        ("another run", "start-1", "s0", "other_incarnation"),
        ("run", "start-1", "stranger", "unknown_sampler"),
    ],
)
def test_a_group_of_another_run_or_start_is_refused_and_counted(
    link: MemoryLink, run: str, incarnation: str, name: str, reason: str
) -> None:
    with link.inbox() as inbox, link.sampler(make=useless):
        inbox.commit(0, published(0))
        until(lambda: inbox.state.peers)
        link.say(name, make_group(0), run, incarnation)
        until(lambda: counted(inbox, reason) == 1)
        assert inbox.state.ledger.received == {}


OTHER_PROBLEM = make_eval_result(EvalRequest("v0", 0, (7,)), 0).samples
WITHOUT_SCORE = (dataclasses.replace(OTHER_PROBLEM[0], problem_index=0, rewards={}),)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (make_group(50), "not_admitted"),
        (wire.Credit(0, [], [], 0, "", "", 0), "unexpected"),
        (make_eval_result(EvalRequest("v9", 0, (0, 1, 2)), 0), "eval_unknown"),
        (make_eval_result(EvalRequest("v0", 9, (0, 1, 2)), 0), "eval_unknown"),
    ],
)
def test_what_nobody_awaits_is_counted_by_reason_and_all_goes_on(link: MemoryLink, message: Any, reason: str) -> None:
    may_end = threading.Event()
    with link.inbox() as inbox, link.sampler(make=stuck(may_end)):
        inbox.commit(0, published(0), "v0", num_problems=3)
        until(lambda: inbox.state.peers)
        link.say("s0", message)
        until(lambda: counted(inbox, reason) == 1)
        may_end.set()
        assert all(isinstance(g, Group) for g in receive(inbox, [0, 1, 2, 3]))
        assert [s.problem_index for s in inbox.finish_eval()[0].samples] == [0, 1, 2]


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (make_group(1, 7), "version: 7, the newest is 0"),
        (make_group(1, 0, make_rollout(), make_rollout((100,))), "token_id: 100…100 outside the vocabulary of 100"),
        (make_group(1, 0, make_rollout(), make_rollout(old_logprobs=np.full(2, np.nan, np.float32))), "logprob: not"),
        (make_group(1, 0, make_rollout(), make_rollout(reward=math.inf)), "reward: inf"),
        (make_group(1, 0, make_rollout(), make_rollout(())), "completion_length: 0 tokens"),
        (make_group(1, 0, make_rollout(), make_rollout(environment_s=math.nan)), "malformed: .* is no rollout"),
    ],
)
def test_a_group_that_cannot_be_trained_is_a_tombstone_with_its_row_at_once_and_counts_as_one(
    link: MemoryLink, group: Group, reason: str
) -> None:
    """It would be refused each time that it is sent, and sampler and trainer would wait for each other."""
    said = list[str]()
    make = lambda g, version: group if g == 1 else make_group(g, version)  # noqa: E731
    with link.inbox(say=said.append) as inbox, link.sampler(make=make):
        inbox.commit(0, published(0))
        [_, refused, *_] = receive(inbox, [0, 1, 2, 3])
        assert isinstance(refused, Tombstone)
        assert re.match(rf"row 1: .*{reason}", refused.reason)
        [received] = inbox.receive([1])
        assert wire.decode(received.frames)[1] == refused, "what is recorded and sent to other ranks is the tombstone"
        assert inbox.state.counters["tombstones"] == 1
    assert f"group 1 could not be produced: {refused.reason}" in said


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (make_eval_result(EvalRequest("v0", 0, (0, 1, 2)), 4), "eval_version"),
        (EvalResult("v0", 0, 0, ()), "eval_problems"),
        (EvalResult("v0", 0, 0, OTHER_PROBLEM), "eval_problems"),
        (EvalResult("v0", 0, 0, WITHOUT_SCORE, tuple(EvalFailure(i, "killed") for i in (1, 2))), "reward_funcs"),
    ],
)
def test_an_evaluation_of_no_use_fails_its_problems_at_once(link: MemoryLink, answer: EvalResult, reason: str) -> None:
    said = list[str]()
    with link.inbox(say=said.append) as inbox, link.sampler() as sampler:
        sampler.make_eval = lambda *_: answer
        inbox.commit(0, published(0), "v0", num_problems=3)
        [result] = inbox.finish_eval()
        assert [f.problem_index for f in result.failures] == [0, 1, 2]
    assert [line for line in said if "held-out problem 2 could not be scored" in line and "refused" in line]
    assert len([line for line in said if f"a message to the trainer is refused: {reason}" in line]) == 1


def test_half_a_surrogate_in_a_text_is_sent_as_a_question_mark(link: MemoryLink) -> None:
    with link.inbox() as inbox, link.sampler() as sampler:
        sampler.make = lambda g, v: make_group(g, v) if g else Tombstone(g, v, "KeyError: 'a\ud83d'")
        inbox.commit(0, published(0))
        assert receive(inbox, [0]) == [Tombstone(0, 0, "KeyError: 'a?'")]


def test_a_sampler_idle_beside_its_work_is_told_why_it_goes(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.link.socket_thread._IDLE_S", 0.1)
    said = list[str]()
    with link.inbox(say=said.append) as inbox, link.sampler(make=useless) as sampler:
        beat = sampler.link.beat
        sampler.link.beat = lambda *_, **__: beat("idle, no work assigned", 0, 0, {})  # type: ignore[method-assign]
        inbox.commit(0, published(0))
        until(lambda: sampler.ended)
        assert sampler.ended.exit_code == 75
    dismissed = r"s0 is sent away: it has been idle .*, and its work is group 0, group 1"
    assert any(re.search(dismissed, line) for line in said)


def test_a_group_before_the_first_credit_is_refused_and_stops_nothing(link: MemoryLink) -> None:
    with link.inbox() as inbox:
        link.say("early", HELLO, "", "")
        link.say("early", make_group(0))
        until(lambda: counted(inbox, "not_credited") == 1)
        lose(inbox, "early")
        with link.sampler():
            assert train(inbox, 2) == [0, 1, 2, 3]


def test_a_sampler_with_other_problems_is_sent_away_with_the_reason_and_the_first_goes_on(link: MemoryLink) -> None:
    other = msgspec.structs.replace(HELLO, dataset_fingerprint="other")
    with link.inbox() as inbox:
        with link.sampler("s0"):
            until(lambda: "s0" in inbox.state.peers)
            with link.sampler("s1", hello=other) as wrong:
                until(lambda: wrong.ended)
                assert wrong.ended.exit_code == 2
                assert "other differs from the first sampler's data" in str(wrong.ended)
            assert train(inbox, 3) == list(range(6))
        with inbox.state.changed:
            inbox.state.peers = {}  # as after "its work has not moved"
        with link.sampler("s0", hello=other) as again:
            until(lambda: again.ended is not None)
        assert inbox.state.peers == {}, "the only one may not come back with other problems either"


def test_a_trainer_waits_while_a_sampler_works_on_its_rows(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """300,000 rows, or as many pictures, take longer than channel.connect_timeout_s."""
    monkeypatch.setattr("sampler.link._SILENT_S", 0.0)
    link.config = changed(link.config, channel={"connect_timeout_s": 0.5})
    with link.inbox() as inbox:
        sampler, ended = link.bare(), threading.Event()

        def prepare() -> None:
            for _ in range(20):
                sampler.prepare("making prompts")
                time.sleep(0.1)
            sampler.beat("starting", 0, None, {}, now=True)
            ended.set()

        threading.Thread(target=prepare).start()
        assert inbox.wait_for_sampler() == HELLO and ended.wait(limit(5))
    with link.inbox() as inbox:
        sampler = link.bare("s1")
        sampler.prepare("making prompts")
        with pytest.raises(Retryable, match=r"for a sampler to connect; sampler s1 is making prompts \(1\);"):
            inbox.wait_for_sampler()


def test_a_flood_cannot_stop_credits(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """More messages than the thread can read: each read ends, so that samplers hear of their leases."""
    with link.inbox() as inbox, link.sampler() as sampler:
        until(lambda: "s0" in inbox.state.peers)
        poll = inbox.thread.transport.receive
        monkeypatch.setattr(inbox.thread.transport, "receive", lambda: poll() or [b"junk"])
        until(lambda: counted(inbox, "frame_count") > 1000)
        inbox.commit(0, published(0))
        receive(inbox, [0, 1, 2, 3])
        assert sampler.produced == [0, 1, 2, 3]
        monkeypatch.undo()


# ---- waiting -----------------------------------------------------------------------------------------------


def lose(inbox: Inbox, name: str) -> None:
    """As if the sampler was last heard longer ago than it may be silent."""
    with inbox.state.changed:
        inbox.state.peers[name].heard_at -= channel.LOST_AFTER_S


def test_take_gives_up_with_what_is_missing_and_who_was_heard(link: MemoryLink) -> None:
    logs = link.config.run.output_dir / "logs"
    logs.mkdir(parents=True)
    (logs / "sampler.log").write_text("vllm: out of memory\n")
    with link.inbox() as inbox, link.sampler(make=lambda g, v: make_group(g if g != 1 else 60, v)):
        inbox.commit(0, published(0))
        until(lambda: 0 in inbox.state.ledger.received and inbox.state.peers["s0"].phase == "sampling")
        inbox.config = changed(link.config, channel={"stall_timeout_s": 0.1})  # the thread keeps its own
        peer = r"sampler s0 heard \d+ s ago \(sampling: normal\)"
        said = rf"waited \d+ s for groups 0…1 \(have 1 of 2\); {peer}[\s\S]*vllm: out of memory"
        with pytest.raises(Retryable, match=said):
            receive(inbox, [0, 1])


def test_a_wait_ends_only_when_nothing_came_for_all_of_it(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at what is missing comes 1,000 s after the one before it; the limit is 1,800 s."""
    with link.inbox(say=lambda _: None) as inbox:
        inbox.config = changed(link.config, channel={"stall_timeout_s": 1800.0})  # of the wait alone
        looks = itertools.count()
        clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
        monkeypatch.setattr("trainer.link.inbox.time", clock)

        def missing(number: int) -> str:
            clock.now += 1000
            return f"{number} of 4" if number else ""

        inbox._wait(lambda: missing(max(0, 4 - next(looks))))
        assert next(looks) == 5
        with pytest.raises(Retryable, match=r"for 3 of 4"):
            inbox._wait(lambda: missing(3))


def test_a_wait_lasts_as_long_as_the_samplers_get_further(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look comes 1,000 s after the one before it; the limit is 1,800 s. Nothing arrives in 12,000 s."""
    with link.inbox(say=lambda _: None) as inbox:
        inbox.config = changed(link.config, channel={"stall_timeout_s": 1800.0})  # of the wait alone
        clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
        monkeypatch.setattr("trainer.link.inbox.time", clock)
        peer = Peer(HELLO, time.monotonic(), time.monotonic())
        inbox.state.peers = {"s0": peer}
        progress = itertools.chain(range(1, 11), itertools.cycle([4, 5, 6]))  # then it restarts and gets no further

        def missing() -> str:
            clock.now += 1000
            peer.progress = next(progress)
            return "4 of 4"

        with pytest.raises(Retryable, match="waited 12000 s for 4 of 4"):
            inbox._wait(missing)


def test_a_wait_lasts_as_long_as_a_sampler_that_was_restarted_gets_further(
    link: MemoryLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its earlier process had sampled a million tokens before the wait, which is no measure for the new one."""
    with link.inbox(say=lambda _: None) as inbox:
        inbox.config = changed(link.config, channel={"stall_timeout_s": 1800.0})  # of the wait alone
        clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
        monkeypatch.setattr("trainer.link.inbox.time", clock)
        old = Peer(HELLO, time.monotonic(), time.monotonic(), progress=1_000_000)
        new = Peer(msgspec.structs.replace(HELLO, pid=HELLO.pid + 1), time.monotonic(), time.monotonic())
        inbox.state.peers = {"s0": old}
        looks = itertools.count()

        def missing() -> str:
            clock.now += 1000
            new.progress = 100 * min(next(looks), 9)
            inbox.state.peers = {"s0": new if new.progress else old}
            return "4 of 4"

        with pytest.raises(Retryable, match="waited 12000 s for 4 of 4"):
            inbox._wait(missing)


def test_a_missing_sampler_is_awaited_aloud_until_a_deadline(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.link.inbox._SAY_EVERY_S", 0.05)
    said: list[str] = []
    link.config = changed(link.config, channel={"connect_timeout_s": 0.3})
    with link.inbox(say=said.append) as inbox:
        with pytest.raises(Retryable, match=r"a sampler to connect; no sampler on ipc://.*sampling.py.* running"):
            inbox.wait_for_sampler()
        with link.sampler():
            assert inbox.wait_for_sampler() == HELLO
    assert any("for a sampler to connect" in line for line in said)


def test_a_missing_trainer_is_waited_for_until_its_deadline_which_begins_with_the_first_hello(link: MemoryLink) -> None:
    bare = link.bare(channel={"connect_timeout_s": 0.05})
    time.sleep(0.1)  # vLLM starts; the trainer knows nothing of this sampler
    assert not bare.receive(0.0)
    bare.beat("starting", 0, None, {})
    with pytest.raises(Retryable, match=r"the trainer has not answered on ipc://.*training_worker\.py.*trainer\.log"):
        bare.receive(0.1)


def test_a_message_above_the_limit_is_refused_with_a_remedy(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Config, "max_message_bytes", 1 << 20)
    long = dataclasses.replace(OTHER_PROBLEM[0], completion="x" * (3 << 19))
    with pytest.raises(UserError, match=r"1\.5 MiB, the limit is 1; lower eval\.num_generations"):
        link.bare().send_eval(EvalResult("v0", 0, 0, (long,)))


# ---- loss and return ---------------------------------------------------------------------------------------


def test_the_work_of_a_lost_sampler_goes_to_the_other(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups and held-out problems."""
    said: list[str] = []
    monkeypatch.setattr(channel, "LOST_AFTER_S", 60.0)
    gone = threading.Event()
    with link.inbox(say=said.append) as inbox:
        link.say("silent", HELLO, "", "")
        until(lambda: "silent" in inbox.state.peers)
        with link.sampler("s0", make=stuck(gone)) as sampler:
            until(lambda: "s0" in inbox.state.peers)
            inbox.commit(0, published(0), "v0", num_problems=130)
            until(lambda: list(inbox.state.ledger.leases.values()).count("silent") == 2)
            lose(inbox, "silent")
            until(lambda: inbox.state.peers["silent"].lost)
            gone.set()
            assert len(inbox.finish_eval()) == 3
            assert train(inbox, 5) == list(range(10))  # half of the first four were leased to the silent one
            assert set(range(10)) <= set(sampler.produced)
            assert inbox.state.peers["silent"].lost
    lost = r"sampler silent lost: silent for \d+ s; its [34] unfinished groups are reassigned"  # 2, and chunks
    assert any(re.match(lost, line) for line in said)


def test_a_sampler_that_goes_frees_its_leases_at_once(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "LOST_AFTER_S", 30.0)
    with link.inbox() as inbox:
        with link.sampler("s1", make=useless) as leaving:
            inbox.commit(0, published(0))
            until(lambda: leaving.produced[:4] == [0, 1, 2, 3])
            leaving.leave("interrupted", 75)
        with link.sampler("s0"):
            assert train(inbox, 3) == list(range(6))


def test_what_an_earlier_start_of_the_trainer_still_says_is_ignored(link: MemoryLink) -> None:
    """And a credit that was overtaken on the way by a later one of the same start."""
    trainer, bare = link.network.end(TRAINER), link.bare()

    def hears(incarnation: str, message: wire.WireMessage) -> bool:
        trainer.send(wire.encode(wire.Envelope("run", incarnation, ""), message), to="s0")
        return bare.receive(timeout_s=limit(5))

    def credit(progress: int) -> wire.Credit:
        return wire.Credit(8 * progress, [], [], progress, "", "", progress)

    found = []
    for start, progress in (("1", 1), ("1", 2), ("1", 1), ("1", 2), ("2", 1), ("1", 3), ("2", 0), ("2", 1)):
        is_new = hears(start, credit(progress))
        assert bare.credit is not None
        found.append((is_new, bare.credit.version))
    assert found == [(True, 1), *[(False, 2)] * 3, (True, 1), *[(False, 1)] * 3]
    hears("1", wire.Bye("the end of start 1", 2))
    assert bare.counters == {"refused/outdated": 2, "refused/past_incarnation": 2}
    with pytest.raises(PeerEnded, match="the end of start 2"):
        hears("2", wire.Bye("the end of start 2", 0))


# ---- endings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (None, 0, "done"),
        (UserError("x"), 2, "the trainer ended: UserError: x"),
        (KeyboardInterrupt(), 130, "the trainer ended: KeyboardInterrupt: "),
        (ValueError("a bug"), 75, "the trainer ended: ValueError: a bug"),
    ],
)
def test_the_trainers_goodbye_has_a_code(link: MemoryLink, error: BaseException | None, code: int, reason: str) -> None:
    with link.sampler() as sampler:
        with contextlib.suppress(type(error or Retryable())), link.inbox() as inbox:
            inbox.commit(0, published(0))
            until(lambda: sampler.link.credit)
            if error:
                raise error
        until(lambda: sampler.ended)
        assert (sampler.ended.exit_code, str(sampler.ended)) == (code, reason)


def test_an_inbox_that_breaks_tells_both_sides(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    with link.sampler() as sampler, pytest.raises(ZeroDivisionError), link.inbox() as inbox:
        inbox.commit(0, published(0))
        until(lambda: sampler.link.credit)
        monkeypatch.setattr(inbox.thread, "_find_lost", lambda now: 1 // 0)
        until(lambda: sampler.ended)
        assert sampler.ended.exit_code == 75
        until(lambda: not inbox.thread.is_alive())
        inbox.commit(0, published(0))  # nobody reads it any more, and it waits for nobody
        receive(inbox, [90])


@pytest.mark.parametrize("says_hello", [True, False])
def test_a_samplers_user_error_ends_the_wait(link: MemoryLink, says_hello: bool) -> None:
    with link.inbox() as inbox:
        if says_hello:
            link.say("s0", HELLO, "", "")
        link.say("s0", wire.Bye("vllm refuses max_model_len", 2), "", "")
        with pytest.raises(UserError, match="sampler s0: vllm refuses max_model_len"):
            inbox.receive([0])


@pytest.mark.parametrize(("fraction", "allowed"), [(0.01, 3), (0.1, 10)])  # of 100 groups; three are always allowed
def test_tombstones_are_taken_like_groups_until_there_are_too_many(
    link: MemoryLink, monkeypatch: pytest.MonkeyPatch, fraction: float, allowed: int
) -> None:
    monkeypatch.setattr("common.wire.group_limits.FAILURES_ALLOWED", fraction)
    said, failing = list[str](), allowed

    def make(group_id: int, version: int) -> Group | Tombstone:
        return Tombstone(group_id, version, "killed") if group_id < failing else make_group(group_id, version)

    with link.inbox(say=said.append) as inbox, link.sampler(make=make):
        assert train(inbox, 8) == list(range(16))
        assert inbox.state.counters["tombstones"] == allowed
    assert "group 0 could not be produced: killed" in said
    failing += 1
    too_many = rf"{failing} groups could not be .* {fraction} of them.*: killed"
    with link.inbox() as inbox, link.sampler(make=make), pytest.raises(UserError, match=too_many):
        train(inbox, 8)


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_whose_rollouts_all_fail_for_long_ends_with_the_reason(link: MemoryLink, ends: bool) -> None:
    broken = Failure("error", "the server of the environment is down")

    def make(group_id: int, version: int) -> Group:
        group = make_group(group_id, version)
        is_broken = group_id < 20 and (ends or group_id != 12)  # one that works begins the count anew
        failure = broken if is_broken else None
        return replace(group, rollouts=tuple(replace(r, failure=failure) for r in group.rollouts))

    with link.inbox(limits=replace(LIMITS, max_turns=2)) as inbox, link.sampler(make=make):
        if not ends:
            assert train(inbox, 14) == list(range(28))
            return
        with pytest.raises(UserError, match=r"last 20 groups failed.*server of the environment is down"):
            train(inbox, 14)


# ---- evaluation --------------------------------------------------------------------------------------------


def test_an_evaluation_is_shared_in_chunks_and_comes_back_in_order(link: MemoryLink) -> None:
    with link.inbox() as inbox, link.sampler("s0"), link.sampler("s1"):
        until(lambda: len(inbox.state.peers) == 2)
        inbox.commit(0, published(0), "v0", num_problems=130)
        results = inbox.finish_eval()
        assert [r.chunk for r in results] == [0, 1, 2]  # 64 problems each
        assert [s.problem_index for r in results for s in r.samples] == list(range(130))
        assert inbox.finish_eval() == []


def test_chunks_are_so_small_that_their_texts_fit_a_message(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bytes a token x 32 answers of 1,024 tokens are half a MiB a problem: 2 in half of 2 MiB."""
    assert problems_per_chunk(link.config) == 64
    monkeypatch.setattr(Config, "max_message_bytes", 2 << 20)
    long = changed(link.config, sampler={"max_completion_length": 1024}, eval={"num_generations": 32})
    assert problems_per_chunk(long) == 2


def test_an_interrupt_ends_an_evaluation_for_good(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    with link.inbox() as inbox:
        inbox.commit(0, published(0), "v0", num_problems=3)
        monkeypatch.setattr("trainer.link.inbox.interrupted", lambda: True)
        with pytest.raises(Interrupted):
            inbox.finish_eval()
        assert inbox.finish_eval() == []


def test_samplers_are_idle_between_their_last_result_and_the_next_weights(link: MemoryLink) -> None:
    may_end = threading.Event()
    with link.inbox() as inbox, link.sampler() as sampler:
        sampler.make_eval = stuck(may_end, make_eval_result)
        until(lambda: inbox.state.peers)
        assert not inbox.samplers_are_idle()
        inbox.commit(0, published(0))
        until(inbox.samplers_are_idle)
        inbox.commit(2, published(1), "v1", num_problems=3)
        until(lambda: inbox.state.ledger.is_complete)
        assert not inbox.samplers_are_idle()  # it has the groups and still evaluates
        may_end.set()
        until(inbox.samplers_are_idle)


def failing(*problems: int) -> Callable[[EvalRequest, int], EvalResult]:
    """Answers every problem but these, whose rewards time out."""

    def make(request: EvalRequest, version: int) -> EvalResult:
        scored = tuple(i for i in request.problem_indexes if i not in problems)
        failures = tuple(EvalFailure(i, "killed") for i in request.problem_indexes if i in problems)
        whole = make_eval_result(dataclasses.replace(request, problem_indexes=scored), version)
        return msgspec.structs.replace(whole, failures=failures)

    return make


def test_held_out_problems_that_cannot_be_scored_are_left_out_until_there_are_too_many(link: MemoryLink) -> None:
    """1 % of 450 are 4.5."""
    said: list[str] = []
    with link.inbox(say=said.append) as inbox, link.sampler() as sampler:
        sampler.make_eval = failing(*range(62, 66))  # in two chunks
        for version in range(2):  # the failures of an earlier evaluation do not count in a later one
            inbox.commit(0, published(version), f"v{version}", num_problems=450)
            results = inbox.finish_eval()
            assert len([s for r in results for s in r.samples]) == 450 - 4
            assert [f.problem_index for r in results for f in r.failures] == [62, 63, 64, 65]
        assert "held-out problem 63 could not be scored: killed" in said
        sampler.make_eval = failing(*range(62, 67))
        inbox.commit(0, published(2), "v2", num_problems=450)
        with pytest.raises(UserError, match=r"5 held-out problems .* v2.*0\.01 of them.*killed"):
            inbox.finish_eval()


def test_what_samplers_report_is_put_together(link: MemoryLink) -> None:
    """How: test_peers.py. One that was started again is told from one that says hello twice."""
    said: list[str] = []
    with link.inbox(say=said.append) as inbox:
        link.say("s0", HELLO, "", "")
        for tokens in (9000.0, 9100.0):
            link.say("s0", wire.Beat("sampling", 1, 7, {"total/tokens": tokens}))
        link.say("stranger", make_group(0))  # the last to be read
        until(lambda: counted(inbox, "unknown_sampler"))
        assert inbox.drain_statistics().samplers == {"total/tokens": 100.0}
        assert inbox.drain_statistics().num_samplers == 1
        assert inbox.versions_in_use() == [7]
        lose(inbox, "s0")
        until(lambda: inbox.versions_in_use() == [])
        for pid in (1, 2):
            link.say("s0", msgspec.structs.replace(HELLO, pid=pid), "", "")
        until(lambda: "sampler s0 is back as pid 2" in said)
        assert "sampler s0 is back as pid 1" not in said
