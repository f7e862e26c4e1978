"""Both ends of the link in one process: real threads, ledger and frames around groups made by hand."""

import contextlib
import dataclasses
import itertools
import math
import random
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

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
from tests.support.raising import raising
from tests.support.speed import limit, until
from trainer.link.evaluation import problems_per_chunk
from trainer.link.inbox import Inbox
from trainer.link.peers import Peer

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryLink]:
    for config in hurried_config(monkeypatch):
        monkeypatch.setattr(channel, "LOST_AFTER_S", 60.0)
        yield MemoryLink(config)


@contextlib.contextmanager
def begun(link: MemoryLink, **options: Any) -> Iterator[Inbox]:
    """An inbox that has leased all there is to s0, for which the test speaks."""
    with link.inbox(**options) as inbox:
        link.say("s0", HELLO, "", "")
        inbox.commit(0, published(0), "v0", num_problems=3)
        until(lambda: inbox.state.ledger.by_sampler() == {"s0": [0, 1, 2, 3]})
        yield inbox


def refused(inbox: Inbox, reason: str) -> int:
    return inbox.state.counters[f"refused/{reason}"]


def lose(inbox: Inbox) -> None:
    """As if s0 was last heard longer ago than it may be silent."""
    with inbox.state.changed:
        inbox.state.peers["s0"].heard_at -= channel.LOST_AFTER_S
    until(lambda: inbox.state.peers["s0"].lost)


def goodbye_to(bare: Link) -> PeerEnded:
    with pytest.raises(PeerEnded) as ended:
        while True:
            bare.receive(0.1)
    return ended.value


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


def test_nothing_is_produced_beyond_the_window(link: MemoryLink) -> None:
    with link.inbox() as inbox, link.sampler() as sampler:
        inbox.commit(0, published(0))
        receive(inbox, [0, 1, 2, 3])
        for _ in range(5):  # beats, each of which is answered with a credit
            heard_at = inbox.state.peers["s0"].heard_at
            until(lambda before=heard_at: inbox.state.peers["s0"].heard_at > before)
        assert sampler.produced == [0, 1, 2, 3]  # 2 groups a step, one step ahead


def test_a_sampler_hears_of_its_work_before_the_next_beat(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "BEAT_S", 60.0)
    bare = link.bare()
    with begun(link) as inbox:
        inbox.commit(2, published(1))
        while bare.credit is None or bare.credit.cursor < 2:
            bare.receive(0.1)


def test_duplicates_are_counted_and_never_trained_twice(link: MemoryLink) -> None:
    """And the order of sending is not that of training."""
    with link.inbox() as inbox, link.sampler(link_class=Doubling, order=lambda ids: ids[::-1]) as sampler:
        assert train(inbox, 10) == list(range(20))
        until(lambda: refused(inbox, "duplicate") + refused(inbox, "trained") >= 20)
        inbox.commit(20, published(10), "v10", num_problems=3)
        until(lambda: refused(inbox, "eval_duplicate"))
        assert len(inbox.finish_eval()) == 1
        until(lambda: not any(sampler.link.has_result(g) for g in range(20)))  # what is trained is forgotten


def test_what_is_lost_on_the_way_is_sent_again(link: MemoryLink) -> None:
    with link.inbox() as inbox, link.sampler(link_class=Lossy) as sampler:
        for step in range(10):
            inbox.commit(2 * step, published(step), f"v{step}", num_problems=130)
            inbox.receive([2 * step, 2 * step + 1])
            assert [result.chunk for result in inbox.finish_eval()] == [0, 1, 2]
        assert sampler.link.counters["resent"] > 0
        assert sampler.produced == list(range(len(sampler.produced))), "resent, not sampled again"


def test_of_a_lost_sampler_and_the_one_in_its_place_only_the_second_counts(link: MemoryLink) -> None:
    """The first may have been shorter: which of the two is trained must not depend on that."""
    said: list[str] = []
    with begun(link, say=said.append) as inbox:
        lose(inbox)
        link.say("second", HELLO, "", "")
        until(lambda: inbox.state.ledger.by_sampler() == {"second": [0, 1, 2, 3]})
        for group_id in range(4):
            link.say("s0", make_group(group_id))
            longer = make_rollout((7, 8, 9))
            link.say("second", make_group(group_id, 0, longer, longer))
        trained = receive(inbox, [0, 1, 2, 3])
        assert [len(group.rollouts[0].completion_ids) for group in trained] == [3, 3, 3, 3]
        assert inbox.drain_statistics().counters["redrawn"] == 4
        assert refused(inbox, "not_leased") == 4
        assert inbox.state.evaluation.leases == {0: "second"}
    lost = r"sampler s0 lost: silent for 6\d s; its 5 unfinished groups are reassigned"  # and a chunk of problems
    assert any(re.match(lost, line) for line in said)


