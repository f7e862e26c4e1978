"""Link and Inbox over another transport than ZeroMQ, and what every transport promises."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import channel
from common.config import Config
from common.transport import Transport
from tests.support.memory_transport import TRAINER, MemoryNetwork
from tests.support.protocol_helpers import FakeSampler, hurried_config, make_inbox, published
from tests.support.speed import limit, overdue, until
from tests.unit.test_link_and_inbox import train

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    yield from hurried_config(monkeypatch)


def ends(kind: str, config: Config) -> tuple[Transport, Transport]:
    """(trainer's, sampler's)"""
    if kind == "memory":
        network = MemoryNetwork()
        return network.end(TRAINER), network.end("s0")
    return channel.bind(config), channel.connect(config, "s0")


def test_link_and_inbox_train_a_run_over_a_transport_without_sockets(config: Config) -> None:
    network = MemoryNetwork()
    trainer, ours = network.end(TRAINER), network.end("s0")
    with FakeSampler(config, transport=ours) as sampler:
        with make_inbox(config, transport=trainer) as inbox:
            inbox.commit(0, published(0), "v0", num_problems=130)
            assert [r.chunk for r in inbox.finish_eval()] == [0, 1, 2]
            assert train(inbox, 10) == list(range(20))
            assert not Path(str(config.channel.endpoint).removeprefix("ipc://")).exists(), "nobody made a socket"
        until(lambda: sampler.ended)
        assert sampler.ended.exit_code == 0, "the goodbye arrived"
    assert trainer.is_closed and ours.is_closed


@pytest.mark.parametrize("kind", ["memory", "ZeroMQ"])
def test_frames_arrive_whole_both_ways_and_nothing_waits(config: Config, kind: str) -> None:
    trainer, sampler = ends(kind, config)
    assert trainer.receive() is None and sampler.receive() is None
    assert not trainer.send([b"to nobody"], to="s1")
    assert sampler.send([b"hello", b"", b"s0"])
    assert not trainer.poll(5.0), "a message is not a wake"
    assert trainer.receive() == [b"hello", b"", b"s0"]
    assert trainer.send([b"credit"], to="s0")
    sampler.poll(5.0)
    assert sampler.receive() == [b"credit"]
    trainer.close()
    sampler.close()


@pytest.mark.parametrize("kind", ["memory", "ZeroMQ"])
def test_a_wake_ends_a_poll_and_may_come_from_any_thread_at_any_time(config: Config, kind: str) -> None:
    trainer, sampler = ends(kind, config)
    threads = [threading.Thread(target=trainer.wake) for _ in range(4)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    assert trainer.poll(limit(20))
    assert not overdue(time.monotonic() - start, 5)
    for thread in threads:
        thread.join()
    for _ in range(5000):
        trainer.wake()  # nobody reads: it does not wait
    trainer.close()
    trainer.wake()
    trainer.close()
    sampler.close()
