"""Reward functions in a process that can be killed: no reward can stop, stall or crash the run.

A thread asks the worker, because a deadline must hold while the sampler's own thread is inside the engine. A job that
exceeds its deadline, kills its process or raises becomes a RewardFailure and is not tried again; the worker is killed
with all that it started, and replaced. One that died while idle is replaced without failing a job. Nothing is pickled.
Left out: several jobs share one interpreter until it is killed.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from common.config import Rewards
from common.errors import UserError
from common.outcomes import shorten
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
        self._thread = ThreadPoolExecutor(1)  # it also starts the fork server
        self._results: queue.SimpleQueue[tuple[Hashable, Scores | RewardFailure]] = queue.SimpleQueue()

    def __enter__(self) -> RewardPool:
        try:
            self._thread.submit(self._require_worker).result()
        except BaseException as error:  # Ctrl-C included: __exit__ is not called when __enter__ raises
            self.__exit__()
            raise (UserError(str(error)) if isinstance(error, StartError) else error) from None
        return self

    def __exit__(self, *exception: object) -> None:
        self._workers.close()
        self._thread.shutdown(cancel_futures=True)
        self._drop_worker()

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
        self._thread.submit(self._serve, key, job)
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

    # ---- in the thread ----

    def _serve(self, key: Hashable, job: Job) -> None:
        """Every job gets exactly one result."""
        self._results.put((key, result := self._result_of(job)))
        if isinstance(result, RewardFailure) and result.kind != "error":
            self._drop_worker()  # behind the result, which need not wait for its end
        with contextlib.suppress(StartError):  # the next job tries again and reports it
            self._require_worker()  # now, so that the next job need not wait for the replacement

    def _require_worker(self) -> Worker:
        """The worker, replaced if there is none or the one there was has died while idle. Raises StartError."""
        if self._worker is not None and not self._worker.has_ended():
            return self._worker
        self._drop_worker()
        self._worker = self._workers.fork()
        try:
            reply = self._worker.ask(None, JobReply, START_TIMEOUT_S)
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
            reply = self._require_worker().ask(job, JobReply, self._timeout_s)
            if not reply.reason and len(reply.scores) != len(job.completions):
                raise LostError("answered something else than it was asked")
        except StartError as error:
            return RewardFailure("crash", str(error))
        except LostError as error:
            return RewardFailure("timeout" if error.timed_out else "crash", f"the reward process {error}. {about}")
        except (TypeError, ValueError, OverflowError) as error:
            return RewardFailure("error", f"the row cannot be sent to the reward functions: {error}. {about}")
        if reply.reason:
            return RewardFailure("error", reply.reason)
        self.logged |= reply.logged
        return reply.scores