def test_what_a_killed_sampler_had_begun_is_drawn_again_and_counted_though_it_is_soon_back(link: MemoryLink) -> None:
    is_back = threading.Event()
    restarted = replace(HELLO, pid=HELLO.pid + 1)

    def make(group_id: int, version: int) -> Group:
        is_back.wait(limit(20))
        return make_group(group_id, version)

    with begun(link) as inbox, link.sampler("s0", make=make, hello=restarted) as sampler:
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
    with begun(link) as inbox:
        link.say(name, make_group(0), run, incarnation)
        until(lambda: refused(inbox, reason) == 1)
        assert inbox.state.ledger.received == {}


RIGHT = make_eval_result(EvalRequest("v0", 0, (0, 1, 2)), 0)
WITHOUT_SCORES = tuple(dataclasses.replace(sample, rewards={}) for sample in RIGHT.samples)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (make_group(50), "not_admitted"),
        (wire.Credit(0, [], [], 0, "", "", 0), "unexpected"),
        (replace(RIGHT, eval_id="v9"), "eval_unknown"),
        (replace(RIGHT, chunk=9), "eval_unknown"),
    ],
)
def test_what_nobody_awaits_is_counted_by_reason_and_all_goes_on(link: MemoryLink, message: Any, reason: str) -> None:
    with begun(link) as inbox:
        link.say("s0", message)
        until(lambda: refused(inbox, reason) == 1)
        link.say("s0", RIGHT)
        assert inbox.finish_eval() == [RIGHT]


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (make_group(1, 7), "version 7, the newest is 0"),
        (make_group(1, 0, make_rollout(), make_rollout(reward=math.inf)), "reward: inf"),
    ],
)
def test_a_group_that_cannot_be_trained_is_a_tombstone_with_its_row_at_once_and_counts_as_one(
    link: MemoryLink, group: Group, reason: str
) -> None:
    """It would be refused each time that it is sent, and sampler and trainer would wait for each other."""
    said: list[str] = []
    with begun(link, say=said.append) as inbox:
        link.say("s0", group)
        [one] = inbox.receive([1])
        assert isinstance(one.group, Tombstone)
        assert one.group.reason.startswith("row 1: ") and reason in one.group.reason
        assert wire.decode(one.frames)[1] == one.group, "what is recorded and sent to other ranks is the tombstone"
        assert inbox.state.counters["tombstones"] == 1
    assert f"group 1 could not be produced: {one.group.reason}" in said


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (replace(RIGHT, policy_version=4), "eval_version"),
        (replace(RIGHT, samples=()), "eval_problems"),
        (replace(RIGHT, failures=(EvalFailure(7, "of another chunk"),)), "eval_problems"),
        (replace(RIGHT, samples=WITHOUT_SCORES), "reward_funcs"),
    ],
)
def test_an_evaluation_of_no_use_fails_its_problems_at_once(link: MemoryLink, answer: EvalResult, reason: str) -> None:
    said: list[str] = []
    with begun(link, say=said.append) as inbox:
        link.say("s0", answer)
        [result] = inbox.finish_eval()
        assert [failure.problem_index for failure in result.failures] == [0, 1, 2]
    assert any("held-out problem 2 could not be scored" in line and reason in line for line in said)
    assert any("is refused" in line for line in said)


def test_half_a_surrogate_in_a_text_is_sent_as_a_question_mark(link: MemoryLink) -> None:
    with begun(link) as inbox:
        link.say("s0", Tombstone(0, 0, "KeyError: 'a\ud83d'"))
        assert receive(inbox, [0]) == [Tombstone(0, 0, "KeyError: 'a?'")]


