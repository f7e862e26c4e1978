"""Both ends of the link in one process: real sockets, ledger and frames around groups made by hand."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from common import channel, wire
from common.address import endpoint
from common.config import Config
from common.errors import Interrupted, PeerEnded, Retryable, UserError
from common.types import EvalFailure, EvalRequest, EvalResult, Group, Tombstone
from sampler.link import Link
from tests.support.protocol_helpers import (
    HELLO,
    FakeSampler,
    TakenFromInbox,
    hurried_config,
    make_eval_result,
    make_group,
    make_inbox,
    make_rollout,
    published,
    take,
)
from tests.support.sockets import dealer, router, with_deadline
from tests.support.speed import limit, overdue, until
from trainer.algorithm.advantages import is_dead_group
from trainer.data.slots import Slots, fill
from trainer.link.inbox import Inbox

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    yield from hurried_config(monkeypatch)


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """The same but for these options."""
    update = {name: getattr(config, name).model_copy(update=options) for name, options in sections.items()}
    return config.model_copy(update=update)


def train(inbox: Inbox, num_steps: int, first_step: int = 0) -> list[int]:
    """The training loop's calls, two groups a step. Returns the ids in the order in which they were trained."""
    trained = []
    for step in range(first_step, first_step + num_steps):
        inbox.commit(2 * step, published(step))
        taken = take(inbox, [2 * step, 2 * step + 1])
        assert all(step - 1 <= group.policy_version <= step for group in taken), "older than max_staleness"
        trained += [group.group_id for group in taken]
    return trained


# ---- groups ------------------------------------------------------------------------------------------------


def backwards(ids: list[int]) -> list[int]:
    return sorted(ids, reverse=True)


def shuffled(ids: list[int]) -> list[int]:
    return random.Random(1).sample(ids, len(ids))


@pytest.mark.parametrize("order", [sorted, backwards, shuffled])
def test_groups_are_taken_in_order_whatever_the_order_of_sending(
    config: Config, order: Callable[[list[int]], list[int]]
) -> None:
    with make_inbox(config) as inbox, FakeSampler(config, order=order) as sampler:
        assert train(inbox, 10) == list(range(20))
        until(lambda: sampler.link.credit and sampler.link.credit.cursor == 18)
        assert not any(sampler.link.has_result(g) for g in range(18)), "what is trained may be forgotten"
    assert not [name for name in inbox.state.counters if name.startswith("refused")]


def test_nothing_is_produced_beyond_the_window(config: Config) -> None:
    with make_inbox(config) as inbox, FakeSampler(config) as sampler:
        inbox.commit(0, published(0))
        take(inbox, [0, 1, 2, 3])
        for _ in range(5):  # beats, each of which is answered with a credit
            heard_at = inbox.state.peers["s0"].heard_at
            until(lambda before=heard_at: inbox.state.peers["s0"].heard_at > before)
        assert sampler.produced == [0, 1, 2, 3]  # 2 groups a step, one step ahead


class Doubling(Link):
    def _send(self, frames: list[bytes]) -> None:
        super()._send(frames)
        super()._send(frames)


def test_duplicates_are_counted_and_never_trained_twice(config: Config) -> None:
    with make_inbox(config) as inbox, FakeSampler(config, link_class=Doubling):
        assert train(inbox, 10) == list(range(20))
        until(lambda: inbox.state.counters["refused/duplicate"] + inbox.state.counters["refused/trained"] >= 20)


