"""Pool of environments in processes that can be killed: none can stop, stall or crash the run, or another rollout.

A rollout has a worker of its own (common/worker), and a thread that sends it requests. Deadlines hold while the
sampler's own thread is inside the engine. A request that exceeds its deadline, kills its process or raises gives one
`Failed`, and its process is killed with all that it started, without effect on other rollouts. Left out: whoever
kills the fork server itself, where the kernel cannot forbid it (Linux 6.12), loses the rollouts of that moment; the
server is started again.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from common.config import MAX_ENVIRONMENTS, Rollouts
from common.errors import UserError, with_type
from common.outcomes import shorten
from common.worker import WorkerSetup, encode
from common.worker.owner import LostError, StartError, Worker, Workers
from environments import Done, Failed, Reply, Turn
from environments.contracts import AgentSetup, EnvironmentSetup
from environments.endpoint import Endpoint, PendingRequest
from environments.service import MAX_ANSWER_BYTES, Answer, Request
from environments.tools import NO_CALLS, Calls


@dataclass(eq=False)
class _Rollout:
    """The state of one key from its start until its rollout is over."""

    key: Hashable
    requests: queue.SimpleQueue[Request | None] = field(default_factory=queue.SimpleQueue)  # None: it was closed
    is_closed: bool = False
    worker: Worker | None = None  # None: its process does not exist yet


class EnvironmentPool:
    """A pool that resets, steps and ends the environments of rollouts.

        with EnvironmentPool(config.rollout, columns=["question", "answer"]) as pool:
            pool.start(("group 7", 0), {"question": "6*4?", "answer": "24"})
            [(("group 7", 0), Turn())] = pool.ready(timeout_s=10)
            pool.step(("group 7", 0), "Let me see. …", ("Let me see.", [Call("times", {"a": 6, "b": 4})]))
            [(("group 7", 0), Turn([{"role": "tool", …}], num_calls=1, …))] = pool.ready(timeout_s=10)

    Entering starts the fork server and, in a process of its own, a first instance, which is checked and dropped; it
    raises UserError when something cannot be found, imported or called with these columns. Every
    start, step and finish is answered once, unless its key is closed before. After Done or Failed the key is gone. One
    request per key at a time; use from one thread.
    """

    def __init__(self, config: Rollouts, columns: Iterable[str], law: Mapping[str, float] | None = None) -> None:
        """Prepares the pool. law: the sampling settings in force for agents."""
        self.tools: list[dict[str, Any]] = []  # JSON schemas for the chat template; empty without tools
        names = list(columns)
        service = "environments.service:EnvironmentService"
        setup: Any = EnvironmentSetup(config.environment, config.tools, config.environment_kwargs, names)
        self._endpoint: Endpoint | None = None
        if config.agent is not None:
            service, setup = "environments.agents:AgentService", AgentSetup(config.agent, names)
            self._endpoint = Endpoint(law or {})
        worker = WorkerSetup(service, encode(setup), max_memory=2 << 30, confine_signals=True)
        self._workers = Workers(worker, "environments", config.import_timeout_s, "rollout.import_timeout_s")
        self._timeout_s, self._import_timeout_s = config.timeout_s, config.import_timeout_s
        self._threads = ThreadPoolExecutor(MAX_ENVIRONMENTS)  # they also start the fork server
        self._rollouts: dict[Hashable, _Rollout] = {}  # by key, while it is in use
        self._owed: set[Hashable] = set()
        self._replies: queue.SimpleQueue[tuple[_Rollout, Reply | PendingRequest]] = queue.SimpleQueue()

    def __enter__(self) -> EnvironmentPool:
        try:
            self.tools = self._threads.submit(self._describe).result()
        except BaseException:  # Ctrl-C during the start included: __exit__ is not called when __enter__ raises
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close_all()
        self._workers.close()
        self._threads.shutdown(cancel_futures=True)
        if self._endpoint is not None:
            self._endpoint.close()

    def _describe(self) -> list[dict[str, Any]]:
        """Returns the tool schemas of a first instance. Raises UserError."""
        try:
            worker = self._workers.fork()
            answer = worker.ask(Request("describe"), Answer, self._import_timeout_s, MAX_ANSWER_BYTES)
        except StartError as error:
            raise UserError(str(error)) from None
        except LostError as error:
            raise UserError(f"the environment {error}") from None
        self._threads.submit(worker.close, self._timeout_s)
        if answer.failed is not None:
            raise UserError(answer.failed.reason)
        return answer.tools or []

    @property
    def pending(self) -> int:
        """Returns the number of replies still owed."""
        return len(self._owed)

    def start(self, key: Hashable, columns: Mapping[str, Any], seed: int | None = None) -> None:
        """Creates a fresh instance and resets it → Turn or Failed. Beyond MAX_ENVIRONMENTS it waits until another ends.

        columns: one data set row. seed: for the instance's `random` and numpy; None = another one each time.
        """
        assert key not in self._rollouts, f"{key!r} is in use"
        rollout = self._rollouts[key] = _Rollout(key)
        self._request(key, Request("reset", columns=dict(columns), seed=seed))
        self._threads.submit(self._live, rollout)

    def step(self, key: Hashable, completion: str, calls: Calls = NO_CALLS) -> None:
        """Sends a turn's completion and its tool calls to the environment → Turn, Done or Failed."""
        self._request(key, Request("step", completion, calls))

    def finish(self, key: Hashable) -> None:
        """Ends a rollout that a limit, not its environment, has ended → Done or Failed."""
        self._request(key, Request("finish"))

    def _request(self, key: Hashable, request: Request) -> None:
        assert key not in self._owed, f"{key!r} has not answered yet"
        self._owed.add(key)
        self._rollouts[key].requests.put(request)

    def close(self, key: Hashable) -> None:
        """Drops a rollout that is no longer wanted, with a reply under way. A key that is not in use is no error."""
        is_busy = key in self._owed
        self._owed.discard(key)
        if (rollout := self._rollouts.pop(key, None)) is not None:
            rollout.is_closed = True
            rollout.requests.put(None)
            if is_busy and rollout.worker is not None:
                rollout.worker.cancel()

    def close_all(self) -> None:
        for key in list(self._rollouts):
            self.close(key)

    def ready(self, timeout_s: float = 0.0) -> list[tuple[Hashable, Reply | PendingRequest]]:
        """Returns replies, in any order; waits at most timeout_s for the first. Empty at once when none is owed.

        Requests of agents are among them, each twice: when asked, and when the answer is read or the agent is gone."""
        answered: list[tuple[Hashable, Reply | PendingRequest]] = []
        wait_s = timeout_s if self._owed else 0.0
        with contextlib.suppress(queue.Empty):
            while True:
                rollout, reply = self._replies.get(block=wait_s > 0, timeout=wait_s or None)
                if self._rollouts.get(rollout.key) is not rollout:
                    continue  # closed meanwhile
                if not isinstance(reply, PendingRequest):
                    self._owed.discard(rollout.key)
                if isinstance(reply, Done | Failed):
                    del self._rollouts[rollout.key]
                answered.append((rollout.key, reply))
                wait_s = 0.0
        return answered

    # ---- in the thread of a rollout ----

    def _live(self, rollout: _Rollout) -> None:
        """Serves a rollout from reset to the end of its process, which frees a slot. Requests get one reply each."""
        patience_s = self._timeout_s  # for the worker to clean up
        while (request := rollout.requests.get()) is not None and not rollout.is_closed:
            reply = self._reply(rollout, request)
            self._replies.put((rollout, reply))
            if not isinstance(reply, Turn):
                is_lost = isinstance(reply, Failed) and reply.kind != "error"
                patience_s = 0.0 if is_lost else self._timeout_s
                break
        if rollout.worker is not None:
            rollout.worker.close(1.0 if rollout.worker.is_cancelled else patience_s)  # cancelled: during a request

    def _reply(self, rollout: _Rollout, request: Request) -> Reply:
        about = f" Completion: {shorten(request.completion)}" if request.kind == "step" else ""
        started_s = time.monotonic()
        try:
            if rollout.worker is None:
                rollout.worker = self._workers.fork()
            if rollout.is_closed:  # closed meanwhile: nobody would answer its requests
                rollout.worker.cancel()
            answer = self._ask(rollout, rollout.worker, request)
            if (reply := answer.turn or answer.done or answer.failed) is None:
                raise LostError("broke the protocol (an answer without a reply)")
            return reply
        except StartError as error:
            return Failed("lost", str(error))
        except LostError as error:
            whose = "the agent" if self._endpoint else "the environment"
            missed = "neither asked the model nor ended" if self._endpoint else f"did not answer {request.kind}"
            late = f"{missed} within {self._timeout_s:g} s, so its process was killed"
            reason = f"{whose} {late if error.timed_out else error}.{about}"
            return Failed(error.kind, reason, time.monotonic() - started_s)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return Failed("error", f"the row cannot be sent to the environment: {error}.{about}")
        except Exception as error:  # a reply is owed whatever happens: without it the sampler waits for ever
            kind: Literal["lost", "crash"] = "lost" if isinstance(error, OSError) else "crash"
            return Failed(kind, f"the environment is lost: {with_type(error)}.{about}")

    def _ask(self, rollout: _Rollout, worker: Worker, request: Request) -> Answer:
        """Returns the worker's answer; an agent's requests become replies meanwhile. Raises as Worker.ask."""
        if self._endpoint is None:
            return worker.ask(request, Answer, self._timeout_s, MAX_ANSWER_BYTES)
        started_s = time.monotonic()
        with self._endpoint.address(worker, self._timeout_s, lambda a: self._replies.put((rollout, a))) as address:
            request = msgspec.structs.replace(request, columns=request.columns | {"base_url": address.url})
            answer = worker.ask(request, Answer, self._timeout_s, MAX_ANSWER_BYTES)
        own_s = time.monotonic() - started_s - address.asked_s
        return Answer(done=answer.done and replace(answer.done, seconds=own_s), failed=answer.failed)
