"""Reward functions in a process that can be killed: no reward can stop, stall or crash the run.

A thread asks the worker, because a deadline must hold while the sampler's own thread is inside the engine. A job that
exceeds its deadline, kills its process or raises becomes a RewardFailure and is not tried again; the worker is killed
with all that it started, and replaced. One that died while idle is replaced without failing a job. Nothing is pickled.
Left out: several jobs share one interpreter until it is killed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from common.config import Rewards
from common.errors import UserError
from common.outcomes import shorten
from common.worker import encode
from common.worker.owner import START_TIMEOUT_S, LostError, StartError, Worker, Workers
from rewards import Scores
from rewards.find import Wanted
from rewards.service import Job, JobReply, RewardSetup


@dataclass(frozen=True)
class RewardFailure:
    """A group without scores, and why. timeout: killed at the deadline. crash: its process died. error: it raised."""

    kind: Literal["timeout", "crash", "error"]
    reason: str


class RewardPool:
    """Scores groups beside sampling.

        with RewardPool(config.rewards, columns=["question", "answer"]) as pool:
            pool.submit(7, "2+2?", ["4", "5"], [[19], [20]], {"question": "2+2?", "answer": "#### 4"})
            [(7, [({"answer": 1.0, …}, 0.0), …])] = pool.ready(timeout_s=10)

    Entering starts the process and raises UserError when a function cannot be found, imported, or, with `columns`,
    called with these columns. Use from one thread.
    """

    def __init__(
        self,
        config: Rewards,
        columns: Iterable[str] | None = None,
        max_steps: int = 0,
        image_key: str | None = None,
        has_rollouts: bool = True,
    ) -> None:
        """image_key: a column that functions get only if they name it: its values are megabytes.
        has_rollouts: else functions that need one are not called (`wanted.needs_rollout`)."""
        self.image_key = image_key
        self.logged: dict[str, float] = {}  # by log_metric, of the newest job that logged the name
        self.pending = 0  # submitted and not yet returned by ready()
        self.wanted = Wanted()  # by the functions; known once entered
        names = None if columns is None else [*columns, *([image_key] if image_key else [])]
        setup = RewardSetup(config.reward_funcs, config.weights, names, config.reward_kwargs, max_steps, has_rollouts)
        memory = int(config.max_memory_gib * 2**30)
        self._workers = Workers("rewards.service:RewardService", setup, title="rewards", max_memory=memory)
        self._worker: Worker | None = None
        self._timeout_s = config.timeout_s
        self._jobs: queue.SimpleQueue[tuple[Hashable, Job] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Hashable, Scores | RewardFailure]] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[StartError | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> RewardPool:
        self._thread.start()
        try:
            if (problem := self._started.get()) is not None:
                raise UserError(str(problem))
        except BaseException:  # Ctrl-C during the start included: __exit__ is not called when __enter__ raises
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._jobs.put(None)
        self._workers.close()
        self._thread.join(timeout=5.0)

    def submit(
        self,
        key: Hashable,
        prompt_messages: str | list[dict[str, Any]],
        completions: Sequence[str | list[dict[str, Any]]],
        completion_ids: Sequence[Any],
        columns: Mapping[str, Any],
        policy_version: int = 0,
        **of_environments: Sequence[Any],
    ) -> None:
        """Queue the completions of one prompt and return at once.

        completions: texts, or of rollouts with several turns the messages after the prompt. completion_ids: one list or
        integer array per completion. columns: one data set row, read-only from here on; the process gets of it what the
        functions want. policy_version: what reward functions get as trainer_state.global_step. of_environments:
        environment_rewards, what the environment of each completion said, and environments, the `Done.state` of each.
        """
        named, rest = self.wanted.names, self.wanted.rest
        row = {k: value for k, value in columns.items() if k in named or (rest and k != self.image_key)}
        theirs = {name: list(values) for name, values in of_environments.items()}
        job = Job(prompt_messages, list(completions), list(completion_ids), row, policy_version, **theirs)
        self._jobs.put((key, job))
        self.pending += 1

    def ready(self, timeout_s: float = 0.0) -> list[tuple[Hashable, Scores | RewardFailure]]:
        """Finished jobs, in any order; waits at most timeout_s for the first. Empty at once when nothing is pending."""
        finished: list[tuple[Hashable, Scores | RewardFailure]] = []
        wait_s = timeout_s if self.pending else 0.0
        with contextlib.suppress(queue.Empty):
            while True:
                finished.append(self._results.get(block=wait_s > 0, timeout=wait_s or None))
                wait_s = 0.0
        self.pending -= len(finished)
        return finished

    def _serve(self) -> None:
        """The thread: every job gets exactly one result."""
        try:
            self._require_worker()
            self._started.put(None)
        except StartError as problem:
            self._started.put(problem)
        while (item := self._jobs.get()) is not None:
            key, job = item
            self._results.put((key, result := self._result_of(job)))
            if isinstance(result, RewardFailure) and result.kind != "error":
                self._drop_worker()  # behind the result, which need not wait for its end
            with contextlib.suppress(StartError):  # the next job tries again and reports it
                self._require_worker()  # now, so that the next job need not wait for the replacement
        self._drop_worker()

    def _require_worker(self) -> Worker:
        """The worker, replaced if there is none or the one there was has died while idle. Raises StartError."""
        if self._worker is not None and not self._worker.has_ended():
            return self._worker
        self._drop_worker()
        self._worker = self._workers.fork()
        try:
            reply = self._ask(self._worker, b"", START_TIMEOUT_S)
        except LostError as error:
            self._drop_worker()
            raise StartError(f"the reward process {error}. It was importing the reward functions") from error
        if reply.wanted is None:
            self._drop_worker()
            raise StartError(reply.reason)
        self.wanted = reply.wanted
        return self._worker

    def _drop_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _result_of(self, job: Job) -> Scores | RewardFailure:
        about = f"First completion: {shorten(job.completions[0])}" if job.completions else "No completions"
        try:
            request = encode(job)
        except (TypeError, ValueError, OverflowError) as error:
            return RewardFailure("error", f"the row cannot be sent to the reward functions: {error}. {about}")
        try:
            reply = self._ask(self._require_worker(), request, self._timeout_s)
            if not reply.reason and len(reply.scores) != len(job.completions):
                raise LostError("answered something else than it was asked")
        except StartError as error:
            return RewardFailure("crash", str(error))
        except LostError as error:
            return RewardFailure("timeout" if error.timed_out else "crash", f"the reward process {error}. {about}")
        if reply.reason:
            return RewardFailure("error", reply.reason)
        self.logged |= reply.logged
        return reply.scores

    def _ask(self, worker: Worker, request: bytes, timeout_s: float) -> JobReply:
        """Raises LostError, after which there is no worker."""
        try:
            return msgspec.msgpack.decode(worker.ask(request, timeout_s), type=JobReply)
        except msgspec.MsgspecError as error:
            raise LostError(f"broke the protocol ({error})") from None
