"""Completions of the engine, and replies of environments, as values that a coroutine awaits.

The engine is synchronous, and an environment answers from a process of its own. `Turns` steps the
engine, collects the replies, and passes both to these two classes, which wake the coroutines that
wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from common.types import EncodedImage
from environments import Done, Failed, Reply
from environments.tools import Calls
from sampler.engine.completions import Completion, SamplingParams

if TYPE_CHECKING:
    from environments.endpoint import PendingRequest
    from environments.pool import EnvironmentPool
    from sampler.engine.engine import Engine


class Generator:
    """Generates completions with the engine for coroutines that wait for them."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._futures: dict[Hashable, asyncio.Future[list[Completion]]] = {}

    @property
    def num_running(self) -> int:
        """Returns the number of requests in the engine."""
        return self._engine.num_running

    async def generate(
        self,
        key: Hashable,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        params: SamplingParams,
        images: Sequence[EncodedImage] = (),
    ) -> list[Completion]:
        """Returns the params.num_completions completions of one prompt.

        The request enters the engine before this coroutine waits for the first time. If the
        coroutine is cancelled, the engine drops the request. Raises what the engine raises for a
        prompt that it refuses.
        """
        self._engine.submit(key, prompt_ids, params, images)
        future = asyncio.get_running_loop().create_future()
        self._futures[key] = future
        try:
            return await future
        except asyncio.CancelledError:
            self._engine.abort({key})
            raise
        finally:
            del self._futures[key]

    def finish(self, key: Hashable, completions: list[Completion]) -> None:
        """Wakes the coroutine that waits for these completions, unless it was cancelled."""
        future = self._futures.get(key)
        if future is not None and not future.done():
            future.set_result(completions)


class Environments:
    """The environments, or agents, that the rollouts of a data source run in a pool."""

    def __init__(self, pool: EnvironmentPool):
        self.pool = pool
        self._inboxes: dict[Hashable, asyncio.Queue[Reply | PendingRequest]] = {}

    def start(self, key: Hashable, columns: Mapping[str, Any], seed: int | None) -> Environment:
        """Creates the environment of the rollout `key` and resets it, or starts its agent.

        columns: the row of the data set. seed: for random numbers in the environment's process.
        """
        inbox: asyncio.Queue[Reply | PendingRequest] = asyncio.Queue()
        self._inboxes[key] = inbox
        self.pool.start(key, columns, seed)
        return Environment(self, key, inbox)

    def deliver(self, key: Hashable, reply: Reply | PendingRequest) -> None:
        """Passes a reply to the rollout `key`, unless that is over."""
        inbox = self._inboxes.get(key)
        if inbox is not None:
            inbox.put_nowait(reply)

    def close(self, key: Hashable) -> None:
        """Ends an environment whose rollout is over before its environment is."""
        del self._inboxes[key]
        self.pool.close(key)

    def forget(self, key: Hashable) -> None:
        """Removes an environment that has ended by itself."""
        del self._inboxes[key]


class Environment:
    """The environment, or the agent, of one rollout."""

    def __init__(
        self,
        environments: Environments,
        key: Hashable,
        inbox: asyncio.Queue[Reply | PendingRequest],
    ):
        self._environments = environments
        self._key = key
        self._inbox = inbox
        self._is_over = False

    async def reply(self) -> Any:
        """Returns the next reply: a Turn, Done or Failed, or a PendingRequest of an agent."""
        reply = await self._inbox.get()
        if isinstance(reply, Done | Failed) and not self._is_over:
            self._is_over = True
            self._environments.forget(self._key)
        return reply

    async def step(self, text: str, calls: Calls) -> Reply:
        """Gives the environment a turn of the model and its tool calls, and returns its reply."""
        self._environments.pool.step(self._key, text, calls)
        return await self.reply()

    async def finish(self) -> Done | Failed:
        """Tells the environment that a limit ends the rollout, and returns its last reply."""
        self._environments.pool.finish(self._key)
        return await self.reply()

    def close(self) -> None:
        """Ends the environment's process, unless the environment has ended by itself."""
        if not self._is_over:
            self._is_over = True
            self._environments.close(self._key)
