"""Pool of environments in processes that can be killed.

No environment can stop, stall or crash the run or another rollout. Each rollout has a worker of its
own (common/worker) and a thread that sends it requests, so that deadlines hold while the sampler's
own thread is inside the engine. A request that exceeds its deadline, kills its process or raises
gives one `Failed`. Its process is then killed with all that it started.

Not supported: before Linux 6.12, the kernel cannot forbid an environment to kill the fork server.
That loses the rollouts that run at this moment; the server is started again.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from common.config import MAX_ENVIRONMENTS, Rollouts
from common.errors import UserError, with_type
from common.outcomes import shorten
from common.worker import WorkerSetup, encode
from common.worker.owner import LostError, StartError, Worker
from common.worker.pool import WorkerPool
from environments import Done, Failed, Reply, Turn
from environments.contracts import AgentSetup, EnvironmentSetup
from environments.endpoint import Endpoint, PendingRequest
from environments.service import MAX_ANSWER_BYTES, Answer, Request
from environments.tools import NO_CALLS, Calls

Answered = Reply | PendingRequest


@dataclass(eq=False)
class _Rollout:
    """The state of one key from its start until its rollout is over."""

    key: Hashable
    # None in this queue says that the rollout was closed
    requests: queue.SimpleQueue[Request | None] = field(default_factory=queue.SimpleQueue)
    is_closed: bool = False
    worker: Worker | None = None  # None: its process does not exist yet


class EnvironmentPool:
    """A pool that resets, steps and ends the environments of rollouts.

        with EnvironmentPool(config.rollout, columns=["question", "answer"]) as pool:
            pool.start(("group 7", 0), {"question": "6*4?", "answer": "24"})
            [(("group 7", 0), Turn())] = pool.ready(timeout_s=10)
            calls = [Call("times", {"a": 6, "b": 4})]
            pool.step(("group 7", 0), "Let me see. …", ("Let me see.", calls))
            [(("group 7", 0), Turn([{"role": "tool", …}], …))] = pool.ready(timeout_s=10)

    Entering the pool starts the fork server and checks a first instance in a process of its own. It
    raises UserError when something cannot be found, imported or called with these columns.

    Every start, step and finish is answered once, unless its key is closed before. After Done or
    Failed the key is free again. A key has one request at a time. All calls come from one thread.
    """

    def __init__(
        self, config: Rollouts, columns: Iterable[str], law: Mapping[str, float] | None = None
    ) -> None:
        """Prepares the pool. law: the sampling settings in force for agents."""
        self.tools: list[dict[str, Any]] = []  # JSON schemas for the chat template
        self._endpoint: Endpoint | None = None
        names = list(columns)
        if config.agent is not None:
            service = "environments.agents:AgentService"
            setup = encode(AgentSetup(config.agent, names))
            self._endpoint = Endpoint(law or {})
        else:
            service = "environments.service:EnvironmentService"
            setup = encode(
                EnvironmentSetup(config.environment, config.tools, config.environment_kwargs, names)
            )
        self._workers = WorkerPool[tuple[_Rollout, Answered]](
            WorkerSetup(service, setup, max_memory=2 << 30, confine_signals=True),
            "environments",
            MAX_ENVIRONMENTS,
            config.import_timeout_s,
            "rollout.import_timeout_s",
        )
        self._timeout_s = config.timeout_s
        self._import_timeout_s = config.import_timeout_s
        self._rollouts: dict[Hashable, _Rollout] = {}  # by key, while it is in use
        self._owed: set[Hashable] = set()  # the keys whose request is not answered yet

    def __enter__(self) -> EnvironmentPool:
        try:
            self.tools = self._workers.start(self._describe)
        except BaseException:  # Ctrl-C included: __exit__ is not called when __enter__ raises
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close_all()
        self._workers.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def _describe(self) -> list[dict[str, Any]]:
        """Returns the tool schemas of a first instance. Raises UserError or StartError."""
        worker = self._workers.fork()
        describe = Request("describe")
        try:
            answer = worker.ask(describe, Answer, self._import_timeout_s, MAX_ANSWER_BYTES)
        except LostError as error:
            raise UserError(f"the environment {error}") from None
        self._workers.submit(worker.close, self._timeout_s)
        if answer.failed is not None:
            raise UserError(answer.failed.reason)
        return answer.tools or []

    @property
    def pending(self) -> int:
        """Returns the number of replies still owed."""
        return len(self._owed)

    def start(self, key: Hashable, columns: Mapping[str, Any], seed: int | None = None) -> None:
        """Creates a fresh instance and resets it. The reply is Turn or Failed.

        Waits for another rollout to end if MAX_ENVIRONMENTS of them are alive.

        columns: one data set row. seed: for `random` and numpy in the instance's process; None
        seeds them differently each time.
        """
        assert key not in self._rollouts, f"{key!r} is in use"
        rollout = _Rollout(key)
        self._rollouts[key] = rollout
        self._request(key, Request("reset", columns=dict(columns), seed=seed))
        self._workers.submit(self._live, rollout)

    def step(self, key: Hashable, completion: str, calls: Calls = NO_CALLS) -> None:
        """Sends a turn's text and its tool calls. The reply is Turn, Done or Failed."""
        self._request(key, Request("step", completion, calls))

    def finish(self, key: Hashable) -> None:
        """Tells the environment that a limit ends its rollout. It replies with Done or Failed."""
        self._request(key, Request("finish"))

    def _request(self, key: Hashable, request: Request) -> None:
        assert key not in self._owed, f"{key!r} has not answered yet"
        self._owed.add(key)
        self._rollouts[key].requests.put(request)

    def close(self, key: Hashable) -> None:
        """Drops a rollout that is no longer wanted, and the reply that it owes.

        Does nothing for a key that is not in use.
        """
        is_busy = key in self._owed
        self._owed.discard(key)
        rollout = self._rollouts.pop(key, None)
        if rollout is None:
            return
        rollout.is_closed = True
        rollout.requests.put(None)
        if is_busy and rollout.worker is not None:
            rollout.worker.cancel()

    def close_all(self) -> None:
        for key in list(self._rollouts):
            self.close(key)

    def ready(self, timeout_s: float = 0.0) -> list[tuple[Hashable, Answered]]:
        """Returns replies in any order. Waits at most timeout_s for the first, if one is owed.

        Requests of agents are among them, each twice: when the agent asks, and when it has read the
        answer or is gone.
        """
        wait_s = 0.0
        if self._owed:
            wait_s = timeout_s
        while True:
            arrived = self._workers.take(wait_s)
            answered = self._answered(arrived)
            if answered or not arrived:
                return answered

    def _answered(
        self, arrived: list[tuple[_Rollout, Answered]]
    ) -> list[tuple[Hashable, Answered]]:
        """Returns the replies of rollouts that are not closed, and notes that they are answered."""
        answered = []
        for rollout, reply in arrived:
            if self._rollouts.get(rollout.key) is not rollout:
                continue  # it was closed meanwhile
            if not isinstance(reply, PendingRequest):
                self._owed.discard(rollout.key)
            if isinstance(reply, Done | Failed):
                del self._rollouts[rollout.key]
            answered.append((rollout.key, reply))
        return answered

    # ---- in the thread of a rollout ----

    def _live(self, rollout: _Rollout) -> None:
        """Serves a rollout from its reset to the end of its process, one reply per request."""
        patience_s = self._timeout_s  # for the worker to clean up
        while True:
            request = rollout.requests.get()
            if request is None or rollout.is_closed:
                break
            reply = self._reply(rollout, request)
            self._workers.put((rollout, reply))
            if isinstance(reply, Failed) and reply.kind != "error":
                patience_s = 0.0
            if not isinstance(reply, Turn):
                break
        if rollout.worker is None:
            return
        if rollout.worker.is_cancelled:  # during a request
            patience_s = 1.0
        rollout.worker.close(patience_s)

    def _reply(self, rollout: _Rollout, request: Request) -> Reply:
        """Returns what the environment replies. Whatever happens, the result is a reply."""
        started_s = time.monotonic()
        about = ""
        if request.kind == "step":
            about = f" Completion: {shorten(request.completion)}"
        try:
            if rollout.worker is None:
                rollout.worker = self._workers.fork()
            if rollout.is_closed:  # closed meanwhile: nobody would answer its requests
                rollout.worker.cancel()
            answer = self._ask(rollout, rollout.worker, request)
            reply = answer.turn or answer.done or answer.failed
            if reply is None:
                raise LostError("broke the protocol (an answer without a reply)")
            return reply
        except StartError as error:
            return Failed("lost", str(error))
        except LostError as error:
            reason = f"{self._loss(error, request)}.{about}"
            return Failed(error.kind, reason, time.monotonic() - started_s)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            reason = f"the row cannot be sent to the environment: {error}.{about}"
            return Failed("error", reason)
        except Exception as error:  # without a reply the sampler would wait for ever
            kind: Literal["lost", "crash"] = "crash"
            if isinstance(error, OSError):
                kind = "lost"
            return Failed(kind, f"the environment is lost: {with_type(error)}.{about}")

    def _loss(self, error: LostError, request: Request) -> str:
        """Returns what a worker did, or failed to do in time."""
        if self._endpoint is None:
            subject = "the environment"
            missed = f"did not answer {request.kind}"
        else:
            subject = "the agent"
            missed = "neither asked the model nor ended"
        if error.timed_out:
            return f"{subject} {missed} within {self._timeout_s:g} s, so its process was killed"
        return f"{subject} {error}"

    def _ask(self, rollout: _Rollout, worker: Worker, request: Request) -> Answer:
        """Returns the worker's answer. Raises as Worker.ask does.

        What an agent asks the model meanwhile is put among the replies.
        """
        if self._endpoint is None:
            return worker.ask(request, Answer, self._timeout_s, MAX_ANSWER_BYTES)

        def forward(asking: PendingRequest) -> None:
            self._workers.put((rollout, asking))

        started_s = time.monotonic()
        with self._endpoint.address(worker, self._timeout_s, forward) as address:
            columns = request.columns | {"base_url": address.url}
            request = msgspec.structs.replace(request, columns=columns)
            answer = worker.ask(request, Answer, self._timeout_s, MAX_ANSWER_BYTES)
        agent_s = time.monotonic() - started_s - address.asked_s
        done = answer.done
        if done is not None:
            done = replace(done, seconds=agent_s)
        return Answer(done=done, failed=answer.failed)
