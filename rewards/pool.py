"""Reward functions in processes that can be killed: no reward can stop, stall or crash the run.

Threads ask the workers, because a deadline must hold while the sampler's own thread is inside the engine. A job that
exceeds its deadline, kills its process or raises becomes a RewardFailure and is not tried again; the worker is killed
with all that it started, and replaced. Groups are scored side by side, in as many processes as are worth their cost
(load.py); one that hangs is not counted. Left out: several jobs share one interpreter until it is killed.
"""

from __future__ import annotations

import contextlib
import math
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from common.config import MAX_REWARD_WORKERS, Rewards
from common.errors import UserError
from common.outcomes import shorten
from common.processes.exits import say
from common.worker import WorkerSetup, encode
from common.worker.owner import LossKind, LostError, StartError, Worker, Workers
from rewards import Scores
from rewards.find import Wanted
from rewards.load import Load
from rewards.service import Job, JobReply, RewardSetup


@dataclass(frozen=True)
class RewardFailure:
    """A group without scores, and why. timeout: killed at the deadline. crash: its process died. error: it raised.

    lost: the process that reward processes are forked from died, for which no function is to blame.
    """

    kind: LossKind | Literal["error"]
    reason: str


class RewardPool:
    """A pool of processes that score groups while sampling goes on.

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
        """Prepares the pool. image_key: a column that functions get only if they name it: its values are megabytes.
        has_rollouts: if False, functions that need a rollout are not called (`wanted.needs_rollout`)."""
        self._image_key = image_key
        self.logged: dict[str, float] = {}  # by log_metric, of the newest job that logged the name
        self.pending = 0  # submitted and not yet returned by ready()
        self.wanted = Wanted()  # what the functions want; known once entered
        names = None if columns is None else [*columns, *([image_key] if image_key else [])]
        given = config.reward_funcs, config.weights, names, config.reward_kwargs
        setup = RewardSetup(*given, max_steps, has_rollouts, config.timeout_s)
        memory = int(config.max_memory_gib * 2**30)
        self._more_memory = f"; allow more: rewards.max_memory_gib={2 * config.max_memory_gib:g}"
        self._workers = Workers(WorkerSetup("rewards.service:RewardService", encode(setup), memory), "rewards")
        self._timeout_s, self._import_timeout_s = config.timeout_s, config.import_timeout_s
        self.patience_s = config.timeout_s + config.import_timeout_s  # the longest job: its process may be a new one
        models = config.arguments_of_built_in("classifier")  # each process would load them
        self._num_workers = config.num_workers or (1 if models else None)
        self._threads = ThreadPoolExecutor(MAX_REWARD_WORKERS)  # they also start the fork server
        self._results = queue.SimpleQueue[tuple[Hashable, Scores | RewardFailure, dict[str, float]]]()
        self._lock = threading.Lock()  # protects all below
        self._waiting: deque[tuple[Hashable, Job]] = deque()
        self._idle: list[Worker] = []
        self._busy: dict[int, float] = {}  # by the job's id: when its worker was asked; ∞: its process is starting
        self._load = Load()

    def __enter__(self) -> RewardPool:
        try:
            self._idle.append(self._threads.submit(self._new_worker).result())
        except BaseException as error:  # Ctrl-C included: __exit__ is not called when __enter__ raises
            self.__exit__()
            raise (UserError(str(error)) if isinstance(error, StartError) else error) from None
        return self

    @property
    def image_key(self) -> str | None:
        """Returns the column of a row's images; None if no function names that column."""
        return self._image_key if self._image_key in self.wanted.names else None

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._waiting.clear()
        self._workers.close()
        self._threads.shutdown(cancel_futures=True)
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

        completions: texts, or for rollouts of several turns the messages after the prompt. completion_ids: one list or
        integer array per completion. columns: one data set row, read-only from here on; the process gets of it what the
        functions name and, where one takes `**columns`, the rest but for files. policy_version: what reward functions
        get as trainer_state.global_step. more: environment_rewards, the environment's reward of each completion,
        environments, the `Done.state` of each, and scored_by, as in Problem.
        """
        named, rest = self.wanted.names, self.wanted.rest
        files = {self._image_key, *(name for name, value in columns.items() if _holds_bytes(value))}
        row = {k: value for k, value in columns.items() if k in named or (rest and k not in files)}
        lists = {name: list(values) for name, values in more.items()}
        job = Job(prompt_messages, list(completions), list(completion_ids), row, policy_version, **lists)
        self.pending += 1
        with self._lock:
            self._waiting.append((key, job))
        self._start_waiting()

    def ready(self, timeout_s: float = 0.0) -> list[tuple[Hashable, Scores | RewardFailure]]:
        """Returns finished jobs, in any order. Waits up to timeout_s for the first, but not if none is pending."""
        self._start_waiting()  # a worker may hang by now
        finished: list[tuple[Hashable, Scores | RewardFailure]] = []
        wait_s = timeout_s if self.pending else 0.0
        with contextlib.suppress(queue.Empty):
            while True:
                key, result, logged = self._results.get(block=wait_s > 0, timeout=wait_s or None)
                finished.append((key, result))
                self.logged |= logged  # not in a thread: it must not change what the caller iterates over
                wait_s = 0.0
        self.pending -= len(finished)
        return finished

    def _start_waiting(self) -> None:
        """Starts as many waiting jobs as there are processes, or may be. One that hangs does not count."""
        with self._lock:
            # a group that takes 1 s more than four others take may never end
            late_since = time.monotonic() - 1.0 - 4 * self._load.seconds
            while self._waiting:
                num_late = sum(asked_s < late_since for asked_s in self._busy.values())
                num_useful = len(self._busy) + len(self._idle) - num_late
                worth = num_late + self._load.num_worth(max(1, num_useful), len(self._waiting))
                if len(self._busy) >= (self._num_workers or min(MAX_REWARD_WORKERS, worth)):
                    return
                worker = self._idle.pop() if self._idle else None
                key, job = self._waiting.popleft()
                self._busy[id(job)] = math.inf
                self._threads.submit(self._serve, worker, key, job)

    # ---- in the threads ----

    def _serve(self, worker: Worker | None, key: Hashable, job: Job) -> None:
        """Serves a job in a worker. Every job gets exactly one result."""
        is_another, trouble = worker is None, ""
        if worker is None or worker.has_ended():
            worker, trouble = self._replace(worker)
        if worker is None and is_another and self._continue_without(key, job, trouble):
            return
        result, logged = self._score(worker, job) if worker else (RewardFailure("lost", trouble), {})
        self._results.put((key, result, logged))
        if isinstance(result, RewardFailure) and result.kind != "error":  # after the result, which need not wait
            worker, _ = self._replace(worker)  # now, so that the next job need not wait, either
        with self._lock:
            del self._busy[id(job)]
            if worker is not None:
                self._idle.append(worker)
        self._start_waiting()

    def _continue_without(self, key: Hashable, job: Job, trouble: str) -> bool:
        """Returns whether other workers continue alone: a file's import may take what only one process can have."""
        with self._lock:
            if (others := len(self._busy) + len(self._idle) - 1) < 1:
                return False
            self._num_workers = others
            del self._busy[id(job)]
            self._waiting.appendleft((key, job))
        say(f"rewards: no more than {others} processes score groups, because another cannot start: {trouble}")
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
            limit = f"; allow more: rewards.import_timeout_s={2 * self._import_timeout_s:g}" if error.timed_out else ""
            raise StartError(f"the reward process {error}. It was importing the reward functions{limit}") from error
        if reply.wanted is None:
            worker.close()
            raise StartError(self._with_remedy(reply.reason))
        self.wanted = reply.wanted
        return worker

    def _score(self, worker: Worker, job: Job) -> tuple[Scores | RewardFailure, dict[str, float]]:
        about = f"First completion: {shorten(job.completions[0])}" if job.completions else "No completions"
        try:
            self._busy[id(job)] = time.monotonic()
            reply = worker.ask(job, JobReply, self._timeout_s)
        except LostError as error:
            return RewardFailure(error.kind, f"the reward process {error}. {about}"), {}
        except Exception as error:  # a result is owed whatever happens, also for messages that cannot be encoded
            reason = f"the row cannot be sent to the reward functions: {error}. {about}"
            return RewardFailure("error", reason), {}
        with self._lock:
            self._load.note(reply.seconds, reply.cpu_s)
        if reply.reason:
            return RewardFailure("error", self._with_remedy(reply.reason)), {}
        return reply.scores, reply.logged

    def _with_remedy(self, reason: str) -> str:
        return reason + self._more_memory * bool(re.search("MemoryError|allocate memory", reason))


def _holds_bytes(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_bytes, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_bytes, value))
    return isinstance(value, bytes | bytearray | memoryview)