class Lossy(Link):
    """Loses a third of the messages, whatever they are; by chance, for a loss in step with the beats is for ever."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.chance = random.Random(1)

    def _send(self, frames: list[bytes]) -> None:
        if self.chance.random() > 1 / 3:
            super()._send(frames)


def test_what_is_lost_on_the_way_is_sent_again(config: Config) -> None:
    with make_inbox(config) as inbox, FakeSampler(config, link_class=Lossy) as sampler:
        assert train(inbox, 10) == list(range(20))
        assert sampler.link.counters["resent"] > 0
        assert sampler.produced == list(range(len(sampler.produced))), "resent, not sampled again"


def test_two_samplers_share_the_window(config: Config) -> None:
    def make(group_id: int, version: int) -> Group:
        time.sleep(0.02)  # both are as fast
        return make_group(group_id, version)

    with make_inbox(config) as inbox, FakeSampler(config, "s0", make) as one, FakeSampler(config, "s1", make) as other:
        until(lambda: len(inbox.state.peers) == 2)
        assert train(inbox, 10) == list(range(20))
        assert set(range(20)) <= {*one.produced, *other.produced}
        assert min(len(one.produced), len(other.produced)) >= 4
        copies = len(one.produced) + len(other.produced) - len({*one.produced, *other.produced})
        assert copies <= 4, "one that stops for a moment may be helped, no more"


def test_a_lease_that_is_copied_ends_with_the_first_result_and_the_other_hears_of_it_at_once(config: Config) -> None:
    """Beats are 20 ms, so at once means by a credit of its own: the slow one is credited a second time in a version."""
    go_on = threading.Event()

    def stuck(group_id: int, version: int) -> Group:
        go_on.wait(limit(20))
        return make_group(group_id, version)

    with make_inbox(config) as inbox, FakeSampler(config, "stuck", stuck) as slow:
        until(lambda: "stuck" in inbox.state.peers)
        inbox.commit(0, published(0))
        until(lambda: slow.produced == [0])
        with FakeSampler(config, "s1") as fast:
            assert [g.group_id for g in take(inbox, [0, 1, 2, 3])] == [0, 1, 2, 3]
            assert set(fast.produced) == {0, 1, 2, 3}
            assert inbox.state.ledger.leases == {}
            go_on.set()
            until(lambda: inbox.state.counters["refused/duplicate"] >= 1)
            until(lambda: slow.link.credit.lease == [])
    assert slow.produced[0] == 0


# ---- dead groups, and weights inside a batch -------------------------------------------------------------------


def half_dead(group_id: int, version: int) -> Group | Tombstone:
    """Two of three groups are alive; the others are dead, every seventh of all is a tombstone."""
    if group_id % 7 == 6:
        return Tombstone(group_id, version, "killed")
    return make_group(group_id, version, make_rollout(), make_rollout(reward=float(group_id % 3 == 1)))


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("link_class", [Link, Lossy])
def test_dead_groups_are_refilled_within_the_version_and_every_group_is_taken_once_in_order(
    config: Config, monkeypatch: pytest.MonkeyPatch, max_staleness: int, link_class: type[Link]
) -> None:
    monkeypatch.setattr("trainer.link.socket_thread._FAILURES_ALLOWED", 1.0)
    algorithm = {"dead_groups": "resample", "max_resamples": 3}
    trainer = {"max_staleness": max_staleness, "prompts_per_step": 4}
    config = changed(config, algorithm=algorithm, trainer=trainer)
    taken: list[Group | Tombstone] = []
    with make_inbox(config, total=24) as inbox, FakeSampler(config, make=half_dead, link_class=link_class) as sampler:
        for step in range(6):
            inbox.commit(len(taken), published(step))
            batch = Slots(config, len(taken))
            fill(batch, 4, at_once=2, source=TakenFromInbox(inbox))
            trained = [e.group for e in batch.training() if isinstance(e.group, Group)]
            assert [is_dead_group(g, config) for g in trained] == [False] * 4
            assert all(step - max_staleness <= g.policy_version <= step for g in batch.groups)
            taken += batch.groups
        assert [g.group_id for g in taken] == list(range(len(taken)))
        assert len(taken) > 24, "the run became longer than its slots"
        assert inbox.state.ledger.total == len(taken)
    assert sampler.produced == list(range(len(taken))), "each once, and none beyond the end"


# ---- who may speak -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "incarnation"), [("run", "start-0"), ("another run", "start-1"), ("", "")])
def test_a_group_of_another_run_or_start_is_refused_and_counted(config: Config, run: str, incarnation: str) -> None:
    with make_inbox(config) as inbox, FakeSampler(config) as sampler:
        inbox.commit(0, published(0))
        take(inbox, [0, 1, 2, 3])
        with dealer(config, "stranger") as stranger:
            stranger.send_multipart(wire.encode(wire.Envelope(run, incarnation, "s0"), make_group(0)))
            until(lambda: inbox.state.counters["refused/other_incarnation"] == 1)
        assert sampler.is_alive()


def test_a_group_from_nobody_we_know_is_refused_and_counted(config: Config) -> None:
    with make_inbox(config) as inbox, dealer(config, "stranger") as stranger:
        inbox.commit(0, published(0))
        stranger.send_multipart(wire.encode(wire.Envelope("run", "start-1", "stranger"), make_group(0)))
        until(lambda: inbox.state.counters["refused/unknown_sampler"] == 1)
    assert inbox.state.ledger.held == {}


def test_a_group_before_the_first_credit_is_refused_and_stops_nothing(config: Config) -> None:
    with make_inbox(config) as inbox:
        with dealer(config, "early") as early:
            early.send_multipart(wire.encode(wire.Envelope("", "", "early"), HELLO))
            early.send_multipart(wire.encode(wire.Envelope("run", "start-1", "early"), make_group(0)))
            until(lambda: inbox.state.counters["refused/not_credited"] == 1)
        lose(inbox, "early")
        with FakeSampler(config):
            assert train(inbox, 2) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda g: make_group(g.group_id + 50), "not_admitted"),
        (lambda g: make_group(g.group_id, version=7), "version"),
        (lambda g: make_group(g.group_id, 0, make_rollout()), "group_size"),
        (lambda g: make_group(g.group_id, 0, make_rollout(), make_rollout((100,))), "token_id"),
    ],
)
def test_a_group_that_may_not_be_trained_is_counted_by_its_reason_and_the_rest_goes_on(
    config: Config, spoil: Callable[[Group], Group], reason: str
) -> None:
    def make(group_id: int, version: int) -> Group:
        group = make_group(group_id, version)
        return spoil(group) if group_id == 1 else group

    with make_inbox(config) as inbox, FakeSampler(config, make=make):
        inbox.commit(0, published(0))
        assert [g.group_id for g in take(inbox, [0, 2, 3])] == [0, 2, 3]
        until(lambda: inbox.state.counters[f"refused/{reason}"] >= 1)
        assert 1 not in inbox.state.ledger.held


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (wire.Hello(2, "other data", "tokenizer", 100, 10), "other data differs from the first sampler's data"),
        (wire.Hello(2, "data", "words", 100, 10), "tokenizer_hash words differs from the first sampler's tokenizer"),
        (wire.Hello(2, "data", "tokenizer", 99, 10), "num_problems 99 differs from the first sampler's 100"),
        (wire.Hello(2, "data", "tokenizer", 100, 8), "num_eval_problems 8 differs from the first sampler's 10"),
        (
            wire.Hello(2, "data", "tokenizer", 100, 10, True),
            "with reference log-probs and the trainer wants them without",
        ),
    ],
)
def test_a_sampler_with_other_problems_is_sent_away_with_the_reason_and_the_first_goes_on(
    config: Config, hello: wire.Hello, reason: str
) -> None:
    with make_inbox(config) as inbox, FakeSampler(config, "s0"):
        until(lambda: "s0" in inbox.state.peers)
        with FakeSampler(config, "s1", hello=hello) as wrong:
            until(lambda: wrong.ended)
            assert wrong.ended.exit_code == 2
            assert reason in str(wrong.ended)
        assert train(inbox, 3) == list(range(6))


def test_the_only_sampler_may_not_come_back_with_other_problems_after_it_was_sent_away(config: Config) -> None:
    with make_inbox(config) as inbox:
        with dealer(config) as first:
            first.send_multipart(wire.encode(wire.Envelope("", "", "s0"), HELLO))
            until(lambda: inbox.state.peers)
        with inbox.state.changed:
            inbox.state.peers = {}  # as after "its work has not moved"
        with FakeSampler(config, hello=msgspec.structs.replace(HELLO, dataset_fingerprint="other")) as other:
            until(lambda: other.ended is not None)
        assert inbox.state.peers == {}


def test_garbage_is_counted_while_good_traffic_passes(config: Config) -> None:
    rng = random.Random(3)
    with make_inbox(config) as inbox, FakeSampler(config):
        evil = with_deadline(zmq.Context.instance().socket(zmq.DEALER))
        evil.setsockopt(zmq.LINGER, 0)
        evil.connect(endpoint(config))
        evil.poll(0)
        for _ in range(2000):
            evil.send_multipart([rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(1, 6))])
        assert train(inbox, 5) == list(range(10))
        until(lambda: inbox.state.counters["refused/frame_count"] + inbox.state.counters["refused/digest"] == 2000)
        evil.close()


class _Flooded:
    """A transport that always has one more message."""

    def __init__(self, real: Any):
        self._real = real

    def receive(self) -> list[bytes]:
        return self._real.receive() or [b"junk"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_flood_cannot_stop_credits(config: Config) -> None:
    """More messages than the thread can read: each read ends, so that samplers hear of their leases."""
    with make_inbox(config) as inbox, FakeSampler(config) as sampler:
        until(lambda: "s0" in inbox.state.peers)
        flooded: Any = _Flooded(inbox.thread.transport)
        real, inbox.thread.transport = inbox.thread.transport, flooded
        until(lambda: inbox.state.counters["refused/frame_count"] > 1000)
        inbox.commit(0, published(0))
        take(inbox, [0, 1, 2, 3])
        assert sampler.produced == [0, 1, 2, 3]
        inbox.thread.transport = real


# ---- waiting -----------------------------------------------------------------------------------------------


def lose(inbox: Inbox, name: str) -> None:
    """As if the sampler was last heard longer ago than it may be silent."""
    with inbox.state.changed:
        inbox.state.peers[name].heard_at -= channel.LOST_AFTER_S


def test_take_gives_up_with_what_is_missing_and_who_was_heard(config: Config) -> None:
    (config.run.output_dir / "logs").mkdir(parents=True)
    (config.run.output_dir / "logs" / "sampler.log").write_text("vllm: loading\nvllm: out of memory\n")
    with make_inbox(config) as inbox, FakeSampler(config, make=lambda g, v: make_group(g if g != 1 else 60, v)):
        inbox.commit(0, published(0))
        until(lambda: 0 in inbox.state.ledger.held and inbox.state.peers["s0"].phase == "sampling")
        inbox.config = changed(config, channel={"stall_timeout_s": 0.1})  # of `take`; the socket's thread keeps its own
        with pytest.raises(Retryable) as caught:
            take(inbox, [0, 1])
    message = str(caught.value)
    assert re.search(
        r"waited \d+ s for groups 0…1 \(have 1 of 2\); sampler s0 heard \d+ s ago \(sampling: normal\)", message
    )
    assert "vllm: out of memory" in message


def test_waiting_for_a_first_sampler_has_a_deadline_and_says_where_it_listens(config: Config) -> None:
    config = changed(config, channel={"connect_timeout_s": 0.1})
    with (
        make_inbox(config) as inbox,
        pytest.raises(Retryable, match=r"a sampler to connect; no sampler on ipc://.*python sampling.py.* running"),
    ):
        inbox.wait_for_sampler()


def test_a_sampler_gives_up_on_a_trainer_that_never_answers(config: Config) -> None:
    link = Link(changed(config, channel={"connect_timeout_s": 0.3}), "s0", HELLO)
    start = time.monotonic()
    with pytest.raises(Retryable, match=r"the trainer has not answered on ipc://.*training_worker\.py.*trainer\.log"):
        while not overdue(time.monotonic() - start, 5):
            link.receive(0.05)
            link.beat("starting", 0, None, {}, now=False)
    link.close()


def test_the_time_that_an_engine_takes_to_start_is_not_the_trainers_silence(config: Config) -> None:
    link = Link(changed(config, channel={"connect_timeout_s": 0.05}), "s0", HELLO)
    time.sleep(0.1)  # vLLM starts; the trainer knows nothing of this sampler
    assert not link.receive(0.0)
    link.beat("starting", 0, None, {}, now=True)
    time.sleep(0.1)
    with pytest.raises(Retryable, match="has not answered"):
        link.receive(0.0)
    link.close()


def test_a_message_above_the_limit_is_refused_with_the_settings_that_make_it_smaller(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Config, "max_message_bytes", 1 << 20)
    link = Link(config, "s0", HELLO)
    request = EvalRequest("v0", 0, (0,))
    long = dataclasses.replace(make_eval_result(request, 0).samples[0], completion="x" * (3 << 19))
    with pytest.raises(UserError, match=r"1\.5 MiB, the limit is 1; lower eval\.num_generations"):
        link.send_eval(EvalResult("v0", 0, 0, (long,)))
    link.close()


def test_a_wait_ends_only_when_nothing_has_come_for_the_whole_of_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look at what is missing comes 1,000 s after the one before it; the limit is 1,800 s."""
    with make_inbox(config, say=lambda _: None) as inbox:
        inbox.config = changed(config, channel={"stall_timeout_s": 1800.0})  # of the wait alone
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


