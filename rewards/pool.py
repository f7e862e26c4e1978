"""Reward functions in processes that can be killed: no reward can stop, stall or crash the run.

A job is one group of completions. A job that exceeds its deadline, kills its process or raises
becomes a RewardFailure and is not tried again. Its worker is killed with all that it started, and
replaced. Groups are scored side by side, in as many processes as are worth their cost (load.py); a
process that hangs is not counted. A process keeps its interpreter from job to job, until it is
killed.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from common.config import MAX_REWARD_WORKERS, Rewards
from common.outcomes import shorten
from common.processes.exits import say
from common.worker import WorkerSetup, encode
from common.worker.owner import LossKind, LostError, StartError, Worker
from common.worker.pool import WorkerPool
from rewards import Scores
from rewards.find import Wanted
from rewards.load import Load
from rewards.service import Job, JobReply, RewardSetup, columns_for


@dataclass(frozen=True)
class RewardFailure:
    """A group without scores, and the reason.

    kind: "timeout" if its process was killed at the deadline, "crash" if it died, "error" if a
    function raised, "lost" if the fork server died, for which no function is to blame.
    """

    kind: LossKind | Literal["error"]
    reason: str


@dataclass(frozen=True)
class Scored:
    """The result of one job."""

    key: Hashable
    result: Scores | RewardFailure
    logged: dict[str, float]  # by log_metric


class RewardPool:
    """A pool of processes that score groups while sampling goes on.

        with RewardPool(config.rewards, columns=["question", "answer"]) as pool:
            row = {"question": "2+2?", "answer": "#### 4"}
            pool.submit(7, "2+2?", ["4", "5"], [[19], [20]], row)
            [(7, [({"answer": 1.0, …}, 0.0), …])] = pool.ready(timeout_s=10)

    Entering the pool starts a process. It raises UserError when a function cannot be found or
    imported, or cannot be called with `columns`, if they are given. All calls come from one thread.
    """

    def __init__(
        self,
        config: Rewards,
        columns: Iterable[str] | None = None,
        max_steps: int = 0,
        image_key: str | None = None,
        has_rollouts: bool = True,
    ) -> None:
        """Prepares the pool.

        image_key: a column of pictures, which only functions that name it get.
        has_rollouts: whether to call the functions that need a rollout (`wanted.needs_rollout`).
        """
        self._image_key = image_key
        self.logged: dict[str, float] = {}  # by log_metric, of the newest job that logged the name
        self.pending = 0  # submitted and not yet returned by ready()
        self.wanted = Wanted()  # what the functions want; known once entered
        names = None if columns is None else list(columns)
        if names is not None and image_key:
            names.append(image_key)
        setup = RewardSetup(
            config.reward_funcs,
            config.weights,
            names,
            config.reward_kwargs,
            max_steps,
            has_rollouts,
            config.timeout_s,
        )
        max_memory = int(config.max_memory_gib * 2**30)
        worker = WorkerSetup("rewards.service:RewardService", encode(setup), max_memory)
        self._more_memory = f"; allow more: rewards.max_memory_gib={2 * config.max_memory_gib:g}"
        self._workers = WorkerPool[Scored](worker, "rewards", MAX_REWARD_WORKERS)
        self._timeout_s = config.timeout_s
        self._import_timeout_s = config.import_timeout_s
        # The longest time for a job, because its process may be a new one.
        self.patience_s = config.timeout_s + config.import_timeout_s
        self._num_workers = config.num_workers  # 0 or None: as many as are worth their cost
        if not self._num_workers and config.arguments_of_built_in("classifier"):
            self._num_workers = 1  # because each process would load the models
        self._lock = threading.Lock()  # protects all below
        self._waiting: deque[tuple[Hashable, Job]] = deque()
        self._idle: list[Worker] = []
        # By the job's id: when its worker was asked; infinity while its process is starting.
        self._busy: dict[int, float] = {}
        self._load = Load()

    def __enter__(self) -> RewardPool:
        try:
            self._idle.append(self._workers.start(self._new_worker))
        except BaseException:  # Ctrl-C included: __exit__ is not called when __enter__ raises
            self.__exit__()
            raise
        return self

    @property
    def image_key(self) -> str | None:
        """Returns the column of a row's images; None if no function names that column."""
        if self._image_key in self.wanted.names:
            return self._image_key
        return None

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._waiting.clear()
        self._workers.close()
        for worker in self._idle:
            worker.close()

    def submit(
        self,
        key: Hashable,
        prompt_messages: str | list[dict[str, Any]],
        completions: Sequence[str | list[dict[str, Any]]],
        completion_ids: Sequence[Any],
        columns: Mapping[str, Any],
        policy_version: int = 0,
        **more: Sequence[Any],
    ) -> None:
        """Queues the completions of one prompt and returns at once.

        completions: texts, or the messages after the prompt for rollouts of several turns.
        completion_ids: one list or integer array per completion.
        columns: one data set row, which must not be changed from here on.
        policy_version: what reward functions get as trainer_state.global_step.
        more: `environment_rewards` and `environments`, the environment's reward and `Done.state` of
        each completion, and `scored_by`, as in Problem.
        """
        lists = {name: list(values) for name, values in more.items()}
        job = Job(
            prompt_messages,
            list(completions),
            list(completion_ids),
            columns_for(self.wanted, columns, self._image_key),
            policy_version,
            **lists,
        )
        self.pending += 1
        with self._lock:
            self._waiting.append((key, job))
        self._start_waiting()

    def ready(self, timeout_s: float = 0.0) -> list[tuple[Hashable, Scores | RewardFailure]]:
        """Returns finished jobs in any order.

        Waits at most timeout_s for the first, and not at all if no job is pending.
        """
        self._start_waiting()  # a worker may hang by now
        finished: list[tuple[Hashable, Scores | RewardFailure]] = []
        if self.pending:
            for scored in self._workers.take(timeout_s):
                finished.append((scored.key, scored.result))
                # here and not in a thread, because the caller may iterate over `logged` meanwhile
                self.logged |= scored.logged
        self.pending -= len(finished)
        return finished

    def _start_waiting(self) -> None:
        """Starts waiting jobs, as many as there may be processes. One that hangs does not count."""
        with self._lock:
            # a group that takes 1 s more than four others take may never end
            late_since = time.monotonic() - 1.0 - 4 * self._load.seconds
            while self._waiting:
                num_late = sum(asked_s < late_since for asked_s in self._busy.values())
                num_useful = len(self._busy) + len(self._idle) - num_late
                worth = num_late + self._load.num_worth(max(1, num_useful), len(self._waiting))
                if len(self._busy) >= (self._num_workers or min(MAX_REWARD_WORKERS, worth)):
                    return
                worker = None
                if self._idle:
                    worker = self._idle.pop()
                key, job = self._waiting.popleft()
                self._busy[id(job)] = math.inf
                self._workers.submit(self._serve, worker, key, job)

    # ---- in the threads ----

    def _serve(self, worker: Worker | None, key: Hashable, job: Job) -> None:
        """Serves a job in a worker. Every job gets exactly one result."""
        is_another = worker is None
        trouble = ""
        if worker is None or worker.has_ended():
            worker, trouble = self._replace(worker)
        if worker is None and is_another and self._continue_without(key, job, trouble):
            return
        result: Scores | RewardFailure = RewardFailure("lost", trouble)
        logged: dict[str, float] = {}
        if worker is not None:
            result, logged = self._score(worker, job)
        self._workers.put(Scored(key, result, logged))
        if isinstance(result, RewardFailure) and result.kind != "error":
            # After the result is put, and before the next job, so that neither waits.
            worker, _ = self._replace(worker)
        with self._lock:
            del self._busy[id(job)]
            if worker is not None:
                self._idle.append(worker)
        self._start_waiting()

    def _continue_without(self, key: Hashable, job: Job, trouble: str) -> bool:
        """Queues a job for the other workers, if there are any, when no further one can start.

        The import of a user's file may take what only one process can have, such as a port.
        """
        with self._lock:
            others = len(self._busy) + len(self._idle) - 1
            if others < 1:
                return False
            self._num_workers = others
            del self._busy[id(job)]
            self._waiting.appendleft((key, job))
        say(
            f"rewards: no more than {others} processes score groups, because another cannot start: "
            f"{trouble}"
        )
        self._start_waiting()
        return True

    def _replace(self, worker: Worker | None) -> tuple[Worker | None, str]:
        """Returns another worker in place of this one, or None and why there is none."""
        if worker is not None:
            worker.close()
        try:
            return self._new_worker(), ""
        except StartError as error:
            return None, str(error)

    def _new_worker(self) -> Worker:
        """Returns a worker with the functions found and imported. Raises StartError."""
        worker = self._workers.fork()
        try:
            reply = worker.ask(None, JobReply, self._import_timeout_s)
        except LostError as error:
            worker.close()
            reason = f"the reward process {error}. It was importing the reward functions"
            if error.timed_out:
                reason += f"; allow more: rewards.import_timeout_s={2 * self._import_timeout_s:g}"
            raise StartError(reason) from error
        if reply.wanted is None:
            worker.close()
            raise StartError(self._with_remedy(reply.reason))
        self.wanted = reply.wanted
        return worker

    def _score(self, worker: Worker, job: Job) -> tuple[Scores | RewardFailure, dict[str, float]]:
        about = "No completions"
        if job.completions:
            about = f"First completion: {shorten(job.completions[0])}"
        try:
            self._busy[id(job)] = time.monotonic()
            reply = worker.ask(job, JobReply, self._timeout_s)
        except LostError as error:
            return RewardFailure(error.kind, f"the reward process {error}. {about}"), {}
        except Exception as error:  # whatever happens, the caller waits for a result
            reason = f"the row cannot be sent to the reward functions: {error}. {about}"
            return RewardFailure("error", reason), {}
        with self._lock:
            self._load.note(reply.seconds, reply.cpu_s)
        if reply.reason:
            return RewardFailure("error", self._with_remedy(reply.reason)), {}
        return reply.scores, reply.logged

    def _with_remedy(self, reason: str) -> str:
        if re.search("MemoryError|allocate memory", reason):
            return reason + self._more_memory
        return reason
