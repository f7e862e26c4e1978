"""Environments in processes that can be killed: none can stop, stall or crash the run, or another rollout.

One thread owns a fork server, and through it one process per rollout. Deadlines hold while the sampler's own thread is
inside the engine. A request that exceeds its deadline, kills its process or raises becomes `Failed`, is counted once,
and its process is killed with all that it started; no other rollout notices. Of an environment that has ended, `close`
is called if it has one. Nothing is pickled. Left out: whoever kills the fork server itself, where the kernel cannot
forbid it (`rollout.confine_signals`), fails the rollouts of that moment; the server is started again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from common.config import Rollouts
from common.errors import UserError
from environments import Failed, Reply, Turn
from environments.keeper import Keeper
from environments.messages import EnvironmentSetup, Request


class EnvironmentPool:
    """Resets, steps and ends the environments of rollouts.

        with EnvironmentPool(config.rollout, columns=["question", "answer"]) as pool:
            pool.start(("group 7", 0), {"question": "6*4?", "answer": "24"})
            [(("group 7", 0), Turn())] = pool.ready(timeout_s=10)
            pool.step(("group 7", 0), '<tool_call>{"name": "times", "arguments": {"a": 6, "b": 4}}</tool_call>')
            [(("group 7", 0), Turn([{"role": "tool", …}], num_calls=1, …))] = pool.ready(timeout_s=10)

    Entering starts the fork server, and in a process of its own a first instance, which is looked at and dropped; it
    raises UserError when something cannot be found, imported or, with `columns`, called with these columns. Every
    start, step and finish is answered once, unless its key is closed before. After Done or Failed the key is gone. One
    request per key at a time; use from one thread.
    """

    def __init__(self, config: Rollouts, columns: Iterable[str] | None = None) -> None:
        self.tools: list[dict[str, Any]] = []  # JSON schemas for the chat template; empty: it has no tools
        self.gives_rewards = False  # whether Done may come with a reward
        self.num_timeouts = self.num_crashes = self.num_errors = 0
        names = None if columns is None else list(columns)
        arguments, memory = config.environment_kwargs, int(config.max_memory_gib * 2**30)
        setup = EnvironmentSetup(
            config.environment, config.tools, arguments, config.tool_parser, names, memory, config.confine_signals
        )
        self._numbers: dict[Hashable, int] = {}  # of the keys in use
        self._owed: set[Hashable] = set()
        self._last_number = 0
        self._keeper = Keeper(setup, config.timeout_s, config.max_environments)
        self._thread = threading.Thread(target=self._keeper.run, daemon=True)

    def __enter__(self) -> EnvironmentPool:
        self._thread.start()
        try:
            first = self._keeper.first.get()
            if isinstance(first, str):
                raise UserError(first)
            self.tools, self.gives_rewards = first.tools, first.gives_rewards
        except BaseException:  # Ctrl-C during the start included: __exit__ is not called when __enter__ raises
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._keeper.stop()
        self._thread.join(timeout=10.0)

    @property
    def pending(self) -> int:
        """Answers owed."""
        return len(self._owed)

    @property
    def live(self) -> int:
        """Keys that were started and have neither ended nor been closed."""
        return len(self._numbers)

    def start(self, key: Hashable, columns: Mapping[str, Any], seed: int | None = None) -> None:
        """A fresh instance and its reset → Turn or Failed. Beyond rollout.max_environments it waits for a place.

        columns: one data set row. seed: of `random` and of numpy in the instance; None = another one each time.
        """
        assert key not in self._numbers, f"{key!r} is in use"
        self._last_number += 1
        self._numbers[key] = self._last_number
        self._ask(key, Request("reset", columns=dict(columns), seed=seed))

    def step(self, key: Hashable, completion: str) -> None:
        """What the model wrote in this turn → Turn, Done or Failed."""
        self._ask(key, Request("step", completion))

    def finish(self, key: Hashable) -> None:
        """The rollout ended by a limit, not by its environment → Done or Failed."""
        self._ask(key, Request("finish"))

    def close(self, key: Hashable) -> None:
        """The rollout is not wanted any more; an answer under way is dropped. A key that is not in use is no error."""
        self._owed.discard(key)
        if (number := self._numbers.pop(key, None)) is not None:
            self._keeper.close(number)

    def close_all(self) -> None:
        for key in list(self._numbers):
            self.close(key)

    def ready(self, timeout_s: float = 0.0) -> list[tuple[Hashable, Reply]]:
        """Answers, in any order; waits at most timeout_s for the first. Empty at once when none is owed."""
        answered: list[tuple[Hashable, Reply]] = []
        wait_s = timeout_s if self._owed else 0.0
        with contextlib.suppress(queue.Empty):
            while True:
                key, number, reply = self._keeper.replies.get(block=wait_s > 0, timeout=wait_s or None)
                if self._numbers.get(key) != number:
                    continue  # closed meanwhile
                self._owed.discard(key)
                if not isinstance(reply, Turn):
                    del self._numbers[key]
                self._count(reply)
                answered.append((key, reply))
                wait_s = 0.0
        return answered

    def _ask(self, key: Hashable, request: Request) -> None:
        assert key not in self._owed, f"{key!r} has not answered yet"
        self._owed.add(key)
        self._keeper.ask(key, self._numbers[key], request)

    def _count(self, reply: Reply) -> None:
        if isinstance(reply, Failed):
            self.num_timeouts += reply.kind == "timeout"
            self.num_crashes += reply.kind == "crash"
            self.num_errors += reply.kind == "error"