def test_a_long_wait_is_reported_with_what_is_normal(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler starts when the trainer has said that it waits."""
    monkeypatch.setattr("trainer.link.inbox._SAY_EVERY_S", 0.05)
    said: list[str] = []
    sampler = FakeSampler(config)

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 1:
            sampler.start()

    with make_inbox(config, say=say) as inbox:
        assert inbox.wait_for_sampler() == HELLO
        sampler.__exit__()
    assert any("for a sampler to connect" in line and "normal while vLLM starts" in line for line in said)


# ---- loss and return ---------------------------------------------------------------------------------------


def test_the_leases_of_a_lost_sampler_go_to_the_other(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(channel, "LOST_AFTER_S", 60.0)
    with make_inbox(config, say=said.append) as inbox, dealer(config, "silent") as silent:
        silent.send_multipart(wire.encode(wire.Envelope("", "", "silent"), HELLO))
        until(lambda: "silent" in inbox.state.peers)
        gone = threading.Event()

        def make(group_id: int, version: int) -> Group:
            gone.wait(limit(20))  # idle, it would make copies of what the other has
            return make_group(group_id, version)

        with FakeSampler(config, "s0", make) as sampler:
            until(lambda: "s0" in inbox.state.peers)
            inbox.commit(0, published(0))
            until(lambda: list(inbox.state.ledger.leases.values()).count(["silent"]) == 2)
            lose(inbox, "silent")
            until(lambda: inbox.state.peers["silent"].lost)
            gone.set()
            assert train(inbox, 5) == list(range(10))  # half of the first four were leased to the silent one
            assert set(range(10)) <= set(sampler.produced)
            assert inbox.state.peers["silent"].lost
    lost = r"sampler silent lost: silent for \d+ s; its 2 unfinished groups are reassigned"
    assert any(re.match(lost, line) for line in said)


def test_a_restarted_sampler_begins_where_it_is_needed(config: Config) -> None:
    with make_inbox(config) as inbox:
        with FakeSampler(config):
            assert train(inbox, 3) == list(range(6))
        again = wire.Hello(2, "data", "tokenizer", 100, 10)
        with FakeSampler(config, hello=again) as sampler:
            assert train(inbox, 3, first_step=3) == list(range(6, 12))
            assert min(sampler.produced) >= 4, "what was trained is not produced again"


def test_a_restarted_trainer_makes_the_sampler_forget_and_the_stream_goes_on(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "LOST_AFTER_S", 0.3)
    with FakeSampler(config) as sampler:
        first = make_inbox(config, incarnation="start-1")
        first.__enter__()
        assert train(first, 3) == list(range(6))
        until(lambda: sampler.num_trainers == 1)
        first.thread._ending.set()  # as if killed: no goodbye
        first.state.peers = {}
        first.__exit__(None, None, None)
        with make_inbox(config, incarnation="start-2") as second:
            assert train(second, 5) == list(range(10))  # from an older checkpoint, and in order
        assert sampler.num_trainers == 2
        until(lambda: sampler.ended)


def test_what_an_earlier_start_of_the_trainer_still_says_is_ignored(config: Config) -> None:
    with router(config) as trainer:
        link = Link(config, "s0", HELLO)
        link.beat("ready", 0, None, {}, now=True)
        name, *_ = trainer.recv_multipart()

        def hears(incarnation: str, message: wire.WireMessage) -> bool:
            trainer.send_multipart([name, *wire.encode(wire.Envelope("run", incarnation, ""), message)])
            return link.receive(timeout_s=limit(5))

        credit = wire.Credit(0, [], [], 0, "", "", 0)
        found = [hears(start, credit) for start in ("start-1", "start-1", "start-2", "start-2")]
        assert found == [True, False, True, False]
        hears("start-1", wire.Bye("the end of start 1", 2))
        assert link.counters["refused/past_incarnation"] == 1
        with pytest.raises(PeerEnded, match="the end of start 2"):
            hears("start-2", wire.Bye("the end of start 2", 0))
        link.close()


# ---- endings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (UserError("x"), 2), (Retryable("x"), 75), (KeyboardInterrupt(), 130), (ValueError("a bug"), 75)],
)
def test_the_trainers_goodbye_carries_the_code_to_end_with(
    config: Config, error: BaseException | None, code: int
) -> None:
    with FakeSampler(config) as sampler:
        inbox = make_inbox(config)
        inbox.__enter__()
        inbox.commit(0, published(0))
        until(lambda: sampler.link.credit)
        inbox.__exit__(type(error), error, None)
        until(lambda: sampler.ended)
        assert sampler.ended.exit_code == code
        reason = "done" if error is None else f"the trainer ended: {type(error).__name__}: {error}"
        assert str(sampler.ended) == reason


def test_an_inbox_that_breaks_tells_both_sides(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeSampler(config) as sampler, pytest.raises(ZeroDivisionError), make_inbox(config) as inbox:
        inbox.commit(0, published(0))
        until(lambda: sampler.link.credit)
        monkeypatch.setattr(inbox.thread, "_find_lost", lambda now: 1 // 0)
        until(lambda: sampler.ended)
        assert sampler.ended.exit_code == 75
        until(lambda: not inbox.thread.is_alive())
        for _ in range(5):
            inbox.commit(0, published(0))  # nobody reads it any more, and it waits for nobody
        take(inbox, [90])


def test_a_samplers_user_error_ends_the_wait_for_groups(config: Config) -> None:
    with make_inbox(config) as inbox, FakeSampler(config, make=lambda g, v: make_group(60, v)) as sampler:
        inbox.commit(0, published(0))
        until(lambda: sampler.link.credit)
        sampler.leave("model too large", 2)
        with pytest.raises(UserError, match="sampler s0: model too large"):
            take(inbox, [0])


def test_a_samplers_user_error_before_its_hello_ends_the_wait_for_it(config: Config) -> None:
    with make_inbox(config) as inbox:
        link = Link(config, "s0", HELLO)
        link.say_goodbye("vllm refuses max_model_len", 2)
        with pytest.raises(UserError, match="sampler s0: vllm refuses max_model_len"):
            inbox.wait_for_sampler()
        link.close()


def test_a_sampler_that_goes_leaves_its_leases_to_others_at_once(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "LOST_AFTER_S", 30.0)
    with make_inbox(config) as inbox:
        with FakeSampler(config, "s1", make=lambda g, v: make_group(60, v)) as leaving:
            inbox.commit(0, published(0))
            until(lambda: leaving.produced[:4] == [0, 1, 2, 3])  # and again with every credit: 60 is never wanted
            leaving.leave("interrupted", 75)
        with FakeSampler(config, "s0"):
            assert train(inbox, 3) == list(range(6))


# ---- tombstones --------------------------------------------------------------------------------------------


def failing_below(limit: int) -> Callable[[int, int], Group | Tombstone]:
    return lambda g, version: Tombstone(g, version, "killed") if g < limit else make_group(g, version)


@pytest.mark.parametrize(("fraction", "allowed"), [(0.01, 3), (0.1, 10)])  # of 100 groups; three are always allowed
def test_tombstones_are_taken_like_groups_until_there_are_too_many(
    config: Config, monkeypatch: pytest.MonkeyPatch, fraction: float, allowed: int
) -> None:
    monkeypatch.setattr("trainer.link.socket_thread._FAILURES_ALLOWED", fraction)
    said: list[str] = []
    with make_inbox(config, say=said.append) as inbox, FakeSampler(config, make=failing_below(allowed)):
        assert train(inbox, 8) == list(range(16))
        assert inbox.state.counters["tombstones"] == allowed
    assert "group 0 could not be produced: killed" in said
    with make_inbox(config) as inbox, FakeSampler(config, make=failing_below(allowed + 1)):
        said_so = rf"{allowed + 1} groups could not be produced, more than {fraction}"
        with pytest.raises(UserError, match=said_so):
            train(inbox, 8)


# ---- evaluation --------------------------------------------------------------------------------------------


def test_an_evaluation_is_shared_in_chunks_and_comes_back_in_order(config: Config) -> None:
    with make_inbox(config) as inbox, FakeSampler(config, "s0"), FakeSampler(config, "s1"):
        until(lambda: len(inbox.state.peers) == 2)
        inbox.commit(0, published(0), "v0", num_problems=130)
        results = inbox.finish_eval()
        assert [r.chunk for r in results] == [0, 1, 2]  # 64 problems each
        assert [s.problem_index for r in results for s in r.samples] == list(range(130))
        assert inbox.finish_eval() == []


def test_chunks_are_so_small_that_their_texts_fit_into_a_message(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 bytes a token x 32 answers of 1,024 tokens are half a MiB a problem: 2 in half of 2 MiB."""
    monkeypatch.setattr(Config, "max_message_bytes", 2 << 20)
    long = changed(config, sampler={"max_completion_length": 1024}, eval={"num_generations": 32})
    with make_inbox(long) as inbox:
        inbox.commit(0, published(0), "v0", num_problems=5)
        assert inbox.state.evaluation is not None
        asked = [request.problem_indexes for request in inbox.state.evaluation.requests.values()]
    assert asked == [(0, 1), (2, 3), (4,)]


def test_an_interrupt_ends_an_evaluation_so_that_no_other_version_answers_the_rest(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked = threading.Event()
    monkeypatch.setattr("trainer.link.inbox.interrupted", is_asked.is_set)
    with make_inbox(config) as inbox:
        inbox.commit(0, published(0), "v0", num_problems=3)
        is_asked.set()
        with pytest.raises(Interrupted):
            inbox.finish_eval()
        assert inbox.state.evaluation is None
        assert inbox.finish_eval() == []


def test_samplers_rest_between_their_last_result_and_the_next_weights(config: Config) -> None:
    may_end = threading.Event()

    def make_eval(request: EvalRequest, version: int) -> EvalResult:
        may_end.wait(limit(20))
        return make_eval_result(request, version)

    with make_inbox(config) as inbox, FakeSampler(config) as sampler:
        sampler.make_eval = make_eval
        until(lambda: inbox.state.peers)
        assert not inbox.samplers_rest()
        inbox.commit(0, published(0))
        until(inbox.samplers_rest)
        inbox.commit(2, published(1), "v1", num_problems=3)
        until(lambda: inbox.state.ledger.is_complete)
        assert not inbox.samplers_rest()  # it has the groups and still evaluates
        may_end.set()
        until(inbox.samplers_rest)


def test_a_lost_evaluation_result_is_sent_again(config: Config) -> None:
    with make_inbox(config) as inbox, FakeSampler(config, link_class=Lossy):
        for step in range(5):
            inbox.commit(2 * step, published(step), f"v{step}", num_problems=130)
            take(inbox, [2 * step, 2 * step + 1])
            assert [r.chunk for r in inbox.finish_eval()] == [0, 1, 2]


def test_the_evaluation_of_a_lost_sampler_goes_to_the_other(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "LOST_AFTER_S", 60.0)
    with make_inbox(config) as inbox, dealer(config, "silent") as silent:
        silent.send_multipart(wire.encode(wire.Envelope("", "", "silent"), HELLO))
        until(lambda: "silent" in inbox.state.peers)
        with FakeSampler(config):
            until(lambda: "s0" in inbox.state.peers)
            inbox.commit(0, published(0), "v0", num_problems=130)
            until(lambda: inbox.state.evaluation and inbox.state.evaluation.open_leases("silent"))
            lose(inbox, "silent")
            assert len(inbox.finish_eval()) == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy_version": 4}, "eval_version"),
        ({"eval_id": "v9"}, "eval_unknown"),
        ({"chunk": 9}, "eval_unknown"),
        ({"samples": ()}, "eval_problems"),
        ({"samples": make_eval_result(EvalRequest("v0", 0, (7,)), 0).samples}, "eval_problems"),
    ],
)
def test_a_wrong_evaluation_result_is_refused_and_counted(config: Config, changes: dict[str, Any], reason: str) -> None:
    with make_inbox(config) as inbox, FakeSampler(config) as sampler:
        sampler.make_eval = lambda request, version: make_eval_result(request, version, **changes)
        inbox.commit(0, published(0), "v0", num_problems=3)
        until(lambda: inbox.state.counters[f"refused/{reason}"])
        sampler.make_eval = make_eval_result
        assert [s.problem_index for s in inbox.finish_eval()[0].samples] == [0, 1, 2]


