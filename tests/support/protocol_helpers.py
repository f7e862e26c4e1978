"""Around the real protocol: a config, groups, an Inbox with its Ledger, and a sampler that fakes only its engine."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import Config
from common.errors import PeerEnded
from common.files.weights import Published
from common.types import EvalRequest, EvalResult, EvalSample, Group, Rollout, Tombstone
from common.wire import channel, wire
from common.wire.channel import Transport
from common.wire.group_limits import Limits
from sampler import link as link_module
from sampler.link import Link
from tests.support.memory_transport import TRAINER, MemoryNetwork, MemoryTransport
from tests.support.speed import limit
from trainer.link.inbox import Inbox
from trainer.link.ledger import Ledger

channel.LOST_AFTER_S = limit(2)

LIMITS = Limits(
    vocab_size=100,
    num_generations=2,
    max_prompt_length=8,
    max_completion_length=8,
    needs_ref_logprobs=False,
    reward_funcs=("answer",),
)
HELLO = wire.Hello(1, "data", "tokenizer", 100, 10)


def make_config(folder: Path, **sections: dict[str, Any]) -> Config:
    """Two groups a step, window 4, lost after 2 s of the reference machine, a socket in `folder`."""
    settings: dict[str, dict[str, Any]] = {
        "run": {"output_dir": folder / "run"},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "rewards": {"reward_funcs": ["answer"]},
        "sampler": {"num_generations": 2},
        "trainer": {"prompts_per_step": 2, "max_staleness": 1, "max_steps": 50},
        "channel": {"endpoint": f"ipc://{folder}/inbox", "stall_timeout_s": limit(20)},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return Config.model_validate(settings)


def make_rollout(tokens: Sequence[int] = (3, 4), **changes: Any) -> Rollout:
    values: dict[str, Any] = {
        "completion_ids": np.array(tokens, np.int32),
        "old_logprobs": np.full(len(tokens), -0.5, np.float32),
        "ref_logprobs": None,
        "rewards": {"answer": 1.0},
        "reward": 1.0,
        "finish_reason": "stop",
    }
    return Rollout(**values | changes)


def of_two_turns(**changes: Any) -> Rollout:
    """It calls with 3 4, observes 60 61, and answers 5."""
    old = np.array([-0.5, -0.5, 0, 0, -0.5], np.float32)
    values: dict[str, Any] = {"old_logprobs": old, "observed": ((2, 4),), "turns": 2, "tool_calls": 1}
    return make_rollout((3, 4, 60, 61, 5), **values | {"environment_s": 0.25} | changes)


def make_group(group_id: int, version: int = 0, *rollouts: Rollout) -> Group:
    return Group(
        group_id, version, group_id, np.array([1, 2], np.int32), rollouts or (make_rollout(), make_rollout((5,)))
    )


def received(group: Group | Tombstone) -> wire.Received:
    """As a sampler of no run sends it."""
    return wire.Received(group, wire.encode(wire.Envelope("", "", ""), group))


def receive(inbox: Inbox, group_ids: Sequence[int]) -> list[Group | Tombstone]:
    """Without their frames."""
    return [one.group for one in inbox.receive(group_ids)]


def make_eval_result(request: EvalRequest, version: int) -> EvalResult:
    samples = tuple(EvalSample(i, f"text {i}", {"answer": 1.0}, 3, "stop") for i in request.problem_indexes)
    return EvalResult(request.eval_id, request.chunk, version, samples)


def published(version: int) -> Published:
    return Published(version, f"/weights/{version}", "0" * 64)


def hurried_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """For a fixture: beats and resends many times a second, so that a test of a lost message takes no seconds."""
    monkeypatch.setattr(channel, "BEAT_S", 0.02)
    monkeypatch.setattr(link_module, "_RESEND_AFTER_S", 0.04)
    with short_folder() as folder:
        yield make_config(folder)


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """The same but for these options."""
    update = {name: getattr(config, name).model_copy(update=options) for name, options in sections.items()}
    return config.model_copy(update=update)


def train(inbox: Inbox, num_steps: int) -> list[int]:
    """The training loop's calls, two groups a step. Returns the ids in the order in which they were trained."""
    trained = []
    for step in range(num_steps):
        inbox.commit(2 * step, published(step))
        taken = receive(inbox, [2 * step, 2 * step + 1])
        assert all(step - 1 <= group.policy_version <= step for group in taken), "older than max_staleness"
        trained += [group.group_id for group in taken]
    return trained


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A temporary folder whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="tandem-test-") as folder:
        yield Path(folder)


def make_inbox(
    config: Config,
    total: int = 100,
    incarnation: str = "start-1",
    say: Callable[[str], None] = print,
    transport: Transport | None = None,
    limits: Limits = LIMITS,
) -> Inbox:
    return Inbox(config, "run", incarnation, limits, Ledger(total, config.window), say, transport)


class FakeSampler(threading.Thread):
    """The sampling loop around a real Link: `make(group_id, version)` is the engine, `order` the order of sending."""

    def __init__(
        self,
        config: Config,
        name: str = "s0",
        make: Callable[[int, int], Any] = make_group,
        order: Callable[[list[int]], list[int]] = sorted,
        link_class: type[Link] = Link,
        hello: wire.Hello = HELLO,
        transport: Transport | None = None,
    ):
        super().__init__(daemon=True)
        self.link = link_class(config, name, hello, transport)
        self.make, self.order = make, order
        self.stopped = threading.Event()
        self.goodbye: tuple[str, int] | None = None  # said at the end
        self.ended: PeerEnded | None = None
        self.make_eval: Callable[[EvalRequest, int], EvalResult] = make_eval_result
        self.produced: list[int] = []

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                self.link.receive(0.02)
                self.work()
                self.link.beat("sampling", 0, 0, {}, now=False)
            if self.goodbye:
                self.link.say_goodbye(*self.goodbye)
        except PeerEnded as ended:
            self.ended = ended
        finally:
            self.link.close()

    def work(self) -> None:
        credit = self.link.credit
        if credit is None:
            return
        for group_id in self.order([g for g in credit.lease if not self.link.has_result(g)]):
            self.produced.append(group_id)
            self.link.send_result(self.make(group_id, credit.version))
        for request in credit.evals:
            self.link.send_eval(self.make_eval(request, credit.version))

    def leave(self, reason: str, exit_code: int) -> None:
        self.goodbye = reason, exit_code
        self.stopped.set()

    def __enter__(self) -> FakeSampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.join(timeout=limit(5))
        assert not self.is_alive(), "the fake sampler does not end"


class MemoryLink:
    """Both ends of the link in one process: `with link.inbox() as inbox, link.sampler("s0") as sampler:`"""

    def __init__(self, config: Config):
        self.config, self.network = config, MemoryNetwork()

    def inbox(self, **options: Any) -> Inbox:
        return make_inbox(self.config, transport=self.network.end(TRAINER), **options)

    def sampler(self, name: str = "s0", **options: Any) -> FakeSampler:
        return FakeSampler(self.config, name, transport=self.network.end(name), **options)

    def bare(self, name: str = "s0", **sections: dict[str, Any]) -> Link:
        """A sampler's end without a loop."""
        return Link(changed(self.config, **sections), name, HELLO, self.network.end(name))

    def say(self, name: str, message: wire.WireMessage, run: str = "run", incarnation: str = "start-1") -> None:
        """In the name of a sampler, to the trainer."""
        MemoryTransport(self.network, name).send(wire.encode(wire.Envelope(run, incarnation, name), message))
