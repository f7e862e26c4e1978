"""Plays the rollouts of a run: each prompt is a coroutine, and all of them share one engine.

    start ─► the coroutine of a prompt ─► engine step ─► it goes on ─► … ─► Sampled
                                       ─► environment's reply ──┘

Everything runs in the sampler's only thread. `step` runs one step of the engine, collects what the
environments have answered, and lets the coroutines go on that waited for it. Between two calls of
`step` or `start` no coroutine runs.

A group counts as running, environments included, until its last rollout has ended, and it is
sampled by one version of the policy unless sampler.in_flight_updates is set. If the machine, and
not a rollout, loses something of a group, the group ends as `Sampled.lost`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from common.types import Prompt
from environments import Failed
from sampler.engine.completions import SamplingParams
from sampler.turns.generator import Environments, Generator
from sampler.turns.sampled import MAX_REASON, Sampled
from sampler.turns.task import Decode

if TYPE_CHECKING:
    from sampler.engine.engine import Engine
    from sampler.turns.multi_turn import MultiTurn

_WAIT_S = 0.05  # for replies of environments while the engine has nothing to do
# Iterations of the event loop within which every coroutine has arrived at the next thing that it
# waits for. A reply wakes a rollout, which ends and so wakes its group, which ends.
_ITERATIONS = 16


class Player(Protocol):
    """Plays the rollouts of the prompts of a data source."""

    async def play(self, key: Hashable, prompt: Prompt, params: SamplingParams) -> Sampled:
        """Returns the completions of a prompt."""


@dataclass(frozen=True)
class SingleTurns:
    """The settings of a data source whose completions have one turn."""

    generator: Generator

    async def play(self, key: Hashable, prompt: Prompt, params: SamplingParams) -> Sampled:
        """Samples all completions of a prompt as one request, so that they share its cache."""
        ids, images = prompt.token_ids, prompt.images
        completions = await self.generator.generate(key, ids, params, images)
        return Sampled(prompt, completions)


@dataclass(frozen=True)
class _Source:
    """How the prompts of a data source are played. environments: None if it has none."""

    player: Player
    environments: Environments | None = None
    timeout_s: float = 0.0  # rollout.timeout_s

    def phase(self, num_prompts: int, num_requests: int) -> str:
        """Says what `num_prompts` running prompts do while the engine has `num_requests`."""
        if self.environments is None:
            return f"generating {num_prompts} prompts"
        if num_requests:
            return f"generating {num_requests} turns of {num_prompts} prompts"
        return (
            f"waiting for {self.environments.pool.pending} environments of {num_prompts} prompts, "
            f"each at most {self.timeout_s:g} s (rollout.timeout_s)"
        )


@dataclass
class _Running:
    """A prompt whose rollouts have not all ended."""

    prompt: Prompt
    source: str
    task: asyncio.Task[Sampled]
    lost: str = ""  # what the machine lost of it


class Turns:
    """The rollouts of a run that have not ended, by the key of their prompt."""

    def __init__(
        self,
        engine: Engine,
        decode: Decode | None = None,
        multi_turns: Mapping[str, MultiTurn | None] | None = None,
    ):
        """Prepares the rollouts of a run.

        decode: maps token ids to texts, as for rewards. multi_turns: for each data source how its
        rollouts of several turns are played, or None if its completions have one turn.
        """
        self._engine = engine
        self._generator = Generator(engine)
        self._sources = {"": _Source(SingleTurns(self._generator))}
        multi_turns = multi_turns or {}
        if any(multi_turns.values()):
            self._sources = {
                name: self._source(multi_turn, decode) for name, multi_turn in multi_turns.items()
            }
        self._running: dict[Any, _Running] = {}
        self._ended: list[Any] = []  # keys, in the order in which their rollouts ended
        self.num_events = 0  # events of the last step, each of which is progress

    def _source(self, multi_turn: MultiTurn | None, decode: Decode | None) -> _Source:
        if multi_turn is None:
            return _Source(SingleTurns(self._generator))
        assert decode is not None, "the text of a turn is given to its environment"
        environments = Environments(multi_turn.pool)
        player = multi_turn.player(self._generator, environments, decode)
        return _Source(player, environments, multi_turn.config.rollout.timeout_s)

    @property
    def num_running(self) -> int:
        """Returns the number of prompts with a rollout that has not ended."""
        return len(self._running)

    @property
    def phase(self) -> str:
        """Says what the rollouts do at the moment."""
        num_prompts = dict.fromkeys(self._sources, 0)
        for running in self._running.values():
            num_prompts[running.source] += 1
        num_requests = self._generator.num_running
        phases = []
        for name, source in self._sources.items():
            phase = source.phase(num_prompts[name], num_requests)
            if len(self._sources) == 1:
                return phase
            if num_prompts[name]:
                phases.append(f"{name}: {phase}")
        return "; ".join(phases)

    def start(self, key: Hashable, prompt: Prompt, params: SamplingParams) -> None:
        """Starts the rollouts of a prompt. Raises what the engine raises if it refuses it."""
        name = prompt.problem.source
        if len(self._sources) == 1:
            [name] = self._sources
        task = _event_loop().create_task(self._sources[name].player.play(key, prompt, params))
        task.add_done_callback(lambda _: self._ended.append(key))
        self._running[key] = _Running(prompt, name, task)
        self._let_coroutines_go_on()
        error = None
        if task.done():
            error = task.exception()
        if error is not None:
            del self._running[key]
            raise error

    def step(self) -> list[tuple[Any, Sampled]]:
        """Runs an engine step and handles replies. Returns the prompts whose rollouts have ended.

        Events are handled one after the other, so that the order of the requests that follow from
        them is that of the events. If the engine is idle, this waits a moment for a reply.
        """
        self.num_events = 0
        if self._engine.num_running:
            for key, completions in self._engine.step():
                self._generator.finish(key, completions)
                self._handled_event()
        for source in self._sources.values():
            if source.environments is not None:
                self._handle_replies(source.environments)
        return self._take_ended()

    def abort(self, keys: Collection[Any]) -> None:
        """Drops these prompts, their requests and their environments."""
        for key in keys:
            self._running.pop(key).task.cancel()
        self._let_coroutines_go_on()

    def _handle_replies(self, environments: Environments) -> None:
        wait_s = 0.0
        if not self._engine.num_running:
            wait_s = _WAIT_S
        replies: Any = environments.pool.ready(timeout_s=wait_s)
        for (key, i), reply in replies:
            if isinstance(reply, Failed) and reply.kind == "lost":
                self._lose(key, reply.reason)
            else:
                environments.deliver((key, i), reply)
            self._handled_event()

    def _lose(self, key: Any, reason: str) -> None:
        """Ends a prompt of which the machine has lost a rollout."""
        running = self._running[key]
        running.lost = reason[:MAX_REASON]
        running.task.cancel()

    def _handled_event(self) -> None:
        self.num_events += 1
        self._let_coroutines_go_on()

    def _let_coroutines_go_on(self) -> None:
        _event_loop().run_until_complete(_iterations())

    def _take_ended(self) -> list[tuple[Any, Sampled]]:
        """Returns the prompts that have ended, without those that were aborted."""
        ended = []
        for key in self._ended:
            running = self._running.get(key)
            if running is None or not running.task.done():
                continue
            del self._running[key]
            if running.lost:
                ended.append((key, Sampled(running.prompt, (), lost=running.lost)))
            else:
                ended.append((key, running.task.result()))
        self._ended.clear()
        return ended


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process, which is never closed.

    Rollouts that have not ended when the process ends are dropped without a message.
    """
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)
    return loop


async def _iterations() -> None:
    """Gives every coroutine its turn until all of them wait."""
    for _ in range(_ITERATIONS):
        await asyncio.sleep(0)