def test_a_sampler_idle_beside_its_work_is_told_why_it_goes(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.link.socket_thread._IDLE_S", 0.1)
    bare = link.bare()
    with begun(link):
        link.say("s0", wire.Beat("idle, no work assigned", 0, 0, {}))
        ended = goodbye_to(bare)
    assert ended.exit_code == 75
    assert "its work is group 0, group 1, group 2, …" in str(ended)


def test_a_group_before_the_first_credit_is_refused_and_stops_nothing(link: MemoryLink) -> None:
    with link.inbox() as inbox:
        link.say("s0", HELLO, "", "")
        link.say("s0", make_group(0))
        until(lambda: refused(inbox, "not_credited") == 1)
        with link.sampler("s0"):
            assert train(inbox, 2) == [0, 1, 2, 3]


def test_a_sampler_with_other_problems_is_sent_away_with_the_reason_and_the_first_goes_on(link: MemoryLink) -> None:
    other = replace(HELLO, dataset_fingerprint="other")
    bare = link.bare("s1")
    with begun(link) as inbox:
        link.say("s1", other, "", "")
        ended = goodbye_to(bare)
        assert ended.exit_code == 2
        assert "dataset_fingerprint other differs from the first sampler's data" in str(ended)
        assert inbox.state.ledger.by_sampler() == {"s0": [0, 1, 2, 3]}
        link.say("s0", wire.Bye("interrupted", 75))
        link.say("s1", other, "", "")  # the only one may not come back with other problems either
        goodbye_to(bare)


def test_a_trainer_waits_while_a_sampler_works_on_its_rows(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """300,000 rows, or as many pictures, take longer than channel.connect_timeout_s."""
    monkeypatch.setattr("sampler.link._SILENT_S", 0.0)
    timeout_s = limit(0.5)
    link.config = changed(link.config, channel={"connect_timeout_s": timeout_s})
    sampler = link.bare()

    def prepare() -> None:
        for _ in range(20):
            sampler.prepare("making prompts")
            time.sleep(timeout_s / 5)
        sampler.beat("starting", 0, None, {}, now=True)

    with link.inbox() as inbox:
        threading.Thread(target=prepare).start()
        assert inbox.wait_for_sampler() == HELLO


def test_a_flood_cannot_stop_credits(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """More messages than the thread can read: each read ends, so that samplers hear of their leases."""
    with link.inbox() as inbox, link.sampler():
        poll = inbox.thread.transport.receive
        monkeypatch.setattr(inbox.thread.transport, "receive", lambda: poll() or [b"junk"])
        until(lambda: refused(inbox, "frame_count") > 1000)
        inbox.commit(0, published(0))
        inbox.receive([0, 1, 2, 3])


# ---- waiting -----------------------------------------------------------------------------------------------


def test_take_gives_up_with_what_is_missing_and_who_was_heard(link: MemoryLink) -> None:
    logs = link.config.run.output_dir / "logs"
    logs.mkdir(parents=True)
    (logs / "sampler.log").write_text("vllm: out of memory\n")
    with begun(link) as inbox:
        link.say("s0", make_group(0))
        until(lambda: 0 in inbox.state.ledger.received)
        inbox.config = changed(link.config, channel={"stall_timeout_s": 0.1})  # the thread keeps its own
        said = r"for groups 0…1 \(have 1 of 2\); sampler s0 heard \d+ s ago[\s\S]*vllm: out of memory"
        with pytest.raises(Retryable, match=said):
            inbox.receive([0, 1])


def test_a_wait_lasts_as_long_as_a_restarted_sampler_gets_further(
    link: MemoryLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the tenth look at the clock. Each comes 1,000 s after the one before it; the limit is 1,800 s.

    Its earlier process had sampled a million tokens before the wait, which is no measure for the new one.
    """
    inbox = link.inbox(say=lambda _: None)
    inbox.config = changed(link.config, channel={"stall_timeout_s": 1800.0})
    inbox.state.peers = {"s0": Peer(HELLO, 0.0, 0.0, progress=1_000_000)}
    looks = itertools.count()

    def monotonic() -> float:
        look = next(looks)
        if look > 1:
            progress = look if look <= 10 else look % 3 + 4
            inbox.state.peers = {"s0": Peer(replace(HELLO, pid=HELLO.pid + 1), 0.0, 0.0, progress)}
        return 1000.0 * look + 500

    monkeypatch.setattr("trainer.link.inbox.time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(inbox.state.changed, "wait", lambda timeout: None)
    with pytest.raises(Retryable, match="waited 12000 s"):
        inbox.receive([0])


def test_a_missing_sampler_is_awaited_aloud_until_a_deadline(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.link.inbox._SAY_EVERY_S", 0.0)
    said: list[str] = []
    link.config = changed(link.config, channel={"connect_timeout_s": 0.3})
    missing = r"a sampler to connect; no sampler on ipc://.*sampling.py.* running"
    with link.inbox(say=said.append) as inbox, pytest.raises(Retryable, match=missing):
        inbox.wait_for_sampler()
    assert any("for a sampler to connect" in line for line in said)


def test_a_missing_trainer_is_waited_for_until_its_deadline_which_begins_with_the_first_hello(link: MemoryLink) -> None:
    bare = link.bare(channel={"connect_timeout_s": 0.05})
    time.sleep(0.1)  # vLLM starts; the trainer knows nothing of this sampler
    assert not bare.receive(0.0)
    bare.beat("starting", 0, None, {})
    with pytest.raises(Retryable, match=r"training_worker\.py.*trainer\.log"):
        bare.receive(0.1)


def test_a_message_above_the_limit_is_refused_with_a_remedy(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Config, "max_message_bytes", 1 << 20)
    long = dataclasses.replace(RIGHT.samples[0], completion="x" * (3 << 19))
    with pytest.raises(UserError, match=r"1\.5 MiB, the limit is 1; lower eval\.num_generations"):
        link.bare().send_eval(replace(RIGHT, samples=(long,)))


# ---- loss and return ---------------------------------------------------------------------------------------


def test_a_sampler_that_goes_frees_its_leases_at_once(link: MemoryLink) -> None:
    with begun(link) as inbox:
        link.say("s0", wire.Bye("interrupted", 75))
        with link.sampler("s1"):
            assert train(inbox, 3) == list(range(6))


def test_what_an_earlier_start_of_the_trainer_still_says_is_ignored(link: MemoryLink) -> None:
    """And a credit that was overtaken on the way by a later one of the same start."""
    trainer = link.network.end(TRAINER)
    bare = link.bare()

    def hears(incarnation: str, message: wire.WireMessage) -> bool:
        trainer.send(wire.encode(wire.Envelope("run", incarnation, ""), message), to="s0")
        return bare.receive(timeout_s=limit(5))

    found = []
    for start, progress in [("1", 1), ("1", 2), ("1", 1), ("2", 1), ("1", 3), ("2", 0), ("2", 1)]:
        is_new = hears(start, wire.Credit(8 * progress, [], [], progress, "", "", progress))
        assert bare.credit is not None
        found.append((is_new, bare.credit.version))
    assert found == [(True, 1), (False, 2), (False, 2), (True, 1), *[(False, 1)] * 3]
    hears("1", wire.Bye("the end of start 1", 2))
    assert bare.counters == {"refused/outdated": 2, "refused/past_incarnation": 2}
    with pytest.raises(PeerEnded, match="the end of start 2"):
        hears("2", wire.Bye("the end of start 2", 0))


# ---- endings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "reason"), [(None, 0, "done"), (UserError("x"), 2, "the trainer ended: UserError: x")]
)
def test_the_trainers_goodbye_has_a_code(link: MemoryLink, error: BaseException | None, code: int, reason: str) -> None:
    bare = link.bare()
    with contextlib.suppress(UserError), begun(link):
        if error:
            raise error
    ended = goodbye_to(bare)
    assert (ended.exit_code, str(ended)) == (code, reason)


def test_an_inbox_that_breaks_tells_both_sides(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = link.bare()
    with pytest.raises(ZeroDivisionError), begun(link) as inbox:
        monkeypatch.setattr(inbox.thread.transport, "poll", raising(ZeroDivisionError()))
        assert goodbye_to(bare).exit_code == 75
        inbox.receive([90])


def test_a_samplers_user_error_ends_the_wait(link: MemoryLink) -> None:
    """It may come before the hello, if an engine refuses the settings."""
    with link.inbox() as inbox:
        link.say("s0", wire.Bye("vllm refuses max_model_len", 2), "", "")
        with pytest.raises(UserError, match="sampler s0: vllm refuses max_model_len"):
            inbox.receive([0])


def test_tombstones_are_taken_like_groups_until_there_are_too_many(link: MemoryLink) -> None:
    """1 % of 100 groups is one, but three are always allowed."""

    def make(group_id: int, version: int) -> Group | Tombstone:
        if group_id in (0, 1, 2, 18):
            return Tombstone(group_id, version, "killed")
        return make_group(group_id, version)

    with link.inbox() as inbox, link.sampler(make=make):
        assert train(inbox, 8) == list(range(16))
        assert inbox.state.counters["tombstones"] == 3
        inbox.commit(16, published(8))
        with pytest.raises(UserError, match=r"4 groups could not be .* 0\.01 of them.*: killed"):
            inbox.receive([16, 17, 18, 19])


def test_a_run_whose_rollouts_all_fail_for_long_ends_with_the_reason(link: MemoryLink) -> None:
    """Four batches of six groups in a row."""
    link.config = changed(link.config, trainer={"prompts_per_step": 6})

    def make(group_id: int, version: int) -> Group:
        failed = make_rollout(failure=Failure("error", "the server of the environment is down"))
        if group_id == 20:  # one rollout that works begins the count anew
            return make_group(group_id, version, failed, make_rollout())
        return make_group(group_id, version, failed, failed)

    with link.inbox(limits=dataclasses.replace(LIMITS, max_turns=2)) as inbox, link.sampler(make=make):
        for cursor in (0, 12, 24, 32):
            inbox.commit(cursor, published(0))
            inbox.receive(range(cursor, cursor + 12))
        inbox.commit(34, published(0))
        with pytest.raises(UserError, match=r"last 2[45] groups failed.*server of the environment is down"):
            inbox.receive(range(34, 46))


# ---- evaluation --------------------------------------------------------------------------------------------


def test_an_evaluation_is_shared_in_chunks_and_comes_back_in_order(link: MemoryLink) -> None:
    with link.inbox() as inbox, link.sampler("s0"), link.sampler("s1"):
        until(lambda: len(inbox.state.peers) == 2)
        inbox.commit(0, published(0), "v0", num_problems=130)
        until(lambda: len(inbox.state.evaluation.leases) == 3)
        assert set(inbox.state.evaluation.leases.values()) == {"s0", "s1"}
        results = inbox.finish_eval()
        assert [s.problem_index for result in results for s in result.samples] == list(range(130))


@pytest.mark.parametrize(("num_generations", "problems"), [(1, 64), (32, 2), (500, 1)])
def test_chunks_are_so_small_that_their_texts_fit_a_message(
    link: MemoryLink, monkeypatch: pytest.MonkeyPatch, num_generations: int, problems: int
) -> None:
    """16 bytes a token x 32 answers of 1,024 tokens are half a MiB a problem: 2 in half of 2 MiB."""
    monkeypatch.setattr(Config, "max_message_bytes", 2 << 20)
    sections = {"sampler": {"max_completion_length": 1024}, "eval": {"num_generations": num_generations}}
    assert problems_per_chunk(changed(link.config, **sections)) == problems


def test_an_interrupt_ends_an_evaluation_for_good(link: MemoryLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.link.inbox.interrupted", lambda: True)
    with begun(link) as inbox:
        with pytest.raises(Interrupted):
            inbox.finish_eval()
        assert inbox.finish_eval() == []


def test_held_out_problems_that_cannot_be_scored_are_left_out_until_there_are_too_many(link: MemoryLink) -> None:
    """1 % of 450 are 4.5."""
    said: list[str] = []
    failing = [62, 63, 64, 65]  # in two chunks

    def make(request: EvalRequest, version: int) -> EvalResult:
        whole = make_eval_result(request, version)
        scored = tuple(sample for sample in whole.samples if sample.problem_index not in failing)
        failures = tuple(EvalFailure(i, "killed") for i in failing if i in request.problem_indexes)
        return replace(whole, samples=scored, failures=failures)

    with link.inbox(say=said.append) as inbox, link.sampler() as sampler:
        sampler.make_eval = make
        for version in range(2):  # the failures of an earlier evaluation do not count in a later one
            inbox.commit(0, published(version), f"v{version}", num_problems=450)
            results = inbox.finish_eval()
            assert [f.problem_index for result in results for f in result.failures] == failing
        assert "held-out problem 63 could not be scored: killed" in said
        failing.append(66)
        inbox.commit(0, published(2), "v2", num_problems=450)
        with pytest.raises(UserError, match=r"5 held-out problems .* v2.*0\.01 of them.*killed"):
            inbox.finish_eval()


def test_what_samplers_report_is_put_together(link: MemoryLink) -> None:
    """How: test_peers.py."""
    with begun(link) as inbox:
        for tokens in (9000.0, 9100.0):
            link.say("s0", wire.Beat("sampling", 1, 7, {"total/tokens": tokens}))
        link.say("s0", HELLO, "", "")
        link.say("stranger", make_group(0))  # the last to be read
        until(lambda: refused(inbox, "unknown_sampler"))
        assert inbox.drain_statistics().samplers == {"total/tokens": 100.0}
        assert inbox.versions_in_use() == [7]
        lose(inbox)
        assert inbox.versions_in_use() == []
