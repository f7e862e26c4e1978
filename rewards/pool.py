"""Reward functions in processes that can be killed: no reward can stop, stall or crash the run.

One thread per worker owns one process, because PR_SET_PDEATHSIG ends a child with the *thread* that started it and
because a deadline must hold while the sampler's own thread is inside the engine. A job that exceeds its deadline, kills
its process or raises becomes a RewardFailure, is counted, and is not tried again; the process group is killed with
SIGKILL and replaced. A process that died while idle is replaced without failing a job. Nothing is pickled. Left out: a
daemon that a reward detaches with setsid survives, and several jobs share one interpreter until it is killed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from common.config import Rewards
from common.errors import UserError
from common.worker_process import StartError
from rewards import RewardError, Scores
from rewards.process import LostError, RewardProcess
from rewards.worker import Job, RewardSetup


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

    Entering starts the processes and raises UserError when a function cannot be found, imported, or, with `columns`,
    called with these columns. Use from one thread.
    """

    def __init__(
        self, config: Rewards, num_workers: int = 1, columns: Iterable[str] | None = None, max_steps: int = 0
    ) -> None:
        self.logged: dict[str, float] = {}  # by log_metric, of the newest job that logged the name
        self.num_timeouts = self.num_crashes = self.num_errors = 0
        self.pending = 0  # submitted and not yet returned by ready()
        names = None if columns is None else list(columns)
        max_memory = int(config.max_memory_gib * 2**30)
        setup = RewardSetup(config.reward_funcs, config.weights, names, max_memory, config.reward_kwargs, max_steps)
        self._jobs: queue.SimpleQueue[tuple[Hashable, Job] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Hashable, Scores | RewardFailure]] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[StartError | LostError | None] = queue.SimpleQueue()
        self._processes = [RewardProcess(setup, config.timeout_s) for _ in range(num_workers)]
        self._threads = [threading.Thread(target=self._serve, args=(p,), daemon=True) for p in self._processes]

    def __enter__(self) -> RewardPool:
        for thread in self._threads:
            thread.start()
        try:
            problems = [problem for _ in self._threads if (problem := self._started.get()) is not None]
            if problems:
                raise UserError(str(problems[0]))
        except BaseException:  # Ctrl-C during the start included: __exit__ is not called when __enter__ raises
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.close()
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)

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
        integer array per completion. columns: one data set row, read-only from here on.
        policy_version: what reward functions get as trainer_state.global_step. of_environments: environment_rewards,
        what the environment of each completion said, and environments, the `Done.state` of each.
        """
        theirs = {name: list(values) for name, values in of_environments.items()}
        job = Job(0, prompt_messages, list(completions), list(completion_ids), dict(columns), policy_version, **theirs)
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
        kinds = [result.kind for _, result in finished if isinstance(result, RewardFailure)]
        self.num_timeouts += kinds.count("timeout")
        self.num_crashes += kinds.count("crash")
        self.num_errors += kinds.count("error")
        return finished

    def _serve(self, process: RewardProcess) -> None:
        """The thread of one process: every job gets exactly one result."""
        try:
            process.ensure_alive()
            self._started.put(None)
        except (StartError, LostError) as problem:
            self._started.put(problem)
        while (item := self._jobs.get()) is not None:
            key, job = item
            self._results.put((key, self._result_of(process, job)))
            with contextlib.suppress(StartError, LostError):  # the next job tries again and reports it
                process.ensure_alive()  # now, so that the next job need not wait for the replacement

    def _result_of(self, process: RewardProcess, job: Job) -> Scores | RewardFailure:
        try:
            reply = process.run(job)
            self.logged |= reply.logged
            return reply.scores
        except LostError as error:
            return RewardFailure("timeout" if error.timed_out else "crash", str(error))
        except StartError as error:
            return RewardFailure("crash", str(error))
        except RewardError as error:
            return RewardFailure("error", str(error))
        except Exception as error:  # a result is owed whatever happens: without it the sampler waits for ever
            return RewardFailure("crash", f"{type(error).__name__}: {error}")
