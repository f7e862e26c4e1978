"""A sampler that reloads, generates, scores or waits for files for longer than LOST_AFTER_S is not lost.

Half a minute of simulated time each: the clock moves when the work says that it did a piece, and then the trainer's
thread takes what came.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Config
from common.processes.watchdog import progress_heard_by, report_progress
from common.types import Problem, Prompt
from common.wire import channel
from sampler import link as link_module
from sampler import loop
from sampler.engine.engine_tensors import Proof
from sampler.engine.vllm_insides import report_tokens
from sampler.link import Link
from sampler.loop import Sampler
from tests.support.memory_transport import TRAINER, MemoryNetwork
from tests.support.protocol_helpers import HELLO, make_config, make_group, make_inbox, received, short_folder
from tests.support.speed import until
from tests.support.versions import publish
from tests.unit.test_late_visibility import IdleEngine
from trainer.link import socket_thread

LOST_AFTER_S, STALLED_AFTER_S, WORK_S, PIECE_S = 10.0, 20.0, 30.0, 0.5


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

    def work(self, seconds: float, reports: bool = True) -> list[Any]:
        """The trainer takes every beat before the clock moves on."""
        for _ in range(int(seconds / PIECE_S)):
            self.now_s += PIECE_S
            if reports:
                report_progress("loading weights")
                self.await_trainer()
        return []

    def await_trainer(self) -> None:
        until(lambda: not self.network.queues[TRAINER] and self.peer.heard_at >= self.now_s - 2)

    @property
    def peer(self) -> Any:
        return self.inbox.state.peers["s0"]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with short_folder() as folder:
        monkeypatch.setattr(channel, "LOST_AFTER_S", LOST_AFTER_S)
        config = make_config(
            folder, model={"path": "m", "dtype": "float32"}, channel={"stall_timeout_s": STALLED_AFTER_S}
        )
        world = World(config, folder, monkeypatch)
        with world.inbox:
            world.begin()
            yield world


def load_for_long(world: World) -> None:
    """Longer than stall_timeout_s too: each beat shows that more is done."""

    def load(folder: Path, expected: Any, tensors: Any, version: int) -> Proof:
        world.work(WORK_S)
        return Proof(set(expected or ()))

    world.engine.load = load
    world.sampler.reload_if_credited()
    assert world.engine.version == 8


def score_for_long(world: World) -> None:
    def score() -> None:
        world.work(WORK_S)
        raise LookupError("enough")

    world.engine.version = 8
    world.sampler.send_scored, world.sampler.start_leased_work = score, lambda: None  # type: ignore[method-assign]
    with pytest.raises(LookupError, match="enough"):
        world.sampler.run()


def step_for_long(world: World) -> None:
    """96 prompts of GSM8K in SmolLM2-135M: 23,000 tokens, 8,192 of them in one step of 18 s on a core."""
    step: Any = SimpleNamespace(num_running=1, num_events=0, phase=PROMPTS, step=lambda: world.work(WORK_S))
    world.sampler.turns = step
    world.sampler.generate()


def wait_for_files(world: World) -> None:
    folder = Path(world.published.weights_dir)
    folder.rename(hidden := folder.with_name("on-the-server"))
    while world.now_s < 1.5 * LOST_AFTER_S:
        world.sampler.reload_if_credited()
        world.sampler.link.beat(world.sampler.phase, 0, None, {}, now=False)
        world.await_trainer()
    phase = world.peer.phase
    hidden.rename(folder)
    world.sampler.reload_if_credited()
    assert world.engine.version == 8
    assert phase.startswith("waiting 1") and f"for the file system to show version 8: {folder}" in phase


PROMPTS = "generating 96 prompts"


@pytest.mark.parametrize(
    ("work", "phase"),
    [
        (load_for_long, "reloaded"),
        (score_for_long, "loading weights"),
        (step_for_long, PROMPTS),
        (wait_for_files, "reloaded"),
    ],
)
def test_long_work_frees_no_lease(world: World, work: Callable[[World], None], phase: str) -> None:
    before = world.leases()
    work(world)
    assert world.now_s >= 1.5 * LOST_AFTER_S
    assert not world.peer.lost and world.leases() == before
    assert not [text for text in world.said if "lost" in text or "sent away" in text]
    until(lambda: world.peer.phase == phase)


def test_a_sampler_that_is_stuck_in_a_reload_is_lost_and_its_leases_are_free(world: World) -> None:
    def load(folder: Path, expected: Any, tensors: Any, version: int) -> Proof:
        world.work(5.0)
        world.work(WORK_S, reports=False)
        until(lambda: any("sampler s0 lost: silent for" in text for text in world.said))
        return Proof(set(expected or ()))

    world.engine.load = load
    world.sampler.reload_if_credited()
    assert world.peer.lost or not world.leases()


def decode(world: World, seconds: float, tokens_of_step: list[int]) -> None:
    """An accelerator's engine runs steps, none of which finishes a completion or reports by itself."""

    def get_output() -> Any:
        world.work(PIECE_S, reports=False)
        return SimpleNamespace(outputs=[SimpleNamespace(new_token_ids=tokens_of_step)])

    core = SimpleNamespace(get_output=get_output)
    report_tokens(core)
    step: Any = SimpleNamespace(num_running=1, num_events=0, phase=PROMPTS, step=lambda: core.get_output().outputs[1:])
    world.sampler.turns = step
    until_s = world.now_s + seconds
    while world.now_s < until_s and "s0" in world.inbox.state.peers:
        world.sampler.generate()
        world.sampler.link.beat(PROMPTS, world.sampler.progress, 8, {}, now=True)
        until(lambda: not world.network.queues[TRAINER])
        until(lambda: "s0" not in world.inbox.state.peers or world.peer.heard_at >= world.now_s - 2)