def test_an_evaluation_result_counts_once(config: Config) -> None:
    with make_inbox(config) as inbox, FakeSampler(config, link_class=Doubling):
        inbox.commit(0, published(0), "v0", num_problems=3)
        until(lambda: inbox.state.counters["refused/eval_duplicate"])
        assert len(inbox.finish_eval()) == 1


def failing(*problems: int) -> Callable[[EvalRequest, int], EvalResult]:
    """Answers every problem but these, whose rewards time out."""

    def make(request: EvalRequest, version: int) -> EvalResult:
        whole = make_eval_result(request, version)
        return msgspec.structs.replace(
            whole,
            samples=tuple(s for s in whole.samples if s.problem_index not in problems),
            failures=tuple(EvalFailure(p, "killed") for p in request.problem_indexes if p in problems),
        )

    return make


@pytest.mark.parametrize(("fraction", "allowed"), [(0.01, 3), (0.05, 6)])  # of 130 problems; three are always allowed
def test_held_out_problems_that_cannot_be_scored_are_left_out_until_there_are_too_many(
    config: Config, monkeypatch: pytest.MonkeyPatch, fraction: float, allowed: int
) -> None:
    monkeypatch.setattr("trainer.link.socket_thread._FAILURES_ALLOWED", fraction)
    said: list[str] = []
    with make_inbox(config, say=said.append) as inbox, FakeSampler(config) as sampler:
        sampler.make_eval = failing(*range(64 - 1, 64 - 1 + allowed))  # in two chunks
        inbox.commit(0, published(0), "v0", num_problems=130)
        results = inbox.finish_eval()
        assert len([s for r in results for s in r.samples]) == 130 - allowed
        assert [f.problem_index for r in results for f in r.failures] == list(range(63, 63 + allowed))
        assert "held-out problem 63 could not be scored: killed" in said
        inbox.commit(0, published(1), "v1", num_problems=130)
        assert len(inbox.finish_eval()) == 3, "the failures of an earlier evaluation do not count in this one"
        sampler.make_eval = failing(*range(64 - 1, 64 + allowed))
        inbox.commit(0, published(2), "v2", num_problems=130)
        said_so = rf"{allowed + 1} held-out problems could not be scored in evaluation v2.*{fraction} of them.*killed"
        with pytest.raises(UserError, match=said_so):
            inbox.finish_eval()


