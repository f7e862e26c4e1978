"""A sampler that reloads, generates or scores for longer than LOST_AFTER_S is not lost; a stuck one is.

Half a minute of simulated time each: the clock moves when the work says that it did a piece, and then the trainer's
thread takes what came.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common import channel
from common.config import Config
from common.types import Problem, Prompt
from common.watchdog import progress_heard_by, report_progress
from sampler import link as link_module
from sampler import loop
from sampler.engine_tensors import Proof
from sampler.link import Link
from sampler.loop import Sampler
from tests.support.memory_transport import TRAINER, MemoryNetwork
from tests.support.protocol_helpers import HELLO, make_config, make_inbox, short_folder
from tests.support.speed import until
from tests.support.versions import publish
from tests.unit.test_late_visibility import IdleEngine
from trainer.link import socket_thread

LOST_AFTER_S, WORK_S, PIECE_S = 10.0, 30.0, 0.5


class World:
    """A clock, a trainer's link with its thread, and a sampler on the calling thread."""

    def __init__(self, config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.now_s, self.said = 0.0, list[str]()
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep)
        for module in (loop, link_module, socket_thread):
            monkeypatch.setattr(module, "time", clock)
        self.network = MemoryNetwork()
        self.inbox = make_inbox(config, say=self.said.append, transport=self.network.end(TRAINER))
        self.engine: Any = IdleEngine()
        link = Link(config, "s0", HELLO, self.network.end("s0"))
        task = loop.Task([Prompt(Problem(0, {}), "?", "?", [1])], [], str)  # type: ignore[arg-type]
        pool: Any = SimpleNamespace(pending=0, logged={}, ready=lambda timeout_s: [])
        self.sampler = Sampler(config, task, self.engine, link, pool, None)
        self.published = publish(folder / "weights", 8)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def begin(self) -> None:
        """The sampler says hello and is credited."""
        self.inbox.commit(0, self.published)
        self.sampler.link.beat("starting", 0, None, {}, now=True)
        until(lambda: self.sampler.link.receive(0.05) or self.sampler.link.credit is not None)
        self.sampler.link.beat("starting", 0, None, {}, now=True)
        until(lambda: "s0" in self.inbox.state.peers and self.leases())

    def leases(self) -> list[int]:
        return self.inbox.state.ledger.by_sampler().get("s0", [])

    def work(self, seconds: float, reports: bool = True) -> None:
        """The trainer takes every beat before the clock moves on."""
        for _ in range(int(seconds / PIECE_S)):
            self.now_s += PIECE_S
            if reports:
                report_progress("loading weights")
                until(lambda: not self.network.queues[TRAINER] and self.peer.heard_at >= self.now_s - 2)

    @property
    def peer(self) -> Any:
        return self.inbox.state.peers["s0"]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with short_folder() as folder:
        monkeypatch.setattr(channel, "LOST_AFTER_S", LOST_AFTER_S)
        config = make_config(folder, model={"path": "m", "dtype": "float32"}, channel={"stall_timeout_s": 20.0})
        world = World(config, folder, monkeypatch)
        with world.inbox:
            world.begin()
            yield world


def test_a_reload_of_30_s_frees_no_lease(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is longer than stall_timeout_s too: each beat shows that more is done."""
    before = world.leases()

    def load(folder: Path, expected: Any, tensors: Any, version: int) -> Proof:
        world.work(WORK_S)
        return Proof(set(expected or ()))

    monkeypatch.setattr(world.engine, "load", load)
    world.sampler.reload_if_credited()
    assert world.engine.version == 8 and world.now_s >= WORK_S
    assert not world.peer.lost and world.leases() == before
    assert not [text for text in world.said if "lost" in text or "sent away" in text]


def test_a_sampler_that_is_stuck_in_a_reload_is_lost_and_its_leases_are_free(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(folder: Path, expected: Any, tensors: Any, version: int) -> Proof:
        world.work(5.0)
        world.work(WORK_S, reports=False)
        until(lambda: any("sampler s0 lost: silent for" in text for text in world.said))
        return Proof(set(expected or ()))

    monkeypatch.setattr(world.engine, "load", load)
    world.sampler.reload_if_credited()
    assert world.peer.lost or not world.leases()


def test_scoring_with_the_reference_for_30_s_frees_no_lease(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = world.leases()

    class Enough(Exception):
        pass

    def score() -> None:
        world.work(WORK_S)
        raise Enough

    monkeypatch.setattr(world.sampler, "send_scored", score)
    monkeypatch.setattr(world.sampler, "start_leased_work", lambda: None)
    world.engine.version = 8
    with pytest.raises(Enough):
        world.sampler.run()
    assert world.now_s >= WORK_S
    assert not world.peer.lost and world.leases() == before


def test_an_engine_step_of_30_s_frees_no_lease_and_keeps_its_phase(world: World) -> None:
    """96 prompts of GSM8K in SmolLM2-135M: 23,000 tokens, 8,192 of them in one step of 18 s on a core."""
    before = world.leases()

    class OneLongStep:
        num_running, num_events, phase = 1, 0, "generating 96 prompts"

        def step(self) -> list[Any]:
            world.work(WORK_S)
            return []

    world.sampler.turns = OneLongStep()  # type: ignore[assignment]
    world.sampler.generate()
    assert world.now_s >= WORK_S
    assert not world.peer.lost and world.leases() == before
    assert world.peer.phase == "generating 96 prompts"


def test_only_the_thread_that_listens_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    heard: list[str] = []
    with progress_heard_by(heard.append):
        report_progress("mine")
        other = threading.Thread(target=report_progress, args=("of another thread",))
        other.start()
        other.join()
    report_progress("later")
    assert heard == ["mine"]


def test_a_reference_reports_progress_in_every_layer(tmp_path: Path) -> None:
    import numpy as np
    import torch

    from model.reference import Reference
    from tests.support.tiny import tiny_model

    config = make_config(tmp_path, model={"path": str(tiny_model(tmp_path / "model")), "dtype": "float32"})
    reference, heard = Reference(config, torch.device("cpu")), list[str]()
    with progress_heard_by(heard.append):
        reference.logprobs(np.array([3, 4], np.int32), [np.array([5], np.int32)])
    assert heard == ["scoring with the reference"] * 2