def test_a_completion_may_take_longer_than_the_deadline_while_tokens_come(world: World) -> None:
    before = world.leases()
    decode(world, 3 * STALLED_AFTER_S, tokens_of_step=[7])
    assert world.leases() == before and not world.said


def test_an_engine_whose_steps_sample_nothing_is_sent_away(world: World) -> None:
    decode(world, 3 * STALLED_AFTER_S, tokens_of_step=[])
    until(lambda: any("sampler s0 is sent away: its work has not moved for" in text for text in world.said))
    assert not world.leases()


def test_while_a_step_does_not_return_its_leases_become_free(world: World) -> None:
    def get_output() -> Any:
        world.work(WORK_S, reports=False)
        until(lambda: not world.leases())
        return SimpleNamespace(outputs=[])

    core = SimpleNamespace(get_output=get_output)
    report_tokens(core)
    step: Any = SimpleNamespace(num_running=1, num_events=0, phase=PROMPTS, step=lambda: core.get_output().outputs)
    world.sampler.turns = step
    world.sampler.generate()
    assert any("sampler s0 lost" in text or "sampler s0 is sent away" in text for text in world.said)


def test_a_sampler_is_not_sent_away_while_the_trainer_works_for_long_and_it_has_nothing_to_do(world: World) -> None:
    with world.inbox.state.changed:
        for group_id in world.leases():
            world.inbox.state.ledger.accept(received(make_group(group_id, 8)), "s0")
    until_s = world.now_s + 3 * STALLED_AFTER_S
    while world.now_s < until_s:
        world.now_s += PIECE_S
        world.sampler.link.beat("idle, no work assigned", 0, 8, {}, now=True)
        world.await_trainer()
    assert not world.peer.lost and not world.said


def test_a_reference_reports_progress_in_every_layer(tmp_path: Path) -> None:
    from model.reference import Reference
    from tests.support.tiny import tiny_model

    config = make_config(tmp_path, model={"path": str(tiny_model(tmp_path / "model")), "dtype": "float32"})
    reference, heard = Reference(config, torch.device("cpu")), list[str]()
    with progress_heard_by(heard.append):
        reference.logprobs(np.array([3, 4], np.int32), [np.array([5], np.int32)])
    assert heard == ["scoring with the reference"] * 2