# ---- statistics --------------------------------------------------------------------------------------------


def test_what_samplers_did_is_summed_and_their_seconds_and_newest_values_are_averaged(config: Config) -> None:
    with make_inbox(config) as inbox, FakeSampler(config, "s0") as one, FakeSampler(config, "s1") as other:
        # both have served an earlier start of the trainer
        one.stats = {"total/idle_s": 500.0, "total/completion_tokens": 9000.0, "sync/load_s": 1.0}
        other.stats = {"total/idle_s": 300.0, "sync/load_s": 1.0}
        inbox.commit(0, published(0))
        until(lambda: [peer.phase for peer in inbox.state.peers.values()] == ["sampling"] * 2)  # both have reported
        one.stats = {"total/idle_s": 504.0, "total/completion_tokens": 9100.0, "sync/load_s": 3.0}
        other.stats = {"total/idle_s": 302.0, "total/completion_tokens": 50.0, "sync/load_s": 1.0}
        done: collections.Counter[str] = collections.Counter()

        def has_it_all() -> bool:
            statistics = inbox.take_statistics()
            assert statistics.num_samplers == 2
            done.update({name: round(value) for name, value in statistics.samplers.items() if "total/" in name})
            return done["total/completion_tokens"] == 100 + 50 and statistics.samplers["sync/load_s"] == (3 + 1) / 2

        until(has_it_all)
        assert done["total/idle_s"] == (4 + 2) / 2
